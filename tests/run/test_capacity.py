"""How much load the SLOs bear: found on the toy, and said in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.run_parts import ToyShadows, a_profile, a_run, a_space
from support.toy import ToyCosts, ToySource
from support.traffic import a_trace, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, holds
from tuner.replay.slo import parse_slo
from tuner.run.capacity import CapacityResult, confirm_capacity, predict_capacity
from tuner.run.forecast import Forecast
from tuner.run.shadow_search import Ranking
from tuner.search.objective import Objective, Score, Scoring, Tier
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.trials import Phase
from tuner.shadow.pool import ReplayTask
from tuner.traffic.reshape import at_load
from tuner.traffic.traces import Trace

TRACE = steady(240, per_s=6.0, prompt=110, output=35)
SLOS = (parse_slo("e2e_p90=2s"),)
SMALL, LARGE = EngineLimits(2, 2048), EngineLimits(32, 2048)


def bears(limits: EngineLimits, load: float) -> bool:
    """Say by a replay of its own whether the SLOs hold at a load."""
    log = replay_toy(TRACE, limits, plan=ReplayPlan(load=load))
    return holds(measure([log]), SLOS)


class CapableShadows(ToyShadows):
    """Toy shadows that look for capacities too, as the real ones do: through a bench."""

    def _replayed(self, task: ReplayTask) -> Measurement:
        with EngineProcess(self._toy, self._log_path) as host:
            bench = EngineRunner(host, {}, self._ceiling, seed=0)
            for name in task.names:
                bench.use(name, self._traces[name])
            found = bench.measure_capacity(task.names, task.limits, task.plan, task.slos)
        assert isinstance(found, Measurement)
        return found


@pytest.fixture(scope="module")
def capacities(tmp_path_factory: pytest.TempPathFactory) -> dict[EngineLimits, float]:
    """Return what a bench finds for a small and a large cap."""
    found = {}
    with EngineProcess(ToySource(), tmp_path_factory.mktemp("toy") / "engine.log") as host:
        bench = EngineRunner(host, {}, LARGE, seed=0)
        bench.use("all", TRACE)
        for limits in (SMALL, LARGE):
            measured = bench.measure_capacity(["all"], limits, ReplayPlan(), SLOS)
            assert isinstance(measured, Measurement)
            assert measured.capacity == measured.load
            found[limits] = measured.capacity or 0.0
    return found


@pytest.mark.parametrize("limits", [SMALL, LARGE], ids=str)
def test_the_slos_hold_up_to_the_capacity_and_not_beyond(
    capacities: dict[EngineLimits, float], limits: EngineLimits
) -> None:
    load = capacities[limits]
    assert bears(limits, load)
    assert not bears(limits, 1.03 * load)


def test_more_room_bears_more_load(capacities: dict[EngineLimits, float]) -> None:
    assert capacities[LARGE] > 2 * capacities[SMALL]


def test_slos_that_hold_at_no_load_have_no_capacity(tmp_path: Path) -> None:
    with EngineProcess(ToySource(), tmp_path / "engine.log") as host:
        bench = EngineRunner(host, {}, LARGE, seed=0)
        bench.use("all", TRACE)
        hopeless = (parse_slo("e2e_p90=1ms"),)
        measured = bench.measure_capacity(["all"], LARGE, ReplayPlan(), hopeless)
    assert isinstance(measured, Measurement)
    assert measured.capacity == 0.0
    assert Scoring(Objective.CAPACITY, hopeless, "p90").score(measured).tier is Tier.BREAKS_SLO


@pytest.mark.slow
def test_the_objective_capacity_ranks_by_it(
    tmp_path: Path, capacities: dict[EngineLimits, float]
) -> None:
    space = a_space(SMALL, (2, 8))
    shadows = CapableShadows(ToySource(), a_profile(), tmp_path / "shadow.log")
    with a_run(tmp_path, TRACE, space, slos=SLOS) as run:
        run.aim = replace(run.aim, objective=Objective.CAPACITY)
        forecast = Forecast(TRACE, run.aim, shadows, 0)
        forecast.choose_parts(space, time_s=600.0)
        seen = {o.limits: o.score for o in Ranking(run, forecast).rank()}
    assert set(seen) == set(space.grid())
    assert seen[SMALL] == Score(Tier.GOOD, 1 / capacities[SMALL], "capacity")
    assert min(seen.values(), key=lambda s: s.order).value < seen[SMALL].value


def test_the_winner_is_replayed_live_at_the_load_it_is_said_to_bear(tmp_path: Path) -> None:
    shadows = CapableShadows(ToySource(), a_profile(), tmp_path / "shadow.log")
    decision = RaceDecision(RaceVerdict.CHANGE, LARGE, LARGE, (LARGE,), None, 3, "better")
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS) as run:
        forecast = Forecast(TRACE, run.aim, shadows, 0)
        forecast.choose_parts(run.space, time_s=600.0)
        found = predict_capacity(run, forecast, decision)
        assert found.winner is not None
        assert found.present is not None
        assert found.winner > found.present
        assert confirm_capacity(run, forecast, LARGE, found).live is True
        beyond = replace(found, winner=1.5 * found.winner)
        assert confirm_capacity(run, forecast, LARGE, beyond).live is False
        tried = [r for r in run.journal.records() if r.phase is Phase.CAPACITY]
    assert [(r.measurement or {})["load"] for r in tried] == [found.winner, beyond.winner]


def never_idle_per_s(limits: EngineLimits, source: ToySource) -> float:
    """Return what the engine finishes a second in the midst of a long overload."""
    log = replay_toy(even(80.0, 60.0, seed=2), limits, source)
    ends_s = np.sort(log.timelines.last_s)
    first, last = int(0.2 * ends_s.size), int(0.8 * ends_s.size)
    return (last - first) / float(ends_s[last] - ends_s[first])


def even(per_s: float, length_s: float, seed: int) -> Trace:
    """Return arrivals at any instant, of prompts of 60 tokens and 50 to 150 answered ones."""
    rng = np.random.default_rng(seed)
    n = int(per_s * length_s)
    due_s = np.sort(rng.uniform(0, length_s, n))
    return a_trace((due_s - due_s[0]).tolist(), 60, rng.integers(50, 150, n).tolist())


@pytest.mark.parametrize("length_s", [4.0, 20.0, 60.0])
@pytest.mark.parametrize("cap", [16, 128])
def test_no_window_is_so_short_that_more_is_borne_than_can_be_finished(
    tmp_path: Path, length_s: float, cap: int
) -> None:
    """Squeezed into less time, 4 s of 18/s held up to 60/s where 17/s can be finished."""
    source = ToySource(ToyCosts(0.010, 0.0005, 0.00005), max_model_len=100_000)
    limits, trace = EngineLimits(cap, 8192), even(18.0, length_s, seed=1)
    slos = (parse_slo("ttft_p90=2s"),)
    with EngineProcess(source, tmp_path / "engine.log") as host:
        bench = EngineRunner(host, {}, EngineLimits(128, 8192), seed=0)
        bench.use("all", trace)
        found = bench.measure_capacity(["all"], limits, ReplayPlan(), slos)
    assert isinstance(found, Measurement)
    assert found.capacity is not None
    most = never_idle_per_s(limits, source) / 18.0
    assert 0.7 * most < found.capacity < 1.06 * most
    # A window of one life of a request shows no queue; the sentence then says so.
    assert found.spans_lives == (length_s > 4.0)


def test_a_capacity_that_the_window_cannot_show_is_not_claimed() -> None:
    text = CapacityResult(0.9, 0.5, None, is_shown=False).text
    assert text.startswith("beyond what this window can show")
    assert "holds up to" not in text


def test_today_s_load_is_the_recorded_one_also_under_another_load(tmp_path: Path) -> None:
    found = {}
    with EngineProcess(ToySource(), tmp_path / "engine.log") as host:
        for load in (1.0, 2.0):
            bench = EngineRunner(host, {}, LARGE, seed=0)
            bench.use("all", at_load(TRACE, load))
            measured = bench.measure_capacity(["all"], LARGE, ReplayPlan(), SLOS)
            assert isinstance(measured, Measurement)
            found[load] = measured.capacity
    assert found[2.0] == pytest.approx(found[1.0], rel=0.1)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            CapacityResult(1.7, 1.2, True),
            "holds up to 1.7 x today's load (the present one 1.2 x)",
        ),
        (CapacityResult(1.7, None, False), "but live it did not hold at that load"),
        (CapacityResult(None, None, None), "the SLOs hold at no load"),
    ],
)
def test_it_is_said_in_a_sentence(found: CapacityResult, words: str) -> None:
    assert words in found.text
