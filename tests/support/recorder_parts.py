"""What tests of the recorder share: what an engine reports, and how a recording is read."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.recorder.messages import Asked, Finished
from tuner.recorder.recorder import Recorder
from tuner.recorder.settings import RecordSettings

NOW_S = 1_763_726_400.0
BLOCK = 4


@dataclass
class Reported:
    """What vLLM's engine reports of a request, with the names it uses."""

    request_id: str | None
    num_prompt_tokens: int = 10
    num_generation_tokens: int = 3
    e2e_latency: float = 2.0
    num_cached_tokens: int = 0
    queued_time: float = 0.25
    prefill_time: float = 0.5
    decode_time: float = 1.0
    finish_reason: object = "length"


def asked(name: str, tokens: list[int] | None, number: int = 0, answers: int = 1) -> Asked:
    """Return what the middleware tells of a prompt."""
    copied = None if tokens is None else array("I", tokens)
    return Asked(name, number, copied, BLOCK, answers=answers)


def finished(*requests: Reported) -> Finished:
    """Return what the plugin tells of an iteration that ended at NOW_S."""
    return Finished(NOW_S, requests)


def recorded(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the rows of one file."""
    head, *lines = path.read_text().splitlines()
    return json.loads(head)["trace_header"], [json.loads(line) for line in lines]


def rows_of(path: Path, count: int, patience_s: float = 20.0) -> list[dict[str, Any]]:
    """Return the rows of a recording as soon as there are so many."""
    deadline_s = time.monotonic() + patience_s
    while True:
        rows = recorded(path)[1] if path.exists() and path.stat().st_size else []
        if len(rows) >= count:
            return rows
        assert time.monotonic() < deadline_s, f"{len(rows)} of {count} rows: {rows}"
        time.sleep(0.05)


@contextmanager
def recording(path: Path, max_bytes: int | None = None) -> Iterator[Recorder]:
    """Record into a file until the block ends."""
    recorder = Recorder(RecordSettings(path, max_bytes))
    recorder.source.has_engine_counts = True
    try:
        yield recorder
    finally:
        recorder.close()


class _Kept(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def log_kept(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect what the recorder says; vLLM's loggers do not reach pytest's own."""
    logger, kept = logging.getLogger("vllm.tuner.recorder"), _Kept(level)
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(level)
    try:
        yield kept.messages
    finally:
        logger.removeHandler(kept)
        logger.setLevel(before)


def warnings_kept() -> AbstractContextManager[list[str]]:
    """Collect what the recorder warns of."""
    return log_kept(logging.WARNING)
