"""Which configuration to measure next, and which of those measured go into the race.

A pure function of the history, so that a resumed run goes on as the first would have. It climbs
the ladder of caps, goes past its end while the edge wins, refines between neighbours, then
moves the token budget. Where requests queue for the current cap without end it climbs from
there, and goes down only while that does not hurt: a lower cap is slower still, and the
slowest replays would cost the most.

Tried and given up: Optuna's TPE as the proposer. With fifteen points of a noisy one-hump
curve it spends most of them on what the ladder's order shows for nothing; the study keeps the
trials, and the ladder proposes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import DISTORTED_RATIO
from tuner.search.objective import Tier
from tuner.search.space import SearchSpace
from tuner.search.trials import TIE_RATIO, Observation, Phase, Proposal, leader

# Decode steps this much slower count as degraded: ours.
DECODE_DEGRADED_RATIO = 0.05
# Refining stops when neighbours are closer than this share of the cap: ours.
REFINE_RATIO = 0.2
MAX_REFINEMENTS = 4
# How many race beside the current one, and how far off a single replay may be of who is among
# them: ours, each costs two rounds.
FINALISTS, FINALIST_RATIO = 3, 0.10


def propose(history: Sequence[Observation], space: SearchSpace) -> Proposal | None:
    """Return what to measure next, or None when the search is done."""
    observations = [o for o in history if o.phase.is_search]
    if not observations:
        return Proposal(space.current, Phase.CURRENT)
    for stage in (_climb, _descend, _refine, _move_budget, _climb_again):
        proposal = stage(observations, space)
        if proposal is not None:
            return proposal
    return None


def _measured(observations: Sequence[Observation], limits: EngineLimits) -> Observation | None:
    return next((o for o in observations if o.limits == limits), None)


def same_schedule(observations: Sequence[Observation], limits: EngineLimits) -> bool:
    """Whether a measured configuration is known to make the same batches as these limits."""
    for o in observations:
        if o.limits == limits:
            return True
        same_cap = o.limits.max_num_seqs == limits.max_num_seqs or (
            o.cap_never_bound and o.has_room(limits.max_num_seqs)
        )
        same_budget = o.limits.max_num_batched_tokens == limits.max_num_batched_tokens or (
            o.budget_never_bound and limits.max_num_batched_tokens > o.peak_step_tokens
        )
        if same_cap and same_budget:
            return True
    return False


def _rungs(observations: Sequence[Observation], space: SearchSpace) -> list[Observation]:
    """Return the observations along the ladder's budget, by cap."""
    along = [
        o
        for o in observations
        if o.limits == space.at(o.limits.max_num_seqs, space.reference_budget)
    ]
    return sorted(along, key=lambda o: o.limits.max_num_seqs)


def _caps(space: SearchSpace) -> Iterator[tuple[int, Phase]]:
    """Yield the ladder's caps, then doubles of its last without end."""
    for seqs in space.ladder:
        yield seqs, Phase.LADDER
    seqs = space.ladder[-1]
    while True:
        seqs *= 2
        yield seqs, Phase.EXTEND


def _starved(observations: Sequence[Observation], space: SearchSpace) -> Observation | None:
    """Return the current configuration as it stands on the ladder where its cap is too low.

    Its load grows faster than it is served while as many run as may.
    """
    on_ladder = space.at(space.current.max_num_seqs, space.reference_budget)
    current = _measured(observations, on_ladder)
    if current is None or not (current.is_whole and current.cap_bound):
        return None
    is_overloaded = current.score.tier is Tier.NOT_SUSTAINED or (
        current.score.load_used is not None and current.score.load_used > 1
    )
    return current if is_overloaded else None


def _climb(observations: Sequence[Observation], space: SearchSpace) -> Proposal | None:
    """Go up the ladder, and past its end while the edge keeps winning."""
    starved = _starved(observations, space)
    climbed = [] if starved is None else [starved]
    for seqs, phase in _caps(space):
        if starved is not None and seqs <= starved.limits.max_num_seqs:
            continue
        limits = space.at(seqs, space.reference_budget)
        if not limits.within(space.ceiling) or climb_is_over(climbed):
            return None
        if phase is Phase.EXTEND and leader(climbed) is not climbed[-1]:
            return None
        measured = _measured(observations, limits)
        if measured is None:
            return None if same_schedule(observations, limits) else Proposal(limits, phase)
        climbed.append(measured)
    return None


