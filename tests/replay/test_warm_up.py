"""Warming up computes every size of batch that a run may use, and says what it left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.live_parts import start_live
from support.toy import ToyEngine, ToySource
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch, Engine, Step
from tuner.replay.warm_up import decode_sizes, prefill_sizes, warm_up

CEILING = EngineLimits(96, 3000)


class Watched:
    """An engine of which each batch is kept."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self.batches: list[Batch] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self) -> Step:
        """Take a turn and keep its batch."""
        step = self._engine.step()
        if step.batch is not None:
            self.batches.append(step.batch)
        return step


def warmed(source: ToySource, captured: tuple[int, ...] = ()) -> Watched:
    engine = source.start({}, CEILING)
    engine._info = replace(engine.info, captured_sizes=captured)
    return Watched(engine)


def test_every_size_up_to_the_ceiling_is_computed_captured_ones_too() -> None:
    watched = warmed(ToySource(), captured=(1, 2, 4, 24, 96, 160))
    done = warm_up(watched)  # type: ignore[arg-type]  # stands in for the toy
    alone = [batch.decode_seqs for batch in watched.batches if batch.is_decode_only]
    for size in (1, 2, 4, 8, 16, 24, 32, 64, 96):
        assert alone.count(size) >= 2, size
    prompts = {b.prefill_tokens for b in watched.batches if not b.decode_seqs}
    assert prompts >= {128, 160, 256, 512, 1024, 2048, 3000}
    mixed = {b.tokens for b in watched.batches if b.decode_seqs and b.prefill_tokens}
    assert mixed >= {128, 256, 512, 1024, 2048}
    assert (done.seqs, done.tokens, done.mixed) == (96, 3000, 3000)
    assert done.missed(CEILING) == ""
    assert not watched.has_work()  # type: ignore[operator]


def test_what_the_time_or_the_cache_leaves_out_is_said() -> None:
    engine = ToySource().start({}, CEILING)
    none = warm_up(engine, budget_s=0.0)
    assert (none.seqs, none.tokens) == (1, 0)
    assert "batches of more than 1 sequences (of 96) and batches of more than 0 tokens" in (
        none.missed(CEILING)
    )
    small = ToySource(num_blocks=40, max_model_len=500).start({}, CEILING)
    done = warm_up(small)
    assert 16 <= done.seqs < 64
    assert f"more than {done.seqs} sequences (of 96)" in done.missed(CEILING)
    assert not small.has_work()


def test_a_budget_that_cannot_be_filled_is_not_tried() -> None:
    info = ToySource(max_model_len=100).start({}, EngineLimits(4, 2048)).info
    assert prefill_sizes(info)[-1] == 396
    assert decode_sizes(info) == [1, 2, 4]
    engine = ToySource(max_model_len=100).start({}, EngineLimits(4, 2048))
    assert warm_up(engine).missed(EngineLimits(4, 2048)) == ""


@pytest.mark.engine
@pytest.mark.model
def test_a_live_engine_is_warm_up_to_its_ceiling() -> None:
    engine: Engine = start_live(demo_engine_args(), EngineLimits(80, 1024))
    try:
        done = warm_up(engine, budget_s=120.0)
        assert (done.seqs, done.tokens) == (80, 1024)
        assert not engine.has_work()
    finally:
        engine.close()
