"""What the two doors tell the recorder: cheap to make while serving, worked on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class FinishedRequest(Protocol):
    """What vLLM's stat loggers are told of a request that ended.

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
    """The engine was asked for `answers` answers to one prompt.

    `token_ids` is None where tokens alone do not tell prompts apart, as with images. Requests
    of different `salt` share no prefix. `number` tells apart what is asked under one id.
    """

    request_id: str
    number: int
    token_ids: Sequence[int] | None
    block_size: int
    salt: str = ""
    answers: int = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine finished requests, all at one time.

    Units: at_s in seconds since 1970.
    """

    at_s: float
    requests: Sequence[FinishedRequest]


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
    """What a response says it took; of an answer that came to its end."""

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


Message = Asked | Finished | Left | Replied
