"""The simulator is compared with the vLLM at hand, and what differs first is named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from support.shadow_parts import RandomTraffic, a_shape
from support.traffic import a_trace
from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import KvGroup
from tuner.engine.steps import StepColumns
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.shadow.agreement import compare, first_departure, singly, together
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.profiles import Agreement
from tuner.shadow.reference import ReferenceReplay, replay_reference
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.shadow.step_model import StepModel
from tuner.stats import Floats
from tuner.traffic.traces import Trace

LIMITS = EngineLimits(8, 128)
STEPS = StepModel.linear(0.003, 0.0001, 0.00003, decode_context_s=1e-8, tidy_s=0.0005)
# Longer than any of these replays takes.
LONG_S = 200.0


def columns(n: int, **given: list[float]) -> StepColumns:
    """Return n rows of single steps, all zeros but for the columns given."""
    filled: dict[str, Floats] = {
        name: np.array(given.get(name, [0.0] * n)) for name in StepColumns.__dataclass_fields__
    }
    return StepColumns(**{"repeats": np.ones(n), **filled})


def test_a_row_of_like_steps_is_taken_apart() -> None:
    rows = columns(
        3,
        repeats=[1, 3, 1],
        end_s=[1, 4, 5],
        decode_seqs=[0, 2, 2],
        decode_context_tokens=[0, 10, 16],
        kv_usage_ratio=[0.25, 0.5, 0.75],
        kv_peak_ratio=[0.25, 0.625, 0.75],
        running=[2, 2, 2],
    )
    steps = singly(rows, 99)
    assert steps.repeats.tolist() == [1] * 5
    assert steps.decode_seqs.tolist() == [0, 2, 2, 2, 2]
    assert steps.decode_context_tokens.tolist() == [0, 10, 12, 14, 16]
    nan = float("nan")
    np.testing.assert_array_equal(steps.end_s, [1, nan, nan, 4, 5])
    np.testing.assert_array_equal(steps.kv_peak_ratio, [0.25, nan, nan, 0.625, 0.75])
    # Also in the midst of a row.
    assert [len(singly(rows, most)) for most in range(7)] == [0, 1, 2, 3, 4, 5, 5]
    assert singly(rows, 3).decode_context_tokens.tolist() == [0, 10, 12]


def test_steps_that_are_the_same_agree_and_what_is_unknown_is_not_compared() -> None:
    wanted = columns(3, repeats=[1, 1, 1], end_s=[1, 2, 3], running=[1, 1, 0])
    found = columns(3, repeats=[1, 1, 1], end_s=[1, float("nan"), 3 + 1e-7], running=[1, 1, 0])
    assert first_departure(wanted, wanted) == (3, "")
    assert first_departure(found, wanted) == (3, "")
    assert first_departure(columns(0), columns(0)) == (0, "")


def test_the_first_step_that_differs_is_named_with_what_does() -> None:
    wanted = columns(4, running=[1, 2, 3, 4], waiting=[0, 1, 0, 0], end_s=[1, 2, 3, 4])
    found = columns(4, running=[1, 2, 9, 4], waiting=[0, 7, 0, 0], end_s=[1, 2, 3, 4.5])
    steps, departs = first_departure(found, wanted)
    assert (steps, departs) == (1, "step 2: waiting requests: 7 simulated, 1 by vLLM")
    found = columns(4, running=[1, 2, 3, 4], waiting=[0, 1, 0, 0], end_s=[1, 2, 3.25, 4])
    steps, departs = first_departure(found, wanted)
    assert (steps, departs) == (2, "step 3: seconds at its end: 3.25 simulated, 3 by vLLM")


def test_a_replay_that_ends_too_early_departs_there() -> None:
    wanted = columns(3, running=[1, 1, 1])
    assert first_departure(columns(2, running=[1, 1]), wanted) == (
        2,
        "step 3: the simulator has ended",
    )
    # What differs before that is named instead.
    steps, departs = first_departure(columns(2, running=[1, 5]), wanted)
    assert (steps, departs) == (1, "step 2: running requests: 5 simulated, 1 by vLLM")


def with_vllm() -> str:
    """Import vLLM, as a process has that runs its engine; return its version."""
    serve.prepare_environment()
    import vllm  # noqa: F401 - what counts is that it was imported

    return serve.vllm_version()


def an_engine(*, asynchronous: bool, num_blocks: int = 40) -> SimulatedEngine:
    # As a profile has it; what it does not name is vLLM's default to the reference alone.
    options = {"scheduler_reserve_full_isl": True}
    shape = a_shape(asynchronous=asynchronous, scheduler=options)
    return SimulatedEngine(shape, num_blocks, STEPS, LIMITS)


def compared(
    engine: SimulatedEngine, trace: Trace, plan: ReplayPlan, replay_s: float = LONG_S
) -> Agreement:
    """Ask vLLM's scheduler here, and compare."""
    parts = (engine.shape, engine.ceiling, engine.num_blocks, engine.step_model)
    reference = replay_reference(*parts, trace, LIMITS, plan, replay_s)
    assert reference is not None
    return compare(engine, trace, LIMITS, plan, reference)


