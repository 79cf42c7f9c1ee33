"""The journal gives back what was put in, also to the process after a crash."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from sqlalchemy import text

from support.optional import not_none
from support.run_parts import go_silent
from tuner.engine.limits import EngineLimits
from tuner.errors import StorageError, UsageError
from tuner.run.directory import TRIALS_FILE, RunDir
from tuner.run.journal import Journal, Round, open_journal
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial, race_records
from tuner.traffic.windows import Window

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
    number = journal.begin(LIMITS)
    measured = None if score.tier is Tier.FAILED else MEASURED
    record = Trial.of(number, LIMITS, phase, round_, score, measured, "why")
    journal.finish(number, record)
    return number


def test_another_process_reads_what_was_measured(url: str) -> None:
    kept(Journal(url), GOOD)
    (record,) = Journal(url).records()
    seen = record.observation
    assert (seen.limits, seen.phase, seen.score) == (LIMITS, Phase.LADDER, GOOD)
    assert (seen.peak_running, seen.peak_step_tokens, seen.decode_step_s) == (7, 400, 0.02)


def test_a_trial_that_never_ended_does_not_count_and_keeps_its_number(url: str) -> None:
    first = Journal(url)
    kept(first, GOOD)
    first.begin(LIMITS)
    second = Journal(url)
    assert [o.number for o in second.records()] == [0]
    assert kept(second, GOOD) == 2
    assert [o.number for o in second.records()] == [0, 2]


def test_a_failure_is_a_failed_trial_with_its_cause_and_never_a_value(url: str) -> None:
    journal = Journal(url)
    kept(journal, FAILED)
    (record,) = journal.records()
    assert (record.value, record.cause, record.measurement) == (None, "why", None)
    assert record.score == FAILED
    assert not record.observation.is_whole


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


def a_round(number: int, *settings: EngineLimits, phase: Phase = Phase.RACE) -> Round:
    """Return a round of settings on ten seconds."""
    chosen = settings or (LIMITS, EngineLimits(4, 512))
    return Round(phase, number, chosen, (30.0,) * len(chosen), (Window(0.0, 10.0),), 1.0)


def replays_of(one: Round, value: float = 1.5) -> list[Trial]:
    """Return what a worker measured."""
    score = Score(Tier.GOOD, value, "e2e_p99")
    return [
        Trial.of(0, s, one.phase, one.number, score, MEASURED, attempt="w")
        for s in one.settings
    ]


def test_a_round_is_queued_once_and_comes_back_as_it_went_in(url: str) -> None:
    main, worker = Journal(url), Journal(url, join=True)
    for _ in range(2):
        main.offer([a_round(2), a_round(2, phase=Phase.CALIBRATE), a_round(3)])
    assert worker.claim(Phase.RACE) == (0, a_round(2))
    assert worker.claim(Phase.RACE) == (2, a_round(3))
    assert worker.claim(Phase.RACE) is None
    assert worker.claim(Phase.RACE, Phase.CALIBRATE) == (1, a_round(2, phase=Phase.CALIBRATE))
    # A round that waits, or runs, is no trial.
    assert main.records() == []


def test_the_replays_of_a_round_count_together_and_have_numbers_of_their_own(url: str) -> None:
    main, worker = Journal(url), Journal(url, join=True)
    kept(main, GOOD)
    main.offer([a_round(2)])
    claimed = not_none(worker.claim(Phase.RACE))
    number, one = claimed
    # As a worker that was killed while it wrote them.
    worker.add(replays_of(one), part_of=number)
    assert len(main.records()) == 1
    assert worker.finish_round(number, [], {"steps": [1, 2]})
    assert [r.number for r in main.records()] == [0, 2, 3]
    assert [r.round for r in main.race_runs()] == [2, 2]
    assert main.rounds(Phase.RACE)[2]["steps"] == [1, 2]
    main.offer([one])
    assert worker.claim(Phase.RACE) is None


def test_a_round_whose_process_died_is_given_to_another_and_counts_once(url: str) -> None:
    main, doomed, other = Journal(url), Journal(url, join=True), Journal(url, join=True)
    main.offer([a_round(2)])
    claimed = not_none(doomed.claim(Phase.RACE))
    doomed.add(replays_of(claimed[1], value=9.0)[:1], part_of=claimed[0])
    go_silent(doomed, claimed[0])
    assert (main.give_back_stale(), main.give_back_stale()) == (1, 0)
    again = not_none(other.claim(Phase.RACE))
    assert again[1] == claimed[1]
    assert other.finish_round(again[0], replays_of(again[1], value=2.0))
    assert [r.value for r in main.records()] == [2.0, 2.0]
    assert main.give_back_stale() == 0


def test_who_was_given_up_and_ends_the_round_after_all_is_not_counted(url: str) -> None:
    main, slow = Journal(url), Journal(url, join=True)
    main.offer([a_round(2)])
    claimed = not_none(slow.claim(Phase.RACE))
    held = dict(slow._held)
    go_silent(slow, claimed[0])
    slow._held.update(held)
    assert main.give_back_stale() == 1
    assert not slow.finish_round(claimed[0], replays_of(claimed[1]))
    assert main.records() == []


def test_what_nobody_wants_any_more_is_neither_claimed_nor_given_back(url: str) -> None:
    main, worker = Journal(url), Journal(url, join=True)
    main.offer([a_round(2), a_round(3), a_round(2, phase=Phase.CALIBRATE)])
    assert worker.claim(Phase.RACE) is not None
    main.withdraw(Phase.RACE)
    assert worker.claim(Phase.RACE) is None
    assert main.give_back_stale() == 0
    assert worker.claim(Phase.CALIBRATE) is not None
    # It may be wanted again.
    main.offer([a_round(3)])
    assert worker.claim(Phase.RACE) == (3, a_round(3))


def test_a_round_that_ran_when_the_main_process_died_is_left_to_its_worker(url: str) -> None:
    main, worker = Journal(url), Journal(url, join=True)
    main.offer([a_round(2)])
    claimed = not_none(worker.claim(Phase.RACE))
    resumed = Journal(url)
    resumed.offer([a_round(2)])
    assert resumed.give_back_stale() == 0
    assert worker.finish_round(claimed[0], replays_of(claimed[1]))
    assert len(resumed.records()) == 2


def test_a_closed_journals_claims_go_silent(url: str) -> None:
    main = Journal(url, heartbeat_s=1, grace_s=1)
    worker = Journal(url, join=True, heartbeat_s=1, grace_s=1)
    main.offer([a_round(2)])
    assert worker.claim(Phase.RACE) is not None
    (_, heart) = worker._held[0]
    worker.close()
    assert not not_none(heart)._thread.is_alive()


@pytest.fixture(scope="module")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return one storage for all examples of a property."""
    return f"sqlite:///{tmp_path_factory.mktemp('property') / 'study.db'}"


