"""A month of a watch, every quarter of an hour, with faults in every tenth round.

Traffic shifts for good every few days, and for an odd hour each day. Prometheus goes, hooks
fail, the process is killed between any two steps, the disk is full, clocks are set, people edit
or remove the file. Each of these is followed by the same questions: is the file whole, is what
people wrote still there, was what is written also handed over, and is it what traffic asks for.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.fault_parts import FAULTED
from support.watch_parts import (
    FOUR,
    HOUR_S,
    MINUTE_S,
    SERVED,
    TOO_LITTLE,
    UNCHANGED,
    JumpingClock,
    World,
    a_world,
    full_disk,
    pays,
)
from tuner.drift.check import Checked
from tuner.drift.watch.guard import Guard, GuardDecision, GuardVerdict
from tuner.drift.watch.handover import HookEnd
from tuner.emit.sources import read_emitted
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError

DAY_S = 24 * HOUR_S
DAYS = 30
FAULT_SHARE = 0.1
LASTING = (FOUR, EngineLimits(16, 2048), EngineLimits(64, 2048))
"""So far apart that none counts as another, as what was rolled back once is barred for good."""
ODD = EngineLimits(256, 2048)
"""What an odd hour asks for, and what nothing may ever be set to."""
SETTLED_S = 20 * HOUR_S
"""A shift that lasts so long is acted on: six hours of the last change, an hour to be
confirmed, the six hours that a look goes back over an odd hour, and what faults hold up."""


class KilledError(BaseException):
    """Stands for the end of the process within it."""


@dataclass(frozen=True, slots=True)
class Shifts:
    """What traffic asks for, by the clock: lasting, and in odd hours."""

    lasting: tuple[tuple[float, EngineLimits], ...]
    odd: tuple[float, ...]

    @classmethod
    def drawn(cls, rng: random.Random, start_s: float) -> Shifts:
        """Return those of a month and a bit."""
        at_s, best, lasting = start_s, FOUR, []
        while at_s < start_s + (DAYS + 2) * DAY_S:
            lasting.append((at_s, best))
            best = rng.choice([one for one in LASTING if one != best])
            at_s += rng.uniform(1.5, 4) * DAY_S
        # Two within what a look goes back over would be no odd hour but a lasting shift.
        odd = [start_s + (day + rng.uniform(0.25, 0.75)) * DAY_S for day in range(DAYS)]
        return cls(tuple(lasting), tuple(odd))

    def best(self, at_s: float) -> EngineLimits:
        """Return what lasts at an instant."""
        return [best for since_s, best in self.lasting if since_s <= at_s][-1]

    def since_s(self, at_s: float) -> float:
        """Return since when it lasts."""
        return [since_s for since_s, _ in self.lasting if since_s <= at_s][-1]

    def seen(self, since_s: float, until_s: float) -> EngineLimits:
        """Return what a look asks for: an odd hour of which it sees the least has its way."""
        if any(since_s < at_s + HOUR_S and until_s > at_s for at_s in self.odd):
            return ODD
        return self.best(until_s)


@dataclass(frozen=True, slots=True)
class Probation(Guard):
    """A guard whose verdicts are drawn."""

    rng: random.Random = field(default_factory=random.Random)

    def judge(self, *_: Any) -> GuardDecision:
        """Return that a change does well, mostly."""
        drawn = self.rng.random()
        if drawn < 0.1:
            raise UsageError("Prometheus cannot be reached")
        if drawn < 0.2:
            return GuardDecision(GuardVerdict.UNKNOWN, "too few requests")
        verdict = GuardVerdict.WORSE if drawn < 0.25 else GuardVerdict.AGREES
        return GuardDecision(verdict, "it is drawn")


@dataclass(slots=True)
class Month:
    """A month, what goes wrong in it, and what must be true all the same."""

    folder: Path
    rng: random.Random
    clock: JumpingClock = field(default_factory=JumpingClock)
    faults: Counter[str] = field(default_factory=Counter)
    edits: int = 0
    handed: str | None = None
    """The text that the last hook that succeeded was given; None once people edit the file."""
    acts: Counter[str] = field(default_factory=Counter)
    damaged: int = 0
    shifts: Shifts = field(init=False)
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.shifts = Shifts.drawn(self.rng, self.clock.at_s)
        self.path = self.folder / "best.yaml"
        self.edit()

    def edit(self) -> None:
        """Have a person write the file anew, with a line of their own."""
        self.edits += 1
        limits = read_emitted(self.path).limits if self.path.exists() else FOUR
        text = re.sub(r"max-num-seqs: \d+", f"max-num-seqs: {limits.max_num_seqs}", SERVED)
        self.path.write_text(f"{text}max-model-len: {1000 + self.edits}\n")
        self.handed = None

    def hook(self, exit_codes: list[int], environment: Mapping[str, str]) -> HookEnd:
        """Hand over, or fail, or die."""
        code = exit_codes.pop(0) if exit_codes else 0
        if code == -9:
            raise KilledError
        if code == 0:
            self.handed = self.path.read_text()
            self.acts[environment["TUNE_EVENT"]] += 1
        return HookEnd(code, "")

    def verdict(self, world: World, since_s: float, until_s: float) -> Checked:
        """Return what a check finds."""
        best, current = self.shifts.seen(since_s, until_s), world.script.checked_at[-1]
        if until_s - since_s < 20 * MINUTE_S:
            return TOO_LITTLE
        return UNCHANGED if best == current else pays(best)

    @contextmanager
    def opened(self, exit_codes: list[int]) -> Iterator[World]:
        """Start the watch, as after a kill or a reboot."""
        guard = partial(Probation, 30 * MINUTE_S, _never, 0.05, self.rng)
        with a_world(
            self.folder,
            clock=self.clock,
            guard=guard,
            run_hook=partial(self.hook, exit_codes),
        ) as world:
            world.script.verdict = partial(self.verdict, world)
            yield world

    def live(self) -> None:
        """Let the month pass, round by round."""
        end_s, started_s = self.clock.at_s + DAYS * DAY_S, self.clock.at_s
        while self.clock.at_s < end_s:
            exit_codes: list[int] = []
            with ExitStack() as stack:
                world = stack.enter_context(self.opened(exit_codes))
                try:
                    while self.clock.at_s < end_s:
                        self.one_round(world, exit_codes)
                except KilledError:
                    pass
            self.check_whole()
        assert self.clock.at_s - started_s >= DAYS * DAY_S

    def one_round(self, world: World, exit_codes: list[int]) -> None:
        """Let a round pass, in which something may go wrong. Raises: KilledError."""
        world.script.meanwhile = None
        world.script.outages.clear()
        exit_codes.clear()
        fault = self.rng.choice(FAULTS) if self.rng.random() < FAULT_SHARE else None
        around: Any = nullcontext()
        if fault is not None:
            self.faults[fault.__name__.strip("_")] += 1
            around = fault(self, world, exit_codes) or nullcontext()
        try:
            with around:
                world.watcher.round()
        finally:
            self.clock.sleep(15 * MINUTE_S)
        self.check_whole()
        if fault is None:
            self.check_settled(world)

    def check_whole(self) -> None:
        """Whatever happened, the file is whole, and holds what people wrote."""
        if self.path.exists():
            read = read_emitted(self.path)
            assert read.limits in LASTING
            if "max-model-len" in read.values:
                assert read.values["max-model-len"] == 1000 + self.edits
            assert read.values["enforce-eager"] is True
        left = [one.name for one in self.folder.iterdir() if one.name.startswith(".best")]
        assert left in ([], left[: self.faults["killed_while_writing"]])
        kept = [one.name for one in (self.folder / "state").iterdir()]
        assert sum("damaged" not in name for name in kept) < 8, kept

    def check_settled(self, world: World) -> None:
        """After a round in which nothing went wrong, all is as it should be."""
        state = world.watcher.store.state
        if self.handed is not None and self.path.exists():
            assert state.handover is not None or self.path.read_text() == self.handed
        now_s = self.clock.at_s
        is_odd = self.shifts.seen(now_s - 8 * HOUR_S, now_s) == ODD
        if now_s - self.shifts.since_s(now_s) > SETTLED_S and not is_odd and not state.handover:
            wanted = self.shifts.best(now_s)
            if wanted not in state.memory.barred:
                self.acts["settled" if world.watcher.current == wanted else "late"] += 1


def _never(*_: object) -> Any:
    raise AssertionError("the guard's verdicts are drawn")


Fault = Callable[[Month, World, list[int]], Any]


def _prometheus_away(month: Month, world: World, _: list[int]) -> None:
    world.script.outages += ["Prometheus cannot be reached"] * month.rng.randrange(1, 6)


def _hook_fails(month: Month, _: World, exit_codes: list[int]) -> None:
    exit_codes += [month.rng.choice((1, 2, 127))] * month.rng.randrange(1, 3)


def _killed_in_hook(_: Month, __: World, exit_codes: list[int]) -> None:
    exit_codes.append(-9)


def _killed_around_a_save(month: Month, world: World, _: list[int]) -> None:
    left, is_after = [month.rng.randrange(1, 5)], month.rng.random() < 0.5
    folder = world.watcher.store
    save = folder.save

    def dying(state: Any) -> None:
        left[0] -= 1
        if not left[0] and not is_after:
            raise KilledError
        save(state)
        if not left[0]:
            raise KilledError

    folder.save = dying  # type: ignore[method-assign] # of this process alone, which it ends


def _restarted(_: Month, __: World, ___: list[int]) -> None:
    raise KilledError


@contextmanager
def _disk_full(_: Month, __: World, ___: list[int]) -> Iterator[None]:
    with full_disk():
        yield


def _clock_set(month: Month, world: World, _: list[int]) -> None:
    seconds = month.rng.choice((-3.0, -0.5, 0.25, 2.0)) * HOUR_S
    setting = getattr(world.clock, "set_by", None)
    if setting is None:
        world.clock.at_s += seconds
    else:
        setting(seconds)


def _edited_meanwhile(month: Month, world: World, _: list[int]) -> None:
    world.script.meanwhile = month.edit


def _edited_between(month: Month, _: World, __: list[int]) -> None:
    month.edit()


def _state_damaged(month: Month, _: World, __: list[int]) -> None:
    path = month.folder / "state" / "state.json"
    if path.exists() and month.damaged < 3:
        month.damaged += 1
        content = path.read_bytes()
        path.write_bytes(content[: month.rng.randrange(len(content))])
        # What was written may never have been handed over by the state that is gone.
        month.handed = None
        raise KilledError


FAULTS: tuple[Fault, ...] = (
    *(_prometheus_away, _hook_fails, _killed_in_hook, _killed_around_a_save, _restarted),
    *(_disk_full, _clock_set, _edited_meanwhile, _edited_between, _state_damaged),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_month_of_faults_ends_where_traffic_asks_for(
    seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    month = Month(tmp_path, random.Random(seed))
    month.live()
    late, settled = month.acts["late"], month.acts["settled"]
    assert sum(month.faults.values()) > 200
    assert set(month.faults) == {one.__name__.strip("_") for one in FAULTS}
    assert month.acts["change"] >= 4
    assert settled > 50 * max(late, 1)
    for kind, count in month.faults.items():
        name = kind.replace("_", " ")
        record_property(FAULTED, [f"watch, a month: {name}", count, count])
    record_property(
        "month",
        f"{DAYS} days, {sum(month.faults.values())} faults, {month.acts['change']} changes, "
        f"{month.acts['rollback']} rolled back, {month.edits} edits by people, none lost; "
        f"as traffic asks for in {settled} of {settled + late} settled rounds",
    )
