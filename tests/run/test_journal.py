"""The journal gives back what was put in, also to the process after a crash."""

from __future__ import annotations

import math
from pathlib import Path
from uuid import uuid4

import msgspec
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from sqlalchemy import text

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.run.journal import MAX_DEATHS, Journal
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial, race_records

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
    record = Trial.of(number, LIMITS, phase, round_, score, measured, "why")
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
    assert (record.value, record.cause, record.measurement) == (None, "why", None)
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


def queued(journal: Journal, number: int, score: Score, limits: EngineLimits = LIMITS) -> bool:
    """Finish a claimed trial of a shadow."""
    measured = None if score.tier is Tier.FAILED else MEASURED
    record = Trial.of(number, limits, Phase.SHADOW, 0, score, measured)
    return journal.finish(number, score, {}, record)


def die(journal: Journal, number: int) -> None:
    """Let the heart of a claim have stopped long ago, without waiting for it."""
    _, heart = journal._held.pop(number)
    assert heart is not None
    heart.stop()
    with journal._storage.engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00' WHERE trial_id ="
                " (SELECT trial_id FROM trials WHERE number = :number AND study_id = :study)"
            ),
            {"number": number, "study": journal._study_id},
        )


def test_a_shadow_measured_twice_counts_once_and_a_live_trial_as_often(url: str) -> None:
    main, unaware = Journal(url), Journal(url)
    main.enqueue(EngineLimits(1, 1), Phase.SHADOW)
    unaware.enqueue(EngineLimits(1, 1), Phase.SHADOW)
    for journal in (main, unaware):  # two main processes, which must not be, do double it
        journal.enqueue(LIMITS, Phase.SHADOW)
    assert main.waiting(Phase.SHADOW) == 3
    for value in (1.5, 2.5, 3.5):
        claimed = main.claim(Phase.SHADOW)
        assert claimed is not None
        assert queued(main, claimed[0], Score(Tier.GOOD, value, "e2e_p99"), claimed[1])
    kept(main, GOOD)
    kept(main, GOOD)
    seen = [(o.number, o.score.value) for o in main.observations()]
    assert seen == [(0, 1.5), (1, 2.5), (3, 1.5), (4, 1.5)]


def test_a_shadow_begun_outside_the_queue_has_no_heart_and_does_not_outlive_its_run(
    url: str,
) -> None:
    Journal(url).begin(LIMITS, Phase.SHADOW)
    assert Journal(url).unfinished(Phase.SHADOW) == 0


def test_a_shadow_that_failed_was_measured_and_is_not_given_back(url: str) -> None:
    journal = Journal(url)
    journal.enqueue(LIMITS, Phase.SHADOW)
    assert journal.claim(Phase.SHADOW) == (0, LIMITS)
    assert queued(journal, 0, FAILED)
    resumed = Journal(url)
    resumed.enqueue(LIMITS, Phase.SHADOW)
    assert (resumed.give_back_stale(), resumed.unfinished(Phase.SHADOW)) == (0, 0)
    assert [r.tier for r in resumed.records()] == [str(Tier.FAILED)]


def test_what_ends_all_who_replay_it_is_given_up_and_counts_as_failed(url: str) -> None:
    main, worker = Journal(url), Journal(url, join=True)
    main.enqueue(LIMITS, Phase.SHADOW)
    for _ in range(MAX_DEATHS):
        assert main.unfinished(Phase.SHADOW) == 1
        claimed = worker.claim(Phase.SHADOW)
        assert claimed is not None
        die(worker, claimed[0])
        assert main.give_back_stale() == 1
    resumed = Journal(url)
    resumed.enqueue(LIMITS, Phase.SHADOW)
    assert (resumed.give_back_stale(), resumed.unfinished(Phase.SHADOW)) == (0, 0)
    (record,) = resumed.records()
    assert record.tier is Tier.FAILED
    assert record.cause.startswith(f"{MAX_DEATHS} processes ended while they replayed it")
    (seen,) = resumed.observations()
    assert (seen.limits, seen.phase) == (LIMITS, Phase.SHADOW)


def test_who_ends_in_order_is_no_death(url: str) -> None:
    main = Journal(url)
    main.enqueue(LIMITS, Phase.SHADOW)
    for _ in range(MAX_DEATHS + 1):
        worker = Journal(url, join=True)
        claimed = worker.claim(Phase.SHADOW)
        assert claimed is not None
        held = dict(worker._held)
        worker.close()
        worker = Journal(url, join=True)
        worker._held.update(held)
        die(worker, claimed[0])
        assert main.give_back_stale() == 1
    assert main.records() == []
    assert main.waiting(Phase.SHADOW) == 1


