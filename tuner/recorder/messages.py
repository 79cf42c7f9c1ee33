"""What the two doors send to the recorder: cheap to make, processed in its own thread."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MESSAGE_BYTES: Final = 500
REQUEST_BYTES: Final = 500
"""What a message takes in memory, and each request in one; measured by a test."""


class FinishedRequest(Protocol):
    """What vLLM's stat loggers receive of a request that ended.

    Units: seconds; num_* in tokens.
    Source: vLLM v1/metrics/stats.py, FinishedRequestStats.
    """

    finish_reason: object
    request_id: str | None
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    queued_time: float
    prefill_time: float
    decode_time: float


@dataclass(frozen=True, slots=True)
class Asked:
    """The engine received a prompt, with `answers` answers to make.

    `token_ids` is None where tokens alone do not tell prompts apart, as with images. They are a
    copy of four bytes each: a list takes ten times that, and the server's own is not ours to
    keep. Requests of different `salt` share no prefix. `number` tells apart what is asked
    under one id.
    """

    request_id: str
    number: int
    token_ids: array[int] | None
    block_size: int
    salt: str = ""
    answers: int = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine finished requests, all at one time; of several `engine_index` says which.

    Units: at_s in seconds since 1970.
    """

    at_s: float
    requests: Sequence[FinishedRequest]
    engine_index: int | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """How far one request was when its client went away.

    Units: arrived_at_s in seconds since 1970; ttft_s is None before the first token.
    """

    arrived_at_s: float
    input_length: int
    output_length: int
    cached_tokens: int
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Left:
    """A client went away, or the server failed, before this request ended.

    `number` is that of its `Asked`; `unfinished` is empty where the engine knew no more of it.
    """

    request_id: str
    number: int
    at_s: float
    unfinished: Sequence[Unfinished] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage that a response carries, of an answer that came to its end."""

    input_length: int
    output_length: int
    cached_tokens: int | None
    status: str


@dataclass(frozen=True, slots=True)
class Replied:
    """A response was sent whose usage is the only count of its tokens.

    `asked` names the `Asked` behind it by id and number, if they could be seen; usage is None
    where the response told none.
    """

    arrived_at_s: float
    e2e_s: float
    ttft_s: float | None
    asked: Sequence[tuple[str, int]]
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Ended:
    """An HTTP request ended, and with it what it asked the engine, by id and number.

    What the engine reported before is closed already; what it refused it never reports.
    """

    asked: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """Steps of one engine, the numbers of `steps.COLUMNS` for each, times since 1970.

    `drafts` counts what became of the drafts in them, as `steps.StepLine` does.
    """

    numbers: array[int]
    drafts: Sequence[int] = ()


Message = Asked | Finished | Left | Replied | Ended | Stepped


def weight_bytes(message: Message) -> int:
    """Return what a message takes in memory until it is worked on, about.

    Clients choose the lengths of ids and salts, so these are weighed as they are.
    """
    match message:
        case Asked():
            tokens = 0 if message.token_ids is None else sys.getsizeof(message.token_ids)
            names = sys.getsizeof(message.request_id) + sys.getsizeof(message.salt)
            return MESSAGE_BYTES + names + tokens
        case Finished():
            return MESSAGE_BYTES + sum(
                REQUEST_BYTES + sys.getsizeof(one.request_id) for one in message.requests
            )
        case Left():
            own = sys.getsizeof(message.request_id)
            return MESSAGE_BYTES + own + REQUEST_BYTES * len(message.unfinished)
        case Stepped():
            return MESSAGE_BYTES + sys.getsizeof(message.numbers)
        case Replied() | Ended():
            return MESSAGE_BYTES + sum(sys.getsizeof(name) for name, _ in message.asked)
