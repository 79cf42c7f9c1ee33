"""An engine's steps beside its requests: what each computed, and how long it took.

vLLM hands every iteration to its stat loggers. What was in it stands there where the engine
runs with `--enable-logging-iteration-details`; how long it took is what lies between two tokens
of a decoding request, by the engine core's own clock. Lines hold some hundred steps each, in
columns of whole numbers, compressed: a few bytes a step.
"""

from __future__ import annotations

import base64
import logging
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from tuner.recorder.faults import silently
from tuner.recorder.messages import Stepped

if TYPE_CHECKING:
    from pathlib import Path

STEPS_VERSION: Final = 3
SUFFIX: Final = ".steps"

COLUMNS: Final = (
    "ended_us",
    "generating",
    "context_requests",
    "context_tokens",
    "interval_us",
    "elapsed_us",
    "preempted",
    "generation_tokens",
)
"""What is kept of a step, in this order; -1 is unknown.

`ended_us` is when the API server heard of it, since the step before (of a line's first: since
1970); `generating` how many requests decode in it, `context_requests` and `context_tokens` how
many are prefilled and how much of them; `interval_us` is the time since the decoding requests'
last token, `elapsed_us` what the core waited for the model; `generation_tokens` how many tokens
the decoding requests compute, drafts included.
"""

WIDTH: Final = len(COLUMNS)
MANY: Final = 256
LONG_US: Final = 1_000_000
"""Steps are handed over by so many, or after so long: ours, a thread is not woken for one."""

UNKNOWN: Final = -1


class Iteration(Protocol):
    """What vLLM says of one iteration. Units: seconds since 1970; intervals in seconds.

    Source: vLLM v1/metrics/stats.py, IterationStats.
    """

    iteration_timestamp: float
    inter_token_latencies_iter: list[float]
    time_to_first_tokens_iter: list[float]
    num_preempted_reqs: int


class Details(Protocol):
    """What was in an iteration.

    Source: vLLM v1/metrics/stats.py, SchedulerIterationDetails.
    """

    num_ctx_requests: int
    num_ctx_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_ms: float
    is_dummy: bool


class Drafting(Protocol):
    """What became of the drafts that an iteration verified.

    Source: vLLM v1/spec_decode/metrics.py, SpecDecodingStats.
    """

    num_drafts: int
    num_accepted_tokens_per_pos: list[int]


class StepTap:
    """Takes in an engine's iterations where it serves, and hands them on by hundreds."""

    def __init__(self, offer: Callable[[Stepped], None]) -> None:
        self._offer = offer
        self._numbers = array("q")
        self._drafts: list[int] = []

    def take(
        self,
        iteration: Iteration | None,
        details: Details | None,
        drafting: Drafting | None,
        now_s: float,
    ) -> None:
        """Take in one iteration; one that brought out no token has no stats of its own."""
        if details is not None and details.is_dummy:
            return
        if drafting is not None:
            counts = (drafting.num_drafts, *drafting.num_accepted_tokens_per_pos)
            self._drafts = added(self._drafts, counts)
        ended_us, interval_us, generating, preempted = int(now_s * 1e6), UNKNOWN, 0, 0
        if iteration is not None:
            ended_us = int(iteration.iteration_timestamp * 1e6)
            latencies = iteration.inter_token_latencies_iter
            generating, preempted = len(latencies), iteration.num_preempted_reqs
            if latencies:
                # Who was preempted waited for longer.
                interval_us = int(min(latencies) * 1e6)
        prefilled = prefill_tokens = elapsed_us = generation_tokens = UNKNOWN
        if details is not None:
            generating = details.num_generation_requests
            prefilled, prefill_tokens = details.num_ctx_requests, details.num_ctx_tokens
            elapsed_us = int(details.elapsed_ms * 1e3)
            generation_tokens = details.num_generation_tokens
        elif iteration is None:
            return
        elif not iteration.time_to_first_tokens_iter:
            # A prompt in several pieces is not seen before its last.
            prefilled = prefill_tokens = 0
        numbers = self._numbers
        computed, took_us = (generating, prefilled, prefill_tokens), (interval_us, elapsed_us)
        numbers.extend((ended_us, *computed, *took_us, preempted, generation_tokens))
        if len(numbers) >= MANY * WIDTH or ended_us - numbers[0] >= LONG_US:
            self.flush()

    def flush(self) -> None:
        """Hand on what was taken in."""
        if self._numbers:
            numbers, self._numbers = self._numbers, array("q")
            drafts, self._drafts = self._drafts, []
            self._offer(Stepped(numbers, drafts))


def added(before: Sequence[int], more: Sequence[int]) -> list[int]:
    """Return counts of drafts with more of them, place by place.

    >>> added([], [5, 3]), added([5, 3], [2, 2])
    ([5, 3], [7, 5])
    """
    return [a + b for a, b in zip_longest(before, more, fillvalue=0)]


class StepLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some hundred steps; `columns` are little-endian, one column after the other.

    `drafts` counts those that were verified in them, of these those whose first token was
    accepted, whose first two were, and so on; empty where nothing is drafted.
    """

    steps: int
    columns: str
    drafts: list[int] = []


def steps_line(numbers: array[int], drafts: Sequence[int] = ()) -> bytes:
    """Return one line of a file of steps."""
    ended = numbers[::WIDTH]
    columns = array("q", [ended[0]])
    columns.extend(b - a for a, b in pairwise(ended))
    for at in range(1, WIDTH):
        columns.extend(numbers[at::WIDTH])
    # Every machine that vLLM serves on is little-endian.
    packed = base64.b64encode(zlib.compress(columns.tobytes(), 6)).decode()
    return msgspec.json.encode(StepLine(len(ended), packed, list(drafts))) + b"\n"


def steps_header(recorded_by: str, server: Mapping[str, Any]) -> bytes:
    """Return the first line of a file of steps: whose they are."""
    header = {"version": STEPS_VERSION, "recorded_by": recorded_by, **server}
    return msgspec.json.encode({"steps_header": header}) + b"\n"


def steps_path(requests: Path) -> Path:
    """Return where the steps of a recording go.

    >>> from pathlib import Path
    >>> steps_path(Path("prod.jsonl"))
    PosixPath('prod.steps')
    """
    return requests.with_suffix(SUFFIX)


class _NoIterations(logging.Filter):
    """Leaves out the line that vLLM logs of every iteration once it has details."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is logged."""
        return not str(record.msg).startswith("%sIteration(%d): ")


def quiet_iterations() -> None:
    """Keep vLLM from logging a line for each iteration, which details bring with them."""
    with silently:
        logging.getLogger("vllm.v1.metrics.loggers").addFilter(_NoIterations())
