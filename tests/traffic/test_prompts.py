"""Prompts share tokens exactly where the recording shared hashes, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.schedule_cases import random_case
from tuner.engine.protocol import Prompt
from tuner.errors import UsageError
from tuner.traffic.answers import held_answers
from tuner.traffic.prefixes import HashIds
from tuner.traffic.prompts import PromptSource, TokenPrompt
from tuner.traffic.traces import Trace, Turns


def a_trace(prompt: list[int], hashes: HashIds | None = None) -> Trace:
    n = len(prompt)
    return Trace(
        due_s=np.arange(n, dtype=np.float64),
        prompt_tokens=np.array(prompt, np.int64),
        output_tokens=np.ones(n, np.int64),
        hashes=hashes,
    )


vocabularies = st.integers(min_value=12, max_value=200_000)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 200), min_size=2, max_size=12),
    vocabularies,
    st.integers(0, 1 << 70),
)
def test_unhashed_prompts_differ_from_the_first_token_on(
    prompt: list[int], vocab_size: int, seed: int
) -> None:
    source = PromptSource(a_trace(prompt), vocab_size, seed)
    tokens = [source.tokens(i) for i in range(len(prompt))]
    assert [len(t) for t in tokens] == prompt
    assert all(10 <= token < vocab_size for row in tokens for token in row)
    # A cache block holds 16 tokens or more; four digits tell twelve prompts apart in base 2.
    heads = [tuple(row[:16]) for row in tokens if len(row) >= 4]
    assert len(set(heads)) == len(heads)
    if vocab_size >= 10 + len(prompt):
        assert len({row[0] for row in tokens}) == len(tokens)
    again = PromptSource(a_trace(prompt), vocab_size, seed)
    assert [again.tokens(i) for i in range(len(prompt))] == tokens


@st.composite
def hashed(draw: st.DrawFn, block_sizes: tuple[int, ...] = (1, 4, 16, 48)) -> Trace:
    """Draw requests with chained ids, as real stores hand them out, rounded up or down."""
    block_size, is_ceil = draw(st.sampled_from(block_sizes)), draw(st.booleans())
    chains: dict[tuple[int, ...], int] = {}
    prompt = draw(st.lists(st.integers(1, 150), min_size=2, max_size=8))
    rows = []
    for tokens in prompt:
        count = -(-tokens // block_size) if is_ceil else tokens // block_size
        path = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
        rows.append(
            [chains.setdefault(tuple(path[: k + 1]), len(chains)) for k in range(count)]
        )
    return a_trace(prompt, HashIds.from_rows(rows, block_size))


@given(hashed(), st.integers(1000, 200_000))
def test_two_prompts_agree_exactly_on_their_common_blocks(
    trace: Trace, vocab_size: int
) -> None:
    assert trace.hashes is not None
    source = PromptSource(trace, vocab_size)
    for a in range(len(trace)):
        for b in range(a):
            ids = list(zip(trace.hashes.row(a), trace.hashes.row(b), strict=False))
            common = next((k for k, (x, y) in enumerate(ids) if x != y), len(ids))
            shortest = int(min(trace.prompt_tokens[a], trace.prompt_tokens[b]))
            shared = min(common * trace.hashes.block_size, shortest)
            left, right = source.tokens(a), source.tokens(b)
            assert left[:shared] == right[:shared]
            assert left[: shared + 16] != right[: shared + 16] or shortest < shared + 16


def test_a_partial_last_block_begins_like_the_whole_block() -> None:
    hashes = HashIds.from_rows([(7, 8), (7, 8)], block_size=16)
    source = PromptSource(a_trace([20, 32], hashes), vocab_size=1000)
    assert source.tokens(1)[:20] == source.tokens(0)


def test_tokens_without_an_id_belong_to_one_request_alone() -> None:
    hashes = HashIds.from_rows([(7,), (7,)], block_size=16)
    source = PromptSource(a_trace([20, 20], hashes), vocab_size=1000)
    first, second = source.tokens(0), source.tokens(1)
    assert first[:16] == second[:16]
    assert first[16] != second[16]


def test_other_seeds_give_other_tokens() -> None:
    trace = a_trace([64])
    assert PromptSource(trace, 1000, 0).tokens(0) != PromptSource(trace, 1000, 1).tokens(0)


def test_special_ids_never_occur_and_a_vocabulary_of_them_is_refused() -> None:
    source = PromptSource(a_trace([500]), vocab_size=20)
    assert set(source.tokens(0)) == set(range(10, 20))
    with pytest.raises(UsageError, match="at least 2 usable token ids, got 11"):
        PromptSource(a_trace([1]), vocab_size=11)


def test_tokens_are_spread_evenly_over_the_vocabulary() -> None:
    # Seeded; 5 sigma of a binomial with n = 100,000 and p = 1/90 is 166.
    tokens = PromptSource(a_trace([100_000]), vocab_size=100).tokens(0)
    counts = np.bincount(tokens, minlength=100)[10:]
    assert np.abs(counts - 100_000 / 90).max() < 166


def keys_say_where_tokens_agree(prompts: Sequence[Prompt], block_size: int) -> None:
    """Check that two prompts share a block's key exactly if they agree up to its end."""
    keys = [prompt.block_keys(block_size) for prompt in prompts]
    tokens = [prompt.token_ids() for prompt in prompts]
    assert [len(row) for row in tokens] == [len(prompt) for prompt in prompts]
    assert [len(row) for row in keys] == [len(row) // block_size for row in tokens]
    for a in range(len(prompts)):
        assert len(set(keys[a])) == len(keys[a])
        for b in range(a):
            ends = [block_size * (k + 1) for k in range(min(len(keys[a]), len(keys[b])))]
            agree = [tokens[a][:end] == tokens[b][:end] for end in ends]
            assert [x == y for x, y in zip(keys[a], keys[b], strict=False)] == agree
            # And no block is taken for one in another place.
            assert len(set(keys[a]) & set(keys[b])) == sum(agree)


@pytest.mark.slow
# Recorded blocks from four tokens up hold their whole id at this vocabulary, and every engine
# block ends four tokens or more into a stretch: what differs then differs for certain.
@given(hashed(block_sizes=(4, 16, 48)), st.sampled_from([4, 16, 32]))
@settings(deadline=None)
def test_recorded_prompts_share_a_key_exactly_where_their_tokens_agree(
    trace: Trace, block_size: int
) -> None:
    source = PromptSource(trace, vocab_size=200_000)
    keys_say_where_tokens_agree([source.prompt(i) for i in range(len(trace))], block_size)


@given(st.lists(st.integers(1, 200), min_size=2, max_size=12), st.sampled_from([4, 16, 32]))
@settings(deadline=None)
def test_unhashed_prompts_share_no_key(prompt: list[int], block_size: int) -> None:
    source = PromptSource(a_trace(prompt), vocab_size=1000)
    prompts: list[Prompt] = [source.prompt(i) for i in range(len(prompt))]
    keys_say_where_tokens_agree(prompts, block_size)
    keys = [key for one in prompts for key in one.block_keys(block_size)]
    assert len(set(keys)) == len(keys)


def test_a_row_without_ids_among_hashed_ones_shares_no_key() -> None:
    hashes = HashIds.from_rows([(7, 8), (), (7, 9), ()], block_size=16)
    source = PromptSource(a_trace([40, 40, 32, 40], hashes), vocab_size=200_000)
    keys_say_where_tokens_agree([source.prompt(i) for i in range(4)], 8)
    assert not set(source.block_keys(1, 8)) & set(source.block_keys(3, 8))
    # Two blocks of eight lie in the shared id 7.
    assert len(set(source.block_keys(0, 8)) & set(source.block_keys(2, 8))) == 2


def test_ids_that_hash_alike_are_told_apart() -> None:
    ids = [(-1,), (-2,), (0,), (2**61 - 1,), (-(2**63),), (-1,)]
    source = PromptSource(a_trace([40] * 6, HashIds.from_rows(ids, 40)), 1000)
    keys = [tuple(source.block_keys(i, 20)) for i in range(6)]
    assert len(set(keys)) == 5
    assert keys[0] == keys[5]


def test_a_partial_last_block_shares_the_keys_of_the_whole_block() -> None:
    hashes = HashIds.from_rows([(7, 8), (7, 8)], block_size=16)
    source = PromptSource(a_trace([20, 32], hashes), vocab_size=1000)
    assert source.block_keys(0, 4) == source.block_keys(1, 4)[:5]


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=2, max_size=6),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_prompts_of_known_tokens_share_a_key_exactly_where_they_agree(
    rows: list[list[int]], block_size: int
) -> None:
    keys_say_where_tokens_agree([TokenPrompt(row) for row in rows], block_size)


