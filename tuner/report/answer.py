"""The answer in a sentence, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.replay.slo import parse_slo
from tuner.report.parts import Section
from tuner.report.run_files import Bounds, Recommendation, Result, RunFiles
from tuner.report.words import change, interval, is_rate, limits_words, metric_name, sentence
from tuner.search.objective import Goal, Objective
from tuner.search.trials import decisive, observation_of

CONFIDENCE = "95% interval, corrected for looking after every round"


def headline(run: RunFiles) -> str:
    """Return the answer: what to do, and what comes of it."""
    result = run.result
    advice = result.recommendation
    if advice is None:
        return "No configuration meets the SLOs"
    if advice.verdict != "change":
        return f"Keep what you have: {limits_words(run.present)}"
    return f"Change to {limits_words(advice.limits)}"


def answer(run: RunFiles) -> Section:
    """Return the sentences below the headline."""
    result = run.result
    said = [*_state(result), *_gain(run), *_limits(result), *_behind(result)]
    return Section("answer", "The answer", tuple(sentence(text) for text in said))


def _state(result: Result) -> list[str]:
    """Say first what weakens everything that follows."""
    said = []
    if result.state != "complete":
        said.append(
            f"this run is not complete ({result.state}): best so far, nothing confirmed"
        )
    if result.method == "shadow":
        said.append("every number on this page is predicted, none was measured in this run")
    return said


def _gain(run: RunFiles) -> list[str]:
    result, advice = run.result, run.result.recommendation
    if advice is None:
        return _broken(result)
    if advice.verdict == "change":
        against = f"against the present {limits_words(run.present)}"
        told = gain_words(result, advice)
        return [f"{told} {against}" if told else f"better {against}: {advice.why}"]
    if run.shown == run.present:
        return [advice.why]
    best = f"the best that was found is {limits_words(run.shown)}"
    told = gain_words(result, advice)
    return [f"{best}, but {advice.why}{f': {told}' if told else ''}"]


def gain_words(result: Result, advice: Recommendation) -> str:
    """Say the gain in the objective's own metric, empty where there is none to say."""
    ratio, metric = advice.gain_ratio, scored_by(result, advice)
    if ratio is None or ratio <= -1:
        return ""
    bounds = advice.gain_interval
    if is_rate(metric):
        ratio, bounds = _inverse(ratio), _inverted(bounds)
    measured = "predicted, ± the shadow's own error" if advice.rounds == 0 else CONFIDENCE
    within = f" ({interval(bounds)}; {measured})" if bounds else ""
    return f"{metric_name(metric)} {change(ratio)}{within}"


def _inverse(ratio: float) -> float:
    """Turn the change of a score, of which less is better, into that of its rate."""
    return 1 / (1 + ratio) - 1


def _inverted(bounds: Bounds | None) -> Bounds | None:
    """Return the bounds of the rate; without an end where the score's interval touches zero."""
    if bounds is None:
        return None
    low, high = bounds
    return (
        -1.0 if high is None or high <= -1 else _inverse(high),
        None if low is None or low <= -1 else _inverse(low),
    )


def scored_by(result: Result, advice: Recommendation) -> str:
    """Return the metric that placed the one whose gain is told."""
    if advice.gain_metric:
        return advice.gain_metric
    shown = advice.limits if advice.verdict == "change" else advice.best_measured.limits
    metrics = [r["metric"] for r in decisive(result.trials) if _limits_of(r) == shown]
    return str(metrics[-1]) if metrics else ""


def _limits_of(record: Mapping[str, Any]) -> EngineLimits:
    return observation_of(record).limits


def _broken(result: Result) -> list[str]:
    """Say by how much the nearest configuration breaks the SLOs."""
    goal = Goal(Objective.BALANCED, tuple(parse_slo(slo) for slo in result.slos), result.tail)
    seen = [(observation_of(r), r) for r in decisive(result.trials)]
    whole = [(o, r) for o, r in seen if o.is_whole and r["measurement"]]
    if not whole:
        return ["no configuration survived its replay"]
    nearest, record = min(whole, key=lambda pair: pair[0].score.order)
    broken = "; ".join(goal.broken_in(record["measurement"]))
    return [f"nearest is {limits_words(nearest.limits)}: {broken or record['tier'][2:]}"]


def _limits(result: Result) -> list[str]:
    said = []
    if result.limited_by:
        said.append(f"limited by: {result.limited_by}")
    if result.capacity is not None:
        said.append(f"capacity at the SLOs: {result.capacity.get('text', 'not told')}")
    return said


def _behind(result: Result) -> list[str]:
    """Say what the answer rests on and what qualifies it."""
    made = result.provenance.trace
    wanted = f"SLOs: {', '.join(result.slos)}" if result.slos else "no SLO was given"
    said = [
        f"objective {result.objective}, {wanted}; {made.replayed_requests:,} requests were "
        f"replayed, {made.window}"
    ]
    if result.caveats:
        texts = "; ".join(caveat.text for caveat in result.caveats)
        said.append(f"doubts: {texts}")
    return said
