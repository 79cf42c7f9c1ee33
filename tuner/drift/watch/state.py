"""A watch's state on disk: one file, replaced whole, in a directory that one watch owns.

Answers what was going on when the process last lived, however it died. Files: `state.json`
(mode 0600, for it keeps the text of the file that a change replaced), `traffic-N.json` (the
traffic that a handed-over configuration was tuned for), `.lock`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

import msgspec

from tuner.drift.watch.policy import Memory, forgotten
from tuner.engine.limits import EngineLimits
from tuner.errors import TunerError, UsageError
from tuner.files import ExpectedText, lock, write_atomic
from tuner.traffic.sketch import TrafficSketch, read_sketch, write_sketch

STATE_FILE: Final = "state.json"
SCHEMA: Final = 2


class Stage(StrEnum):
    """How far a hand-over has come; each is on disk before what follows it is begun."""

    DECIDED = "decided"
    WRITTEN = "written"
    ON_GUARD = "on guard"


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A change on its way: from which limits and file to which, and how far it has come.

    `had_file`: `old_text` stood in the file; else it is what would have stood there.
    `is_rollback` is the way back, which is not guarded. `restarted` names the engines that the
    guard has seen restart since.

    Units: Unix seconds.
    """

    old: EngineLimits
    new: EngineLimits
    old_text: str
    new_text: str
    has_secrets: bool
    why: str
    decided_s: float
    old_traffic: str = ""
    new_traffic: str = ""
    stage: Stage = Stage.DECIDED
    handed_s: float = 0.0
    hook_tries: int = 0
    is_rollback: bool = False
    had_file: bool = True
    restarted: tuple[str, ...] = ()

    @property
    def expected(self) -> ExpectedText:
        """What the file must still hold when the new text takes its place."""
        return ExpectedText(self.old_text if self.had_file else None)


@dataclass(frozen=True, slots=True)
class Counts:
    """How often what happened since the state began, for the metrics."""

    checks: Mapping[str, int] = field(default_factory=dict)
    errors: int = 0
    changes: int = 0
    rollbacks: int = 0


@dataclass(frozen=True, slots=True)
class Last:
    """The last verdict and the last error, for people and probes.

    Units: Unix seconds; 0 where there was none.
    """

    check_s: float = 0.0
    verdict: str = ""
    why: str = ""
    act: str = ""
    gain_ratio: float | None = None
    error_s: float = 0.0
    error: str = ""
    guard: str = ""


@dataclass(frozen=True, slots=True)
class WatchState:
    """All that a watch remembers.

    `current` is what was handed over last, None before that. `traffic` names the file of what
    it was tuned for, empty for the profile's own.
    """

    schema: int = SCHEMA
    profile_sha256: str = ""
    memory: Memory = field(default_factory=Memory)
    current: EngineLimits | None = None
    traffic: str = ""
    handover: RolloutRecord | None = None
    counts: Counts = field(default_factory=Counts)
    last: Last = field(default_factory=Last)

    def for_profile(self, sha256: str) -> WatchState:
        """Return the state for a profile: a new one lifts what the old one had barred."""
        if sha256 == self.profile_sha256:
            return self
        memory = replace(forgotten(self.memory), barred=())
        return replace(self, profile_sha256=sha256, memory=memory, traffic="")


class StateDir:
    """A directory that one watch at a time owns, and the state that it goes by.

    Raises: UsageError if it cannot be used, or another watch is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, WatchState()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(
                path / ".lock",
                f"another watch is using {path}",
                "wait for it, or name another directory with --state",
            )
            for left in path.glob(f".{STATE_FILE}.*"):
                # Of a process that was killed while it wrote.
                left.unlink()
        except OSError as error:
            raise UsageError(
                f"state directory {path} cannot be used: {error.strerror or error}",
                "name another with --state",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def load(self) -> tuple[WatchState, str]:
        """Return the state, and a message where the file is damaged.

        A damaged file is set aside, and the state begins anew.
        """
        path = self.path / STATE_FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return WatchState(), ""
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        try:
            state = msgspec.json.decode(content, type=WatchState)
        except (msgspec.MsgspecError, TunerError, ValueError) as error:
            return WatchState(), self._set_aside(STATE_FILE, str(error))
        if state.schema != SCHEMA:
            reason = f"schema must be {SCHEMA}, got {state.schema}"
            return WatchState(), self._set_aside(STATE_FILE, reason)
        return state, ""

    def save(self, state: WatchState) -> None:
        """Put a state on disk whole or not at all, and then go by it.

        Raises: UsageError if it cannot be written.
        """
        path = self.path / STATE_FILE
        text = msgspec.json.format(msgspec.json.encode(state), indent=1).decode()
        try:
            write_atomic(path, text + "\n", secret=True)
        except UsageError as error:
            raise UsageError(error.message, "free space there; nothing was changed") from error
        self.state = state

    def update(self, **changes: object) -> None:
        """Save the state with some of it changed. Raises: UsageError, as `save`."""
        self.save(replace(self.state, **changes))  # type: ignore[arg-type]

    def keep_traffic(self, sketch: TrafficSketch, now_s: float) -> str:
        """Write a sketch beside the state and return its file's name. Raises: UsageError."""
        name = f"traffic-{_stamp(now_s)}.json"
        write_sketch(self.path / name, sketch)
        return name

    def traffic(self, name: str) -> tuple[TrafficSketch | None, str]:
        """Return a stored sketch; None, and why, where it is gone or damaged."""
        try:
            return read_sketch(self.path / name), ""
        except UsageError as error:
            return None, self._set_aside(name, error.message)

    def _set_aside(self, name: str, reason: str) -> str:
        """Rename a damaged file so that people can inspect it; return the message."""
        path = self.path / name
        stamp = _stamp(datetime.now(UTC).timestamp())
        aside = path.with_name(f"{name}.damaged-{stamp}")
        message = f"{path} is damaged and was set aside as {aside.name}: {reason}"
        try:
            path.replace(aside)
        except FileNotFoundError:
            return f"{path} is gone"
        except OSError as error:
            raise UsageError(
                f"{path} is damaged and cannot be set aside: {error.strerror}",
                "remove it, or name another directory with --state",
            ) from error
        return message

    def forget_traffic_but(self, *names: str) -> None:
        """Remove the sketches that nothing refers to any more."""
        for path in self.path.glob("traffic-*.json"):
            if path.name not in names:
                with suppress(OSError):
                    path.unlink()


def _stamp(at_s: float) -> str:
    """Return an instant as a part of a file name.

    >>> _stamp(0.0)
    '1970-01-01T00-00-00'
    """
    return f"{datetime.fromtimestamp(at_s, tz=UTC):%Y-%m-%dT%H-%M-%S}"
