"""What the recorder holds: bounded in bytes that are really taken, and never searched."""

from __future__ import annotations

import gc
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.recorder_parts import NOW_S, Reported, asked, recording
from tuner.recorder.blocks import KeyedHashes
from tuner.recorder.messages import (
    Asked,
    Ended,
    Finished,
    Left,
    Message,
    Replied,
    Unfinished,
    Usage,
    weight_bytes,
)
from tuner.recorder.open_prompts import MAX_OPEN_BYTES, OpenPrompts

HASHES = KeyedHashes(bytes(range(32)))


@contextmanager
def measured() -> Iterator[Callable[[], int]]:
    """Give the bytes that were taken since the block began and are still held."""
    gc.collect()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def prompt(name: str, number: int, length: int, first: int = 0) -> Asked:
    return Asked(name, number, array("I", [first] * length), 4)


# --- the same answers as by searching ---------------------------------------------------


@dataclass
class _Listed:
    number: int
    length: int | None
    ids: array[int] | None
    answers: int


class Searched:
    """The rule in its plainest words: a list for each id, searched at every step."""

    def __init__(self) -> None:
        self.open: dict[str, list[_Listed]] = {}

    def add(self, one: Asked, ids: array[int] | None) -> None:
        """Take a prompt."""
        length = None if one.token_ids is None else len(one.token_ids)
        listed = _Listed(one.number, length, ids, one.answers)
        self.open.setdefault(one.request_id, []).append(listed)

    def answered(self, name: str, length: int) -> array[int] | None:
        """Return the blocks of the prompt that was answered."""
        fitting = [one for one in self.open.get(name, []) if one.length in {None, length}]
        if not fitting:
            return None
        first = fitting[0]
        first.answers -= 1
        if not first.answers:
            self.open[name].remove(first)
        if any(one.ids != first.ids for one in fitting):
            for one in fitting:
                one.ids = None
        return first.ids

    def close(self, name: str, number: int) -> None:
        """Let go of one prompt."""
        self.open[name] = [one for one in self.open.get(name, []) if one.number != number]


prompts = st.one_of(st.none(), st.lists(st.integers(0, 1), min_size=3, max_size=9))
names = st.sampled_from("ab")
steps = st.one_of(
    st.tuples(st.just("ask"), names, prompts, st.integers(1, 2)),
    st.tuples(st.just("answer"), names, st.integers(3, 9)),
    st.tuples(st.just("close"), names, st.integers(0, 20)),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=30))
def test_prompts_are_found_as_by_searching_all_of_them(shown: list[tuple[object, ...]]) -> None:
    quick, searched = OpenPrompts(), Searched()
    for number, step in enumerate(shown):
        match step:
            case ("ask", str(name), token_ids, int(answers)):
                assert token_ids is None or isinstance(token_ids, list)
                one = asked(name, token_ids, number, answers)
                ids = None if one.token_ids is None else HASHES.block_ids(one.token_ids, 4)
                quick.add(one, ids)
                searched.add(one, ids)
            case ("answer", str(name), int(length)):
                assert quick.answered(name, length) == searched.answered(name, length)
            case ("close", str(name), int(closed)):
                quick.close([(name, closed)])
                searched.close(name, closed)
    assert len(quick) == sum(map(len, searched.open.values()))
    for name, still in searched.open.items():
        for listed in still:
            found = quick.find(name, listed.number)
            assert found is not None
            assert quick.blocks(found) == listed.ids
            quick.close([(name, listed.number)])
    assert (len(quick), quick.held_bytes) == (0, 0)


@pytest.mark.parametrize("same_prompt", [True, False])
def test_one_id_for_very_many_prompts_costs_no_more_than_one_each(same_prompt: bool) -> None:
    count, opened = 40_000, OpenPrompts()
    began_s = time.process_time()
    for number in range(count):
        ids = array("q", [0 if same_prompt else number])
        opened.add(prompt("constant", number, 4), ids)
        if number % 2:
            opened.answered("constant", 4)
    for number in range(0, count, 4):
        opened.close([("constant", number)])
    while len(opened):
        opened.answered("constant", 4)
    assert time.process_time() - began_s < 10


# --- bounds ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "blocks", "name"),
    [(1300, 8192, "cmpl-{}"), (60_000, 4, "cmpl-{}"), (2500, 4, "cmpl-{}-" + "x" * 60_000)],
)
def test_prompts_that_are_never_answered_take_no_more_than_their_bound(
    count: int, blocks: int, name: str
) -> None:
    with measured() as held:
        opened = OpenPrompts()
        for number in range(count):
            one = prompt(name.format(number), number, 3)
            opened.add(one, array("q", [number]) * blocks)
        assert len(opened) < count
        assert opened.held_bytes <= MAX_OPEN_BYTES
        assert 0.8 * MAX_OPEN_BYTES < held() < 1.1 * MAX_OPEN_BYTES
    # The oldest went.
    assert opened.find(name.format(0), 0) is None
    assert opened.find(name.format(count - 1), count - 1) is not None


def test_the_answer_to_a_prompt_that_was_let_go_is_not_taken_for_anothers() -> None:
    opened = OpenPrompts(most_bytes=3000)
    for number in range(3):
        opened.add(prompt("a", number, 4), array("q", [number]))
    assert len(opened) == 2
    assert [opened.answered("a", 4) for _ in range(3)] == [None] * 3


def of_each_kind(number: int) -> list[Message]:
    """Return messages as they come from a server, none of whose parts another one holds."""
    name, at_s = f"cmpl-{number}-0", NOW_S + number
    far = 1000 + number
    of_them = [
        Reported(f"{name}-{each}", far, far + 1, at_s, far + 2, at_s + 1, at_s + 2, at_s + 3)
        for each in range(8)
    ]
    return [
        Asked(name, far, array("I", bytes(400 * (number % 50))), 16, f"\0{number}" * 20),
        Finished(at_s, of_them),
        Left(name, far, at_s, [Unfinished(at_s + 1, far + 1, far + 2, far + 3, at_s)]),
        Replied(at_s, at_s + 1, at_s + 2, [(name, far)], Usage(far + 1, far + 2, None, "stop")),
        Ended([(name, far)]),
    ]


def taken_ratio(kind: int) -> float:
    """Return what five hundred messages take in memory, over what they are weighed as."""
    queue: SimpleQueue[tuple[Message, int]] = SimpleQueue()
    with measured() as held:
        weight = 0
        for number in range(500):
            message = of_each_kind(number)[kind]
            weight += weight_bytes(message)
            queue.put((message, weight_bytes(message)))
            del message
        return held() / weight


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(5))
def test_messages_are_weighed_as_what_they_take(kind: int) -> None:
    # What else the process does meanwhile only adds.
    assert 0.3 < min(taken_ratio(kind) for _ in range(3)) < 1.2


def test_a_recording_that_ended_holds_no_prompt(tmp_path: Path) -> None:
    """Its server may serve for months after a disk was full."""
    with recording(tmp_path / "prod.jsonl") as recorder:
        recorder.offer(asked("open", [1] * 400))
        deadline_s = time.monotonic() + 20
        while not len(recorder.join.open) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(recorder.join.open) == 1
        recorder.stop("the disk is full")
        while len(recorder.join.open) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert (len(recorder.join.open), recorder.join.open.held_bytes) == (0, 0)
