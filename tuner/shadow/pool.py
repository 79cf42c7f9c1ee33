"""Shadow replays of many configurations at once, each in a process of its own.

Answers what a profile's shadow makes of tasks. What to try is left to `search`, which of the
tasks other machines take to `journal`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, ShadowError
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess, EngineStart
from tuner.replay.runner import EngineRunner, Failure
from tuner.replay.slo import Slo
from tuner.shadow.profiles import Profile
from tuner.shadow.source import ShadowSource, prepare_shadow
from tuner.traffic.traces import Trace

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes can run at full speed beside each other, at least 1.

    A quota that is no whole number of cores counts as the next larger one.
    """
    scheduled = len(os.sched_getaffinity(0))
    quotas = [math.ceil(quota) for quota in _quotas(cgroups, membership)]
    return max(1, min([scheduled, *quotas]))


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Yield the quotas in cores that hold for this process; none where there is no limit."""
    for folder in _groups(cgroups, membership):
        texts = _words(folder / "cpu.max")
        if not texts:
            texts = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        # "max" and -1 are no limit.
        if len(texts) == 2 and all(text.isdecimal() for text in texts):
            quota, period = map(int, texts)
            if quota > 0 and period > 0:
                yield quota / period


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's groups, from its own up to the root's.

    Inside a container the root that is seen is the container's own group.
    """
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif "cpu" in controllers.split(","):
            root = cgroups / "cpu"
        else:
            continue
        own = Path(path.lstrip("/"))
        yield from (root / group for group in (own, *own.parents))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's, none where there is no such file."""
    try:
        return path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


class SpareProcesses:
    """Processes that do `how` side by side from now on; the default imports vLLM."""

    def __init__(
        self, count: int, log_path: Path, how: Callable[[], None] = prepare_shadow
    ) -> None:
        self._left = [EngineProcess(None, log_path) for _ in range(count)]
        self._threads = ThreadPoolExecutor(max(1, count), "spare")
        self._importing: list[Future[None]] = [
            self._threads.submit(host.prepare, how) for host in self._left
        ]

    def settle(self) -> None:
        """Wait until nothing is imported any more, so that a measurement has the cores alone.

        An import that failed fails again, and is told, where the process is asked to start.
        """
        wait(self._importing)

    @property
    def left(self) -> int:
        """How many nobody has taken."""
        return len(self._left)

    def take(self) -> EngineProcess | None:
        """Return a process that is ready or will soon be, to be closed by whoever takes it."""
        return self._left.pop() if self._left else None

    def close(self) -> None:
        """End the processes that nobody took."""
        for host in self._left:
            host.close(gently=False)
        self._left.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def spare_cores() -> int:
    """Return how many cores an engine that starts leaves idle: all but one."""
    return usable_cores() - 1


# How long to wait for a replay to end before looking for tasks that came meanwhile: ours.
_POLL_S = 0.2
# A process that has to import vLLM first is started once replays have taken so long: what the
# import takes, so that waiting for it never costs more than the replays did.
IMPORT_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """One shadow replay: the named traces at the limits; `number` is the caller's own.

    With `wants_capacity` it is as many replays as find the largest load that the SLOs bear.
    `on_log` hears of each trace's log, in a thread of its own.
    """

    names: tuple[str, ...]
    limits: EngineLimits
    plan: ReplayPlan
    slos: tuple[Slo, ...] = ()
    number: int = 0
    wants_capacity: bool = False
    on_log: Callable[[ReplayLog], None] | None = field(default=None, compare=False)


Done = tuple[ReplayTask, Measurement | Failure]


