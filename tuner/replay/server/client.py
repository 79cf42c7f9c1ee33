"""A trace replayed over HTTP in real time, with streaming, on a monotonic clock.

Latencies count from the instant a request was due, so that a client that falls behind hides
nothing; how far it fell behind is the send lag.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp.http_exceptions import HttpProcessingError

from tuner.errors import EngineError
from tuner.replay.arrivals import CausalArrivals
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Outcome, TimelineRecorder, Timelines
from tuner.stats import Ints
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import Trace

_CONNECT_S = 10.0
MAX_ERRORS = 20
"""Ours: a server that names each request makes every error another; more tell nothing."""
_DATA = b"data:"
_DONE = b"[DONE]"


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct, frozen=True):
    """What is read of a server-sent event. Source: vLLM, CompletionStreamResponse."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


def _event_in(data: bytes) -> tuple[_Event, str]:
    """Return an event, and what is wrong with it; without usage its tokens have no time."""
    try:
        event = _EVENTS.decode(data)
    except msgspec.MsgspecError as error:
        return _Event(), f"an event that is none of vLLM's: {error}"
    if event.error is not None:
        return event, f"in the stream: {str(event.error)[:200]}"
    if event.choices and event.usage is None:
        return event, (
            "tokens without the usage that stream_options.continuous_usage_stats asks for: let "
            "what is in between pass it on, or name vLLM's own address with --url"
        )
    return event, ""


