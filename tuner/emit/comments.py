"""The comment lines above the values of an emitted file: what was decided, how and on what."""

from __future__ import annotations

from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from tuner.run.records import Advice, TraceRecord
from tuner.run.result import RunResult
from tuner.search.trials import ranked

DECIDED_BY: Final = "decided by "
"""How the comment begins that tells the gain where no row does."""
EXPECTED: Final = "expected of "
"""How the one begins that tells it over other traffic too, where the row is of the recorded."""
SET_BESIDE: Final = "set beside the limits: "
"""How the comment begins that names the keys of knobs, by which the next reader finds them."""


def comments(result: RunResult, advice: Advice, run_dir: str) -> list[str]:
    """Return the comment lines that stand above the emitted values: the evidence for advice."""
    made, current = result.provenance, result.current
    trace, engine = made.trace, made.engine
    lines = [
        f"tuned {made.made_at[:10]} on {_on(trace)}",
        f"vLLM {engine and engine.vllm_version}, {engine and engine.device}, "
        f"{_how(result, advice)}",
        f"objective {result.objective}, {_slos(result)}",
    ]
    lines += [result.cut_off] if result.cut_off else []
    before = with_keys(current)
    decisive_first = sorted(result.evidence, key=lambda row: row.metric != advice.gain_metric)
    rows = [f"  {row.text}" for row in decisive_first]
    if result.turned is not None:
        keys = ", ".join(result.turned.settings)
        lines += [result.turned.together, f"{SET_BESIDE}{keys}", "the limits alone:"]
    if advice.is_change:
        lines += [f"why: {advice.for_bounds}"] if advice.for_bounds else []
        lines += [f"against the current {before}{result.at_which_load}:", *rows]
    else:
        lines.append(f"KEEP WHAT YOU HAVE: {before}; {advice.why}")
        if advice.best_measured != current and rows:
            best = advice.best_measured
            beside = f"against the current values{result.at_which_load}"
            lines += [f"best that was found, {best}, {beside}:", *rows]
    lines.append(_decided(result, advice))
    if advice.odds is not None:
        lines.append(advice.odds.text)
    return [*filter(None, lines), *beside_gain(result), f"evidence: {run_dir}"]


def with_keys(limits: EngineLimits) -> str:
    """Return both limits with the keys that vLLM reads them from.

    >>> with_keys(EngineLimits(8, 2048))
    'max-num-seqs 8, max-num-batched-tokens 2048'
    """
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    return f"{MAX_NUM_SEQS} {seqs}, {MAX_NUM_BATCHED_TOKENS} {tokens}"


def _decided(result: RunResult, advice: Advice) -> str:
    """Return the gain by all that is known, empty where a row above tells it."""
    gain = advice.gain_text
    if result.decisive_row is None:
        return f"{DECIDED_BY}{gain}" if gain else ""
    is_of_more = advice.odds is not None and advice.odds.has_other_traffic
    return f"{EXPECTED}{gain}" if gain and is_of_more else ""


def _slos(result: RunResult) -> str:
    return f"SLOs: {', '.join(result.slos)}" if result.slos else "no SLO was given"


def _on(trace: TraceRecord) -> str:
    """Say on which requests a run tuned: those that were predicted, where they are more."""
    of = f"requests of {trace.source} (sha256 {trace.sha256[:8]}…)"
    if not trace.is_predicted_of_more:
        return f"{trace.replayed_requests:,} {of}, {trace.window}"
    return (
        f"{trace.predicted_requests:,} {of}, {trace.predicted}; "
        f"{trace.replayed_requests:,} of them replayed, {trace.window}"
    )


def beside_gain(result: RunResult) -> list[str]:
    """Return what is told of a run beside the gain, from how busy the engine was to caveats."""
    lines = [result.load] if result.load else []
    lines += [result.kv, f"limited by: {result.limited_by}"]
    lines += [point.text for point in result.starting_points]
    lines += [] if result.knobs is None else result.knobs.below
    lines += [] if result.variants is None else result.variants.lines
    if result.capacity is not None:
        lines.append(f"capacity at the SLOs: {result.capacity.text}")
    return [*lines, *(f"caveat: {caveat.text}" for caveat in result.caveats)]


def _how(result: RunResult, advice: Advice) -> str:
    """Say how the answer was found: measured or predicted, and on what it rests."""
    if result.method == "shadow":
        profile = result.provenance.profile
        made_at = "" if profile is None else profile.made_at[:10]
        return f"PREDICTED by the shadow of a profile of {made_at}, not measured"
    made = [t for t in ranked(result.trials) if not t.is_live]
    first = f"{len(made)} settings replayed in the shadow, " if made else ""
    cold = f", {result.how_confirmed}" if result.how_confirmed else ""
    if advice.is_predicted:
        return f"{first}PREDICTED, not raced{cold}"
    measured = "measured live, " if result.is_raced else ""
    return f"{first}{measured}{result.how_raced}{cold}"
