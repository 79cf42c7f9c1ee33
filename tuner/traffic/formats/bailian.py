"""Bailian/Qwen traces: seconds, hash ids in blocks of 16 tokens, and the turns of chats.

They have Mooncake's field names with another unit; `chat_id` is what tells them apart.

Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from tuner.traffic.formats.columns import Columns, ReadOptions, TraceFormat, first_line_of
from tuner.traffic.formats.jsonl import read_json_lines
from tuner.traffic.formats.jsonl_rows import Dialect, Header
from tuner.traffic.formats.native import in_seconds, settle

BLOCK_SIZE = 16
"""Source: the files' names, qwen_trace*_blksz_16.jsonl."""


def matches(head: bytes) -> bool:
    """Return whether the first line has the chat ids that only these traces have."""
    line = first_line_of(head)
    return line.startswith(b"{") and b'"chat_id"' in line and b'"timestamp"' in line


def read(path: Path, options: ReadOptions) -> Columns:
    """Return the columns. Raises: TraceError that names the first wrong line."""
    return read_json_lines(path, options, partial(_with_chats, in_seconds(options)))


def _with_chats(options: ReadOptions, row: dict[str, object], header: Header) -> Dialect:
    found = settle(options, row, header, BLOCK_SIZE)
    return replace(found, clock="timestamp", has_chats=True)


BAILIAN = TraceFormat(name="bailian", matches=matches, read=read)
