"""One run from facts to recommendation: calibrate, predict, race, confirm, decide.

Ties the stages together. A listener receives everything that there is to say on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import Caveat, ShadowError, TooFewSamplesError
from tuner.replay.metrics import Measurement
from tuner.replay.process import EngineStart
from tuner.run.calibrate import Blocks, Calibrator, replay_longer
from tuner.run.cold import Cold, confirm_cold, start_all
from tuner.run.context import WINDOW, RunContext, Workload
from tuner.run.directory import PROFILE_FILE, STEPS_FILE
from tuner.run.drawing import DRAWS, Deployed, contend, predict_deployed
from tuner.run.knobs.advice import confirm_knobs
from tuner.run.knobs.records import KnobAdvice
from tuner.run.live_search import LiveEvidence, has_searched, search_live, searched
from tuner.run.loads.capacity import CapacityResult, confirm_capacity, predict_capacity
from tuner.run.loads.records import ClientAdvice
from tuner.run.options import Method
from tuner.run.predict import DISAGREEMENT, Differences, Predictions, cross_check, predict_more
from tuner.run.race import PredictedEvidence, race
from tuner.run.result import StartFinding
from tuner.run.rounds import packed
from tuner.run.shadow_session import (
    RunFindings,
    ShadowSession,
    advise_clients,
    advise_on_knobs,
    compare_starting_points,
    decide_predicted,
    predict_space,
    predicted_text,
    profile_facts,
)
from tuner.run.time_plan import (
    Observe,
    RacePlan,
    cold_cost_s,
    fitting,
    fly_pilot,
    plan_race,
    race_on,
    race_windows,
    search_windows,
)
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import Aim, window_text
from tuner.search.ladder import at_edge, disturbed
from tuner.search.objective import Objective, Tier
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.trials import Observation, Trial, leader, predictions
from tuner.shadow.agreement import compare, together
from tuner.shadow.calibration import check_rank_by
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Agreement, KvStart, Profile, read_profile, write_profile
from tuner.shadow.reference import replay_reference
from tuner.traffic.windows import Window, busiest, whole

NOTHING_ELSE = (
    "only the current configuration was replayed in the time: nothing can be said of others; "
    "give --budget more"
)
# The share of the time that is left which finalists are looked at for where it holds no race:
# ours, the rest is for predicting them anew.
LONGER_SHARE = 0.7
# Steps set aside as stretched that are more than this share of the time are told: ours, as much
# as what two live replays of one setting differ by on a quiet machine and more.
SET_ASIDE = 0.05
# How many times as much as starting the current setting has to be left for it: ours, the
# winner's start comes after.
OWN_BLOCKS_WORTH = 2.5
# From how full a KV cache on it binds: ours, a request more and it does.
KV_FULL = 0.95
# How many times as long as its middle request a window lasts at least that is not the whole
# trace: ours, so that most of it is past the engine's start.
LIFETIMES = 3.0
# How much traffic the simulator is compared with vLLM's scheduler on, in seconds: ours, more
# than can be asked about in the time.
COMPARED_S = 600.0


def _kv_binds(predictions: Predictions, settings: Sequence[EngineLimits]) -> bool:
    """Whether the size of the KV cache matters to any of the settings."""
    found = [predictions.outcomes.get(limits) for limits in settings]
    measured = [m for m in found if isinstance(m, Measurement)]
    return any(m.preemptions > 0 or m.kv_usage.max >= KV_FULL for m in measured)


@dataclass(slots=True)
class Session:
    """A run with a live engine.

    With Method.LIVE nothing is predicted to rank by, with Method.CALIBRATED nothing is raced
    where it can be predicted. `chosen` are the windows that an earlier process of the run has
    chosen, if any. With `is_compared` the load that it bears stands beside that of others.
    """

    runner: TrialRunner
    serve_values: Mapping[str, object]
    predictor_of: Callable[[Profile], Predictor]
    method: Method = Method.AUTO
    chosen: tuple[Window, ...] = ()
    is_compared: bool = False
    cold: Cold | None = None
    capacity: CapacityResult | None = None
    knobs: KnobAdvice | None = None
    starting_points: tuple[StartFinding, ...] = ()
    clients: ClientAdvice | None = None
    compared: Differences = field(default_factory=dict)
    _calibrator: Calibrator | None = None
    _predictor: Predictor | None = None
    _predicted: Predictions | None = None
    _plan: RacePlan | None = None

    @property
    def context(self) -> RunContext:
        """What the run was given."""
        return self.runner.context

    def run(self) -> RaceDecision:
        """Search, race and confirm; every trial is on disk before the next begins.

        Raises: EngineError when the engine cannot be kept alive; TooFewSamplesError when the
            window cannot carry what was asked.
        """
        self.context.stopwatch.begin()
        started = self._started()
        context = self.context
        context.listener.note(
            f"engine started in {started.start_s:.1f} s, warmed up in {started.warm_up_s:.1f} s"
        )
        context.stopwatch.add("start", started.start_s + started.warm_up_s)
        is_live = self.method is Method.LIVE
        decision = None if is_live else self._predict_and_race(started)
        if decision is None:
            decision = self._search_live(started)
        if self._plan is not None and self.method is not Method.CALIBRATED:
            decision, self.cold = confirm_cold(
                self.runner, self._plan, decision, self._predicted_cold
            )
            self._keep_starts()
        self._turn_knobs(decision)
        self._find_capacity(decision)
        context.journal.set_state("done")
        return decision

    def _started(self) -> EngineStart:
        """Return the engine at the largest limits that it starts at; nothing above is tried.

        Raises: EngineError if it does not start at the current ones.
        """
        engine, space = self.runner.engine, self.context.space
        started = engine.start_below(space.current)
        if engine.ceiling != space.ceiling:
            self.runner.context = self.context.below(engine.ceiling)
            self.context.keep_windows(self.chosen)
        if started.others:
            self.context.caveats.add(Caveat.GPU_SHARED)
        if not started.info.has_own_graphs:
            self.context.caveats.add(Caveat.GRAPHS_OF_CEILING)
            self.context.listener.note(
                "this vLLM shows no way to hide CUDA graphs: all settings run with those that "
                f"were captured at {engine.ceiling}; --format vllm-exact deploys them too"
            )
        return started

    # With predictions.

    def _predict_and_race(self, started: EngineStart) -> RaceDecision | None:
        """Return the decision, None where nothing can be predicted and all must be searched.

        Raises: EngineError, UsageError.
        """
        context, path = self.context, self.context.run_dir.path / PROFILE_FILE
        try:
            rate, given = None, None
            if path.exists():
                # The run is resumed, or was given a profile: the calibration is done.
                profile = given = self._taken_over(read_profile(path), started)
            else:
                self._calibrator = self._begun(started)
                is_alone = self.method is Method.CALIBRATED
                parts = (self.runner, self._calibrator, self.predictor_of)
                blocks = Blocks.of(*parts, are_alone=is_alone, tells_capacity=self.is_compared)
                rate = blocks.calibrate().wall_per_trace_s
                profile = self._fitted(self._calibrator)
            profile = self._compared(profile)
            settings = self._finalists(profile)
            if self.method is Method.CALIBRATED:
                return self._decided_by_prediction()
            plan = self._race_plan(settings, rate)
            if plan is None and given is not None:
                plan = self._plan_beside_a_pilot(given, rate)
            elif plan is None and rate is not None and self._calibrator is not None:
                self._look_longer(self._calibrator, profile, settings, rate)
        except (ShadowError, TooFewSamplesError) as unfit:
            context.caveats.add(Caveat.SHADOW_UNFIT)
            self._predicted = self._predictor = None
            context.listener.note(f"no predictions: {unfit.message}; searching live")
            return None
        if plan is None:
            context.caveats.add(Caveat.BUDGET_SPENT)
            return self._decided_by_prediction()
        self._plan = fitting(self.runner, plan)
        return self._race(self._plan)

    def _look_longer(
        self,
        calibrator: Calibrator,
        profile: Profile,
        settings: Sequence[EngineLimits],
        rate: float,
    ) -> None:
        """Spend the time that holds no race on the finalists' steps, and predict them anew.

        Raises: EngineError, ShadowError, TooFewSamplesError, UsageError.
        """
        time_s = LONGER_SHARE * self.context.left_s
        if time_s <= 0 or self.runner.engine.restarts_per_config:
            return
        replay_longer(self.runner, calibrator, settings, rate, time_s)
        self._finalists(self._fitted(calibrator, None, profile.agreement))

    def _begun(self, started: EngineStart, stored: Profile | None = None) -> Calibrator:
        current = self.context.space.current
        begun = Calibrator.of(started, current, self.serve_values, stored)
        return replace(begun, keep=self._keep_steps)

    def _keep_steps(self, limits: EngineLimits, columns: StepColumns) -> None:
        """Put steps on disk: another tool, or a later one, may learn more from them."""
        for row in packed([(limits, columns)]):
            self.context.run_dir.add_line(STEPS_FILE, row)

    def _taken_over(self, stored: Profile, started: EngineStart) -> Profile:
        """Return a profile of before for the engine at hand, whose steps may yet correct it."""
        self._calibrator = self._begun(started, stored)
        begun = self._calibrator.calibration
        profile = replace(
            stored,
            shape=begun.shape,
            kv_starts=begun.starts,
            current_limits=begun.current,
            serve_values=begun.serve_values,
        )
        self._keep_profile(profile)
        return profile

    def _keep_profile(self, profile: Profile) -> None:
        write_profile(self.context.run_dir.path / PROFILE_FILE, profile)

    def _fitted(
        self,
        calibrator: Calibrator,
        given: Profile | None = None,
        agreement: Agreement | None = None,
    ) -> Profile:
        """Return the profile that the steps so far make, or the given one corrected by them."""
        with self.context.stopwatch.stage("fit"):
            if given is not None:
                profile = calibrator.calibration.corrected(given)
            else:
                profile = calibrator.profile()
            profile = replace(profile, agreement=agreement or profile.agreement)
            self._keep_profile(profile)
        wrong = self.predictor_of(profile).wrong_ratio
        self.context.listener.note(
            f"step model from {profile.fit.steps} steps, wrong by {wrong:.1%}"
        )
        left_out = calibrator.calibration.times_of(profile) - 1 if given is None else 0.0
        if left_out > SET_ASIDE:
            self.context.caveats.add(Caveat.STEPS_SET_ASIDE)
            self.context.listener.note(
                f"all steps took {left_out:.0%} longer than it says: it leaves out those that "
                "the machine stretched"
            )
        return profile

    def _compared(self, profile: Profile) -> Profile:
        """Return the profile with how the simulator compares with the engine's scheduler."""
        context, predictor = self.context, self.predictor_of(profile)
        if predictor.doubt:
            return profile
        workload, space = Workload.of_whole(context.trace, context.aim), context.space
        piece = busiest(workload.pieces[0], COMPARED_S).of(workload.pieces[0])
        found = []
        # The current limits, and the largest, where other things bind.
        for limits in dict.fromkeys((space.current, space.ceiling)):
            engine = predictor.simulated(limits)
            parts = (engine.shape, engine.ceiling, engine.num_blocks, engine.step_model)
            given = (*parts, piece, limits, workload.plan)
            reference = self.runner.engine.call(replay_reference, *given)
            if reference is None:
                return profile
            found.append(compare(engine, piece, limits, workload.plan, reference))
        agreement = together(found)
        profile = replace(profile, agreement=agreement)
        self._keep_profile(profile)
        context.listener.note(
            f"vLLM decides otherwise than the simulator, {agreement.departs}: it is asked"
            if agreement.departs
            else f"simulator and vLLM's scheduler agree on {agreement.steps} steps"
        )
        return profile

    def _finalists(self, profile: Profile) -> list[EngineLimits]:
        """Predict the whole space and return who lies within the profile's error of the best.

        Raises: ShadowError if the profile is too wrong to rank by; TooFewSamplesError.
        """
        check_rank_by(profile)
        context, predictor = self.context, self.predictor_of(profile)
        self._predictor = predictor
        predicted = self._predicted = predict_space(context, predictor)
        with context.stopwatch.stage("draw"):
            found = contend(predictor.as_deployed(), predicted, context.space.current)
        context.listener.note(
            f"{predicted_text(context, predicted)}; could be the best: "
            f"{', '.join(map(str, found.settings)) or 'only the current one'}"
        )
        return [*found.settings, context.space.current]

    @property
    def _race_aim(self) -> Aim:
        """What the race is after: where capacity is, it offers what the best can bear."""
        aim = self.context.aim
        best = None if self._predicted is None else leader(self._predicted.observations)
        if aim.objective is not Objective.CAPACITY or best is None:
            return aim
        load = 1 / best.score.value if best.score.tier is Tier.GOOD else 1.0
        return replace(aim, plan=replace(aim.plan, load=load))

    def _race_plan(
        self, settings: Sequence[EngineLimits], rate: float | None
    ) -> RacePlan | None:
        """Return who races on what, None where the time holds no race.

        On the windows of before where the run goes on, else on what the time holds.
        """
        context, predictor, aim = self.context, self._predictor, self._race_aim
        if predictor is None:
            return None
        if aim.objective is Objective.CAPACITY:
            context.listener.note(f"racing at {aim.plan.load:.3g} x the recorded load")
        if self.chosen:
            plan: RacePlan | None = race_on(context, predictor, aim, settings, self.chosen)
        else:
            wanted = race_windows(self.runner, rate)
            plan = plan_race(context, predictor, aim, settings, wanted)
        if plan is not None:
            self._choose(plan.workload.windows)
        return plan

    def _choose(self, windows: tuple[Window, ...]) -> None:
        """Keep what is replayed, so that a resumed run replays the same."""
        self.chosen = windows
        predicted = () if self._predicted is None else self._predicted.workload.windows
        self.context.keep_windows(windows, predicted)
        text = window_text(windows, self.context.trace)
        self.context.listener.note(f"replaying {text}")

    def _plan_beside_a_pilot(self, given: Profile, rate: float | None) -> RacePlan | None:
        """Measure whether a given profile is right that there is no time to race.

        Where it is not, it is corrected by the pilot's steps, and the race planned anew.
        """
        calibrator, predictor = self._calibrator, self._predictor
        if calibrator is None or predictor is None:
            return None
        fly_pilot(self.runner, calibrator.observe)
        if not calibrator.calibration.steps:
            return None
        times = calibrator.calibration.times_of(given)
        if abs(1 / times - 1) <= DISAGREEMENT * predictor.wrong_ratio:
            return None
        self.context.listener.note(
            f"live and predicted disagree: steps of the pilot take {times:.2g} times what the "
            "profile says; correcting it"
        )
        return self._race_plan(self._finalists(self._fitted(calibrator, given)), rate)

    def _race(self, plan: RacePlan) -> RaceDecision:
        """Replay who may be the best, live, and learn from each round.

        Raises: EngineError, ShadowError, UsageError.
        """
        calibrator, predictor, predicted = self._calibrator, self._predictor, self._predicted
        if calibrator is None or predictor is None or predicted is None:
            raise ShadowError("nothing was predicted")
        self._check_lifetimes(plan)
        evidence = PredictedEvidence(plan, predictor, predicted, self._relearned)
        decision = race(
            self.runner, plan, evidence, calibrator.observe, self.context.aim.confidence
        )
        self._plan = evidence.plan
        self.compared = cross_check(evidence.plan.predicted, self.context.journal.records())
        if differ := evidence.disagreement():
            self.context.listener.note(f"live and predicted disagree: {differ}")
            self.context.caveats.add(Caveat.SHADOW_DISAGREES)
        return self._with_own_blocks(evidence, decision)

    def _check_lifetimes(self, plan: RacePlan) -> None:
        """Say it where the windows that race are short beside the life of a request."""
        if plan.lives is None or plan.lives[0] >= LIFETIMES * plan.lives[1]:
            return
        window_s, life_s = plan.lives
        self.context.listener.note(
            f"the window of {window_s:.0f} s lasts {window_s / life_s:.1f} times as long as "
            f"its middle request, {life_s:.1f} s; at least {LIFETIMES:g} times are wanted, "
            "give --budget or --window more"
        )
        self.context.caveats.add(Caveat.SHORT_WINDOW)

    def _with_own_blocks(
        self, evidence: PredictedEvidence, decision: RaceDecision
    ) -> RaceDecision:
        """Decide anew by the KV blocks that engines started with each setting will have.

        Where the KV cache is what binds, and no start but the largest has shown how many blocks
        its size costs: the current setting is started cold, as it will be once more to no end
        if the answer is to keep it.

        Raises: EngineError, ShadowError, UsageError.
        """
        plan, context, calibrator = evidence.plan, self.context, self._calibrator
        current, predictions = context.space.current, evidence.predictions
        cost_s = cold_cost_s(self.runner, plan, [current])
        if (
            calibrator is None
            or not decision.rounds
            or evidence.predictor.doubt
            or self.runner.engine.restarts_per_config
            or len({s.limits.max_num_batched_tokens for s in calibrator.calibration.starts}) > 1
            or not _kv_binds(predictions, evidence.settings())
            or context.left_s < OWN_BLOCKS_WORTH * cost_s
        ):
            return decision
        context.listener.note("the KV cache binds: the current setting shows its own blocks")
        with context.stopwatch.stage("cold"):
            start_all(self.runner, plan.workload, [current], 1)
        self._keep_starts()
        profile = read_profile(context.run_dir.path / PROFILE_FILE)
        settings = self._finalists(profile)
        predictor, predicted = self._predictor, self._predicted
        if predictor is None or predicted is None:
            raise ShadowError("nothing was predicted")
        evidence.predictor, evidence.predictions = predictor, predicted
        raced = evidence.settings()
        field = list(dict.fromkeys([*settings[:-1], *raced, current]))
        evidence.predictions = predict_more(predictor.as_deployed(), predicted, field)
        draws = evidence.draws_of(field, DRAWS)
        anew = draws.decide(current, context.aim.confidence, decision.rounds)
        is_raced = anew.winner in raced
        return anew if is_raced else replace(anew, rounds=0, is_predicted=True)

    def _relearned(self) -> tuple[RacePlan, Predictor, Predictions] | None:
        """Fit anew with every step seen; predict anew, and who may be the best by that.

        None where no step was seen, as by a worker, or there is no time for it.
        """
        context, plan, calibrator = self.context, self._plan, self._calibrator
        cost_s = sum(context.stopwatch.stages_s.get(name, 0.0) for name in ("fit", "shadow"))
        if plan is None or calibrator is None or not calibrator.calibration.steps:
            return None
        if cost_s > context.left_s / 2:
            context.listener.note("there is no time to learn from the replays")
            return None
        if self._predictor is None or self._predicted is None:
            return None
        before, workload = self._predictor.profile, self._predicted.workload
        try:
            return self._predicted_anew(plan, calibrator, before, workload)
        except (ShadowError, TooFewSamplesError) as unfit:
            # What was predicted before, and how far off replays show it to be, still stands.
            context.listener.note(f"nothing is learnt of the replays: {unfit.message}")
            self._keep_profile(before)
            return None

    def _predicted_anew(
        self, plan: RacePlan, calibrator: Calibrator, before: Profile, workload: Workload
    ) -> tuple[RacePlan, Predictor, Predictions]:
        """Fit and predict anew. Raises: ShadowError, TooFewSamplesError, UsageError."""
        context, is_own = self.context, calibrator.is_own
        profile = self._fitted(calibrator, None if is_own else before, before.agreement)
        settings, predictor = list(plan.settings), self.predictor_of(profile)
        predicted = Predictions(workload, predictor.wrong_ratio, {})
        if len({run.round for run in context.journal.race_runs()}) == 1:
            # The first round may show that others are better; later ones move little.
            settings = list(dict.fromkeys([*plan.settings[:-1], *self._finalists(profile)]))
            predicted = self._predicted or predicted
        windows = plan.workload.windows
        plan = race_on(context, predictor, self._race_aim, settings, windows)
        predicted = predict_more(predictor.as_deployed(), predicted, plan.settings)
        self._plan, self._predictor, self._predicted = plan, predictor, predicted
        return plan, predictor, predicted

    def _predicted_cold(self, winner: EngineLimits) -> Deployed | None:
        """Predict the winner over the current one on engines with the blocks that each has."""
        predictor, predicted, plan = self._predictor, self._predicted, self._plan
        pair, blocks = (winner, self.context.space.current), self.runner.engine.cold_blocks
        if predictor is None or predicted is None or plan is None or predictor.doubt:
            return None
        if not set(pair) <= blocks.keys():
            return None
        profile = predictor.profile
        known = [KvStart(limits, blocks[limits]) for limits in pair]
        others = [start for start in profile.kv_starts if start.limits not in pair]
        own = replace(profile, kv_starts=(*known, *others))
        return predict_deployed(replace(predictor, profile=own), predicted, plan.workload, pair)

    # By predictions alone.

    def _decided_by_prediction(self) -> RaceDecision:
        """Decide by what was predicted alone, where the time held no race.

        Raises: NoFeasibleConfigError if nothing could be predicted.
        """
        if self._predicted is None or self._predictor is None:
            raise ShadowError("nothing was predicted")
        if not self.chosen or self.method is Method.CALIBRATED:
            self.chosen = windows = self._predicted.workload.windows
            self.context.keep_windows(windows, windows)
        return decide_predicted(self.context, self._predictor, self._predicted)

    # Without predictions.

    def _search_live(self, started: EngineStart) -> RaceDecision:
        """Search and race live; where the time was too short, predict from the steps seen."""
        context, runner = self.context, self.runner
        observe = self._observer(started)
        windows = self.chosen or search_windows(runner)
        self._choose(windows)
        workload = Workload.of(WINDOW, context.trace, windows, context.aim)
        plan = self._plan = search_live(runner, workload, observe)
        confidence = context.aim.confidence
        decision = race(runner, plan, LiveEvidence(plan), confidence=confidence)
        profile = self._profile_of_search()
        if not has_searched(context):
            decision = replace(decision, why=NOTHING_ELSE)
        elif not decision.rounds and len(plan.settings) > 1:
            decision = replace(decision, why="there was no time to race")
        if profile is None or decision.rounds or self.method is Method.LIVE:
            return decision
        try:
            self._finalists(profile)
        except (ShadowError, TooFewSamplesError) as unfit:
            context.listener.note(f"no prediction either: {unfit.message}")
            return decision
        context.caveats.discard(Caveat.SHADOW_UNFIT)
        context.listener.note("the time held no race: what the steps seen predict decides")
        return self._decided_by_prediction()

    def _observer(self, started: EngineStart) -> Observe | None:
        """Return what receives the live search's steps, None where nothing can be predicted."""
        try:
            self._calibrator = self._calibrator or self._begun(started)
        except ShadowError as reason:
            self.context.listener.note(f"no profile is kept: {reason.message}")
            return None
        return self._calibrator.observe

    def _profile_of_search(self) -> Profile | None:
        """Write what a live search has shown, if it is enough for a profile, and return it."""
        path = self.context.run_dir.path / PROFILE_FILE
        is_unfit = Caveat.SHADOW_UNFIT in self.context.caveats
        if self._calibrator is None or (path.exists() and not is_unfit):
            return None
        try:
            profile = self._calibrator.profile()
        except TooFewSamplesError as reason:
            self.context.listener.note(f"no profile is kept: {reason.message}")
            return None
        self._keep_profile(profile)
        return profile

    # What is left to do and to say.

    def _keep_starts(self) -> None:
        """Keep in the profile how many blocks the cold engines had."""
        path = self.context.run_dir.path / PROFILE_FILE
        blocks = self.runner.engine.cold_blocks
        if self._calibrator is None or not blocks or not path.exists():
            return
        for limits, num_blocks in blocks.items():
            self._calibrator.calibration = self._calibrator.calibration.and_start(
                limits, num_blocks
            )
        starts = self._calibrator.calibration.starts
        self._keep_profile(replace(read_profile(path), kv_starts=starts))

    def _turn_knobs(self, decision: RaceDecision) -> None:
        """Find which knobs pay beside the answer and try them cold; and what else to say."""
        predictor, predicted = self._predictor, self._predicted
        names = self.context.record.options.knobs
        if predictor is None or predicted is None:
            if names:
                self.context.listener.note("no knob is turned: nothing could be predicted")
            return
        if decision.winner not in predicted.outcomes:
            predicted = predict_more(predictor.as_deployed(), predicted, [decision.winner])
        self.starting_points = compare_starting_points(predictor, predicted, decision)
        self.clients = advise_clients(self.context, predictor, predicted, decision.winner)
        advice = advise_on_knobs(self.context, predictor, predicted, decision)
        if advice is not None and self._plan is not None:
            advice = confirm_knobs(self.runner, self._plan, advice)
            if advice.settings:
                self.context.listener.note(advice.lines[-1])
        self.knobs = advice

    def _find_capacity(self, decision: RaceDecision) -> None:
        """Find how much load the answer bears, where there is an SLO and a prediction."""
        context, predictor, predicted = self.context, self._predictor, self._predicted
        is_possible = predictor is not None and predicted is not None and context.aim.slos
        if not is_possible or predictor is None or predicted is None or context.left_s <= 0:
            return
        workload = predicted.workload
        with context.stopwatch.stage("capacity"):
            found = predict_capacity(predictor, workload, decision, context.space.current)
        if self.method is Method.CALIBRATED:
            self.capacity = found
            return
        windows = [workload] if self._plan is None else [workload, self._plan.workload]
        self.capacity = confirm_capacity(
            self.runner, predictor, windows, decision.winner, found
        )

    def findings(self) -> RunFindings:
        """Return what stands in the result beside the decision."""
        plan, predicted = self._plan, self._predicted
        workload = plan.workload if plan is not None else None
        if workload is None and predicted is not None:
            workload = predicted.workload
        return RunFindings(
            windows=self.chosen or (() if workload is None else workload.windows),
            scoring=None if workload is None else workload.scoring,
            cold=None if self.cold is None else self.cold.as_json(),
            capacity=None if self.capacity is None else self.capacity.as_json(),
            profile=None if self._predictor is None else profile_facts(self._predictor),
            compared=self.compared,
            predicted={}
            if plan is None
            else {limits: m.as_json() for limits, m in plan.predicted.items()},
            info=self.runner.engine.info,
            engine_starts=self.runner.engine.starts,
            cold_blocks=self.runner.engine.cold_blocks,
            knobs=self.knobs,
            starting_points=self.starting_points,
            clients=self.clients,
        )

    def caveats(self, decision: RaceDecision) -> list[Caveat]:
        """Return the caveats of the whole run, in a fixed order."""
        context, engine = self.context, self.runner.engine
        found = set(context.caveats)
        mine = self._trials_of(decision.winner)
        said = [Caveat(c) for t in mine for c in (t.measurement or {})["caveats"]]
        # One disturbed replay of many does not speak for all of them.
        found.update(caveat for caveat in said if 2 * said.count(caveat) >= len(mine))
        is_kept = decision.verdict is RaceVerdict.KEEP
        if is_kept and decision.best != context.space.current:
            found.add(Caveat.WITHIN_NOISE)
        if decision.is_predicted and len(self._seen()) > 1:
            found.add(Caveat.NOT_RACED)
        if disturbed(searched(context)):
            found.add(Caveat.NOISY_MACHINE)
        if at_edge(decision.winner, searched(context) or self._seen()):
            found.add(Caveat.AT_SPACE_EDGE)
        if engine.restarts_per_config:
            found.add(Caveat.RESTARTED_PER_CONFIG)
        if self.chosen != (whole(context.trace),):
            found.add(Caveat.WINDOWED)
        is_change = decision.verdict is RaceVerdict.CHANGE
        if is_change and self.cold is None and not engine.restarts_per_config:
            found.add(Caveat.NOT_CONFIRMED_COLD)
        return [caveat for caveat in Caveat if caveat in found]

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
