"""Spans of any exporter as requests: their typed values, which of them are requests, how long.

vLLM's own spans are named llm_request; those of clients and gateways are known by the
attributes of the semantic conventions for generative AI. Everything else in a file is counted.
Values of OTLP come as numbers or as text and are checked once, here.

Source: vLLM vllm/tracing/utils.py, SpanAttributes, and output_processor.py, do_tracing;
    OpenTelemetry semantic conventions for generative AI, spans; OTLP specification, JSON.
"""

from __future__ import annotations

import base64
import hashlib
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tuner.errors import TraceError
from tuner.stats import Bools
from tuner.traffic.formats.columns import (
    Columns,
    Labels,
    ReadOptions,
    Skipped,
    recorded,
    shown,
    tokens_fault,
)
from tuner.traffic.formats.json_document import number_or_nan, seconds_fault
from tuner.traffic.formats.jsonl_rows import ZERO_HINT, Fault
from tuner.traffic.traces import ClockOrigin, ZeroOutput

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""Source: a trace id is 16 bytes, and one of zeros is no id."""

_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_HEX_KEY = re.compile(r"[0-9a-fA-F]{32}", re.ASCII)
_BASE64_KEY = re.compile(r"[0-9a-zA-Z+/]{22}==", re.ASCII)
_ERRORS = frozenset({"2", "error", "status_code_error"})


class _Value(msgspec.Struct, gc=False, rename="camel"):
    """One attribute's value; arrays and mappings are not looked at."""

    string_value: Any = None
    int_value: Any = None
    double_value: Any = None
    bool_value: Any = None


class _Attribute(msgspec.Struct, gc=False):
    key: str = ""
    value: _Value | None = None


class _Status(msgspec.Struct, gc=False):
    code: Any = None


class OtlpSpan(msgspec.Struct, gc=False, rename="camel"):
    """One span as it stands; leaves are of any type, so that a wrong one can be named."""

    name: Any = None
    trace_id: Any = None
    start_time_unix_nano: Any = None
    end_time_unix_nano: Any = None
    attributes: list[_Attribute] | None = None
    status: _Status | None = None


class _ScopeSpans(msgspec.Struct, gc=False):
    spans: list[OtlpSpan] | None = None


class _ResourceSpans(msgspec.Struct, gc=False, rename="camel"):
    scope_spans: list[_ScopeSpans] | None = None


class Export(msgspec.Struct, gc=False, rename="camel"):
    """One ExportTraceServiceRequest, or an export of metrics or logs, which has no spans."""

    resource_spans: list[_ResourceSpans] | None = None

    def spans(self) -> Iterator[OtlpSpan]:
        """Yield all spans in file order."""
        for resource in self.resource_spans or ():
            for scope in resource.scope_spans or ():
                yield from scope.spans or ()


def attributes_of(span: OtlpSpan, wanted: frozenset[str]) -> dict[str, object]:
    """Return the wanted attributes of a span as plain values."""
    values = span.attributes or ()
    return {one.key: _plain(one.value) for one in values if one.key in wanted}


def _plain(value: _Value | None) -> object:
    if value is None:
        return None
    if value.int_value is not None:
        return whole(value.int_value)
    if value.double_value is not None:
        return whole(value.double_value)
    return value.string_value if value.string_value is not None else value.bool_value


def whole(value: object) -> object:
    """Return the integer that a text or a number stands for, and anything else as it is.

    >>> whole("374"), whole(374.0), whole(0.5), whole("many")
    (374, 374, 0.5, 'many')
    """
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        return int(value)
    return value


def instant_fault(name: str, value: object) -> str | None:
    """Return what is wrong with an instant in nanoseconds since 1970, or None.

    >>> instant_fault("startTimeUnixNano", 1789000100000000000) is None
    True
    """
    if value is None:
        return f"lacks {name}"
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        return f"{name} must be nanoseconds since 1970, got {shown(value)}"
    return None


