"""What a run predicts: the space and the decision by it, and a run that does nothing else.

A run with a live engine predicts with the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import (
    Caveat,
    EngineError,
    ReplayError,
    ShadowError,
    TooFewSamplesError,
    UsageError,
)
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.series import timeline_record
from tuner.run.context import RunContext, Workload
from tuner.run.drawing import Drawing
from tuner.run.knobs.advice import advise
from tuner.run.knobs.records import KnobAdvice
from tuner.run.loads import clients
from tuner.run.loads.capacity import predict_capacity, tell_headroom
from tuner.run.loads.records import ClientAdvice
from tuner.run.options import STARTING_POINTS
from tuner.run.outcome import RunFindings
from tuner.run.predict import Foretold, Predictions, predict
from tuner.run.records import ProfileRecord, StartFinding
from tuner.search.budget import window_text
from tuner.search.ladder import at_edge
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.shadow.calibration import check_rank_by
from tuner.shadow.predictor import Predictor
from tuner.traffic.traces import Trace
from tuner.traffic.windows import busiest, whole


def profile_record(predictor: Predictor) -> ProfileRecord:
    """Return where a prediction comes from, for the result."""
    profile = predictor.profile
    return ProfileRecord(
        made_at=profile.made_at,
        device=profile.shape.device,
        vllm_version=profile.shape.vllm_version,
        calibrated_on=tuple(profile.calibrated_on),
        error_ratio=predictor.wrong_ratio,
    )


def predict_space(context: RunContext, predictor: Predictor) -> Foretold:
    """Predict the run's space and put it among the run's trials.

    Raises: ShadowError, TooFewSamplesError, UsageError.
    """
    with context.stopwatch.stage("shadow"):
        workload = Workload.of_whole(context.trace, context.aim)
        if predictor.doubt and context.aim.window is None:
            workload = that_can_be_asked(context, predictor, workload)
        predicted = predict(predictor.as_deployed(), context.space, workload)
        known = Foretold(predictor, predicted)
        if not predictor.doubt:
            known = known.more(
                [at for at in _starting_limits() if at.within(context.space.whatever_wins)]
            )
        keep_predictions(context, known.predictions)
    remark = predictor.info(context.space.ceiling).remark
    if remark:
        context.listener.note(remark)
    return known


# What goes to batches beyond those that were measured is doubted from this share of the time
# on: ours, so much moves the tail of a latency.
MUCH_BEYOND = 0.1
# What is told beside an answer.
ADVICE = "knobs, starting points and advice for clients"
CAPACITY = "how much load it bears"
# How much traffic tells how long vLLM's scheduler takes, in seconds, the share of the time that
# is left which all settings may take of it, and the least traffic that is asked about: ours.
PROBE_S, ASKED_SHARE, LEAST_ASKED_S = 60.0, 0.2, 6.0


def that_can_be_asked(
    context: RunContext, predictor: Predictor, workload: Workload
) -> Workload:
    """Return as much of the trace as vLLM's own scheduler replays at every setting in the time.

    It takes longest at the smallest caps, which make most steps of the same traffic, and where
    most is due.

    Raises: ShadowError, TooFewSamplesError, UsageError.
    """
    trace, plan, settings = context.trace, workload.plan, context.space.grid()
    if trace.duration_s <= PROBE_S:
        return workload
    probe, fewest = busiest(trace, PROBE_S).of(trace), min(x.max_num_seqs for x in settings)
    slow = [limits for limits in settings if limits.max_num_seqs <= 2 * fewest]
    took_s = [_asked_s(predictor, probe, x, plan) for x in (context.space.current, slow[0])]
    share = len(slow) / len(settings)
    each_s = (1 - share) * took_s[0] + share * took_s[1]
    held_s = PROBE_S * ASKED_SHARE * max(context.left_s, 0.0) / (len(settings) * each_s)
    if held_s >= trace.duration_s:
        return workload
    part, least = busiest(trace, max(held_s, LEAST_ASKED_S)), context.aim.least_requests
    # A shorter stretch is busier, and takes longer than its share of the time.
    denser = _per_s(part.of(trace)) / _per_s(probe)
    part = busiest(trace, max(held_s / max(denser, 1.0), LEAST_ASKED_S))
    while part.of(trace).measured < least and part.length_s < trace.duration_s:
        part = busiest(trace, 2 * part.length_s)
    context.listener.note(
        f"of the trace {window_text((part,), trace)} is predicted, as the time holds it"
    )
    return Workload.of(workload.name, trace, (part,), context.aim)


def _asked_s(
    predictor: Predictor, probe: Trace, limits: EngineLimits, plan: ReplayPlan
) -> float:
    began_s = time.monotonic()
    predictor.as_deployed().measure([probe], limits, plan)
    return max(time.monotonic() - began_s, 1e-3)


def _per_s(trace: Trace) -> float:
    """Return how many tokens a second of a trace asks for."""
    tokens = int(trace.prompt_tokens.sum() + trace.output_tokens.sum())
    return tokens / max(trace.duration_s, 1e-3)


def decide_predicted(context: RunContext, known: Foretold) -> RaceDecision:
    """Decide by draws of what was predicted.

    Raises: ShadowError, UsageError; NoFeasibleConfigError if every setting fails.
    """
    with context.stopwatch.stage("draw"):
        drawing = Drawing(known.predictor.as_deployed(), known.predictions)
        return drawing.decide(context.space.current, confidence=context.aim.confidence)


def _starting_limits() -> list[EngineLimits]:
    return [point.limits for point in STARTING_POINTS.values()]


def _leaves_blocks(predictor: Predictor, limits: EngineLimits) -> bool:
    try:
        predictor.simulated(limits)
    except ShadowError:
        return False
    return True


def compare_starting_points(
    context: RunContext, known: Foretold, decision: RaceDecision
) -> tuple[StartFinding, ...]:
    """Predict how far each starting point is from the answer, with this engine's memory.

    Nothing where vLLM's own scheduler is asked, which takes too long, of those that would
    leave no KV cache, and of those above a ceiling that the engine did not start beyond.

    Raises: ShadowError, UsageError.
    """
    if known.predictor.doubt:
        return ()
    own_start = known.predictor.as_deployed()
    possible = [limits for limits in _starting_limits() if _leaves_blocks(own_start, limits)]
    if Caveat.CEILING_LOWERED in context.caveats:
        possible = [x for x in possible if x.within(context.space.ceiling)]
    asked = [*possible, decision.told]
    own = known.more(asked).predictions
    scores = {limits: own.workload.score(own.outcomes[limits]) for limits in asked}
    best = scores[decision.told]
    found = []
    for name, point in STARTING_POINTS.items():
        if point.limits not in scores:
            continue
        score = scores[point.limits]
        found.append(
            StartFinding(
                **asdict(point.limits),
                name=name,
                metric=best.own_metric,
                ratio=score.over(best),
                state=str(score.tier)[2:] if score.tier > best.tier else "",
            )
        )
    return tuple(found)


def advise_on_knobs(
    context: RunContext, known: Foretold, decision: RaceDecision
) -> KnobAdvice | None:
    """Predict what the run's knobs bring beside its limits, None where it has none.

    Raises: ShadowError, UsageError.
    """
    if not context.record.options.knobs:
        return None
    with context.stopwatch.stage("knobs"):
        advice = advise(
            known.predictor.as_deployed(),
            known.predictions,
            decision.winner,
            context.space,
            context.record.options.knobs,
            context.aim.confidence,
        )
    for line in advice.lines if advice is not None else ():
        context.listener.note(line)
    return advice


def advise_clients(
    context: RunContext, known: Foretold, limits: EngineLimits
) -> ClientAdvice | None:
    """Predict what clients of the limits should hold to, None where the limits fail.

    Nothing either where vLLM's own scheduler is asked, which takes too long, or where the
    traffic tells nothing of clients, which is noted.

    Raises: ShadowError, UsageError.
    """
    predictor, found = known.predictor, known.predictions
    if predictor.doubt or not isinstance(found.outcomes.get(limits), Measurement):
        return None
    with context.stopwatch.stage("clients"):
        try:
            return clients.advise(predictor.as_deployed(), limits, found.workload)
        except TooFewSamplesError as error:
            context.listener.note(f"no advice for clients: {error.message}")
            return None


def find_beside(context: RunContext, find: Callable[[], None], what: str) -> None:
    """Find what is told beside the answer, which stands though that should fail."""
    try:
        find()
    except (EngineError, ReplayError, ShadowError, TooFewSamplesError, UsageError) as error:
        context.listener.note(
            f"the answer stands, but the result lacks {what} or part of it: {error.message}"
        )


def keep_predictions(context: RunContext, predicted: Predictions) -> None:
    """Put predictions among the run's trials, as those of its latest profile."""
    made = predicted.recorded(context.journal.last_prediction() + 1)
    context.run_dir.is_measured = True
    context.journal.add(made)
    context.keep_trials()