class ShadowPool:
    """Processes with a shadow each, started when there is a task for them.

    Those among the spares are taken first.
    """

    def __init__(
        self,
        profile: Profile,
        ceiling: EngineLimits,
        jobs: int,
        log_path: Path,
        seed: int,
        *,
        is_forced: bool = False,
        spares: SpareProcesses | None = None,
    ) -> None:
        self.profile = profile
        self.jobs = max(1, jobs)
        self._source = ShadowSource(profile, is_forced=is_forced)
        self._ceiling, self._seed, self._log_path = ceiling, seed, log_path
        self._idle: list[EngineRunner] = []
        self._hosts: list[EngineProcess] = []
        self._starting: list[tuple[Future[EngineStart], EngineRunner]] = []
        self._traces: dict[str, Trace] = {}
        self._spares = spares
        self._pool: ThreadPoolExecutor | None = None
        self.remarks: dict[str, None] = {}
        """What the user should hear of the shadows, in order and once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def use(self, name: str, trace: Trace) -> None:
        """Make a trace replayable under a name; nothing may be running."""
        self.settle()
        self._traces[name] = trace
        for bench in self._idle:
            bench.use(name, trace)

    def speak_for(self, profile: Profile) -> None:
        """Let the same processes replay with another profile; nothing may be running."""
        self.settle()
        if profile.step_model != self.profile.step_model:
            self._source = replace(self._source, profile=profile)
            for bench in self._idle:
                bench.restart_from(self._source)
        self.profile = profile

    def adopt(self, bench: EngineRunner) -> None:
        """Let a shadow that somebody else has started take tasks too; it is closed by them."""
        for name, trace in self._traces.items():
            bench.use(name, trace)
        self._idle.append(bench)

    def start_all(self) -> None:
        """Start in the background as many processes as replay beside each other."""
        for _ in range(self.jobs - len(self._idle) - len(self._starting)):
            self._start_one()

    def _start_one(self) -> None:
        bench = self._made()
        self._starting.append((self._threads.submit(bench.ensure_started), bench))

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.jobs, "shadow")
        return self._pool

    def settle(self) -> None:
        """Wait until no process is being started, so that a measurement has the cores alone."""
        wait([start for start, _ in self._starting])
        self._gather()

    def _gather(self) -> None:
        """Call those idle that have been started.

        What went wrong is told by the replay, which starts them again.
        """
        self._idle.extend(bench for start, bench in self._starting if start.done())
        self._starting = [(start, bench) for start, bench in self._starting if not start.done()]

    def _may_start(self, running: int, lasted_s: float) -> bool:
        """Whether one more process is worth its start, after replaying for so long.

        The first always is, and those that have imported vLLM are at hand.
        """
        there = running + len(self._idle) + len(self._starting)
        is_cheap = self._spares is not None and self._spares.left > 0
        return there < self.jobs and (there == 0 or is_cheap or lasted_s > IMPORT_S)

    def _made(self) -> EngineRunner:
        spare = self._spares.take() if self._spares is not None else None
        host = spare or EngineProcess(None, self._log_path)
        host.source = self._source
        self._hosts.append(host)
        bench = EngineRunner(host, {}, self._ceiling, self._seed)
        for name, trace in self._traces.items():
            bench.use(name, trace)
        return bench

    def drain(
        self, next_task: Callable[[], ReplayTask | None], is_over: Callable[[], bool]
    ) -> Iterator[Done]:
        """Replay tasks as next_task hands them out, and yield each with what came of it.

        next_task returns None while there is nothing to do; that is_over says when to stop.
        Both are called in the caller's thread.

        Raises: ShadowError or UsageError when a shadow cannot be made of the profile.
        """
        running: dict[Future[Measurement | Failure], tuple[ReplayTask, EngineRunner]] = {}
        began_s, held = time.monotonic(), None
        while True:
            self._gather()
            while self._idle or self._may_start(len(running), time.monotonic() - began_s):
                held = held or next_task()
                if held is None:
                    break
                if not self._idle:
                    if not self._starting:
                        self._start_one()
                    break
                bench = self._idle.pop()
                running[self._threads.submit(_measure, bench, held)] = held, bench
                held = None
            if not running and held is None and is_over():
                return
            for future in self._wait_for(running):
                task, bench = running.pop(future)
                outcome = _result(future)
                self._idle.append(bench)
                if bench.info is not None and bench.info.remark:
                    self.remarks[bench.info.remark] = None
                yield task, outcome

    def _wait_for(
        self, running: Mapping[Future[Measurement | Failure], object]
    ) -> list[Future[Measurement | Failure]]:
        """Wait a moment for a replay or a start to end, and return the replays that have."""
        awaited: list[Future[Any]] = [*running, *(start for start, _ in self._starting)]
        if not awaited:
            time.sleep(_POLL_S)
        wait(awaited, _POLL_S, FIRST_COMPLETED)
        return [future for future in running if future.done()]

    def run(self, tasks: Sequence[ReplayTask]) -> list[Measurement | Failure]:
        """Replay every task and return what came out, in the tasks' order.

        Raises: ShadowError or UsageError when a shadow cannot be made of the profile.
        """
        left = [replace(task, number=index) for index, task in enumerate(tasks)][::-1]
        found: dict[int, Measurement | Failure] = {}
        for task, outcome in self.drain(lambda: left.pop() if left else None, lambda: not left):
            found[task.number] = outcome
        return [found[index] for index in range(len(tasks))]

    def close(self) -> None:
        """End the processes."""
        for host in self._hosts:
            host.close(gently=False)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._hosts.clear()
        self._idle.clear()
        self._starting.clear()
        self._pool = None


def _result(future: Future[Measurement | Failure]) -> Measurement | Failure:
    """Return what came out; a shadow that cannot be started makes the profile unfit, not more.

    Raises: ShadowError, UsageError.
    """
    try:
        return future.result()
    except EngineError as error:
        raise ShadowError(
            f"a shadow could not be started: {error.message}", error.hint
        ) from error


def _measure(bench: EngineRunner, task: ReplayTask) -> Measurement | Failure:
    if task.wants_capacity:
        return bench.measure_capacity(task.names, task.limits, task.plan, task.slos)
    return bench.measure(task.names, task.limits, task.plan, task.slos, on_log=task.on_log)


def default_jobs() -> int:
    """Return how many shadows can run beside each other here: one per usable core."""
    return usable_cores()
