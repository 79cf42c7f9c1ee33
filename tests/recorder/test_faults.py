"""What fails in the recorder stays there, at every call that it makes while serving."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import tuner.recorder
from support.paths import TESTS
from support.recorder_asgi import (
    PROMPT,
    REPLY,
    START,
    Engine,
    Message,
    ask,
    exchange,
    part,
    the_recorder,
    told_by_engine,
)
from support.recorder_parts import Reported, finished, log_kept, rows_of, warnings_kept
from tuner.recorder import TraceRecorder
from tuner.recorder.recorder import process_recorder
from tuner.recorder.settings import FILE, KEY, MAX_BYTES, share_key

RECORDER = str(Path(tuner.recorder.__file__).parent)

GRACE_S = GATHER_S = 0.001
"""Next to nothing: each call that may fail is made on a recorder of its own."""

FAULTS: tuple[Callable[[], Exception], ...] = (
    lambda: MemoryError("none is left"),
    lambda: OSError(28, "No space left on device"),
    lambda: RuntimeError("can't start new thread"),
    lambda: OverflowError("timestamp out of range"),
    lambda: UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
)

UNGUARDED = {"__enter__", "__exit__", "process_recorder"}
"""Steps that are the guard themselves, or take and release a lock, which cannot fail."""


class FailingCall:
    """Has the n-th call fail that the recorder makes in this thread, of Python's or of C's."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        """Take one event of the interpreter's."""
        match event:
            case "call":
                caller, name = frame.f_back, frame.f_code.co_name
                is_own = frame.f_code.co_filename.startswith(str(TESTS))
            case "c_call":
                caller, name, is_own = frame, called.__name__, False
            case _:
                return
        if is_own or name in UNGUARDED or caller is None:
            return
        if caller.f_code.co_filename.startswith(RECORDER):
            self.seen += 1
            if self.seen == self.at:
                fault = FAULTS[self.at % len(FAULTS)]
                raise fault()


def failing_one_by_one(serve: Callable[[], object]) -> Iterator[tuple[int, object]]:
    """Serve again and again, each time with the next call failing; give what came of it."""
    for at in count(1):
        failing = FailingCall(at)
        # A collection calls what others have registered for it, which is no call of ours.
        gc.disable()
        sys.setprofile(failing)
        try:
            came = serve()
        finally:
            sys.setprofile(None)
            gc.enable()
        yield at, came
        recorder = process_recorder()
        if recorder is not None:
            recorder.close()
        process_recorder.cache_clear()
        if failing.seen < at:
            return


def served() -> object:
    """Return all that clients and the application see of one answer and one that is left."""
    engine, seen = Engine(), list[object]()
    body: Message = {"type": "http.request", "body": b"{}", "more_body": False}

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        seen.append(message)

    async def app(_scope: object, receive: Any, send: Any) -> None:
        seen.append(await receive())
        seen.extend([one async for one in ask(engine)])
        engine.works_on("cmpl-alice-0", made=2)
        await send(START)
        await send(part(REPLY[:30], more=True))
        if coming:
            seen.append(await receive())
            raise ConnectionError("the client went away")
        await send(part(REPLY[30:]))

    async def serve() -> None:
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions"}
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        door = TraceRecorder(app)
        for leaves in (False, True):
            coming[:] = [body, {"type": "http.disconnect"}] if leaves else [body]
            try:
                await door(scope, receive, send)
            except ConnectionError as error:
                seen.append(str(error))
        await asyncio.sleep(0.01)

    coming: list[Message] = []
    asyncio.run(serve())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("counted_by", ["engine", "usage"])
def test_whatever_fails_clients_and_application_see_what_they_would_without_a_recorder(
    prod: Path, monkeypatch: pytest.MonkeyPatch, counted_by: str
) -> None:
    monkeypatch.delenv(FILE)
    plain = served()
    process_recorder.cache_clear()
    monkeypatch.setenv(FILE, str(prod))

    def serve() -> object:
        recorder = process_recorder()
        if recorder is not None and counted_by == "engine":
            recorder.source.has_engine_counts = True
        return served()

    tried = 0
    with log_kept():
        for at, came in failing_one_by_one(serve):
            assert came == plain, at
            tried = at
    assert tried > 100


@pytest.mark.engine
def test_whatever_fails_vllm_gets_no_exception_of_its_stat_logger(prod: Path) -> None:
    from tuner.recorder.plugin import RecordingStatLogger

    config: Any = Engine().vllm_config

    def report() -> None:
        logger = RecordingStatLogger(config, 0)
        logger.log_engine_initialized()
        for _ in range(2):
            iteration = SimpleNamespace(
                iteration_timestamp=1e9, finished_requests=[Reported("a")]
            )
            logger.record(None, iteration, mm_cache_stats=None, engine_idx=0)
            logger.record(scheduler_stats=None, iteration_stats=None, new_in_vllm=1)

    with log_kept():
        for _ in failing_one_by_one(report):
            pass
    assert prod.exists()
    logger = RecordingStatLogger(config, 0)
    with warnings_kept() as said:
        logger.record("another interface")
        logger.record(None, SimpleNamespace(finished=[]))
    assert len(said) == 1
    assert the_recorder().is_on


