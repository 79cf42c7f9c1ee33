"""What the Engine protocol promises, to be inherited by the tests of every engine."""

# ruff: noqa: D102 - a test's name is its sentence, in a class too

from __future__ import annotations

from dataclasses import replace

import pytest

from support.toy import ToySource
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Engine, Step
from tuner.errors import EngineError
from tuner.traffic.prompts import TokenPrompt

CEILING = EngineLimits(8, 256)
UNKNOWN_ROW = 999


def prompt(row: int, tokens: int = 20) -> TokenPrompt:
    """Return a prompt that shares no token with another row's."""
    return TokenPrompt([11 + row] * tokens)


def drain(engine: Engine) -> list[Step]:
    """Return all steps until there is no work, of a bounded number."""
    taken: list[Step] = []
    for _ in range(2000):
        if not engine.has_work():
            return taken
        taken.append(engine.step())
    pytest.fail("the engine still has work after 2,000 turns")


def mixed(engine: Engine) -> None:
    """Queue requests of mixed lengths, more than run at once."""
    engine.set_limits(EngineLimits(4, 50))
    for row in range(9):
        engine.add(row, prompt(row, 10 + 17 * (row % 4)), 1 + 12 * (row % 3))


def answered(steps: list[Step]) -> dict[int, int]:
    """Count the tokens of each row."""
    tokens: dict[int, int] = {}
    for out in (out for step in steps for out in step.emitted):
        tokens[out.row] = tokens.get(out.row, 0) + out.tokens
    return tokens


def firsts(steps: list[Step]) -> list[int]:
    """Return the rows in the order of their first tokens."""
    return list(dict.fromkeys(out.row for step in steps for out in step.emitted))


def cached(steps: list[Step]) -> int:
    """Count the prompt tokens that came from the cache."""
    return sum(step.batch.cached_tokens for step in steps if step.batch)


def like_the_toys(engine: Engine) -> bool:
    """Tell whether a toy with as many blocks makes the same batches."""
    info = engine.info
    like = ToySource(block_size=info.block_size, num_blocks=info.num_blocks)
    schedules = []
    for one in (like.start({}, CEILING), engine):
        mixed(one)
        steps = [step for step in drain(one) if step.batch]
        schedules.append([(s.batch, s.running, s.waiting, list(s.emitted)) for s in steps])
    return schedules[0] == schedules[1]


