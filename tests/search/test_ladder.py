"""The search finds what the toy is known to like, tries nothing twice, and knows its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.optional import not_none
from support.toy import ToyCosts, ToySource
from support.traffic import ToyPrompts, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError
from tuner.replay.loop import replay
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.search.ladder import FINALISTS, at_edge, climb_is_over, disturbed, finalists, propose
from tuner.search.objective import WORST_SLACK, Objective, Score, Scoring, Tier
from tuner.search.space import SearchSpace
from tuner.search.trials import TIE_RATIO, Observation, Phase, leader
from tuner.traffic.traces import Trace

BALANCED = Scoring(Objective.BALANCED, (), "p95")
CURRENT = EngineLimits(16, 2048)
SPACE = SearchSpace(CURRENT, (1, 2, 4, 8, 16, 32), (512, 1024, 2048), EngineLimits(256, 8192))
LONGEST_SEARCH = 40
FLOODED = ToyCosts(base_s=0.05, per_seq_s=0.0, flood_tokens=500, flood_s=0.002)

Measure = Callable[[EngineLimits, Phase, Sequence[Observation]], Observation]


@dataclass(frozen=True)
class OnToy:
    """Measures limits as a session does: one engine, a cut rule, failures recorded."""

    source: ToySource
    trace: Trace
    goal: Scoring = BALANCED
    cuts: bool = True

    def __call__(
        self, limits: EngineLimits, phase: Phase, seen: Sequence[Observation]
    ) -> Observation:
        """Replay once and reduce it to what the search sees."""
        best = leader(seen)
        rule = self.goal.cut_rule(best.score if best else None, len(self.trace))
        plan = ReplayPlan(cut=rule) if self.cuts else ReplayPlan()
        engine = self.source.start({}, limits)
        try:
            log = replay(engine, self.trace, ToyPrompts(self.trace), plan)
        except EngineError:
            failed = Score(Tier.FAILED, math.inf, "failed")
            return Observation(limits, phase, failed, 0, 0, None)
        m = measure([log])
        peak, tokens = int(m.running.max), m.max_step_tokens
        step_s = m.latency("decode_step_s", "p50")
        return Observation(limits, phase, self.goal.score(m), peak, tokens, step_s)

    def value(self, seqs: int, budget: int = 2048) -> Score:
        """Return the score of limits replayed whole."""
        whole = replace(self, cuts=False)
        return whole(EngineLimits(seqs, budget), Phase.LADDER, []).score


def searched(measured: Measure, space: SearchSpace = SPACE) -> list[Observation]:
    """Run a search to its end, checking on the way what every search must keep."""
    history: list[Observation] = []
    while (proposal := propose(history, space)) is not None:
        assert proposal == propose(list(history), space)
        assert proposal.limits not in [o.limits for o in history]
        if history:
            assert proposal.limits.within(space.ceiling)
            assert proposal.limits.max_num_batched_tokens >= space.min_budget
        history.append(measured(proposal.limits, proposal.phase, history))
        assert len(history) <= LONGEST_SEARCH
    assert history[0].limits == space.current
    assert [o.phase is Phase.CURRENT for o in history] == [True] + [False] * (len(history) - 1)
    return history


def won(history: Sequence[Observation]) -> Observation:
    return not_none(leader(history))


def near(score: Score, best: Score, tolerance_ratio: float = 0.05) -> bool:
    """Whether it is as good: a tie of 3 % with a cap that refining left 2 % beside the best."""
    return score.tier is best.tier and score.value <= best.value * (1 + tolerance_ratio)


@pytest.mark.parametrize("knee", [2, 6, 10, 24])
@pytest.mark.parametrize("objective", [Objective.BALANCED, Objective.THROUGHPUT])
def test_it_finds_the_cap_beyond_which_a_crowd_hurts(knee: int, objective: Objective) -> None:
    costs = ToyCosts(base_s=0.02, per_seq_s=0.0002, knee=knee, crowd_s=0.01)
    trace = steady(120, 60.0, output=12)
    on = OnToy(ToySource(costs), trace, Scoring(objective, (), "p95"))
    history = searched(on)
    by_cap = {cap: on.value(cap) for cap in range(1, 33)}
    best = min(by_cap.values(), key=lambda score: score.order)
    found = won(history).limits
    assert near(by_cap[found.max_num_seqs], best), (found, by_cap)


def test_it_stops_climbing_once_more_gains_nothing() -> None:
    costs = ToyCosts(base_s=0.02, per_seq_s=0.0002, knee=2, crowd_s=0.02)
    on = OnToy(ToySource(costs), steady(250, 60.0))
    space = replace(SPACE, current=EngineLimits(2, 2048))
    history = searched(on, space)
    assert max(o.limits.max_num_seqs for o in history) == 8
    assert won(history).limits.max_num_seqs == 2


def test_it_goes_past_the_ladder_while_the_edge_wins() -> None:
    costs = ToyCosts(base_s=0.05, per_seq_s=0.0)
    history = searched(OnToy(ToySource(costs), steady(400, 300.0, output=8)))
    tried = {o.limits.max_num_seqs for o in history if o.phase is Phase.EXTEND}
    assert {64, 128} <= tried
    assert won(history).limits.max_num_seqs > 64


def test_it_ends_at_the_ceiling_and_says_that_the_edge_was_best() -> None:
    on = OnToy(ToySource(ToyCosts(base_s=0.05, per_seq_s=0.0)), steady(400, 400.0, output=8))
    space = replace(SPACE, ceiling=EngineLimits(64, 8192))
    history = searched(on, space)
    best = won(history).limits
    assert best.max_num_seqs == 64
    assert at_edge(best, history)


def test_where_the_cap_never_binds_it_tries_little_and_takes_the_smallest_that_is_enough() -> (
    None
):
    on = OnToy(ToySource(), steady(200, 1.0))
    history = searched(on)
    best = won(history).limits
    assert max(o.limits.max_num_seqs for o in history) == 16
    assert near(on.value(best.max_num_seqs), on.value(64), TIE_RATIO)
    assert best.max_num_seqs <= 8
    assert not at_edge(best, history)


def test_a_current_configuration_far_above_the_ladder_does_not_hide_the_small_ones() -> None:
    costs = ToyCosts(base_s=0.02, per_seq_s=0.0002, knee=6, crowd_s=0.01)
    on = OnToy(ToySource(costs), steady(250, 60.0))
    space = replace(SPACE, current=EngineLimits(256, 2048))
    assert 5 <= won(searched(on, space)).limits.max_num_seqs <= 7


def test_where_the_current_cap_starves_the_slow_ones_below_it_are_left_out() -> None:
    on = OnToy(ToySource(ToyCosts(base_s=0.05, per_seq_s=0.0)), steady(250, 30.0, output=8))
    space = replace(SPACE, current=EngineLimits(8, 2048))
    history = searched(on, space)
    assert history[0].score.tier is Tier.NOT_SUSTAINED
    assert min(o.limits.max_num_seqs for o in history) == 8
    assert won(history).score.tier is Tier.GOOD


def test_where_a_crowd_starves_the_current_cap_lower_ones_are_found() -> None:
    costs = ToyCosts(base_s=0.02, per_seq_s=0.0002, knee=6, crowd_s=0.02)
    on = OnToy(ToySource(costs), steady(250, 60.0))
    history = searched(on, replace(SPACE, current=EngineLimits(16, 2048)))
    assert history[0].score.tier is Tier.NOT_SUSTAINED
    assert [o.limits.max_num_seqs for o in history[1:4]] == [32, 8, 4]
    assert 5 <= won(history).limits.max_num_seqs <= 7


def test_a_lower_budget_is_found_where_floods_hurt() -> None:
    on = OnToy(ToySource(FLOODED), steady(150, 3.0, prompt=330, output=60))
    best = won(searched(on)).limits
    assert best.max_num_batched_tokens == 512
    every = {cap: on.value(cap, 512) for cap in range(8, 25)}
    assert near(every[best.max_num_seqs], min(every.values(), key=lambda s: s.order), 0.1)


def test_the_budget_goes_on_down_as_long_as_that_helps() -> None:
    costs = replace(FLOODED, flood_tokens=600)
    on = OnToy(ToySource(costs), steady(150, 6.0, prompt=400, output=40))
    history = searched(on, replace(SPACE, current=EngineLimits(32, 2048)))
    moved = [o.limits.max_num_batched_tokens for o in history if o.phase is Phase.BUDGET]
    assert moved == [1024, 512]
    assert won(history).limits.max_num_batched_tokens == 512


def test_a_lower_budget_is_found_though_the_next_lower_ones_change_nothing() -> None:
    on = OnToy(ToySource(FLOODED), steady(150, 3.0, prompt=330, output=60))
    current = EngineLimits(16, 8192)
    space = replace(SPACE, current=current, budgets=(512, 1024, 2048, 4096, 8192))
    history = searched(on, space)
    peak = history[0].peak_step_tokens
    assert 512 < peak < 4096, "the case wants budgets between the fullest step and the current"
    assert won(history).limits.max_num_batched_tokens == 512
    tried = [o.limits.max_num_batched_tokens for o in history if o.phase is Phase.BUDGET]
    assert tried == [512]


def test_the_cap_is_climbed_again_at_a_better_budget() -> None:
    costs = ToyCosts(flood_tokens=600, flood_s=0.002)
    on = OnToy(ToySource(costs), steady(250, 12.0, prompt=400))
    best = won(searched(on))
    assert best.score.tier is Tier.GOOD, "a cap that sustains the load is there: 8 at 512"
    assert best.limits.max_num_batched_tokens == 512


def test_the_budget_stops_where_it_begins_to_hurt() -> None:
    values = {4096: 1.0, 2048: 0.8, 1024: 0.9}
    space = SearchSpace(
        EngineLimits(16, 4096), (16,), (512, 1024, 2048, 4096), EngineLimits(16, 4096)
    )

    def known(
        limits: EngineLimits,
        phase: Phase,
        seen: Sequence[Observation],  # noqa: ARG001 - what it gives follows from the limits
    ) -> Observation:
        budget = limits.max_num_batched_tokens
        score = Score(Tier.GOOD, values[budget], "e2e_p95")
        return Observation(limits, phase, score, 16, budget, None)

    history = searched(known, space)
    moved = [o for o in history if o.phase is not Phase.EXTEND]
    assert [o.limits.max_num_batched_tokens for o in moved] == [4096, 2048, 1024]


def test_a_higher_budget_is_found_where_steps_are_dear() -> None:
    costs = ToyCosts(base_s=0.05, per_seq_s=0.0, per_prefill_token_s=1e-6)
    on = OnToy(ToySource(costs), steady(250, 12.0, prompt=600, output=4))
    space = replace(SPACE, current=EngineLimits(16, 512))
    best = won(searched(on, space)).limits
    assert best.max_num_batched_tokens > 512
    assert best.max_num_batched_tokens >= best.max_num_seqs


def test_an_slo_is_a_bound_and_not_a_price() -> None:
    # Throughput wants 24 and more; decode steps must stay short, which wants few.
    costs = ToyCosts(base_s=0.01, per_seq_s=0.001)
    slos = (Slo.parse("decode_step_p99=16ms"),)
    on = OnToy(ToySource(costs), steady(250, 60.0), Scoring(Objective.THROUGHPUT, slos, "p95"))
    best = won(searched(on))
    assert best.score.tier is Tier.GOOD
    assert 5 <= best.limits.max_num_seqs <= 6
    free = OnToy(ToySource(costs), steady(250, 60.0), Scoring(Objective.THROUGHPUT, (), "p95"))
    assert won(searched(free)).limits.max_num_seqs > 8


def test_what_fails_is_infeasible_and_never_a_score() -> None:
    source = ToySource(ToyCosts(base_s=0.05, per_seq_s=0.0), no_memory_above=20)
    history = searched(OnToy(source, steady(300, 100.0)))
    failed = [o for o in history if o.score.tier is Tier.FAILED]
    assert failed
    assert all(o.limits.max_num_seqs > 20 for o in failed)
    assert 16 <= won(history).limits.max_num_seqs <= 20
    assert not set(finalists(history, SPACE)) & {o.limits for o in failed}


def test_where_everything_fails_it_ends_and_races_nobody_but_the_current() -> None:
    history = searched(OnToy(ToySource(no_memory_above=0), steady(50, 5.0)))
    assert leader(history) is None
    assert finalists(history, SPACE) == [CURRENT]
    assert len(history) <= 8


def test_cutting_short_saves_replays_without_changing_the_answer() -> None:
    costs = ToyCosts(base_s=0.02, per_seq_s=0.0002, knee=6, crowd_s=0.01)
    on = OnToy(ToySource(costs), steady(150, 10.0), Scoring(Objective.LATENCY, (), "p95"))
    cut, whole = searched(on), searched(replace(on, cuts=False))
    assert any(o.score.tier is Tier.CUT for o in cut)
    assert won(cut).limits == won(whole).limits


def test_noise_within_the_tie_does_not_lead_it_astray() -> None:
    """Seeds 0 to 9 with 2 % noise in every step: within 10 % of the best in each."""
    costs = ToyCosts(base_s=0.02, per_seq_s=0.0002, knee=10, crowd_s=0.01)
    quiet = OnToy(ToySource(costs), steady(120, 60.0, output=12))
    best = min(quiet.value(cap).value for cap in range(6, 14))
    for seed in range(10):
        noisy = replace(quiet, source=replace(quiet.source, noise_ratio=0.02, seed=seed))
        found = won(searched(noisy)).limits
        assert quiet.value(found.max_num_seqs).value <= 1.10 * best


def test_a_better_cap_that_was_cut_above_is_not_the_edge() -> None:
    best = seen_at(8, 1.0, peak=8)
    cut = replace(seen_at(16, 9.0), score=Score(Tier.CUT, math.inf, "cut short"))
    assert at_edge(best.limits, [best])
    assert not at_edge(best.limits, [best, cut])


def seen_at(
    seqs: int, value: float, *, peak: int | None = None, step_s: float | None = None
) -> Observation:
    """Return an observation whose cap bound, unless told otherwise."""
    score = Score(Tier.GOOD, value, "e2e_p95")
    limits = EngineLimits(seqs, 2048)
    return Observation(limits, Phase.LADDER, score, peak or seqs, 100, step_s)


def test_the_climb_is_over_when_decode_and_tail_both_degrade_twice() -> None:
    best, slow, slower = seen_at(4, 1.0, step_s=1), seen_at(8, 2.0, step_s=2), seen_at(16, 3.0)
    assert climb_is_over([best, slow, slower])
    assert not climb_is_over([best, slow])
    assert not climb_is_over([best, slow, replace(slower, decode_step_s=1.0)])
    assert not climb_is_over([best, slow, replace(slower, score=best.score)])
    assert climb_is_over([seen_at(4, 1.0, peak=3)])
    assert not climb_is_over([])


def test_finalists_are_few_near_and_end_with_the_current_one() -> None:
    history = [replace(seen_at(64, 2.0), limits=CURRENT, peak_running=16)]
    history += [seen_at(cap, 1.0 + cap / 1000) for cap in (2, 4, 5, 6)] + [seen_at(8, 1.2)]
    chosen = finalists(history, SPACE)
    assert [limits.max_num_seqs for limits in chosen] == [2, 4, 5, 16]
    assert len(chosen) == FINALISTS + 1


def bounded(
    cap: int, tail_s: float, ttft_s: float, load: float = 0.5, per_s: float = 30.0
) -> Observation:
    """Return a replay with an SLO of 0.5 s on TTFT, and so much of its capacity used."""
    used, rate = ttft_s / 0.5, ("requests_per_s", 1 / per_s)
    others = (("e2e_p95", tail_s), rate, (WORST_SLACK, used))
    if used > 1:
        score = Score(Tier.BREAKS_SLO, used, WORST_SLACK, others[:2], used, load)
    elif load > 1:
        score = Score(Tier.NOT_SUSTAINED, rate[1], rate[0], others[::2], used, load)
    else:
        score = Score(Tier.GOOD, tail_s, "e2e_p95", others[1:], used, load)
    return replace(seen_at(cap, tail_s, peak=cap), score=score)


def racing(*history: Observation) -> list[int]:
    """Return the caps that race against the current one."""
    current = replace(bounded(16, 50.0, 5.0), limits=CURRENT)
    chosen = finalists([current, *history], SPACE)
    return [limits.max_num_seqs for limits in chosen[:-1]]


def test_a_hair_beyond_a_bound_is_no_reason_to_stay_out_of_the_race() -> None:
    """505 ms against 500, told by a replay that may be off by a tenth, with the best tail."""
    within, beyond, far = bounded(4, 2.0, 0.40), bounded(6, 1.0, 0.505), bounded(8, 0.5, 0.70)
    assert set(racing(within, beyond, far)) == {4, 6}
    assert racing(within, far) == [4]
    # A load that is a hair too much is a bound like another.
    hasty = bounded(6, 1.0, 0.1, load=1.05)
    assert set(racing(within, hasty)) == {4, 6}
    assert racing(within, bounded(6, 1.0, 0.1, load=1.15)) == [4]


def test_a_hair_within_a_bound_is_no_reason_to_race_alone() -> None:
    """If 495 ms are 520 live, somebody has to be there who holds the bound for certain."""
    edge, safe, worse = bounded(6, 1.0, 0.495), bounded(4, 3.0, 0.2), bounded(2, 5.0, 0.2)
    assert racing(edge, safe, worse) == [6, 4]


def test_where_nobody_sustains_the_load_about_the_same_rate_is_told_by_the_tail() -> None:
    """34 and 32/s with tails of 4.87 and 4.30 s: the tier decides nothing between them."""
    all_in = bounded(32, 4.87, 0.1, load=1.6, per_s=34.0)
    smaller = bounded(8, 4.30, 0.1, load=1.8, per_s=32.5)
    slow = bounded(2, 9.0, 0.1, load=3.0, per_s=20.0)
    assert won([all_in, smaller, slow]) is smaller
    assert racing(all_in, smaller, slow) == [8, 32]
    assert won([bounded(8, 4.3, 0.1, load=2.0, per_s=28.0), all_in]) is all_in


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Measure, SearchSpace]:
    """Return any world at all: scores, tiers, peaks and spaces without rhyme or reason."""
    seed = draw(st.integers(0, 10_000))
    caps = st.lists(st.integers(1, 48), min_size=1, max_size=6, unique=True)
    space = SearchSpace(
        EngineLimits(draw(st.integers(1, 300)), draw(st.integers(300, 4096))),
        tuple(sorted(draw(caps))),
        tuple(
            sorted(draw(st.lists(st.sampled_from([512, 1024, 8192]), max_size=3, unique=True)))
        ),
        EngineLimits(draw(st.integers(64, 300)), draw(st.integers(4096, 9000))),
        draw(st.sampled_from([1, 600])),
    )

    def anything(
        limits: EngineLimits, phase: Phase, seen: Sequence[Observation]
    ) -> Observation:
        word = hash((seed, limits, len(seen) < 0))
        tier = list(Tier)[min(word % 9, 4)] if word % 9 < 5 else Tier.GOOD
        value = math.inf if tier in (Tier.CUT, Tier.FAILED) else 1 + word // 9 % 100 / 50
        peak = 1 + word // 900 % limits.max_num_seqs
        tokens = 1 + word // 9000 % limits.max_num_batched_tokens
        score = Score(tier, value, "e2e_p95")
        return Observation(limits, phase, score, peak, tokens, 1 + word % 3)

    return anything, space


@given(worlds())
@settings(deadline=None, max_examples=150)
def test_any_search_ends_and_repeats_nothing(world: tuple[Measure, SearchSpace]) -> None:
    measured, space = world
    history = searched(measured, space)
    chosen = finalists(history, space)
    assert chosen[-1] == space.current
    assert len(set(chosen)) == len(chosen) <= FINALISTS + 1


def test_a_smaller_cap_with_much_slower_steps_gives_a_disturbed_machine_away() -> None:
    score = Score(Tier.GOOD, 1.0, "e2e_p95")

    def took(cap: int, step_s: float | None) -> Observation:
        return Observation(EngineLimits(cap, 2048), Phase.LADDER, score, cap, 0, step_s)

    assert disturbed([took(6, 0.103), took(16, 0.058)])
    assert disturbed([took(8, 0.020), took(8, 0.010)])
    assert not disturbed([took(4, 0.003), took(16, 0.012), took(32, None)])
