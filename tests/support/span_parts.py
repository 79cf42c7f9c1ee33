"""Spans as vLLM, gateways and flat exports write them, and reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.csv_parts import traced
from tuner.errors import TraceError
from tuner.traffic.formats.columns import ReadOptions, TraceFormat
from tuner.traffic.formats.flat_spans import FLAT_SPANS
from tuner.traffic.formats.otlp import OTLP
from tuner.traffic.traces import Trace

ANY = ReadOptions(skip_invalid=True, max_invalid_ratio=1.0)
T0 = 1_789_000_100_000_000_000
TRACE_ID = "a9fac9546cce05ee0c45ec64c4a0fd79"
COUNTS = {"gen_ai.usage.prompt_tokens": 30, "gen_ai.usage.completion_tokens": 7}
SEMCONV = {"gen_ai.usage.input_tokens": 30, "gen_ai.usage.output_tokens": 7}
CHAT = {"gen_ai.operation.name": "chat"}


def typed(value: object) -> dict[str, Any]:
    """Return a value as OTLP's JSON has it, 64-bit integers as text."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def span(attributes: dict[str, Any] | None = None, **more: object) -> dict[str, Any]:
    """Return one of vLLM's spans, half a second long."""
    given = COUNTS if attributes is None else attributes
    return {
        "traceId": TRACE_ID,
        "name": "llm_request",
        "startTimeUnixNano": str(T0),
        "endTimeUnixNano": str(T0 + 500_000_000),
        "attributes": [{"key": key, "value": typed(value)} for key, value in given.items()],
        "status": {},
        **more,
    }


def export(*spans: object) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans}]}]}


def flat(attributes: dict[str, Any] | None = None, **more: object) -> dict[str, Any]:
    return {
        "trace_id": "a",
        "name": "chat gpt-4",
        "start_time": "2026-02-25T10:00:00.000000",
        "end_time": "2026-02-25T10:00:02.500000",
        "attributes": {**CHAT, **(SEMCONV if attributes is None else attributes)},
        "status": {"code": 1, "message": ""},
        **more,
    }


def written(folder: Path, *lines: object) -> Path:
    """Write lines, each an object or the text itself."""
    path = folder / "spans.json"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
    return path


def read(path: Path, options: ReadOptions | None = None, known: TraceFormat = OTLP) -> Trace:
    return traced(path, known, options)


def read_flat(folder: Path, *spans: object, options: ReadOptions | None = None) -> Trace:
    path = written(folder, {"trace_id": "a", "spans": spans})
    return read(path, options, FLAT_SPANS)


def message(path: Path, options: ReadOptions | None = None, known: TraceFormat = OTLP) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        read(path, options, known)
    assert caught.value.hint
    return caught.value.message.replace(str(path), path.name)


# --- published and generated files ------------------------------------------------------
