"""The middleware as an ASGI server sees it: what passes, what it notices, how it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.recorder_asgi import (
    EVENTS,
    PROMPT,
    REPLY,
    SECRET,
    START,
    USAGE,
    Engine,
    Message,
    answering,
    ask,
    exchange,
    part,
    streamed,
    the_recorder,
    told_by_engine,
)
from support.recorder_parts import (
    BLOCK,
    Reported,
    finished,
    log_kept,
    recorded,
    rows_of,
    warnings_kept,
)
from tuner.recorder import TraceRecorder, middleware
from tuner.recorder.recorder import process_recorder
from tuner.recorder.settings import FILE


def test_unset_means_that_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE, raising=False)
    process_recorder.cache_clear()
    engine = Engine()
    seen: list[object] = []

    async def app(*three: object) -> None:
        seen.extend(three)

    async def receive() -> Message:
        raise NotImplementedError

    async def send(_message: Message) -> None:
        raise NotImplementedError

    scope = {
        "type": "http",
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
    }
    asyncio.run(TraceRecorder(app)(scope, receive, send))
    process_recorder.cache_clear()
    assert seen == [scope, receive, send]
    assert engine.generate == engine.generate_answer


@pytest.mark.parametrize("counted_by", ["engine", "usage"])
def test_every_message_passes_as_it_came(prod: Path, counted_by: str) -> None:
    if counted_by == "engine":
        told_by_engine()
    huge = part(b"\0\xff" * (8 << 20))
    messages = [
        EVENTS,
        part(b"data: 1\n\n", more=True),
        huge,
        {"type": "http.response.trailers"},
    ]
    sent = exchange(answering(*messages))
    assert all(one is other for one, other in zip(sent, messages, strict=True))
    assert not prod.exists()


def test_the_engine_is_asked_what_it_would_have_been_asked(prod: Path) -> None:
    told_by_engine()
    engine, asked = Engine(), []

    async def app(_scope: object, _receive: object, _send: object) -> None:
        asked.extend([one async for one in ask(engine)])

    exchange(app, engine)
    prompt, sampling = {"type": "token", "prompt_token_ids": PROMPT}, SimpleNamespace(n=1)
    more = {"priority": 3, "lora_request": None}
    assert asked == [(prompt, sampling, "cmpl-alice-0", more)]
    assert not prod.exists()


def test_the_engines_counts_and_the_prompts_blocks_come_together(prod: Path) -> None:
    told_by_engine()
    engine, reported = Engine(), finished(Reported("cmpl-alice-0"))
    exchange(answering(START, part(REPLY), engine=engine, reported=reported), engine)
    (row,) = rows_of(prod, 1)
    assert (row["input_length"], row["output_length"], len(row["hash_ids"])) == (10, 3, 2)
    header = recorded(prod)[0]
    assert (header["model"], header["block_size"], header["lacks"]) == ("demo", BLOCK, [])
    for secret in (SECRET, "alice", "choices"):
        assert secret not in prod.read_text()


@pytest.mark.parametrize(
    "prompt",
    [
        {"type": "multimodal", "prompt_token_ids": PROMPT, "mm_hashes": {"image": ["1"]}},
        {"type": "embeds", "prompt_embeds": [[0.5]]},
        "text of a service that calls the engine itself",
    ],
)
def test_what_is_more_than_tokens_has_no_blocks(prod: Path, prompt: object) -> None:
    recorder, engine = told_by_engine(), Engine()

    async def app(_scope: object, _receive: object, _send: object) -> None:
        engine.generate(prompt, SimpleNamespace(n=1), "a")
        recorder.offer(finished(Reported("a")))

    exchange(app, engine)
    assert "hash_ids" not in rows_of(prod, 1)[0]


def test_a_client_that_leaves_is_recorded_with_what_was_made_for_it(prod: Path) -> None:
    told_by_engine()
    engine = Engine()

    async def app(_scope: object, receive: Any, send: Any) -> None:
        await receive()
        ask(engine)
        engine.works_on("cmpl-alice-0", made=7)
        await send(EVENTS)
        await receive()

    exchange(app, engine, [{"type": "http.disconnect"}])
    (row,) = rows_of(prod, 1)
    assert (row["status"], row["input_length"], row["output_length"]) == ("abort", 10, 7)
    assert (row["ttft_s"], len(row["hash_ids"])) == (0.5, 2)


def test_who_is_served_as_the_server_ends_is_recorded(
    prod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is over before the engine's last word would have been waited for."""
    monkeypatch.setattr(middleware, "GRACE_S", 60.0)
    recorder, engine = told_by_engine(), Engine()

    async def app(_scope: object, receive: Any, send: Any) -> None:
        await receive()
        ask(engine)
        engine.works_on("cmpl-alice-0", made=7)
        await send(EVENTS)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        exchange(app, engine)
    recorder.close()
    (row,) = recorded(prod)[1]
    assert (row["status"], row["output_length"]) == ("abort", 7)


def test_a_client_that_leaves_as_the_engine_is_done_has_one_row(prod: Path) -> None:
    recorder, engine = told_by_engine(), Engine()

    async def app(_scope: object, receive: Any, _send: object) -> None:
        ask(engine)
        engine.works_on("cmpl-alice-0", made=2)
        await receive()
        await receive()
        # The engine's report comes some steps after the response, as it does under load.
        late = finished(Reported("cmpl-alice-0"))
        asyncio.get_running_loop().call_later(middleware.GRACE_S / 2, recorder.offer, late)

    exchange(app, engine, [{"type": "http.disconnect"}])
    recorder.close()
    assert [row["status"] for row in recorded(prod)[1]] == ["length"]


