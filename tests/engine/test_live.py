"""Steps of an asynchronous engine take as long as its device, whatever its host does."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.engine import live
from tuner.engine.compat import core
from tuner.engine.guards import STUCK_TURNS
from tuner.errors import EngineError


class Clock:
    """A clock that work moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


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
        self.model_executor = SimpleNamespace()
        self.sent: deque[Any] = deque()

    def launch(self) -> None:
        """Send a batch to the device, which is at it once it has done those before."""
        self._free_s = max(self._clock.now_s, self._free_s) + self._batch_s
        done_s = self._free_s
        future = SimpleNamespace(done_s=done_s, done=lambda: self._clock.now_s >= done_s)
        self.batch_queue.appendleft((future,))
        self.sent.append(
            core._Sent(
                SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None), 1, 0, 0.0
            )
        )

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
    engine._batches = core.BatchReader()
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


def test_a_request_that_waits_for_blocks_from_elsewhere_has_seconds_for_it(
    clock: Clock,
) -> None:
    """Ten thousand turns, after which an engine counts as stuck, were over in one second."""
    planted = PlantedCore(clock, 1, batch_s=0.008, reading_s=0.0)
    engine = an_engine(clock, planted)
    planted.sent.clear()
    planted.scheduler.has_unfinished_requests = lambda: True
    planted.step_fn = lambda: ({}, False)  # type: ignore[method-assign]
    began_s = clock.now_s
    waited_s = sum(engine.step().duration_s for _ in range(STUCK_TURNS))
    assert clock.now_s - began_s >= waited_s > 9.9
    with pytest.raises(EngineError, match="without scheduling anything"):
        engine.step()


class Workers:
    """Workers that are processes, as vLLM's executor sees them: what they say is at hand."""

    def __init__(self, count: int) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self._says = [MessageQueue(1, 1, None, 1 << 16, 4) for _ in range(count)]
        self.response_mqs = [
            MessageQueue.create_from_handle(said.export_handle(), 0) for said in self._says
        ]
        self.output_rank = 0
        self.kv_output_aggregator: object = None
        self.futures_queue: deque[Any] = deque()

    def ask(self, ranks: tuple[int, ...] = (0,)) -> Any:
        """Return the future of what these workers will say."""
        from vllm.v1.executor.multiproc_executor import FutureWrapper

        def answers() -> list[Any]:
            return [self.response_mqs[rank].dequeue(timeout=1) for rank in ranks]

        return FutureWrapper(self.futures_queue, answers)

    def say(self, words: str, rank: int = 0) -> None:
        """Let a worker answer."""
        self._says[rank].enqueue(words)


def a_driven(executor: Any, *futures: Any, slots: int = 2) -> core.Core:
    """Return a core with batches on their way, the newest first."""
    driven = object.__new__(core.Core)
    queue = deque((future,) for future in futures)
    driven._core = SimpleNamespace(
        batch_queue=queue, batch_queue_size=slots, model_executor=executor
    )
    return driven


@pytest.mark.engine
def test_workers_that_are_processes_are_seen_to_be_done_without_waiting_for_them() -> None:
    """What the replay makes ready meanwhile, 0.2 s of it say, is not the device's time then."""
    workers = Workers(2)
    launched, sampled = workers.ask(), workers.ask()
    clock, driven = Clock(), a_driven(workers, sampled)
    between = live.DeviceTime(driven.is_computing, clock.perf_counter)
    between.start(0.0, is_on_its_way=True)
    workers.say("launched")
    for now_s, done in ((0.003, False), (0.006, True), (0.009, True), (0.3, True)):
        clock.now_s = now_s
        if done and not sampled.done():
            workers.say("tokens")
        between.look()
        assert sampled.done() is done
    assert between.stop() == 0.006
    assert (launched.result(), sampled.result()) == (["launched"], ["tokens"])
    assert not workers.futures_queue


@pytest.mark.engine
def test_where_every_worker_answers_all_of_them_are_waited_for() -> None:
    workers = Workers(2)
    workers.kv_output_aggregator = object()
    driven = a_driven(workers, workers.ask((0, 1)))
    workers.say("one")
    assert driven.is_computing()
    workers.say("other", rank=1)
    assert not driven.is_computing()


@pytest.mark.engine
def test_a_pipeline_that_fills_up_is_not_asked() -> None:
    workers = Workers(1)
    first = workers.ask()
    workers.say("tokens")
    assert a_driven(workers, first, slots=4).is_computing()
    assert not first.done()
    assert not a_driven(workers, workers.ask(), workers.ask(), first, slots=4).is_computing()
