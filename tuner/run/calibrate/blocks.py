"""Calibrate a run's step-time model: short blocks of the traffic on the live engine.

The first blocks tell roughly how fast each kind of step is. From then on a prediction says who
could be the best, and blocks are taken from the middle of these settings' own replays: those
that tell most, for their time, of how two of them differ. They are replayed in random order, so
that the drift of a machine hits all alike, until the differences are known or the time is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import EngineError, TooFewSamplesError, UsageError
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.run.calibrate.calibrator import Calibrator
from tuner.run.calibrate.contenders import (
    Contended,
    Contender,
    Contenders,
    calibration_settings,
    kept_steps,
)
from tuner.run.context import Workload
from tuner.run.journal import Round
from tuner.run.rounds import STEPS, predicted_part, share_round, unpacked
from tuner.run.time_plan import fly_pilot
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import choose_windows, least_window, outlook
from tuner.search.draws import saved_by_more
from tuner.search.trials import Phase
from tuner.shadow.design import Block, choose, instants_s, spreads, wanted
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile
from tuner.shadow.speed import Speed, Visited
from tuner.traffic.traces import Trace
from tuner.traffic.windows import INSTANT_S, Window, busiest

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
        self.runner, self.calibrator, self.predictor_of = runner, calibrator, predictor_of
        self.contenders = Contenders(runner.context, tells_capacity=tells_capacity)
        self.rng = np.random.default_rng(runner.engine.seed)
        self.are_alone = are_alone
        self.ends_s, self.count = 0.0, 0
        self._request_s, self._rounds, self._asked = 0.0, 0, 0
        self._taken: set[int] = set()

    @property
    def trace(self) -> Trace:
        """The traffic that they are of."""
        return self.contenders.trace

    def calibrate(self) -> float:
        """Replay blocks live until it is known who is the best, or their share is over.

        Return the real time that a second of the trace costs, by the pilot before them.

        Raises: EngineError; ShadowError, TooFewSamplesError, UsageError where nothing is
            predicted.
        """
        context, trace = self.runner.context, self.trace
        self.calibrator.is_own = True
        with context.stopwatch.stage("calibrate"):
            wall_ratio = fly_pilot(self.runner, self._observe_pilot)
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

    def _observe_pilot(self, limits: EngineLimits, log: ReplayLog) -> None:
        """Take in what the pilot showed; the steps of a shared run are those of its rounds."""
        if self.runner.context.is_shared:
            self.calibrator.observe_drafts(log)
        else:
            self.calibrator.observe(limits, log)

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
            found = self.contenders.of(predictor)
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

    def _is_settled(self, found: Contended) -> bool:
        """Whether so little is lost, or another round saves so little, that it is enough."""
        saved = saved_by_more(found.open_loss, self._asked + 1, 1)
        return found.loss <= SETTLED or saved < WORTH

    def _offered(self, predictor: Predictor, one: Contender) -> list[tuple[Block, StepColumns]]:
        """Return blocks from the middle of a predicted replay, with what is predicted of them.

        Raises: ShadowError, UsageError.
        """
        plan, found, steps = ReplayPlan(keep_steps=True), [], one.steps
        step_s = float(steps.duration_s.sum() / max(steps.repeats.sum(), 1))
        fit = BLOCK_S / max(step_s, 1e-9)
        counts = {int(min(FEW_STEPS, max(2, fit / 4))), int(min(MANY_STEPS, max(4, fit)))}
        timelines, trace = one.log.timelines, self.contenders.at(one.load)
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
                found.append((block, kept_steps(inside)))
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
        piece = block.of(self.contenders.at(block.load))
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
