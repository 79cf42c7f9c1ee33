"""The answer in a sentence, how far it can be trusted, and where it comes from.

The headline and the sentences below it, every caveat, the provenance of the run and the facts
of its trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.replay.slo import Slo
from tuner.report.parts import Cell, Section, Table, number
from tuner.report.run_files import RunFiles, shadow_error_words
from tuner.report.words import (
    change,
    interval,
    limits_words,
    metric_name,
    percent,
    plain,
    sentence,
)
from tuner.run.evidence import gpu_text
from tuner.run.knobs.records import settings_text
from tuner.run.records import Advice, EngineRecord, ProfileRecord, Provenance, TraceRecord
from tuner.run.result import RunResult
from tuner.search.objective import broken_in, moved, moved_bounds
from tuner.search.race import UNFINISHED
from tuner.search.trials import decisive, predictions


def headline(run: RunFiles) -> str:
    """Return the answer: what to do, and what comes of it."""
    result = run.result
    advice = result.recommendation
    if advice is None:
        return "No configuration meets the SLOs"
    if result.turned is not None:
        knobs = settings_text(result.turned.settings)
        return f"Set {limits_words(result.deployed)}, {knobs}"
    if not advice.is_change:
        return f"Keep what you have: {limits_words(run.current)}"
    return f"Change to {limits_words(advice.limits)}"


def answer(run: RunFiles) -> Section:
    """Return the sentences below the headline."""
    result = run.result
    sentences = [*_state(result), *_gain(run), *_limits(result), *_behind(result)]
    if result.turned is not None:
        sentences.insert(0, result.turned.together)
    return Section("answer", "The answer", tuple(sentence(text) for text in sentences))


def _state(result: RunResult) -> list[str]:
    """Return the sentences that weaken everything below them."""
    sentences = []
    if result.state != "complete":
        advice = result.recommendation
        is_decided = advice is not None and advice.why != UNFINISHED
        left = (
            "it had decided by then, and not all may be told beside that"
            if is_decided
            else "the best so far is told"
        )
        sentences.append(f"this run is not complete ({result.state}): {left}")
    if result.method == "shadow":
        sentences.append(
            "every number on this page is predicted, none was measured in this run"
        )
    return sentences


def _gain(run: RunFiles) -> list[str]:
    result, advice = run.result, run.result.recommendation
    if advice is None:
        return _broken(result)
    gain = gain_words(advice)
    how_sure = [advice.odds.text] if advice.odds and advice.odds.text else []
    if advice.is_change:
        against = f"against the current {limits_words(run.current)}"
        found = "best so far" if advice.why == UNFINISHED else "better"
        first = f"{gain} {against}" if gain else f"{found} {against}: {advice.why}"
        return [first, *filter(None, [advice.for_bounds]), *how_sure]
    if run.shown == run.current:
        return [advice.why, *how_sure]
    best = f"the best that was found is {limits_words(run.shown)}"
    return [f"{best}, but {advice.why}{f': {gain}' if gain else ''}", *how_sure]


def gain_words(advice: Advice) -> str:
    """Return the gain in the metric that decided as text, empty where there is none."""
    ratio, metric = advice.gain_ratio, advice.gain_metric
    if ratio is None or ratio <= -1:
        return ""
    bounds, here = advice.gain_interval, advice.gain_here_interval
    ratio = moved(metric, ratio)
    bounds, here = (moved_bounds(metric, one) if one else one for one in (bounds, here))
    over = f" over {advice.odds.basis}" if advice.odds is not None else ""
    # Without other traffic both are of the recorded one.
    is_once = here == bounds or (advice.odds is not None and not advice.odds.has_other_traffic)
    parts = ["predicted"] if advice.rounds == 0 else []
    parts += [f"90% interval {interval(bounds)}{over}"] if bounds else []
    parts += [f"{interval(here)} on the recorded traffic"] if here and not is_once else []
    within = f" ({'; '.join(parts)})" if parts else ""
    return f"{metric_name(metric)} {change(ratio)}{within}"


def _broken(result: RunResult) -> list[str]:
    """Return by how much the nearest configuration breaks the SLOs."""
    whole = [t for t in decisive(result.trials) if t.observation.is_whole and t.measurement]
    if not whole:
        return ["no configuration survived its replay"]
    known = result.nearest
    found = [t for t in predictions(result.trials) if t.measurement] + whole
    own = [t for t in found if known is not None and t.limits == known.limits]
    # Where none has an end, who loses least.
    lost = {t.number: (t.measurement or {}).get("lost_ratio", 0.0) for t in whole}
    nearest = own[-1] if own else min(whole, key=lambda t: (t.score.order, lost[t.number]))
    says = [known.text] if known is not None and own else []
    says += broken_in(map(Slo.parse, result.slos), nearest.measurement or {})
    return [f"nearest is {limits_words(nearest.limits)}: {'; '.join(says) or nearest.tier[2:]}"]


def _limits(result: RunResult) -> list[str]:
    sentences = [result.load] if result.load else []
    sentences += [f"of the KV cache: {result.kv}"] if result.feasible else []
    if result.limited_by:
        sentences.append(f"limited by: {result.limited_by}")
    if result.capacity is not None:
        sentences.append(f"capacity at the SLOs: {result.capacity.text}")
    return sentences


def _predicted(made: TraceRecord) -> str:
    """Say of how many requests it was predicted, where they are more."""
    if not made.is_predicted_of_more:
        return ""
    return f"; predicted of {made.predicted}, {made.predicted_requests:,} requests"


def _behind(result: RunResult) -> list[str]:
    """Return what the answer rests on and what qualifies it."""
    made, how = result.provenance.trace, "replayed" if result.has_replays else "predicted"
    wanted = f"SLOs: {', '.join(result.slos)}" if result.slos else "no SLO was given"
    sentences = [
        f"objective {result.objective}, {wanted}; {made.replayed_requests:,} requests were "
        f"{how}, {made.window}{_predicted(made)}"
    ]
    if result.caveats:
        texts = "; ".join(caveat.text for caveat in result.caveats)
        sentences.append(f"doubts: {texts}")
    return sentences


def caveats(run: RunFiles) -> Section:
    """Return every caveat of the run."""
    texts = tuple(f"{caveat.text} ({caveat.id})" for caveat in run.result.caveats)
    if run.result.restlessness is not None:
        texts += (run.result.restlessness.text,)
    said = () if texts else ("None: nothing that was checked gave reason to doubt the answer.",)
    return Section("caveats", "Caveats", said, texts)


def provenance(run: RunFiles) -> Section:
    """Return where, when and with what the run was made."""
    made = run.result.provenance
    facts = {
        "run": run.name,
        "state": run.result.state,
        "made at": made.made_at,
        "method": run.result.method,
        "model": made.model,
        **_engine(made.engine),
        "GPU while it was measured": gpu_text(run.result.trials),
        "trace": made.trace.source,
        "trace SHA-256": made.trace.sha256,
        "options": _options(made),
        "tuner": f"{made.tuner_version}, Python {made.python}",
        "engine starts": str(made.engine_starts),
        "time": _time(made),
        **_profile(made.profile, shadow_error_words(run.result)),
    }
    rows = tuple((Cell(name), Cell(text)) for name, text in facts.items() if text)
    table = Table("provenance-table", "Where this comes from", ("what", "which"), rows)
    return Section("provenance", "Provenance", tables=(table,))


def _engine(engine: EngineRecord | None) -> dict[str, str]:
    if engine is None:
        return {"engine": "none was started"}
    blocks = f"{engine.num_blocks} blocks of {engine.block_size} tokens"
    started = f"{engine.started_at_limits} (max_num_seqs/max_num_batched_tokens)"
    return {
        "vLLM": engine.vllm_version,
        "device": engine.device,
        "dtype": engine.dtype,
        "longest model length": f"{engine.max_model_len} tokens",
        "KV cache": f"{blocks}, started at {started}",
        "sampling": engine.sampling,
    }


def _options(made: Provenance) -> str:
    """Return the options that the run was given, without those that hold several values."""
    files = made.options.get("trace") or ()
    given = {**made.options, "trace": " ".join(files)}.items()
    shown = [f"{name} {value}" for name, value in given if isinstance(value, (str, int, float))]
    return ", ".join(shown)


def _time(made: Provenance) -> str:
    stages = ", ".join(f"{name} {plain(took_s)} s" for name, took_s in made.stages_s.items())
    return f"{plain(made.wall_s)} s{f' ({stages})' if stages else ''}"


def _profile(profile: ProfileRecord | None, wrong: str) -> dict[str, str]:
    if profile is None:
        return {}
    made = f"made {profile.made_at} on {profile.device}, {wrong}"
    return {"profile": made, "calibrated on": ", ".join(profile.calibrated_on)}


TITLE = "The trace"
_LENGTHS = ("mean", "min", "p50", "p90", "p99", "max")


def trace_facts(run: RunFiles) -> Section:
    """Return what the trace asks of a server, and what may mislead in it."""
    made = run.result.provenance.trace
    how = "Replayed" if run.result.has_replays else "Predicted"
    sentences = (
        f"{made.source}, format {made.format}, {made.requests:,} requests. {how}: "
        f"{made.window}, {made.replayed_requests:,} requests{_predicted(made)}.",
    )
    description = run.result.trace_description
    tables = (_facts(description), _lengths(description))
    warnings = [
        w.get("text", "") for w in description.get("warnings", ()) if isinstance(w, dict)
    ]
    dropped = [f"dropped: {n} ({why})" for why, n in (description.get("dropped") or {}).items()]
    return Section("trace", TITLE, sentences, (*warnings, *dropped), tables=tables)


def _facts(description: Mapping[str, Any]) -> Table:
    rows = (
        ("requests", _number(description, "rows")),
        ("duration", _number(description, "duration_s", " s")),
        ("mean rate", _number(description, "rate_per_s", "/s")),
        ("requests in the busiest second", _number(description, "peak_1s")),
        ("requests in the busiest minute", _number(description, "peak_60s")),
        ("CV of the gaps between arrivals (Poisson: 1)", _number(description, "iat_cv")),
        ("prompt tokens that an unbounded prefix cache would hold", _reuse(description)),
        *_in_flight(description.get("in_flight") or {}),
    )
    cells = tuple((Cell(name), Cell(value, mark="number")) for name, value in rows)
    return Table("trace-facts", "What the trace asks for", ("fact", "value"), cells)


def _number(description: Mapping[str, Any], name: str, unit: str = "") -> str:
    value = description.get(name)
    if not isinstance(value, int | float):
        return "unknown"
    return f"{value:,}{unit}" if isinstance(value, int) else f"{plain(value)}{unit}"


def _reuse(description: Mapping[str, Any]) -> str:
    ratio = description.get("prefix_reuse_ratio")
    return percent(ratio) if isinstance(ratio, int | float) else "unknown, no hash ids"


def _in_flight(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not description:
        return []
    pace_ms = 1000 * float(description.get("seconds_per_output_token") or 0)
    is_recorded = bool(description.get("recorded_ratio"))
    basis = "recorded latencies" if is_recorded else f"at {pace_ms:g} ms per output token"
    return [
        (f"requests in flight, {name} ({basis})", _number(description, name))
        for name in ("mean", "p50", "p99", "peak")
    ]


def _lengths(description: Mapping[str, Any]) -> Table:
    rows = []
    for name in ("prompt_tokens", "output_tokens"):
        spread = description.get(name) or {}
        cells = [number(spread.get(key), "{:,.0f}".format) for key in _LENGTHS]
        rows.append((Cell(name.replace("_", " ")), *cells))
    return Table("trace-lengths", "Lengths in tokens", ("tokens", *_LENGTHS), tuple(rows))
