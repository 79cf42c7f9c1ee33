"""One run from facts to recommendation: pilot, search, race, decision.

Ties the parts together and owns the clock of the run's budget. Reading options and printing
are left to `cli` and `console`, which hear of everything through a Listener.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tuner import confirm, search
from tuner.bench import Bench, Failure
from tuner.confirm import Decision
from tuner.engine.protocol import EngineLimits
from tuner.errors import Caveat, EngineError
from tuner.journal import Journal, record_of
from tuner.metrics import Measurement
from tuner.objective import Goal, Objective, Score, Tier, parse_goal
from tuner.observation import Observation, Phase, leader
from tuner.plan import RACE_REPLAYS, SEARCH_REPLAYS, SEARCH_SHARE, Budget, choose_windows
from tuner.replay import CutRule, Progress, ReplayPlan
from tuner.rundir import RunDir
from tuner.slo import Slo
from tuner.space import SearchSpace
from tuner.traces import Trace
from tuner.windows import Window, busiest, whole

# Engine deaths after which the run gives up, in a row and below what has worked: ours; one may
# be chance, three are the engine's fault.
MOST_DEATHS = 3
# A replay may take this many times what was planned before it is cut: ours; a low cap under
# overload takes several times as long as the present configuration.
OVERTIME = 8.0
# The race may claim this share of the budget at most: ours, the search needs the rest.
MOST_RESERVED = 0.7


class Listener(Protocol):
    """Who hears what the run is doing."""

    def note(self, text: str) -> None:
        """Hear a sentence worth reading."""

    def trial_started(self, number: int, limits: EngineLimits, phase: Phase) -> None:
        """Hear that a replay begins."""

    def progress(self, progress: Progress) -> None:
        """Hear how far a replay is."""

    def trial_ended(self, seen: Observation, record: Mapping[str, Any], left_s: float) -> None:
        """Hear that a replay ended and is on disk."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a run is after, as the user asked."""

    objective: Objective
    slos: tuple[Slo, ...]
    plan: ReplayPlan
    budget: Budget
    window: Window | None


