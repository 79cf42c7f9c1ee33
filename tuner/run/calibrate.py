"""Calibrate a run's step-time model: short blocks of the traffic on the live engine.

The first blocks tell roughly how fast each kind of step is. From then on a prediction says who
could be the best, and blocks are taken from the middle of these settings' own replays: those
that tell most, for their time, of how two of them differ. They are replayed in random order, so
that the drift of a machine hits all alike, until the differences are known or the time is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import (
    EngineError,
    NoFeasibleConfigError,
    ShadowError,
    TooFewSamplesError,
    UsageError,
)
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.replay.process import EngineStart
from tuner.run.context import TRACE, Workload
from tuner.run.drawing import Contention, Drawing
from tuner.run.journal import Round
from tuner.run.predict import predict
from tuner.run.rounds import STEPS, Steps, predicted_part, share_round, unpacked
from tuner.run.time_plan import fly_pilot
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import choose_windows, least_window, outlook
from tuner.search.choice import Choice
from tuner.search.draws import saved_by_more
from tuner.search.objective import Objective
from tuner.search.space import SearchSpace
from tuner.search.trials import Phase
from tuner.shadow.calibration import Calibration
from tuner.shadow.design import Block, choose, instants_s, spreads, wanted
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.speed import MoodSpreads, Speed, Visited
from tuner.shadow.step_model import StepModel
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import INSTANT_S, Window, busiest, whole

# The share of the budget that calibrating may take, and where nothing is raced: ours; mostly it
# ends before.
CALIBRATION_SHARE, ALONE_SHARE = 0.30, 0.75
# How long a block should take, and how many times as long it may take: ours, a hundred steps of
# a large model.
BLOCK_S, MAX_BLOCK = 2.0, 4.0
# For how many steps the requests of a block answer: ours. Few make batches that come and go,
# more those that stay.
FEW_STEPS, MANY_STEPS = 16, 64
# At how many instants of a setting's replay blocks are offered, and for how long a time all of
# a round are chosen: ours.
INSTANTS, ROUND_S = 6, 10.0
# Rounds of chosen blocks: no fewer, so that a model is held to what it was not fitted to.
MIN_ROUNDS, MAX_ROUNDS = 3, 32
# What choosing now may lose, as a share, and what a round has to be expected to save: ours.
SETTLED, WORTH = 0.002, 0.0003
# How many settings are looked at beside the current one, found by how many draws: ours, it is
# asked anew after every few seconds of blocks.
CONTENDERS, BLOCK_DRAWS = 4, 20
# How much traffic vLLM's own scheduler is asked about in the time, in seconds: ours.
ASKED_S = 60.0
# On so many requests it is asked who could bear most: ours, each load is a replay.
LOADED_REQUESTS = 1000


@dataclass(slots=True)
class Calibrator:
    """What live replays have shown of an engine's steps so far.

    `is_own` says whether this run has calibrated, not an earlier one. `keep` receives the steps
    of each replay, to put them on disk. `mood` is how restless the machine was by what was
    learnt last, None before.
    """

    calibration: Calibration
    is_own: bool = False
    keep: Callable[[EngineLimits, StepColumns], None] = lambda *_: None
    mood: MoodSpreads | None = None

    @classmethod
    def of(
        cls,
        started: EngineStart,
        current: EngineLimits,
        serve_values: Mapping[str, object],
        stored: Profile | None = None,
    ) -> Self:
        """Return one for an engine that was started, with the starts that a profile knows.

        Raises: ShadowError if nothing can be predicted of such an engine.
        """
        if started.shape is None:
            raise ShadowError(started.no_shadow)
        ceiling, blocks = started.info.ceiling, started.info.num_blocks
        calibration = Calibration(
            shape=started.shape,
            starts=(KvStart(ceiling, blocks),),
            steps=(),
            current=current,
            serve_values=serve_values,
            has_own_graphs=started.info.has_own_graphs,
        )
        if stored is None:
            return cls(calibration)
        # Estimates keep what they say of limits, at the level that an engine has shown.
        level = blocks / stored.num_blocks_at(ceiling) if stored.origin else 1.0
        for start in stored.kv_starts:
            if start.limits != ceiling:
                shown = max(1, round(level * start.num_blocks))
                calibration = calibration.and_start(start.limits, shown)
        return cls(calibration)

    def observe(self, limits: EngineLimits, log: ReplayLog) -> None:
        """Take in the steps of a live replay."""
        if log.kept_steps is not None:
            self.observe_steps(limits, log.kept_steps)

    def observe_steps(self, limits: EngineLimits, columns: StepColumns) -> None:
        """Take in the steps of a replay on the run's own engine."""
        self.keep(limits, columns)
        self.calibration = self.calibration.and_steps(limits, [columns])

    def observe_elsewhere(self, steps: Steps) -> None:
        """Take in the steps of a worker's round, as long as they would have taken here.

        The worker's machine is of the same kind, and its speed a factor of its own; without
        enough steps of the run's own engine to tell that factor, they are left out.
        """
        if not steps:
            return
        try:
            theirs = replace(self.calibration, steps=tuple(steps))
            times = theirs.times_of(self.calibration.profile())
        except TooFewSamplesError:
            return
        for limits, columns in steps:
            here = replace(columns, duration_s=columns.duration_s / times)
            self.calibration = self.calibration.and_steps(limits, [here])

    def learn(self) -> tuple[Profile, Speed]:
        """Return the profile that the steps so far make, and what they leave open.

        Raises: TooFewSamplesError with too few steps.
        """
        found, speed = self.calibration.learn()
        self.mood = speed.mood
        return self.calibration.profile_of(found, speed), speed

    def profile(self) -> Profile:
        """Return the profile that the steps so far make. Raises: TooFewSamplesError."""
        return self.learn()[0]


