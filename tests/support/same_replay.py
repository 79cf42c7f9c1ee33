"""Two replays compared in every respect: each step, each instant, each sum."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from support.schedule_cases import Case, random_case
from support.shadow_parts import a_reference
from support.traffic import kept
from tuner.engine.steps import StepColumns
from tuner.errors import TunerError
from tuner.replay.loop import ReplayLog, replay
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulator import simulate
from tuner.stats import Floats, WeightedSamples
from tuner.traffic.prompts import PromptSource

# What is counted in a step; where a row stands for like steps it is that of each.
_COUNTS = (
    "decode_seqs",
    "prefill_tokens",
    "decode_context_tokens",
    "prefill_context_tokens",
    "decode_spread_tokens",
    "running",
    "waiting",
    "preempted",
    "cached_tokens",
    "draft_tokens",
)
_SUMS = (
    "steps",
    "prefill_tokens",
    "cached_tokens",
    "preempted",
    "max_step_tokens",
)
# Instants are sums of some thousand seconds, added in another order.
_SAME_S = 1e-6


def simulated_case(case: Case) -> ReplayLog | TunerError:
    """Return the case as the simulator replays it, or the error that it ends in."""
    try:
        return simulate(
            case.engine, PreparedTrace(case.trace, case.plan), case.limits, case.plan
        )
    except TunerError as error:
        return error


def referenced_case(case: Case) -> ReplayLog | TunerError:
    """Return the case as vLLM's own scheduler has it; needs vLLM."""
    like = case.engine
    given = (like.shape, like.ceiling, like.num_blocks, like.step_model, like.accepted)
    reference = a_reference(*given)
    prompts = PromptSource(case.trace, like.shape.vocab_size)
    try:
        reference.set_limits(case.limits)
        return replay(reference, case.trace, prompts, case.plan)
    except TunerError as error:
        return error


def assert_same_result(found: ReplayLog | TunerError, wanted: ReplayLog | TunerError) -> None:
    """Compare two replays, of which each may have ended in an error."""
    if isinstance(found, TunerError) or isinstance(wanted, TunerError):
        assert (type(found), str(found)) == (type(wanted), str(wanted))
        return
    assert_same_replay(found, wanted)


def compare_with_the_reference(
    seed: int,
    *,
    has_windows: bool | None = None,
    has_drafts: bool = False,
    has_states: bool = False,
) -> ReplayLog | TunerError:
    """Replay the case of a seed on both; return what vLLM's scheduler made of it."""
    case = random_case(
        seed, has_windows=has_windows, has_drafts=has_drafts, has_states=has_states
    )
    wanted = referenced_case(case)
    try:
        assert_same_result(simulated_case(case), wanted)
    except AssertionError as error:
        error.add_note(f"the case of seed {seed}")
        raise
    return wanted


def compare_many(
    seeds: Iterable[int], *, has_windows: bool | None = None, has_states: bool = False
) -> None:
    """Replay cases on both, of which some have to preempt and some to find prefixes cached."""
    logs = [
        compare_with_the_reference(seed, has_windows=has_windows, has_states=has_states)
        for seed in seeds
    ]
    done = [log for log in logs if isinstance(log, ReplayLog)]
    assert sum(log.steps.preempted > 0 for log in done) > 2
    assert sum(log.steps.cached_tokens > 0 for log in done) > 5


def assert_same_replay(found: ReplayLog, wanted: ReplayLog) -> None:
    """Compare all that two replays brought out, their single steps where both kept them."""
    if found.kept_steps is not None and wanted.kept_steps is not None:
        _assert_same_steps(kept(found), kept(wanted))
    _assert_same_timelines(found, wanted)
    assert found.cut_reason == wanted.cut_reason
    assert found.clock_s == pytest.approx(wanted.clock_s, abs=_SAME_S)
    assert found.is_closed_loop == wanted.is_closed_loop
    _assert_same_sums(found, wanted)


def each_step(columns: StepColumns) -> dict[str, Floats]:
    """Return what is counted in every single step, like ones apart.

    Shapes: every column is [steps].
    """
    times = columns.repeats.astype(np.int64)
    steps = {name: np.repeat(getattr(columns, name), times) for name in _COUNTS}
    first = np.repeat(np.cumsum(times) - times, times)
    within = np.arange(first.size) - first
    steps["decode_context_tokens"] += within * steps["decode_seqs"]
    return steps


def _assert_same_steps(found: StepColumns, wanted: StepColumns) -> None:
    here, there = each_step(found), each_step(wanted)
    both = min(here["running"].size, there["running"].size)
    differ = np.zeros(both, dtype=bool)
    for name in _COUNTS:
        differ |= here[name][:both] != there[name][:both]
    if differ.any():
        at = int(np.argmax(differ))
        one, other = ({n: column[at] for n, column in part.items()} for part in (here, there))
        apart = [f"{n} {one[n]:g}, not {other[n]:g}" for n in one if one[n] != other[n]]
        assert not apart, f"step {at + 1}: {', '.join(apart)}"
    assert here["running"].size == there["running"].size


def _assert_same_timelines(found: ReplayLog, wanted: ReplayLog) -> None:
    here, there = found.timelines, wanted.timelines
    for name in ("outcome", "output_tokens"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name), err_msg=name)
    for name in ("due_s", "sent_s", "first_s", "last_s"):
        one, other = getattr(here, name), getattr(there, name)
        np.testing.assert_allclose(one, other, rtol=0, atol=_SAME_S, err_msg=name)
    _assert_same_samples(here.gap_s, there.gap_s, "gaps")
    # Follows from all the steps together, however they were summed up.
    np.testing.assert_allclose(here.work_s, there.work_s, 1e-6, 1e-12, err_msg="work_s")


def _assert_same_sums(found: ReplayLog, wanted: ReplayLog) -> None:
    here, there = found.steps, wanted.steps
    for name in _SUMS:
        assert getattr(here, name) == getattr(there, name), name
    assert here.duration_s == pytest.approx(there.duration_s, abs=_SAME_S)
    assert dict(here.peaks) == pytest.approx(dict(there.peaks), abs=1e-9)
    for name, level in there.levels.items():
        _assert_same_samples(here.levels[name], level, name)
    _assert_same_samples(here.decode_steps, there.decode_steps, "decode steps")


def _assert_same_samples(found: WeightedSamples, wanted: WeightedSamples, what: str) -> None:
    """Compare how many samples there are and what they come to."""
    assert found.total_weight == pytest.approx(wanted.total_weight, abs=_SAME_S), what
    sums = [float(samples.values @ samples.weights) for samples in (found, wanted)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6, abs=_SAME_S), what
