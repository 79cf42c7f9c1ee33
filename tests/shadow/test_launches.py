"""Engines whose host launches ahead: what batches take the device, and launching the host."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import planted_machine
from support.paths import ROOT
from support.planted import PlantedSource
from support.planted_machine import MACHINES, MOODS, Machine
from support.profile_parts import SHAPE
from support.step_parts import columns
from support.traffic import kept
from support.virtual_time import on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import NO_GRAPHS, EngineShape, Graphs
from tuner.engine.steps import NO_WAIT_S, CostSums, StepColumns, StepCosts, StepLog, joined
from tuner.replay.loop import ReplayLog
from tuner.replay.loop import replay as replay_on
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.run.rounds import unpacked
from tuner.shadow.calibration import Calibration
from tuner.shadow.fit import host_of
from tuner.shadow.launches import on_device
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.shadow.speed import MoodSpreads, Speed, Uncertainty
from tuner.shadow.speed_fit import with_host
from tuner.shadow.step_model import NO_HOST, Host, StepModel
from tuner.stats import Floats
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace

# Of the order of an H200 with a model of 7 billion weights and a host that launches a step
# without a graph in 14 ms: measured, tests/benchmarks/README.md.
GRAPHS = Graphs((1, 2, 4, 8, 16, 32, 64))
HOST = Host(full_s=0.002, mixed_s=0.005, eager_s=0.014)
DEVICE = replace(
    StepModel.linear(0.0046, 1.8e-5, 1.8e-5, decode_context_s=1.5e-8), graphs=GRAPHS, host=HOST
)
ENGINE = replace(SHAPE, asynchronous=True, captured_sizes=GRAPHS.sizes, captures_mixed=True)
START = KvStart(EngineLimits(128, 8192), 10_000)


def replay(limits: EngineLimits, steps: int, seed: int) -> StepColumns:
    """Return what a host sees of random batches that it launches one ahead."""
    rng = np.random.default_rng(seed)
    seqs = rng.integers(4, limits.max_num_seqs + 1, steps).astype(np.float64)
    prompts = np.minimum(limits.max_num_batched_tokens - seqs, rng.lognormal(6.5, 1, steps))
    prefill = np.where(rng.random(steps) < 0.8, 0.0, np.ceil(prompts))
    batches = columns(
        duration_s=np.ones(steps),
        decode_seqs=seqs,
        prefill_tokens=prefill,
        decode_context_tokens=seqs * 1200,
    )
    took_s = DEVICE.predict_s(batches) * rng.lognormal(0.0, 0.02, steps)
    launch_s = Host.loads_of(seqs, prefill, seqs + prefill, GRAPHS) @ HOST.each_s
    return seen(batches, took_s, launch_s)


def seen(batches: StepColumns, took_s: Floats, launch_s: Floats) -> StepColumns:
    """Return batches as a host sees them that launches each before it waits for the last.

    The device computes one after the other, none that is not being launched, and is done with
    none before that has been launched.
    """
    began_s, now_s = 0.0, float(launch_s[0])
    done_s = max(now_s, float(took_s[0]))
    duration_s, is_late = [], []
    for ahead_s, next_s in zip(
        [*launch_s[1:].tolist(), 0.0], [*took_s[1:].tolist(), 0.0], strict=True
    ):
        launched_s, began_s = now_s + ahead_s, now_s
        is_late.append(float(done_s < launched_s))
        now_s = max(done_s, launched_s)
        duration_s.append(now_s - began_s)
        done_s = max(max(done_s, began_s) + next_s, launched_s)
    return replace(
        batches,
        # A clock tells any two instants apart.
        duration_s=np.maximum(duration_s, 1e-7),
        launch_s=launch_s,
        is_late=np.array(is_late),
    )


@cache
def learnt(*, knows_late: bool = True) -> StepModel:
    """Return what is learnt of three settings, with or without what the host saw late."""
    calibration = Calibration(
        ENGINE, (START,), (), EngineLimits(16, 2048), {}, has_own_graphs=False
    )
    for number, limits in enumerate(((16, 2048), (64, 1024), (128, 8192))):
        found = replay(EngineLimits(*limits), 1200, number)
        if not knows_late:
            found = replace(found, is_late=np.zeros(len(found)))
        calibration = calibration.and_steps(EngineLimits(*limits), [found])
    return calibration.learn()[1].model


@pytest.mark.parametrize("limits", [(8, 512), (128, 2048)])
def test_what_batches_take_the_device_is_learnt_though_the_host_notices_late(
    limits: tuple[int, int],
) -> None:
    batches = replay(EngineLimits(*limits), 3000, 9)
    true_s = DEVICE.predict_s(batches)
    for rows in (batches.is_decode_only, ~batches.is_decode_only):
        found_s = learnt().predict_s(batches)[rows].sum()
        assert found_s == pytest.approx(true_s[rows].sum(), rel=0.015)
    # Without it the host's time is taken for the device's, and the short steps are believed.
    found_s = learnt(knows_late=False).predict_s(batches).sum()
    assert abs(found_s / true_s.sum() - 1) > 0.03


def test_what_launching_takes_the_host_is_learnt() -> None:
    found = learnt().host
    assert found.full_s == pytest.approx(HOST.full_s, rel=0.01)
    assert found.eager_s == pytest.approx(HOST.eager_s, rel=0.01)
    # Stalls are none of it.
    steps = replay(EngineLimits(64, 1024), 1000, 3)
    launch_s = np.where(np.arange(1000) % 100 == 0, 20 * steps.launch_s, steps.launch_s)
    found = host_of([replace(steps, launch_s=launch_s)], [GRAPHS])
    assert found.eager_s == pytest.approx(HOST.eager_s, rel=0.01)
    assert host_of([replace(steps, launch_s=np.zeros(1000))], [GRAPHS]) == NO_HOST


def test_what_launching_may_take_at_another_time_follows_what_it_took_at_several() -> None:
    steps = [replay(EngineLimits(64, 1024), 6000, seed) for seed in range(6)]
    graphs = [GRAPHS] * len(steps)
    of_device = Speed(DEVICE, Uncertainty(), MoodSpreads(0.0, 0.0, 0.0, 0.0))
    spreads = []
    for times in (1.0, 1.5):
        # A host that is slower in every other replay, of which each takes more than a span.
        moody = [
            replace(s, launch_s=s.launch_s * (times if number % 2 else 1.0))
            for number, s in enumerate(steps)
        ]
        for some in (moody[:2], moody):
            host = host_of(some, graphs[: len(some)])
            found = with_host(of_device, host, some, graphs[: len(some)]).model.host
            spreads.append(found.spread)
    of_few, of_many, of_few_moods, of_many_moods = spreads
    assert 0.01 < of_many < of_few < of_few_moods
    assert of_many < 0.06
    assert of_many_moods > 0.1
    # So far the drawn ones are apart.
    host = replace(HOST, spread=0.2)
    model = replace(DEVICE, host=host)
    rows = np.random.default_rng(1).standard_normal((400, 2))
    drawn = [Uncertainty(start=0.0).moved(model, row) for row in rows]
    assert np.log([m.host.eager_s for m in drawn]).std() == pytest.approx(0.2, rel=0.1)
    assert {m.base_s for m in drawn} == {model.base_s}


def test_an_engine_that_waits_for_each_batch_has_no_host_beside_it() -> None:
    found = replace(replay(EngineLimits(16, 2048), 800, 1), is_late=np.zeros(800))
    assert on_device([found], [np.ones(800)])[0] is found
    waits = replace(ENGINE, asynchronous=False)
    calibration = Calibration(waits, (START,), (), EngineLimits(16, 2048), {})
    calibration = calibration.and_steps(EngineLimits(16, 2048), [found])
    assert calibration.learn()[1].model.host == NO_HOST


_SECONDS = st.floats(1e-4, 1.0)


@given(st.lists(st.tuples(_SECONDS, _SECONDS), min_size=1))
def test_what_was_noticed_in_time_took_what_it_took(rows: list[tuple[float, float]]) -> None:
    took_s, launch_s = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    number = np.arange(1.0, len(rows) + 1)
    steps = seen(columns(duration_s=np.ones(number.size), decode_seqs=number), took_s, launch_s)
    # The first was launched alone, and no turn of its own is told here.
    from_s = np.where(number == 1, np.maximum(took_s - launch_s[0], 1e-12), took_s)
    (found,) = on_device([steps], [from_s])
    of = found.decode_seqs.astype(np.int64) - 1
    in_time = (steps.is_late[of] == 0) & (steps.duration_s[of] > NO_WAIT_S)
    np.testing.assert_allclose(found.duration_s[in_time], from_s[of][in_time], atol=1e-6)
    assert in_time.sum() == ((steps.is_late == 0) & (steps.duration_s > NO_WAIT_S)).sum()
    # The others were done by then, if not sooner.
    assert (found.duration_s >= from_s[of] - 1e-6).all()
    assert (found.duration_s > 0).all()


def test_where_the_host_is_always_late_a_batch_took_no_longer_than_it_seemed() -> None:
    rows = 64
    slow = np.repeat([0.004, 0.008], rows // 2)
    steps = columns(duration_s=slow, decode_seqs=4.0, is_late=1.0)
    (found,) = on_device([steps], [np.full(rows, 0.02)])
    np.testing.assert_allclose(found.duration_s, slow)


def test_the_turn_that_launched_the_first_batch_is_that_batchs() -> None:
    steps = columns(
        duration_s=[0.01, 0.02, 0.005, 0.001],
        decode_seqs=[0, 4, 4, 0],
        is_late=[1, 0, 0, 0],
    )
    (found,) = on_device([steps], [np.full(4, 0.5)])
    np.testing.assert_allclose(found.duration_s, [0.03, 0.005, 0.001])


@pytest.mark.parametrize("limits", [(16, 256), (128, 2048)])
def test_other_settings_of_a_host_that_launches_ahead_are_foretold(
    limits: tuple[int, int], launching: Profile
) -> None:
    """Of 16/256 the host has more to do than the device for a quarter of the time."""
    at, trace = EngineLimits(*limits), a_trace(99)
    log, shape = on_machine(at, trace)
    model = replace(launching.step_model_at(at), graphs=shape.graphs)
    for asked, least, most in ((model, 0.0, 0.02), (replace(model, host=NO_HOST), 0.03, 1.0)):
        engine = SimulatedEngine(shape, BLOCKS, asked, at)
        found = simulate(engine, PreparedTrace(trace, ReplayPlan()), at, ReplayPlan())
        here, there = measure([found]), measure([log])
        found_s, true_s = (one.latency("e2e_s", "p50") for one in (here, there))
        assert found_s is not None
        assert true_s is not None
        off = abs(found_s / true_s - 1)
        assert off < most
        if limits == (16, 256):
            assert off > least or asked is model
            is_bound = there.host_bound_ratio if asked is model else 0.0
            assert here.host_bound_ratio == pytest.approx(is_bound, abs=0.02)


BLOCKS = 20_000


def taught_by(
    settings: tuple[tuple[int, int], ...], most: int, machine: Machine, mood: str
) -> tuple[Profile, float]:
    """Return what is learnt of a machine at some settings, and how many steps were late."""
    calibration, late = Calibration(ENGINE, (), (), EngineLimits(16, 2048), {}), []
    for number, limits in enumerate(settings):
        at, trace = EngineLimits(*limits), a_trace(number).slice_rows(range(most))
        log, shape = on_machine(at, trace, machine, mood)
        steps = kept(log)
        late.append(steps.is_late.mean())
        calibration = replace(calibration, shape=calibration.shape if number else shape)
        calibration = calibration.and_start(at, BLOCKS).and_steps(at, [steps])
    return calibration.profile(), min(late)


@pytest.fixture(scope="module")
def launching() -> Profile:
    """Return what is learnt of three settings of a machine whose host launches ahead."""
    taught = ((16, 2048), (64, 1024), (128, 8192))
    return taught_by(taught, 150, MACHINES["gpu-8b-async"], "none")[0]


def a_trace(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / 6, 150))
    prompts = np.minimum(3000, np.ceil(rng.lognormal(6.3, 1.0, 150))).astype(np.int64)
    outputs = np.minimum(600, np.ceil(rng.lognormal(4.7, 0.7, 150))).astype(np.int64)
    return Trace(due_s - due_s[0], prompts, outputs)


SLOW_HOST = replace(
    MACHINES["gpu-8b-async"],
    host=planted_machine.Host(0.03, 0.03, eager_s=0.03, eager_token_s=1e-6),
)


@pytest.fixture(scope="module")
def held_up() -> Profile:
    """Return what is learnt of a machine whose host is always slower than its device."""
    taught = ((16, 2048), (32, 512), (2, 8192))
    profile, late = taught_by(taught, 40, SLOW_HOST, "usual")
    assert late > 0.8
    return profile


@pytest.mark.parametrize("limits", [(8, 512), (64, 4096)])
def test_settings_of_a_host_that_is_always_the_slower_one_are_foretold(
    limits: tuple[int, int], held_up: Profile
) -> None:
    """As without graphs: of the device is known that it is no slower, and no more counts."""
    at, trace = EngineLimits(*limits), a_trace(99).slice_rows(range(60))
    log, shape = on_machine(at, trace, SLOW_HOST)
    model = replace(held_up.step_model_at(at), graphs=shape.graphs)
    engine = SimulatedEngine(shape, BLOCKS, model, at)
    found = measure([simulate(engine, PreparedTrace(trace, ReplayPlan()), at, ReplayPlan())])
    for latency in ("e2e_s", "tpot_s"):
        true_s = measure([log]).latency(latency, "p50")
        assert found.latency(latency, "p50") == pytest.approx(true_s, rel=0.06)


def test_an_h200_without_graphs_is_learnt_though_nearly_all_its_steps_were_late() -> None:
    """Blocks of an engine with enforce_eager, nine in ten of whose steps its host held up."""
    file = ROOT / "tests/benchmarks/results/gpu_h200/truth-eager.blocks.steps.jsonl"
    seen_there = unpacked([json.loads(line) for line in file.read_text().splitlines()])
    calibration = Calibration(
        replace(ENGINE, captured_sizes=()), (START,), (), EngineLimits(16, 2048), {}
    )
    for at, steps in seen_there:
        calibration = calibration.and_steps(at, [steps])
    model = calibration.learn()[1].model
    decodes = joined([steps.take(steps.is_decode_only) for _, steps in seen_there])
    launch_s = Host.loads_of(
        decodes.decode_seqs, decodes.prefill_tokens, decodes.tokens, NO_GRAPHS
    )
    takes_s = np.maximum(model.predict_s(decodes), launch_s @ model.host.each_s)
    assert takes_s.sum() == pytest.approx(decodes.duration_s.sum(), rel=0.05)


def on_machine(
    limits: EngineLimits,
    trace: Trace,
    machine: Machine = MACHINES["gpu-8b-async"],
    mood: str = "none",
) -> tuple[ReplayLog, EngineShape]:
    """Return what a planted machine makes of a trace."""
    source = PlantedSource.of(machine, EngineLimits(16, 2048), BLOCKS, MOODS[mood], None)
    with on_virtual_time(source.clock):
        engine = source.start({}, limits)
        prompts = PromptSource(trace, engine.info.vocab_size)
        return replay_on(engine, trace, prompts, ReplayPlan(keep_steps=True)), engine.shape()


def test_a_step_that_was_noticed_late_is_not_the_machine_s_noise() -> None:
    rows = columns(duration_s=[*[0.005] * 20, *[0.014] * 5], decode_seqs=4.0)
    for late, stretched in ((0.0, 5.0), (1.0, 0.0)):
        log = StepLog()
        log._count_decodes(replace(rows, is_late=np.array([0.0] * 20 + [late] * 5)))
        assert log.finish()[0].distorted()[0] == stretched


def fitted(steps: StepColumns) -> StepCosts:
    sums = CostSums()
    sums.add(steps)
    return sums.fit()


@pytest.mark.parametrize("limits", [(16, 2048), (64, 8192)])
def test_what_work_costs_a_device_is_not_what_its_host_noticed_late(
    limits: tuple[int, int],
) -> None:
    """On these the work that a load is, and how much of the engine it takes, is told."""
    late = replay(EngineLimits(*limits), 3000, 5)
    alike = fitted(replace(late, duration_s=DEVICE.predict_s(late), is_late=np.zeros(3000)))
    found = fitted(late)
    apart = fitted(replace(late, is_late=np.zeros(3000)))
    assert found.prefill_s == pytest.approx(alike.prefill_s, rel=0.1)
    assert found.base_s == pytest.approx(alike.base_s, rel=0.2)
    assert abs(apart.prefill_s / alike.prefill_s - 1) > 0.2
    # Nothing of the time is lost.
    work_s = (
        found.decode_s * late.decode_seqs.sum() + found.prefill_s * late.prefill_tokens.sum()
    )
    assert 3000 * found.base_s + work_s == pytest.approx(late.duration_s.sum())
