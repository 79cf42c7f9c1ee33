"""Which knobs pay beside the limits: each alone, all together, and started cold.

Every value of every knob is predicted at the limits that were found; what gains is turned, one
knob after the other with the others as they are by then, and the whole grid of limits is
predicted again with them, until nothing moves. Gains are of draws that all share, so that what
is open of the engine's speed and of the traffic cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.runner import Failure
from tuner.run.drawing import FEW_DRAWS, Drawing, compare_engines
from tuner.run.evidence import change_bounds
from tuner.run.knobs.known import Change, Knob, Place, knob_named, kv_times, least_blocks
from tuner.run.knobs.records import (
    MIN_GAIN,
    KnobAdvice,
    KnobFinding,
    Standing,
    gain_text,
    settings_text,
)
from tuner.run.predict import Predictions, capacity_per_s, predict, predict_more
from tuner.run.time_plan import RacePlan, cold_cost_s
from tuner.run.trial_runner import TrialRunner
from tuner.search.draws import Draws
from tuner.search.judging import TIE_LOSS, is_sure
from tuner.search.objective import WORST_SLACK, Objective, Score, Tier, moved, named
from tuner.search.race import CONFIDENCE, Odds
from tuner.search.space import SearchSpace
from tuner.search.trials import leader
from tuner.shadow.predictor import Predictor
from tuner.stats import Estimate, short

KNOBS_FILE: Final = "knobs.jsonl"
"""Where what engines with knobs turned have shown is kept, a line for each start."""
# How often limits and knobs are gone through in turns: ours; the second round seldom moves.
SWEEPS: Final = 3
# How many starts of each a cold check takes where the time holds them: ours.
STARTS: Final = 2
GB: Final = 1e9


def advise(
    predictor: Predictor,
    found: Predictions,
    limits: EngineLimits,
    space: SearchSpace,
    names: Sequence[str],
    confidence: float = CONFIDENCE,
) -> KnobAdvice | None:
    """Return what the named knobs bring beside the limits; None where none is named.

    Nothing is said of any where vLLM's own scheduler is asked, which takes too long.

    Raises: ShadowError, UsageError.
    """
    knobs = list(dict.fromkeys(map(knob_named, names)))
    if not knobs:
        return None
    turning = _Turning(predictor, found, confidence)
    if predictor.doubt:
        said = f"not predicted: {predictor.doubt}"
        return _advice(
            turning, limits, [KnobFinding(knob=knob.name, says=said) for knob in knobs]
        )
    findings = [turning.finding(knob, limits) for knob in knobs]
    wanted = {one.knob: one.gain_ratio for one in findings if one.is_recommended}
    order = sorted(wanted, key=lambda name: wanted[name] or 0.0)
    settable = [knob_named(name) for name in order]
    values = [len(one.tried) + 1 for one in findings if not knob_named(one.knob).advice_only]
    counted = math.prod(values) * len(space.grid())
    best, chosen = limits, dict[str, Change]()
    for _ in range(SWEEPS if settable else 0):
        chosen = turning.swept(settable, best, chosen)
        moved = turning.best_limits(space, best, chosen)
        if moved == best:
            break
        best = moved
    return _advice(turning, limits, findings, best, chosen, counted)


def _advice(
    turning: _Turning,
    before: EngineLimits,
    findings: Sequence[KnobFinding],
    limits: EngineLimits | None = None,
    chosen: Mapping[str, Change] | None = None,
    space: int = 0,
) -> KnobAdvice:
    """Return the advice; what together is not surely better is not turned."""
    limits, changes = limits or before, tuple((chosen or {}).values())
    odds, metric, gain = None, turning.metric(before), None
    if changes:
        odds, metric, gain = turning.odds(limits, changes, before)
    is_turned = odds is not None and is_sure(odds)
    settings = {k: v for change in changes for k, v in change.values.items()}
    return KnobAdvice(
        metric=metric,
        before=before,
        limits=limits if is_turned else before,
        settings=settings if is_turned else {},
        gain_ratio=None if gain is None else gain.value - 1,
        gain_interval=None if gain is None else change_bounds(gain),
        p_better=None if odds is None else odds.p_better,
        findings=tuple(findings),
        space=space,
        predicted=turning.predicted,
    )


class _Turning:
    """Predictions with knobs turned; what was predicted once is kept."""

    def __init__(self, predictor: Predictor, found: Predictions, confidence: float) -> None:
        self._predictor, self._found, self._confidence = predictor, found, confidence
        self._known: dict[tuple[Change, ...], tuple[Predictor, Predictions]] = {}
        self._by_values: dict[str, Change] = {}

    @property
    def predicted(self) -> int:
        """How many settings were predicted, knobs and limits."""
        return sum(len(found.outcomes) for _, found in self._known.values())

    def metric(self, limits: EngineLimits) -> str:
        """Return by what settings are judged at the limits."""
        score = self.score(limits)
        return score.metric if score.tier is Tier.BREAKS_SLO else score.own_metric

    def score(self, limits: EngineLimits, changes: Sequence[Change] = ()) -> Score:
        """Return the score of limits with knobs turned."""
        _, found = self._turned([limits], changes)
        return found.workload.score(found.outcomes[limits])

    def _turned(
        self, settings: Sequence[EngineLimits], changes: Sequence[Change]
    ) -> tuple[Predictor, Predictions]:
        # The same values are the same engine, whoever made the change.
        key = tuple(self._by_values.setdefault(repr(c.values), c) for c in changes)
        if key not in self._known:
            predictor, workload = self._predictor, self._found.workload
            for change in changes:
                predictor = change.engine(predictor)
                pieces = tuple(map(change.traffic, workload.pieces))
                workload = replace(workload, pieces=pieces)
            self._known[key] = predictor, Predictions(workload) if changes else self._found
        predictor, found = self._known[key]
        found = predict_more(predictor, found, settings)
        self._known[key] = predictor, found
        return predictor, found

    def _draws(self, limits: EngineLimits, changes: Sequence[Change]) -> Draws:
        return Drawing(*self._turned([limits], changes)).draws([limits], FEW_DRAWS)

    def odds(
        self, limits: EngineLimits, changes: Sequence[Change], before: EngineLimits
    ) -> tuple[Odds, str, Estimate | None]:
        """Return how sure knobs at their limits are better than other limits without.

        And by what they are judged, and by how much of it.
        """
        ours, theirs = self._draws(limits, changes), self._draws(before, ())
        return compare_engines(ours, theirs, self._predictor.seed, self._confidence)

    def place(self, limits: EngineLimits) -> Place:
        """Return where knobs are turned that are still as they were."""
        return Place(self._predictor, limits, self._found.workload.pieces)

    def finding(self, knob: Knob, limits: EngineLimits) -> KnobFinding:
        """Return what a knob does alone."""
        place, before = self.place(limits), self.score(limits)
        changes = knob.changes(place)
        if isinstance(changes, str) or not changes:
            says = f"does not apply: {changes or 'there is no other value'}"
            return KnobFinding(knob=knob.name, says=says)
        scores = {change: self.score(limits, [change]) for change in changes}
        best = min(changes, key=lambda change: _place(scores[change], before))
        is_gain, metric = _gains(scores[best], before), self.metric(limits)
        odds, gain = None, None
        if is_gain:
            odds, metric, gain = self.odds(limits, [best], limits)
        gains_surely = odds is not None and is_sure(odds)
        ratio = _ratio(scores[best], before)
        found = KnobFinding(
            knob=knob.name,
            value=best.text,
            settings=dict(best.values),
            gain_ratio=gain.value - 1 if gain else None if ratio is None else ratio - 1,
            gain_interval=None if gain is None else change_bounds(gain),
            p_better=None if odds is None else odds.p_better,
            is_recommended=gains_surely and not knob.advice_only,
            says="",
            tried={c.text: _ratio(s, before) for c, s in scores.items()},
        )
        says = _says(found, metric, knob, is_gain=is_gain, gains_surely=gains_surely)
        if knob.name == "kv-memory":
            says = self._kv_text(place, changes, scores, before)
        return replace(found, says=says)

    def _kv_text(
        self,
        place: Place,
        changes: Sequence[Change],
        scores: Mapping[Change, Score],
        before: Score,
    ) -> str:
        """Say how small the KV cache may be, and what more of it brings."""
        enough = [c for c in changes if scores[c].tier <= before.tier]
        enough = [c for c in enough if (_ratio(scores[c], before) or math.inf) < 1 + MIN_GAIN]
        small = [c for c in enough if _blocks(c) < place.blocks]
        least = min(small, key=_blocks, default=None)
        block_bytes = place.predictor.profile.shape.block_bytes
        refused = least_blocks(place.predictor.profile)
        down = "with a third less it grows worse"
        if least is not None:
            would = _memory(_blocks(least), block_bytes)
            down = f"{would} would do, less than {MIN_GAIN:.0%} worse"
        elif not any(_blocks(c) < place.blocks for c in changes):
            down = f"vLLM starts with no less than {_memory(refused, block_bytes)}"
        more = int(GB / block_bytes) if block_bytes else place.blocks // 10
        larger = kv_times(place, 1 + more / place.blocks).engine(place.predictor)
        now, then = (
            capacity_per_s(predictor, self._found.workload, place.limits)
            for predictor in (place.predictor, larger)
        )
        unit = f"one more GB ({more:,} blocks)" if block_bytes else f"{more:,} more blocks"
        brings = f"what {unit} would bring is not known, as nothing tells a rate of requests"
        if now is not None:
            brings = (
                f"{unit} would bring {(then or 0.0) - now:+.3g} requests/s to the "
                f"{short(now)}/s that hold within the bounds"
            )
        return (
            f"of {_memory(place.blocks, block_bytes)}, {down}; {brings}; "
            "not set: what of the memory is free is yours to say"
        )

    def swept(
        self, knobs: Sequence[Knob], limits: EngineLimits, chosen: Mapping[str, Change]
    ) -> dict[str, Change]:
        """Return the knobs turned, each to what is best with the others as they are by then."""
        turned = dict(chosen)
        for knob in knobs:
            others = {name: change for name, change in turned.items() if name != knob.name}
            changes = knob.changes(self.place(limits))
            without = self.score(limits, [*others.values()])
            tried = [] if isinstance(changes, str) else changes
            scores = {c: self.score(limits, [*others.values(), c]) for c in tried}
            best = min(tried, key=lambda change: _place(scores[change], without), default=None)
            turned = others
            if best is not None and _gains(scores[best], without):
                turned[knob.name] = best
        return turned

    def best_limits(
        self, space: SearchSpace, limits: EngineLimits, chosen: Mapping[str, Change]
    ) -> EngineLimits:
        """Return the limits that go with the knobs: others only where they gain enough."""
        changes = [*chosen.values()]
        if not changes or self._found.workload.scoring.objective is Objective.CAPACITY:
            return limits
        predictor, found = self._turned([limits], changes)
        whole = predict(predictor, space, found.workload)
        key = tuple(self._by_values[repr(c.values)] for c in changes)
        self._known[key] = (
            predictor,
            replace(found, outcomes={**found.outcomes, **whole.outcomes}),
        )
        best = leader(whole.observations)
        is_better = best is not None and _gains(best.score, self.score(limits, changes))
        return best.limits if best is not None and is_better else limits


def _says(
    found: KnobFinding, metric: str, knob: Knob, *, is_gain: bool, gains_surely: bool
) -> str:
    """Say what a knob does alone, and why it is left or turned."""
    gain = found.gain_ratio
    if not is_gain:
        return f"left as it is: {found.value}, the best other value, {_no_gain(metric, gain)}"
    text = gain_text(metric, gain, found.gain_interval, found.p_better)
    if not gains_surely:
        return f"left as it is: {found.value} is not surely better: {text}"
    if knob.advice_only:
        return f"{found.value} would bring {text}; told, not set"
    return f"{found.value}: {text}"


def _no_gain(metric: str, gain: float | None) -> str:
    """Say what a value does that is not worth turning a knob; what costs less is a gain.

    >>> _no_gain("e2e_p99", 1.308)
    'moves e2e_p99 by +130.8%: no gain'
    >>> _no_gain("requests_per_s", -0.01)
    'moves requests_per_s by +1.0%: under 2%'
    >>> _no_gain(WORST_SLACK, 2.8)
    'moves the share of its tightest bound that is used by +280.0%: no gain'
    >>> _no_gain("e2e_p99", -0.3)
    'moves e2e_p99 by -30.0% and keeps fewer of the bounds'
    """
    if gain is None:
        return "fails"
    by = f"moves {named(metric)} by {moved(metric, gain):+.1%}"
    if gain <= -MIN_GAIN:
        return f"{by} and keeps fewer of the bounds"
    return f"{by}: no gain" if gain >= 0 else f"{by}: under {MIN_GAIN:.0%}"


def _ratio(ours: Score, theirs: Score) -> float | None:
    """Return what one costs over the other, None where one fails.

    By what is optimised; where both break an SLO, by how far.
    """
    is_broken = ours.tier is theirs.tier is Tier.BREAKS_SLO
    return ours.over(theirs, Tier.BREAKS_SLO if is_broken else Tier.GOOD)


def _place(ours: Score, theirs: Score) -> tuple[Tier, float]:
    """Return what a value is placed by among others: its tier, then what it costs."""
    return ours.tier, _ratio(ours, theirs) or math.inf


def _gains(ours: Score, theirs: Score) -> bool:
    """Whether one is so much better than the other that a knob is worth it."""
    if ours.tier is not theirs.tier:
        return ours.tier < theirs.tier
    ratio = _ratio(ours, theirs)
    return ratio is not None and ratio <= 1 - MIN_GAIN


def _blocks(change: Change) -> int:
    return int(str(change.values["num-gpu-blocks-override"]))


def _memory(blocks: int, block_bytes: int) -> str:
    held = f" ({blocks * block_bytes / GB:.3g} GB)" if block_bytes else ""
    return f"{blocks:,} blocks{held}"


def confirm_knobs(runner: TrialRunner, plan: RacePlan, advice: KnobAdvice) -> KnobAdvice:
    """Start the limits with the knobs turned and without, in turns, and compare the two.

    What each start shows is kept in the run directory. Knobs that show no gain there are left
    as they are, and so are those that there was no time to try.

    Raises: EngineError when no engine starts any more.
    """
    if not advice.settings:
        return advice
    context = runner.context
    cost_s = cold_cost_s(runner, plan, [advice.before])
    ratios: list[float] = []
    keeps_more: list[bool] = []
    by = Tier.BREAKS_SLO if advice.metric == WORST_SLACK else Tier.GOOD
    with context.stopwatch.stage("knobs"):
        for number in range(STARTS):
            if context.left_s < 2 * cost_s:
                break
            sides: list[Mapping[str, object]] = [advice.settings, {}]
            shown = {}
            for settings in sides if number % 2 == 0 else sides[::-1]:
                shown[bool(settings)] = _started(runner, plan, advice, settings)
            if isinstance(failed := shown[True], Failure):
                return replace(advice, standing=Standing.REFUTED, cause=failed.cause)
            ours, theirs = (plan.workload.score(shown[turned]) for turned in (True, False))
            if ours.tier > theirs.tier:
                return replace(
                    advice,
                    standing=Standing.REFUTED,
                    cause=f"started cold it {str(ours.tier)[2:]}",
                )
            ratios.append(ours.over(theirs, by) or math.nan)
            keeps_more.append(ours.tier < theirs.tier)
    known = tuple(ratio for ratio in ratios if math.isfinite(ratio))
    if not keeps_more:
        cause = "there was no time to start an engine with them"
        return replace(advice, standing=Standing.UNTRIED, cause=cause)
    # Who keeps what is broken without them has shown it, whatever that costs.
    mean = math.exp(sum(map(math.log, known)) / len(known)) if known else math.inf
    is_shown = all(keeps_more) or mean <= 1 - TIE_LOSS
    standing = Standing.CONFIRMED if is_shown else Standing.REFUTED
    return replace(advice, standing=standing, cold=known)


def _started(
    runner: TrialRunner, plan: RacePlan, advice: KnobAdvice, settings: Mapping[str, object]
) -> Measurement | Failure:
    """Return what an engine of its own shows on the window that raced, and keep it."""
    context, workload = runner.context, plan.workload
    limits = advice.limits if settings else advice.before
    context.listener.note(
        f"starting {limits} with {settings_text(settings) or 'no knob turned'}"
    )
    with runner.engine.cold(limits, settings) as failure:
        outcome = failure or workload.replay_on(
            runner.engine, limits, CutRule(), runner.progressed
        )
    record: dict[str, object] = {"limits": limits, "settings": dict(settings)}
    if isinstance(outcome, Failure):
        record["cause"] = outcome.cause
    else:
        record["measurement"] = outcome.as_json()
    context.run_dir.append_line(KNOBS_FILE, record)
    return outcome
