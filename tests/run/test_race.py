"""Finalists race until it is settled, and no longer than it is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from support.odd_toys import FragileSource
from support.optional import not_none
from support.paths import ROOT
from support.race_parts import BETTER, CROWDED_TOY, CURRENT, TRACE, WORSE, known_ratio
from support.run_parts import Heard, ToyRun, a_profile, a_run, a_space
from support.toy import ToyCosts, ToySource
from support.toy_tune import CROWDED
from support.traffic import replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import CutRule
from tuner.run.context import Workload
from tuner.run.journal import Journal, Round
from tuner.run.live_search import LiveEvidence
from tuner.run.predict import Foretold, at_own_speed, predict
from tuner.run.race import PredictedEvidence, race
from tuner.run.time_plan import Observe, RacePlan, reserve_s
from tuner.search.choice import Choice
from tuner.search.draws import Draws, Learnable, drawn_of
from tuner.search.effects import Effects
from tuner.search.objective import Objective, Score, Tier
from tuner.search.race import MAX_ROUNDS, RaceDecision, RaceVerdict
from tuner.search.trials import Phase
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import read_profile
from tuner.shadow.step_model import StepModel


def raced(run: ToyRun, plan: RacePlan, observe: Observe | None = None) -> RaceDecision:
    """Race without any prediction."""
    return race(run.runner, LiveEvidence(plan), observe)


def test_a_race_hears_of_every_step_and_runs_no_round_twice(tmp_path: Path) -> None:
    heard: list[EngineLimits] = []

    def on_log(limits: EngineLimits, log: ReplayLog) -> None:
        assert len(not_none(log.kept_steps))
        heard.append(limits)

    field = [BETTER, CURRENT]
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        found = raced(run, run.plan(*field), on_log)
        before = [(r.round, r.limits) for r in run.context.journal.race_runs()]
        again = raced(run, run.plan(*field), on_log)
        keys = [(r.round, r.limits) for r in run.context.journal.race_runs()]
    assert sorted(heard) == sorted(found.rounds * field)
    assert keys == before
    assert found == again
    assert (found.verdict, found.winner) == (RaceVerdict.CHANGE, BETTER)
    assert 2 <= found.rounds < MAX_ROUNDS
    assert found.gain is not None
    assert not_none(found.gain.low) < known_ratio(BETTER) < not_none(found.gain.high)


def test_a_round_is_told_with_how_much_the_rate_rises(tmp_path: Path) -> None:
    """Not with how much less the score is, its inverse."""
    many, rate = steady(240, per_s=40.0, prompt=110, output=35), Objective.THROUGHPUT
    with a_run(tmp_path, many, a_space(CURRENT), CROWDED_TOY, objective=rate) as run:
        assert raced(run, run.plan(BETTER, CURRENT)).best == BETTER
        listener = run.context.listener
    assert isinstance(listener, Heard)
    assert "9/2048 changes requests_per_s by +" in listener.notes[-1]


@pytest.mark.slow
def test_two_that_are_alike_race_no_longer_than_it_is_worth(tmp_path: Path) -> None:
    quiet = ToySource(noise_ratio=0.02)
    with a_run(tmp_path, TRACE, a_space(CURRENT), quiet) as run:
        found = raced(run, run.plan(WORSE, CURRENT))
    assert found.verdict is RaceVerdict.KEEP
    assert found.rounds < MAX_ROUNDS


@pytest.mark.slow
def test_one_that_fails_in_its_replay_is_never_recommended(tmp_path: Path) -> None:
    source = FragileSource(CROWDED, fails_above=16)
    with a_run(tmp_path, TRACE, a_space(CURRENT), source) as run:
        found = raced(run, run.plan(WORSE, BETTER, CURRENT))
    assert found.winner == BETTER
    assert WORSE not in found.tied


def test_a_race_leaves_the_time_that_the_cold_engines_need(tmp_path: Path) -> None:
    """Of 300 s two starts of 55 s are for them, and a replay takes two thirds of the rest."""
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        run.engine.start_s = 55.0
        (slow,) = (
            replace(m, busy_s=0.01) for m in [measure([replay_toy(TRACE, BETTER, CROWDED_TOY)])]
        )
        plan = run.plan(BETTER, CURRENT, predicted={BETTER: slow, CURRENT: slow})
        assert 110 < reserve_s(run.runner, plan) < 120
        run.context.stopwatch.total_s = 112.0
        assert reserve_s(run.runner, plan) == 0.0
        run.context.stopwatch.total_s = 0.0
        found = raced(run, plan)
        assert run.context.journal.records() == []
    assert (found.verdict, found.rounds) == (RaceVerdict.KEEP, 0)
    assert run.context.caveats == {Caveat.BUDGET_SPENT}


@dataclass(frozen=True, slots=True)
class LongPlan(RacePlan):
    """A race of which each replay is thought to take ten seconds."""

    def replay_s(self, limits: EngineLimits) -> float:  # noqa: ARG002 - as of any
        """Return what a replay takes."""
        return 10.0


@dataclass(slots=True)
class OpenEvidence(LiveEvidence):
    """Two that are surely better than the current one, and of which a round may tell which.

    Or none does, where replays tell nothing of what is open.
    """

    tells: bool = False
    left: float = math.inf

    def regret_after(self, count: int, more_s: float) -> float:  # noqa: ARG002
        """Return what is lost once the engine's speed is known better."""
        return self.left

    def choice(self, count: int) -> Choice:
        """Return what draws say that stay as they are."""
        rng, point = np.random.default_rng(0), (1.0, 1.0, 3.0)
        scores = [Score(Tier.GOOD, value, "e2e_p95") for value in point]
        off = rng.normal(0.0, 0.1, (count, len(point)))
        effects = Effects(np.zeros(3), 0.1 * np.eye(3), 0.02, math.inf)
        told = (Learnable(effects, off),) if self.tells else ()
        here = drawn_of(scores) * np.exp(off)[:, :, None]
        drawn = Draws.of(self.settings(), scores, here, learnable=told)
        return self.plan.context.choice(drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("total_s", "tells", "left", "rounds"),
    [
        (40.0, True, math.inf, 1),
        (1e4, True, math.inf, MAX_ROUNDS),
        (1e4, False, math.inf, 1),
        (1e4, False, 0.0, MAX_ROUNDS),
        (1e4, False, 0.0565, 1),
    ],
)
def test_a_race_ends_where_no_round_would_tell_and_while_the_cold_engines_still_fit(
    tmp_path: Path, total_s: float, left: float, rounds: int, *, tells: bool
) -> None:
    """A round takes 20 or 30 s, the cold engines 21.

    It goes on where all that is lost would be saved by knowing the machine better, and ends
    where that would save next to nothing.
    """
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        run.context.stopwatch.total_s = total_s
        near = EngineLimits(BETTER.max_num_seqs + 1, 2048)
        plan = LongPlan(run.context, (BETTER, near, CURRENT), run.workload)
        found = race(run.runner, OpenEvidence(plan, 1, tells=tells, left=left))
        made = {r.limits for r in run.context.journal.race_runs() if r.round > 1}
    # That the current one is no longer in question no other replay of it has to tell.
    assert made <= {BETTER, near} or not tells
    assert (found.verdict, found.rounds) == (RaceVerdict.CHANGE, rounds)
    assert run.context.caveats == set()


