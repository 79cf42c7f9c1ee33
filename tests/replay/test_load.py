"""How much of a replay's work is done is known long before its first request ends."""

from __future__ import annotations

import pytest

from support.toy import ToyCosts, ToySource
from support.traffic import replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.replay.load import share_done
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.timeline import Outcome

LIMITS = EngineLimits(64, 8192)
COSTS = ToyCosts(base_s=0.020, per_seq_s=0.0004, per_prefill_token_s=0.0001)
SOURCE = ToySource(COSTS, max_model_len=100_000)


@pytest.mark.slow
@pytest.mark.parametrize("output", [100, 2000, 8000])
def test_a_glance_of_15_s_tells_what_the_whole_will_take(output: int) -> None:
    """Of 2,000 tokens and more nobody is answered by then: by answers it would be for ever."""
    trace = steady(120, per_s=2.0, prompt=400, output=output)
    whole_s = replay_toy(trace, LIMITS, SOURCE).clock_s
    glance = ReplayPlan(cut=CutRule(max_clock_s=15.0))
    log = replay_toy(trace, LIMITS, SOURCE, glance)
    assert (log.timelines.count(Outcome.COMPLETED) == 0) == (output >= 2000)
    told_s = log.steps.duration_s / share_done(trace, log.timelines, log.steps)
    # Batches are not full yet, so what is left takes less than what was seen.
    assert 0.8 * whole_s < told_s < 3 * whole_s


def test_a_replay_that_came_to_its_end_has_done_all() -> None:
    trace = steady(60, per_s=5.0)
    log = replay_toy(trace, LIMITS, SOURCE)
    assert share_done(trace, log.timelines, log.steps) == pytest.approx(1.0)


def test_of_prompts_alone_the_share_is_that_of_their_tokens() -> None:
    """Three prompts of 4,000 tokens in chunks, cut in the midst of the first or second."""
    trace = steady(3, per_s=100.0, prompt=4000, output=50)
    plan = ReplayPlan(cut=CutRule(max_clock_s=0.5))
    log = replay_toy(trace, EngineLimits(4, 512), SOURCE, plan)
    done = log.steps.prefill_tokens / trace.prompt_tokens.sum()
    assert 0 < share_done(trace, log.timelines, log.steps) <= done