@pytest.mark.slow
@given(hashed(block_sizes=(4, 16, 48)), st.sampled_from([4, 16, 32]))
@settings(deadline=None)
def test_a_prompt_keeps_its_pattern_of_keys_when_its_tokens_are_made(
    trace: Trace, block_size: int
) -> None:
    source = PromptSource(trace, vocab_size=200_000)
    recorded = [source.prompt(i) for i in range(len(trace))]
    made = [TokenPrompt(prompt.token_ids()) for prompt in recorded]
    assert pattern(recorded, block_size) == pattern(made, block_size)


def pattern(prompts: Sequence[Prompt], block_size: int) -> list[list[int]]:
    """Return the keys numbered by when they first occur."""
    numbers: dict[bytes, int] = {}
    return [
        [numbers.setdefault(key, len(numbers)) for key in prompt.block_keys(block_size)]
        for prompt in prompts
    ]


# A session of three: prompt 40 and answer 20, then 12 more and 10, then 8 more. Blocks of 16.
SESSION = replace(
    a_trace([40, 72, 90]),
    output_tokens=np.array([20, 10, 5]),
    turns=Turns(np.array([-1, 0, 1]), np.zeros(3)),
)
IDS = [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5)]


def hashed_session(rows: Sequence[Sequence[int]] = IDS) -> Trace:
    return replace(SESSION, hashes=HashIds.from_rows(rows, block_size=16))


