"""What both doors reported, joined by the engine's request id into rows.

The engine's ids join exactly: the middleware sees the very string under which the engine
reports the request later.
"""

from __future__ import annotations

from array import array
from typing import Final

from tuner.recorder.blocks import KeyedHashes
from tuner.recorder.messages import (
    Asked,
    Ended,
    Finished,
    FinishedRequest,
    Left,
    Message,
    Replied,
    Stepped,
    Unfinished,
)
from tuner.recorder.open_prompts import OpenPrompts
from tuner.recorder.rows import Row, seconds

ABORTED: Final = "abort"
"""vLLM's own word for a request whose client went away."""


class Join:
    """Rows out of messages; holds what is still open."""

    def __init__(self, hashes: KeyedHashes) -> None:
        self._hashes = hashes
        self.open = OpenPrompts()
        self.unknown = 0
        """Responses that were not recorded because they carry no usage of one answer."""
        self.without_row = 0
        """Prompts that ended with no report of how far they were: refused, failed or left."""

    def rows(self, message: Message) -> list[Row]:
        """Return the rows that a message completes."""
        match message:
            case Asked():
                self._ask(message)
                return []
            case Finished():
                return [self._finished(message, request) for request in message.requests]
            case Left():
                return self._left(message)
            case Replied():
                return self._replied(message)
            case Ended():
                still_open = [one for one in message.asked if self.open.find(*one)]
                self.without_row += len(still_open)
                self.open.close(still_open)
                return []
            case Stepped():
                return []  # steps are no requests

    def _ask(self, prompt: Asked) -> None:
        ids = None
        if prompt.token_ids is not None:
            ids = self._hashes.block_ids(prompt.token_ids, prompt.block_size, prompt.salt)
        self.open.add(prompt, ids)

    def _finished(self, message: Finished, request: FinishedRequest) -> Row:
        name, length = request.request_id, request.num_prompt_tokens
        is_begun = request.num_generation_tokens > 0
        # The engine stamps its first and last token alike, so the time between them is exact;
        # e2e_latency alone holds the way in from the client's request.
        ttft_s = request.e2e_latency - request.decode_time
        return Row(
            arrived_at_s=round(message.at_s - request.e2e_latency, 6),
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
            hash_ids=None if name is None else _listed(self.open.answered(name, length)),
            engine_index=message.engine_index,
        )

    def _left(self, left: Left) -> list[Row]:
        """Return what a client left behind; nothing if the engine was done before."""
        opened = self.open.find(left.request_id, left.number)
        if opened is None:
            return []
        ids = self.open.blocks(opened)
        self.open.close([(left.request_id, left.number)])
        self.without_row += not left.unfinished
        return [
            self._aborted(left, one, ids if opened.fits(one.input_length) else None)
            for one in left.unfinished[: opened.answers_left]
        ]

    def _aborted(self, left: Left, one: Unfinished, ids: array[int] | None) -> Row:
        return Row(
            arrived_at_s=round(one.arrived_at_s, 6),
            input_length=one.input_length,
            output_length=one.output_length,
            status=ABORTED,
            e2e_s=seconds(left.at_s - one.arrived_at_s),
            ttft_s=seconds(one.ttft_s),
            cached_tokens=None if one.ttft_s is None else one.cached_tokens,
            request_id=self._hashes.name(left.request_id),
            hash_ids=_listed(ids),
        )

    def _replied(self, replied: Replied) -> list[Row]:
        """Return the row of a response, unless its usage sums up several answers."""
        opened = [self.open.find(name, number) for name, number in replied.asked]
        usage, ids = replied.usage, None
        is_one = not opened
        if len(opened) == 1 and opened[0] is not None and usage is not None:
            is_one = opened[0].answers_left == 1
            ids = self.open.blocks(opened[0]) if opened[0].fits(usage.input_length) else None
        self.open.close(replied.asked)
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


def _listed(ids: array[int] | None) -> list[int] | None:
    return None if ids is None else ids.tolist()
