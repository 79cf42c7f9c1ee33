"""The journal gives back what was put in, also to the process after a crash."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tuner.engine.protocol import EngineLimits
from tuner.errors import UsageError
from tuner.journal import Journal, observation_of, race_records, record_of
from tuner.objective import Score, Tier
from tuner.observation import Phase

LIMITS = EngineLimits(8, 1024)
GOOD = Score(Tier.GOOD, 1.5, "e2e_p99")
FAILED = Score(Tier.FAILED, math.inf, "failed")
MEASURED = {
    "running": {"mean": 3.0, "max": 7},
    "max_step_tokens": 400,
    "decode_step_s": {"p50": 0.02},
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return a storage on disk."""
    return f"sqlite:///{tmp_path / 'study.db'}"


def kept(journal: Journal, score: Score, phase: Phase = Phase.LADDER, round_: int = 0) -> int:
    number = journal.begin(LIMITS, phase, round_)
    measured = None if score.tier is Tier.FAILED else MEASURED
    record = record_of(number, LIMITS, phase, round_, score, measured, "why")
    journal.finish(number, score, {"ttft_p99": -0.25}, record)
    return number


def test_another_process_reads_what_was_measured(url: str) -> None:
    kept(Journal(url), GOOD)
    (seen,) = Journal(url).observations()
    assert (seen.limits, seen.phase, seen.score) == (LIMITS, Phase.LADDER, GOOD)
    assert (seen.peak_running, seen.peak_step_tokens, seen.decode_step_s) == (7, 400, 0.02)


def test_a_trial_that_never_ended_does_not_count_and_keeps_its_number(url: str) -> None:
    first = Journal(url)
    kept(first, GOOD)
    first.begin(LIMITS, Phase.REFINE)
    second = Journal(url)
    assert [o.number for o in second.observations()] == [0]
    assert kept(second, GOOD) == 2
    assert [o.number for o in second.observations()] == [0, 2]


def test_a_failure_is_a_failed_trial_with_its_cause_and_never_a_value(url: str) -> None:
    journal = Journal(url)
    kept(journal, FAILED)
    (record,) = journal.records()
    assert (record["value"], record["cause"], record["measurement"]) == (None, "why", None)
    (seen,) = journal.observations()
    assert seen.score == FAILED
    assert not seen.is_whole


def test_the_study_is_one_that_optunas_own_tools_can_read(url: str) -> None:
    journal = Journal(url, "mine")
    kept(journal, GOOD)
    kept(journal, Score(Tier.CUT, math.inf, "cut short"))
    kept(journal, FAILED)
    study = optuna.load_study(study_name="mine", storage=url)
    assert [t.state for t in study.trials] == [
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.FAIL,
    ]
    assert study.trials[0].params == {"max_num_seqs": 8, "max_num_batched_tokens": 1024}
    assert study.best_value == 1.5


def test_two_studies_of_one_storage_do_not_mix(url: str) -> None:
    kept(Journal(url, "a"), GOOD)
    assert Journal(url, "b").records() == []


@pytest.mark.parametrize("storage", ["nonsense", "nodriver://x", "sqlite:////no/such/dir/x.db"])
def test_a_storage_that_cannot_be_opened_is_told(storage: str) -> None:
    with pytest.raises(UsageError, match="storage cannot be opened") as caught:
        Journal(storage)
    assert "sqlite:///" in caught.value.hint


def test_race_runs_are_those_of_the_race_alone(url: str) -> None:
    journal = Journal(url)
    kept(journal, GOOD)
    for round_ in (1, 2):
        kept(journal, GOOD, Phase.RACE, round_)
    kept(journal, FAILED, Phase.RACE, 3)
    assert [run.round for run in journal.race_runs()] == [1, 2, 3]
    assert set(race_records(journal.records(), LIMITS)) == {1, 2}
    assert race_records(journal.records(), EngineLimits(9, 1024)) == {}


def test_a_record_of_a_replay_without_decode_steps_is_read(url: str) -> None:
    record = record_of(0, LIMITS, Phase.PRESENT, 0, GOOD, {"decode_step_s": None})
    seen = observation_of(record)
    assert (seen.decode_step_s, seen.peak_running) == (None, 0)
    assert url
