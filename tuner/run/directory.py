"""The run directory: everything a run leaves behind, and what it needs to go on.

Files: `run.json` (options and choices, without secrets), `study.db` (the Optuna study),
`trials.jsonl` (one line per trial), `result.json` (the outcome so far), `profile.yaml` (what
was learned of the engine), `steps.jsonl` (every step that it was learned from, packed),
`traffic.json` (a sketch of the trace), `timelines.json`, `report.html`, `engine.log`. Every
file is replaced whole, so a kill at any instant leaves the last state; steps alone are added,
and their last line may be half a line. No secret stands in any of them but the engine's log,
which its owner alone reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from tuner.errors import UsageError
from tuner.files import lock, write_atomic
from tuner.redact import redacted_content
from tuner.traffic.sketch import TRAFFIC_FILE

COMPARE_FILE = "compare.json"
"""The name under which a comparison is kept in a run directory."""
TIMELINES_FILE = "timelines.json"
RUN_FILE = "run.json"
RESULT_FILE = "result.json"
PROFILE_FILE = "profile.yaml"
TRIALS_FILE = "trials.jsonl"
STEPS_FILE = "steps.jsonl"
LOCK_FILE = ".lock"
STUDY_FILE = "study.db"
ENGINE_LOG = "engine.log"
# What a run puts there before it has measured anything: its choices, a profile that it was
# given, and logs. SQLite keeps a transaction beside its file.
_BEFORE_ANY_TRIAL = {
    *(LOCK_FILE, ENGINE_LOG, RUN_FILE, PROFILE_FILE, STUDY_FILE),
    *(f"{STUDY_FILE}{ending}" for ending in ("-journal", "-wal", "-shm")),
}
# What a run replaces without looking, and which another one, or a user, may have put there.
_REPLACED = (PROFILE_FILE, RESULT_FILE, TRIALS_FILE, TRAFFIC_FILE, TIMELINES_FILE)


def folder_of_run(named: Path) -> Path:
    """Return the run directory that a path names, by itself or by the result in it.

    >>> str(folder_of_run(Path("runs/no-such-run")))
    'runs/no-such-run'
    """
    return named.parent if named.name == RESULT_FILE and named.is_file() else named


class RunDir:
    """A directory that one run at a time owns.

    `is_measured` is to be set before the first trial is kept; what was measured is never
    discarded.

    Raises: UsageError if it cannot be made, holds a run already or a file that a run would
        replace (unless resumed), or is in use by another process.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.is_measured = False
        if resume and not (path / RUN_FILE).is_file():
            raise UsageError(
                f"{path} holds no run to resume: {RUN_FILE} is missing",
                "name a run directory, as the line 'evidence:' of an emitted file does",
            )
        if not resume and (path / RUN_FILE).exists():
            raise UsageError(
                f"{path} holds a run already",
                f"go on with --resume {path}, or name another --run-dir",
            )
        there = [name for name in _REPLACED if (path / name).exists()]
        # With a lock beside it, it is of a run that a kill ended at its very start.
        if there and not resume and not (path / LOCK_FILE).exists():
            raise UsageError(
                f"{path} holds {', '.join(there)}, in whose place a run would write its own",
                "name another --run-dir, or move that away",
            )
        self._made = [one for one in (path, *path.parents) if not one.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._was_empty = not any(path.iterdir())
            self._lock = lock(
                path / LOCK_FILE,
                f"another run is using {path}",
                "wait for it, or name another --run-dir",
            )
        except OSError as error:
            raise UsageError(
                f"run directory {path} cannot be used: {error.strerror or error}",
                "name another with --run-dir",
            ) from error

    def close(self) -> None:
        """Let others use the directory."""
        self._lock.release()

    def discard(self) -> None:
        """Remove what a run that measured nothing leaves: its files, and folders that it made.

        A folder that held anything before stays as it is, and so does one that holds anything
        but what a run puts there before its first trial.
        """
        found = {one.name for one in self.path.iterdir()}
        if self.is_measured or not self._was_empty or found - _BEFORE_ANY_TRIAL:
            return
        # The lock goes last: until then nobody else begins a run here.
        for name in sorted(found, key=lambda name: name == LOCK_FILE):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has put something there
            for folder in self._made:
                folder.rmdir()

    @property
    def engine_log(self) -> Path:
        """Where the engine's process writes."""
        return self.path / ENGINE_LOG

    @property
    def storage_url(self) -> str:
        """Return the study's own SQLite database."""
        # A directory may be called anything, and a URL's reader unquotes it.
        return f"sqlite:///{quote(str((self.path / STUDY_FILE).resolve()))}"

    def set_aside(self, name: str) -> Path:
        """Rename a file to one that nothing writes to, and return that."""
        path, count = self.path / name, 1
        while (aside := path.with_name(f"{path.stem}.{count}{path.suffix}")).exists():
            count += 1
        path.rename(aside)
        return aside

    def write_json(self, name: str, content: object) -> None:
        """Replace a JSON file whole."""
        shown = redacted_content(msgspec.to_builtins(content))
        encoded = msgspec.json.format(msgspec.json.encode(shown), indent=2)
        self._replace(name, encoded + b"\n")

    def write_lines(self, name: str, rows: Iterable[object]) -> None:
        """Replace a JSON Lines file whole."""
        shown = (redacted_content(msgspec.to_builtins(row)) for row in rows)
        self._replace(name, b"".join(msgspec.json.encode(row) + b"\n" for row in shown))

    def append_line(self, name: str, row: object) -> None:
        """Add a row to a JSON Lines file."""
        path = self.path / name
        before = path.read_bytes() if path.exists() else b""
        shown = redacted_content(msgspec.to_builtins(row))
        self._replace(name, before + msgspec.json.encode(shown) + b"\n")

    def add_line(self, name: str, row: object) -> None:
        """Add a row to a large JSON Lines file, which is not written anew for it.

        Behind half a line, as a kill may leave it, it begins another.
        """
        path = self.path / name
        line = msgspec.json.encode(msgspec.to_builtins(row)) + b"\n"
        try:
            with path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror or error}",
                f"free space and go on with --resume {self.path}",
            ) from error

    def _replace(self, name: str, content: bytes) -> None:
        hint = f"free space and go on with --resume {self.path}"
        write_atomic(self.path / name, content, hint=hint)


def new_run_path(root: Path) -> Path:
    """Return a path for a new run, named by the current time."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    path, count = root / stamp, 1
    while path.exists():
        count += 1
        path = root / f"{stamp}.{count}"
    return path
