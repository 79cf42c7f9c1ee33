"""OTLP's JSON as plain values: the spans of one export, and what their attributes stand for.

64-bit integers come as text or as numbers, ids in hexadecimal or in base64, and enumerations by
number or by name, as the writer of a file chose; here they become one.

Source: opentelemetry-proto, trace.proto and common.proto; OTLP specification, JSON Protobuf
encoding; base64 ids and names of enumerations are what protobuf's own JSON mapping writes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from tuner.formats.columns import shown

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
    found = span.attributes or ()
    return {one.key: _plain(one.value) for one in found if one.key in wanted}


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
    """Say what is wrong with an instant in nanoseconds since 1970, or None.

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
    """Say whether a status code is ERROR, by number or by name.

    >>> is_error("STATUS_CODE_ERROR"), is_error(2), is_error("STATUS_CODE_OK"), is_error(None)
    (True, True, False, False)
    """
    return code.lower() in _ERRORS if isinstance(code, str) else code == 2
