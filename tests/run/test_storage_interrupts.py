"""A first Ctrl-C waits for what must not be left half done; a second one does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from tuner.engine.limits import EngineLimits
from tuner.replay.signals import undisturbed
from tuner.run.journal import Journal
from tuner.run.storage import undisturbed_methods

LIMITS = EngineLimits(8, 1024)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Let signals interrupt, as `tune` does, and see that nothing changed that."""
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(kind, signal.default_int_handler) for kind in kinds]
    yield
    after = [signal.signal(kind, handler) for kind, handler in zip(kinds, before, strict=True)]
    assert after == [signal.default_int_handler] * 3


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_is_heard_when_the_outermost_block_is_left(kind: signal.Signals) -> None:
    done = []

    def work() -> None:
        with undisturbed():
            with undisturbed():
                signal.raise_signal(kind)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_a_second_signal_is_heard_at_once() -> None:
    done = []

    def work() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGTERM)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]


def test_a_terminal_that_is_gone_waits_though_it_says_so_twice() -> None:
    done = []

    def work() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_a_failure_of_the_block_stays_known() -> None:
    def work() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the disk is full")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert str(caught.value.__context__) == "the disk is full"


def test_who_ignores_signals_goes_on_ignoring_them() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_another_thread_is_left_alone() -> None:
    found = []

    def look() -> None:
        with undisturbed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_public_methods_and_properties_are_undisturbed_and_others_are_not() -> None:
    @undisturbed_methods
    class Kept:
        """A class whose every step is interrupted."""

        def __init__(self) -> None:
            self.done: list[str] = []

        def method(self) -> None:
            """Be interrupted."""
            signal.raise_signal(signal.SIGINT)
            self.done.append("method")

        @property
        def name(self) -> str:
            """Be interrupted, too."""
            signal.raise_signal(signal.SIGINT)
            self.done.append("name")
            return "kept"

        def _hidden(self) -> None:
            signal.raise_signal(signal.SIGINT)
            self.done.append("hidden")

    kept = Kept()
    for call in (kept.method, lambda: kept.name, kept._hidden):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert kept.done == ["method", "name"]
    assert Kept.method.__doc__ == "Be interrupted."
    assert Kept.name.__doc__ == "Be interrupted, too."


def test_a_journal_that_was_interrupted_in_a_transaction_can_be_read(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path / 'study.db'}")
    engine: Engine = journal._storage.engine

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    event.listen(engine, "begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        journal.set_state("done")
    with pytest.raises(KeyboardInterrupt):
        journal.begin(LIMITS)
    event.remove(engine, "begin", interrupt)
    assert journal.state == "done"
    assert journal.records() == []
    assert Journal(f"sqlite:///{tmp_path / 'study.db'}").state == "done"
