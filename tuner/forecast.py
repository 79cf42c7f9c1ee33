"""What the shadow foretells: the whole grid and its refinement, on the whole trace.

Every setting is put into the study's queue, from which this process's shadows and those of
other machines take it. Which settings then race live is decided from what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner import search
from tuner.bench import Failure
from tuner.engine.protocol import EngineLimits
from tuner.metrics import Measurement
from tuner.objective import Goal, parse_goal
from tuner.observation import Observation, Phase, leader
from tuner.replay_plan import CutRule
from tuner.run_state import RunState
from tuner.shadows import Shadows, Task
from tuner.space import SearchSpace
from tuner.traces import Trace
from tuner.windows import Window, busiest, typical, whole

# Rounds of looking between the best cap and its neighbours: ours; each halves the gap.
REFINEMENTS = 2
# Neighbours closer than this share of the cap are not told apart: as in `search`.
REFINE_RATIO = 0.2
# A whole trace that takes longer than this share of the forecast's time per setting is cut
# into windows: ours.
LEAST_WINDOW_S = 60.0


def grid(space: SearchSpace) -> list[EngineLimits]:
    """Return every setting of the grid: caps of the ladder and past it, times token budgets."""
    caps, cap = list(space.ladder), space.ladder[-1]
    while (cap := 2 * cap) <= space.ceiling.max_num_seqs:
        caps.append(cap)
    budgets = sorted({*space.budgets, space.reference_budget})
    found = [space.at(cap, budget) for cap in caps for budget in budgets]
    return list(dict.fromkeys(f for f in found if f.within(space.ceiling)))


@dataclass(slots=True)
class Forecast:
    """The shadow's part of a run.

    `generation` counts profiles: after a recalibration everything is foretold anew.
    """

    run: RunState
    shadows: Shadows
    generation: int
    parts: tuple[Window, ...] = ()
    _goal: Goal | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts of the trace that are replayed."""
        return tuple(f"part {i}" for i in range(len(self.parts)))

    @property
    def goal(self) -> Goal:
        """What is optimised on the forecast's parts."""
        if self._goal is None:
            requests = sum(len(part.of(self.run.trace)) for part in self.parts)
            aim = self.run.aim
            self._goal = parse_goal(aim.objective, aim.slos, requests)
        return self._goal

    def choose_parts(self, time_s: float) -> None:
        """Take the whole trace, or its busiest and a typical stretch where time is short.

        One replay at the present limits tells how long a setting takes.

        Raises: ShadowError or UsageError when a shadow cannot be made of the profile.
        """
        trace = self.run.trace
        if self.run.aim.window is not None:
            self.parts = (self.run.aim.window,)
        elif not self.parts:
            per_setting_s = time_s * self.shadows.jobs / (len(grid(self.run.space)) + 8)
            self.parts = (whole(trace),)
            self._load()
            rule = CutRule(max_wall_s=max(per_setting_s, 1.0))
            first = self.predict([self.run.space.present], cut=rule)[0]
            if isinstance(first, Measurement) and first.cut_reason is not None:
                ended = max(first.completed + first.refused, 1)
                length_s = trace.duration_s * ended / len(trace)
                self.parts = _stretches(trace, max(length_s, LEAST_WINDOW_S))
        self._load()

    def _load(self) -> None:
        for name, part in zip(self.names, self.parts, strict=True):
            self.shadows.use(name, part.of(self.run.trace))

    def predict(
        self,
        settings: Sequence[EngineLimits],
        names: Sequence[str] | None = None,
        cut: CutRule | None = None,
    ) -> list[Measurement | Failure]:
        """Return what the shadow says of settings, without keeping it."""
        used = self.names if names is None else tuple(names)
        plan = replace(self.run.aim.plan, cut=cut or CutRule())
        tasks = [Task(used, limits, plan, self.run.aim.slos) for limits in settings]
        return self.shadows.run(tasks)

    def rank(self) -> list[Observation]:
        """Foretell the grid and what lies between its best and their neighbours.

        Smaller limits come first: a cap or a budget that never bound makes the batches of
        every larger one, which then need no replay.
        """
        space = self.run.space
        settings = grid(space)
        least = min(g.max_num_batched_tokens for g in settings)
        seen = self._foretell([space.present, _largest(settings, least)])
        while True:
            wanted = [g for g in settings if not search.same_schedule(seen, g)]
            lowest: dict[int, EngineLimits] = {}
            for limits in sorted(wanted):
                lowest.setdefault(limits.max_num_seqs, limits)
            if not lowest:
                break
            seen = self._foretell(list(lowest.values()))
        for _ in range(REFINEMENTS):
            between = [b for b in _between(seen, space) if not search.same_schedule(seen, b)]
            if not between:
                break
            seen = self._foretell(between)
        return seen

    def _foretell(self, settings: Sequence[EngineLimits]) -> list[Observation]:
        """Have all settings replayed, here or elsewhere, and return all that is known."""
        run, journal = self.run, self.run.journal
        for limits in settings:
            journal.enqueue(limits, Phase.SHADOW, self.generation)

        def next_task() -> Task | None:
            claimed = journal.claim(Phase.SHADOW)
            if claimed is None:
                return None
            number, limits = claimed
            run.listener.trial_started(number, limits, Phase.SHADOW)
            return Task(self.names, limits, run.aim.plan, run.aim.slos, number)

        def is_over() -> bool:
            journal.give_back_stale()
            return journal.unfinished(Phase.SHADOW) == 0

        for task, outcome in self.shadows.drain(next_task, is_over):
            generation = self.generation
            run.keep(task.number, task.limits, Phase.SHADOW, outcome, self.goal, generation)
        return self.seen()

    def seen(self) -> list[Observation]:
        """Return what was foretold with the present profile."""
        return [
            o
            for o in self.run.journal.observations()
            if o.phase is Phase.SHADOW and o.race_round == self.generation
        ]


def _largest(settings: Sequence[EngineLimits], budget: int) -> EngineLimits:
    """Return the setting with the largest cap, at the budget or the least above it."""
    cap = max(g.max_num_seqs for g in settings)
    return min(
        g for g in settings if g.max_num_seqs == cap and g.max_num_batched_tokens >= budget
    )


def _stretches(trace: Trace, length_s: float) -> tuple[Window, ...]:
    """Return the busiest and a typical stretch of so many seconds together."""
    busy, usual = busiest(trace, length_s / 2), typical(trace, length_s / 2)
    return (busiest(trace, length_s),) if busy.overlaps(usual) else (busy, usual)


def _between(seen: Sequence[Observation], space: SearchSpace) -> list[EngineLimits]:
    """Return the settings halfway between the best and its neighbours that are not known."""
    best = leader(seen)
    if best is None:
        return []
    budget, cap = best.limits.max_num_batched_tokens, best.limits.max_num_seqs
    caps = sorted(
        {
            o.limits.max_num_seqs
            for o in seen
            if o.limits == space.at(o.limits.max_num_seqs, budget)
        }
    )
    at = caps.index(cap) if cap in caps else -1
    around = [caps[i] for i in (at - 1, at + 1) if at >= 0 and 0 <= i < len(caps)]
    known = {o.limits for o in seen}
    wanted = [
        space.at((cap + other) // 2, budget)
        for other in around
        if abs(other - cap) > max(1, REFINE_RATIO * cap)
    ]
    return [limits for limits in wanted if limits not in known and limits.within(space.ceiling)]
