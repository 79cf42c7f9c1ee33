"""A recording of a served engine says what its steps take beyond the profile's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.served_parts import CALM, LIMITS, PROFILE, STEPS, recorded, replaying
from tuner.errors import ShadowError, TooFewSamplesError
from tuner.shadow.correction import WRONG_RATIO
from tuner.shadow.served import by_recording


@pytest.mark.parametrize(
    ("added_s", "ratio", "frontend_s"),
    [(0.003, 1.0, 0.0), (0.003, 0.7, 0.005), (-0.002, 1.5, 0.002), (0.0, 1.0, 0.0)],
)
def test_what_serving_adds_is_found_and_predicts_later_requests(
    added_s: float, ratio: float, frontend_s: float
) -> None:
    trace = recorded(CALM.trace(), STEPS.served(added_s, ratio), frontend_s)
    corrected, found = by_recording(PROFILE, trace, LIMITS, replaying(trace))
    assert found.added_step_s == pytest.approx(added_s, abs=0.0004)
    assert found.prefill_ratio == pytest.approx(ratio, rel=0.08)
    assert found.first_token_s == pytest.approx(frontend_s, abs=0.003)
    assert found.learnt == pytest.approx(found.checked, abs=1)
    assert abs(found.off_now["tpot p50"]) < 0.03
    assert abs(found.off_now["e2e p50"]) < 0.03
    assert corrected.metric_error_ratio is not None
    assert corrected.metric_error_ratio < 0.03
    if added_s:
        assert abs(found.off_before["tpot p50"]) > 0.1
    assert corrected.step_model.base_s == pytest.approx(STEPS.base_s + added_s, abs=0.0004)
    assert corrected.calibrated_on[-1] == "8/512, served"


def test_requests_that_come_later_teach_nothing() -> None:
    """The second half is served three times as slowly: it is off by that, no more."""
    trace = recorded(CALM.trace(), STEPS)
    assert trace.ttft_s is not None
    assert trace.e2e_s is not None
    late = np.arange(len(trace)) >= len(trace) // 2
    slower = replace(
        trace,
        ttft_s=np.where(late, 3 * trace.ttft_s, trace.ttft_s),
        e2e_s=np.where(late, 3 * trace.e2e_s, trace.e2e_s),
    )
    _, found = by_recording(PROFILE, slower, LIMITS, replaying(trace))
    assert abs(found.added_step_s) < 0.0003
    assert found.off_now["e2e p50"] == pytest.approx(1 / 3 - 1, abs=0.05)


def test_requests_that_the_engine_refuses_are_neither_learnt_from_nor_compared() -> None:
    """The server took longer prompts than the profile's engine does, in the second half."""
    trace = recorded(CALM.trace(), STEPS)
    late = np.arange(len(trace)) >= len(trace) // 2
    longer = replace(trace, prompt_tokens=np.where(late, 1_000_000, trace.prompt_tokens))
    _, found = by_recording(PROFILE, longer, LIMITS, replaying(longer))
    assert found.learnt + found.checked <= len(trace) // 2
    assert all(abs(off) < 0.1 for off in found.off_now.values())


def test_prompts_that_are_all_alike_leave_prefill_as_it_was() -> None:
    trace = CALM.trace()
    alike = replace(trace, prompt_tokens=np.full(len(trace), 64))
    spaced = replace(alike, due_s=np.arange(len(trace), dtype=np.float64) * 2)
    served = recorded(spaced, STEPS.served(0.003, 1.0))
    _, found = by_recording(PROFILE, served, LIMITS, replaying(served))
    assert not found.has_prefill
    assert found.prefill_ratio == 1.0
    assert found.added_step_s == pytest.approx(0.003, abs=0.0003)
    assert any(line.startswith("prefill is as it was") for line in found.lines())


def test_a_recording_without_times_or_with_few_requests_is_refused() -> None:
    trace = CALM.trace()
    with pytest.raises(TooFewSamplesError, match="does not say when tokens came"):
        by_recording(PROFILE, trace, LIMITS, replaying(trace))
    few = recorded(trace.slice_rows(np.arange(60)), STEPS)
    with pytest.raises(TooFewSamplesError, match="at least 80 are needed"):
        by_recording(PROFILE, few, LIMITS, replaying(few))


def test_times_that_no_step_model_explains_are_told() -> None:
    trace = CALM.trace()
    instant = replace(trace, ttft_s=np.full(len(trace), 1e-4), e2e_s=np.full(len(trace), 2e-4))
    with pytest.raises(ShadowError, match="still does not come up"):
        by_recording(PROFILE, instant, LIMITS, replaying(trace))


def test_a_derived_profile_is_no_nearer_by_a_recording_than_by_a_point() -> None:
    """A constant for each step stands for no level that is off, at other limits."""
    derived = replace(PROFILE, origin="derived, not measured", metric_error_ratio=0.2)
    near, far = (recorded(CALM.trace(), STEPS.scaled(times)) for times in (1.2, 3.0))
    now, _ = by_recording(derived, near, LIMITS, replaying(near))
    assert now.metric_error_ratio == WRONG_RATIO
    assert now.moved_ratio == pytest.approx(1.2, rel=0.1)
    with pytest.raises(ShadowError, match="recorded tokens take"):
        by_recording(derived, far, LIMITS, replaying(far))
