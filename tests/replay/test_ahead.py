"""Requests are made ready before they go, within a bound, and once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.toy import ToyEngine, ToySource
from support.traffic import ToyPrompts, a_trace
from tuner.engine.limits import EngineLimits
from tuner.engine.live import DeviceTime
from tuner.engine.protocol import Prompt, Step
from tuner.replay.arrivals import (
    SOON_S,
    Ahead,
    CausalArrivals,
    ClockKind,
    ClosedArrivals,
    OpenArrivals,
    Sessions,
)
from tuner.replay.loop import replay
from tuner.replay.plan import ReplayPlan
from tuner.traffic.traces import LoadModel, Trace, Turns


def test_memory_is_bounded_and_refilled_once_half_of_it_has_gone() -> None:
    made: list[int] = []
    arrivals = OpenArrivals(np.linspace(0.0, 900.0, 10))
    ahead = Ahead(arrivals, made.append, lambda _: 10, 10, most_tokens=40)
    ahead.fill(0.0)
    assert made == [0, 1, 2, 3]
    ahead.went(0)
    ahead.fill(0.0)
    assert made == [0, 1, 2, 3]
    ahead.went(1)
    ahead.fill(0.0)
    assert made == [0, 1, 2, 3, 4, 5]


def test_one_request_larger_than_the_bound_is_still_made_ready() -> None:
    made: list[int] = []
    arrivals = OpenArrivals(np.zeros(2))
    Ahead(arrivals, made.append, lambda _: 10, 2, most_tokens=1).fill(0.0)
    assert made == [0]


def test_a_next_turn_is_made_ready_when_the_answer_before_it_has_ended() -> None:
    made: list[int] = []
    turns = Turns(np.array([-1, 0, -1]), np.array([0.0, 2.0, 0.0]))
    arrivals = CausalArrivals(np.array([0.0, 1.0, 50.0]), turns)
    ahead = Ahead(arrivals, made.append, lambda _: 10, 3, most_tokens=15)
    ahead.fill(0.0)
    assert made == [0]
    ahead.went(arrivals.pop(0.0)[0])
    arrivals.ended(0, 5.0)
    # Due at 7 s, before what was known all the time.
    ahead.fill(5.0)
    assert made == [0, 1]


def test_a_clock_that_goes_on_is_not_held_up_by_long_pauses() -> None:
    made: list[int] = []
    arrivals = OpenArrivals(np.array([0.0, 0.5, 3.0, 9.0]))
    ahead = Ahead(arrivals, made.append, lambda _: 10, 4, most_tokens=20, pauses=False)
    ahead.fill(0.0)
    for row in made.copy():
        ahead.went(row)
    ahead.fill(1.0)
    assert made == [0, 1]
    ahead.fill(3.0 - SOON_S)
    assert made == [0, 1, 2]


def test_who_went_before_was_never_ready_and_is_passed_over() -> None:
    made: list[int] = []
    ahead = Ahead(ClosedArrivals([0.0], [1], 3), made.append, lambda _: 10, 3, most_tokens=10)
    ahead.went(0)
    ahead.fill(0.0)
    assert made == [1]


class Watched:
    """A toy that keeps in which order it was asked."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def prepare(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Note it."""
        assert len(prompt.token_ids()) == len(prompt)
        assert output_tokens > 0
        self.calls.append(("prepare", row))

    def add(self, row: int, prompt: Prompt, output_tokens: int) -> None:
        """Note it and add."""
        self.calls.append(("add", row))
        self._engine.add(row, prompt, output_tokens)

    def step(self) -> Step:
        """Note it and step."""
        self.calls.append(("step", -1))
        return self._engine.step()


TURNS = Turns(np.array([-1, -1, 0]), np.array([0.0, 0.0, 1.0]))
TRACE = replace(a_trace([0.0, 1.0, 5.0]), turns=TURNS)


@pytest.mark.parametrize(
    "plan",
    [
        ReplayPlan(),
        ReplayPlan(sessions=Sessions.RECORDED),
        ReplayPlan(load_model=LoadModel.CLOSED, concurrency=1),
        ReplayPlan(clock=ClockKind.WALL),
    ],
    ids=["causal", "open", "closed", "wall"],
)
def test_every_request_is_ready_before_it_is_added_and_the_known_before_the_first_step(
    plan: ReplayPlan,
) -> None:
    trace: Trace = replace(TRACE, due_s=TRACE.due_s / 50, turns=replace_pause(TURNS))
    engine = Watched(ToySource().start({}, EngineLimits(8, 256)))
    replay(engine, trace, ToyPrompts(trace), plan)  # type: ignore[arg-type]  # stands in
    order = {call: at for at, call in enumerate(engine.calls) if call[0] != "step"}
    first_step = engine.calls.index(("step", -1))
    for row in range(3):
        assert order["prepare", row] < order["add", row]
        waits = plan.sessions is Sessions.CAUSAL and plan.load_model is LoadModel.OPEN
        if row < 2 or not waits:
            assert order["prepare", row] < first_step
    assert len(order) == 6


def replace_pause(turns: Turns) -> Turns:
    return replace(turns, pause_s=turns.pause_s / 50)


class Device:
    """A clock that is moved by hand, and a device that is done at an instant."""

    def __init__(self, done_s: float) -> None:
        self.now_s, self._done_s = 0.0, done_s

    def now(self) -> float:
        """Return the time."""
        return self.now_s

    def is_computing(self) -> bool:
        """Whether it is not done."""
        return self.now_s < self._done_s


def charged(done_s: float, looks_s: list[float], next_turn_s: float) -> float:
    """Return what a step is charged with between two turns."""
    device = Device(done_s)
    between = DeviceTime(device.is_computing, device.now)
    between.start(0.0, is_on_its_way=True)
    for now_s in looks_s:
        device.now_s = now_s
        between.look()
    device.now_s = next_turn_s
    return between.stop()


def test_the_replays_work_is_charged_only_while_the_device_computes() -> None:
    # Hidden behind the device: the host's time is the device's, too.
    assert charged(9.0, [1.0, 2.0], 3.0) == 3.0
    # The device waited from 2 s on: seen at the next look, not charged beyond it.
    assert charged(2.0, [1.0, 2.5, 8.0], 20.0) == 2.5
    # Done when the turn ended.
    assert charged(0.0, [], 5.0) == 0.0
    # Nobody looked, so nothing is known: as if it had computed all the time.
    assert charged(2.0, [], 5.0) == 5.0


def test_without_a_batch_on_its_way_nothing_is_charged() -> None:
    device = Device(9.0)
    between = DeviceTime(device.is_computing, device.now)
    between.start(0.0, is_on_its_way=False)
    device.now_s = 4.0
    assert between.stop() == 0.0