@pytest.mark.slow
def test_a_round_that_a_worker_made_of_others_is_not_made_again(tmp_path: Path) -> None:
    """It was offered while others were inside; part of it anew would be paired with nothing."""
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY, is_shared=True) as run:
        near = EngineLimits(BETTER.max_num_seqs + 1, 2048)
        plan = run.plan(BETTER, near, CURRENT)
        worker = Journal(run.context.run_dir.storage_url, "study", join=True)

        class Joined(OpenEvidence):
            def learn(self) -> None:
                if run.context.journal.rounds(Phase.RACE):
                    return
                run.context.journal.offer([Round(Phase.RACE, 2, (BETTER, CURRENT), (9.0, 9.0))])
                claimed = not_none(worker.claim(Phase.RACE))
                made = [t for t in run.context.journal.records() if t.race_round == 1]
                again = [
                    replace(t, race_round=2, attempt="worker")
                    for t in made
                    if t.limits in {BETTER, CURRENT}
                ]
                Timer(1.0, worker.finish_round, [claimed[0], again]).start()

        race(run.runner, Joined(plan, 1, tells=True))
        made = [(r.round, r.limits, r.attempt) for r in run.context.journal.race_runs()]
        worker.close()
    second = {(limits, attempt) for number, limits, attempt in made if number == 2}
    assert second == {(BETTER, "worker"), (CURRENT, "worker")}
    assert max(number for number, *_ in made) == MAX_ROUNDS