def replay_longer(
    runner: TrialRunner,
    calibrator: Calibrator,
    settings: Sequence[EngineLimits],
    wall_ratio: float,
    time_s: float,
) -> None:
    """Replay the busiest traffic at each setting, as long as the time for it lasts.

    Where no race will be held the time is best spent on batches as full as they get, which
    blocks are too short for. `wall_ratio` is what a second of the trace costs.

    Raises: EngineError.
    """
    context, each_s = runner.context, time_s / len(settings)
    trace = predicted_part(context.trace, context.aim)
    length_s = min(each_s / wall_ratio, max(trace.duration_s, INSTANT_S))
    piece = busiest(trace, length_s).of(trace)
    workload = Workload.of_piece(piece, context.aim.plan, context.aim)
    with context.stopwatch.stage("calibrate"):
        context.listener.note(
            f"the time holds no race: looking at {', '.join(map(str, settings))} for "
            f"{each_s:.0f} s each"
        )
        for limits in settings:
            observe = partial(calibrator.observe, limits)
            cut = CutRule(max_wall_s=each_s)
            runner.measure(limits, Phase.CALIBRATE, workload, cut, on_log=observe)


class Blocks:
    """Blocks of the traffic that are replayed until it is known who is the best.

    They `are_alone` where nothing is raced: then they may take most of the budget. Where it is
    told how much settings bear (`tells_capacity`) they are of fuller batches too, as more load
    makes them. `ends_s` is when the time for them is over. `count` is how many were replayed.

    Units: seconds.
    """

    def __init__(
        self,
        runner: TrialRunner,
        calibrator: Calibrator,
        predictor_of: Callable[[Profile], Predictor],
        *,
        are_alone: bool = False,
        tells_capacity: bool = False,
    ) -> None:
        aim = runner.context.aim
        self.runner, self.calibrator, self.predictor_of = runner, calibrator, predictor_of
        self.trace = predicted_part(runner.context.trace, aim)
        self.rng = np.random.default_rng(runner.engine.seed)
        self.are_alone = are_alone
        self.tells_capacity = aim.plan.bears_loads and (
            tells_capacity or aim.objective is Objective.CAPACITY
        )
        self.ends_s, self.count = 0.0, 0
        self._request_s, self._rounds, self._asked = 0.0, 0, 0
        self._taken: set[int] = set()
        self._loads: dict[EngineLimits, float] = {}
        self._loaded: dict[float, Trace] = {}
        self._few, share = self.trace, LOADED_REQUESTS / len(self.trace)
        if self.tells_capacity and share < 1:
            length_s = max(share * self.trace.duration_s, INSTANT_S)
            self._few = busiest(self.trace, length_s).of(self.trace)

    def calibrate(self) -> float:
        """Replay blocks live until it is known who is the best, or their share is over.

        Return the real time that a second of the trace costs, by the pilot before them.

        Raises: EngineError; ShadowError, TooFewSamplesError, UsageError where nothing is
            predicted.
        """
        context, trace = self.runner.context, self.trace
        self.calibrator.is_own = True
        with context.stopwatch.stage("calibrate"):
            observe = None if context.is_shared else self.calibrator.observe
            wall_ratio = fly_pilot(self.runner, observe)
            self._request_s = wall_ratio * trace.duration_s / len(trace)
            if not self.are_alone:
                context.listener.note(_outlook(self.runner, wall_ratio))
            context.listener.note("calibrating on short blocks of the traffic")
            time_s = CALIBRATION_SHARE * context.budget.total_s
            if self.are_alone:
                time_s = ALONE_SHARE * max(context.left_s, 0.0)
            self.ends_s = time.monotonic() + time_s
            self._first()
            self._chosen()
        return wall_ratio

    @property
    def _left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def _first(self) -> None:
        """Replay bursts at a few settings: of whole requests, and of more and shorter ones."""
        space, trace, request_s = self.runner.context.space, self.trace, self._request_s
        in_time = max(1, int(BLOCK_S / max(request_s, 1e-9)))
        mean = float((trace.prompt_tokens + MANY_STEPS).mean())
        calibration = self.calibrator.calibration
        each = int(calibration.shape.held_blocks(np.array([math.ceil(mean)]))[0])
        held = calibration.starts[0].num_blocks // max(each, 1)
        most = max(1, min(len(trace), space.ceiling.max_num_seqs))
        settings = [space.current, space.ceiling, *calibration_settings(space, most / 2)]
        blocks = []
        for limits in dict.fromkeys(settings):
            few = max(1, min(in_time, held, limits.max_num_seqs, len(trace)))
            many = min(limits.max_num_seqs, len(trace))
            for count, share, steps in (
                (few, 1.0, MANY_STEPS),
                (many, min(1.0, min(in_time, held) / many), FEW_STEPS),
            ):
                rows = np.sort(self.rng.choice(len(trace), count, replace=False))
                blocks.append(Block.burst(limits, trace, rows, steps, share))
        self._replay(blocks, [MAX_BLOCK * BLOCK_S] * len(blocks))

    def _learnt(self) -> tuple[Profile, Speed]:
        """Return what is learnt, of more bursts while their steps are too few.

        Raises: TooFewSamplesError when the time is over.
        """
        while True:
            try:
                return self.calibrator.learn()
            except TooFewSamplesError:
                if self._left_s <= 0:
                    raise
            self._first()

    def _chosen(self) -> None:
        """Replay what tells most of those that could be the best, until they are known.

        Raises: EngineError, ShadowError, TooFewSamplesError, UsageError.
        """
        for _ in range(MAX_ROUNDS):
            profile, speed = self._learnt()
            predictor = self.predictor_of(profile)
            found = self._contenders(predictor)
            known, loss = found.replays, found.loss
            if len(known) < 2:
                return
            aims = wanted([one.visited for one in known])
            off = float(spreads(speed.uncertainty, aims).max())
            self.runner.context.listener.note(
                f"{self.count} blocks: the speed of {len(known)} settings is known to "
                f"{off:.1%}{f', choosing now loses {loss:.1%}' if loss < math.inf else ''}"
            )
            is_known = self._asked >= MIN_ROUNDS and self._is_settled(found)
            if self._left_s <= 0 or is_known:
                return
            offered = [o for one in known for o in self._offered(predictor, one)]
            seen = [
                Visited.of(predictor.step_model_at(block.limits), steps)
                for block, steps in offered
            ]
            if not offered:
                return
            self._asked += 1
            time_s = min(ROUND_S, self._left_s) * (2 if self.runner.context.is_shared else 1)
            picked = choose(speed.uncertainty, speed.mood, aims, seen, time_s)
            most_s = [MAX_BLOCK * max(BLOCK_S, float(seen[i].seconds.sum())) for i in picked]
            self._replay([offered[i][0] for i in picked], most_s)
            if self.runner.engine.restarts_per_config:
                return  # where every change of limits is a start of its own

    def _is_settled(self, found: _Contenders) -> bool:
        """Whether so little is lost, or another round saves so little, that it is enough."""
        saved = saved_by_more(found.open_loss, self._asked + 1, 1)
        return found.loss <= SETTLED or saved < WORTH

    def _contenders(self, predictor: Predictor) -> _Contenders:
        """Return those that could be the best, and the current; what choosing now loses.

        Raises: ShadowError, UsageError.
        """
        context = self.runner.context
        space = context.space
        if predictor.doubt and context.is_shared:
            return _Contenders()  # workers know the rows of the whole trace alone
        if predictor.doubt:
            self.trace = busiest(self.trace, ASKED_S).of(self.trace)
            more = calibration_settings(space, space.ceiling.max_num_seqs / 2)
            settings = [space.current, space.ceiling, *more]
            return _Contenders(self._predicted(predictor, dict.fromkeys(settings, 1.0)))
        deployed, current = predictor.as_deployed(), space.current
        predicted = predict(deployed, space, self._decided_on(deployed))
        if not isinstance(predicted.outcomes[current], Measurement):
            return _Contenders()
        try:
            drawing = Drawing(deployed, predicted)
            found = drawing.contend(current, CONTENDERS, BLOCK_DRAWS, context.aim.confidence)
        except NoFeasibleConfigError:
            return _Contenders()  # what all of them break is told once they are predicted
        lost = (found.loss, self._open_loss(drawing, deployed, found))
        settings, widest = [*found.settings, current], space.ceiling.max_num_seqs
        if context.aim.objective is Objective.CAPACITY:
            return _Contenders(
                self._predicted(predictor, self._borne(deployed, settings)), *lost
            )
        visited = self._predicted(predictor, dict.fromkeys(settings, 1.0))
        if self.tells_capacity:
            budgets = (x.max_num_batched_tokens for x in (settings[0], current))
            fullest = [space.at(widest, budget) for budget in budgets]
            visited += self._predicted(predictor, self._borne(deployed, fullest))
        return _Contenders(visited, *lost)

    def _open_loss(self, drawing: Drawing, deployed: Predictor, found: Contention) -> float:
        """Return what of the loss of choosing now is for what blocks have not told yet.

        What is each setting's own, and each start's, they never tell.

        Raises: NoFeasibleConfigError, ShadowError, UsageError.
        """
        profile, aim = deployed.profile, self.runner.context.aim
        if profile.uncertainty is None:
            return found.loss
        told = replace(profile, uncertainty=profile.uncertainty.after(1.0, math.inf))
        current = self.runner.context.space.current
        settings = [*found.settings, *found.witnesses, current]
        losses = [
            Choice(
                one.draws(settings, BLOCK_DRAWS, is_here=True), current, aim.confidence
            ).regret
            for one in (drawing, Drawing(deployed.of(told), drawing.predictions))
        ]
        return max(0.0, losses[0] - losses[1])

    def _decided_on(self, deployed: Predictor) -> Workload:
        """Return what is predicted to see who could be the best: all, at the recorded load.

        A capacity takes a dozen replays each: who could have the largest is asked of fewer
        requests, at the load that the setting with the largest batches bears.
        """
        context = self.runner.context
        if context.aim.objective is not Objective.CAPACITY:
            return Workload.of_whole(context.trace, context.aim)
        aim, ceiling = replace(context.aim, objective=Objective.BALANCED), context.space.ceiling
        plan = replace(aim.plan, load=self._borne(deployed, [ceiling])[ceiling])
        few = self._few
        return Workload.of(TRACE, few, (whole(few),), replace(aim, plan=plan, window=None))

    def _borne(
        self, deployed: Predictor, settings: Iterable[EngineLimits]
    ) -> dict[EngineLimits, float]:
        """Return how much load settings bear, by the first model that was asked.

        As multiples of what is predicted; 1 of one that bears less, or fails.
        """
        aim, found = self.runner.context.aim, {}
        for limits in dict.fromkeys(settings):
            if limits not in self._loads:
                outcome = deployed.measure_capacity([self._few], limits, aim.plan, aim.slos)
                borne = outcome.capacity if isinstance(outcome, Measurement) else None
                self._loads[limits] = max(1.0, (borne or 0.0) / self.trace.load)
            found[limits] = self._loads[limits]
        return found

    def _at(self, load: float) -> Trace:
        """Return what is predicted, at a multiple of its load."""
        if load == 1.0:
            return self.trace
        if load not in self._loaded:
            self._loaded[load] = at_load(self.trace, load)
        return self._loaded[load]

    def _predicted(
        self, predictor: Predictor, loads: Mapping[EngineLimits, float]
    ) -> list[_Predicted]:
        """Return the predicted replays of settings, each at a multiple of the load.

        Raises: ShadowError, UsageError.
        """
        plan = replace(self.runner.context.aim.plan, keep_steps=True)
        found = []
        for limits, load in loads.items():
            try:
                log = predictor.replay(self._at(load), limits, plan)
            except EngineError:
                continue  # its own replay will tell
            found.append(_Predicted.of(limits, predictor.step_model_at(limits), log, load))
        return found

    def _offered(
        self, predictor: Predictor, one: _Predicted
    ) -> list[tuple[Block, StepColumns]]:
        """Return blocks from the middle of a predicted replay, with what is predicted of them.

        Raises: ShadowError, UsageError.
        """
        plan, found, steps = ReplayPlan(keep_steps=True), [], one.steps
        step_s = float(steps.duration_s.sum() / max(steps.repeats.sum(), 1))
        fit = BLOCK_S / max(step_s, 1e-9)
        counts = {int(min(FEW_STEPS, max(2, fit / 4))), int(min(MANY_STEPS, max(4, fit)))}
        timelines, trace = one.log.timelines, self._at(one.load)
        for at_s in instants_s(steps.end_s, steps.duration_s, INSTANTS, self.rng):
            for count in sorted(counts):
                block = Block.at(one.limits, trace, timelines, at_s, count)
                if block is None:
                    continue
                block = replace(block, load=one.load)
                try:
                    inside = predictor.replay(block.of(trace), one.limits, plan)
                    after_s = float(np.nanmax(inside.timelines.first_s))
                    block = block.followed(
                        trace, timelines, at_s, after_s, count * step_s, count
                    )
                    inside = predictor.replay(block.of(trace), one.limits, plan)
                except EngineError:
                    continue  # its first requests do not fit beside each other
                found.append((block, _kept(inside)))
        return found

    def _replay(self, blocks: Sequence[Block], most_s: Sequence[float]) -> None:
        """Replay blocks in random order, as rounds that workers may share."""
        pairs = list(zip(blocks, most_s, strict=True))
        pairs = [pairs[i] for i in self.rng.permutation(len(pairs))]
        self.count += len(pairs)
        if self.runner.engine.restarts_per_config:
            pairs.sort(key=lambda pair: pair[0].limits)
        if not self.runner.context.is_shared:
            for block, wall_s in pairs:
                self._replay_one(block, wall_s)
            return
        middle = -(-len(pairs) // 2)
        parts = [part for part in (pairs[:middle], pairs[middle:]) if part]
        rounds = [
            Round(
                Phase.CALIBRATE,
                self._rounds + number,
                tuple(block.limits for block, _ in part),
                tuple(wall_s for _, wall_s in part),
                blocks=tuple(block for block, _ in part),
            )
            for number, part in enumerate(parts, 1)
        ]
        self._rounds += len(rounds)
        self.runner.context.journal.offer(rounds)
        while self._share():
            pass

    def _workload_of(self, block: Block) -> Workload:
        piece = block.of(self._at(block.load))
        return Workload.of_piece(piece, ReplayPlan(), self.runner.context.aim)

    def _replay_one(self, block: Block, most_s: float) -> None:
        self.runner.measure(
            block.limits,
            Phase.CALIBRATE,
            self._workload_of(block),
            CutRule(max_wall_s=most_s),
            on_log=partial(self.calibrator.observe, block.limits),
        )

    def _share(self) -> bool:
        """Replay a round of the queue, and take in others'; tell if there was one."""
        context = self.runner.context
        found = share_round(
            self.runner,
            lambda one: [self._workload_of(block) for block in one.blocks],
            Phase.CALIBRATE,
        )
        for limits, columns in found.steps if found is not None else ():
            self.calibrator.observe_steps(limits, columns)
        done = context.journal.rounds(Phase.CALIBRATE)
        for number in sorted(done.keys() - self._taken):
            self.calibrator.observe_elsewhere(unpacked(done[number].get(STEPS, ())))
            self._taken.add(number)
        return found is not None


@dataclass(frozen=True, slots=True)
class _Predicted:
    """A setting's predicted replay at a multiple of the load, and the batches in it."""

    limits: EngineLimits
    log: ReplayLog
    steps: StepColumns
    visited: Visited
    load: float

    @classmethod
    def of(cls, limits: EngineLimits, model: StepModel, log: ReplayLog, load: float) -> Self:
        """Return what is made of a log with its steps."""
        steps = _kept(log)
        return cls(limits, log, steps, Visited.of(model, steps), load)


@dataclass(frozen=True, slots=True)
class _Contenders:
    """Replays of who could be the best, predicted, and what choosing now is expected to lose.

    `open_loss` is the part of that which blocks can save. Both are without end where nobody
    knows.
    """

    replays: Sequence[_Predicted] = ()
    loss: float = math.inf
    open_loss: float = math.inf


def _kept(log: ReplayLog) -> StepColumns:
    """Return the steps of a replay that was asked to keep them."""
    if log.kept_steps is None:
        raise ShadowError("the predicted replay kept no steps")
    return log.kept_steps


def _outlook(runner: TrialRunner, wall_ratio: float) -> str:
    """Say what the time that is left can answer."""
    context, engine = runner.context, runner.engine
    trace, aim = context.trace, context.aim
    if aim.window is not None:
        windows: tuple[Window, ...] = (aim.window,)
    else:
        left_s = context.left_s - CALIBRATION_SHARE * context.budget.total_s
        try:
            windows = choose_windows(trace, wall_ratio, left_s, aim.least_requests)
        except UsageError:
            windows = (least_window(trace, aim.least_requests),)
    replay_s = sum(w.length_s + w.lead_in_s for w in windows) * wall_ratio
    current = context.space.current
    cold_s = engine.cold_start_s(current) + engine.cold_start_s(engine.ceiling)
    return outlook(context.budget, context.left_s, CALIBRATION_SHARE, replay_s, cold_s)


def calibration_settings(space: SearchSpace, most_running: float) -> list[EngineLimits]:
    """Return what to replay live after the current limits and the ceiling.

    The ceiling shows the fullest batches and the largest prefills that the traffic makes, with
    `most_running` requests at once. Half as many with a small token budget show what lies
    below, and prefills in pieces beside decodes; a low cap shows small batches and long queues.

    Source: ours. Live on the demo model, ten settings: with half of what ran as the middle cap,
        six that were not calibrated on came out 4.7 % off in the mean, with a seventh 6.0 %.
    """
    low = next((cap for cap in space.ladder if cap > 1), space.ladder[0])
    half = max(1, int(most_running) // 2)
    middle = max(low, 1 << (half.bit_length() - 1))
    found = [space.at(middle, min(space.budgets)), space.at(low, max(space.budgets))]
    known = (space.current, space.ceiling)
    return list(dict.fromkeys(s for s in found if s.within(space.ceiling) and s not in known))
