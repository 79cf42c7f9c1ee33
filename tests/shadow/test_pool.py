"""Replays are dealt to the processes that are there; another is started where it pays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.run_parts import a_profile
from support.toy import ToyEngine, ToySource
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.shadow import pool as module
from tuner.shadow.pool import ReplayTask, ShadowPool

CEILING = EngineLimits(16, 2048)
START_S = 3.0
"""What the start of another process takes; replays here take milliseconds."""


@dataclass(frozen=True, slots=True)
class SlowToy(ToySource):
    """A toy that starts as slowly as vLLM is imported."""

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> ToyEngine:
        """Start after a while."""
        time.sleep(START_S)
        return ToySource.start(self, values, ceiling)


class ToyProcesses(ShadowPool):
    """Processes with toys in place of shadows."""

    def __init__(self, folder: Path, jobs: int, source: ToySource) -> None:
        super().__init__(a_profile(), CEILING, jobs, folder / "shadow.log", seed=0)
        self._toy = source
        self.made = 0

    def _made(self) -> EngineRunner:
        bench = super()._made()
        self._hosts[-1].source = self._toy
        self.made += 1
        return bench


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[EngineRunner]:
    """Return a toy that has started."""
    with EngineProcess(ToySource(), tmp_path / "engine.log") as host:
        bench = EngineRunner(host, {}, CEILING, seed=0)
        bench.ensure_started()
        yield bench


def tasks(n: int) -> list[ReplayTask]:
    return [
        ReplayTask(("all",), EngineLimits(cap, 512), ReplayPlan()) for cap in range(1, n + 1)
    ]


def test_replays_do_not_wait_for_a_process_that_has_yet_to_start(
    tmp_path: Path, ready: EngineRunner
) -> None:
    with ToyProcesses(tmp_path, 2, SlowToy()) as shadows:
        shadows.use("all", steady(20, 10.0))
        shadows.adopt(ready)
        began_s = time.monotonic()
        found = shadows.run(tasks(8))
        assert time.monotonic() - began_s < START_S
    assert shadows.made == 0
    assert all(isinstance(outcome, Measurement) for outcome in found)


def test_long_work_is_shared_with_a_process_that_starts_beside_it(
    tmp_path: Path, ready: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMPORT_S", -1.0)
    with ToyProcesses(tmp_path, 2, SlowToy()) as shadows:
        shadows.use("all", steady(20, 10.0))
        shadows.adopt(ready)
        began_s = time.monotonic()
        left, done = tasks(16), 0
        for _ in shadows.drain(lambda: left.pop() if left else None, lambda: not left):
            done += 1
        assert time.monotonic() - began_s < START_S
        assert (done, shadows.made) == (16, 1)
        # Nothing is measured live before it has come to rest.
        shadows.settle()
        assert time.monotonic() - began_s >= START_S
        assert len(shadows.run(tasks(4))) == 4
    assert shadows.made == 1


def test_the_first_process_starts_when_there_is_a_task_and_not_before(tmp_path: Path) -> None:
    with ToyProcesses(tmp_path, 2, ToySource()) as shadows:
        shadows.use("all", steady(20, 10.0))
        assert shadows.run([]) == []
        assert shadows.made == 0
        (outcome,) = shadows.run(tasks(1))
        assert isinstance(outcome, Measurement)
    assert shadows.made == 1


def test_whoever_waits_for_others_does_not_ask_all_the_time(tmp_path: Path) -> None:
    asked = 0
    until_s = time.monotonic() + 1.0

    def next_task() -> ReplayTask | None:
        nonlocal asked
        asked += 1
        return None

    with ToyProcesses(tmp_path, 2, ToySource()) as shadows:
        assert list(shadows.drain(next_task, lambda: time.monotonic() > until_s)) == []
    assert asked < 20