def test_a_worker_killed_after_it_wrote_its_measurement_has_measured(url: str) -> None:
    main, worker = Journal(url), Journal(url, join=True)
    main.enqueue(LIMITS, Phase.SHADOW)
    assert worker.claim(Phase.SHADOW) == (0, LIMITS)
    record = Trial.of(0, LIMITS, Phase.SHADOW, 0, GOOD, MEASURED)
    worker._held[0][0].set_user_attr("record", msgspec.to_builtins(record))
    assert main.records() == []
    die(worker, 0)
    assert (main.give_back_stale(), main.unfinished(Phase.SHADOW)) == (0, 0)
    assert main.records() == [record]


def test_a_closed_journals_claims_go_silent(url: str) -> None:
    main = Journal(url, heartbeat_s=1, grace_s=1)
    worker = Journal(url, join=True, heartbeat_s=1, grace_s=1)
    main.enqueue(LIMITS, Phase.SHADOW)
    assert worker.claim(Phase.SHADOW) == (0, LIMITS)
    (_, heart) = worker._held[0]
    assert heart is not None
    worker.close()
    assert not heart._thread.is_alive()


@pytest.fixture(scope="module")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return one storage for all examples of a property."""
    return f"sqlite:///{tmp_path_factory.mktemp('property') / 'study.db'}"


DEEDS = ["enqueue", "claim", "finish", "die", "give back", "resume"]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(1, 3)), max_size=14))
def test_whoever_dies_each_shadow_is_measured_exactly_once(
    shared_url: str, deeds: list[tuple[str, int]]
) -> None:
    study, asked, silent = uuid4().hex, set(), []
    main, worker = Journal(shared_url, study), Journal(shared_url, study, join=True)
    held: list[tuple[int, EngineLimits]] = []
    for deed, i in deeds:
        limits = EngineLimits(i, 8)
        if deed == "enqueue":
            main.enqueue(limits, Phase.SHADOW)
            asked.add(limits)
        elif deed == "claim" and (claimed := worker.claim(Phase.SHADOW)):
            held.append(claimed)
        elif deed == "finish" and held:
            number, of = held.pop(0)
            assert queued(worker, number, GOOD, of)
        elif deed == "die" and held:
            silent.append(held.pop(0))
            die(worker, silent[-1][0])
        elif deed == "give back":
            assert main.give_back_stale() == len(silent)
            silent.clear()
        elif deed == "resume":
            main = Journal(shared_url, study)
        ended = {o.limits for o in main.observations()}
        assert main.unfinished(Phase.SHADOW) == len(asked - ended)
    assert main.give_back_stale() == len(silent)
    while claimed := worker.claim(Phase.SHADOW):
        held.append(claimed)
    assert all(queued(worker, number, GOOD, of) for number, of in held)
    assert sorted(o.limits for o in main.observations()) == sorted(asked)
    assert main.unfinished(Phase.SHADOW) == 0


def test_a_record_of_a_replay_without_decode_steps_is_read(url: str) -> None:
    record = Trial.of(0, LIMITS, Phase.PRESENT, 0, GOOD, {"decode_step_s": None})
    seen = record.observation
    assert (seen.decode_step_s, seen.peak_running) == (None, 0)
    assert url


def test_a_study_made_anew_from_its_records_is_the_same_study(tmp_path: Path) -> None:
    first, second = (Journal(f"sqlite:///{tmp_path / name}.db") for name in ("a", "b"))
    kept(first, GOOD, Phase.PRESENT)
    first.begin(LIMITS, Phase.LADDER)  # and interrupted
    kept(first, Score(Tier.CUT, math.inf, "cut short"))
    kept(first, FAILED)
    kept(first, Score(Tier.NOT_SUSTAINED, 0.1 + 0.2, "requests_per_s", (("e2e_p99", 2.5),)))
    first.enqueue(EngineLimits(4, 512), Phase.SHADOW)
    claimed = first.claim(Phase.SHADOW)
    assert claimed is not None
    assert queued(first, claimed[0], GOOD, claimed[1])
    for round_ in (1, 2):
        kept(first, GOOD, Phase.RACE, round_)
    records = first.records()
    trials = [(record, {"ttft_p99": -0.25}) for record in records]
    assert second.restore(trials) == len(records)
    assert second.records() == records
    assert second.observations() == first.observations()
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
    assert second.restore(trials) == 0
    assert kept(second, GOOD) == kept(first, GOOD) == records[-1].number + 1
    second.enqueue(EngineLimits(4, 512), Phase.SHADOW)
    assert second.waiting(Phase.SHADOW) == 0
