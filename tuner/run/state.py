"""What the stages of a run share: engine, study, windows, time left, and how a trial is made.

Every trial, live or shadow, is judged and put on disk here before anything else happens. What
to try is decided by the stages (`live_search`, `shadow_search`, `racing`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, EngineError
from tuner.replay.loop import Progress, ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.runner import EngineRunner, Failure
from tuner.replay.series import TimelineRecord, with_replay
from tuner.run.directory import TIMELINES_FILE, TRIALS_FILE, RunDir
from tuner.run.journal import Journal
from tuner.run.listener import Listener
from tuner.search.budget import Aim
from tuner.search.objective import Score, Scoring, Tier, make_scoring
from tuner.search.race import Forecasts
from tuner.search.space import SearchSpace
from tuner.search.trials import Phase, Trial
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window

# Engine deaths after which the run gives up, in a row and below what has worked: ours; one may
# be chance, three are the engine's fault.
MAX_DEATHS = 3


@dataclass(slots=True)
class RunState:
    """A run in progress.

    `windows` is empty until they are chosen, unless the run is resumed. `walls_s` says where
    real time went, by stage. `foreseen_s` is how long the shadow foretells a replay of the
    windows to take, and `forecasts` what it foretells of them. `attempt` names this process
    among those that a run was made by.
    """

    trace: Trace
    space: SearchSpace
    aim: Aim
    bench: EngineRunner
    journal: Journal
    run_dir: RunDir
    listener: Listener
    windows: tuple[Window, ...] = ()
    caveats: set[Caveat] = field(default_factory=set)
    walls_s: dict[str, float] = field(default_factory=dict)
    foreseen_s: dict[EngineLimits, float] = field(default_factory=dict)
    forecasts: Forecasts = field(default_factory=Forecasts)
    attempt: str = field(default_factory=lambda: uuid4().hex[:8])
    on_windows: Callable[[tuple[Window, ...]], None] | None = None
    on_forecast: Callable[[tuple[Window, ...], int], None] | None = None
    _deadline_s: float = field(default=0.0, init=False)
    _deaths: int = field(default=0, init=False)
    _goal: Scoring | None = field(default=None, init=False)

    def begin(self) -> None:
        """Let the budget's clock run."""
        self._deadline_s = time.monotonic() + self.aim.budget.total_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._deadline_s - time.monotonic()

    @property
    def goal(self) -> Scoring:
        """What is optimised, known once the windows are. Raises: EngineError before."""
        if self._goal is None:
            raise EngineError("the windows are not chosen yet")
        return self._goal

    @property
    def is_planned(self) -> bool:
        """Whether windows and goal are chosen."""
        return self._goal is not None

    @property
    def names(self) -> list[str]:
        """The windows' names."""
        return [f"window {i}" for i in range(len(self.windows))]

    @property
    def window_requests(self) -> int:
        """How many requests a replay of all windows offers."""
        return sum(len(window.of(self.trace)) for window in self.windows)

    def use_windows(self) -> None:
        """Tell everybody of the chosen windows.

        Raises: TooFewSamplesError if they cannot carry what was asked.
        """
        if self.on_windows is not None:
            self.on_windows(self.windows)
        self._goal = make_scoring(self.aim.objective, self.aim.slos, self.window_requests)
        for name, window in zip(self.names, self.windows, strict=True):
            self.bench.use(name, window.of(self.trace))

    def on_parts(self, parts: tuple[Window, ...], generation: int) -> None:
        """Tell workers which parts of the trace the forecast replays, and that it begins."""
        if self.on_forecast is not None:
            self.on_forecast(parts, generation)
        self.journal.set_state(f"forecast {generation}")

    @property
    def usual_wall_s(self) -> float:
        """What a whole replay of the windows took so far, in the middle; 0 before the first."""
        return _middle([wall_s for _, wall_s in self._whole_replays()])

    def replay_s(self, limits: EngineLimits) -> float:
        """Return what a replay of the windows takes: as it did, as foretold, or as others do.

        Units: seconds, 0 where nothing is known.
        """
        mine = [wall_s for at, wall_s in self._whole_replays() if at == limits]
        return _middle(mine) or self.foreseen_s.get(limits, 0.0) or self.usual_wall_s

    def _whole_replays(self) -> Iterator[tuple[EngineLimits, float]]:
        """Yield the limits of each whole replay of the windows, and how long it took."""
        for record in self.journal.records():
            if record.is_whole and record.measurement and record.phase.is_on_windows:
                yield record.limits, float(record.measurement["wall_s"])

    def trial(
        self,
        limits: EngineLimits,
        phase: Phase,
        cut: CutRule,
        race_round: int = 0,
        on_log: Callable[[ReplayLog], None] | None = None,
        *,
        is_cold: bool = False,
        names: Sequence[str] | None = None,
        goal: Scoring | None = None,
    ) -> Trial:
        """Measure once, live, and put it on disk, whatever came out; return the record.

        As `measure`.
        """
        return self.measure(
            limits, phase, cut, race_round, on_log, is_cold=is_cold, names=names, goal=goal
        )[1]

    def measure(
        self,
        limits: EngineLimits,
        phase: Phase,
        cut: CutRule,
        race_round: int = 0,
        on_log: Callable[[ReplayLog], None] | None = None,
        *,
        is_cold: bool = False,
        load: float | None = None,
        names: Sequence[str] | None = None,
        goal: Scoring | None = None,
    ) -> tuple[Measurement | Failure, Trial]:
        """Measure once, live, and put it on disk, whatever came out; return it and its record.

        on_log hears of each window's log, with every step in it. A cold trial starts an engine
        of its own with the limits as start-up values; `load` is in place of the plan's.

        Raises: EngineError when the engine cannot be kept alive.
        """
        number = self.journal.begin(limits, phase, race_round)
        self.listener.trial_started(number, limits, phase)
        plan = replace(self.aim.plan, cut=cut, keep_steps=on_log is not None)
        plan = plan if load is None else replace(plan, load=load)
        measure = self.bench.measure_cold if is_cold else self.bench.measure
        outcome = measure(
            self.names if names is None else names,
            limits,
            plan,
            self.aim.slos,
            self._heard,
            on_log,
        )
        record = self.keep(number, limits, phase, outcome, goal or self.goal, race_round)
        if isinstance(outcome, Failure):
            self._deaths += self._should_live(limits)
            if self._deaths >= MAX_DEATHS:
                raise EngineError(
                    f"the engine died {MAX_DEATHS} times in a row: {record.cause}",
                    f"see {self.run_dir.engine_log}",
                )
        else:
            self._deaths = 0
        return outcome, record

    def keep(
        self,
        number: int,
        limits: EngineLimits,
        phase: Phase,
        outcome: Measurement | Failure,
        goal: Scoring,
        race_round: int = 0,
    ) -> Trial:
        """Judge what came out of a trial, put it on disk, and return the record."""
        record, score, slacks = judged(
            number, limits, phase, outcome, goal, race_round, self.attempt
        )
        self.run_dir.is_measured = True
        if self.journal.finish(number, score, slacks, record):
            self.write_trials()
            self.listener.trial_ended(record, self.left_s)
        return record

    def write_trials(self) -> None:
        """Put on disk what was measured, here and by workers elsewhere."""
        self.run_dir.write_lines(TRIALS_FILE, self.journal.records())

    def keep_timelines(
        self, limits: EngineLimits, engine: str, windows: Sequence[TimelineRecord]
    ) -> None:
        """Put on disk what a replay looked like over time, window by window."""
        held = None
        if (self.run_dir.path / TIMELINES_FILE).exists():
            held = self.run_dir.read_json(TIMELINES_FILE)
        content = with_replay(held, limits, engine, windows)
        self.run_dir.write_json(TIMELINES_FILE, content)

    def _should_live(self, limits: EngineLimits) -> bool:
        """Whether a failure here speaks against the engine, not against these limits."""
        lived = [o.limits for o in self.journal.observations() if o.is_whole]
        return not lived or any(limits.within(others) for others in lived)

    def _heard(self, progress: Progress) -> bool:
        self.listener.progress(progress)
        return True


def _middle(walls_s: Sequence[float]) -> float:
    return sorted(walls_s)[len(walls_s) // 2] if walls_s else 0.0


def judged(
    number: int,
    limits: EngineLimits,
    phase: Phase,
    outcome: Measurement | Failure,
    goal: Scoring,
    race_round: int = 0,
    attempt: str = "",
) -> tuple[Trial, Score, dict[str, float]]:
    """Return a trial's record, its score and the SLOs' slacks."""
    if isinstance(outcome, Measurement):
        score, slacks = goal.score(outcome), goal.slacks(outcome)
        measured, cause = outcome.as_json(), ""
    else:
        score, slacks = Score(Tier.FAILED, math.inf, "failed"), {}
        measured, cause = None, outcome.cause
    return (
        Trial.of(number, limits, phase, race_round, score, measured, cause, attempt),
        score,
        slacks,
    )
