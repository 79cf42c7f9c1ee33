"""One run from facts to recommendation: calibrate, predict, race, confirm, decide.

Ties the stages together. A listener receives everything that there is to say on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError, ReplayError, ShadowError, TooFewSamplesError
from tuner.replay.process import EngineStart
from tuner.run.cold import Cold, confirm_cold, unless_refuted
from tuner.run.context import WINDOW, RunContext, Workload
from tuner.run.knobs.advice import confirm_knobs
from tuner.run.knobs.records import Standing
from tuner.run.live_search import LiveEvidence, has_searched, search_live, searched
from tuner.run.loads.capacity import confirm_capacity, predict_capacity, tell_headroom
from tuner.run.options import Method
from tuner.run.outcome import RunFindings
from tuner.run.predict import Foretold
from tuner.run.race import race
from tuner.run.sessions.learning import Learning
from tuner.run.sessions.predicted import PredictedSearch
from tuner.run.sessions.shadow import (
    ADVICE,
    CAPACITY,
    ShadowSession,
    advise_clients,
    advise_on_knobs,
    compare_starting_points,
    find_beside,
    profile_record,
)
from tuner.run.time_plan import RacePlan, search_windows, tell_short_windows
from tuner.run.trial_runner import TrialRunner
from tuner.search.draws import LIVE_ALONE
from tuner.search.ladder import at_edge, disturbed
from tuner.search.race import LIKELY, RaceDecision, RaceVerdict
from tuner.search.trials import Observation, Phase, Trial, predictions
from tuner.shadow import simulator
from tuner.shadow.compiled import compiled_meanwhile
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile
from tuner.traffic.windows import Window, whole

NOTHING_ELSE = (
    "only the current configuration was replayed in the time: nothing can be said of others; "
    "give --budget more"
)
STRETCH_NOT_SUSTAINED = (
    "the engine did not keep up with the load of the stretch that raced; with that of all the "
    "traffic it does, predicted"
)
STRETCH_ALONE = (
    "a window of the trace was replayed, and nothing predicts the rest: on all of the traffic "
    "every second gain told so lay outside its interval (planted machines); give --budget or "
    "--window more"
)
CLIMB_CUT = (
    "the best value is the largest cap that there was time to try: with a longer --budget the "
    "search climbs on"
)
# What says that a machine is too restless for short replays to say much.
_NOISY = frozenset({Caveat.NOISY_MACHINE, Caveat.STEPS_STRETCHED})


@dataclass(slots=True)
class Session:
    """A run with a live engine.

    With Method.LIVE nothing is predicted to rank by; what a live search has shown may yet be
    predicted from where it had no time to race. `decision` is what was decided, None until it
    stands; `cold` is of the setting that it tells of, `found` what is told beside it.
    """

    search: PredictedSearch
    decision: RaceDecision | None = None
    cold: Cold | None = None
    found: RunFindings = field(default_factory=RunFindings)

    @classmethod
    def of(
        cls,
        runner: TrialRunner,
        serve_values: Mapping[str, object],
        predictor_of: Callable[[Profile], Predictor],
        method: Method = Method.AUTO,
        *,
        chosen: tuple[Window, ...] = (),
        is_compared: bool = False,
    ) -> Self:
        """Return a run that has not begun.

        `chosen` are the windows that an earlier process of the run has chosen, if any. With
        `is_compared` the load that it bears stands beside that of others.
        """
        learning = Learning(runner, serve_values, predictor_of)
        return cls(PredictedSearch(learning, method, chosen, is_compared))

    @property
    def runner(self) -> TrialRunner:
        """What replays on the run's engine."""
        return self.search.runner

    @property
    def context(self) -> RunContext:
        """What the run was given."""
        return self.runner.context

    @property
    def foretold(self) -> Foretold | None:
        """What was predicted last, None where nothing was."""
        return self.search.foretold

    def run(self) -> RaceDecision:
        """Search, race and confirm; every trial is on disk before the next begins.

        What is decided then stands, though what is told beside it may be missing.

        Raises: EngineError when the engine cannot be kept alive until then; TooFewSamplesError
            when the window cannot carry what was asked.
        """
        self.context.stopwatch.begin()
        self.context.journal.set_state("running")
        started = self._started()
        context = self.context
        context.listener.note(
            f"engine started in {started.start_s:.1f} s, warmed up in {started.warm_up_s:.1f} s"
        )
        context.stopwatch.add("start", started.start_s + started.warm_up_s)
        is_live = self.search.method is Method.LIVE
        decision = None if is_live else self.search.run(started)
        if decision is None:
            decision = self._search_live(started)
        if self.search.plan is not None and self.search.method is not Method.CALIBRATED:
            decision = self._confirmed(self.search.plan, decision)
        self.decision = decision
        if self.cold is not None:
            self.search.learning.keep_starts()
        find_beside(context, partial(self._turn_knobs, decision), ADVICE)
        find_beside(context, partial(self._find_capacity, decision), CAPACITY)
        self._tell_restlessness(decision)
        context.journal.set_state("done")
        return decision

    def _confirmed(self, plan: RacePlan, decision: RaceDecision) -> RaceDecision:
        """Return the decision once cold engines have shown what they do.

        Should that not come to its end, what they have shown by then counts.
        """
        try:
            decision, self.cold = confirm_cold(
                self.runner, plan, decision, self.search.predict_cold
            )
        except BaseException:
            self.decision = unless_refuted(self.context, decision)
            raise
        return decision

    def _started(self) -> EngineStart:
        """Return the engine at the largest limits that it starts at; nothing above is tried.

        Raises: EngineError if it does not start at the current ones.
        """
        engine, space = self.runner.engine, self.context.space
        is_live = self.search.method is Method.LIVE
        # This one, and the winner's started cold.
        engine.process.expect(1 if self.search.method is Method.CALIBRATED else 2)
        with nullcontext() if is_live else compiled_meanwhile(simulator.warm_up):
            started = engine.start_below(space.current)
        if engine.ceiling != space.ceiling:
            self.runner.context = self.context.below(engine.ceiling)
            self.context.keep_windows(self.search.chosen)
        if started.others:
            self.context.caveats.add(Caveat.GPU_SHARED)
        if not started.info.has_own_graphs:
            self.context.caveats.add(Caveat.GRAPHS_OF_CEILING)
            self.context.listener.note(
                "this vLLM shows no way to hide CUDA graphs: all settings run with those that "
                f"were captured at {engine.ceiling}; --format vllm-exact deploys them too"
            )
        return started

    def _search_live(self, started: EngineStart) -> RaceDecision:
        """Search and race live; where the time was too short, predict from the steps seen."""
        context, runner = self.context, self.runner
        observe = self.search.learning.observer(started)
        windows = self.search.chosen or search_windows(runner)
        workload = Workload.of(WINDOW, context.trace, windows, context.aim)
        self.search.choose(workload.windows)
        plan = self.search.plan = search_live(runner, workload, observe)
        tell_short_windows(plan)
        decision = race(runner, LiveEvidence(plan))
        profile = self.search.learning.profile_of_search()
        if not has_searched(context):
            decision = replace(decision, why=NOTHING_ELSE)
        elif not decision.rounds and len(plan.settings) > 1:
            decision = replace(decision, why="there was no time to race")
        if profile is None or decision.rounds or self.search.method is Method.LIVE:
            return decision
        try:
            self.search.finalists(profile)
        except (ShadowError, TooFewSamplesError) as unfit:
            context.listener.note(f"no prediction either: {unfit.message}")
            return decision
        context.caveats.discard(Caveat.SHADOW_UNFIT)
        context.listener.note("the time held no race: what the steps seen predict decides")
        return self.search.decide()

    def _turn_knobs(self, decision: RaceDecision) -> None:
        """Find which knobs pay beside the answer and try them cold; and what else to say."""
        foretold = self.search.foretold
        if foretold is None:
            if self.context.record.options.knobs:
                self.context.listener.note("no knob is turned: nothing could be predicted")
            return
        known = foretold.more([decision.winner, decision.told])
        self.found.starting_points = compare_starting_points(self.context, known, decision)
        self.found.clients = advise_clients(self.context, known, decision.told)
        advice = advise_on_knobs(self.context, known, decision)
        if advice is not None and self.search.plan is not None:
            try:
                advice = confirm_knobs(self.runner, self.search.plan, advice)
            except (EngineError, ReplayError) as error:
                cause = f"no engine with them could be replayed: {error.message}"
                advice = replace(advice, standing=Standing.UNTRIED, cause=cause)
            if advice.settings:
                self.context.listener.note(advice.lines[-1])
        self.found.knobs = advice

    def _find_capacity(self, decision: RaceDecision) -> None:
        """Find how much load the answer bears, where there is an SLO and a prediction.

        Not where a number is kept in flight, whatever the load.
        As deployed; the engine that is there, with blocks of its own, is asked whether it does.
        """
        search, context, foretold = self.search, self.context, self.search.foretold
        aim = context.aim
        if foretold is None or not aim.slos or not aim.plan.bears_loads or context.left_s <= 0:
            return
        workload, predictor = foretold.predictions.workload, foretold.predictor
        deployed = predictor.as_deployed()
        with context.stopwatch.stage("capacity"):
            found = predict_capacity(deployed, workload, decision, context.space.current)
            tell_headroom(context, found)
        if self.search.method is Method.CALIBRATED:
            self.found.capacity = found.record
            return
        windows = [workload] if search.plan is None else [workload, search.plan.workload]
        there = deployed if self.runner.engine.restarts_per_config else predictor
        found = confirm_capacity(self.runner, there, windows, decision.told, found)
        self.found.capacity = found.record

    def _tell_restlessness(self, decision: RaceDecision) -> None:
        """Say how restless a noisy machine was, and how much longer would help."""
        if not _NOISY & self.caveats(decision).keys():
            return
        self.found.restlessness = told = self.search.learning.restlessness(decision)
        if told is not None:
            self.context.listener.note(told.text)

    def findings(self) -> RunFindings:
        """Return what stands in the result beside the decision."""
        search, engine = self.search, self.runner.engine
        plan, foretold = search.plan, search.foretold
        workload = plan.workload if plan is not None else None
        if workload is None and foretold is not None:
            workload = foretold.predictions.workload
        return replace(
            self.found,
            windows=search.chosen or (() if workload is None else workload.windows),
            scoring=None if workload is None else workload.scoring,
            cold=None if self.cold is None or self.decision is None else self.cold.record,
            profile=None if foretold is None else profile_record(foretold.predictor),
            compared=search.compared,
            info=engine.info,
            engine_starts=engine.starts,
            cold_blocks=engine.cold_blocks,
        )

    def caveats(self, decision: RaceDecision) -> dict[Caveat, str]:
        """Return the caveats of the whole run and what each says, in a fixed order."""
        context, engine = self.context, self.runner.engine
        found = context.doubts
        mine = self._trials_of(decision.winner)
        said = [Caveat(c) for t in mine for c in (t.measurement or {})["caveats"]]
        # One disturbed replay of many does not speak for all of them.
        found.update(caveat for caveat in said if 2 * said.count(caveat) >= len(mine))
        is_kept = decision.verdict is RaceVerdict.KEEP
        if is_kept and decision.best != context.space.current:
            found.add(Caveat.WITHIN_NOISE)
        # Rounds of others may have made best who did not race.
        has_raced = any(trial.phase is Phase.RACE for trial in mine)
        is_foretold = decision.is_predicted or (decision.rounds > 0 and not has_raced)
        if is_foretold and len(self._seen()) > 1:
            found.add(Caveat.NOT_RACED)
        if disturbed(searched(context)):
            found.add(Caveat.NOISY_MACHINE)
        if at_edge(decision.best, searched(context) or self._seen()):
            found.add(Caveat.AT_SPACE_EDGE)
        if engine.restarts_per_config:
            found.add(Caveat.RESTARTED_PER_CONFIG)
        if self.findings().windows != (whole(context.trace),):
            found.add(Caveat.WINDOWED)
        is_change = decision.verdict is RaceVerdict.CHANGE
        if is_change and self.cold is None and not engine.restarts_per_config:
            found.add(Caveat.NOT_CONFIRMED_COLD)
        return context.worded(found, self._own_words(decision, found))

    def _own_words(
        self, decision: RaceDecision, found: Collection[Caveat]
    ) -> Iterator[tuple[Caveat, str]]:
        """Yield what caveats say otherwise than usual of this answer."""
        odds = decision.odds
        goes_on = decision.best.max_num_seqs < self.context.space.caps()[-1]
        # Where time ended the climb it is not what may be tried that did.
        if goes_on and Caveat.BUDGET_SPENT in found:
            yield Caveat.AT_SPACE_EDGE, CLIMB_CUT
        if odds is not None and odds.basis == LIVE_ALONE:
            yield Caveat.WINDOWED, STRETCH_ALONE
        bears_all = odds is not None and (odds.p_sustained or 0.0) >= LIKELY
        if Caveat.WINDOWED in found and bears_all:
            yield Caveat.NOT_SUSTAINED, STRETCH_NOT_SUSTAINED

    def _seen(self) -> list[Observation]:
        """Return what was predicted last."""
        return [t.observation for t in predictions(self.context.journal.records())]

    def _trials_of(self, limits: EngineLimits) -> Sequence[Trial]:
        return [
            t
            for t in self.context.journal.records()
            if t.measurement and t.phase.is_on_windows and t.limits == limits
        ]


AnySession = ShadowSession | Session
"""A run as its caller sees it, with or without an engine."""
