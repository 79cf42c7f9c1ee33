"""Runs of the campaign: live ones on the toy engine, whose answer does not hang on chance."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from support.fault_parts import Marked, ended, marked
from support.toy_tune import command, lines_of, write_trace
from tuner.run.directory import TRIALS_FILE
from tuner.run.result import read_result
from tuner.run.stored import read_record
from tuner.search.judging import TIE_LOSS
from tuner.shadow.profiles import read_profile

TOY: dict[str, Any] = {"costs": {"knee": 10, "crowd_s": 0.0006}, "has_shadow": False}
"""A cap near ten is best; without a shadow nothing is learnt of it, which takes the longest."""
CLEAN = {0, 2, 4, 130}
"""Exit codes of runs that say what is wrong; 1 is a defect, and negative ones are ours."""


@dataclass(slots=True)
class Run:
    """One run on disk, and what is known of it from before faults."""

    folder: Path
    ours: Marked
    trace: Path
    environment: dict[str, str] = field(default_factory=dict)
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    more: tuple[str, ...] = ()
    """Arguments that are given at the start and again when it is resumed."""
    toy: dict[str, Any] = field(default_factory=lambda: TOY)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """What all its processes said."""
        return self.folder.parent / f"{self.folder.name}.log"

    def begin(self) -> subprocess.Popen[bytes]:
        """Start it, or go on with it where it has begun."""
        began = (self.path / "run.json").exists()
        words = ["--resume", str(self.path)] if began else self._first()
        self.process = self.ours.start(
            command([*words, *self.more], **self.toy), self.log, self.environment
        )
        return self.process

    def _first(self) -> list[str]:
        return [
            *("--trace", str(self.trace), "--run-dir", str(self.path), "--method", "live"),
            *("-o", str(self.folder / "best.yaml"), "--max-num-seqs", "4,8,16"),
            *("--budget", "90s"),
        ]

    def note(self) -> None:
        """Keep in mind what is on disk: none of it may be lost or changed from now on."""
        for trial in self.trials():
            self.kept.setdefault(trial["number"], trial)

    def trials(self) -> list[dict[str, Any]]:
        """Return what the file of trials holds; it is replaced whole, so lines are whole."""
        return lines_of(self.path / TRIALS_FILE)

    def check_after(self, code: int) -> None:
        """Check right after a fault that files are whole, and words are for people."""
        self.ours.none_left()
        assert code in CLEAN | {-signal.SIGKILL, -signal.SIGTERM}, f"{code}: {self.said()}"
        assert "Traceback" not in self.said(), self.said().partition("Traceback")[2]
        if not (self.path / "run.json").exists():
            return
        read_record(self.path)
        now = {trial["number"]: trial for trial in self.trials()}
        missing = [number for number in self.kept if number not in now]
        assert not missing or not (self.path / TRIALS_FILE).exists(), f"lost {missing}"
        for name, read in (
            ("result.json", lambda path: read_result(path.parent)),
            ("profile.yaml", read_profile),
            ("traffic.json", lambda path: msgspec.json.decode(path.read_bytes())),
        ):
            if (self.path / name).exists():
                read(self.path / name)

    def check_whole(self, undisturbed: Ended) -> None:
        """At the end: each trial once, as it was measured, and the undisturbed answer."""
        trials = self.trials()
        numbers = [trial["number"] for trial in trials]
        assert len(set(numbers)) == len(numbers), f"doubled: {numbers}"
        final = {trial["number"]: trial for trial in trials}
        for number, trial in self.kept.items():
            assert final.get(number) == trial, f"trial {number} was {trial}"
        keys = [_key(trial) for trial in trials]
        assert len(set(keys)) == len(keys), "measured twice"
        for trial in trials:
            known = undisturbed.values.get(_setting(trial))
            assert known is None or trial["value"] in (None, known), (trial, known)
        answer, best = _answer(self), undisturbed.best
        # A setting whose engine was killed under it has failed, and is out.
        out = {_limits(t) for t in trials if t["value"] is None and t["engine"] == "live"}
        if out:
            best = min(_place(t) for t in trials if t["value"] and _limits(t) not in out)
        found = min(_place(t) for t in trials if t["value"] and _limits(t) == answer)
        is_as_good = found <= (best[0], (1 + TIE_LOSS) * best[1])
        assert is_as_good, f"{answer} takes {found}, {best} was to be had"
        left = [one.name for one in self.path.iterdir() if one.name.startswith(".")]
        assert set(left) <= {".lock", ".filler"}, left

    def said(self) -> str:
        """Return the last words of its processes."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def _key(trial: dict[str, Any]) -> tuple[object, ...]:
    """Return what a trial is for; a round that a fault has split is run anew."""
    names = ("phase", "race_round", "max_num_seqs", "max_num_batched_tokens", "attempt")
    return tuple(trial[name] for name in names)


def _limits(trial: dict[str, Any]) -> tuple[int, int]:
    return trial["max_num_seqs"], trial["max_num_batched_tokens"]


def _place(trial: dict[str, Any]) -> tuple[str, float]:
    """Return a trial's place in the order; values of two tiers are of two metrics."""
    return trial["tier"], trial["value"]


def _setting(trial: dict[str, Any]) -> tuple[object, ...]:
    return trial["phase"], *_limits(trial)


def _answer(run: Run) -> tuple[int, int]:
    emitted = yaml.safe_load((run.folder / "best.yaml").read_text())
    return emitted["max-num-seqs"], emitted["max-num-batched-tokens"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that nothing disturbed: its best value, what it measured, how long it took.

    What costs no more than a tie is as good an answer: a fault takes time, so rounds, and an
    engine that was killed is what came of its setting.
    """

    best: tuple[str, float]
    values: dict[tuple[object, ...], float]
    took_s: float


def left_alone(folder: Path) -> Ended:
    """Return what comes of the run when nothing disturbs it."""
    folder.mkdir()
    with marked("undisturbed") as ours:
        run = Run(folder, ours, write_trace(folder / "t.jsonl", n=120))
        began_s = time.monotonic()
        assert ended(run.begin()) == 0, run.said()
        took_s = time.monotonic() - began_s
    values = {_setting(t): t["value"] for t in run.trials() if t["value"] is not None}
    assert len(values) > 3
    answer = _answer(run)
    best = min(_place(t) for t in run.trials() if t["value"] and _limits(t) == answer)
    return Ended(best, values, took_s)
