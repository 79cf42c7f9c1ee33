"""Steps of an engine whose host launches ahead: what each took if some were noticed late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.profile_parts import SHAPE
from support.step_parts import columns
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import CostSums, StepColumns, StepCosts, StepLog, chains
from tuner.shadow.calibration import Calibration
from tuner.shadow.launches import told_apart
from tuner.shadow.profiles import KvStart
from tuner.shadow.step_model import StepModel
from tuner.stats import Floats

# Of the order of an H200 with a model of 7 billion weights and a host that launches a step
# without a graph in 14 ms: measured, tests/benchmarks/README.md.
DEVICE = StepModel.linear(0.0046, 1.8e-5, 1.8e-5, decode_context_s=1.5e-8)
GRAPH_S, EAGER_S, GRAPH_TOKENS, LOOK_S = 0.002, 0.014, 64, 2e-5
ENGINE = replace(SHAPE, asynchronous=True)
START = KvStart(EngineLimits(128, 8192), 10_000)


def replay(limits: EngineLimits, steps: int, seed: int) -> StepColumns:
    """Return what a host sees of random batches that it launches one ahead.

    The device computes one after the other, none before its launch has ended. The host waits
    for a batch once it has launched the next.
    """
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
    launch_s = np.where(seqs + prefill > GRAPH_TOKENS, EAGER_S, GRAPH_S)
    return seen(batches, took_s, launch_s)


def seen(batches: StepColumns, took_s: Floats, launch_s: Floats) -> StepColumns:
    """Return batches as a host sees them that launches each before it waits for the last."""
    seen_s = launch_s[0]
    done_s = max(seen_s, took_s[0])
    duration_s, is_late = [], []
    for ahead_s, next_s in zip(
        [*launch_s[1:].tolist(), 0.0], [*took_s[1:].tolist(), 0.0], strict=True
    ):
        launched_s = seen_s + ahead_s
        is_late.append(float(done_s < launched_s))
        now_s = max(done_s, launched_s) + LOOK_S
        duration_s.append(now_s - seen_s)
        done_s, seen_s = max(done_s + next_s, launched_s), now_s
    return replace(
        batches,
        duration_s=np.array(duration_s),
        launch_s=launch_s,
        is_late=np.array(is_late),
    )


def learnt(*, knows_late: bool) -> StepModel:
    """Return what is learnt of three settings, with or without what the host saw late."""
    calibration = Calibration(ENGINE, (START,), (), EngineLimits(16, 2048), {})
    for number, limits in enumerate(((16, 2048), (64, 1024), (128, 8192))):
        found = replay(EngineLimits(*limits), 1200, number)
        if not knows_late:
            found = replace(found, is_late=np.zeros(len(found)))
        calibration = calibration.and_steps(EngineLimits(*limits), [found])
    return calibration.learn()[1].model


def off(model: StepModel, limits: EngineLimits) -> float:
    """Return how far all the time of a setting is off that was not learnt from."""
    true = replay(limits, 3000, 9)
    return float(model.predict_s(true).sum() / true.duration_s.sum() - 1.0)


@pytest.mark.parametrize("limits", [(32, 512), (8, 512), (32, 4096), (128, 2048)])
def test_what_was_noticed_late_is_told_apart_and_other_settings_are_foretold(
    limits: tuple[int, int],
) -> None:
    at = EngineLimits(*limits)
    assert abs(off(learnt(knows_late=True), at)) < 0.02
    # Without it the long steps are taken for stalls and the short ones believed.
    assert off(learnt(knows_late=False), at) < -0.03


def test_a_device_that_is_never_waited_for_in_vain_is_learnt_as_before() -> None:
    calibration = Calibration(ENGINE, (START,), (), EngineLimits(16, 2048), {})
    found = replace(replay(EngineLimits(16, 2048), 800, 1), is_late=np.zeros(800))
    calibration = calibration.and_steps(EngineLimits(16, 2048), [found])
    assert told_apart(found, np.ones(800)) is found
    calibration.learn()


@given(
    st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.booleans()), min_size=1)
)
def test_no_time_is_lost_or_found(rows: list[tuple[float, float, bool]]) -> None:
    took_s, predicted_s, late = (
        np.array(column, np.float64) for column in zip(*rows, strict=True)
    )
    steps = columns(duration_s=took_s, decode_seqs=1.0, is_late=late)
    found, of = told_apart(steps, predicted_s), chains(steps)
    np.testing.assert_allclose(np.bincount(of, found.duration_s), np.bincount(of, took_s))
    alone = np.bincount(of)[of] == 1
    np.testing.assert_allclose(found.duration_s[alone], took_s[alone])
    assert (found.duration_s > 0).all()
    # Of a chain each batch gets the same multiple of what was predicted.
    times = found.duration_s / predicted_s
    assert np.allclose(times, (np.bincount(of, times) / np.bincount(of))[of])


def test_where_the_host_is_always_late_what_steps_took_is_still_learnt() -> None:
    rows = 64
    slow = np.repeat([0.004, 0.008], rows // 2)
    steps = columns(duration_s=slow, decode_seqs=4.0, is_late=1.0)
    found = told_apart(steps, np.full(rows, 0.001))
    np.testing.assert_allclose(found.duration_s, slow)


def test_the_turn_that_launched_the_first_batch_belongs_to_it_and_tidying_up_to_none() -> None:
    steps = columns(
        duration_s=[0.01, 0.02, 0.005, 0.001],
        decode_seqs=[0, 4, 4, 0],
        is_late=[1, 0, 0, 0],
    )
    found = told_apart(steps, np.full(4, 0.5))
    np.testing.assert_allclose(found.duration_s, [0.0, 0.03, 0.005, 0.001])


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


@pytest.mark.parametrize("limits", [(16, 2048), (128, 2048), (64, 8192)])
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
    work = (late.decode_seqs.sum(), late.prefill_tokens.sum())
    assert found.busy_s(3000, *work) == pytest.approx(late.duration_s.sum())
