"""A study that processes share outlives them, and its database; on SQLite and on PostgreSQL.

A run and a worker measure rounds of one race. One of them is killed, or the database goes,
loses its connections or is locked; in the end each trial is there once, with the same answer.
"""

from __future__ import annotations

import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from support.fault_parts import PATIENCE_S, Marked, Tally, at_instant, ended, how_many, marked
from support.fault_runs import TOY, Ended, Run, left_alone
from support.postgres import PostgresServer, postgres
from support.toy_tune import command, write_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(86_400)]

SLOW = {**TOY, "pause_s": 0.3}
"""So that a worker has time to join."""
MAX_RESUMES = 6


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    """Run a PostgreSQL that these tests alone use."""
    with postgres() as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return what comes of the run when it is left alone."""
    return left_alone(tmp_path_factory.mktemp("undisturbed") / "home")


class Shared:
    """A run and a worker on one study."""

    def __init__(self, run: Run, ours: Marked, url: str) -> None:
        self.run, self.ours, self.url = run, ours, url
        self.worker: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """Have a worker take rounds, as soon as there is a run."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (self.run.path / "run.json").exists():
            assert time.monotonic() < deadline_s, self.run.said()
            assert self.run.process is not None
            assert self.run.process.poll() is None, self.run.said()
            time.sleep(0.02)
        words = ["worker", "--storage", self.url, "--run", str(self.run.path)]
        self.worker = self.ours.start(command(words, **SLOW), self.run.log)

    def psql(self, statement: str) -> None:
        """Have PostgreSQL do something."""
        import psycopg

        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(statement.encode())


Fault = Callable[[random.Random, Shared, PostgresServer | None], None]


def _run_killed(_: random.Random, shared: Shared, __: PostgresServer | None) -> None:
    shared.run.note()
    assert shared.run.process is not None
    shared.run.process.kill()


def _worker_killed(_: random.Random, shared: Shared, __: PostgresServer | None) -> None:
    assert shared.worker is not None
    shared.worker.kill()
    shared.join()


def _restarted(rng: random.Random, _: Shared, server: PostgresServer | None) -> None:
    assert server is not None
    server.stop()
    time.sleep(rng.uniform(0.0, 5.0))
    server.start()


def _connections_cut(rng: random.Random, shared: Shared, __: PostgresServer | None) -> None:
    for _ in range(rng.randrange(1, 4)):
        shared.psql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        time.sleep(rng.uniform(0.0, 0.5))


def _tables_locked(rng: random.Random, shared: Shared, _: PostgresServer | None) -> None:
    seconds = rng.uniform(0.5, 4.0)
    with suppress(Exception):
        shared.psql(
            "BEGIN; LOCK TABLE trials, trial_user_attributes IN ACCESS EXCLUSIVE MODE; "
            f"SELECT pg_sleep({seconds}); COMMIT"
        )


def _file_locked(rng: random.Random, shared: Shared, _: PostgresServer | None) -> None:
    path = shared.url.removeprefix("sqlite:///")
    with (
        suppress(sqlite3.OperationalError),
        closing(sqlite3.connect(path, timeout=5, isolation_level=None)) as connection,
    ):
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(rng.uniform(0.5, 4.0))
        connection.execute("ROLLBACK")


ON_POSTGRES: dict[str, Fault] = {
    "PostgreSQL: restarted": _restarted,
    "PostgreSQL: connections cut": _connections_cut,
    "PostgreSQL: tables locked": _tables_locked,
    "PostgreSQL: run killed": _run_killed,
    "PostgreSQL: worker killed": _worker_killed,
}
ON_SQLITE: dict[str, Fault] = {
    "SQLite, shared: locked": _file_locked,
    "SQLite, shared: run killed": _run_killed,
    "SQLite, shared: worker killed": _worker_killed,
}


def disturbed(
    rng: random.Random,
    shared: Shared,
    fault: Fault,
    server: PostgresServer | None,
    took_s: float,
) -> None:
    """Run to the end with one fault, resuming where it was killed."""
    run = shared.run
    for attempt in range(MAX_RESUMES):
        process = run.begin()
        if attempt == 0:
            shared.join()
            if at_instant(rng, process, took_s):
                fault(rng, shared, server)
        code = ended(process)
        if code == 0:
            assert shared.worker is not None
            worked = ended(shared.worker)
            # Who comes to a database that is away is told so; who was there waits for it.
            is_refused = "storage cannot be opened" in run.log.read_text()
            assert worked == 0 or (worked == 2 and is_refused), f"{worked}: {run.said()}"
            run.check_after(0)
            return
        assert code in {-9, 2, 4}, run.said()
        assert "Traceback" not in run.said(), run.said()
    raise AssertionError(f"not at its end after {MAX_RESUMES} resumes: {run.said()}")


def campaign(
    tally: Tally,
    folder: Path,
    kinds: dict[str, Fault],
    count: int,
    url_of: Callable[[Path], str],
    undisturbed: Ended,
    server: PostgresServer | None = None,
) -> None:
    """Disturb so many runs, each with a study of its own."""
    trace = write_trace(folder / "t.jsonl", n=120)
    for number in range(count):
        kind = list(kinds)[number % len(kinds)]
        rng, home = random.Random(f"{kind} {number}"), folder / f"home{number}"
        home.mkdir()
        with marked("shared") as ours, tally.fault(kind, f"number {number}"):
            url = url_of(home)
            run = Run(home, ours, trace, more=("--storage", url), toy=SLOW)
            disturbed(rng, Shared(run, ours, url), kinds[kind], server, undisturbed.took_s)
            run.check_whole(undisturbed)


def test_a_study_on_postgresql_outlives_its_server_and_its_processes(
    own: PostgresServer,
    undisturbed: Ended,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally, count = Tally(), how_many(request, 5, 0.03)
    url = f"postgresql+psycopg://{own.address}/postgres"
    campaign(tally, tmp_path, ON_POSTGRES, count, lambda _: url, undisturbed, own)
    tally.report(record_property)


def test_a_study_on_sqlite_outlives_its_processes(
    undisturbed: Ended,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    tally, count = Tally(), how_many(request, 3, 0.02)
    campaign(
        tally,
        tmp_path,
        ON_SQLITE,
        count,
        lambda home: f"sqlite:///{home}/shared.db",
        undisturbed,
    )
    tally.report(record_property)