def test_no_round_begins_that_would_not_end_before_the_cold_engines_have_to(
    tmp_path: Path,
) -> None:
    """Half a round tells nothing; of one that takes 30 s there is time for half."""
    with a_run(tmp_path, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        run.engine.ensure_started()
        run.context.stopwatch.total_s = 95.0
        near = EngineLimits(BETTER.max_num_seqs + 1, 2048)
        plan = LongPlan(run.context, (BETTER, near, CURRENT), run.workload)
        kept_s = reserve_s(run.runner, plan)
        assert kept_s > 20.0

        class Hurried(OpenEvidence):
            def learn(self) -> None:
                run.context.stopwatch.total_s += kept_s + 15.0 - run.context.left_s

        found = race(run.runner, Hurried(plan, 1, tells=True))
        made = [o for o in run.context.journal.records() if o.phase is Phase.RACE]
    assert (found.rounds, len(made)) == (1, 3)
    assert run.context.caveats == {Caveat.BUDGET_SPENT}


@pytest.mark.parametrize(
    ("model", "differs"),
    [
        (StepModel.linear(0.010, 0.0005, 0.0001), False),
        (StepModel.linear(0.005, 0.0008, 0.0008), True),
    ],
)
def test_live_and_predicted_disagree_by_what_no_common_speed_explains(
    tmp_path: Path, model: StepModel, *, differs: bool
) -> None:
    """The engine is a fifth slower than the first model, whose shape is its own."""
    with a_run(tmp_path, TRACE, a_space(CURRENT), ToySource(ToyCosts().scaled(1.2))) as run:
        predictor = Predictor(replace(a_profile(), step_model=model), run.context.space.ceiling)
        aim = run.context.aim
        predicted = predict(predictor, run.context.space, Workload.of_whole(TRACE, aim))
        run.trial(CURRENT, Phase.RACE, 1)
        plan = run.plan(BETTER, CURRENT)
        evidence = PredictedEvidence(plan, Foretold(predictor, predicted), lambda: None)
        evidence.choice(2)
        found = evidence.disagreement()
    assert (f"e2e_p95 at {CURRENT} is " in found) is differs


def test_a_replay_is_compared_with_the_simulation_at_its_own_speed(tmp_path: Path) -> None:
    """Both on the toy's own costs, and the live one a fifth slower throughout."""
    slow = ToySource(ToyCosts().scaled(1.2))
    with a_run(tmp_path, TRACE, a_space(CURRENT), slow) as run:
        live, trial = run.runner.measure(CURRENT, Phase.RACE, run.workload, CutRule(), 1)
        assert isinstance(live, Measurement)
        profile = replace(a_profile(), step_model=StepModel.linear(0.010, 0.0005, 0.0001))
        predictor = Predictor(profile, run.context.space.ceiling)
        own = at_own_speed(predictor, run.workload, CURRENT, live.busy_s / live.steps)
        as_stated = predictor.measure(run.workload.pieces, CURRENT, run.workload.plan)
    assert isinstance(as_stated, Measurement)
    tail = run.workload.scoring.tail
    measured_s = live.latency("e2e_s", tail)
    assert not_none(own).latency("e2e_s", tail) == pytest.approx(measured_s, rel=0.02)
    assert as_stated.latency("e2e_s", tail) != pytest.approx(measured_s, rel=0.1)
    assert trial.is_whole


def test_a_replay_whose_host_was_slower_has_a_speed_of_its_own_too(tmp_path: Path) -> None:
    """On a profile of which the host is the slower one for most batches."""
    profile = read_profile(ROOT / "profiles" / "gpu" / "qwen3-1.7b.1xh100_sxm.yaml")
    host = profile.step_model.host
    slow = replace(profile, step_model=replace(profile.step_model, host=host.scaled(2.0)))
    with a_run(tmp_path, TRACE, a_space(CURRENT), ToySource()) as run:
        live = Predictor(slow).measure(run.workload.pieces, CURRENT, run.workload.plan)
        assert isinstance(live, Measurement)
        step_s = live.busy_s / live.steps
        own = not_none(at_own_speed(Predictor(profile), run.workload, CURRENT, step_s))
        assert own.busy_s / own.steps == pytest.approx(step_s, rel=0.005)
