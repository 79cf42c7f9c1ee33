"""Blocks are what a predicted replay is made of, and those that tell most are taken first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.step_parts import LINEAR, columns
from support.traffic import kept, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.replay.plan import ReplayPlan
from tuner.shadow.design import Block, choose, instants_s, spreads, wanted
from tuner.shadow.speed import MoodSpreads, Uncertainty, Visited
from tuner.shadow.step_model import TERMS
from tuner.stats import Floats
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace

LIMITS = EngineLimits(8, 512)
TRAFFIC = steady(120, per_s=60.0, prompt=300, output=40)
LOG = replay_toy(TRAFFIC, LIMITS, plan=ReplayPlan(keep_steps=True))
STEPS = kept(LOG)
CALM = MoodSpreads(segment=0.01, grows=0.01, slow=0.005, like_steps=0.01)


def batches(seqs: int, prefill: int, steps: int = 20) -> StepColumns:
    each = np.ones(steps)
    return columns(
        duration_s=0.01 * each,
        decode_seqs=seqs * each,
        prefill_tokens=prefill * each,
        decode_context_tokens=100.0 * seqs * each,
        prefill_context_tokens=50.0 * prefill * each,
    )


def visited(seqs: int, prefill: int, steps: int = 20) -> Visited:
    return Visited.of(LINEAR, batches(seqs, prefill, steps))


def open_in_terms(*names: str) -> Uncertainty:
    """Return an uncertainty in which terms are off, each by itself, and factors by nothing."""
    table = np.zeros((len(TERMS), len(TERMS) + LINEAR.factors.table.size))
    np.fill_diagonal(table, [0.1 * (name in names) for name in TERMS])
    return Uncertainty.of(table)


@given(st.floats(0.05, 0.95), st.integers(1, 64))
def test_a_block_is_what_ran_at_its_instant(share: float, steps: int) -> None:
    at_s = share * float(LOG.timelines.last_s.max())
    block = Block.at(LIMITS, TRAFFIC, LOG.timelines, at_s, steps)
    if block is None:
        return
    assert len(block.rows) <= LIMITS.max_num_seqs
    for row, prompt in zip(block.rows, block.prompt_tokens, strict=True):
        assert LOG.timelines.first_s[row] <= at_s < LOG.timelines.last_s[row]
        # Its context by then; what it answers while others come in is taken off.
        assert prompt <= TRAFFIC.prompt_tokens[row] + TRAFFIC.output_tokens[row]
    made = block.of(TRAFFIC)
    longest = int((TRAFFIC.prompt_tokens + TRAFFIC.output_tokens).max())
    assert int((made.prompt_tokens + made.output_tokens).max()) <= longest


def test_all_of_a_block_run_at_once_however_long_they_take_to_come_in() -> None:
    """Eight prompts of 300 tokens take five steps of 512: the first must outlast them."""
    block = Block.burst(LIMITS, TRAFFIC, np.arange(8), steps=4, share=1.0)
    replayed = replay_toy(block.of(TRAFFIC), LIMITS, plan=ReplayPlan(keep_steps=True))
    assert float(kept(replayed).decode_seqs.max()) == 8


def test_behind_a_block_comes_what_comes_next_and_no_more_than_its_steps_hold() -> None:
    at_s = float(np.median(LOG.timelines.last_s))
    block = Block.at(LIMITS, TRAFFIC, LOG.timelines, at_s, 4)
    assert block is not None
    followed = block.followed(TRAFFIC, LOG.timelines, at_s, 1.0, 2.0, 4)
    more = followed.rows[len(block.rows) :]
    assert more
    assert not set(more) & set(block.rows)
    assert sum(TRAFFIC.prompt_tokens[list(more)]) <= 4 * LIMITS.max_num_batched_tokens
    assert min(followed.due_s[len(block.rows) :]) >= 1.0
    assert all(not LOG.timelines.first_s[row] <= at_s for row in more)


def test_prompts_that_share_a_prefix_still_do_in_a_block() -> None:
    hashed = Trace(
        due_s=np.zeros(2),
        prompt_tokens=np.array([64, 64]),
        output_tokens=np.array([8, 8]),
        hashes=HashIds.from_rows([[1, 2], [1, 3]], 32),
    )
    whole = Block.burst(LIMITS, hashed, np.arange(2), steps=2, share=1.0).of(hashed)
    assert whole.hashes is not None
    assert Block.burst(LIMITS, hashed, np.arange(2), 2, share=0.5).of(hashed).hashes is None


def test_what_is_visited_weighs_like_batches_by_their_time() -> None:
    found = Visited.of(LINEAR, STEPS)
    has_batch = (STEPS.decode_seqs + STEPS.prefill_tokens) > 0
    assert found.seconds.sum() == pytest.approx(LINEAR.predict_s(STEPS)[has_batch].sum())
    shares = found.design[:, : len(TERMS)]
    assert shares.sum(axis=1) == pytest.approx(1.0)
    # Twice the base makes all of it longer by the base's share.
    bases_s = LINEAR.base_s * has_batch.sum()
    assert found.mean[0] == pytest.approx(bases_s / found.seconds.sum(), rel=1e-6)


def test_the_block_that_shows_what_is_open_is_chosen_first() -> None:
    """Decodes are known and prompts are not: two settings that differ by prompts differ."""
    aims = wanted([visited(8, 0), visited(8, 400)])
    blocks = [visited(8, 0), visited(1, 0), visited(0, 400)]
    prompts_open = open_in_terms("prefill_base_s")
    assert choose(prompts_open, CALM, aims, blocks, 0.1) == [2]
    decodes_open = open_in_terms("seq_s")
    assert choose(decodes_open, CALM, aims, blocks, 0.1) == [0]


def test_of_two_that_tell_the_same_the_shorter_is_chosen() -> None:
    aims = wanted([visited(8, 0), visited(8, 400)])
    blocks = [visited(8, 400, steps=200), visited(8, 400, steps=30)]
    assert choose(open_in_terms("prefill_base_s"), CALM, aims, blocks, 0.1) == [1]


def test_more_time_chooses_more_each_once_and_never_nothing() -> None:
    aims = wanted([visited(8, 0), visited(8, 400)])
    blocks = [visited(8, 400, steps) for steps in (20, 30, 40, 50)]
    table = open_in_terms(*TERMS)
    found = [choose(table, CALM, aims, blocks, time_s) for time_s in (0.0, 0.3, 60.0)]
    assert len(found[0]) == 1
    assert len(found[0]) <= len(found[1]) <= len(found[2])
    assert sorted(found[2]) == [0, 1, 2, 3]


def test_how_two_settings_differ_is_known_better_than_each() -> None:
    """What all have in common cancels."""
    every = open_in_terms(*TERMS)
    found = spreads(every, np.array([visited(8, 400).mean - visited(8, 400).mean]))
    assert found.tolist() == [0.0]
    assert float(spreads(every, np.array([visited(8, 400).mean]))[0]) > 0.02


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30), st.integers(1, 8))
def test_instants_lie_in_equal_shares_of_the_busy_time(busy: list[float], count: int) -> None:
    busy_s: Floats = np.array(busy)
    end_s = busy_s.cumsum()
    found = instants_s(end_s, busy_s, count, np.random.default_rng(0))
    assert len(found) == count
    assert found == sorted(found)
    assert all(0 <= at_s <= end_s[-1] for at_s in found)
