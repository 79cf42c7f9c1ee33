"""Processes import vLLM while the engine starts, and are shadows once a profile is known."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from support.toy import ToySource
from support.traffic import a_trace
from tuner.engine.demo import bundled
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.shadow.pool import ReplayTask, ShadowPool, SpareProcesses
from tuner.shadow.profiles import read_profile

LIMITS = EngineLimits(16, 2048)
PATIENCE_S = 20.0


def say_who() -> None:
    """Stand for an import: leave the process's number in its log."""
    os.write(1, f"{os.getpid()}\n".encode())


def sleep_long() -> None:
    """Stand for an import that takes long."""
    say_who()
    time.sleep(600)


def refuse() -> None:
    """Stand for an import that fails."""
    raise UsageError("vLLM is not installed")


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_spare_runs_what_it_is_told_later_and_lives_until_its_taker_closes_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "shadow.log"
    with closing(SpareProcesses(2, log, say_who)) as spares:
        spares.settle()
        first, second = pids(log)
        host = spares.take()
        assert host is not None
        with pytest.raises(EngineError, match="no engine source was set"):
            host.start({}, LIMITS)
        host.source = ToySource()
        host.start({}, LIMITS)
        host.prepare(say_who)
    taken = pids(log)[2]
    assert taken in (first, second)
    assert [is_alive(pid) for pid in (first, second)] == [first == taken, second == taken]
    host.close()
    assert not is_alive(taken)


def test_there_are_no_more_spares_than_were_asked_for(tmp_path: Path) -> None:
    with closing(SpareProcesses(0, tmp_path / "shadow.log", say_who)) as spares:
        spares.settle()
        assert spares.take() is None


def test_a_spare_that_is_busy_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "shadow.log"
    for waits in (True, False):
        log.unlink(missing_ok=True)
        spares = SpareProcesses(1, log, sleep_long)
        deadline_s = time.monotonic() + PATIENCE_S
        while waits and not pids(log):
            assert time.monotonic() < deadline_s, "waited in vain"
            time.sleep(0.01)
        began_s = time.monotonic()
        spares.close()
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert not any(map(is_alive, pids(log)))


def test_what_a_spare_could_not_import_is_told_by_the_start(tmp_path: Path) -> None:
    with closing(SpareProcesses(1, tmp_path / "shadow.log", refuse)) as spares:
        spares.settle()
        host = spares.take()
        assert host is not None
        with host:
            host.source = ToySource()
            with pytest.raises(UsageError, match="refuses"):
                host.start({"toy-refuses": 1}, LIMITS)
            assert host.start({}, LIMITS).info.ceiling == LIMITS


@pytest.mark.engine
def test_shadows_take_the_spares_first(tmp_path: Path) -> None:
    profile = read_profile(bundled("profiles") / "demo.profile.yaml")
    log = tmp_path / "shadow.log"
    began_s = time.monotonic()
    with closing(SpareProcesses(1, log)) as spares:
        spares.settle()
        import_s = time.monotonic() - began_s
        with ShadowPool(profile, LIMITS, 1, log, 0, is_forced=True, spares=spares) as shadows:
            shadows.use("all", a_trace([0.0] * 20))
            began_s = time.monotonic()
            (outcome,) = shadows.run([ReplayTask(("all",), LIMITS, ReplayPlan())])
            took_s = time.monotonic() - began_s
        assert isinstance(outcome, Measurement)
        assert spares.take() is None
    assert took_s < import_s / 2