def trace_key(text: object) -> bytes:
    """Return a trace id as 16 bytes, however it is spelt; ids that are no OTLP ids are hashed.

    >>> trace_key("a9fac9546cce05ee0c45ec64c4a0fd79") == trace_key("qfrJVGzOBe4MRexkxKD9eQ==")
    True
    """
    if not isinstance(text, str) or not text:
        return NO_KEY
    if _HEX_KEY.fullmatch(text):
        return bytes.fromhex(text)
    if _BASE64_KEY.fullmatch(text):
        return base64.b64decode(text)
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def is_error(code: object) -> bool:
    """Return whether a status code is ERROR, by number or by name.

    >>> is_error("STATUS_CODE_ERROR"), is_error(2), is_error("STATUS_CODE_OK"), is_error(None)
    (True, True, False, False)
    """
    return code.lower() in _ERRORS if isinstance(code, str) else code == 2


REQUEST_SPAN = "llm_request"
PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
E2E = ("gen_ai.latency.e2e",)
TTFT = ("gen_ai.latency.time_to_first_token", "gen_ai.response.time_to_first_chunk")
MODEL = ("gen_ai.response.model", "gen_ai.request.model")
REQUEST_ID = ("gen_ai.request.id", "gen_ai.response.id")
OPERATION = "gen_ai.operation.name"
ERROR_TYPE = "error.type"
WANTED = frozenset((*PROMPT, *OUTPUT, *E2E, *TTFT, *MODEL, *REQUEST_ID, OPERATION, ERROR_TYPE))

_GENERATION = frozenset({"chat", "generate_content", "text_completion"})
# They sum up or surround requests that have spans of their own, or generate nothing.
_NO_GENERATION = frozenset(
    {
        "create_agent",
        "embeddings",
        "execute_tool",
        "invoke_agent",
        "invoke_workflow",
        "retrieval",
    }
)
_COUNTS_HINT = (
    "export gen_ai.usage.input_tokens and gen_ai.usage.output_tokens with each request, as "
    "vLLM does with --otlp-traces-endpoint"
)


class Span(NamedTuple):
    """What is looked at of a span of any exporter; the trace id however it is spelt."""

    name: object
    trace_id: object
    attributes: Mapping[str, object]
    is_error: bool


