"""The trace's own description, as the run kept it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.report.parts import Cell, Section, Table, number
from tuner.report.run_files import RunFiles
from tuner.report.words import NOTHING, percent, plain

TITLE = "The trace"
_LENGTHS = ("mean", "min", "p50", "p90", "p99", "max")


def trace_facts(run: RunFiles) -> Section:
    """Return what the trace asks of a server, and what may mislead in it."""
    made = run.result.provenance.trace
    said = (
        f"{made.source}, format {made.format}, {made.requests:,} requests. Replayed: "
        f"{made.window}, {made.replayed_requests:,} requests.",
    )
    found = run.result.trace_description
    if found is None:
        more = "This run kept no more of the trace's description."
        return Section("trace", TITLE, (*said, more))
    tables = (_facts(found), _lengths(found))
    warnings = [w.get("text", "") for w in found.get("warnings", ()) if isinstance(w, dict)]
    dropped = [f"dropped: {n} ({why})" for why, n in (found.get("dropped") or {}).items()]
    return Section("trace", TITLE, said, (*warnings, *dropped), tables=tables)


def _facts(found: Mapping[str, Any]) -> Table:
    rows = (
        ("requests", _number(found, "rows")),
        ("duration", _number(found, "duration_s", " s")),
        ("mean rate", _number(found, "rate_per_s", "/s")),
        ("requests in the busiest second", _number(found, "peak_1s")),
        ("requests in the busiest minute", _number(found, "peak_60s")),
        ("CV of the gaps between arrivals (Poisson: 1)", _number(found, "iat_cv")),
        ("prompt tokens that an unbounded prefix cache would hold", _reuse(found)),
        *_in_flight(found.get("in_flight") or {}),
    )
    cells = tuple((Cell(name), Cell(value, mark="number")) for name, value in rows)
    return Table("trace-facts", "What the trace asks for", ("fact", "value"), cells)


def _number(found: Mapping[str, Any], name: str, unit: str = "") -> str:
    value = found.get(name)
    if not isinstance(value, int | float):
        return "unknown"
    return f"{value:,}{unit}" if isinstance(value, int) else f"{plain(value)}{unit}"


def _reuse(found: Mapping[str, Any]) -> str:
    ratio = found.get("prefix_reuse_ratio")
    return percent(ratio) if isinstance(ratio, int | float) else "unknown, no hash ids"


def _in_flight(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not found:
        return []
    pace_ms = 1000 * float(found.get("seconds_per_output_token") or 0)
    is_recorded = bool(found.get("recorded_ratio"))
    basis = "recorded latencies" if is_recorded else f"at {pace_ms:g} ms per output token"
    names = {"mean": "mean", "p50": "p50", "p99": "p99", "peak": "peak"}
    return [
        (f"requests in flight, {name} ({basis})", _number(found, key))
        for key, name in names.items()
    ]


def _lengths(found: Mapping[str, Any]) -> Table:
    rows = []
    for name in ("prompt_tokens", "output_tokens"):
        spread = found.get(name) or {}
        cells = [number(spread.get(key), _tokens(spread.get(key))) for key in _LENGTHS]
        rows.append((Cell(name.replace("_", " ")), *cells))
    return Table("trace-lengths", "Lengths in tokens", ("tokens", *_LENGTHS), tuple(rows))


def _tokens(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else NOTHING