def _descend(observations: Sequence[Observation], space: SearchSpace) -> Proposal | None:
    """Go down from a cap that is too low for the load, while that does not hurt."""
    starved = _starved(observations, space)
    if starved is None:
        return None
    rungs = _rungs(observations, space)
    last = starved
    for cap in sorted(space.ladder, reverse=True):
        if cap >= last.limits.max_num_seqs:
            continue
        best = leader([o for o in rungs if o.limits >= last.limits])
        hurts = best is None or last.score.clearly_worse_than(best.score, TIE_RATIO)
        if hurts or not last.is_whole:
            return None
        lower = space.at(cap, space.reference_budget)
        measured = _measured(rungs, lower)
        if measured is None:
            return Proposal(lower, Phase.LADDER)
        last = measured
    return None


def climb_is_over(climbed: Sequence[Observation]) -> bool:
    """Return whether a higher cap can gain nothing more.

    It cannot when the cap no longer binds, and it will not when two rungs in a row are worse
    than the best while their decode steps are slower: decode time and tail latency degrade
    with nothing gained. A rung that failed or was cut short above the best counts as worse.
    """
    if not climbed:
        return False
    if climbed[-1].cap_never_bound:
        return True
    best = leader(climbed)
    if best is None or len(climbed) < 2:
        return False
    above = [o for o in climbed if o.limits > best.limits]
    return len(above) >= 2 and all(_degraded(o, best) for o in above[-2:])


def _degraded(o: Observation, best: Observation) -> bool:
    if not o.is_whole:
        return True
    if not o.score.clearly_worse_than(best.score, TIE_RATIO):
        return False
    if o.decode_step_s is None or best.decode_step_s is None:
        return True
    return o.decode_step_s > best.decode_step_s * (1 + DECODE_DEGRADED_RATIO)


def _refine(observations: Sequence[Observation], space: SearchSpace) -> Proposal | None:
    """Look between the best rung and its neighbours."""
    rungs = _rungs(observations, space)
    best = leader(rungs)
    if best is None or sum(o.phase is Phase.REFINE for o in observations) >= MAX_REFINEMENTS:
        return None
    at = rungs.index(best)
    cap = best.limits.max_num_seqs
    pairs = [rungs[at - 1]] if at > 0 else []
    if at + 1 < len(rungs) and not best.cap_never_bound:
        pairs.append(rungs[at + 1])
    for neighbour in pairs:
        other = neighbour.limits.max_num_seqs
        middle = (cap + other) // 2
        gap = abs(other - cap)
        if gap < 2 or gap <= REFINE_RATIO * cap:
            continue
        limits = space.at(middle, space.reference_budget)
        if not same_schedule(observations, limits) and limits.within(space.ceiling):
            return Proposal(limits, Phase.REFINE)
    return None


def _move_budget(observations: Sequence[Observation], space: SearchSpace) -> Proposal | None:
    """Raise and lower the token budget at the best cap while that does not hurt."""
    rungs = _rungs(observations, space)
    best = leader(rungs)
    if best is None:
        return None
    cap, here = best.limits.max_num_seqs, best.limits.max_num_batched_tokens
    up = sorted(b for b in space.budgets if b > here)
    down = sorted((b for b in space.budgets if cap <= b < here), reverse=True)
    upwards = _along(up, best, observations, space, upwards=True)
    if upwards is not None:
        return upwards
    higher = [
        o for o in observations if o.limits.max_num_seqs == cap and o.limits > best.limits
    ]
    if any(best.score.clearly_worse_than(o.score, TIE_RATIO) for o in higher):
        return None
    return _along(down, best, observations, space, upwards=False)


def _along(
    budgets: Sequence[int],
    origin: Observation,
    observations: Sequence[Observation],
    space: SearchSpace,
    *,
    upwards: bool,
) -> Proposal | None:
    """Return the next budget in one direction, or None when that direction is done."""
    cap = origin.limits.max_num_seqs
    best = last = origin
    for budget in budgets:
        limits = space.at(cap, budget)
        is_over = upwards and last.budget_never_bound
        # While nothing sustains the load, one worse budget does not end the walk: the next
        # may be the first that does.
        hurts = last.score.clearly_worse_than(best.score, TIE_RATIO)
        if is_over or (hurts and best.score.tier is Tier.GOOD):
            return None
        measured = _measured(observations, limits)
        if measured is None:
            if not limits.within(space.ceiling):
                return None
            if same_schedule(observations, limits):
                # A budget that never bound says nothing about those that would.
                continue
            return Proposal(limits, Phase.BUDGET)
        last = measured
        best = min(best, measured, key=lambda o: o.score.order)
    return None


