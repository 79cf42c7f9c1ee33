"""A run whose time ends before anything raced says so, and predicts from the steps it saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.run_parts import Heard, ToyPredictor, a_profile, a_run, a_space
from support.toy import ToySource
from support.toy_tune import CROWDED
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.plan import CutRule
from tuner.run.directory import PROFILE_FILE
from tuner.run.options import Method
from tuner.run.sessions.live import NOTHING_ELSE, Session
from tuner.search.race import Odds, RaceDecision, RaceVerdict
from tuner.search.trials import Phase
from tuner.shadow.calibration import LARGEST_ERROR_RATIO
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, read_profile, write_profile

CURRENT = EngineLimits(16, 2048)
TRACE = steady(240, per_s=14.0, prompt=110, output=35)
CROWDED_TOY = ToySource(CROWDED)


@contextmanager
def out_of_time(folder: Path, method: Method = Method.AUTO) -> Iterator[Session]:
    """Yield a run whose profile is unfit and whose time holds one replay of the live search."""
    with a_run(folder, TRACE, a_space(CURRENT), CROWDED_TOY) as run:
        unfit = a_profile(2 * LARGEST_ERROR_RATIO)
        write_profile(run.context.run_dir.path / PROFILE_FILE, unfit)
        run.context.stopwatch.total_s = 0.0
        windows = run.workload.windows
        yield Session.of(run.runner, {}, toy_predictor, method, chosen=windows)


def toy_predictor(profile: Profile) -> Predictor:
    return ToyPredictor(profile, toy=CROWDED_TOY)


def test_where_nothing_else_was_replayed_the_steps_seen_predict(
    tmp_path: Path,
) -> None:
    with out_of_time(tmp_path) as session:
        decision = session.run()
        caveats = session.caveats(decision)
        # As after rounds of others, which have made best who was in none of them.
        beside_a_race = session.caveats(replace(decision, is_predicted=False, rounds=2))
        kept = read_profile(session.context.run_dir.path / PROFILE_FILE)
        phases = {t.phase for t in session.context.journal.records()}
    assert (decision.verdict, decision.is_predicted) == (RaceVerdict.CHANGE, True)
    assert decision.winner.max_num_seqs < CURRENT.max_num_seqs
    assert {"current", "shadow"} <= phases
    assert Caveat.NOT_RACED in caveats
    assert Caveat.NOT_RACED in beside_a_race
    assert Caveat.SHADOW_UNFIT not in caveats
    # The steps of the run itself, not those of the profile that was unfit.
    assert kept.calibrated_on == (str(CURRENT),)


def test_a_search_that_is_to_be_live_says_nothing_of_others(
    tmp_path: Path,
) -> None:
    with out_of_time(tmp_path, Method.LIVE) as session:
        decision = session.run()
        heard = session.context.listener
    assert (decision.verdict, decision.why) == (RaceVerdict.KEEP, NOTHING_ELSE)
    assert decision.rounds == 0
    assert not decision.is_predicted
    assert isinstance(heard, Heard)
    assert not any("predict" in note for note in heard.notes)


def test_that_a_stretch_is_not_kept_up_with_is_not_told_of_all_the_traffic(
    tmp_path: Path,
) -> None:
    """The busiest second is more than the engine can take, and the trace is not."""
    trace, limits = steady(120, per_s=200.0, prompt=100, output=40), EngineLimits(4, 2048)
    odds = Odds(0.99, None, 1.0, 0.1, 0.99)
    with a_run(tmp_path, trace, a_space(limits), ToySource()) as run:
        run.runner.measure(limits, Phase.RACE, run.workload, CutRule(), 1)
        session = Session.of(run.runner, {}, lambda _: pytest.fail("nothing is predicted"))
        for p_sustained, is_of_all in ((0.0, True), (None, True), (1.0, False)):
            told = replace(odds, p_sustained=p_sustained)
            kept = (RaceVerdict.KEEP, limits, limits, (limits,), None, 1, "it is")
            found = session.caveats(RaceDecision(*kept, odds=told))
            assert {Caveat.NOT_SUSTAINED, Caveat.WINDOWED} <= set(found)
            text = found[Caveat.NOT_SUSTAINED]
            assert ("of the stretch" in text) is not is_of_all


@pytest.mark.parametrize("is_cut", [False, True])
def test_where_time_ended_the_climb_larger_caps_are_not_what_is_missing(
    tmp_path: Path, *, is_cut: bool
) -> None:
    trace, limits = steady(120, per_s=200.0, prompt=100, output=40), EngineLimits(4, 2048)
    with a_run(tmp_path, trace, a_space(limits), ToySource()) as run:
        run.runner.measure(limits, Phase.CURRENT, run.workload, CutRule())
        session = Session.of(run.runner, {}, lambda _: pytest.fail("nothing is predicted"))
        run.context.caveats.update({Caveat.BUDGET_SPENT} if is_cut else ())
        kept = RaceDecision(RaceVerdict.KEEP, limits, limits, (limits,), None, 0, "it is")
        text = session.caveats(kept)[Caveat.AT_SPACE_EDGE]
    assert ("with a longer --budget the search climbs on" in text) is is_cut
    assert ("--max-num-seqs go beyond it" in text) is not is_cut