DEEDS = ["offer", "claim", "finish", "die", "give back", "resume"]


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(2, 4)), max_size=14))
def test_whoever_dies_each_round_is_measured_exactly_once(
    shared_url: str, deeds: list[tuple[str, int]]
) -> None:
    study, wanted, silent = uuid4().hex, set[int](), 0
    main, worker = Journal(shared_url, study), Journal(shared_url, study, join=True)
    held: list[tuple[int, Round]] = []
    for deed, number in deeds:
        if deed == "offer":
            main.offer([a_round(number)])
            wanted.add(number)
        elif deed == "claim" and (claimed := worker.claim(Phase.RACE)):
            held.append(claimed)
        elif deed == "finish" and held:
            trial, one = held.pop(0)
            assert worker.finish_round(trial, replays_of(one))
        elif deed == "die" and held:
            trial, one = held.pop(0)
            worker.add(replays_of(one)[:1], part_of=trial)
            go_silent(worker, trial)
            silent += 1
        elif deed == "give back":
            assert main.give_back_stale() == silent
            silent = 0
        elif deed == "resume":
            main = Journal(shared_url, study)
    main.give_back_stale()
    while claimed := worker.claim(Phase.RACE):
        held.append(claimed)
    assert all(worker.finish_round(number, replays_of(one)) for number, one in held)
    rounds = [r.race_round for r in main.records()]
    assert sorted(rounds) == sorted(2 * [*wanted])
    assert set(main.rounds(Phase.RACE)) == wanted


def test_what_could_not_be_kept_as_the_storage_was_away_gets_a_number_of_its_own(
    url: str,
) -> None:
    journal = Journal(url)
    kept(journal, GOOD)
    number = journal.begin(LIMITS)  # measured, and then the storage went away
    journal.close()
    again = Journal(url, must_exist=True)
    lost = Trial.of(number, LIMITS, Phase.LADDER, 0, GOOD, MEASURED, "why")
    assert again.restore([*again.records(), lost]) == {number}
    assert [record.number for record in again.records()] == [0, number + 1]
    assert replace(again.records()[1], number=number) == lost


