"""Published files that hold lengths but not when requests came: known, and refused by name.

Without arrivals there is nothing to replay, and to invent them would tune for traffic that
nobody had. So the error names what the file lacks, in place of an unknown format.

Source: microsoft/vidur, data/processed_traces/arxiv_*.csv; alibaba/ServeGen, data/offline and
the chunk-N-dataset.json beside each of its rates.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from tuner.errors import TraceError
from tuner.traffic.formats.columns import BYTE_ORDER_MARK, ReadOptions, TraceFormat
from tuner.traffic.formats.csv_table import header_names
from tuner.traffic.formats.vidur import OUTPUT, PROMPT, TIME

_HEAD_BYTES = 1 << 16
_OFFLINE_KEYS = (b'"request_id"', b'"type"', b'"input_length"')
_CLOCK_KEYS = (b'"timestamp"', b'"arrived_at_s"', b'"chat_id"')
_HISTOGRAM_KEYS = (b'"input_tokens": "{', b'"text_tokens": "{')


def matches(head: bytes) -> bool:
    """Return whether the file starts like one of those that lack their arrivals."""
    return bool(_lack(head))


def read(path: Path, _options: ReadOptions) -> NoReturn:
    """Refuse the file.

    Raises: TraceError that names what is missing.
    """
    with path.open("rb") as file:
        lack = _lack(file.read(_HEAD_BYTES))
    if lack:
        raise TraceError(
            f"{path} {lack}",
            "lengths alone cannot be replayed: give a recording that says when requests came",
        )
    raise TraceError(
        f"{path} is none of the files of lengths that we know",
        "leave --trace-format out: formats are known by their first bytes",
    )


def _lack(head: bytes) -> str:
    """Return what the file lacks, or nothing if it is none of them."""
    names = header_names(head)
    if (PROMPT in names or OUTPUT in names) and TIME not in names:
        return f"has no arrival times (column {TIME})"
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if not text.startswith(b"{"):
        return ""
    # These objects are flat, and printed over one line or several.
    first = text.split(b"}", 1)[0]
    if any(key in first for key in _HISTOGRAM_KEYS):
        return "has no arrival rates: these stand in the -trace.csv beside it"
    is_offline = all(key in first for key in _OFFLINE_KEYS)
    if not is_offline or any(key in first for key in _CLOCK_KEYS):
        return ""
    return "has no timestamp" + ("" if b'"output_length"' in first else " and no output_length")


LENGTHS_ONLY = TraceFormat(name="lengths-only", matches=matches, read=read)
