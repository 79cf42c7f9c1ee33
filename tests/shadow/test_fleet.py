"""A fleet is its replicas: each does what one does alone with what the router sends it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.schedule_cases import Case, random_case
from support.traffic import a_trace
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, UsageError
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Timelines
from tuner.shadow.fleet import Autoscaler, Fleet, FleetLog, simulate_fleet
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate, tiny_replay
from tuner.shadow.step_model import StepModel
from tuner.traffic.reshape import CACHED_SHARE, MAX_BUSIER, Router
from tuner.traffic.traces import Trace, Turns

COLUMNS = ("due_s", "sent_s", "first_s", "last_s", "output_tokens", "outcome")


def open_case(seed: int) -> Case:
    """Return a case whose requests arrive as recorded."""
    case = random_case(seed)
    plan = ReplayPlan(timeout_s=case.plan.timeout_s, sessions=case.plan.sessions)
    return replace(case, plan=plan, trace=replace(case.trace, lead_in_s=0.0))


def alone(case: Case, trace: Trace) -> ReplayLog:
    prepared = PreparedTrace(trace, case.plan)
    return simulate(case.engine, prepared, case.limits, case.plan)


def fleet_of(case: Case, fleet: Fleet) -> FleetLog:
    prepared = PreparedTrace(case.trace, case.plan)
    return simulate_fleet(case.engine, prepared, case.limits, case.plan, fleet)


def same(one: Timelines, other: Timelines) -> None:
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(one, column), getattr(other, column), column)


def rows(lines: Timelines, some: np.ndarray) -> Timelines:
    return replace(lines, **{column: getattr(lines, column)[some] for column in COLUMNS})


@pytest.mark.parametrize("router", Router)
def test_one_replica_is_the_plain_replay(router: Router) -> None:
    seen = 0
    for seed in range(50):
        case = open_case(seed)
        if router is Router.PREFIX and case.trace.hashes is None:
            continue
        try:
            expected = alone(case, case.trace)
        except EngineError:
            with pytest.raises(EngineError):
                fleet_of(case, Fleet(1, router))
            continue
        found = fleet_of(case, Fleet(1, router))
        same(found.log.timelines, expected.timelines)
        assert found.log.steps.steps == expected.steps.steps
        assert found.log.steps.preempted == expected.steps.preempted
        assert found.log.clock_s == expected.clock_s == pytest.approx(found.on_s.sum())
        assert set(found.places.tolist()) == {0}
        seen += 1
    assert seen > 15


@pytest.mark.parametrize("router", Router)
def test_each_replica_does_what_it_does_alone_with_what_it_is_sent(router: Router) -> None:
    preempted = 0
    for seed in range(200, 260):
        case = open_case(seed)
        if router is Router.PREFIX and case.trace.hashes is None:
            continue
        try:
            found = fleet_of(case, Fleet(3, router))
        except EngineError:
            continue
        preempted += found.log.steps.preempted
        steps = 0
        for i in range(3):
            mine = np.flatnonzero(found.places == i)
            if mine.size:
                expected = alone(case, case.trace.slice_rows(mine))
                steps += expected.steps.steps
                same(rows(found.log.timelines, mine), expected.timelines)
        assert steps == found.log.steps.steps
    assert preempted > 0


def oracle(case: Case, replicas: int, router: Router) -> list[int]:
    """Return where each request goes, from a replay of all that was sent before for each."""
    trace = case.trace
    sent: list[list[int]] = [[] for _ in range(replicas)]
    seen: list[set[tuple[int, ...]]] = [set() for _ in range(replicas)]
    places, turn = [], 0
    for row, due_s in enumerate(trace.due_s.tolist()):
        flying = []
        for mine in sent:
            if not mine:
                flying.append(0)
                continue
            lines = alone(case, trace.slice_rows(np.array(mine))).timelines
            gone = (lines.last_s <= due_s) & lines.completed
            flying.append(int((~gone).sum()))
        order = [(turn + i) % replicas for i in range(replicas)]
        place = min(order, key=flying.__getitem__)
        if router is Router.PREFIX and trace.hashes is not None:
            ids = trace.hashes.row(row)
            held = [
                next((k for k in range(len(ids)) if ids[: k + 1] not in one), len(ids))
                for one in seen
            ]
            best = max(range(replicas), key=held.__getitem__)
            enough = held[best] * trace.hashes.block_size
            if (
                ids
                and held[best]
                and enough >= CACHED_SHARE * trace.prompt_tokens[row]
                and flying[best] <= flying[place] + MAX_BUSIER
            ):
                place = best
            seen[place].update(ids[: k + 1] for k in range(len(ids)))
        sent[place].append(row)
        places.append(place)
        turn = (place + 1) % replicas
    return places


@pytest.mark.slow
@pytest.mark.parametrize("router", [Router.LEAST_LOADED, Router.PREFIX])
def test_the_router_sees_what_is_in_flight_at_that_instant(router: Router) -> None:
    seen = 0
    for seed in range(400, 480):
        case = open_case(seed)
        case = replace(
            case, trace=replace(case.trace, turns=None), plan=replace(case.plan, timeout_s=None)
        )
        if case.trace.hashes is None and router is Router.PREFIX:
            continue
        tokens = case.trace.prompt_tokens + case.trace.output_tokens
        if (tokens > case.engine.shape.max_model_len).any():
            continue  # refused at once: in flight for no time
        try:
            found = fleet_of(case, Fleet(3, router))
        except EngineError:
            continue
        assert found.places.tolist() == oracle(case, 3, router), seed
        seen += len(case.trace) > 10
    assert seen > 20


STEADY = SimulatedEngine(
    random_case(0).engine.shape, 4000, StepModel.linear(0.05, 0.0, 0.0), EngineLimits(8, 2048)
)


def steady(gaps_s: np.ndarray, output: int = 20) -> tuple[PreparedTrace, ReplayPlan]:
    """Return requests of a second each: 20 steps of 50 ms, whoever else is there."""
    n, plan = gaps_s.size, ReplayPlan()
    trace = Trace(np.cumsum(gaps_s) - gaps_s[0], np.full(n, 4), np.full(n, output))
    return PreparedTrace(trace, plan), plan


def test_a_plan_starts_replicas_ahead_and_is_paid_from_then() -> None:
    prepared, plan = steady(np.full(1200, 0.1))
    engine = replace(STEADY, shape=replace(STEADY.shape, max_model_len=64))
    fleet = Fleet(2, Router.LEAST_LOADED, plan=((0.0, 1), (40.0, 2), (80.0, 1)), start_s=10.0)
    log = simulate_fleet(engine, prepared, EngineLimits(8, 2048), plan, fleet)
    second = prepared.trace.due_s[log.places == 1]
    assert second.min() == pytest.approx(50.0, abs=1.2)
    assert second.max() == pytest.approx(80.0, abs=1.2)
    end_s = log.log.clock_s
    assert log.on_s.tolist() == [
        pytest.approx(end_s),
        pytest.approx(80.0 + 1.0 - 40.0, abs=2.5),
    ]


def test_an_autoscaler_follows_what_is_in_flight() -> None:
    calm, busy = np.full(300, 0.5), np.full(1500, 0.1)
    prepared, plan = steady(np.concatenate([calm, busy, calm]))
    engine = replace(STEADY, shape=replace(STEADY.shape, max_model_len=64))
    scaler = Autoscaler(target=4.0, every_s=5.0, hold_s=20.0)
    fleet = Fleet(6, autoscaler=scaler, start_s=3.0)
    log = simulate_fleet(engine, prepared, EngineLimits(8, 2048), plan, fleet)
    at_s = prepared.trace.due_s
    # 2 requests in flight are for one replica, 10 for three.
    used = [len(set(log.places[(at_s > a) & (at_s < b)])) for a, b in ((20, 140), (220, 290))]
    assert used == [1, 3]
    assert set(log.places[at_s > 340].tolist()) == {0}
    assert log.on_s[3:].max() < 30  # the queue while the others start
    fixed = simulate_fleet(engine, prepared, EngineLimits(8, 2048), plan, Fleet(3))
    assert log.on_s.sum() < 0.75 * fixed.on_s.sum()


def test_an_autoscaler_shrinks_as_what_was_needed_leaves_the_time_that_it_holds() -> None:
    prepared, plan = steady(np.repeat([0.025, 0.1, 0.5], [800, 200, 200]))
    engine = replace(STEADY, shape=replace(STEADY.shape, max_model_len=64))
    scaler = Autoscaler(target=4.0, every_s=1.0, hold_s=30.0)
    fleet = Fleet(16, autoscaler=scaler)
    log = simulate_fleet(engine, prepared, EngineLimits(8, 2048), plan, fleet)
    lines, needed, on_s = log.log.timelines, list[int](), np.zeros(16)
    for at_s in range(int(log.log.clock_s) + 1):
        in_flight = np.sum((lines.due_s <= at_s) & (lines.last_s > at_s))
        needed.append(max(1, -(-int(in_flight) // 4)))
        on_s[: max(needed[-30:])] += 1.0
    # Whoever is wanted no more answers what it has first, and is off by the look after.
    assert log.on_s == pytest.approx(on_s, abs=2.0)


def test_what_no_router_can_deal_out_is_refused() -> None:
    case = open_case(1)
    warmed = replace(case, trace=replace(case.trace, lead_in_s=1.0))
    with pytest.raises(UsageError, match="deals out requests as they arrive"):
        fleet_of(warmed, Fleet(2))
    unhashed = replace(case, trace=replace(case.trace, hashes=None))
    with pytest.raises(UsageError, match="no hash ids"):
        fleet_of(unhashed, Fleet(2, Router.PREFIX))
    with pytest.raises(UsageError, match="64 replicas"):
        Fleet(65, Router.PREFIX)
    with pytest.raises(UsageError, match="1 to 2 replicas"):
        Fleet(2, plan=((0.0, 3),))


@pytest.mark.parametrize("has_a_newcomer", [False, True])
def test_a_fleet_is_looked_at_until_its_last_session_is_done(*, has_a_newcomer: bool) -> None:
    """One long session, and one request: whoever is wanted no more is off, newcomer or none."""
    n = 40
    due_s = [0.0, 1.0, *(10.0 * k for k in range(1, n)), *([395.0] if has_a_newcomer else [])]
    after = np.full(len(due_s), -1)
    after[2 : n + 1] = [0, *range(2, n)]
    trace = replace(
        a_trace(due_s, prompt=32, output=10),
        turns=Turns(after, np.where(after >= 0, 10.0, 0.0)),
    )
    engine, *_ = tiny_replay()
    limits, plan = EngineLimits(8, 512), ReplayPlan()
    shape = replace(engine.shape, max_model_len=4096, block_size=16, asynchronous=False)
    simulated = SimulatedEngine(shape, 1000, StepModel.linear(0.01, 0.0, 0.0), limits)
    planned = Fleet(2, Router.ROUND_ROBIN, plan=[(0.0, 2), (20.0, 1)], start_s=1.0)
    scaler = Autoscaler(target=1.0, at_first=2, hold_s=30.0)
    scaled = Fleet(2, Router.ROUND_ROBIN, autoscaler=scaler, start_s=1.0)
    for fleet, on_s in ((planned, 21.0), (scaled, 45.0)):
        log = simulate_fleet(simulated, PreparedTrace(trace, plan), limits, plan, fleet)
        assert log.on_s[1] == pytest.approx(on_s, abs=1.0)
        assert log.on_s[0] > 390


def test_a_fleet_keeps_no_steps() -> None:
    case = open_case(0)
    plan = replace(case.plan, keep_steps=True)
    with pytest.raises(UsageError, match="keeps no steps"):
        fleet_of(replace(case, plan=plan), Fleet(2, Router.ROUND_ROBIN))