@pytest.mark.engine
def test_each_row_of_several_engines_says_which_answered(prod: Path) -> None:
    from tuner.recorder.plugin import RecordingStatLogger

    config: Any = Engine().vllm_config
    first = RecordingStatLogger(config, 0)
    for each in (first, RecordingStatLogger(config, engine_index=1)):
        ended = [Reported("a"), Reported("b")]
        each.record(None, SimpleNamespace(iteration_timestamp=1e9, finished_requests=ended))
    assert [row["engine_index"] for row in rows_of(prod, 4)] == [0, 0, 1, 1]


@pytest.mark.engine
def test_a_vllm_that_asks_more_of_stat_loggers_starts_without_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.metrics import loggers

    class Newer(loggers.StatLoggerBase):  # type: ignore[misc] # vLLM is untyped in the check
        @abstractmethod
        def record_more(self) -> None:
            """Do what no logger of today does."""

    monkeypatch.setattr(loggers, "StatLoggerBase", Newer)
    monkeypatch.delitem(sys.modules, "tuner.recorder.plugin", raising=False)
    found = loggers.load_stat_logger_plugin_factories()
    assert not [one for one in found if one.__module__ == "tuner.recorder.plugin"]


def test_a_server_starts_whatever_fails_as_the_recorder_is_set_up(
    prod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        share_key()
        process_recorder()

    with log_kept():
        for _ in failing_one_by_one(start):
            monkeypatch.setenv(KEY, "")
    monkeypatch.setenv(MAX_BYTES, "9" * 5000)
    with warnings_kept() as said:
        assert process_recorder() is None
    assert "the recorder cannot be set up: ValueError: Exceeds the limit" in said[0]
    process_recorder.cache_clear()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv(FILE, "prod.jsonl")
    with warnings_kept() as said:
        assert process_recorder() is None
    assert said[0].endswith("the recorder cannot be set up: No such file or directory")
    process_recorder.cache_clear()
    os.chdir(tmp_path)
    monkeypatch.setenv(FILE, str(prod))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_interrupts_and_cancelling_pass_as_without_a_recorder(
    prod: Path, kind: type[BaseException]
) -> None:
    told_by_engine()
    engine = Engine()

    async def app(_scope: object, _receive: object, _send: object) -> None:
        ask(engine)
        raise kind

    with pytest.raises(kind):
        exchange(app, engine)
    with pytest.raises(kind), the_recorder().guard():
        raise kind
    assert the_recorder().is_on
    assert not prod.exists()


def test_a_vllm_that_names_its_arguments_otherwise_serves_as_before(prod: Path) -> None:
    told_by_engine()
    engine = Engine()

    async def generate(*, inputs: object, params: object, priority: int) -> Any:
        yield inputs, params, priority

    engine.generate = generate
    came: list[object] = []

    async def app(_scope: object, _receive: object, _send: object) -> None:
        stream: Any = engine.generate(inputs=PROMPT, params="any", priority=3)
        came.extend([one async for one in stream])

    with warnings_kept() as said:
        exchange(app, engine)
        exchange(app, engine)
    assert came == [(PROMPT, "any", 3)] * 2
    assert len(said) == 1
    assert "recording and serving go on" in said[0]
    the_recorder().offer(finished(Reported("a")))
    assert len(rows_of(prod, 1)) == 1


@pytest.mark.parametrize("ids", [[1 << 32], [1 << 64], [10**4000], [-1]])
def test_a_token_id_that_no_vocabulary_holds_is_no_fault_of_the_recording(
    prod: Path, ids: list[int]
) -> None:
    told_by_engine()
    engine = Engine()

    async def app(_scope: object, _receive: object, _send: object) -> None:
        prompt = {"type": "token", "prompt_token_ids": [5] * 400 + ids}
        engine.generate(prompt, SimpleNamespace(n=1), "huge")
        ask(engine)
        the_recorder().offer(finished(Reported("cmpl-alice-0")))

    with warnings_kept() as said:
        exchange(app, engine)
    assert len(rows_of(prod, 1)[0]["hash_ids"]) == 2
    assert said == []


def test_a_recorder_that_cannot_even_say_so_is_silent(
    prod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def write(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with log_kept():
        monkeypatch.setattr("logging.Logger.warning", write)
        the_recorder().offer(finished(Reported("a")))
    assert not the_recorder().is_on
    assert not prod.exists()