class EngineContract:
    """Inherited with a fixture `engine`, which starts at CEILING and is shared by its tests."""

    @pytest.fixture(autouse=True)
    def _idle_and_at_the_ceiling(self, engine: Engine) -> None:
        drain(engine)
        engine.set_limits(CEILING)
        engine.reset()

    def test_it_says_what_it_is(self, engine: Engine) -> None:
        info = engine.info
        assert info.ceiling == CEILING
        assert info.can_change_limits
        assert min(info.vocab_size, info.max_model_len, info.block_size, info.num_blocks) > 1

    def test_each_request_gets_exactly_its_tokens(self, engine: Engine) -> None:
        wanted = {row: 1 + 3 * row for row in range(6)}
        for row, tokens in wanted.items():
            engine.add(row, prompt(row), tokens)
        steps = drain(engine)
        assert answered(steps) == wanted
        lasts = [out.row for step in steps for out in step.emitted if out.is_last]
        assert sorted(lasts) == sorted(wanted)

    def test_no_row_is_heard_of_after_its_last_token(self, engine: Engine) -> None:
        for row in range(4):
            engine.add(row, prompt(row), 2 + row)
        ended: set[int] = set()
        for out in (out for step in drain(engine) for out in step.emitted):
            assert out.row not in ended
            if out.is_last:
                ended.add(out.row)

    def test_requests_are_admitted_in_the_order_they_came(self, engine: Engine) -> None:
        engine.set_limits(EngineLimits(2, 64))
        order = [3, 0, 5, 1, 4]
        for row in order:
            engine.add(row, prompt(row, 30), 4)
        assert firsts(drain(engine)) == order

    @pytest.mark.parametrize("cap", [1, 2, 5])
    def test_no_more_run_than_the_cap_allows(self, engine: Engine, cap: int) -> None:
        engine.set_limits(EngineLimits(cap, 256))
        for row in range(9):
            engine.add(row, prompt(row), 6)
        steps = drain(engine)
        assert max(step.running for step in steps) == cap
        assert max(step.waiting for step in steps) == 9 - cap
        assert max(s.batch.decode_seqs + s.batch.prefill_seqs for s in steps if s.batch) == cap

    @pytest.mark.parametrize("budget", [8, 32, 200])
    def test_no_step_computes_more_tokens_than_the_budget(
        self, engine: Engine, budget: int
    ) -> None:
        engine.set_limits(EngineLimits(8, budget))
        for row in range(6):
            engine.add(row, prompt(row, 45), 5)
        steps = drain(engine)
        assert max(step.batch.tokens for step in steps if step.batch) == budget
        assert sum(step.batch.prefill_tokens for step in steps if step.batch) == 6 * 45

    def test_a_step_counts_decodes_and_contexts_as_they_are(self, engine: Engine) -> None:
        engine.add(0, prompt(0, 20), 3)
        batches = [step.batch for step in drain(engine) if step.batch]
        assert [(b.prefill_tokens, b.prefill_seqs, b.decode_seqs) for b in batches] == [
            (20, 1, 0),
            (0, 0, 1),
            (0, 0, 1),
        ]
        assert [b.prefill_context_tokens for b in batches] == [20 * 21 // 2, 0, 0]
        assert [b.decode_context_tokens for b in batches] == [0, 21, 22]
        assert [b.is_decode_only for b in batches] == [False, True, True]

    def test_time_passes_in_every_step_and_usage_is_a_ratio(self, engine: Engine) -> None:
        for row in range(8):
            engine.add(row, prompt(row, 60), 10)
        steps = drain(engine)
        # An engine that schedules ahead fills its queue in turns without a batch, and these
        # take a shadow no time: what they take is part of the step that completes.
        timed = [step for step in steps if step.batch or not engine.info.asynchronous]
        assert all(step.duration_s > 0 for step in timed)
        assert all(step.duration_s >= 0 for step in steps)
        assert all(0 <= step.kv_usage_ratio <= 1 for step in steps)
        assert max(step.kv_usage_ratio for step in steps) > 0

    def test_limits_do_not_change_while_it_is_busy(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 4)
        with pytest.raises(EngineError, match="idle"):
            engine.set_limits(EngineLimits(2, 64))
        first = engine.step()
        with pytest.raises(EngineError, match="idle"):
            engine.set_limits(EngineLimits(2, 64))
        assert answered([first, *drain(engine)]) == {0: 4}

    @pytest.mark.parametrize(
        "above",
        [
            replace(CEILING, max_num_seqs=CEILING.max_num_seqs + 1),
            replace(CEILING, max_num_batched_tokens=CEILING.max_num_batched_tokens + 1),
        ],
        ids=str,
    )
    def test_limits_never_go_above_the_start_up_values(
        self, engine: Engine, above: EngineLimits
    ) -> None:
        with pytest.raises(EngineError, match="above"):
            engine.set_limits(above)

    def test_limits_go_down_and_up_again(self, engine: Engine) -> None:
        peaks = []
        for cap in (1, 8, 2):
            engine.set_limits(EngineLimits(cap, 256))
            for row in range(8):
                engine.add(row, prompt(row), 4)
            peaks.append(max(step.running for step in drain(engine)))
        assert peaks == [1, 8, 2]

    def test_the_cache_is_not_cleared_while_it_is_busy(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 2)
        with pytest.raises(EngineError, match="idle"):
            engine.reset()

    def test_only_shared_prefixes_hit_the_cache(self, engine: Engine) -> None:
        block = engine.info.block_size
        shared = list(range(20, 20 + 3 * block))
        engine.set_limits(EngineLimits(1, 256))
        for row in range(3):
            engine.add(row, prompt(row, 3 * block), 2)
        assert cached(drain(engine)) == 0
        engine.add(3, TokenPrompt([*shared, 7]), 2)
        assert cached(drain(engine)) == 0
        engine.add(4, TokenPrompt([*shared, 8]), 2)
        assert cached(drain(engine)) == 3 * block

    def test_a_prompt_seen_before_still_computes_its_last_block(self, engine: Engine) -> None:
        block = engine.info.block_size
        engine.add(0, prompt(0, 2 * block), 1)
        drain(engine)
        engine.add(0, prompt(0, 2 * block), 1)
        steps = drain(engine)
        assert cached(steps) == block
        assert sum(step.batch.prefill_tokens for step in steps if step.batch) == block

    def test_a_reset_forgets_every_prefix(self, engine: Engine) -> None:
        tokens = prompt(0, 4 * engine.info.block_size)
        for _ in range(2):
            engine.add(0, tokens, 2)
            assert cached(drain(engine)) == 0
            engine.reset()

    def test_what_was_made_ready_goes_like_any_other_or_not_at_all(
        self, engine: Engine
    ) -> None:
        for row in range(3):
            engine.prepare(row, prompt(row), 4)
        assert not engine.has_work()
        engine.add(1, prompt(1), 4)
        assert answered(drain(engine)) == {1: 4}
        engine.reset()
        # Forgotten: the same row is another request now.
        engine.add(2, prompt(2), 7)
        assert answered(drain(engine)) == {2: 7}

    def test_aborting_what_waits_and_what_runs_leaves_it_idle(self, engine: Engine) -> None:
        engine.set_limits(EngineLimits(2, 256))
        for row in range(4):
            engine.add(row, prompt(row), 50)
        steps = [engine.step(), engine.step()]
        assert max(step.running for step in steps) == 2
        engine.abort([0, 3, UNKNOWN_ROW])
        left = firsts(drain(engine))
        assert set(left) == {1, 2}
        assert not engine.has_work()
        engine.set_limits(EngineLimits(1, 64))

    def test_aborting_everything_at_once_leaves_it_idle(self, engine: Engine) -> None:
        for row in range(3):
            engine.add(row, prompt(row), 40)
        engine.step()
        engine.abort([0, 1, 2])
        assert answered(drain(engine)) == {}
        engine.reset()

    def test_aborting_what_it_never_saw_changes_nothing(self, engine: Engine) -> None:
        engine.abort([UNKNOWN_ROW])
        assert not engine.has_work()
        engine.abort([])

    def test_an_aborted_row_may_come_again(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 30)
        engine.step()
        engine.abort([0])
        drain(engine)
        engine.add(0, prompt(0), 3)
        assert answered(drain(engine)) == {0: 3}

    def test_a_step_without_work_is_refused(self, engine: Engine) -> None:
        assert not engine.has_work()
        with pytest.raises(EngineError, match="without work"):
            engine.step()


class ClosingContract:
    """Inherited with a fixture `engine` of its own, since these tests end it."""

    def test_closing_while_busy_and_then_again_is_closing_once(self, engine: Engine) -> None:
        engine.add(0, prompt(0), 5)
        engine.step()
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            engine.step()
