"""How much load the SLOs bear: found on the toy, and said in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from run_parts import ToyShadows, a_profile, a_run, a_space
from toy import ToySource
from traffic import replay_toy, steady

from tuner.bench import Bench, holds
from tuner.carried import Carried, carried, confirmed_live
from tuner.confirm import Decision, Verdict
from tuner.engine.protocol import EngineLimits
from tuner.forecast import Forecast
from tuner.host import Host
from tuner.metrics import Measurement, measure
from tuner.objective import Goal, Objective, Score, Tier
from tuner.observation import Phase
from tuner.ranking import Ranking
from tuner.replay_plan import ReplayPlan
from tuner.shadows import Task
from tuner.slo import parse_slo

TRACE = steady(240, per_s=6.0, prompt=110, output=35)
SLOS = (parse_slo("e2e_p90=2s"),)
SMALL, LARGE = EngineLimits(2, 2048), EngineLimits(32, 2048)


def bears(limits: EngineLimits, load: float) -> bool:
    """Say by a replay of its own whether the SLOs hold at a load."""
    log = replay_toy(TRACE, limits, plan=ReplayPlan(load=load))
    return holds(measure([log]), SLOS)


class CapableShadows(ToyShadows):
    """Toy shadows that look for capacities too, as the real ones do: through a bench."""

    def _replayed(self, task: Task) -> Measurement:
        with Host(self._toy, self._log_path) as host:
            bench = Bench(host, {}, self._ceiling, seed=0)
            for name in task.names:
                bench.use(name, self._traces[name])
            found = bench.measure_capacity(task.names, task.limits, task.plan, task.slos)
        assert isinstance(found, Measurement)
        return found


@pytest.fixture(scope="module")
def capacities(tmp_path_factory: pytest.TempPathFactory) -> dict[EngineLimits, float]:
    """Return what a bench finds for a small and a large cap."""
    found = {}
    with Host(ToySource(), tmp_path_factory.mktemp("toy") / "engine.log") as host:
        bench = Bench(host, {}, LARGE, seed=0)
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
    with Host(ToySource(), tmp_path / "engine.log") as host:
        bench = Bench(host, {}, LARGE, seed=0)
        bench.use("all", TRACE)
        hopeless = (parse_slo("e2e_p90=1ms"),)
        measured = bench.measure_capacity(["all"], LARGE, ReplayPlan(), hopeless)
    assert isinstance(measured, Measurement)
    assert measured.capacity == 0.0
    assert Goal(Objective.CAPACITY, hopeless, "p90").score(measured).tier is Tier.BREAKS_SLO


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
    decision = Decision(Verdict.CHANGE, LARGE, LARGE, (LARGE,), None, 3, "better")
    with a_run(tmp_path, TRACE, a_space(SMALL), slos=SLOS) as run:
        forecast = Forecast(TRACE, run.aim, shadows, 0)
        forecast.choose_parts(run.space, time_s=600.0)
        found = carried(run, forecast, decision)
        assert found.winner is not None
        assert found.present is not None
        assert found.winner > found.present
        assert confirmed_live(run, LARGE, found).live is True
        beyond = replace(found, winner=1.5 * found.winner)
        assert confirmed_live(run, LARGE, beyond).live is False
        tried = [r for r in run.journal.records() if r["phase"] == str(Phase.CAPACITY)]
    assert [r["measurement"]["load"] for r in tried] == [found.winner, beyond.winner]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Carried(1.7, 1.2, True), "holds up to 1.7 x today's load (the present one 1.2 x)"),
        (Carried(1.7, None, False), "but live the SLOs broke at that load"),
        (Carried(None, None, None), "the SLOs hold at no load"),
    ],
)
def test_it_is_said_in_a_sentence(found: Carried, words: str) -> None:
    assert words in found.text
