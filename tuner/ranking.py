"""Rank a whole space in the shadow: the grid, and what lies beside its best.

Every setting is put into the study's queue, from which this process's shadows and those of
other machines take it. Which settings then race live is decided from what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.engine.limits import EngineLimits
from tuner.forecast import Forecast
from tuner.run_state import RunState
from tuner.search.ladder import same_schedule
from tuner.search.objective import Objective, Tier
from tuner.search.space import SearchSpace
from tuner.search.trials import TIE_RATIO, Observation, Phase, leader
from tuner.shadow.pool import Task

# Rounds of looking between the best cap and its neighbours: ours; each halves the gap.
REFINEMENTS = 2
# Settings that are asked about before what they say of others is looked at: ours, or as many as
# run beside each other.
LEAST_AT_ONCE = 4
# Neighbours closer than this share of the cap are not told apart: as in `search`.
REFINE_RATIO = 0.2


@dataclass(slots=True)
class Ranking:
    """The forecast of one run's space."""

    run: RunState
    forecast: Forecast
    _told: set[str] = field(default_factory=set)

    def rank(self) -> list[Observation]:
        """Foretell the grid and what lies between its best and their neighbours.

        Larger limits come first: what never bound tells of every smaller one that would not
        have bound either, and a good one early lets what is hopeless be cut short soon. The
        ladder at the present token budget is replayed whole, also where it loses.
        """
        space = self.run.space
        settings = space.grid()
        if self.forecast.aim.objective is Objective.CAPACITY:
            # At another load for each, so that none can be told from another.
            return self._foretell(list(dict.fromkeys([space.present, *settings])))
        seen = self._foretell(list(dict.fromkeys([space.present, max(settings)])))
        at_once = max(LEAST_AT_ONCE, self.forecast.shadows.jobs)
        rungs = sorted(space.rungs(), reverse=True)
        for first in range(0, len(rungs), at_once):
            few = [s for s in rungs[first : first + at_once] if not self._is_shown(seen, s)]
            seen = self._foretell(few, is_cut=False)
        while unknown := [s for s in settings if not same_schedule(seen, s)]:
            seen = self._foretell(_of_other_kinds(sorted(unknown, reverse=True))[:at_once])
        for _ in range(REFINEMENTS):
            best = _smallest_of_the_best(seen, settings)
            if best is None:
                break
            seen = self._foretell([best, *_between(seen, space, best)])
        return seen

    @staticmethod
    def _is_shown(seen: Sequence[Observation], limits: EngineLimits) -> bool:
        """Whether a whole replay tells of the limits; one that failed has nothing to tell."""
        told = [o for o in seen if o.is_whole or o.score.tier is Tier.FAILED]
        return any(o.limits == limits for o in told) or same_schedule(
            [o for o in told if o.is_whole], limits
        )

    def _foretell(
        self, settings: Sequence[EngineLimits], *, is_cut: bool = True
    ) -> list[Observation]:
        """Have all settings replayed, here or elsewhere, and return all that is known.

        What is certain to lose to the best of before is cut short, if it may be: small caps
        under load, whose queue never ends, would take the most time.
        """
        run, journal = self.run, self.run.journal
        best = leader(self.seen())
        cut = self.forecast.cut_rule(best.score if best is not None and is_cut else None)
        for limits in settings:
            journal.enqueue(limits, Phase.SHADOW, self.forecast.generation, cut)

        def next_task() -> Task | None:
            claimed = journal.claim(Phase.SHADOW)
            if claimed is None:
                return None
            number, limits = claimed
            run.listener.trial_started(number, limits, Phase.SHADOW)
            return self.forecast.task(limits, number, journal.cut_of(number))

        def is_over() -> bool:
            journal.give_back_stale()
            return journal.unfinished(Phase.SHADOW) == 0

        for task, outcome in self.forecast.shadows.drain(next_task, is_over):
            generation = self.forecast.generation
            run.keep(
                task.number, task.limits, Phase.SHADOW, outcome, self.forecast.goal, generation
            )
        # A worker may have been the last to finish.
        run.write_trials()
        for remark in self.forecast.shadows.remarks:
            if remark not in self._told:
                self._told.add(remark)
                run.listener.note(remark)
        return self.seen()

    def seen(self) -> list[Observation]:
        """Return what was foretold with the present profile."""
        return [
            o
            for o in self.run.journal.observations()
            if o.phase is Phase.SHADOW and o.race_round == self.forecast.generation
        ]


def _of_other_kinds(settings: Sequence[EngineLimits]) -> list[EngineLimits]:
    """Return the first of each cap and budget, so that none of them may tell of another."""
    chosen: list[EngineLimits] = []
    for limits in settings:
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        if all(seqs != c.max_num_seqs and tokens != c.max_num_batched_tokens for c in chosen):
            chosen.append(limits)
    return chosen


def _smallest_of_the_best(
    seen: Sequence[Observation], settings: Sequence[EngineLimits]
) -> EngineLimits | None:
    """Return the smallest setting that is as good as the best, None where nothing is whole.

    It may not have been replayed, where a larger one makes the same batches and told of it.
    """
    best = leader(seen)
    if best is None:
        return None
    good = [o for o in seen if not o.score.clearly_worse_than(best.score, TIE_RATIO)]
    like = (limits for limits in settings if same_schedule(good, limits))
    return min([best.limits, *like])


def _between(
    seen: Sequence[Observation], space: SearchSpace, best: EngineLimits
) -> list[EngineLimits]:
    """Return the settings halfway between the best and its neighbours that are not known."""
    budget, cap = best.max_num_batched_tokens, best.max_num_seqs
    # A setting that makes the same batches as one that was replayed is as good as known.
    others = {o.limits.max_num_seqs for o in seen}
    caps = sorted({cap, *(c for c in others if same_schedule(seen, space.at(c, budget)))})
    at = caps.index(cap)
    around = [caps[i] for i in (at - 1, at + 1) if 0 <= i < len(caps)]
    known = {o.limits for o in seen}
    wanted = [
        space.at((cap + other) // 2, budget)
        for other in around
        if abs(other - cap) > max(1, REFINE_RATIO * cap)
    ]
    return [
        limits
        for limits in wanted
        if limits not in known
        and limits.within(space.ceiling)
        # A larger one that makes the same batches is no better.
        and not (limits > best and same_schedule(seen, limits))
    ]
