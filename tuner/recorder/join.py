"""What both doors told, joined by the engine's request id into rows.

The engine's ids join exactly: the middleware sees the very string under which the engine
reports the request later. Clients may choose it, and so two requests may bear the same at one
time; then the prompt's length tells them apart, or their blocks are left out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

from tuner.recorder.blocks import KeyedHashes
from tuner.recorder.messages import (
    Asked,
    Finished,
    FinishedRequest,
    Left,
    Message,
    Replied,
    Unfinished,
)
from tuner.recorder.rows import Row, seconds

MOST_OPEN: Final = 16_384
"""Ours: many times what one server has in flight; what is older was never reported."""

ABORTED: Final = "abort"
"""vLLM's own word for a request whose client went away."""


@dataclass(slots=True)
class _Open:
    """A prompt whose answers are not all reported; length is None where it is not known."""

    number: int
    length: int | None
    ids: array[int] | None
    answers_left: int

    def fits(self, length: int) -> bool:
        """Say whether a request of this many prompt tokens can be the one that was asked."""
        return self.length is None or self.length == length


class Join:
    """Rows out of messages; holds what is still open."""

    def __init__(self, hashes: KeyedHashes) -> None:
        self._hashes = hashes
        self._open: dict[str, list[_Open]] = {}
        self.unknown = 0
        """Responses that were not recorded because they told no usage of one answer."""

    def rows(self, message: Message) -> list[Row]:
        """Return the rows that a message completes."""
        match message:
            case Asked():
                self._ask(message)
                return []
            case Finished():
                return [self._finished(message.at_s, request) for request in message.requests]
            case Left():
                return self._left(message)
            case Replied():
                return self._replied(message)

    def _ask(self, asked: Asked) -> None:
        length, ids = None, None
        if asked.token_ids is not None:
            length = len(asked.token_ids)
            ids = self._hashes.block_ids(asked.token_ids, asked.block_size, asked.salt)
        opened = _Open(asked.number, length, ids, asked.answers)
        self._open.setdefault(asked.request_id, []).append(opened)
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _finished(self, at_s: float, request: FinishedRequest) -> Row:
        name, length = request.request_id, request.num_prompt_tokens
        is_begun = request.num_generation_tokens > 0
        # The engine stamps its first and last token alike, so the time between them is exact;
        # e2e_latency alone holds the way in from the client's request.
        ttft_s = request.e2e_latency - request.decode_time
        return Row(
            arrived_at_s=round(at_s - request.e2e_latency, 6),
            input_length=length,
            output_length=request.num_generation_tokens,
            status=str(request.finish_reason),
            e2e_s=seconds(request.e2e_latency),
            ttft_s=seconds(ttft_s) if is_begun else None,
            cached_tokens=request.num_cached_tokens,
            queue_s=seconds(request.queued_time),
            prefill_s=seconds(request.prefill_time) if is_begun else None,
            decode_s=seconds(request.decode_time) if is_begun else None,
            request_id=None if name is None else self._hashes.name(name),
            hash_ids=None if name is None else _listed(self._answered(name, length)),
        )

    def _answered(self, request_id: str, length: int) -> array[int] | None:
        """Return the blocks of the prompt that one more answer is reported for."""
        fitting = [one for one in self._open.get(request_id, ()) if one.fits(length)]
        if not fitting:
            return None
        first = fitting[0]
        first.answers_left -= 1
        if not first.answers_left:
            self._close(request_id, first)
        if any(one.ids != first.ids for one in fitting):
            # Which of them this is, nothing tells; so none of them has blocks from here on.
            for one in fitting:
                one.ids = None
        return first.ids

    def _left(self, left: Left) -> list[Row]:
        """Return what a client left behind; nothing if the engine was done before."""
        opened = self._find(left.request_id, left.number)
        if opened is None:
            return []
        self._close(left.request_id, opened)
        return [
            self._aborted(left, one, opened) for one in left.unfinished[: opened.answers_left]
        ]

    def _aborted(self, left: Left, one: Unfinished, opened: _Open) -> Row:
        return Row(
            arrived_at_s=round(one.arrived_at_s, 6),
            input_length=one.input_length,
            output_length=one.output_length,
            status=ABORTED,
            e2e_s=seconds(left.at_s - one.arrived_at_s),
            ttft_s=seconds(one.ttft_s),
            cached_tokens=None if one.ttft_s is None else one.cached_tokens,
            request_id=self._hashes.name(left.request_id),
            hash_ids=_listed(opened.ids if opened.fits(one.input_length) else None),
        )

    def _replied(self, replied: Replied) -> list[Row]:
        """Return the row of a response, unless its usage sums up several answers."""
        opened = [self._find(name, number) for name, number in replied.asked]
        for (name, _), one in zip(replied.asked, opened, strict=True):
            if one is not None:
                self._close(name, one)
        usage, ids = replied.usage, None
        is_one = not opened
        if len(opened) == 1 and opened[0] is not None and usage is not None:
            is_one = opened[0].answers_left == 1
            ids = opened[0].ids if opened[0].fits(usage.input_length) else None
        if usage is None or not is_one:
            self.unknown += 1
            return []
        row = Row(
            arrived_at_s=round(replied.arrived_at_s, 6),
            input_length=usage.input_length,
            output_length=usage.output_length,
            status=usage.status,
            e2e_s=seconds(replied.e2e_s),
            ttft_s=seconds(replied.ttft_s),
            cached_tokens=usage.cached_tokens,
            request_id=self._hashes.name(replied.asked[0][0]) if replied.asked else None,
            hash_ids=_listed(ids),
        )
        return [row]

    def _find(self, request_id: str, number: int) -> _Open | None:
        opened = self._open.get(request_id, ())
        return next((one for one in opened if one.number == number), None)

    def _close(self, request_id: str, one: _Open) -> None:
        opened = self._open[request_id]
        opened.remove(one)
        if not opened:
            del self._open[request_id]


def _listed(ids: array[int] | None) -> list[int] | None:
    return None if ids is None else ids.tolist()
