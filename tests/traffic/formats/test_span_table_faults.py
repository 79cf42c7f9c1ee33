"""Spans with faults, and any bytes at all, give a trace or an error of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.any_bytes import gives_a_trace_or_an_error_of_ours, spoilt
from support.span_parts import (
    ANY,
    CHAT,
    COUNTS,
    SEMCONV,
    T0,
    export,
    flat,
    message,
    read,
    span,
    written,
)
from tuner.traffic.formats.columns import ReadOptions, TraceFormat
from tuner.traffic.formats.flat_spans import FLAT_SPANS
from tuner.traffic.formats.otlp import OTLP


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (span(startTimeUnixNano=None), "lacks startTimeUnixNano"),
        (
            span(startTimeUnixNano="soon"),
            "startTimeUnixNano must be nanoseconds since 1970, got",
        ),
        (
            span(startTimeUnixNano=-1),
            "startTimeUnixNano must be nanoseconds since 1970, got -1",
        ),
        (span(startTimeUnixNano=1 << 63), "startTimeUnixNano must be nanoseconds since 1970"),
        (span(endTimeUnixNano=[1]), "endTimeUnixNano must be nanoseconds since 1970, got [1]"),
        (
            span(endTimeUnixNano=T0 - 1),
            "gen_ai.latency.e2e (or end less start) must be a number",
        ),
        (span({}), "lacks gen_ai.usage.prompt_tokens or gen_ai.usage.input_tokens"),
        (
            span({"gen_ai.usage.prompt_tokens": 1}),
            "lacks gen_ai.usage.completion_tokens or gen_ai.usage.output_tokens",
        ),
        (
            span({**COUNTS, "gen_ai.usage.prompt_tokens": "9"}),
            'gen_ai.usage.prompt_tokens must be a whole number of tokens, got "9"',
        ),
        (
            span({**COUNTS, "gen_ai.usage.completion_tokens": -1}),
            "gen_ai.usage.completion_tokens must be at least 0, got -1",
        ),
        (
            span({**COUNTS, "gen_ai.latency.time_to_first_token": -0.5}),
            "gen_ai.latency.time_to_first_token must be a number of seconds, at least 0, got",
        ),
    ],
)
def test_a_wrong_span_is_named_and_may_be_skipped(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    path = written(tmp_path, export(span()), export(span(), wrong), export(span()))
    said = message(path)
    assert said.startswith(f"spans.json line 2 span 2: {reason}")
    assert len(said) < 250
    trace = read(path, ANY)
    assert len(trace) == 3
    assert sum(trace.notes.dropped.values()) == 1
    assert "1 of 4 rows are invalid" in message(path, ReadOptions(skip_invalid=True))
    document = written(tmp_path, json.dumps(export(span(), wrong), indent=1))
    assert message(document).startswith(f"spans.json span 2: {reason}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"resourceSpans": [', "is not JSON"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": 3}]}]}', "is not as expected: Expected"),
        ("[1]", "must be a JSON object, got [1]"),
        ('{"resourceSpans": [' + '{"x": [' * 50_000, "is nested too deep"),
        (
            '{"resourceSpans": [], "x": "' + "\0" + '"}',
            "is not JSON: Invalid control character",
        ),
    ],
)
def test_a_wrong_line_is_named_and_may_be_skipped(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = written(tmp_path, export(span()), line, export(span()))
    assert message(path).startswith(f"spans.json line 2: {reason}")
    assert len(read(path, ANY)) == 2
    first = written(tmp_path, line, export(span()))
    assert message(first).startswith(f"spans.json line 1: {reason}")


def test_bytes_that_are_not_text_are_refused_even_where_nobody_looks(tmp_path: Path) -> None:
    path = written(tmp_path, export(span()))
    path.write_bytes(path.read_bytes().replace(b'"scope": {}', b'"scope": {"name": "\xff"}'))
    assert message(path).startswith("spans.json line 1: is not UTF-8")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (flat(start_time=None), "lacks start_time"),
        (flat(start_time=5), "start_time must be a date and time as text, got 5"),
        (flat(start_time="2026-13-25T10:00:00"), "start_time must look like"),
        (
            flat(end_time="2026-02-25T09:59:59"),
            "gen_ai.latency.e2e (or end less start) must be",
        ),
        (flat({"gen_ai.usage.input_tokens": 3}), "lacks gen_ai.usage.completion_tokens or"),
        ({**flat(), "attributes": [1]}, "attributes must be a JSON object, got [1]"),
        (7, "must be a JSON object, got 7"),
    ],
)
def test_a_wrong_flat_span_is_named_and_may_be_skipped(
    tmp_path: Path, wrong: object, reason: str
) -> None:
    path = written(tmp_path, {"spans": [flat(), wrong]})
    assert message(path, known=FLAT_SPANS).startswith(f"spans.json span 2: {reason}")
    assert len(read(path, ANY, FLAT_SPANS)) == 1
    assert "spans must be a list" in message(written(tmp_path, {"spans": {}}), known=FLAT_SPANS)


GOOD = [
    "\n".join(json.dumps(export(span(), span({**SEMCONV, **CHAT}, name="chat"))) for _ in "ab"),
    json.dumps(export(span(), span({**SEMCONV, **CHAT}, name="chat", traceId="x")), indent=1),
    json.dumps({"trace_id": "a", "spans": [flat(), flat({}), flat(COUNTS)]}),
]
ODD = ['"2"', '"1789000100000000000"', '{"doubleValue": "NaN"}', '{"intValue": {}}']


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
@given(
    st.one_of(st.binary(max_size=200), spoilt(GOOD, ODD)),
    st.sampled_from([ReadOptions(), ANY]),
    st.sampled_from([OTLP, FLAT_SPANS]),
)
def test_any_bytes_give_a_trace_or_an_error_of_ours(
    tmp_path: Path, data: bytes, options: ReadOptions, known: TraceFormat
) -> None:
    known.matches(data)
    path = written(tmp_path)
    path.write_bytes(data)
    gives_a_trace_or_an_error_of_ours(lambda: read(path, options, known))