def answered(trace: Trace, vocab_size: int = 200_000) -> PromptSource:
    """Return prompts of a replay in which each answer was tokens of its own."""
    source = PromptSource(trace, vocab_size)
    source.begin(turns_wait=True)
    for row, tokens in enumerate(trace.output_tokens.tolist()):
        for at in range(tokens):
            source.answered(row, [vocab_size + 1000 * row + at])
    return source


@pytest.mark.parametrize("trace", [SESSION, hashed_session()], ids=["lengths", "hashes"])
def test_a_next_turn_begins_with_the_turn_before_and_its_real_answer(trace: Trace) -> None:
    source = answered(trace)
    first, second, third = (source.tokens(row) for row in range(3))
    assert second[:40] == first
    assert second[40:60] == [200_000 + at for at in range(20)]
    assert third[:72] == second
    assert third[72:82] == [201_000 + at for at in range(10)]
    assert [len(prompt) for prompt in (first, second, third)] == [40, 72, 90]
    keys = source.block_keys(2, 4)
    assert keys[:18] == source.block_keys(1, 4)
    answer = [source.prompt(1).answer_key(1, end) for end in (76, 80)]
    assert keys[18:20] == answer
    # Nothing of it is left to a replay in which turns do not wait, nor to the next one.
    source.begin(turns_wait=False)
    assert source.tokens(2) == PromptSource(trace, 200_000).tokens(2)
    source.begin(turns_wait=True)
    assert source.tokens(1)[:40] == first
    assert max(source.tokens(1)) < 200_000


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        pytest.param([(1, 2), (1, 8, 9, 10), (1, 8, 9, 10, 5)], [0, 16, 82], id="another"),
        pytest.param([(1, 2), (7, 8, 9, 10), (1, 2, 3, 4, 5)], [0, 0, 0], id="neither"),
    ],
)
def test_ids_that_say_otherwise_are_believed(
    rows: list[tuple[int, ...]], held: list[int]
) -> None:
    trace = hashed_session(rows)
    found = held_answers(trace)
    assert (found.held.tolist() if found else [0, 0, 0]) == held
    source = answered(trace)
    assert max(source.tokens(1)) < 200_000


def test_a_block_that_stands_elsewhere_too_holds_no_answer() -> None:
    turns = Turns(np.array([-1, 0, -1]), np.zeros(3))
    # The third begins like the second and waits for nobody: it cannot know the answer.
    other = replace(hashed_session([(1, 2), (1, 2, 3, 4), (1, 2, 3, 9, 5)]), turns=turns)
    found = held_answers(other)
    assert found is None
    source = answered(other)
    assert source.tokens(1)[:48] == source.tokens(2)[:48]


def test_of_two_next_turns_that_differ_in_the_answer_one_holds_it() -> None:
    turns = Turns(np.array([-1, 0, 0]), np.zeros(3))
    trace = replace(
        hashed_session([(1, 2), (1, 2, 3, 4), (1, 2, 7, 8, 5)]),
        turns=turns,
        prompt_tokens=np.array([32, 72, 90]),
    )
    found = held_answers(trace)
    assert found is not None
    assert found.held.tolist() == [0, 52, 32]
    keys_say_where_tokens_agree([answered(trace).prompt(i) for i in range(3)], 4)


def test_too_short_a_turn_holds_no_answer_but_what_its_ids_share() -> None:
    trace = replace(hashed_session(), prompt_tokens=np.array([40, 72, 81]))
    found = held_answers(trace)
    assert found is not None
    assert found.held.tolist() == [0, 60, 64]
    source = answered(trace)
    assert source.tokens(2)[:64] == source.tokens(1)[:64]
    assert source.tokens(2)[64:] != source.tokens(1)[64:81]


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_prompts_with_answers_share_a_key_exactly_where_their_tokens_agree(
    first_seed: int,
) -> None:
    held = 0
    for seed in range(first_seed, first_seed + 100):
        trace = random_case(seed).trace
        if trace.turns is None or (trace.hashes is not None and trace.hashes.block_size < 4):
            continue
        source = answered(trace)
        held += source._held is not None
        prompts = [source.prompt(row) for row in range(len(trace))]
        keys_say_where_tokens_agree(prompts, 8)
    assert held > 5
