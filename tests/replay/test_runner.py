"""One engine start for a whole sweep, and what happens where that cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.cuda_toy import NO_MEMORY, NO_WORKER, OUT_OF_MEMORY, CudaSource
from support.toy import ToySource
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, Failure

CEILING = EngineLimits(32, 2048)
SWEEP = [EngineLimits(cap, 1024) for cap in (1, 4, 16)]


def a_bench(source: ToySource, log: Path) -> tuple[EngineProcess, EngineRunner]:
    host = EngineProcess(source, log)
    bench = EngineRunner(host, {}, CEILING, seed=0)
    bench.use("all", steady(40, per_s=20.0))
    return host, bench


def test_a_sweep_costs_one_start_and_limits_above_the_ceiling_another(tmp_path: Path) -> None:
    host, bench = a_bench(ToySource(), tmp_path / "engine.log")
    with host:
        found = [bench.measure(["all"], limits, ReplayPlan(), ()) for limits in SWEEP]
        assert bench.starts == 1
        bench.measure(["all"], EngineLimits(64, 4096), ReplayPlan(), ())
    assert all(isinstance(m, Measurement) and m.completed == 40 for m in found)
    assert not bench.restarts_per_config
    assert bench.starts == 2
    assert bench.ceiling == EngineLimits(64, 4096)


def test_an_engine_that_hides_its_limits_is_started_at_each_configuration(
    tmp_path: Path,
) -> None:
    host, bench = a_bench(ToySource(hides_limits=True), tmp_path / "engine.log")
    with host:
        found = [bench.measure(["all"], limits, ReplayPlan(), ()) for limits in SWEEP]
        same = bench.measure(["all"], SWEEP[-1], ReplayPlan(), ())
    assert all(isinstance(m, Measurement) and m.running.max <= 16 for m in (*found, same))
    assert bench.restarts_per_config
    assert bench.starts == 1 + len(SWEEP)


def test_a_cold_start_is_warmed_up_no_further_than_its_limits(tmp_path: Path) -> None:
    host, bench = a_bench(ToySource(), tmp_path / "engine.log")
    with host:
        bench.ensure_started()
        bench.start_s, bench.warm_up_s = 20.0, 12.0
        whole_s = host.first_answer_s + 20.0
        assert bench.cold_start_s(CEILING) == pytest.approx(whole_s)
        assert bench.cold_start_s(EngineLimits(8, 512)) == pytest.approx(whole_s - 9.0)
        assert bench.cold_start_s(EngineLimits(16, 512)) == pytest.approx(whole_s - 6.0)
        # What a cold engine took says nothing of the one that measures.
        small = EngineLimits(8, 512)
        with bench.cold(small) as failure:
            bench.measure(["all"], small, ReplayPlan(), ())
        assert failure is None
        assert (bench.start_s, bench.warm_up_s) == (20.0, 12.0)


def test_a_death_is_an_outcome_and_the_next_configuration_gets_a_new_engine(
    tmp_path: Path,
) -> None:
    host, bench = a_bench(ToySource(dies_at=(4,)), tmp_path / "engine.log")
    with host:
        died = bench.measure(["all"], SWEEP[1], ReplayPlan(), ())
        lived = bench.measure(["all"], SWEEP[2], ReplayPlan(), ())
    assert isinstance(died, Failure)
    assert "died" in died.cause
    assert isinstance(lived, Measurement)
    assert bench.starts == 2


def test_windows_are_pooled_and_share_one_cut_rule(tmp_path: Path) -> None:
    host, bench = a_bench(ToySource(), tmp_path / "engine.log")
    bench.use("again", steady(40, per_s=20.0, seed=1))
    plan = ReplayPlan()
    with host:
        both = bench.measure(["all", "again"], SWEEP[2], plan, ())
        one = bench.measure(["all"], SWEEP[2], plan, ())
        assert isinstance(both, Measurement)
        assert isinstance(one, Measurement)
        cut = CutRule(max_clock_s=1.5 * one.clock_s)
        short = bench.measure(["all", "again"], SWEEP[2], replace(plan, cut=cut), ())
    assert both.offered == both.completed == 80
    assert isinstance(short, Measurement)
    assert short.cut_reason is not None


HIGH, LEAST = EngineLimits(512, 16384), EngineLimits(16, 1024)


def started_below(
    source: ToySource, log: Path, high: EngineLimits = HIGH
) -> tuple[EngineRunner, list[str]]:
    """Start at the highest limits that a source starts at, and return what was said."""
    heard: list[str] = []
    with EngineProcess(source, log) as host:
        runner = EngineRunner(host, {}, high, seed=0, note=heard.append)
        started = runner.start_below(LEAST)
        assert started.info.ceiling == runner.ceiling
    return runner, heard


@pytest.mark.parametrize("has_workers", [False, True])
def test_a_ceiling_without_memory_is_lowered_by_budget_first(
    tmp_path: Path, *, has_workers: bool
) -> None:
    """Of a worker, what it is that keeps it from starting stands in its own log."""
    source = CudaSource(memory_blocks=1300, has_workers=has_workers)
    runner, heard = started_below(source, tmp_path / "log")
    assert (runner.ceiling, runner.starts) == (EngineLimits(512, 8192), 1)
    (said,) = heard
    why = f"{NO_WORKER}: {OUT_OF_MEMORY[6:]}" if has_workers else NO_MEMORY
    assert f"does not start at 512/16384: the engine did not start: {why}" in said
    assert said.endswith("trying 512/8192")


def test_a_ceiling_whose_sequences_do_not_fit_is_lowered_down_to_them(tmp_path: Path) -> None:
    """The sampler's memory goes by the cap: no budget helps."""
    source = CudaSource(memory_blocks=700, token_blocks=1 / 64)
    runner, _ = started_below(source, tmp_path / "log", EngineLimits(512, 2048))
    assert runner.ceiling == EngineLimits(256, 1024)


@pytest.mark.slow
def test_an_engine_that_does_not_start_as_it_is_ends_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=NO_MEMORY):
        started_below(CudaSource(memory_blocks=100), tmp_path / "log")


def test_what_is_no_matter_of_memory_is_tried_at_the_least_alone(tmp_path: Path) -> None:
    runner, heard = started_below(CudaSource(breaks_above=2000), tmp_path / "log")
    assert runner.ceiling == LEAST
    assert len(heard) == 1
    with pytest.raises(EngineError, match="no kernel image"):
        started_below(CudaSource(breaks_above=1), tmp_path / "log")
