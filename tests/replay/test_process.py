"""The engine's process may die in any way: the parent hears of it, says why, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from support.cuda_toy import CudaSource
from support.paths import TESTS
from support.toy import CURRENT, EXIT_CODE, LAST_WORDS, ToyEngine, ToySource
from support.traffic import a_trace, kept, replay_toy, steady
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts
from tuner.errors import EngineError, TraceError, UsageError
from tuner.replay.loop import Progress
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess, last_words
from tuner.replay.timeline import Outcome
from tuner.traffic.traces import LoadModel

CEILING = EngineLimits(16, 512)
LIMITS = EngineLimits(8, 256)
TRACE = steady(60, 10.0)
LONG = a_trace([0.0] * 1000, output=3000)
"""Seconds of real work for the toy, so that there is a middle to be struck in."""
PATIENCE_S = 20.0


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    """Return where the engine's process writes."""
    return tmp_path / "engine.log"


@pytest.fixture
def host(log_path: Path) -> Iterator[EngineProcess]:
    """Return a host with a toy that dies at a cap of 7, started and with traces loaded."""
    with EngineProcess(ToySource(dies_at=(7,)), log_path) as host:
        ready(host)
        yield host


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Return a host for the tests that leave it as it was."""
    with EngineProcess(ToySource(), tmp_path_factory.mktemp("host") / "engine.log") as host:
        ready(host)
        yield host


def ready(host: EngineProcess) -> None:
    host.start({}, CEILING)
    host.load("short", TRACE, 0)
    host.load("long", LONG, 0)


def pid_of(host: EngineProcess) -> int:
    assert host._child is not None
    assert host._child.process.pid is not None
    return host._child.process.pid


def test_a_replay_in_the_child_is_the_replay_here(lasting: EngineProcess) -> None:
    plan, child = ReplayPlan(keep_steps=True), pid_of(lasting)
    for cap in (8, 1, 16):
        limits = EngineLimits(cap, 256)
        log = lasting.replay("short", limits, plan)
        here = replay_toy(TRACE, limits, plan=plan)
        assert log.timelines.last_s.tolist() == here.timelines.last_s.tolist()
        assert kept(log).running.tolist() == kept(here).running.tolist()
        assert log.steps.peaks == here.steps.peaks
    assert pid_of(lasting) == child != os.getpid()


def test_facts_are_reported_before_anything_is_started(log_path: Path) -> None:
    with EngineProcess(ToySource(), log_path) as host:
        assert host.facts({}) == EngineFacts(CURRENT, 4096, True, "0.0", "toy")
        with pytest.raises(EngineError, match="no engine"):
            host.load("short", TRACE, 0)


def test_progress_is_heard_and_the_caller_may_stop(lasting: EngineProcess) -> None:
    heard: list[Progress] = []

    def stop(progress: Progress) -> bool:
        heard.append(progress)
        return False

    log = lasting.replay("long", LIMITS, ReplayPlan(), stop)
    assert log.cut_reason == "stopped by the caller"
    assert heard
    assert log.timelines.count(Outcome.ABORTED) > 0
    again = lasting.replay("short", LIMITS, ReplayPlan())
    assert again.timelines.count(Outcome.COMPLETED) == len(TRACE)


def test_a_stop_that_comes_too_late_harms_nothing(lasting: EngineProcess) -> None:
    assert lasting._child is not None
    lasting._child.connection.send("stop")
    log = lasting.replay("short", LIMITS, ReplayPlan())
    assert log.timelines.count(Outcome.COMPLETED) == len(TRACE)


def test_a_crash_is_told_with_its_last_words_and_nothing_of_it_is_left_in_the_next(
    host: EngineProcess, log_path: Path
) -> None:
    old = pid_of(host)
    with pytest.raises(EngineError) as caught:
        host.replay("short", EngineLimits(7, 256), ReplayPlan())
    assert LAST_WORDS in caught.value.message
    assert f"exit code {EXIT_CODE}" in caught.value.message
    assert "during replay" in caught.value.message
    assert str(log_path) in caught.value.hint
    assert not is_alive(old)
    ready(host)
    assert pid_of(host) != old
    log = host.replay("short", LIMITS, ReplayPlan())
    assert log.timelines.count(Outcome.COMPLETED) == len(TRACE)
    # Killed while idle, which is noticed at the next request.
    os.kill(pid_of(host), signal.SIGKILL)
    with pytest.raises(EngineError, match="died during replay") as caught:
        host.replay("short", LIMITS, ReplayPlan())
    assert "ToyMemoryError" not in caught.value.message


def test_a_child_that_is_killed_in_the_middle_is_taken_for_out_of_memory(
    host: EngineProcess,
) -> None:
    def kill(progress: Progress) -> bool:
        assert progress.offered == len(LONG)
        os.kill(pid_of(host), signal.SIGKILL)
        return True

    with pytest.raises(EngineError, match="killed, most likely out of memory"):
        host.replay("long", LIMITS, ReplayPlan(), kill)


def test_a_child_that_is_ended_while_another_thread_asks_is_ended_once(
    host: EngineProcess,
) -> None:
    """As on Ctrl-C, while a shadow replays: neither of the two may trip over the other."""
    begun = threading.Event()

    def hear(_progress: Progress) -> bool:
        begun.set()
        return True

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(host.replay, "long", LIMITS, ReplayPlan(), hear)
        assert begun.wait(PATIENCE_S)
        pid = pid_of(host)
        host.close(gently=False)
        with pytest.raises(EngineError, match="died during replay"):
            asked.result(PATIENCE_S)
    assert not is_alive(pid)
    assert host._child is None


def test_an_interrupt_does_not_reach_the_child(lasting: EngineProcess) -> None:
    pid = pid_of(lasting)
    assert os.getsid(pid) == pid != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    log = lasting.replay("short", LIMITS, ReplayPlan())
    assert log.timelines.count(Outcome.COMPLETED) == len(TRACE)
    assert pid_of(lasting) == pid


def test_an_interrupt_while_a_child_starts_leaves_none(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find its log's folder gone, and say so into the terminal."""
    begun: list[SpawnProcess] = []
    start = SpawnProcess.start

    def interrupted(process: SpawnProcess) -> None:
        start(process)
        begun.append(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with EngineProcess(ToySource(), log_path) as host, pytest.raises(KeyboardInterrupt):
        host.facts({})
    assert [process.exitcode for process in begun] == [-signal.SIGKILL]


def test_an_error_keeps_its_class_and_hint_on_the_way(lasting: EngineProcess) -> None:
    with pytest.raises(UsageError) as refused:
        lasting.facts({"toy-refuses": 1})
    assert refused.value.hint == "leave it out"
    with pytest.raises(TraceError) as unrecorded:
        lasting.replay("short", LIMITS, ReplayPlan(load_model=LoadModel.CLOSED))
    assert "record e2e_s" in unrecorded.value.hint
    assert lasting.replay("short", LIMITS, ReplayPlan()).cut_reason is None


def test_limits_above_the_ceiling_are_an_engine_error(
    host: EngineProcess, log_path: Path
) -> None:
    with pytest.raises(EngineError, match="above the start-up values 16/512") as caught:
        host.replay("short", EngineLimits(17, 512), ReplayPlan())
    assert str(log_path) in caught.value.hint


@dataclass(frozen=True, slots=True)
class Defective(ToySource):
    """A source with a defect that nobody foresaw."""

    def start(self, values: object, ceiling: EngineLimits) -> ToyEngine:
        """Fail in a way that is no TunerError."""
        sys.stdout.write(f"starting at {ceiling}\n")
        raise ZeroDivisionError(f"the defect of {values}")


def test_an_unforeseen_failure_of_the_child_is_reported_with_its_last_words(
    log_path: Path,
) -> None:
    with (
        EngineProcess(Defective(), log_path) as host,
        pytest.raises(EngineError, match=r"ZeroDivisionError: the defect of \{\}"),
    ):
        host.start({}, CEILING)
    assert "Traceback" in log_path.read_text()
    assert log_path.stat().st_mode & 0o077 == 0


def test_closing_ends_the_child_and_closing_again_is_nothing(log_path: Path) -> None:
    host = EngineProcess(ToySource(), log_path)
    host.start({}, CEILING)
    pid = pid_of(host)
    host.close()
    assert not is_alive(pid)
    host.close()
    EngineProcess(ToySource(), log_path).close()


def test_leaving_with_an_error_ends_the_child_at_once(log_path: Path) -> None:
    host = EngineProcess(ToySource(), log_path)
    host.start({}, CEILING)
    pid = pid_of(host)
    host.__exit__(KeyError, KeyError(), None)
    assert not is_alive(pid)


PARENT = """
import json, sys
from pathlib import Path
from support.toy import ToySource
from support.traffic import a_trace
from tuner.replay.arrivals import ClockKind
from tuner.engine.limits import EngineLimits
from tuner.replay.process import EngineProcess
from tuner.replay.plan import ReplayPlan

def tell(progress):
    print(json.dumps(host._child.process.pid), flush=True)
    return True

if __name__ == "__main__":
    host = EngineProcess(ToySource(), Path(sys.argv[1]))
    host.start({}, EngineLimits(16, 512))
    # Heard of after the first wait, the child then sleeps where no broken pipe can wake it.
    host.load("quiet", a_trace([0.3, 600.0]), 0)
    plan = ReplayPlan(clock=ClockKind.WALL)
    host.replay("quiet", EngineLimits(8, 256), plan, tell)
"""


UNGUARDED = """
import sys
from pathlib import Path
from support.toy import ToySource
from tuner.replay.process import EngineProcess

print("begun", flush=True)
with EngineProcess(ToySource(), Path(sys.argv[1])) as host:
    print(host.facts({}).vllm_version, Path(sys.modules["__main__"].__file__).name)
"""


def test_a_script_without_a_guard_is_not_run_again_by_the_child(
    tmp_path: Path, log_path: Path
) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, str(script), str(log_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    version = ToySource().facts({}).vllm_version
    assert done.stdout.splitlines() == ["begun", f"{version} unguarded.py"], done.stderr


def test_the_child_dies_with_a_parent_that_is_killed(tmp_path: Path, log_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    tests = TESTS
    path = os.pathsep.join([str(tests), str(tests.parent)])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(log_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        child = int(json.loads(parent.stdout.readline()))
        assert is_alive(child)
        parent.kill()
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "it said nothing"),
        ("\n \n", "it said nothing"),
        ("all is well\nbye\n", "bye"),
        ("INFO x\nvllm.Foo: torch.OutOfMemoryError: CUDA\nbye", "OutOfMemoryError: CUDA"),
        ("ValueError: first\nRuntimeError: last\n  ^^^^\n", "RuntimeError: last"),
    ],
)
def test_the_last_words_are_the_last_error_or_else_the_last_line(
    log_path: Path, log: str, said: str
) -> None:
    log_path.write_text(log)
    assert last_words(log_path) == said


def test_last_words_of_a_huge_log_are_found_and_stay_short(log_path: Path) -> None:
    log_path.write_bytes(b"\xff" * 500_000 + b"\nMemoryError: " + b"x" * 5000)
    assert last_words(log_path).startswith("MemoryError: xxx")
    assert len(last_words(log_path)) == 400
    assert last_words(log_path.with_name("none")) == "it left no log"


def test_every_engine_starts_in_a_process_of_its_own(log_path: Path) -> None:
    """What one leaves on a device would be counted against the next."""
    with EngineProcess(ToySource(), log_path) as host:
        host.facts({})
        asked = pid_of(host)
        host.start({}, CEILING)
        first = pid_of(host)
        host.start({}, CEILING)
        second = pid_of(host)
    assert asked == first
    assert second != first
    assert not is_alive(first)


@dataclass(frozen=True, slots=True)
class DiarySource(ToySource):
    """A toy whose processes write down what they are asked, and may die of preparing."""

    diary: str = ""
    is_frail: bool = False

    def prepare(self) -> None:
        """Write that down, or die."""
        self.write("prepare")
        if self.is_frail:
            os._exit(EXIT_CODE)

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Resolve a configuration, and write that down."""
        self.write("facts")
        return ToySource.facts(self, values)

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> ToyEngine:
        """Start, and write that down."""
        ToySource.facts(self, values)
        self.write("start")
        return ToyEngine(self, ceiling)

    def write(self, what: str) -> None:
        """Write a line with who writes it."""
        with Path(self.diary).open("a") as diary:
            diary.write(f"{what} {os.getpid()}\n")


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiarySource:
    """Return a source of engines whose processes begin ahead, however fast they import."""
    monkeypatch.setattr("tuner.replay.process.WORTH_S", 0.0)
    return DiarySource(diary=str(tmp_path / "diary"))


def test_the_process_of_an_expected_engine_imports_before_the_one_ahead_has_started(
    diary: DiarySource, log_path: Path
) -> None:
    with EngineProcess(diary, log_path) as host:
        host.facts({})
        host.expect(2)
        host.start({}, CEILING)
        first = pid_of(host)
        host.load("short", TRACE, 0)
        diary.write("measured")
        host.replay("short", LIMITS, ReplayPlan())
        host.start({}, CEILING)
        second = pid_of(host)
        host.start({}, CEILING)
        third = pid_of(host)
    told = [line.split() for line in Path(diary.diary).read_text().splitlines()]
    asked = [(what, int(pid)) for what, pid in told if what != "measured"]
    assert sorted(asked[:3]) == sorted(
        [("facts", first), ("start", first), ("prepare", second)]
    )
    assert asked[3:] == [("start", second), ("start", third)]
    assert [what for what, _ in told].index("measured") == 3
    assert not any(map(is_alive, (first, second, third)))


def test_an_expected_process_that_dies_is_made_up_for(
    diary: DiarySource, log_path: Path
) -> None:
    source = replace(diary, is_frail=True)
    with EngineProcess(source, log_path) as host:
        host.facts({})
        host.expect(2)
        host.start({}, CEILING)
        host.start({}, CEILING)
        host.load("short", TRACE, 0)
        assert len(host.replay("short", LIMITS, ReplayPlan()).timelines.last_s) == len(TRACE)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_process_that_began_ahead_ends_with_the_others(
    diary: DiarySource, log_path: Path, end: str
) -> None:
    host = EngineProcess(diary, log_path)
    host.facts({})
    host.expect(2)
    host.start({}, CEILING)
    getattr(host, end)()
    pids = {int(line.split()[1]) for line in Path(diary.diary).read_text().splitlines()}
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_a_start_that_hangs_ends_with_what_it_said_last(log_path: Path) -> None:
    source = CudaSource(hangs_above=100)
    with EngineProcess(source, log_path, start_timeout_s=1.5) as host:
        host.facts({})
        pid = pid_of(host)
        with pytest.raises(EngineError, match="did not start within 2 s") as caught:
            host.start({}, CEILING)
        assert "waiting for rank 1" in caught.value.message
        assert "--start-timeout" in caught.value.hint
        assert not is_alive(pid)
        host.start({}, EngineLimits(8, 64))
