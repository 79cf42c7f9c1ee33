"""Steps of an asynchronous engine take as long as its device, whatever its host does."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.engine import live
from tuner.engine.compat import core
from tuner.engine.guards import ProgressGuard


class Clock:
    """A clock that work moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s


class PlantedCore:
    """vLLM's core with a batch always on its way to a device that takes `batch_s` for each.

    Reading a request's output costs the host `reading_s`.
    """

    def __init__(self, clock: Clock, seqs: int, batch_s: float, reading_s: float) -> None:
        self._clock, self._batch_s, self._reading_s = clock, batch_s, reading_s
        self._free_s = 0.0
        self.seqs = seqs
        self.batch_queue: deque[tuple[Any]] = deque()
        self.scheduler = SimpleNamespace(has_requests=lambda: True)
        self.sent: deque[Any] = deque()

    def launch(self) -> None:
        """Send a batch to the device, which is at it once it has done those before."""
        self._free_s = max(self._clock.now_s, self._free_s) + self._batch_s
        done_s = self._free_s
        future = SimpleNamespace(done_s=done_s, done=lambda: self._clock.now_s >= done_s)
        self.batch_queue.appendleft((future,))
        self.sent.append(core._Sent(SimpleNamespace(num_scheduled_tokens={}), 1, 0, 0.0))

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        """Launch a batch and wait for the one before, as vLLM does."""
        self._clock.now_s += 0.001
        self.launch()
        done_s = self.batch_queue.pop()[0].done_s
        self._clock.now_s = max(self._clock.now_s, done_s)
        return {
            0: SimpleNamespace(outputs=[_Output(self._read) for _ in range(self.seqs)])
        }, True

    def post_step(self, _: bool) -> None:
        """Do nothing."""

    def _read(self) -> str:
        self._clock.now_s += self._reading_s
        return "7"


class _Output:
    new_token_ids = (5,)
    finish_reason = None

    def __init__(self, read: Any) -> None:
        self._read = read

    @property
    def request_id(self) -> str:
        return str(self._read())


def an_engine(clock: Clock, planted: PlantedCore) -> live.LiveEngine:
    """Return a live engine around a planted core that has launched its first batch."""
    driven = object.__new__(core.Core)
    driven._core, driven._scheduler, driven._pending = planted, planted.scheduler, planted.sent
    planted.launch()
    engine = object.__new__(live.LiveEngine)
    engine._core = driven
    engine._between = live.DeviceTime(driven.is_computing, clock.perf_counter)
    engine._progress = ProgressGuard()
    return engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the engine reads."""
    found = Clock()
    monkeypatch.setattr(core, "time", found)
    return found


@pytest.mark.parametrize("seqs", [16, 1024])
def test_what_reading_many_outputs_takes_is_the_devices_time_too(
    clock: Clock, seqs: int
) -> None:
    """A thousand outputs took a tenth of a step of 8 ms, which was in no step's time."""
    engine = an_engine(clock, PlantedCore(clock, seqs, batch_s=0.008, reading_s=1e-6))
    engine.step()
    durations_s = [engine.step().duration_s for _ in range(50)]
    assert durations_s == pytest.approx([0.008] * 50)