@dataclass(slots=True)
class Session:
    """A run in progress.

    `windows` is empty until the pilot has chosen them, unless the run is resumed.
    """

    trace: Trace
    space: SearchSpace
    aim: Aim
    bench: Bench
    journal: Journal
    run_dir: RunDir
    listener: Listener
    windows: tuple[Window, ...] = ()
    caveats: set[Caveat] = field(default_factory=set)
    on_windows: Callable[[tuple[Window, ...]], None] | None = None
    _deadline_s: float = field(default=0.0, init=False)
    _deaths: int = field(default=0, init=False)
    _goal: Goal | None = field(default=None, init=False)

    @property
    def goal(self) -> Goal:
        """What is optimised, known once the windows are. Raises: EngineError before."""
        if self._goal is None:
            raise EngineError("the windows are not chosen yet")
        return self._goal

    @property
    def is_planned(self) -> bool:
        """Whether windows and goal are chosen."""
        return self._goal is not None

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._deadline_s - time.monotonic()

    def run(self) -> Decision:
        """Search and race; every trial is on disk before the next begins.

        Raises: EngineError when the engine cannot be kept alive; TooFewSamplesError when the
            window cannot carry what was asked.
        """
        self._deadline_s = time.monotonic() + self.aim.budget.total_s
        started = self.bench.ensure_started()
        self.listener.note(
            f"engine started in {started.start_s:.1f} s, warmed up in {started.warm_up_s:.1f} s"
        )
        self._choose_windows()
        if self.on_windows is not None:
            self.on_windows(self.windows)
        requests = sum(len(window.of(self.trace)) for window in self.windows)
        self._goal = parse_goal(self.aim.objective, self.aim.slos, requests)
        for name, window in zip(self._names, self.windows, strict=True):
            self.bench.use(name, window.of(self.trace))
        self._search()
        return self._race()

    @property
    def _names(self) -> list[str]:
        return [f"window {i}" for i in range(len(self.windows))]

    def _choose_windows(self) -> None:
        """Replay a little at the present limits to see what a second of the trace costs."""
        if self.windows:
            return
        if self.aim.window is not None:
            self.windows = (self.aim.window,)
            return
        pilot = busiest(self.trace, min(self.trace.duration_s, 60.0) or 1.0).of(self.trace)
        self.bench.use("pilot", pilot)
        plan = replace(self.aim.plan, cut=CutRule(max_wall_s=self.aim.budget.pilot_s))
        measured = self.bench.measure(["pilot"], self.space.present, plan, ())
        if isinstance(measured, Failure):
            raise EngineError(
                f"the engine failed at the present configuration: {measured.cause}",
                "run it once with `tune replay` and look at the engine's log",
            )
        done = max(measured.completed + measured.refused, 1) / len(pilot)
        covered_s = done * max(pilot.duration_s, 1e-3)
        rate = measured.wall_s / covered_s
        self.windows = choose_windows(self.trace, rate, self.left_s)
        self.listener.note(f"pilot: a second of the trace costs {rate:.2g} s here")

    def _search(self) -> None:
        """Measure what the search proposes until it is done or its time is over."""
        while True:
            proposal = search.propose(self.journal.observations(), self.space)
            if proposal is None:
                return
            if self._must_race() and self.journal.observations():
                self.caveats.add(Caveat.BUDGET_SPENT)
                self.listener.note("the search's share of the budget is spent, racing now")
                return
            self._trial(proposal.limits, proposal.phase, 0)

    def _must_race(self) -> bool:
        """Whether the search has to make room for the race's least rounds."""
        if len(search.finalists(self.journal.observations(), self.space)) < 2:
            return self.left_s < self._usual_wall_s
        total_s = self.aim.budget.total_s
        least_s = (search.FINALISTS + 1) * confirm.LEAST_ROUNDS * self._usual_wall_s
        reserved_s = min(max((1 - SEARCH_SHARE) * total_s, least_s), MOST_RESERVED * total_s)
        return self.left_s < reserved_s

    @property
    def _usual_wall_s(self) -> float:
        """What a whole replay took so far, in the middle; 0 before the first."""
        walls = sorted(
            r["measurement"]["wall_s"]
            for r in self.journal.records()
            if r["measurement"] and not r["measurement"]["cut_reason"]
        )
        return float(walls[len(walls) // 2]) if walls else 0.0

    def _field(self) -> list[EngineLimits]:
        """Return who races: fewer where the time would not hold three rounds of all."""
        field_ = search.finalists(self.journal.observations(), self.space)
        while len(field_) > 2 and (
            confirm.LEAST_ROUNDS * len(field_) * self._usual_wall_s > self.left_s
        ):
            del field_[-2]
        return field_

    def _race(self) -> Decision:
        """Replay the finalists in turns until they are separated or the time is over."""
        field_ = self._field()
        while True:
            runs = self.journal.race_runs()
            following = confirm.next_run(runs, field_, self.space.present)
            if following is None or self.left_s < self._usual_wall_s:
                if following is not None and len(field_) > 1:
                    self.caveats.add(Caveat.BUDGET_SPENT)
                return confirm.decide(runs, field_, self.space.present)
            race_round, limits = following
            self._trial(limits, Phase.RACE, race_round)

    def _trial(self, limits: EngineLimits, phase: Phase, race_round: int) -> None:
        """Measure once and put it on disk, whatever came out."""
        number = self.journal.begin(limits, phase, race_round)
        self.listener.trial_started(number, limits, phase)
        plan = replace(self.aim.plan, cut=self._cut(phase))
        outcome = self.bench.measure(self._names, limits, plan, self.aim.slos, self._heard)
        if isinstance(outcome, Measurement):
            self._deaths = 0
            score, slacks = self.goal.score(outcome), self.goal.slacks(outcome)
            record = record_of(number, limits, phase, race_round, score, outcome.as_json())
        else:
            self._deaths += self._should_live(limits)
            score, slacks = Score(Tier.FAILED, math.inf, "failed"), {}
            record = record_of(number, limits, phase, race_round, score, None, outcome.cause)
        self.journal.finish(number, score, slacks, record)
        self.run_dir.write_lines("trials.jsonl", self.journal.records())
        seen = self.journal.observations()[-1]
        self.listener.trial_ended(seen, record, self.left_s)
        if self._deaths >= MOST_DEATHS:
            raise EngineError(
                f"the engine died {MOST_DEATHS} times in a row: {record['cause']}",
                f"see {self.run_dir.engine_log}",
            )

    def _should_live(self, limits: EngineLimits) -> bool:
        """Whether a failure here speaks against the engine, not against these limits."""
        lived = [o.limits for o in self.journal.observations() if o.is_whole]
        return not lived or any(limits.within(others) for others in lived)

    def _heard(self, progress: Progress) -> bool:
        self.listener.progress(progress)
        return True

    def _cut(self, phase: Phase) -> CutRule:
        """Return when this replay can stop early; the race is always replayed whole."""
        planned_s = self.aim.budget.total_s / (SEARCH_REPLAYS + RACE_REPLAYS)
        longest_s = max(30.0, OVERTIME * planned_s)
        if phase in (Phase.RACE, Phase.PRESENT):
            return CutRule(max_wall_s=max(longest_s, self.left_s))
        best = leader([o for o in self.journal.observations() if o.phase is not Phase.RACE])
        requests = sum(len(window.of(self.trace)) for window in self.windows)
        rule = self.goal.cut_rule(best.score if best else None, requests)
        return replace(rule, max_wall_s=longest_s)

    def doubts(self, decision: Decision) -> list[Caveat]:
        """Return the caveats of the whole run, in a fixed order."""
        found = set(self.caveats)
        mine = self._records_of(decision.winner)
        said = [Caveat(c) for record in mine for c in record["measurement"]["caveats"]]
        # One disturbed replay of many does not speak for all of them.
        found.update(caveat for caveat in said if 2 * said.count(caveat) >= len(mine))
        if decision.verdict is confirm.Verdict.KEEP and decision.best != self.space.present:
            found.add(Caveat.WITHIN_NOISE)
        if search.disturbed(self.journal.observations()):
            found.add(Caveat.NOISY_MACHINE)
        if search.at_edge(decision.winner, self.journal.observations()):
            found.add(Caveat.AT_SPACE_EDGE)
        if self.bench.restarts_per_config:
            found.add(Caveat.RESTARTED_PER_CONFIG)
        if self.windows != (whole(self.trace),):
            found.add(Caveat.WINDOWED)
        if not self.bench.restarts_per_config:
            found.add(Caveat.NOT_CONFIRMED_COLD)
        return [caveat for caveat in Caveat if caveat in found]

    def _records_of(self, limits: EngineLimits) -> Sequence[Mapping[str, Any]]:
        wanted = (limits.max_num_seqs, limits.max_num_batched_tokens)
        return [
            r
            for r in self.journal.records()
            if r["measurement"] and (r["max_num_seqs"], r["max_num_batched_tokens"]) == wanted
        ]
