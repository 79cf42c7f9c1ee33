"""The result of a run as data: what `result.json` holds and the emitted file quotes.

Puts decision, evidence, trials, caveats and provenance together. Wording for a terminal is in
`console`, writing YAML in `emit`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tuner import evidence
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.errors import Caveat
from tuner.evidence import Row
from tuner.search.objective import Goal, Tier
from tuner.search.race import Decision, Verdict
from tuner.search.trials import decisive, leader, observation_of, predictions, ranked
from tuner.traffic.traces import Trace

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Circumstances:
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
class Outcome:
    """A finished or interrupted run, ready to be shown and written."""

    decision: Decision
    present: EngineLimits
    rows: tuple[Row, ...]
    limited_by: str
    load: str
    kv: str
    caveats: tuple[Caveat, ...]
    state: str
    feasible: bool
    content: dict[str, Any]


def make_outcome(
    decision: Decision,
    present: EngineLimits,
    goal: Goal,
    records: Sequence[Mapping[str, Any]],
    caveats: Sequence[Caveat],
    around: Circumstances,
    state: str,
) -> Outcome:
    """Return everything there is to say about a run."""
    told = predictions(records) if decision.is_predicted else records
    rows = tuple(evidence.rows(told, decision.shown, present, goal.tail, around.predicted))
    limited = evidence.limited_by(told, decision.winner, goal.slos, goal.tail)
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
        "evidence": [row.as_json() for row in rows],
        "limited_by": limited,
        "load": evidence.load_text(told, decision.shown),
        **_surroundings(around),
        "caveats": [{"id": str(c), "text": c.text} for c in caveats],
        "trials": list(records),
    }
    kv = evidence.kv_text(told, decision.winner)
    load = str(content["load"])
    return Outcome(
        decision, present, rows, limited, load, kv, tuple(caveats), state, feasible, content
    )


def _surroundings(around: Circumstances) -> dict[str, Any]:
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


def _recommendation(decision: Decision) -> dict[str, Any]:
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


def _provenance(around: Circumstances) -> dict[str, Any]:
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


def comments(outcome: Outcome, file_name: str, run_dir: str) -> list[str]:
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
    if decision.verdict is Verdict.KEEP:
        lines.append(f"KEEP WHAT YOU HAVE: {present}; {decision.why}")
        if decision.best != outcome.present and outcome.rows:
            lines.append(f"best that was found, {decision.best}, against the present values:")
            lines.extend(f"  {row.text}" for row in outcome.rows)
    else:
        lines.append(f"against the present {present}:")
        lines.extend(f"  {row.text}" for row in outcome.rows)
    lines.extend(filter(None, [outcome.load, outcome.kv]))
    lines.append(f"limited by: {outcome.limited_by}")
    if content["capacity"] is not None:
        lines.append(f"capacity at the SLOs: {content['capacity']['text']}")
    lines.extend(f"caveat: {caveat.text}" for caveat in outcome.caveats)
    lines.append(f"evidence: {run_dir}")
    return lines


def _how(content: Mapping[str, Any], decision: Decision) -> str:
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
