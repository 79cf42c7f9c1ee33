"""Rows out of what the two doors tell: hashes of blocks, and who belongs to whom."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from support.recorder_parts import NOW_S, Reported, asked, finished
from tuner.recorder.blocks import KeyedHashes
from tuner.recorder.join import Join
from tuner.recorder.messages import Left, Replied, Unfinished, Usage
from tuner.recorder.rows import Row

KEY_BYTES = bytes(range(32))
tokens = st.lists(st.integers(0, 3), max_size=60)


def common(one: Sequence[int], two: Sequence[int]) -> int:
    """Return how many leading elements are equal."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


@given(one=tokens, two=tokens, size=st.integers(1, 8))
def test_ids_are_equal_exactly_as_far_as_whole_blocks_are(
    one: list[int], two: list[int], size: int
) -> None:
    hashes = KeyedHashes(KEY_BYTES)
    ids = [list(hashes.block_ids(each, size)) for each in (one, two)]
    assert [len(each) for each in ids] == [len(one) // size, len(two) // size]
    shared = common(one, two) // size
    assert common(*ids) == shared
    assert not set(ids[0][shared:]) & set(ids[1][shared:])
    assert all(0 <= each < 1 << 63 for each in ids[0])


def test_long_prompts_are_hashed_in_turns_with_the_same_result() -> None:
    hashes, long = KeyedHashes(KEY_BYTES), list(range(16 * 300 + 5))
    whole = hashes.block_ids(long, 16)
    assert len(whole) == 300
    assert whole[:100] == hashes.block_ids(long[:1600], 16)


def test_another_key_adapter_or_tenant_shares_nothing() -> None:
    prompt = list(range(8))
    hashes, other = KeyedHashes(KEY_BYTES), KeyedHashes(bytes(32))
    of_each = [
        hashes.block_ids(prompt, 4),
        other.block_ids(prompt, 4),
        hashes.block_ids(prompt, 4, "adapter\0"),
        hashes.block_ids(prompt, 4, "\0tenant"),
    ]
    assert len({each for ids in of_each for each in ids}) == 8
    assert hashes.name("user-7") != other.name("user-7")
    assert hashes.scope != other.scope


def test_a_row_holds_what_the_engine_counted_and_what_follows_from_it() -> None:
    join = Join(KeyedHashes(KEY_BYTES))
    assert join.rows(asked("cmpl-7-0", list(range(10)))) == []
    (row,) = join.rows(finished(Reported("cmpl-7-0", num_cached_tokens=4)))
    assert row == Row(
        arrived_at_s=NOW_S - 2.0,
        input_length=10,
        output_length=3,
        status="length",
        e2e_s=2.0,
        ttft_s=1.0,
        cached_tokens=4,
        queue_s=0.25,
        prefill_s=0.5,
        decode_s=1.0,
        request_id=KeyedHashes(KEY_BYTES).name("cmpl-7-0"),
        hash_ids=list(KeyedHashes(KEY_BYTES).block_ids(list(range(10)), 4)),
    )


def test_times_of_what_never_took_place_are_left_out() -> None:
    never = Reported(
        "a",
        num_generation_tokens=0,
        queued_time=-50.0,
        prefill_time=0.0,
        decode_time=0.0,
        finish_reason="abort",
    )
    (row,) = Join(KeyedHashes(KEY_BYTES)).rows(finished(never))
    assert (row.queue_s, row.prefill_s, row.decode_s, row.ttft_s) == (None,) * 4
    assert (row.status, row.output_length, row.hash_ids) == ("abort", 0, None)


@given(st.permutations(range(5)))
def test_requests_get_their_own_blocks_in_whatever_order_they_end(order: list[int]) -> None:
    join = Join(KeyedHashes(KEY_BYTES))
    prompts = [[i] * (4 * i + 1) for i in range(5)]
    for i, prompt in enumerate(prompts):
        join.rows(asked(f"id-{i}", prompt, number=i))
    for i in order:
        (row,) = join.rows(finished(Reported(f"id-{i}", num_prompt_tokens=4 * i + 1)))
        assert row.hash_ids == list(KeyedHashes(KEY_BYTES).block_ids(prompts[i], 4))


def test_each_of_several_answers_is_a_row_with_the_blocks_of_the_prompt() -> None:
    join = Join(KeyedHashes(KEY_BYTES))
    join.rows(asked("a", list(range(10)), answers=2))
    rows = join.rows(finished(Reported("a"), Reported("a"), Reported("a")))
    assert rows[0].hash_ids == rows[1].hash_ids != []
    assert rows[2].hash_ids is None


def test_two_prompts_under_one_id_are_told_apart_by_length_or_not_at_all() -> None:
    join = Join(KeyedHashes(KEY_BYTES))
    join.rows(asked("a", [1] * 8, number=1))
    join.rows(asked("a", [2] * 9, number=2))
    (row,) = join.rows(finished(Reported("a", num_prompt_tokens=9)))
    assert row.hash_ids == list(KeyedHashes(KEY_BYTES).block_ids([2] * 9, 4))
    join.rows(asked("a", [3] * 8, number=3))
    rows = join.rows(finished(*[Reported("a", num_prompt_tokens=8)] * 2))
    assert [row.hash_ids for row in rows] == [None, None]


def test_a_client_that_leaves_is_a_row_unless_the_engine_was_done() -> None:
    join = Join(KeyedHashes(KEY_BYTES))
    join.rows(asked("a", list(range(10)), number=1))
    so_far = Unfinished(NOW_S - 3.0, 10, 2, 4, 0.5)
    left = Left("a", 1, NOW_S, [so_far])
    (row,) = join.rows(left)
    assert (row.status, row.input_length, row.output_length) == ("abort", 10, 2)
    assert (row.e2e_s, row.ttft_s, row.cached_tokens) == (3.0, 0.5, 4)
    assert len(row.hash_ids or []) == 2
    assert join.rows(left) == []
    join.rows(asked("a", list(range(10)), number=2))
    join.rows(finished(Reported("a")))
    assert join.rows(Left("a", 2, NOW_S, [so_far])) == []


def test_usage_of_a_response_counts_where_nothing_else_does() -> None:
    join = Join(KeyedHashes(KEY_BYTES))
    join.rows(asked("one", list(range(10)), number=1))
    join.rows(asked("two", list(range(10)), number=2, answers=2))
    usage = Usage(10, 3, None, "stop")
    replies = [
        Replied(NOW_S, 2.0, None, [("one", 1)], usage),
        Replied(NOW_S, 2.0, 0.5, [], usage),
        Replied(NOW_S, 2.0, None, [("two", 2)], usage),
        Replied(NOW_S, 2.0, None, [], None),
    ]
    rows = [row for reply in replies for row in join.rows(reply)]
    assert [len(row.hash_ids or []) for row in rows] == [2, 0]
    assert [row.ttft_s for row in rows] == [None, 0.5]
    assert join.unknown == 2
