"""Database connections that several processes of a run can share.

Answers whether a database was ever used for studies, what its transactions need so that no two
processes believe the same thing is theirs, and how long one that went away is waited for.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from tuner.errors import StorageError
from tuner.replay.signals import undisturbed
from tuner.run.directory import STUDY_FILE, TRIALS_FILE

R = TypeVar("R")

# How long a process waits while others write to the same SQLite file: ours; a write takes
# milliseconds, so this is reached only where something hangs.
BUSY_S = 60


# How long a server that went away is waited for: ours; a restart takes seconds, a failover to
# another machine a minute.
AWAY_S = 120.0
_MAX_REASON = 200
"""Characters of a database's words, which may quote a whole trial."""
_LOOK_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0)


def is_sqlite(url: str) -> bool:
    """Whether the database is a SQLite file."""
    return make_url(url).get_backend_name() == "sqlite"


def engine_options(url: str) -> dict[str, Any]:
    """Return what SQLAlchemy is told when it connects."""
    return {"connect_args": {"timeout": BUSY_S}} if is_sqlite(url) else {"pool_pre_ping": True}


def holds_studies(url: str) -> bool:
    """Tell whether the database has Optuna's tables, and create nothing.

    SQLite would create an empty file where a path is mistyped, and read one that is damaged as
    one that holds less.

    Raises: SQLAlchemyError if the database cannot be reached; StorageError if it is damaged.
    """
    file = make_url(url).database or ""
    if is_sqlite(url) and not file.startswith("file:") and not Path(file).is_file():
        return False
    engine = create_engine(url, **engine_options(url))
    try:
        if is_sqlite(url):
            with engine.connect() as connection:
                found = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
            if found != "ok":
                raise is_damaged(found)
        return inspect(engine).has_table("studies")
    finally:
        engine.dispose()


def is_damaged(reason: str) -> StorageError:
    """Return the error of a study that holds what cannot be."""
    return StorageError(
        f"the study of this run is damaged: {_shortened(reason)}",
        f"move {STUDY_FILE} away, or name another --storage: --resume restores the trials from "
        f"{TRIALS_FILE}",
    )


def opened(url: str, heartbeat_s: int, grace_s: int, *, join: bool) -> RDBStorage:
    """Return the storage; who joins creates neither its tables nor an empty file.

    Raises: KeyError if there is nothing to join; StorageError if it is damaged;
        SQLAlchemyError, StorageInternalError, ImportError or ValueError if the database cannot
        be opened.
    """
    if join and not holds_studies(url):
        raise KeyError(url)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        storage = RDBStorage(
            url,
            engine_options(url),
            heartbeat_interval=heartbeat_s,
            grace_period=grace_s,
            skip_table_creation=join,
        )
    _make_shareable(storage.engine)
    return storage


def _make_shareable(engine: Engine) -> None:
    """Let every connection made from now on be safe among several processes.

    A SQLite transaction takes the write lock when it begins. By default it would do so only
    at its first write, and of two processes that both read a trial as waiting both would
    claim it. PostgreSQL locks the row; its sessions keep UTC, as Optuna stores heartbeats
    without a zone, and they must not jump with the clocks.

    Source: SQLAlchemy's manual, SQLite dialect, on pysqlite's transactions.
    """
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _lock_for_writing)
    elif engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _keep_utc)
    engine.dispose()  # connections from before the listeners were there


def _leave_transactions_to_us(connection: Any, _record: object) -> None:  # noqa: ANN401
    connection.isolation_level = None


def _lock_for_writing(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _keep_utc(connection: Any, _record: object) -> None:  # noqa: ANN401
    with connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'UTC'")
    connection.commit()


def is_away(error: BaseException) -> bool:
    """Return whether a database server cannot be reached now, as while it restarts."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, DBAPIError):
            is_server = not type(at.orig).__module__.startswith("sqlite3")
            is_cut = isinstance(at, OperationalError | InterfaceError)
            return is_server and (is_cut or at.connection_invalidated)
        at = at.__cause__ or at.__context__
    return False


class Outages:
    """Waits for a database server that went away, and keeps in mind when it was last back."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._back_s = -math.inf
        self.were_any = False
        """Whether the server ever was away, so that something may have been done twice."""

    def since_s(self) -> float:
        """Return for how long the server has been there again."""
        return time.monotonic() - self._back_s

    def outlast(self, call: Callable[[], R]) -> R:
        """Return what a call returns, called again for as long as the server is away.

        What is called may be called twice, though the first time did all: the answer alone may
        be what got lost. A signal ends the wait.

        Raises: StorageError when patience ends, or for what no wait mends.
        """
        began_s, waits_s = time.monotonic(), iter(_LOOK_AGAIN_S)
        wait_s, is_said = 0.0, False
        while True:
            try:
                result = call()
            except (StorageInternalError, SQLAlchemyError) as error:
                if not is_away(error) or time.monotonic() - began_s > AWAY_S:
                    raise _failed(error) from error
                self.were_any = True
                if not is_said:
                    self._note(f"the study's storage is away: {_reason(error)}; waiting for it")
                    is_said = True
                wait_s = next(waits_s, wait_s)
                time.sleep(wait_s)
                continue
            if is_said:
                self._back_s = time.monotonic()
                self._note("the study's storage is back")
            return result


def _failed(error: Exception) -> StorageError:
    if is_away(error):
        return StorageError(
            f"the study's storage has been away for {AWAY_S:.0f} s: {_reason(error)}",
            "what was measured is kept: go on with --resume once it is back",
        )
    return StorageError(
        f"the study's storage failed: {_reason(error)}",
        "what was measured is kept in trials.jsonl: free space if there is none; if the study "
        "is damaged, move it away, and --resume restores its trials",
    )


def _reason(error: BaseException) -> str:
    """Return the first line of what the database said, without what it quotes at length."""
    at: BaseException = error
    while not isinstance(at, DBAPIError) and (cause := at.__cause__ or at.__context__):
        at = cause
    text = str(at.orig if isinstance(at, DBAPIError) else at).strip()
    return _shortened(text or type(at).__name__)


def _shortened(text: str) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}…"


class Heart:
    """A call every so often, from a daemon thread that dies with the process.

    Units: interval_s in seconds; the first call comes after one interval.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._beat()

    def stop(self) -> None:
        """Beat no more; a beat that hangs is not waited for longer than one interval."""
        self._stopped.set()
        self._thread.join(self._interval_s)


Class = TypeVar("Class", bound=type)
P = ParamSpec("P")


def undisturbed_methods(cls: Class) -> Class:
    """Run every public method and property of a class, and its making, undisturbed."""
    return _wrapped_methods(cls, _undisturbed, "__init__")


def outlasting_methods(cls: Class) -> Class:
    """Run every public method and property of a class for as long as its storage is away.

    The class has `outages`. Outside of `undisturbed_methods`, so that a signal ends the wait.
    """
    return _wrapped_methods(cls, _outlasting)


def _wrapped_methods(cls: Class, wrap: Callable[..., Any], *more: str) -> Class:
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name not in more:
            continue
        if isinstance(value, FunctionType):
            setattr(cls, name, wrap(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(cls, name, property(wrap(value.fget), doc=value.__doc__))
    return cls


def _outlasting(call: Callable[..., R]) -> Callable[..., R]:
    @wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> R:  # noqa: ANN401 - as is wrapped
        outages: Outages = self.outages
        return outages.outlast(lambda: call(self, *args, **kwargs))

    return called


def _undisturbed(call: Callable[P, R]) -> Callable[P, R]:
    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with undisturbed():
            return call(*args, **kwargs)

    return called
