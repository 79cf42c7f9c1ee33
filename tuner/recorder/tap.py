"""The tokens of a prompt exactly as they run, read where the API server calls its engine.

The middleware alone sees JSON, before chat templates and tokenizer. But it runs in the process
that calls the engine's public `generate(prompt, sampling_params, request_id)`, and finds the
engine in the application's state. So the very tokens are hashed, in the engine's own blocks,
whatever the API in front of them.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from tuner.recorder.messages import Asked, Left, Unfinished
from tuner.recorder.recorder import Recorder

TOKENS_ONLY: Final = "token"
"""Source: vLLM inputs/engine.py, TokensInput.type."""

PLACES: Final = {"prompt": 0, "sampling_params": 1, "request_id": 2}
"""Where `generate` takes what is read of its arguments, unless they are named.

Source: vLLM engine/protocol.py, EngineClient.generate.
"""

_numbers = count()


Config = Any
"""vLLM's VllmConfig, untyped as vLLM is in the check. Source: vLLM config/vllm.py."""

EngineClient = Any
"""An engine client of vLLM's: `generate`, `vllm_config` and `output_processor` are used.

Source: vLLM engine/protocol.py, EngineClient; output_processor, of which requests that were
    given up are read, v1/engine/async_llm.py, AsyncLLM.
"""


@dataclass(slots=True)
class Ask:
    """One prompt that an HTTP request brought to the engine, and for how many answers."""

    request_id: str
    number: int
    answers: int
    stream: weakref.ref[object] | None = None
    """What the engine returned for it; vLLM's is an asynchronous generator. None of anything
    else that cannot be followed: then it is over with its exchange."""

    def follow(self, stream: object) -> None:
        """Keep in mind what the engine returned, without keeping it alive."""
        with suppress(TypeError):
            self.stream = weakref.ref(stream)

    def is_running(self) -> bool:
        """Return whether its answers are still being made or waited for."""
        stream = None if self.stream is None else self.stream()
        return getattr(stream, "ag_frame", None) is not None


current_asks: ContextVar[list[Ask] | None] = ContextVar("current_asks", default=None)
"""What is asked on behalf of the HTTP request that the running task serves; tasks started for
it inherit it."""


class ListeningGenerate:
    """An engine's `generate` that also sends each request to the recorder.

    All arguments pass as they come. What is read of them is read under the recorder's guard, so
    that a vLLM whose `generate` takes others loses its recording, and no request.
    """

    def __init__(
        self, generate: Callable[..., object], recorder: Recorder, block_size: int
    ) -> None:
        self._generate = generate
        self._recorder = recorder
        self._block_size = block_size
        self._asking, self._following = recorder.guard(), recorder.guard()

    def __call__(self, *args: object, **keywords: object) -> object:
        """Tell, and return what the engine returns."""
        ask = None
        if self._recorder.is_on:
            with self._asking:
                ask = self._tell(args, keywords)
        stream = self._generate(*args, **keywords)
        if ask is not None:
            with self._following:
                ask.follow(stream)
        return stream

    def _tell(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Ask:
        prompt, sampling, request_id = (
            keywords[name] if name in keywords else args[place]
            for name, place in PLACES.items()
        )
        ask = Ask(request_id, next(_numbers), sampling.n)
        asks = current_asks.get()
        if asks is not None:
            asks.append(ask)
        tokens, salt = _plain_tokens(prompt), _salt(prompt, keywords.get("lora_request"))
        self._recorder.offer(
            Asked(ask.request_id, ask.number, tokens, self._block_size, salt, ask.answers)
        )
        return ask


def listen(client: EngineClient, recorder: Recorder) -> bool:
    """Send all requests to an engine to the recorder too; return whether that is possible."""
    try:
        size = client.vllm_config.cache_config.block_size
        if isinstance(client.generate, ListeningGenerate):
            return True
        if size is None:
            return False
        model = served_model(client.vllm_config)
        client.generate = ListeningGenerate(client.generate, recorder, size)
    except AttributeError:
        return False
    recorder.source.model = model
    recorder.source.block_size = size
    recorder.source.sees_unfinished = _shows_unfinished(client)
    return True


def served_model(config: Config) -> str | None:
    """Return the name that clients ask for; of several the first."""
    name: str | list[str] | None = config.model_config.served_model_name
    if isinstance(name, list):
        return name[0] if name else None
    return name


def left_behind(client: EngineClient, ask: Ask) -> Left:
    """Return how far the engine is with a request that its client has left.

    Where the same id stands for requests of other clients too, that is unknown.
    """
    outputs = client.output_processor
    names = list(outputs.external_req_ids.get(ask.request_id, ()))
    unfinished: list[Unfinished] = []
    if len(names) <= ask.answers:
        states = [outputs.request_states[name] for name in names]
        unfinished = [_unfinished(one) for one in states if one.stats is not None]
    return Left(ask.request_id, ask.number, time.time(), unfinished)


def _unfinished(state: Any) -> Unfinished:  # noqa: ANN401 - vLLM's own, untyped
    stats = state.stats
    return Unfinished(
        arrived_at_s=stats.arrival_time,
        input_length=state.prompt_len,
        output_length=stats.num_generation_tokens,
        cached_tokens=state.num_cached_tokens,
        ttft_s=None if state.is_prefilling else stats.first_token_latency,
    )


def _shows_unfinished(client: EngineClient) -> bool:
    try:
        outputs = client.output_processor
        found = (outputs.external_req_ids, outputs.request_states)
    except AttributeError:
        return False
    return all(isinstance(one, Mapping) for one in found)


def _plain_tokens(prompt: object) -> array[int] | None:
    """Return the tokens of a prompt that consists of nothing else, as a copy of their own."""
    if not isinstance(prompt, dict) or prompt.get("type", TOKENS_ONLY) != TOKENS_ONLY:
        return None
    token_ids = prompt.get("prompt_token_ids")
    if not isinstance(token_ids, list) or "multi_modal_data" in prompt:
        return None
    try:
        return array("I", token_ids)
    except OverflowError:
        # An id that no vocabulary holds: the engine refuses the prompt, and so has no blocks.
        return None


def _salt(prompt: object, adapter: Any) -> str:  # noqa: ANN401 - vLLM's own, untyped
    """Return what keeps the engine from sharing equal blocks: adapter and cache salt."""
    name = adapter.lora_name if adapter is not None else ""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return f"{name}\0{salt or ''}" if name or salt else ""