@pytest.mark.engine
@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_vllm_at_hand_decides_as_the_simulator_does(
    *, asynchronous: bool, has_windows: bool
) -> None:
    version, engine = with_vllm(), an_engine(asynchronous=asynchronous)
    if has_windows:
        # A decode gives back what others take: the usage falls in the midst of like steps.
        groups: tuple[KvGroup, ...] = (
            {"kind": "SlidingWindowSpec", "block_size": 16, "sliding_window": 40},
            {"kind": "FullAttentionSpec", "block_size": 16},
        )
        shape = replace(engine.shape, kv_kind="windows", kv_groups=groups)
        engine = replace(engine, shape=shape, num_blocks=60)
    trace = RandomTraffic(1, 40, 60.0, 150, 80, families=2).trace()
    plan = ReplayPlan(cut=CutRule(max_clock_s=1e-9))
    found = compared(engine, trace, plan)
    own = simulate(engine, PreparedTrace(trace, ReplayPlan()), LIMITS, ReplayPlan())
    assert own.steps.preempted > 0
    assert own.steps.cached_tokens > 0
    # To the end, whatever the plan's own rule for cuts says.
    assert (found.vllm_version, found.steps, found.departs) == (version, own.steps.steps, "")


@pytest.mark.engine
def test_only_as_many_steps_are_compared_as_there_is_time_for() -> None:
    with_vllm()
    engine = an_engine(asynchronous=True, num_blocks=10_000)
    found = compared(engine, a_trace([0.0] * 500, 20, 50), ReplayPlan(), 0.01)
    assert found.departs == ""
    assert 0 < found.steps < 1000


@pytest.mark.engine
@pytest.mark.parametrize(
    ("asynchronous", "departs"),
    [
        (False, "step 1: prompt tokens: 20 simulated, 60 by vLLM"),
        # Its first turn completes no batch.
        (True, "step 2: prompt tokens: 20 simulated, 60 by vLLM"),
    ],
)
def test_a_simulator_that_decides_otherwise_is_found_out(
    monkeypatch: pytest.MonkeyPatch, departs: str, *, asynchronous: bool
) -> None:
    with_vllm()

    def one_at_a_time(
        engine: SimulatedEngine, prepared: PreparedTrace, limits: EngineLimits, plan: ReplayPlan
    ) -> ReplayLog:
        return simulate(engine, prepared, EngineLimits(1, limits.max_num_batched_tokens), plan)

    monkeypatch.setattr("tuner.shadow.agreement.simulate", one_at_a_time)
    engine, trace = an_engine(asynchronous=asynchronous), a_trace([0.0] * 3, 20, 4)
    found = compared(engine, trace, ReplayPlan())
    assert (found.steps, found.departs) == (int(asynchronous), departs)


@pytest.mark.engine
def test_traffic_that_cannot_be_replayed_gives_no_agreement() -> None:
    with_vllm()
    engine = an_engine(asynchronous=False, num_blocks=3)
    # Both refuse it: nothing departs, and nothing is known to agree.
    found = compared(engine, a_trace([0.0], 100, 4), ReplayPlan())
    assert (found.steps, found.departs) == (0, "")
    reference = ReferenceReplay("0", None, error="out of memory")
    found = compare(engine, a_trace([0.0], 8, 4), LIMITS, ReplayPlan(), reference)
    assert (found.steps, found.departs) == (0, "a replay of it ends in: out of memory")


def test_a_simulator_that_goes_on_too_long_departs() -> None:
    engine, trace = an_engine(asynchronous=False), a_trace([0.0], 20, 4)
    plan = ReplayPlan(keep_steps=True)
    steps = simulate(engine, PreparedTrace(trace, plan), LIMITS, plan).kept_steps
    assert steps is not None
    fewer = singly(steps, 2)
    found = compare(
        engine, trace, LIMITS, ReplayPlan(), ReferenceReplay("0", fewer, is_whole=True)
    )
    assert (found.steps, found.departs) == (2, "step 3: vLLM has ended")
    found = compare(engine, trace, LIMITS, ReplayPlan(), ReferenceReplay("0", fewer))
    assert (found.steps, found.departs) == (2, "")


NO_VLLM = """
import sys
from support.shadow_parts import a_shape
from support.traffic import a_trace
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.shadow.reference import replay_reference
from tuner.shadow.step_model import StepModel

limits, model = EngineLimits(8, 128), StepModel.linear(0.01, 0.0, 0.0)
found = replay_reference(a_shape(), limits, 40, model, a_trace([0.0]), limits, ReplayPlan())
print(found, "vllm" in sys.modules)
"""


def test_nothing_is_compared_in_a_process_that_runs_no_vllm() -> None:
    command = [sys.executable, "-c", NO_VLLM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.stdout, done.returncode) == ("None False\n", 0), done.stderr


def test_vllm_is_asked_without_numba_beside_which_it_does_not_start_on_a_cpu() -> None:
    code = "import sys, tuner.shadow.reference; print('numba' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_of_several_comparisons_a_departure_stands_and_else_the_steps_add_up() -> None:
    agree, departs = Agreement("1", 10), Agreement("1", 3, "step 4: waiting requests")
    assert together([agree, agree]) == Agreement("1", 20)
    assert together([agree, departs]) == departs
    with pytest.raises(ValueError, match="nothing was compared"):
        together([])
