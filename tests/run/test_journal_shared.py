"""Processes that share a study measure each round once, whoever dies; on both databases."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from uuid import uuid4

import optuna
import pytest
from optuna.exceptions import ExperimentalWarning

from support.run_parts import go_silent
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.run.journal import Journal, Round
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial
from tuner.traffic.windows import Window

RACE = Phase.RACE
GRACE_S = 6
"""Long enough for the heart of a process that lives to beat on a busy machine."""
PATIENCE_S = 180
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    return f"postgresql+psycopg://{request.getfixturevalue('server')}/postgres"


@pytest.fixture
def study() -> str:
    """Return a name of its own: all tests share one server."""
    return f"study {uuid4().hex}"


def a_round(number: int) -> Round:
    """Return a round of two settings that its number tells from others'."""
    settings = (EngineLimits(number, 1024), EngineLimits(number, 512))
    return Round(RACE, number, settings, (30.0, 30.0), (Window(0.0, 10.0),), 1.0)


def finish(journal: Journal, number: int, one: Round, value: float = 1.0) -> bool:
    score = Score(Tier.GOOD, value, "e2e_p99")
    records = [Trial.of(0, s, RACE, one.number, score, {}, attempt="w") for s in one.settings]
    return journal.finish_round(number, records)


def claim_three(journal: Journal, start: Barrier) -> list[int]:
    """Claim in a race with the others, measure, and see that nothing is left."""
    start.wait(PATIENCE_S)
    held = [claimed for _ in range(3) if (claimed := journal.claim(RACE)) is not None]
    start.wait(PATIENCE_S)
    assert journal.claim(RACE) is None
    assert all(finish(journal, number, one) for number, one in held)
    return [one.number for _, one in held]


def claim_in_two_threads(url: str, study: str, start: Barrier, answer: Connection) -> None:
    journals = [Journal(url, study, join=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(claim_three, journal, start) for journal in journals]
        answer.send([future.result() for future in taken])
    for journal in journals:
        journal.close()


def claim_and_hang(url: str, study: str, answer: Connection) -> None:
    journal = Journal(url, study, join=True, heartbeat_s=1, grace_s=GRACE_S)
    answer.send(journal.claim(RACE))
    time.sleep(600)


@pytest.mark.slow
def test_eight_claimers_in_four_processes_get_each_round_once(url: str, study: str) -> None:
    main = Journal(url, study)
    wanted = range(1, 25)
    main.offer(a_round(i) for i in wanted)
    start = SPAWN.Barrier(8)
    ends = [SPAWN.Pipe(duplex=False) for _ in range(4)]
    workers = [
        SPAWN.Process(target=claim_in_two_threads, args=(url, study, start, answer))
        for _, answer in ends
    ]
    for worker, (_, answer) in zip(workers, ends, strict=True):
        worker.start()
        answer.close()  # the worker's is the last, so that its death is heard
    try:
        for (ours, _), worker in zip(ends, workers, strict=True):
            assert ours.poll(PATIENCE_S), worker.exitcode
        taken = [each for ours, _ in ends for each in ours.recv()]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    assert Counter(i for each in taken for i in each) == Counter(wanted)
    assert Counter(r.race_round for r in main.records()) == Counter(2 * [*wanted])
    assert main.claim(RACE) is None


@pytest.mark.slow
def test_what_a_killed_worker_held_is_measured_by_another_once(url: str, study: str) -> None:
    main = Journal(url, study, heartbeat_s=1, grace_s=GRACE_S)
    alive = Journal(url, study, join=True, heartbeat_s=1, grace_s=GRACE_S)
    main.offer([a_round(1), a_round(2)])
    assert alive.claim(RACE) == (0, a_round(1))
    ours, answer = SPAWN.Pipe(duplex=False)
    worker = SPAWN.Process(target=claim_and_hang, args=(url, study, answer))
    worker.start()
    try:
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == (1, a_round(2))
    finally:
        worker.kill()
        worker.join()
    died_s = time.monotonic()
    while not (given_back := main.give_back_stale()):
        assert time.monotonic() - died_s < PATIENCE_S
        assert alive.claim(RACE) is None
        time.sleep(0.2)
    # The other claim is older and its process lives: it was not given up.
    assert given_back == 1
    assert time.monotonic() - died_s > GRACE_S - 1, "given up while its heart could beat"
    assert main.give_back_stale() == 0
    assert finish(alive, 0, a_round(1))
    assert alive.claim(RACE) == (2, a_round(2))
    assert finish(alive, 2, a_round(2))
    assert [r.race_round for r in main.records()] == [1, 1, 2, 2]
    assert main.give_back_stale() == 0


def test_a_main_process_that_dies_while_giving_back_loses_nothing(url: str, study: str) -> None:
    main, worker = Journal(url, study), Journal(url, study, join=True)
    main.offer([a_round(1)])
    assert worker.claim(RACE) == (0, a_round(1))
    go_silent(worker, 0)
    with pytest.warns(ExperimentalWarning):
        optuna.storages.fail_stale_trials(main._study)
    assert main.claim(RACE) is None
    resumed = Journal(url, study)
    assert (resumed.give_back_stale(), resumed.give_back_stale()) == (1, 0)
    assert resumed.claim(RACE) == (1, a_round(1))


def test_workers_hear_how_the_run_stands(url: str, study: str) -> None:
    main, worker = Journal(url, study), Journal(url, study, join=True)
    assert worker.state == ""
    for text_ in ("measuring", "over"):
        main.set_state(text_)
        assert worker.state == text_


def test_a_run_that_was_never_started_cannot_be_joined(url: str, study: str) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=f"no study named '{study}'") as caught:
            Journal(url, study, join=True)
        assert "start the run first" in caught.value.hint
        Journal(url, f"another {study}")


def test_joining_by_a_mistyped_path_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no study named"):
        Journal(f"sqlite:///{tmp_path / 'tpyo.db'}", join=True)
    assert list(tmp_path.iterdir()) == []


def test_a_server_out_of_reach_is_told(server: str) -> None:
    nowhere = f"postgresql+psycopg://{server.partition(':')[0]}:1/postgres"
    for join in (False, True):
        with pytest.raises(UsageError, match=r"cannot be opened: .*connection failed"):
            Journal(nowhere, join=join)


def test_heartbeats_do_not_depend_on_the_time_zones_of_processes(
    server: str, study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"postgresql+psycopg://{server}/postgres"
    main = Journal(url, study)
    for i, zone in enumerate(("Asia/Tokyo", "America/Los_Angeles"), start=1):
        monkeypatch.setenv("PGTZ", zone)
        worker = Journal(url, study, join=True)
        main.offer([a_round(i)])
        assert worker.claim(RACE) == (i - 1, a_round(i))
        worker._beat(worker._held[i - 1][0]._trial_id)
    monkeypatch.delenv("PGTZ")
    assert main.give_back_stale() == 0