def _climb_again(observations: Sequence[Observation], space: SearchSpace) -> Proposal | None:
    """Try other caps at the best token budget, where that is not the one climbed at.

    A budget at which prefill hurts less may let a larger cap win, or want a smaller one.
    """
    best = leader(observations)
    if best is None:
        return None
    cap, budget = best.limits.max_num_seqs, best.limits.max_num_batched_tokens
    if best.limits == space.at(cap, space.reference_budget):
        return None
    extended = [o for o in observations if o.phase is Phase.EXTEND]
    again = sum(o.limits.max_num_batched_tokens == budget for o in extended)
    for other in (2 * cap, 3 * cap // 2, cap // 2):
        if again < MAX_REFINEMENTS and 1 <= other <= budget:
            limits = space.at(other, budget)
            if limits.within(space.ceiling) and not same_schedule(observations, limits):
                return Proposal(limits, Phase.EXTEND)
    return None


def finalists(history: Sequence[Observation], space: SearchSpace) -> list[EngineLimits]:
    """Return the configurations to race: the few that could be best, and the current one last.

    Those that could be best where each single replay may be off by FINALIST_RATIO, in its value
    and in every bound. The best as measured comes first, then the one that would be best if
    all were slower, and if all were faster. Configurations that made the same batches as the
    current one, or as another finalist, stay out: a race could not separate them.

    Shapes: one to FINALISTS + 1 distinct limits; the current ones are always among them.
    """
    observations = [o for o in history if o.is_whole]
    best = leader(observations, FINALIST_RATIO)
    if best is None:
        return [space.current]
    current = _measured(observations, space.current)
    candidates = [
        o
        for o in observations
        if all(o.score.could_beat(p.score, FINALIST_RATIO) for p in observations)
    ]
    chosen: list[Observation] = []
    for o in (best, *_in_turns(candidates)):
        others = [*chosen, current] if current is not None else chosen
        if len(chosen) < FINALISTS and not any(alike(o, c) for c in others):
            chosen.append(o)
    return [*(o.limits for o in chosen), space.current]


def _in_turns(candidates: Sequence[Observation]) -> list[Observation]:
    """Return the best by what is slower, by what is faster and as it stands, in turns."""

    def order_at(times: float) -> list[Observation]:
        def place(o: Observation) -> tuple[Tier, float, EngineLimits]:
            tier = o.score.tier_at(times)
            # Those that do not sustain the load at about the same rate are ordered by the tail.
            by = Tier.GOOD if tier is Tier.NOT_SUSTAINED else tier
            return tier, o.score.value_in(by), o.limits

        return sorted(candidates, key=place)

    orders = [order_at(1 + FINALIST_RATIO), order_at(1 / (1 + FINALIST_RATIO)), order_at(1.0)]
    return [o for places in zip(*orders, strict=True) for o in places]


def alike(a: Observation, b: Observation) -> bool:
    """Whether two configurations made the same batches: what differs between them never bound.

    A race between such two would only measure the machine's noise.
    """
    same_cap = a.limits.max_num_seqs == b.limits.max_num_seqs or not (
        a.cap_bound or b.cap_bound
    )
    same_budget = a.limits.max_num_batched_tokens == b.limits.max_num_batched_tokens or (
        a.budget_never_bound and b.budget_never_bound
    )
    return same_cap and same_budget


def at_edge(best: EngineLimits, history: Sequence[Observation]) -> bool:
    """Whether the best cap is the largest that was tried although it still bound."""
    measured = _measured([o for o in history if o.is_whole], best)
    largest = max((o.limits.max_num_seqs for o in history), default=0)
    return (
        measured is not None and best.max_num_seqs >= largest and not measured.cap_never_bound
    )


def disturbed(history: Sequence[Observation]) -> bool:
    """Whether two replays contradict each other as only a disturbed machine explains.

    A smaller cap makes no larger decode batches, so its steps cannot take half as long again;
    a replay slowed as a whole shows nowhere else.
    """
    timed = [(o.limits.max_num_seqs, o.decode_step_s) for o in history if o.decode_step_s]
    return any(
        cap <= larger and step_s > DISTORTED_RATIO * other_s
        for cap, step_s in timed
        for larger, other_s in timed
    )