class SpanTable:
    """The requests among the spans of one file so far; a few dozen bytes for each."""

    def __init__(self, options: ReadOptions) -> None:
        self._zero_is_fault = options.zero_output is ZeroOutput.REFUSE
        self._arrived, self._prompt, self._output = array("q"), array("q"), array("q")
        self._e2e_s, self._ttft_s = array("d"), array("d")
        self._failed, self._is_engines = bytearray(), bytearray()
        self._keys = bytearray()
        self._ids: list[str] = []
        self._models: list[str] = []
        self._names: dict[str, str] = {}
        self._others = self._uncounted = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def takes(self, span: Span) -> bool:
        """Return whether a span is a request to keep; any other is counted by its kind."""
        operation = span.attributes.get(OPERATION)
        known = operation if isinstance(operation, str) else ""
        if span.name == REQUEST_SPAN:
            return True
        if known not in _NO_GENERATION:
            if any(key in span.attributes for key in (*PROMPT, *OUTPUT)):
                return True
            if known in _GENERATION:
                self._uncounted += not span.is_error
                return span.is_error
        self._others += 1
        return False

    def add(self, span: Span, start_ns: int, end_ns: int) -> Fault | None:
        """Add a request; a wrong one is left out, and what is wrong with it returned.

        A request that failed need not have token counts. A span without a length says nothing
        of how long the answer took.

        Units: nanoseconds since 1970.
        """
        attributes = span.attributes
        prompt, output = _first(attributes, PROMPT), _first(attributes, OUTPUT)
        has_error = attributes.get(ERROR_TYPE) is not None
        failed = span.is_error or (output is None and has_error)
        e2e_s, ttft_s = _first(attributes, E2E), _first(attributes, TTFT)
        if e2e_s is None and end_ns != start_ns:
            e2e_s = (end_ns - start_ns) / 1e9
        fault = _times_fault(e2e_s, ttft_s)
        if fault is None and not failed:
            fault = self._tokens_fault(attributes, PROMPT)
            fault = fault or self._tokens_fault(attributes, OUTPUT)
        if fault is not None:
            return fault
        self._arrived.append(start_ns)
        self._prompt.append(_count(prompt))
        self._output.append(_count(output))
        self._e2e_s.append(number_or_nan(e2e_s))
        self._ttft_s.append(number_or_nan(ttft_s))
        self._failed.append(failed)
        self._is_engines.append(span.name == REQUEST_SPAN)
        self._keys += trace_key(span.trace_id)
        self._ids.append(_text(attributes, REQUEST_ID))
        model = _text(attributes, MODEL)
        self._models.append(self._names.setdefault(model, model))
        return None

    def _tokens_fault(
        self, attributes: Mapping[str, object], names: tuple[str, ...]
    ) -> Fault | None:
        name = next((name for name in names if attributes.get(name) is not None), None)
        if name is None:
            return f"lacks {' or '.join(names)}", _COUNTS_HINT
        value = attributes[name]
        fault = tokens_fault(name, value, zero_is_fault=self._zero_is_fault)
        return (fault, ZERO_HINT if value == 0 else "") if fault is not None else None

    def columns(self, path: Path, skipped: Skipped) -> Columns:
        """Return all requests in file order, each once.

        Raises: TraceError if there is none, or none with token counts.
        """
        failed = np.frombuffer(self._failed, dtype=np.bool_)
        if not len(self) + len(skipped) or (self._uncounted and failed.all()):
            raise TraceError(f"{path} {self._why_empty()}", _COUNTS_HINT)
        skipped.check(len(self) + len(skipped))
        e2e_s, ttft_s = np.array(self._e2e_s), np.array(self._ttft_s)
        models = Labels.of(self._models)
        columns = Columns(
            arrived=np.array(self._arrived, dtype=np.int64),
            ticks_per_s=1e9,
            prompt_tokens=np.array(self._prompt, dtype=np.int64),
            output_tokens=np.array(self._output, dtype=np.int64),
            e2e_s=recorded(e2e_s),
            request_ids=tuple(self._ids) if any(self._ids) else None,
            ttft_s=recorded(ttft_s),
            models=models if models.names else None,
            failed=failed.copy(),
            origin=ClockOrigin.WALL,
            skipped=skipped.by_reason,
        )
        return self._each_once(columns)

    def _why_empty(self) -> str:
        lacks = f"{PROMPT[0]} or {PROMPT[1]}"
        if self._uncounted:
            return (
                f"has no token counts: none of its {self._uncounted:,} generations has {lacks}"
            )
        named = f"is named {REQUEST_SPAN} or has {lacks}"
        return f"holds no request: none of its {self._others:,} spans {named}"

    def _each_once(self, columns: Columns) -> Columns:
        """Return the columns without gateway spans of requests that vLLM traced too."""
        is_engines = np.frombuffer(self._is_engines, dtype=np.bool_)
        keys = np.frombuffer(self._keys, dtype=f"S{KEY_BYTES}")
        is_double: Bools = np.zeros(len(self), dtype=np.bool_)
        if is_engines.any() and not is_engines.all():
            is_double = (
                ~is_engines & (keys != NO_KEY.rstrip(b"\0")) & np.isin(keys, keys[is_engines])
            )
        remarks = self._remarks(int(is_double.sum()))
        if is_double.any():
            columns = columns.take(np.flatnonzero(~is_double))
        return replace(columns, remarks=remarks)

    def _remarks(self, doubles: int) -> tuple[str, ...]:
        notes = (
            (self._others, "spans that are no requests: {:,}"),
            (
                self._uncounted,
                "generations left out, as they have no token counts (gen_ai.usage.*): {:,}",
            ),
            (
                doubles,
                "gateway spans left out: {:,}, of requests that vLLM's own "
                f"{REQUEST_SPAN} spans tell",
            ),
        )
        return tuple(text.format(count) for count, text in notes if count)


def _first(attributes: Mapping[str, object], names: tuple[str, ...]) -> object:
    """Return the first of several spellings that has a value."""
    for name in names:
        if (value := attributes.get(name)) is not None:
            return value
    return None


def _times_fault(e2e_s: object, ttft_s: object) -> Fault | None:
    for name, value in ((f"{E2E[0]} (or end less start)", e2e_s), (TTFT[0], ttft_s)):
        if value is not None and (fault := seconds_fault(name, value)):
            return fault, ""
    return None


def _count(value: object) -> int:
    """Return a count; what a failed request has instead is 0."""
    is_fine = tokens_fault("", value, zero_is_fault=False) is None
    return value if is_fine and isinstance(value, int) else 0


def _text(attributes: Mapping[str, object], names: tuple[str, ...]) -> str:
    value = _first(attributes, names)
    return value if isinstance(value, str) else ""
