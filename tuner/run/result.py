"""The result of a run as data: what `result.json` holds and the emitted file quotes.

Puts decision, evidence, trials, caveats and provenance together. Wording for a terminal is in
`console`, writing YAML in `emit`.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tuner import stats
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import Caveat
from tuner.replay import metrics
from tuner.replay.slo import Slo
from tuner.search.objective import Scoring, Tier
from tuner.search.race import CONFIDENCE_PER_LOOK, MIN_ROUNDS, RaceDecision, RaceVerdict
from tuner.search.trials import (
    decisive,
    leader,
    observation_of,
    paired_records,
    predictions,
    ranked,
    read_metric,
)
from tuner.stats import Estimate
from tuner.traffic.traces import Trace

# A KV cache this full is what limits, a bound this close is what binds: ours.
KV_FULL_RATIO = 0.95
BINDING_RATIO = 0.10
# Effects of a neighbouring cap below this are not worth a sentence: ours.
TELLING_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric of the winner beside the present configuration's.

    `change` is the paired ratio minus one with its interval, None where rounds are missing.
    With `is_helped` the prediction counted as one more round for it, beside `rounds` of them.
    """

    metric: str
    unit: str
    before: float
    after: float
    change: Estimate | None
    rounds: int
    is_helped: bool = False

    @property
    def text(self) -> str:
        """Return the row as the emitted file and the terminal show it."""
        if self.rounds == 0:
            gain = f"{self.after / self.before - 1:+.1%}, predicted"
        elif self.change is None:
            gain = f"{self.after / self.before - 1:+.1%}, too few rounds for an interval"
        else:
            gain = f"{self.change.value:+.1%}"
            if self.change.low is not None and self.change.high is not None:
                gain += f", interval {self.change.low:+.1%} … {self.change.high:+.1%}"
            if self.is_helped:
                gain += f" of {self.rounds} rounds and the prediction"
        return (
            f"{self.metric:<16} {_number(self.before)}{self.unit} -> "
            f"{_number(self.after)}{self.unit}   ({gain})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row for result.json."""
        change = self.change
        return {
            "metric": self.metric,
            "unit": self.unit.strip(),
            "before": self.before,
            "after": self.after,
            "change_ratio": None if change is None else change.value,
            "change_interval": None if change is None else [change.low, change.high],
            "rounds": self.rounds,
            "is_helped": self.is_helped,
        }


def _number(value: float) -> str:
    """Write three significant digits without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def metric_changes(
    records: Sequence[Mapping[str, Any]],
    winner: EngineLimits,
    present: EngineLimits,
    tail: str,
    predicted: Mapping[EngineLimits, Mapping[str, Any]] | None = None,
) -> list[MetricChange]:
    """Return the comparison of two configurations over the rounds that both raced.

    Where both raced too few for an interval, `predicted` of the same requests counts as one
    more. Where nothing raced, what was predicted of them, in no round.
    """
    pairs: list[_Pair] = [*paired_records(records, winner, present)]
    is_raced, extra = bool(pairs), list[_Pair]()
    if not is_raced:
        ours, theirs = _predicted(records, winner), _predicted(records, present)
        pairs = [(ours, theirs)] if ours and theirs else []
    elif len(pairs) < MIN_ROUNDS and predicted and {winner, present} <= set(predicted):
        extra = [(predicted[winner], predicted[present])]
    wanted = [
        (f"e2e_{tail}", " s"),
        ("e2e_p50", " s"),
        (f"ttft_{tail}", " s"),
        ("tpot_p50", " s"),
        ("decode_step_p50", " s"),
        ("requests_per_s", "/s"),
        ("output_tokens_per_s", "/s"),
    ]
    made = []
    for metric, unit in dict(wanted).items():
        row = _row(metric, unit, _values(pairs, metric), _values(extra, metric))
        if row is not None:
            made.append(row if is_raced else replace(row, rounds=0))
    return made


_Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _values(pairs: Sequence[_Pair], metric: str) -> list[tuple[float, float]]:
    """Return a metric of both where both have it."""
    found = ((read_metric(a, metric), read_metric(b, metric)) for a, b in pairs)
    return [(after, before) for after, before in found if after and before]


def _predicted(
    records: Sequence[Mapping[str, Any]], limits: EngineLimits
) -> Mapping[str, Any] | None:
    found = (r for r in predictions(records) if r["measurement"])
    return next((r["measurement"] for r in found if observation_of(r).limits == limits), None)


def _row(
    metric: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    extra: Sequence[tuple[float, float]],
) -> MetricChange | None:
    if not pairs:
        return None
    change, counted = None, [*pairs, *extra]
    if len(counted) >= MIN_ROUNDS:
        ours, theirs = zip(*counted, strict=True)
        ratio = stats.paired_ratio(ours, theirs, CONFIDENCE_PER_LOOK)
        change = Estimate(
            ratio.value - 1,
            None if ratio.low is None else ratio.low - 1,
            None if ratio.high is None else ratio.high - 1,
            ratio.n,
        )
    after, before = (statistics.median(values) for values in zip(*pairs, strict=True))
    is_helped = change is not None and bool(extra)
    return MetricChange(metric, unit, before, after, change, len(pairs), is_helped)


def kv_text(records: Sequence[Mapping[str, Any]], limits: EngineLimits) -> str:
    """Say how full the KV cache became, under both of its names."""
    mine = _of(records, limits)
    if not mine:
        return "KV cache not measured"
    peak = max(m["gpu_cache_usage_perc"]["max"] for m in mine)
    preempted = max(m["preemptions"] for m in mine)
    told = f"{preempted} preemptions" if preempted else "no preemption"
    return f"gpu_cache_usage_perc (kv_cache_usage_perc) peak {peak:.2f}, {told}"


def _of(records: Sequence[Mapping[str, Any]], limits: EngineLimits) -> list[dict[str, Any]]:
    return [
        r["measurement"]
        for r in decisive(records)
        if r["measurement"] is not None and observation_of(r).limits == limits
    ]


def load_text(records: Sequence[Mapping[str, Any]], limits: EngineLimits) -> str:
    """Say what was offered and whether it is more than the configuration can take."""
    mine = _of(records, limits)
    told = [m for m in mine if m.get("utilisation") is not None]
    if not told:
        return ""
    used = statistics.median(m["utilisation"] for m in told)
    rate = statistics.median(m["requests_per_s"] for m in told)
    text = metrics.load_text(told[-1]["offered_per_s"], rate, used)
    lost = max(m.get("lost_ratio", 0.0) for m in mine)
    return f"{text}; {lost:.1%} of the requests timed out" if lost else text


def limited_by(
    records: Sequence[Mapping[str, Any]],
    limits: EngineLimits,
    slos: Sequence[Slo],
    tail: str,
) -> str:
    """Say what keeps the configuration from doing better, from what was measured.

    What was predicted says so.
    """
    mine = _of(records, limits)
    if not mine:
        return "nothing that was measured"
    said = []
    for slo in slos:
        value = read_metric(mine[-1], slo.name)
        if value is not None and value > (1 - BINDING_RATIO) * slo.bound_s:
            said.append(f"SLO {slo}")
    used = [m["utilisation"] for m in mine if m.get("utilisation") is not None]
    if used and statistics.median(used) > 1:
        said.append(f"the load, {statistics.median(used):.2g} x what it can sustain")
    if max(m["gpu_cache_usage_perc"]["max"] for m in mine) > KV_FULL_RATIO:
        said.append("the KV cache, which was full")
    said.extend(_neighbours(records, limits, tail))
    if not said and mine[-1]["running"]["max"] < limits.max_num_seqs:
        peak = int(mine[-1]["running"]["max"])
        said.append(f"the traffic: at most {peak} requests ran at once, the cap never bound")
    return "; ".join(said) or "nothing that was measured"


def _neighbours(
    records: Sequence[Mapping[str, Any]], limits: EngineLimits, tail: str
) -> list[str]:
    """Say what the next lower and the next higher cap would do, and whether it was measured."""
    along = {
        observation_of(r).limits.max_num_seqs: r
        for r in ranked(records)
        if int(r["max_num_batched_tokens"]) == limits.max_num_batched_tokens
    }
    own = along.get(limits.max_num_seqs)
    if own is None or own["measurement"] is None:
        return []
    lower = max((n for n in along if n < limits.max_num_seqs), default=None)
    higher = min((n for n in along if n > limits.max_num_seqs), default=None)
    said = []
    for cap in (lower, higher):
        text = None if cap is None else _effect(along[cap], own, cap, tail)
        if cap is not None and text:
            said.append(f"{text} (predicted)" if along[cap]["engine"] == "shadow" else text)
    return said


def _effect(
    other: Mapping[str, Any], own: Mapping[str, Any], cap: int, tail: str
) -> str | None:
    """Say how a neighbouring cap worsens what matters, or None if it does not tell."""
    if other["measurement"] is None:
        return f"{cap} failed"
    if other["measurement"]["cut_reason"]:
        return f"{cap} was cut short: {other['measurement']['cut_reason']}"
    worse = []
    for metric in (f"e2e_{tail}", f"tpot_{tail}"):
        theirs, mine = (
            read_metric(other["measurement"], metric),
            read_metric(own["measurement"], metric),
        )
        if theirs and mine and theirs / mine - 1 > TELLING_RATIO:
            worse.append(f"{metric} by {theirs / mine - 1:.0%}")
    return f"{cap} raises {' and '.join(worse)}" if worse else None


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunProvenance:
    """Where and on what a run was made; without secrets.

    `compared` holds what was measured live and foretold of the same requests, `predicted` all
    that was foretold of them. `info` is of the engine that was measured on, `cold_blocks` how
    many KV blocks engines had that were started cold at some limits, `ladder` the caps that
    were to be tried.
    """

    trace: Trace
    replayed_requests: int
    window: str
    info: EngineInfo | None
    present_source: str
    model: str
    options: Mapping[str, Any]
    engine_starts: int
    wall_s: float
    method: str = "live"
    walls_s: Mapping[str, float] = field(default_factory=dict)
    cold: Mapping[str, Any] | None = None
    capacity: Mapping[str, Any] | None = None
    profile: Mapping[str, Any] | None = None
    serve_values: Mapping[str, object] = field(default_factory=dict)
    description: Mapping[str, object] | None = None
    compared: Mapping[tuple[EngineLimits, str], tuple[float, float]] = field(
        default_factory=dict
    )
    predicted: Mapping[EngineLimits, Mapping[str, Any]] = field(default_factory=dict)
    cold_blocks: Mapping[EngineLimits, int] = field(default_factory=dict)
    ladder: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished or interrupted run, ready to be shown and written.

    `run_dir` is where it is kept, None for one that was read from elsewhere.
    """

    decision: RaceDecision
    present: EngineLimits
    changes: tuple[MetricChange, ...]
    limited_by: str
    load: str
    kv: str
    caveats: tuple[Caveat, ...]
    state: str
    feasible: bool
    content: dict[str, Any]
    run_dir: Path | None = None

    @property
    def recommendation(self) -> EngineLimits:
        """The limits to run with: the current ones where nothing was better beyond chance."""
        return self.decision.winner

    @property
    def gain(self) -> Estimate | None:
        """By how much the recommendation changes the metric that decided, with its interval.

        None where it is the current configuration, or nothing was there to compare.

        Units: a share of the current value, -0.28 for 28 % less.
        """
        ratio = self.decision.gain
        if ratio is None or self.recommendation == self.present:
            return None
        low, high = (None if bound is None else bound - 1 for bound in (ratio.low, ratio.high))
        return Estimate(ratio.value - 1, low, high, ratio.n)


def make_outcome(
    decision: RaceDecision,
    present: EngineLimits,
    goal: Scoring,
    records: Sequence[Mapping[str, Any]],
    caveats: Sequence[Caveat],
    around: RunProvenance,
    state: str,
) -> RunResult:
    """Return everything there is to say about a run."""
    told = predictions(records) if decision.is_predicted else records
    changes = tuple(metric_changes(told, decision.shown, present, goal.tail, around.predicted))
    limited = limited_by(told, decision.winner, goal.slos, goal.tail)
    best = leader([observation_of(r) for r in decisive(told)])
    feasible = best is not None and best.score.tier is not Tier.BREAKS_SLO
    content = {
        "schema": SCHEMA,
        "state": state,
        "method": around.method,
        "objective": str(goal.objective),
        "tail": goal.tail,
        "slos": [str(slo) for slo in goal.slos],
        "recommendation": _recommendation(decision) if feasible else None,
        "baseline": {**_limits(present), "source": around.present_source},
        "evidence": [row.as_json() for row in changes],
        "limited_by": limited,
        "load": load_text(told, decision.shown),
        **_surroundings(around),
        "caveats": [{"id": str(c), "text": c.text} for c in caveats],
        "trials": list(records),
    }
    kv = kv_text(told, decision.winner)
    load = str(content["load"])
    return RunResult(
        decision, present, changes, limited, load, kv, tuple(caveats), state, feasible, content
    )


def _surroundings(around: RunProvenance) -> dict[str, Any]:
    compared = [
        {**_limits(limits), "metric": metric, "live": live, "shadow": shadow}
        for (limits, metric), (live, shadow) in around.compared.items()
    ]
    return {
        "confirmed_cold": around.cold,
        "capacity": around.capacity,
        "provenance": _provenance(around),
        "serve_values": dict(around.serve_values),
        "trace_description": around.description,
        "live_against_shadow": compared,
        "ladder": list(around.ladder),
    }


def _limits(limits: EngineLimits) -> dict[str, int]:
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def _recommendation(decision: RaceDecision) -> dict[str, Any]:
    gain = decision.gain
    return {
        **_limits(decision.winner),
        "verdict": str(decision.verdict),
        "why": decision.why,
        "best_measured": _limits(decision.best),
        "tied": [_limits(limits) for limits in decision.tied],
        "rounds": decision.rounds,
        "gain_ratio": None if gain is None else gain.value - 1,
        "gain_interval": None
        if gain is None or gain.low is None or gain.high is None
        else [gain.low - 1, gain.high - 1],
        "gain_metric": decision.metric,
        "is_predicted": decision.is_predicted,
    }


def _provenance(around: RunProvenance) -> dict[str, Any]:
    info, trace = around.info, around.trace
    return {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tuner_version": version("max-num-seqs-tuner"),
        "python": platform.python_version(),
        "trace": {
            "source": trace.source,
            "format": trace.format,
            "sha256": trace.sha256,
            "rows": trace.notes.rows,
            "requests": len(trace),
            "replayed_requests": around.replayed_requests,
            "window": around.window,
        },
        "engine": None
        if info is None
        else {
            "kind": info.kind,
            "vllm_version": info.vllm_version,
            "device": info.device,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "started_at_limits": _limits(info.ceiling),
        },
        "cold_engines": [
            {**_limits(limits), "num_blocks": blocks}
            for limits, blocks in around.cold_blocks.items()
        ],
        "model": around.model,
        "options": dict(around.options),
        "engine_starts": around.engine_starts,
        "wall_s": around.wall_s,
        "stages_s": dict(around.walls_s),
        "profile": around.profile,
    }


def comments(outcome: RunResult, file_name: str, run_dir: str) -> list[str]:
    """Return the comment lines that stand above the emitted values."""
    content, decision = outcome.content, outcome.decision
    made, engine = content["provenance"], content["provenance"]["engine"] or {}
    trace = made["trace"]
    date = made["made_at"][:10]
    lines = [
        f"vllm serve --config {file_name}",
        f"tuned {date} on {trace['replayed_requests']:,} requests of {trace['source']} "
        f"(sha256 {trace['sha256'][:8]}…), {trace['window']}",
        f"vLLM {engine.get('vllm_version')}, {engine.get('device')}, {_how(content, decision)}",
    ]
    if outcome.state != "complete":
        lines.append(f"{outcome.state}: best so far, not raced against the present values")
    present = f"max-num-seqs {outcome.present.max_num_seqs}, max-num-batched-tokens "
    present += str(outcome.present.max_num_batched_tokens)
    if decision.verdict is RaceVerdict.KEEP:
        lines.append(f"KEEP WHAT YOU HAVE: {present}; {decision.why}")
        if decision.best != outcome.present and outcome.changes:
            lines.append(f"best that was found, {decision.best}, against the present values:")
            lines.extend(f"  {row.text}" for row in outcome.changes)
    else:
        lines.append(f"against the present {present}:")
        lines.extend(f"  {row.text}" for row in outcome.changes)
    lines.extend(filter(None, [outcome.load, outcome.kv]))
    lines.append(f"limited by: {outcome.limited_by}")
    if content["capacity"] is not None:
        lines.append(f"capacity at the SLOs: {content['capacity']['text']}")
    lines.extend(f"caveat: {caveat.text}" for caveat in outcome.caveats)
    lines.append(f"evidence: {run_dir}")
    return lines


def _how(content: Mapping[str, Any], decision: RaceDecision) -> str:
    """Say how the answer was found: measured or predicted, and on what it rests."""
    if content["method"] == "shadow":
        made = (content["provenance"]["profile"] or {}).get("made_at", "")[:10]
        return f"PREDICTED by the shadow of a profile of {made}, not measured"
    made = [r for r in ranked(content["trials"]) if r["engine"] == "shadow"]
    first = f"{len(made)} settings replayed in the shadow, " if made else ""
    if decision.is_predicted:
        return f"{first}PREDICTED, not raced"
    cold = ", confirmed on engines started cold" if content["confirmed_cold"] else ""
    return f"{first}measured live, {decision.rounds} rounds in turns{cold}"