@dataclass(slots=True)
class ShadowSession:
    """A run that predicts and measures nothing."""

    context: RunContext
    predictor: Predictor
    is_forced: bool = False
    found: RunFindings = field(default_factory=RunFindings)
    decision: RaceDecision | None = None
    foretold: Foretold | None = None

    def run(self) -> RaceDecision:
        """Predict the whole space and decide by it.

        Raises: ShadowError, UsageError, TooFewSamplesError.
        """
        context, predictor = self.context, self.predictor
        if not self.is_forced:
            check_rank_by(predictor.profile)
        context.stopwatch.begin()
        context.journal.set_state("running")
        self.foretold = known = predict_space(context, predictor)
        workload = known.predictions.workload
        context.keep_windows(workload.windows, workload.windows)
        context.listener.note(predicted_text(context, known.predictions))
        current = context.space.current
        self.decision = decision = decide_predicted(context, known)
        find_beside(context, partial(self._advise, known, decision), ADVICE)
        find_beside(context, partial(self._find_capacity, workload, decision), CAPACITY)
        self._keep_timelines(workload, [decision.shown, current])
        context.journal.set_state("done")
        return decision

    def _advise(self, known: Foretold, decision: RaceDecision) -> None:
        self.found.starting_points = compare_starting_points(self.context, known, decision)
        self.found.knobs = advise_on_knobs(self.context, known, decision)
        self.found.clients = advise_clients(self.context, known, decision.told)

    def _find_capacity(self, workload: Workload, decision: RaceDecision) -> None:
        if not workload.slos or not workload.plan.bears_loads:
            return
        context = self.context
        with context.stopwatch.stage("capacity"):
            current = context.space.current
            borne = predict_capacity(self.predictor, workload, decision, current)
            self.found.capacity = borne.record
            tell_headroom(context, borne)

    def _keep_timelines(self, workload: Workload, settings: Sequence[EngineLimits]) -> None:
        """Predict settings once more for what they look like over time.

        And for how much of it lies beyond what the profile was learnt from.
        """
        plan = replace(workload.plan, keep_steps=True)
        for limits in dict.fromkeys(settings):
            try:
                logs = [self.predictor.replay(piece, limits, plan) for piece in workload.pieces]
            except EngineError:
                continue  # a setting that fails has a trial with its cause, and no timeline
            self.context.keep_timelines(limits, "shadow", [timeline_record(x) for x in logs])
            self._doubt_beyond(limits, [x.kept_steps for x in logs if x.kept_steps is not None])

    def _doubt_beyond(self, limits: EngineLimits, replays: Sequence[StepColumns]) -> None:
        """Doubt a setting that spends much of its time on batches that nobody has measured."""
        context, seen = self.context, self.predictor.profile.seen
        beyond = 0.0 if seen is None else seen.beyond_ratio(replays)
        if seen is None or beyond <= MUCH_BEYOND or Caveat.EXTRAPOLATED in context.caveats:
            return
        context.caveats.add(Caveat.EXTRAPOLATED)
        context.caveat_texts[Caveat.EXTRAPOLATED] = (
            f"predicted beyond what was measured: {100 * beyond:.0f} % of the time at {limits} "
            f"goes to batches of more than the {seen.decode_seqs} decoding sequences or "
            f"{seen.prefill_tokens:,} prefilled tokens that the profile was learnt from, whose "
            "times extend the last slope"
        )

    @property
    def _workload(self) -> Workload:
        if self.foretold is not None:
            return self.foretold.predictions.workload
        return Workload.of_whole(self.context.trace, self.context.aim)

    def caveats(self, decision: RaceDecision) -> dict[Caveat, str]:
        """Return the caveats of the run and what each says, in a fixed order."""
        context = self.context
        found = {*context.doubts, Caveat.SHADOW_ONLY}
        known = self.foretold
        history = [] if known is None else known.predictions.observations
        if at_edge(decision.best, history):
            found.add(Caveat.AT_SPACE_EDGE)
        if self._workload.windows != (whole(context.trace),):
            found.add(Caveat.WINDOWED)
        if decision.verdict is RaceVerdict.KEEP and decision.best != context.space.current:
            found.add(Caveat.WITHIN_NOISE)
        return context.worded(found)

    def findings(self) -> RunFindings:
        """Return what stands in the result beside the decision."""
        return replace(
            self.found,
            windows=self._workload.windows,
            scoring=self._workload.scoring,
            profile=profile_record(self.predictor),
            info=self.predictor.info(self.context.space.ceiling),
        )


def predicted_text(context: RunContext, predicted: Predictions) -> str:
    """Say what was predicted, and on what."""
    on = window_text(predicted.workload.windows, context.trace)
    took_s = context.stopwatch.stages_s["shadow"]
    return f"predicted {len(predicted.outcomes)} settings on {on}, in {took_s:.1f} s"
