"""A database server that goes away in the midst is waited for, and nothing is done twice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from optuna.trial import FrozenTrial

from support.optional import not_none
from support.postgres import PostgresServer, postgres
from tuner.engine.limits import EngineLimits
from tuner.errors import StorageError
from tuner.run import storage
from tuner.run.journal import Journal, Round
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial
from tuner.traffic.windows import Window

LIMITS = EngineLimits(8, 1024)
GOOD = Score(Tier.GOOD, 1.0, "e2e_p99")


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    """Run a server that these tests alone use."""
    with postgres() as found:
        yield found


@contextmanager
def away(server: PostgresServer, seconds: float) -> Iterator[None]:
    """Have the server stopped at once, and started again after a while."""
    server.stop()
    back = threading.Timer(seconds, server.start)
    back.start()
    try:
        yield
    finally:
        back.join()


def a_round(number: int) -> Round:
    return Round(Phase.RACE, number, (LIMITS,), (30.0,), (Window(0.0, 10.0),))


def a_record(number: int, phase: Phase = Phase.LADDER) -> Trial:
    return Trial.of(number, LIMITS, phase, 0, GOOD, {}, "why", attempt="a")


TWICE = [a_record(0, Phase.RACE)] * 2


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for_in_whatever_is_asked_of_it(
    own: PostgresServer,
) -> None:
    said: list[str] = []
    journal = Journal(f"postgresql+psycopg://{own.address}/postgres", "all", note=said.append)
    with away(own, 1.0):
        number = journal.begin(LIMITS)
    with away(own, 1.0):
        assert journal.finish(number, a_record(number))
    with away(own, 1.0):
        journal.offer([a_round(1), a_round(2)])
    with away(own, 1.0):
        claimed = journal.claim(Phase.RACE)
    with away(own, 1.0):
        assert journal.finish_round(not_none(claimed)[0], TWICE)
    with away(own, 1.0):
        journal.add([a_record(0, Phase.SHADOW)])
    with away(own, 1.0):
        journal.withdraw(Phase.RACE)
    with away(own, 1.0):
        assert [r.phase for r in journal.records()] == [
            *(Phase.LADDER, Phase.RACE, Phase.RACE, Phase.SHADOW)
        ]
    with away(own, 1.0):
        journal.set_state("done")
    assert journal.state == "done"
    assert journal.claim(Phase.RACE) is None
    gone = [text for text in said if text.startswith("the study's storage is away: ")]
    assert len(gone) == said.count("the study's storage is back") >= 7
    # Claims whose hearts could not beat meanwhile are not taken for dead.
    assert journal.give_back_stale() == 0


def test_what_was_done_just_before_its_answer_got_lost_is_not_done_again(
    own: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(f"postgresql+psycopg://{own.address}/postgres", "twice")
    journal.offer([a_round(1)])
    claimed = not_none(journal.claim(Phase.RACE))
    real, lost = journal._study.add_trial, [True]

    def added(trial: FrozenTrial) -> None:
        real(trial)
        if lost:
            lost.pop()
            with away(own, 0.5):
                journal._study.get_trials()

    monkeypatch.setattr(journal._study, "add_trial", added)
    assert journal.finish_round(claimed[0], TWICE)
    assert not lost
    assert len(journal.records()) == 2


def test_a_server_that_stays_away_ends_the_run_in_a_sentence(
    own: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AWAY_S", 1.0)
    journal = Journal(f"postgresql+psycopg://{own.address}/postgres", "away")
    own.stop()
    try:
        with pytest.raises(StorageError, match="has been away for 1 s: ") as caught:
            journal.records()
        assert "--resume once it is back" in caught.value.hint
        assert "127.0.0.1" not in caught.value.hint
    finally:
        own.start()
    assert journal.records() == []


@pytest.mark.slow
def test_a_signal_ends_the_wait(own: PostgresServer) -> None:
    journal = Journal(f"postgresql+psycopg://{own.address}/postgres", "signal")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    own.stop()
    try:
        threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            journal.records()
        assert time.monotonic() - began_s < 10
    finally:
        own.start()
        signal.signal(signal.SIGINT, before)