def test_a_run_that_goes_on_again_and_again_restores_what_was_lost_once(tmp_path: Path) -> None:
    url, study = f"sqlite:///{tmp_path / 'study.db'}", "own"
    first = Journal(url, study)
    kept(first, GOOD)
    number = first.begin(LIMITS)  # measured, and then the storage went away
    records = [*first.records(), Trial.of(number, LIMITS, Phase.RACE, 1, GOOD, MEASURED)]
    first.close()
    run_dir, said = RunDir(tmp_path / "run", resume=False), []
    run_dir.write_lines(TRIALS_FILE, records)
    for _ in range(3):
        journal, messages = open_journal(url, study, run_dir, (), print, is_resumed=True)
        assert len(journal.race_runs()) == 1
        assert len(journal.records()) == 2
        said += messages
        journal.close()
    run_dir.close()
    assert said == [f"1 trials were restored from {TRIALS_FILE}: the study lacked them"]


DAMAGE = {
    "a record without its number": "UPDATE trial_user_attributes SET value_json='{}'",
    "a record that is none": "UPDATE trial_user_attributes SET value_json='null'",
    "a record that is no JSON": "UPDATE trial_user_attributes SET value_json='[1'",
    "a date": "UPDATE trials SET datetime_start='20x6-99-99'",
    "a state": "UPDATE trials SET state='NONSENSE'",
    "no limits": "UPDATE trial_params SET param_value=NULL",
    "a table gone": "DROP TABLE trial_user_attributes",
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_study_is_said_to_be_one(url: str, change: str) -> None:
    journal = Journal(url)
    kept(journal, GOOD)
    with journal._storage.engine.begin() as connection:
        connection.execute(text(change))
    journal.close()
    with pytest.raises(StorageError, match=r"the study.*(damaged|failed)") as caught:
        Journal(url, must_exist=True).records()
    assert "--resume restores" in caught.value.hint


def test_a_page_that_sqlite_would_read_as_empty_is_damage(tmp_path: Path) -> None:
    """The trials would be there without what was measured, and the file be called wrong."""
    file = tmp_path / "study.db"
    journal = Journal(f"sqlite:///{file}")
    kept(journal, GOOD)
    with journal._storage.engine.begin() as connection:
        size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
        root = connection.exec_driver_sql(
            "SELECT rootpage FROM sqlite_master WHERE name='trial_user_attributes'"
        ).scalar_one()
    journal.close()
    content = bytearray(file.read_bytes())
    page = slice((root - 1) * size, root * size)
    content[page] = b"\x0d\0\0\0\0\x10\0\0".ljust(size, b"\0")  # a leaf of no cell
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"damaged: .*index"):
        Journal(f"sqlite:///{file}", must_exist=True)


def test_a_study_made_anew_from_its_records_is_the_same_study(tmp_path: Path) -> None:
    first, second = (Journal(f"sqlite:///{tmp_path / name}.db") for name in ("a", "b"))
    kept(first, GOOD, Phase.CURRENT)
    first.begin(LIMITS)  # and interrupted
    kept(first, Score(Tier.CUT, math.inf, "cut short"))
    kept(first, FAILED)
    kept(first, Score(Tier.NOT_SUSTAINED, 0.1 + 0.2, "requests_per_s", (("e2e_p99", 2.5),)))
    first.add([Trial.of(0, LIMITS, Phase.SHADOW, 0, GOOD, MEASURED, prediction=1)])
    for round_ in (1, 2):
        kept(first, GOOD, Phase.RACE, round_)
    records = first.records()
    assert second.restore(records) == {record.number for record in records}
    assert second.records() == records
    assert second.records() == first.records()
    assert second.race_runs() == first.race_runs()
    for mine, theirs in zip(first._study.trials, second._study.trials, strict=True):
        if "record" in mine.user_attrs:
            assert (mine.number, mine.state, mine.params) == (
                theirs.number,
                theirs.state,
                theirs.params,
            )
            assert mine.values == theirs.values
    # What it holds is not added again, and the next trial has a number of its own.
    assert second.restore(records) == set()
    assert kept(second, GOOD) == kept(first, GOOD) == records[-1].number + 1
