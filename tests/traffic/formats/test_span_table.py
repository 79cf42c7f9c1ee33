"""Spans of vLLM, of gateways and of flat exports: each request is read once, and exactly."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.span_parts import (
    CHAT,
    COUNTS,
    SEMCONV,
    T0,
    TRACE_ID,
    export,
    flat,
    message,
    read,
    read_flat,
    span,
    written,
)
from tuner.traffic.formats.columns import ReadOptions
from tuner.traffic.formats.flat_spans import FLAT_SPANS
from tuner.traffic.formats.otlp import OTLP
from tuner.traffic.traces import ClockOrigin, ZeroOutput


def test_spans_of_vllm_have_the_numbers_they_should(shared_traces: Path) -> None:
    path, expected = manifest(shared_traces, "synthetic/otlp/vllm_llm_request.otlp.jsonl")
    assert OTLP.matches(path.read_bytes()[: 1 << 16])
    trace = read(path)
    assert len(trace) == expected["llm_request_spans"]
    assert int(trace.prompt_tokens.sum()) == expected["sum_prompt"]
    assert int(trace.output_tokens.sum()) == expected["sum_completion"]
    assert trace.origin is ClockOrigin.WALL
    assert trace.zero_s == expected["first_arrival_unix"]
    assert trace.notes.moved > 0  # written in the order of finishing
    assert trace.notes.texts == (f"spans that are no requests: {expected['other_spans']}",)
    assert trace.e2e_s is not None
    assert trace.ttft_s is not None
    assert (trace.e2e_s[0], trace.ttft_s[0]) == (0.934711, 0.074711)
    assert trace.request_ids is not None
    assert trace.request_ids[0] == "chatcmpl-3e0e09c84da7fc381b2d858a8f3c5a20"


def test_spans_of_a_gateway_have_the_numbers_they_should(shared_traces: Path) -> None:
    path, expected = manifest(shared_traces, "synthetic/otlp/gateway_semconv.otlp.json")
    assert OTLP.matches(path.read_bytes()[: 1 << 16])
    trace = read(path)
    assert trace.notes.rows == expected["spans"]
    assert len(trace) == expected["ok"]
    failed = expected["failed_no_output_tokens"]
    assert dict(trace.notes.dropped) == {"failed request": failed}
    assert int(trace.prompt_tokens.sum()) == expected["sum_input_ok"]
    assert int(trace.output_tokens.sum()) == expected["sum_output_ok"]
    assert trace.e2e_s is not None
    assert trace.e2e_s[0] == pytest.approx(0.934711296, abs=1e-9)


def test_flat_spans_are_read_where_they_have_counts(shared_traces: Path) -> None:
    folder = shared_traces / "otel_flat_spans"
    trace = read(folder / "prefix_sharing_example.json", known=FLAT_SPANS)
    assert len(trace) == 7
    assert (int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())) == (1065, 280)
    assert trace.due_s.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    for name, spans in (("simple_chain", 3), ("parallel_requests", 5)):
        path = folder / f"{name}.json"
        assert FLAT_SPANS.matches(path.read_bytes())
        assert not OTLP.matches(path.read_bytes())
        said = message(path, known=FLAT_SPANS)
        assert f"none of its {spans} generations has gen_ai.usage.prompt_tokens or" in said


def manifest(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    return folder / name, next(entry for entry in files if entry["file"] == name)["expected"]


# --- OTLP -------------------------------------------------------------------------------


def test_one_document_and_one_export_per_line_are_the_same(tmp_path: Path) -> None:
    spans = [span(startTimeUnixNano=str(T0 - i)) for i in range(3)]
    documents = [
        json.dumps(export(*spans)),
        json.dumps(export(*spans), indent=1),
        "\ufeff" + json.dumps(export(*spans), indent=1).replace("\n", "\r\n"),
        "\r\n\r\n".join(json.dumps(export(one)) for one in spans) + "\r\n",
        "\n".join([json.dumps({"resourceLogs": [{}]}), json.dumps(export(*spans))]),
    ]
    for text in documents:
        trace = read(written(tmp_path, text))
        assert trace.due_s.tolist() == [0.0, 1e-9, 2e-9]  # to the nanosecond
        assert trace.notes.moved == 2


def test_numbers_ids_and_enumerations_may_be_spelt_either_way(tmp_path: Path) -> None:
    plain = span(startTimeUnixNano=T0, endTimeUnixNano=T0 + 250_000_000)
    plain["attributes"] = [
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": 12}},
        {"key": "gen_ai.usage.output_tokens", "value": {"doubleValue": 3.0}},
        {"key": "gen_ai.response.finish_reasons", "value": {"arrayValue": {"values": []}}},
        {"key": "other"},
    ]
    errors = [
        span(CHAT, name="chat m", traceId="", status={"code": code})
        for code in (2, "2", "STATUS_CODE_ERROR")
    ]
    errors.append(span({**SEMCONV, "error.type": "timeout"}, name="chat m", traceId=""))
    errors[-1]["attributes"].pop(1)
    trace = read(
        written(tmp_path, export(plain, span(status={"code": "STATUS_CODE_OK"}), *errors))
    )
    assert trace.prompt_tokens.tolist() == [12, 30]
    assert trace.e2e_s is not None
    assert trace.e2e_s.tolist() == [0.25, 0.5]
    assert dict(trace.notes.dropped) == {"failed request": 4}


def test_a_request_that_gateway_and_engine_both_traced_counts_once(tmp_path: Path) -> None:
    gateway = span({**SEMCONV, **CHAT}, name="chat m")
    other = span({**SEMCONV, **CHAT}, name="chat m", traceId="0" * 31 + "1")
    nameless = span(SEMCONV, name="chat m", traceId="")
    in_base64 = base64.b64encode(bytes.fromhex(TRACE_ID)).decode()
    engine = span({**COUNTS, "gen_ai.latency.e2e": 0.4}, traceId=in_base64)
    trace = read(written(tmp_path, export(gateway), export(other, nameless, engine)))
    assert len(trace) == 3
    assert trace.e2e_s is not None
    assert sorted(trace.e2e_s.tolist()) == [0.4, 0.5, 0.5]
    assert trace.notes.texts == (
        "gateway spans left out: 1, of requests that vLLM's own llm_request spans tell",
    )
    assert len(read(written(tmp_path, export(gateway, other)))) == 2


def test_what_is_no_request_is_counted(tmp_path: Path) -> None:
    others = [
        span({"code.lineno": 3}, name="EngineCore.__init__", startTimeUnixNano=None),
        span({**SEMCONV, "gen_ai.operation.name": "invoke_agent"}, name="invoke_agent a"),
        span(CHAT, name="chat m"),
    ]
    trace = read(written(tmp_path, export(*others, span())))
    assert len(trace) == 1
    assert trace.notes.texts == (
        "spans that are no requests: 2",
        "generations left out, as they have no token counts (gen_ai.usage.*): 1",
    )
    said = message(written(tmp_path, export(others[0])))
    assert said.startswith(
        "spans.json holds no request: none of its 1 spans is named llm_request"
    )
    assert "has no token counts: none of its 1 gen" in message(
        written(tmp_path, export(others[2]))
    )


def test_models_and_missing_latencies(tmp_path: Path) -> None:
    named = {**COUNTS, "gen_ai.request.model": "a", "gen_ai.response.model": "b"}
    ends = span(endTimeUnixNano="0"), span(endTimeUnixNano=None), span(named)
    trace = read(written(tmp_path, export(*ends)))
    assert trace.e2e_s is not None
    assert np.isnan(trace.e2e_s).tolist() == [True, True, False]
    assert trace.ttft_s is None
    assert len(read(written(tmp_path, export(*ends)), ReadOptions(only_model="b"))) == 1


def test_empty_answers_follow_their_policy(tmp_path: Path) -> None:
    empty = span({**COUNTS, "gen_ai.usage.completion_tokens": 0})
    path = written(tmp_path, export(span(), empty))
    assert dict(read(path).notes.dropped) == {"output of 0 tokens": 1}
    refuse = ReadOptions(zero_output=ZeroOutput.REFUSE)
    assert "line 1 span 2: gen_ai.usage.completion_tokens must be at least 1" in message(
        path, refuse
    )


# --- flat spans -------------------------------------------------------------------------


def test_flat_clocks_may_be_spelt_in_five_ways(tmp_path: Path) -> None:
    clocks = [
        "2026-02-25T10:00:00.0000001",
        "2026-02-25 10:00:01",
        "2026-02-25T10:00:02Z",
        "2026-02-25T12:00:03.5+02:00",
        "2026-02-25T10:00:04.250000000-00:00",
    ]
    spans = [flat(start_time=clock, end_time=None) for clock in clocks]
    trace = read_flat(tmp_path, *spans)
    assert trace.due_s.tolist() == [0.0, 0.9999999, 1.9999999, 3.4999999, 4.2499999]
    assert trace.e2e_s is None


def test_flat_spans_without_counts_are_left_out_and_counted(tmp_path: Path) -> None:
    tool = flat({"gen_ai.operation.name": "execute_tool"})
    trace = read_flat(tmp_path, flat(), flat({}), tool, flat({}, status="ERROR"), flat())
    assert len(trace) == 2
    assert trace.e2e_s is not None
    assert trace.e2e_s.tolist() == [2.5, 2.5]
    assert dict(trace.notes.dropped) == {"failed request": 1}
    assert trace.notes.texts == (
        "spans that are no requests: 1",
        "generations left out, as they have no token counts (gen_ai.usage.*): 1",
    )
    nothing = written(tmp_path, {"spans": [flat({}), flat({}, status="ERROR")]})
    assert "has no token counts" in message(nothing, known=FLAT_SPANS)
