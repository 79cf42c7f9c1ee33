"""What a run learns of its engine is kept, and what the profile leaves out is said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.run_parts import Heard, ToyPredictor, a_run, a_space
from support.toy import ToyEngine, ToySource
from support.traffic import kept, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.plan import ReplayPlan
from tuner.run.calibrate.calibrator import Calibrator
from tuner.run.directory import PROFILE_FILE, STEPS_FILE
from tuner.run.records import KNOWN_RATIO, OWN_RATIO
from tuner.run.rounds import unpacked
from tuner.run.sessions.learning import Learning
from tuner.search.race import Odds, RaceDecision, RaceVerdict
from tuner.shadow.calibration import Calibration
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile, read_profile

LIMITS = EngineLimits(16, 2048)
TRACE = steady(300, per_s=30.0)


def toy_predictor(profile: Profile) -> Predictor:
    return ToyPredictor(profile, toy=ToySource())


@pytest.mark.parametrize(("stretched", "is_told"), [(0.0, False), (0.05, True)])
def test_much_time_that_stretched_steps_take_is_told(
    tmp_path: Path, stretched: float, *, is_told: bool
) -> None:
    steps = kept(replay_toy(TRACE, LIMITS, ToySource(), ReplayPlan(keep_steps=True)))
    rng = np.random.default_rng(0)
    times = np.where(rng.random(len(steps)) < stretched, 4.0, 1.0)
    steps = replace(steps, duration_s=steps.duration_s * times)
    shape = ToyEngine(ToySource(), LIMITS).shape()
    calibration = Calibration(shape, (KvStart(LIMITS, 1000),), (), LIMITS, {"model": "toy"})
    with a_run(tmp_path, TRACE, a_space(LIMITS)) as run:
        learning = Learning(run.runner, {}, toy_predictor)
        learning.calibrator = Calibrator(calibration.and_steps(LIMITS, [steps]))
        learning.fitted()
        assert (Caveat.STEPS_STRETCHED in run.context.caveats) == is_told
        heard = run.context.listener
        assert isinstance(heard, Heard)
        assert any("the machine stretched steps" in note for note in heard.notes) == is_told
        assert read_profile(run.context.run_dir.path / PROFILE_FILE).fit.steps > 0


def test_how_restless_the_machine_was_is_learnt_with_its_speed(tmp_path: Path) -> None:
    """By turns a tenth slower and faster for two seconds each."""
    steps = kept(replay_toy(TRACE, LIMITS, ToySource(), ReplayPlan(keep_steps=True)))
    moment = (np.cumsum(steps.duration_s) / 2.0).astype(int)
    moods = np.exp(0.1 * (-1.0) ** np.arange(moment.max() + 1))
    shape = ToyEngine(ToySource(), LIMITS).shape()
    calibration = Calibration(shape, (KvStart(LIMITS, 1000),), (), LIMITS, {"model": "toy"})
    open_ratio = math.sqrt(OWN_RATIO**2 + 4 * (KNOWN_RATIO**2 - OWN_RATIO**2))
    odds = Odds(0.95, None, 1.0, 0.1, 0.95, open_ratio=open_ratio)
    decision = RaceDecision(RaceVerdict.KEEP, LIMITS, LIMITS, (), None, 1, "", odds=odds)
    told = []
    with a_run(tmp_path, TRACE, a_space(LIMITS)) as run:
        run.context.stopwatch.add("calibrate", 100.0)
        for times in (np.ones_like(moods), moods):
            slow = replace(steps, duration_s=steps.duration_s * times[moment])
            learning = Learning(run.runner, {}, toy_predictor)
            learning.calibrator = Calibrator(calibration.and_steps(LIMITS, [slow]))
            assert learning.restlessness(decision) is None
            learning.fitted()
            told.append(learning.restlessness(decision))
    quiet, restless = told
    assert quiet is not None
    assert restless is not None
    assert restless.apart_ratio == pytest.approx(0.1, abs=0.05)
    assert quiet.apart_ratio < restless.apart_ratio / 2
    # Four times as long for half of what time can take away.
    assert restless.more_s == pytest.approx(300.0)


def test_steps_are_on_disk_as_soon_as_they_are_seen(tmp_path: Path) -> None:
    log = replay_toy(TRACE, LIMITS, ToySource(), ReplayPlan(keep_steps=True))
    with a_run(tmp_path, TRACE, a_space(LIMITS)) as run:
        started = run.runner.engine.start_below(LIMITS)
        calibrator = Learning(run.runner, {}, toy_predictor).begin(started)
        calibrator.observe(LIMITS, log)
        lines = (run.context.run_dir.path / STEPS_FILE).read_text().splitlines()
    ((limits, columns),) = unpacked([json.loads(line) for line in lines])
    assert limits == LIMITS
    np.testing.assert_array_equal(columns.duration_s, kept(log).duration_s)