def test_clients_that_leave_under_one_id_are_not_taken_for_each_other(prod: Path) -> None:
    recorder, engine = told_by_engine(), Engine()

    async def app(_scope: object, receive: Any, _send: object) -> None:
        ask(engine)
        engine.works_on("cmpl-alice-0", made=2)
        engine.output_processor.external_req_ids["cmpl-alice-0"] *= 2
        await receive()
        await receive()

    exchange(app, engine, [{"type": "http.disconnect"}])
    recorder.close()
    assert not prod.exists()


def test_a_failing_server_fails_as_before(prod: Path) -> None:
    told_by_engine()
    engine = Engine()

    async def app(_scope: object, _receive: object, _send: object) -> None:
        ask(engine)
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        exchange(app, engine)
    assert the_recorder().is_on
    assert not prod.exists()


@pytest.mark.parametrize("counted_by", ["engine", "usage"])
def test_requests_that_fail_are_counted_where_they_have_no_row(
    prod: Path, counted_by: str
) -> None:
    recorder, engine = the_recorder(), Engine()
    if counted_by == "engine":
        told_by_engine()
    failed = {**START, "status": 500}
    with log_kept() as said:
        for _ in range(3):
            exchange(answering(failed, part(b"{}"), engine=engine), engine)
        reported = finished(Reported("cmpl-alice-0")) if counted_by == "engine" else None
        exchange(answering(START, part(REPLY), engine=engine, reported=reported), engine)
        recorder.close()
    assert len(recorded(prod)[1]) == 1
    told = "; 3 more were refused, failed or left and have no row"
    assert said[-1] == f"recorded 1 requests to {prod}{told}"


def test_what_cannot_be_taken_in_is_left_out_with_one_warning_and_the_rest_recorded(
    prod: Path,
) -> None:
    told_by_engine()
    engine, reported = Engine(), finished(Reported("cmpl-alice-0"))

    async def app(_scope: object, _receive: object, send: Any) -> None:
        for _ in range(2):
            engine.generate({"type": "token", "prompt_token_ids": PROMPT}, "no n here", "a")
        await send(START)
        await send(part(b"fine"))

    with warnings_kept() as said:
        assert exchange(app, engine) == [START, part(b"fine")]
        exchange(answering(START, part(REPLY), engine=engine, reported=reported), engine)
    assert len(rows_of(prod, 1)[0]["hash_ids"]) == 2
    assert len(said) == 1
    assert "'str' object has no attribute 'n'; recording and serving go on" in said[0]


def test_alone_it_takes_the_usage_that_responses_tell(prod: Path) -> None:
    engine = Engine()
    chunk, last = b'{"choices":[{"text":"a"}],"usage":null}', b'{"choices":[],' + USAGE
    exchange(answering(*streamed(chunk, last, b"[DONE]"), engine=engine), engine)
    with warnings_kept() as said:
        exchange(answering(*streamed(chunk, b"[DONE]"), engine=engine), engine)
        exchange(answering(START, part(REPLY), engine=engine, answers=2), engine)
        exchange(answering(START | {"status": 400}, part(REPLY)), engine)
        exchange(answering(START, part(REPLY)), engine, path="/v1/embeddings")
        the_recorder().close()
    header, (row,) = recorded(prod)
    assert (row["input_length"], row["output_length"], row["status"]) == (10, 3, "unknown")
    assert len(row["hash_ids"]) == 2
    assert 0 <= row["ttft_s"] <= row["e2e_s"]
    assert len(said) == 1
    assert said[0].startswith("2 responses were not recorded")
    assert (header["counts_from"], header["block_size"]) == ("usage", BLOCK)
    assert header["lacks"] == ["queue_s", "prefill_s", "decode_s"]


def test_alone_a_client_that_leaves_after_its_answer_is_counted_by_usage(prod: Path) -> None:
    engine = Engine()

    async def app(_scope: object, receive: Any, send: Any) -> None:
        ask(engine)
        engine.works_on("cmpl-alice-0", made=2)
        await receive()
        await send(START)
        await send(part(REPLY))
        await receive()

    exchange(app, engine, [{"type": "http.disconnect"}])
    the_recorder().close()
    (row,) = recorded(prod)[1]
    assert (row["status"], row["output_length"]) == ("length", 3)


def test_in_front_of_an_unknown_server_it_says_so_and_begins_anew_when_it_knows_more(
    prod: Path,
) -> None:
    exchange(answering(START, part(REPLY[:50], more=True), part(REPLY[50:])))
    (row,) = rows_of(prod, 1)
    assert (row["input_length"], row["output_length"], row["status"]) == (10, 3, "length")
    assert not {"hash_ids", "ttft_s"} & set(row)
    header = recorded(prod)[0]
    assert header["lacks"] == ["queue_s", "prefill_s", "decode_s", "hash_ids", "aborted"]
    assert (header["model"], header["block_size"], header["hash_scope"]) == (None, None, None)
    engine = Engine()
    exchange(answering(START, part(REPLY), engine=engine), engine)
    the_recorder().close()
    header, (row,) = recorded(prod.with_name("prod.1.jsonl"))
    assert (header["block_size"], len(row["hash_ids"])) == (BLOCK, 2)
