"""The search that predicts: calibrate, predict the space, race who may be the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, ShadowError, TooFewSamplesError
from tuner.replay.metrics import Measurement
from tuner.replay.process import EngineStart
from tuner.run.calibrate.blocks import Blocks, replay_longer
from tuner.run.cold import start_all
from tuner.run.context import WINDOW, RunContext, Workload
from tuner.run.directory import PROFILE_FILE
from tuner.run.drawing import Deployed, Drawing, predict_deployed
from tuner.run.evidence import KV_FULL_RATIO
from tuner.run.options import Method
from tuner.run.predict import DISAGREEMENT, Differences, Foretold, Predictions, cross_check
from tuner.run.race import PredictedEvidence, race
from tuner.run.sessions.learning import Learning
from tuner.run.sessions.shadow import (
    decide_predicted,
    keep_predictions,
    predict_space,
    predicted_text,
)
from tuner.run.time_plan import (
    RacePlan,
    cold_cost_s,
    fitting,
    fly_pilot,
    plan_race,
    race_on,
    race_windows,
    tell_short_windows,
)
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import Aim, window_text
from tuner.search.effects import Unexplained
from tuner.search.objective import Objective, Tier
from tuner.search.race import RaceDecision
from tuner.search.trials import Phase, leader
from tuner.shadow.calibration import check_rank_by
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile, read_profile
from tuner.traffic.windows import Window

# The share of the time that is left which finalists are looked at for where it holds no race,
# how often, and for how long each at least: ours, the rest is for predicting them anew.
LONGER_SHARE, MOST_LOOKS, LEAST_LOOK_S = 0.7, 3, 10.0
# How many times as much as starting the current setting has to be left for it: ours, the
# winner's start comes after.
OWN_BLOCKS_WORTH = 2.5


@dataclass(slots=True)
class PredictedSearch:
    """The search that predicts, and how far it is.

    With Method.CALIBRATED nothing is raced where it can be predicted. `chosen` are the windows
    that are replayed, those that an earlier process of the run has chosen at first; `plan` is
    who races on them. `foretold` is None until something is predicted, and once it turns out to
    be wrong. `compared` is what was measured beside what was predicted, `wall_ratio` the real
    time that a second of the trace costs, None until a pilot has told, and `evidence` what the
    race has shown, None without one.
    """

    learning: Learning
    method: Method
    chosen: tuple[Window, ...] = ()
    is_compared: bool = False
    plan: RacePlan | None = None
    foretold: Foretold | None = None
    compared: Differences = field(default_factory=dict)
    wall_ratio: float | None = None
    evidence: PredictedEvidence | None = None

    @property
    def runner(self) -> TrialRunner:
        """What replays on the run's engine."""
        return self.learning.runner

    @property
    def context(self) -> RunContext:
        """What the run was given."""
        return self.runner.context

    @property
    def known(self) -> Foretold:
        """What was predicted, and by what. Raises: ShadowError where nothing was."""
        if self.foretold is None:
            raise ShadowError("nothing was predicted")
        return self.foretold

    def run(self, started: EngineStart) -> RaceDecision | None:
        """Return the decision, None where nothing can be predicted and all must be searched.

        Raises: EngineError, UsageError.
        """
        context, path = self.context, self.context.run_dir.path / PROFILE_FILE
        try:
            given = None
            if path.exists():
                # The run is resumed, or was given a profile: the calibration is done.
                profile = given = self.learning.take_over(read_profile(path), started)
            else:
                calibrator = self.learning.begin(started)
                is_alone = self.method is Method.CALIBRATED
                parts = (self.runner, calibrator, self.learning.predictor_of)
                blocks = Blocks(*parts, are_alone=is_alone, tells_capacity=self.is_compared)
                self.wall_ratio = blocks.calibrate()
                profile = self.learning.fitted()
            profile = self.learning.compared(profile)
            settings = self.finalists(profile)
            if self.method is Method.CALIBRATED:
                return self.decide()
            plan = self._race_plan(settings)
            if plan is None and given is not None:
                plan = self._plan_beside_a_pilot(given)
            elif plan is None:
                self._look_longer(profile, settings)
        except (ShadowError, TooFewSamplesError) as unfit:
            context.caveats.add(Caveat.SHADOW_UNFIT)
            self.foretold = None
            context.listener.note(f"no predictions: {unfit.message}; searching live")
            return None
        if plan is None:
            context.caveats.add(Caveat.BUDGET_SPENT)
            return self.decide()
        self.plan = fitting(self.runner, plan)
        return self._race(self.plan)

    def _look_longer(self, profile: Profile, settings: Sequence[EngineLimits]) -> None:
        """Spend the time that holds no race on the finalists' steps, and predict them anew.

        And on those that are finalists by that alone: nobody is recommended of whose batches
        nothing was seen, while there is time.

        Raises: EngineError, ShadowError, TooFewSamplesError, UsageError.
        """
        looked, wall_ratio = set[EngineLimits](), self._flown()
        for _ in range(MOST_LOOKS):
            chosen = [limits for limits in settings if limits not in looked]
            time_s = LONGER_SHARE * self.context.left_s
            least_s = LEAST_LOOK_S * len(chosen) + self._anew_s if looked else 0.0
            if not chosen or time_s <= least_s or self.runner.engine.restarts_per_config:
                return
            replay_longer(self.runner, self.learning.begun, chosen, wall_ratio, time_s)
            looked.update(chosen)
            # Where it is late, who was out stays out.
            among = settings if self._is_late else ()
            settings = self.finalists(self.learning.fitted(agreement=profile.agreement), among)

    @property
    def _is_late(self) -> bool:
        """Whether vLLM's own scheduler would take longer over the space than is left."""
        return bool(self.known.predictor.doubt) and self._anew_s > self.context.left_s

    @property
    def _anew_s(self) -> float:
        """Seconds that fitting and predicting anew take, or less: all that it has taken."""
        taken_s = self.context.stopwatch.stages_s
        return sum(taken_s.get(name, 0.0) for name in ("fit", "shadow"))

    def finalists(
        self, profile: Profile, among: Sequence[EngineLimits] = ()
    ) -> list[EngineLimits]:
        """Predict the space, or some of it, and return who may be the best by the profile.

        Raises: ShadowError if the profile is too wrong to rank by; TooFewSamplesError.
        """
        check_rank_by(profile)
        context, predictor = self.context, self.learning.predictor_of(profile)
        if among:
            known = self._predicted_among(predictor, [context.space.current, *among])
        else:
            known = predict_space(context, predictor)
        self.foretold = known
        with context.stopwatch.stage("draw"):
            drawing = Drawing(predictor.as_deployed(), known.predictions)
            found = drawing.contend(context.space.current, confidence=context.aim.confidence)
        self.foretold = replace(known, witnesses=found.witnesses)
        context.listener.note(
            f"{predicted_text(context, known.predictions)}; could be the best: "
            f"{', '.join(map(str, found.settings)) or 'only the current one'}"
        )
        return [*found.settings, context.space.current]

    def _predicted_among(
        self, predictor: Predictor, settings: Sequence[EngineLimits]
    ) -> Foretold:
        """Predict some settings on the traffic of before. Raises: ShadowError, UsageError."""
        with self.context.stopwatch.stage("shadow"):
            before = Predictions(self.known.predictions.workload)
            known = Foretold(predictor, before).more(settings)
            keep_predictions(self.context, known.predictions)
        return known

    @property
    def _race_aim(self) -> Aim:
        """What the race is after: where capacity is, it offers what the best can bear.

        A run that goes on offers what it did before.
        """
        aim, records = self.context.aim, self.context.journal.records()
        best = leader(self.known.predictions.observations)
        if aim.objective is not Objective.CAPACITY or best is None:
            return aim
        raced = [t.measurement for t in records if t.phase is Phase.RACE and t.measurement]
        # A capacity is a multiple of the recorded load, as what was replayed is.
        load = 1 / best.score.value if best.score.tier is Tier.GOOD else self.context.trace.load
        if raced:
            load = raced[0]["load"]
        load /= self.context.trace.load
        return replace(aim, plan=replace(aim.plan, load=load))

    def _flown(self) -> float:
        """Return what a second of the trace costs, by a pilot whose steps are learnt from.

        Raises: EngineError.
        """
        if self.wall_ratio is None:
            self.wall_ratio = fly_pilot(self.runner, self.learning.begun.observe)
        return self.wall_ratio

    def _race_plan(self, settings: Sequence[EngineLimits]) -> RacePlan | None:
        """Return who races on what, None where the time holds no race.

        On the windows of before where the run goes on, else on what the time holds.
        """
        context, predictor, aim = self.context, self.known.predictor, self._race_aim
        if aim.objective is Objective.CAPACITY:
            load = aim.plan.load * context.trace.load
            context.listener.note(f"racing at {load:.3g} x the recorded load")
        if self.chosen:
            workload = Workload.of(WINDOW, context.trace, self.chosen, aim)
            plan: RacePlan | None = race_on(context, predictor, settings, workload)
        else:
            wanted = (aim.window,) if aim.window else race_windows(context, self._flown())
            plan = plan_race(context, predictor, aim, settings, wanted, self._life_s)
        if plan is not None:
            self.choose(plan.workload.windows)
        return plan

    @property
    def _life_s(self) -> float:
        """How long the middle request lives at the current limits, as predicted.

        Units: seconds, without end where nothing is known.
        """
        now = self.known.predictions.outcomes.get(self.context.space.current)
        life_s = now.latency("e2e_s", "p50") if isinstance(now, Measurement) else None
        return life_s or math.inf

    def choose(self, windows: tuple[Window, ...]) -> None:
        """Keep what is replayed, so that a resumed run replays the same."""
        self.chosen = windows
        foretold = self.foretold
        predicted = () if foretold is None else foretold.predictions.workload.windows
        self.context.keep_windows(windows, predicted)
        text = window_text(windows, self.context.trace)
        self.context.listener.note(f"replaying {text}")

    def _plan_beside_a_pilot(self, given: Profile) -> RacePlan | None:
        """Measure whether a given profile is right that there is no time to race.

        Where it is not, it is corrected by the pilot's steps, and the race planned anew.
        """
        calibrator = self.learning.begun
        self._flown()
        if not calibrator.calibration.steps:
            return None
        times = calibrator.calibration.times_of(given)
        if abs(1 / times - 1) <= DISAGREEMENT * self.known.predictor.wrong_ratio:
            return None
        self.context.listener.note(
            f"live and predicted disagree: steps of the pilot take {times:.2g} times what the "
            "profile says; correcting it"
        )
        return self._race_plan(self.finalists(self.learning.fitted(given)))

    def _race(self, plan: RacePlan) -> RaceDecision:
        """Replay who may be the best, live, and learn from each round.

        Raises: EngineError, ShadowError, UsageError.
        """
        observe = self.learning.begun.observe
        tell_short_windows(plan)
        evidence = self.evidence = PredictedEvidence(plan, self.known, self._relearned)
        decision = race(self.runner, evidence, observe)
        decision = self._with_own_blocks(evidence, decision)
        self.plan = evidence.plan
        self.compared = cross_check(evidence.plan.predicted, self.context.journal.records())
        if differ := evidence.disagreement():
            self.context.listener.note(f"live and predicted disagree: {differ}")
            self.context.caveats.add(Caveat.SHADOW_DISAGREES)
        return decision

    def _with_own_blocks(
        self, evidence: PredictedEvidence, decision: RaceDecision
    ) -> RaceDecision:
        """Race on by the KV blocks that engines started with each setting will have.

        Where the KV cache is what binds, and no start but the largest has shown how many blocks
        its size costs: the current setting is started cold, as it will be once more to no end
        if the answer is to keep it.

        Raises: EngineError, ShadowError, UsageError.
        """
        plan, context = evidence.plan, self.context
        starts = self.learning.begun.calibration.starts
        current, before = context.space.current, evidence.known
        cost_s = cold_cost_s(self.runner, plan, [current])
        if (
            not decision.rounds
            or before.predictor.doubt
            or self.runner.engine.restarts_per_config
            or len({s.limits.max_num_batched_tokens for s in starts}) > 1
            or not _kv_binds(before.predictions, evidence.settings())
            or context.left_s < OWN_BLOCKS_WORTH * cost_s
        ):
            return decision
        context.listener.note("the KV cache binds: the current setting shows its own blocks")
        with context.stopwatch.stage("cold"):
            start_all(self.runner, plan, [current], 1, later=1)
        self.learning.keep_starts()
        settings = self.finalists(read_profile(context.run_dir.path / PROFILE_FILE))
        known, raced = self.known, evidence.settings()
        field = list(dict.fromkeys([*settings[:-1], *raced, current]))
        self.plan = race_on(context, known.predictor, field, plan.workload)
        self.foretold = known.more(field)
        evidence.plan, evidence.known = self.plan, self.foretold
        # Who has raced need not race again; who may be the best by these blocks has to.
        return race(self.runner, evidence, self.learning.begun.observe)

    def _relearned(self) -> tuple[RacePlan, Foretold] | None:
        """Fit anew with every step seen; predict anew, and who may be the best by that.

        None where no step was seen, as by a worker, or there is no time for it.
        """
        context, plan, known = self.context, self.plan, self.known
        if plan is None or not self.learning.begun.calibration.steps:
            return None
        if self._anew_s > context.left_s / 2:
            context.listener.note("there is no time to learn from the replays")
            return None
        try:
            return self._predicted_anew(plan, known)
        except (ShadowError, TooFewSamplesError) as unfit:
            # What was predicted before, and how far off replays show it to be, still stands.
            context.listener.note(f"nothing is learnt of the replays: {unfit.message}")
            self.learning.keep(known.predictor.profile)
            return None

    def _predicted_anew(self, plan: RacePlan, known: Foretold) -> tuple[RacePlan, Foretold]:
        """Fit and predict anew. Raises: ShadowError, TooFewSamplesError, UsageError."""
        context, before = self.context, known.predictor.profile
        given = None if self.learning.begun.is_own else before
        profile = self.learning.fitted(given, before.agreement)
        settings, predictor = list(plan.settings), self.learning.predictor_of(profile)
        predicted = Predictions(known.predictions.workload)
        if len({run.round for run in context.journal.race_runs()}) == 1:
            # The first round may show that others are better; later ones move little.
            settings = list(dict.fromkeys([*plan.settings[:-1], *self.finalists(profile)]))
            predicted = self.known.predictions
        plan = race_on(context, predictor, settings, plan.workload)
        found = Foretold(predictor, predicted, self.known.witnesses).more(plan.settings)
        self.plan, self.foretold = plan, found
        return plan, found

    def predict_cold(self, decision: RaceDecision) -> Deployed | None:
        """Predict the winner over the current one on engines with the blocks that each has."""
        foretold, plan = self.foretold, self.plan
        pair = (decision.winner, self.context.space.current)
        blocks = self.runner.engine.cold_blocks
        if foretold is None or plan is None or foretold.predictor.doubt:
            return None
        if not set(pair) <= blocks.keys():
            return None
        profile = foretold.predictor.profile
        known = [KvStart(limits, blocks[limits]) for limits in pair]
        others = [start for start in profile.kv_starts if start.limits not in pair]
        own = foretold.predictor.of(replace(profile, kv_starts=(*known, *others)))
        parts = (foretold.predictions, plan.workload, pair, decision.metric)
        shown = tuple(limits for limits in foretold.witnesses if limits not in pair)
        return predict_deployed(own, *parts, self._unexplained((*pair, *shown)), shown)

    def _unexplained(self, wanted: Sequence[EngineLimits]) -> Unexplained | None:
        """Return what the race showed of settings beyond the prediction, None without one."""
        evidence = self.evidence
        settings = [] if evidence is None else list(evidence.settings())
        if evidence is None or not set(wanted) <= set(settings):
            return None
        return evidence.unexplained().among([settings.index(limits) for limits in wanted])

    def decide(self) -> RaceDecision:
        """Decide by what was predicted alone, where the time held no race.

        Raises: NoFeasibleConfigError if every setting fails; ShadowError if nothing was
            predicted.
        """
        known = self.known
        if not self.chosen or self.method is Method.CALIBRATED:
            self.chosen = windows = known.predictions.workload.windows
            self.context.keep_windows(windows, windows)
        return decide_predicted(self.context, known)


def _kv_binds(predictions: Predictions, settings: Sequence[EngineLimits]) -> bool:
    found = [predictions.outcomes.get(limits) for limits in settings]
    measured = [m for m in found if isinstance(m, Measurement)]
    return any(m.preemptions > 0 or m.kv_usage.max >= KV_FULL_RATIO for m in measured)
