"""A watch for tests: a clock that jumps, verdicts that are told, a file that is real."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.drift_parts import busy_traffic
from support.run_parts import a_profile
from tuner.drift.check import Checked, DriftVerdict, Gain
from tuner.drift.compare import Drift
from tuner.drift.watch.guard import Guard
from tuner.drift.watch.handover import HookEnd, Rollout, RunHook
from tuner.drift.watch.loop import Watcher
from tuner.drift.watch.policy import Policy
from tuner.drift.watch.publish import Publisher
from tuner.drift.watch.state import StateDir
from tuner.emit.names import Format
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.stats import Estimate
from tuner.traffic.sketch import TrafficSketch, sketch_of
from tuner.traffic.traces import Trace

FOUR, EIGHT, THIRTY = (EngineLimits(cap, 2048) for cap in (4, 8, 32))
MINUTE_S, HOUR_S = 60.0, 3600.0
TRAFFIC = busy_traffic(0, minutes=4)
UNCHANGED = Checked(DriftVerdict.UNCHANGED, "nothing differs", Drift((), ()), FOUR)
TOO_LITTLE = Checked(DriftVerdict.TOO_LITTLE, "known in part only", Drift((), ()), FOUR)


def pays(best: EngineLimits = EIGHT, gain_ratio: float = 0.3) -> Checked:
    """Return the verdict that a re-tune pays."""
    ratio = Estimate(1 - gain_ratio, 0.95 - gain_ratio, 1.05 - gain_ratio, 8)
    gain = Gain("e2e_p95", ratio, p_better=0.99)
    return Checked(DriftVerdict.PAYS, "arrival_rate shifted", Drift((), ()), FOUR, best, gain)


@dataclass(slots=True)
class JumpingClock:
    """A clock on which waiting takes no time."""

    at_s: float = 1_800_000_000.0
    set_by_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)

    def now_s(self) -> float:
        """Return the time."""
        return self.at_s

    def elapsed_s(self) -> float:
        """Return the time, as nobody sets this clock but a test that means to."""
        return self.at_s - self.set_by_s

    def set_by(self, seconds: float) -> None:
        """Set the time, as people and NTP do: none passes."""
        self.at_s += seconds
        self.set_by_s += seconds

    def sleep(self, seconds: float) -> None:
        """Jump."""
        self.waits_s.append(seconds)
        self.at_s += seconds


@dataclass(slots=True)
class HookLog:
    """A hook that remembers what it was told and what the file held, and fails on demand."""

    path: Path
    exit_codes: list[int] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, environment: Mapping[str, str]) -> HookEnd:
        """Hand over."""
        self.seen.append((environment["TUNE_EVENT"], self.path.read_text()))
        return HookEnd(self.exit_codes.pop(0) if self.exit_codes else 0, "done")


Saying = Checked | Callable[[float, float], Checked]
"""What a check says, or how that follows from the stretch of time that it looks at."""


@dataclass(slots=True)
class Script:
    """What Prometheus and the shadows answer and were asked, what others do meanwhile."""

    clock: JumpingClock
    verdict: Saying = UNCHANGED
    outages: list[str] = field(default_factory=list)
    looked: list[tuple[float, float]] = field(default_factory=list)
    checked_at: list[EngineLimits] = field(default_factory=list)
    tuned_for: list[TrafficSketch | None] = field(default_factory=list)
    meanwhile: Callable[[], object] | None = None

    def sample(self, since_s: float) -> Trace:
        """Return the traffic, or fail as often as it was told to."""
        if self.outages:
            raise UsageError(self.outages.pop(0))
        self.looked.append((since_s, self.clock.now_s()))
        return TRAFFIC

    def check(
        self, trace: Trace, current: EngineLimits, before: TrafficSketch | None
    ) -> Checked:
        """Return the verdict; others may do something meanwhile."""
        assert trace is TRAFFIC
        self.checked_at.append(current)
        self.tuned_for.append(before)
        if self.meanwhile is not None:
            self.meanwhile()
        found = self.verdict(*self.looked[-1]) if callable(self.verdict) else self.verdict
        return replace(found, current=current)


@dataclass(slots=True)
class World:
    """A watch and all that surrounds it."""

    watcher: Watcher
    clock: JumpingClock
    hook: HookLog
    path: Path
    messages: list[str]
    script: Script

    def rounds(self, *verdicts: Saying) -> list[str]:
        """Do a round for each verdict, one every so often; return what happened."""
        acts = []
        for verdict in verdicts:
            self.script.verdict = verdict
            error = self.watcher.round()
            acts.append(error.message if error else self.watcher.store.state.last.act)
            self.clock.sleep(self.watcher.rest_s())
        return acts

    def lasts(self, verdict: Saying) -> list[str]:
        """Give a verdict, and again as soon as later traffic can confirm it."""
        first = self.rounds(verdict)
        self.clock.sleep(HOUR_S)
        return [*first, *self.rounds(verdict)]

    @property
    def words(self) -> str:
        """All that was told."""
        return "\n".join(self.messages)


@contextmanager
def a_world(
    folder: Path,
    *,
    clock: JumpingClock | None = None,
    guard: Callable[[], Guard] | None = None,
    chosen: Format = Format.VLLM,
    run_hook: RunHook | None = None,
) -> Iterator[World]:
    """Yield a watch over folder/best.yaml whose state is in folder/state."""
    path, clock = folder / "best.yaml", clock or JumpingClock()
    hook, messages = HookLog(path), list[str]()
    script = Script(clock)
    with StateDir(folder / "state") as store:
        state, remark = store.load()
        if remark:
            messages.append(remark)
        store.state = state.for_profile("a")
        publisher = Publisher(path, chosen, a_profile(), {"model": "toy"})
        guarding = guard() if guard else None
        watcher = Watcher(
            store=store,
            rollout=Rollout(
                store, publisher, run_hook or hook, guarding, clock, messages.append
            ),
            policy=Policy(0.05, 6 * HOUR_S, 2, 6 * HOUR_S, MINUTE_S),
            every_s=15 * MINUTE_S,
            tuned_for=FOUR,
            sample=script.sample,
            sketch=sketch_of,
            check=script.check,
            clock=clock,
            notify=messages.append,
        )
        yield World(watcher, clock, hook, path, messages, script)


SERVED = (
    "# mine\nmodel: toy\nenforce-eager: true\nmax-num-seqs: 4\nmax-num-batched-tokens: 2048\n"
)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a few kilobytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