@dataclass(slots=True)
class HttpRun:
    """What came of a replay over HTTP.

    A request that was longer than the server's max_model_len and not answered in full is
    REFUSED; every other one without its full answer is TIMED_OUT or ABORTED: it failed.
    `errors` counts the failed and the refused by what the server or the network said;
    `requested_tokens` is the length of answer that each request asked for. Measuring began at
    `since_s` of `time.monotonic`, after the lead-in, of which nothing but the lag is in it.

    Shapes: requested_tokens is [n], as the timelines.
    """

    timelines: Timelines
    requested_tokens: Ints
    wall_s: float
    lag_p99_s: float
    since_s: float
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go: address, model name, and headers such as a login.

    `max_model_len` is what the server says of itself, None where it does not.
    """

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int | None = None


def replay_http(
    endpoint: Endpoint,
    trace: Trace,
    prompts: PromptSource,
    plan: ReplayPlan,
    check: Callable[[], None],
    on_progress: Callable[[int, int, float], None] | None = None,
) -> HttpRun:
    """Send every request when it is due and stamp what comes back.

    `check` is asked while waiting whether the server is alive. on_progress hears of requests
    sent, ended, and the seconds since the start, about twice a second.

    Raises: EngineError when the server is gone.
    """
    return asyncio.run(_Client(endpoint, trace, prompts, plan, check, on_progress).run())


class _Client:
    """One replay: what is sent, what came back, and who still waits."""

    def __init__(
        self,
        endpoint: Endpoint,
        trace: Trace,
        prompts: PromptSource,
        plan: ReplayPlan,
        check: Callable[[], None],
        on_progress: Callable[[int, int, float], None] | None,
    ) -> None:
        self._endpoint, self._trace, self._prompts, self._plan = endpoint, trace, prompts, plan
        self._check, self._on_progress = check, on_progress
        self._arrivals = plan.arrivals(trace)
        # A next turn's prompt holds the answer before it, and is made once that has ended.
        self._turns = trace.turns if isinstance(self._arrivals, CausalArrivals) else None
        prompts.begin(turns_wait=self._turns is not None)
        self._bodies: dict[int, bytes] = {}
        # As a server answers; what is too long is no failure of it, see `HttpRun`.
        most = endpoint.max_model_len
        self._too_long = (
            np.zeros(len(trace), dtype=np.bool_) if most is None else trace.too_long(most)
        )
        self._record = TimelineRecorder(trace.due_s)
        self._errors: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._sent = self._ended = 0
        self._began_s, self._measures = 0.0, trace.lead_in_s == 0

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self) -> HttpRun:
        """Replay to the end."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=self._plan.timeout_s, sock_connect=_CONNECT_S)
        # Bodies are made before the clock starts: encoding a long prompt takes milliseconds.
        first = range(len(self._trace))
        if self._turns is not None:
            first = np.flatnonzero(self._turns.after < 0).tolist()
        self._bodies = {row: self._body(row) for row in first}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._began_s = time.monotonic()
            watch = asyncio.create_task(self._watch())
            try:
                await self._send_all(session, watch)
            finally:
                watch.cancel()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, watch, return_exceptions=True)
        lines = self._record.finish()
        lag_p99_s = float(np.quantile(lines.send_lag_s, 0.99)) if lines.send_lag_s.size else 0.0
        lead_in_s, rows = self._trace.lead_in_s, np.flatnonzero(self._trace.is_measured)
        return HttpRun(
            lines.rows(rows, lead_in_s),
            self._trace.output_tokens[rows],
            max(0.0, self._now_s() - lead_in_s),
            lag_p99_s,
            self._began_s + lead_in_s,
            self._errors,
        )

    async def _send_all(
        self, session: aiohttp.ClientSession, watch: asyncio.Task[None]
    ) -> None:
        while True:
            if watch.done():
                watch.result()
            self._changed.clear()
            due_s = self._arrivals.next_due_s(self._now_s(), len(self._tasks))
            if due_s is None and not self._tasks:
                return
            wait_s = None if due_s is None else due_s - self._now_s()
            if wait_s is None or wait_s > 0:
                await self._pause(wait_s)
                continue
            row, due_s = self._arrivals.pop(self._now_s())
            self._record.due(row, due_s)
            self._sent += 1
            body = self._bodies.pop(row)
            task = asyncio.create_task(self._request(session, row, body))
            self._tasks.add(task)
            task.add_done_callback(self._over)

    async def _pause(self, wait_s: float | None) -> None:
        """Wait until something ends, or so long; at most a second, to see a dead server."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(wait_s or 1.0, 1.0))

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _watch(self) -> None:
        """Check the server every so often, and report progress."""
        while True:
            await asyncio.sleep(0.5)
            self._check()
            if self._on_progress is not None:
                self._on_progress(self._sent, self._ended, self._now_s())

    async def _request(self, session: aiohttp.ClientSession, row: int, body: bytes) -> None:
        """Send one request and stamp its tokens."""
        self._record.sent(row, self._now_s())
        outcome = Outcome.ABORTED
        headers = {"Content-Type": "application/json", **self._endpoint.headers}
        url = f"{self._endpoint.url}/v1/completions"
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                if answer.status == 200:
                    outcome = await self._stream(row, answer)
                else:
                    said = (await answer.content.read(300)).decode("utf-8", "replace")
                    outcome = self._unanswered(row, refused=answer.status == 400)
                    self._failed(row, f"HTTP {answer.status}: {said}")
        except TimeoutError as error:
            outcome = Outcome.TIMED_OUT
            self._failed(row, str(error) or "no full answer within --request-timeout")
        except (aiohttp.ClientError, HttpProcessingError, ValueError) as error:
            # A line that is longer than aiohttp takes is one of the last two, by its release.
            self._failed(row, f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            self._record.ended(row, outcome)
            self._ended += 1
            self._arrivals.ended(row, self._now_s())
            if self._turns is not None:
                for turn in np.flatnonzero(self._turns.after == row).tolist():
                    self._bodies[turn] = self._body(turn)

    def _unanswered(self, row: int, *, refused: bool) -> Outcome:
        """Return whether a request exceeds the server's max_model_len, so that none failed."""
        return Outcome.REFUSED if refused and self._too_long[row] else Outcome.ABORTED

    def _failed(self, row: int, what: str) -> None:
        if row < self._trace.led_in:
            return
        if what not in self._errors and len(self._errors) >= MAX_ERRORS:
            what = "errors in other words"
        self._errors[what] = self._errors.get(what, 0) + 1

    async def _stream(self, row: int, answer: aiohttp.ClientResponse) -> Outcome:
        """Read server-sent events; tokens are counted by the usage that each one carries."""
        known, wanted = 0, int(self._trace.output_tokens[row])
        async for line in answer.content:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                break
            at_s = self._now_s()
            if not self._measures and at_s >= self._trace.lead_in_s:
                self._measures = True
                self._record.begin_to_measure()
            event, wrong = _event_in(data)
            if wrong:
                self._failed(row, wrong)
                return Outcome.ABORTED
            for choice in event.choices:
                self._prompts.answered(row, choice.token_ids or ())
            total = known if event.usage is None else event.usage.completion_tokens
            if total > known:
                self._record.tokens(row, total - known, at_s)
                known = total
        if known != wanted:
            self._failed(
                row, f"answers of other than the recorded length, e.g. {known} for {wanted}"
            )
            # vLLM 0.32 takes a prompt that fits and ends its answer at max_model_len.
            return self._unanswered(row, refused=known < wanted)
        return Outcome.COMPLETED

    def _body(self, row: int) -> bytes:
        """Return the request: the synthetic prompt, and exactly the recorded output length.

        How tokens are sampled is left to the server, as most clients do.
        """
        content = {
            "model": self._endpoint.model,
            "prompt": self._prompts.prompt(row).token_ids(),
            "max_tokens": int(self._trace.output_tokens[row]),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._turns is not None:
            content["return_token_ids"] = True
        if priority := self._prompts.prompt(row).priority:
            content["priority"] = priority
        return json.dumps(content).encode()


def find_endpoint(url: str, headers: Mapping[str, str], names: Sequence[str] = ()) -> Endpoint:
    """Return the server at an address with the model of these names, or with its only one.

    Raises: EngineError when it does not say, or offers several others.
    Source: vLLM, ModelCard of /v1/models: an adapter names its `parent`, and what one model is
        called has one `root`.
    """
    models = asyncio.run(_get_json(f"{url}/v1/models", headers))
    try:
        cards = {str(card["id"]): card for card in reversed(models["data"])}
        own = [name for name in names if name in cards]
        bases = {name: card for name, card in cards.items() if not card.get("parent")}
        if not own and len({card.get("root") or name for name, card in bases.items()}) > 1:
            raise EngineError(
                f"{url} offers several models: {', '.join(reversed(bases))}",
                "name one as served-model-name in --config, or with --model",
            )
        card = cards[own[0]] if own else models["data"][0]
        most = card.get("max_model_len")
        return Endpoint(url, str(card["id"]), headers, None if most is None else int(most))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as cause:
        raise EngineError(
            f"{url}/v1/models names no model", "--url is the address of a vLLM API server"
        ) from cause


async def _get_json(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=dict(headers)) as answer,
        ):
            answer.raise_for_status()
            answered: dict[str, Any] = await answer.json()
            return answered
    except (aiohttp.ClientError, TimeoutError, ValueError) as cause:
        raise EngineError(
            f"{url} does not answer as a vLLM API server: {str(cause) or type(cause).__name__}",
            "check --url, and the login in VLLM_API_KEY",
        ) from cause
