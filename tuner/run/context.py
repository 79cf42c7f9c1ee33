"""What the stages of a run are given: the trace, the aim, the space, where evidence is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self
from uuid import uuid4

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.files import read_json
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.runner import EngineRunner, Failure
from tuner.replay.series import ReplayTimelines, SavedTimelines, TimelineRecord
from tuner.replay.slo import Slo
from tuner.run.directory import RUN_FILE, TIMELINES_FILE, TRIALS_FILE, RunDir
from tuner.run.evidence import finishes_all
from tuner.run.listener import Listener
from tuner.run.stored import RunRecord
from tuner.search.budget import Aim, Budget
from tuner.search.choice import Choice
from tuner.search.draws import Draws
from tuner.search.objective import Objective, Score, Scoring, Tier, make_scoring
from tuner.search.space import SearchSpace
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window, whole

if TYPE_CHECKING:  # what has no journal, as a prediction, need not import Optuna
    from tuner.run.journal import Journal


@dataclass(slots=True)
class Stopwatch:
    """What is left of a run's time, and where real time went, by stage.

    Units: seconds.
    """

    total_s: float
    stages_s: dict[str, float] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.monotonic, init=False)

    def begin(self) -> None:
        """Count from now on."""
        self._began_s = time.monotonic()

    @property
    def left_s(self) -> float:
        """What is left, negative once it is overdrawn."""
        return self._began_s + self.total_s - time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began_s)

    def add(self, name: str, took_s: float) -> None:
        """Add to the time of a stage."""
        self.stages_s[name] = self.stages_s.get(name, 0.0) + took_s


# A replay may always take so long, in seconds: ours.
SHORT_S = 30.0
# The names of what the live search, the race and the cold engines replay, and of blocks that
# calibrate.
WINDOW, CALIBRATION = "window", "calibration"
# The name of what is predicted.
TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is replayed, how, and how it is judged.

    The pieces, windows of the trace, are replayed one after the other and pooled; `name` tells
    them from those of other workloads.
    """

    name: str
    windows: tuple[Window, ...]
    pieces: tuple[Trace, ...]
    plan: ReplayPlan
    slos: tuple[Slo, ...]
    scoring: Scoring

    @classmethod
    def of(cls, name: str, trace: Trace, windows: Sequence[Window], aim: Aim) -> Self:
        """Return the windows of the trace, as far as they may be warmed up, with the aim.

        Raises: TooFewSamplesError if they cannot carry it; UsageError.
        """
        windows = [window.led_in_by(aim.plan.most_lead_in_s) for window in windows]
        recorded = aim.plan.on(trace)
        pieces = tuple(window.of(recorded) for window in windows)
        scoring = make_scoring(aim.objective, aim.slos, sum(p.measured for p in pieces))
        return cls(name, tuple(windows), pieces, aim.plan, aim.slos, scoring)

    @classmethod
    def of_whole(cls, trace: Trace, aim: Aim) -> Self:
        """Return what is predicted: the window that was asked for, or the whole trace.

        Raises: TooFewSamplesError if it cannot carry what was asked.
        """
        return cls.of(TRACE, trace, (aim.window or whole(trace),), aim)

    @classmethod
    def of_piece(cls, piece: Trace, plan: ReplayPlan, aim: Aim) -> Self:
        """Return traffic to calibrate on, which holds too few requests for a tail."""
        scoring = Scoring(aim.objective, aim.slos, "p50")
        return cls(CALIBRATION, (), (piece,), plan, aim.slos, scoring)

    def score(self, outcome: Measurement | Failure) -> Score:
        """Return the place of an outcome among those of other settings."""
        if isinstance(outcome, Failure):
            return Score(Tier.FAILED, math.inf, "failed")
        return self.scoring.score(outcome)

    def replay_on(
        self,
        engine: EngineRunner,
        limits: EngineLimits,
        cut: CutRule,
        on_progress: Callable[[Progress], bool] | None,
        on_log: Callable[[ReplayLog], None] | None = None,
    ) -> Measurement | Failure:
        """Replay live; on_log receives each piece's log, with every step in it.

        Raises: EngineError when the engine cannot be started.
        """
        for name, piece in zip(self.names, self.pieces, strict=True):
            engine.use(name, piece)
        plan = replace(self.plan, cut=cut, keep_steps=on_log is not None)
        return engine.measure(self.names, limits, plan, self.slos, on_progress, on_log)

    @property
    def names(self) -> list[str]:
        """The names of the pieces."""
        return [f"{self.name} {i}" for i in range(len(self.pieces))]

    @property
    def requests(self) -> int:
        """How many requests a replay measures."""
        return sum(piece.measured for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the stages of a run are given, and where they put what they find.

    `record` is what the run was begun with, `is_shared` whether workers may take rounds of it.
    `caveats` gathers what the stages found to be doubtful, `caveat_texts` the text of those
    that say it with figures of this run. `attempt` names this process
    among those that a run was made by.
    """

    trace: Trace
    space: SearchSpace
    aim: Aim
    budget: Budget
    stopwatch: Stopwatch
    journal: Journal
    run_dir: RunDir
    listener: Listener
    record: RunRecord
    is_shared: bool = False
    caveats: set[Caveat] = field(default_factory=set)
    caveat_texts: dict[Caveat, str] = field(default_factory=dict)
    attempt: str = field(default_factory=lambda: uuid4().hex[:8])

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.stopwatch.left_s

    def choice(self, draws: Draws) -> Choice:
        """Return what draws say beside the current setting, as sure as the aim asks."""
        return Choice(draws, self.space.current, self.aim.confidence)

    @property
    def doubts(self) -> set[Caveat]:
        """The caveats so far, and whether what is optimised could tell anything better."""
        records, current = self.journal.records(), self.space.current
        is_rate = self.aim.objective is Objective.THROUGHPUT
        is_given = is_rate and finishes_all(records, current)
        return self.caveats | ({Caveat.ALL_FINISHED} if is_given else set())

    def worded(
        self, found: Collection[Caveat], own: Iterable[tuple[Caveat, str]] = ()
    ) -> dict[Caveat, str]:
        """Return the text of each caveat in a fixed order: its own, the run's, or the usual."""
        texts = self.caveat_texts | dict(own)
        return {caveat: texts.get(caveat, caveat.text) for caveat in Caveat if caveat in found}

    @property
    def within_time(self) -> CutRule:
        """What cuts a replay that the time that is left does not hold, but no short one."""
        return CutRule(max_wall_s=max(SHORT_S, self.left_s))

    def below(self, ceiling: EngineLimits) -> Self:
        """Return the context of an engine that starts at no more than a ceiling."""
        self.caveats.add(Caveat.CEILING_LOWERED)
        self.caveat_texts[Caveat.CEILING_LOWERED] = (
            f"the engine did not start at {self.space.ceiling}, so that nothing beyond "
            f"{ceiling} was tried: with lower caps in --max-num-seqs it starts with less"
        )
        self.caveat_texts[Caveat.AT_SPACE_EDGE] = (
            "the best value lies at the edge of what was searched"
        )
        record = msgspec.structs.replace(self.record, ceiling=ceiling)
        return replace(self, space=self.space.below(ceiling), record=record)

    def keep_windows(
        self, windows: Sequence[Window] = (), predicted: Sequence[Window] = ()
    ) -> None:
        """Put on disk which windows are replayed and predicted, for whoever goes on."""
        chosen = {"windows": tuple(windows), "predicted_windows": tuple(predicted)}
        self.run_dir.write_json(RUN_FILE, msgspec.structs.replace(self.record, **chosen))

    def keep_trials(self) -> None:
        """Put every trial that ended on disk, also those of workers elsewhere."""
        self.run_dir.write_lines(TRIALS_FILE, self.journal.records())

    def keep_timelines(
        self, limits: EngineLimits, engine: str, windows: Sequence[TimelineRecord]
    ) -> None:
        """Put on disk what a replay looked like over time, window by window."""
        held, path = SavedTimelines(), self.run_dir.path / TIMELINES_FILE
        if path.exists():
            held = read_json(path, SavedTimelines, "the run cannot be resumed; start a new one")
        added = ReplayTimelines(
            engine, limits.max_num_seqs, limits.max_num_batched_tokens, list(windows)
        )
        self.run_dir.write_json(TIMELINES_FILE, held.with_replay(added))
