"""How sure a prediction is: draws of other traffic of the kind, and of models as possible.

The few settings that could be best are predicted again on requests that are drawn anew, by
models as wrong as this one may be. Those of one draw replay the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, zip_longest

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.steps import joined
from tuner.errors import EngineError, TooFewSamplesError
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import Failure, measure_capacity
from tuner.run.context import Workload
from tuner.run.predict import FAR, Predictions, at_once, predict_more
from tuner.search.choice import CONTENDS, Choice, beside, witnesses
from tuner.search.draws import Draws, Learnable, drawn_of, wider_for
from tuner.search.effects import UNEXPLAINED, Effects, Unexplained
from tuner.search.judging import COST, SLO
from tuner.search.ladder import FINALISTS, alike
from tuner.search.objective import Objective, Score
from tuner.search.race import CONFIDENCE, Odds, RaceDecision
from tuner.search.trials import Observation, leader
from tuner.shadow import simulator
from tuner.shadow.predictor import Predictor
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.speed import visits
from tuner.shadow.step_model import StepModel
from tuner.stats import Estimate, Floats, even_normals
from tuner.traffic.resample import Resampler, at_load
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import busy_part

# Draws: ours; a probability of 0.9 is then itself off by 2 %, and by 4 % where there are many
# decisions to make. Of a capacity, for which each draw takes half a dozen replays, half as
# many: it is off by 3 % then.
DRAWS, FEW_DRAWS, CAPACITY_DRAWS = 200, 50, 100
# Each model that is drawn counts in so many draws, with what is unexplained of each its own:
# ours. Models are spread evenly over what is open of them, so that half as many say as much as
# one for each draw (tests/test_stats.py).
DRAWS_PER_MODEL = 2
# Who could be the best is asked of all with this share of the draws, and with all draws of so
# many of these, the likeliest; who may keep its bounds is whoever does so as often as not, and
# with room to spare who would were so many times as much of them used up: ours.
SIFT, SIFTED, POSSIBLE, SAFE = 0.2, 8, 0.5, 1.1
# Predictions of the same batches that differ by less than this are the same: ours, a tenth of
# what settings that lose the same may differ by.
SAME_RATIO = 0.001
# What settings that make the same batches have of their own, as a share of what is off by what
# they make, a variance: ours.
OWN_SHARE = 0.05
# Which batches a setting makes is asked of so many requests of a recording, its busiest: ours,
# for every step of them is kept.
MOST_VISITING = 20_000
# Of a profile that does not say what it leaves open, the stated error counts as the interval of
# 90 % of a ratio of two settings that make other batches: ours, since it is the largest of
# several medians, and what it has in common cancels. A setting has its share.
_OWN_ERRORS = 1.645 * math.sqrt(2)


@dataclass(frozen=True, slots=True)
class Contention:
    """Who could be the best by what is known, the likeliest first, without the current one.

    `witnesses` could not, and show that one of these or the current one is out for the load.
    `loss` is what choosing now is expected to lose, as a share of what the best costs.
    """

    settings: tuple[EngineLimits, ...]
    witnesses: tuple[EngineLimits, ...]
    loss: float


def _likeliest(
    drawn: Draws, current: EngineLimits, most: int, share: float, asked: float
) -> list[EngineLimits]:
    """Return who is the best of those that surely keep their bounds, and of those that may.

    In turns, so many of each at most, since who may keep them may turn out not to; and the best
    of those that keep their SLOs with room to spare, should neither: one that is not far from
    these, or better than the current one, which would be all that is left.
    """
    sides = [
        Choice(drawn, current, confidence).contenders(most, share)[:-1]
        for confidence in (asked, min(asked, POSSIBLE))
    ]
    if drawn.has_slos:
        safe = Choice(drawn.with_margin(SAFE), current, asked).contenders(1, share)[:-1]
        costs = dict(zip(drawn.settings, np.median(drawn.values, axis=0), strict=True))
        least = min((costs[s] for side in sides for s in side), default=math.inf)
        near = max((1 + FAR) * least, costs[current])
        sides.append([s for s in safe if costs[s] <= near])
    turns = [s for pair in zip_longest(*sides) for s in pair if s is not None]
    return list(dict.fromkeys(turns))


@dataclass(frozen=True, slots=True)
class Deployed:
    """A setting over the current one, as predicted of engines started with either.

    `gain` is the ratio on other traffic of the kind and `here` on the traffic as recorded, of
    the metric that decided; `log_window` is the logarithm of that of what is optimised, which
    cold engines are compared by, on the window that raced.
    """

    gain: Estimate
    here: Estimate
    log_window: float


def predict_deployed(
    predictor: Predictor,
    predictions: Predictions,
    window: Workload,
    pair: tuple[EngineLimits, EngineLimits],
    metric: str,
    unexplained: Unexplained | None = None,
    shown: tuple[EngineLimits, ...] = (),
) -> Deployed | None:
    """Predict a metric of one setting over another's on engines started with either.

    `unexplained` is what live replays of the two showed beyond their own speed, and of `shown`,
    the witnesses beside whom they are judged.
    None where one of them fails.

    Raises: ShadowError, UsageError.
    """
    own, nothing = predictor.as_deployed(), Predictions(predictions.workload)
    try:
        found = predict_more(own, nothing, (*pair, *shown))
        draws = Drawing(own, found).draws((*pair, *shown), DRAWS, unexplained)
        gain, here = draws.ratios(*pair, metric)
    except EngineError:
        return None
    ours, theirs = (
        window.score(own.measure(window.pieces, limits, window.plan, window.slos))
        for limits in pair
    )
    log_window = ours.log_over(theirs)
    if unexplained is not None:
        log_window += float(unexplained.cost.mean[0] - unexplained.cost.mean[1])
    if gain is None or here is None or not math.isfinite(log_window):
        return None
    return Deployed(gain, here, log_window)


def _distinct(seen: Sequence[Observation], current: EngineLimits) -> list[EngineLimits]:
    """Return one of each kind that may be chosen, and the current one first.

    Who is far from the best may be where the current one is further.

    Those that make the same batches are of one kind where the same is predicted of them: their
    engines may differ in captured graphs and in KV blocks.
    """
    whole = [o for o in seen if o.is_whole]
    best = leader(whole)
    mine = [o for o in whole if o.limits == current]
    chosen: list[Observation] = []
    for o in sorted(whole, key=lambda o: (o.score.order, o.limits)):
        is_near = best is None or o.score.could_beat(best.score, FAR)
        is_better = any(o.score.order < now.score.order for now in mine)
        if (is_near or is_better) and not any(_is_same(o, other) for other in (*mine, *chosen)):
            chosen.append(o)
    return [current, *(o.limits for o in chosen)]


def _is_same(one: Observation, other: Observation) -> bool:
    """Whether two settings make the same batches, in the same time."""
    is_as_fast = math.isclose(one.score.value, other.score.value, rel_tol=SAME_RATIO)
    return is_as_fast and alike(one, other)


def compare_engines(
    ours: Draws, theirs: Draws, seed: int, confidence: float = CONFIDENCE
) -> tuple[Odds, str, Estimate | None]:
    """Return how sure a setting of one engine is better than one of another.

    Of draws that both share, each of one setting; what no model knows of either engine, which
    draws of one place have in common, counts against it. Beside it stands by what they are
    judged, and by how much of it.
    """
    effects, count = Effects.of(2, (), UNEXPLAINED), len(ours.here)
    rng = np.random.default_rng(seed)
    off = np.array([effects.draw(rng) for _ in range(count)])
    return beside(ours.times(np.exp(off[:, 0] - off[:, 1])), theirs, confidence)


def _resamplers(workload: Workload) -> list[Resampler | None]:
    """Return what draws other traffic of each piece, None where it cannot be drawn."""
    if workload.plan.load_model is LoadModel.CLOSED:
        return [None] * len(workload.pieces)
    try:
        return [Resampler(piece) for piece in workload.pieces]
    except TooFewSamplesError:
        return [None] * len(workload.pieces)


# What of a draw has random numbers of its own.
_COMMON, _OWN, _TRAFFIC, _UNEXPLAINED, _BATCHES = range(5)


class Drawing:
    """Draws of what is open, the same for whoever is in them; what was replayed is kept.

    The model of a draw is the same for all settings but for what the batches of each have that
    no model knows, and so are its requests. Draws of another `engine` share these alone.
    """

    def __init__(self, predictor: Predictor, predictions: Predictions, engine: int = 0) -> None:
        self.predictions, self._predictor, self._engine = predictions, predictor, engine
        self._workload = workload = predictions.workload
        self._resamplers = _resamplers(workload)
        self._recorded = Replays(workload, workload.pieces)
        self._shared: list[StepModel] = []
        self._here: dict[tuple[EngineLimits, int], Floats] = {}
        self._elsewhere: dict[tuple[EngineLimits, int], Floats] = {}
        self._visited: dict[EngineLimits, Floats | None] = {}
        self._off_by: dict[tuple[int, int], Floats] = {}

    @property
    def stretches(self) -> int:
        """Of how many stretches other traffic is drawn, none where it cannot be."""
        return sum(r.stretches for r in self._resamplers if r is not None)

    @property
    def wider(self) -> float:
        """How many times as far as draws lie apart what is to come lies from the recorded.

        Draws lie around the recorded traffic as that does around what is usual, and so does
        what is to come: the two lie sqrt 2 times as far apart, and further as few stretches
        vary too little.
        """
        return math.sqrt(2) * wider_for(self.stretches) if self.stretches else 1.0

    def count(self, draws: int) -> int:
        """Return how many draws are made where so many are asked for."""
        is_capacity = self._workload.scoring.objective is Objective.CAPACITY
        return min(draws, CAPACITY_DRAWS) if is_capacity else draws

    def decide(
        self, current: EngineLimits, draws: int = DRAWS, confidence: float = CONFIDENCE
    ) -> RaceDecision:
        """Decide among the settings that could be the best, by draws of what was predicted.

        Raises: NoFeasibleConfigError if every setting fails; ShadowError, UsageError.
        """
        found = self.contend(current, confidence=confidence)
        settings = [*found.settings, *found.witnesses, current]
        return Choice(self.draws(settings, draws), current, confidence).decide()

    def contend(
        self,
        current: EngineLimits,
        most: int = FINALISTS,
        draws: int = FEW_DRAWS,
        confidence: float = CONFIDENCE,
    ) -> Contention:
        """Return who could be the best by a few draws of what is open of the engine's speed.

        Settings that make the same batches stand for each other. One at least, as long as any
        but the current one was predicted; none where all make the current one's batches.

        Raises: NoFeasibleConfigError if every setting fails; ShadowError, UsageError.
        """
        inside = _distinct(self.predictions.observations, current)
        few = max(1, int(SIFT * self.count(draws)))
        drawn = self.draws(inside, few, is_here=True)
        found = _likeliest(drawn, current, SIFTED, 0.0, confidence)
        inside = [*found, *witnesses(drawn, [*found, current]), current]
        drawn = self.draws(inside, draws, is_here=True)
        found = _likeliest(drawn, current, most, CONTENDS, confidence)[:most]
        beside_them = witnesses(drawn, [*found, current])
        regret = Choice(drawn, current, confidence).regret
        return Contention(tuple(found), beside_them, regret)

    def draws(
        self,
        settings: Sequence[EngineLimits],
        draws: int = DRAWS,
        unexplained: Unexplained | None = None,
        *,
        is_here: bool = False,
    ) -> Draws:
        """Return draws of settings of which everything was predicted.

        `unexplained` is what live replays showed to be off beyond their own speed, in
        logarithms, setting by setting. Only the model's error is drawn with `is_here`, where
        vLLM's own scheduler is asked, which takes too long, and where the traffic is too little
        to draw from.

        Raises: ShadowError, UsageError.
        """
        alike = None if unexplained else self.alike(settings)
        unexplained = unexplained or Unexplained.of(len(settings), alike=alike)
        count = self.count(draws)
        learnable = tuple(
            Learnable(effects, self._drawn_off(effects, count), column)
            for column, effects in ((COST, unexplained.cost), (SLO, unexplained.slo))
        )
        times = np.ones((count, len(settings), 3))
        for told in learnable:
            times[:, :, told.column] = np.exp(told.off)
        off = unexplained.means
        point = [self._workload.score(self.predictions.outcomes[x]) for x in settings]
        if self._predictor.doubt:
            error = self._own_error
            own = np.transpose([self._own_times(x, count, error) for x in settings])
            drawn = drawn_of(point) * own[:, :, None] * times
            return Draws.of(settings, point, drawn, learnable=learnable, off=off)
        here = self._replayed_here(settings, count) * times
        if is_here or not self.stretches:
            return Draws.of(settings, point, here, learnable=learnable, off=off)

        def elsewhere(some: Sequence[EngineLimits]) -> Floats:
            drawn = self._replayed_elsewhere(some, count)
            drawn *= times[:, [settings.index(limits) for limits in some]]
            return drawn

        return Draws.of(settings, point, here, elsewhere, self.stretches, learnable, off)

    def _drawn_off(self, effects: Effects, count: int) -> Floats:
        """Return draws of effects, of numbers that all effects share. Shapes: [count, n]."""
        found: Floats = np.array(
            [effects.draw(self._rng(_UNEXPLAINED, k)) for k in range(count)]
        )
        return found

    def _replayed_here(self, settings: Sequence[EngineLimits], count: int) -> Floats:
        """Return what replays of the recorded traffic bring, each model's in several draws.

        Shapes: [draws, settings, 3].
        """
        models = -(-count // DRAWS_PER_MODEL)
        engines = {limits: self._engines(limits, models) for limits in settings}
        places = [(x, k) for x in settings for k in range(models) if (x, k) not in self._here]

        def replay(place: tuple[EngineLimits, int]) -> Floats:
            limits, k = place
            return self._counted(self._recorded, limits, engines[limits][k])

        replayed = at_once(self._predictor, self._workload, replay, places)
        self._here.update(zip(places, replayed, strict=True))
        found = [[self._here[limits, k] for limits in settings] for k in range(models)]
        drawn: Floats = np.array(found)[np.arange(count) % models]
        return drawn

    def _replayed_elsewhere(self, some: Sequence[EngineLimits], count: int) -> Floats:
        """Return what replays of other traffic bring, drawn anew for each draw.

        Shapes: [draws, settings, 3].
        """
        models = -(-count // DRAWS_PER_MODEL)
        missing = [x for x in dict.fromkeys(some) if (x, count) not in self._elsewhere]
        engines = {limits: self._engines(limits, models) for limits in missing}

        def replay(k: int) -> list[Floats]:
            replays = self.other_traffic(k)
            return [self._counted(replays, x, engines[x][k % models]) for x in missing]

        if missing:
            replayed = at_once(self._predictor, self._workload, replay, range(count))
            for limits, column in zip(missing, zip(*replayed, strict=True), strict=True):
                self._elsewhere[limits, count] = np.array(column)
        return np.stack([self._elsewhere[limits, count] for limits in some], axis=1)

    def possible(
        self, limits: EngineLimits, count: int
    ) -> list[tuple[Replays, SimulatedEngine]]:
        """Return draws of other traffic, each with an engine of the setting as it may be."""
        engines = self.engines(limits, count)
        return [(self.other_traffic(k), engines[k]) for k in range(count)]

    def engines(self, limits: EngineLimits, count: int) -> list[SimulatedEngine]:
        """Return the engine of a setting as it may be in each draw."""
        found = self._engines(limits, -(-count // DRAWS_PER_MODEL))
        return [found[k % len(found)] for k in range(count)]

    def other_traffic(self, k: int) -> Replays:
        """Return the traffic of a draw."""
        rng = self._rng(_TRAFFIC, k)
        pairs = zip(self._workload.pieces, self._resamplers, strict=True)
        return Replays(self._workload, [p if r is None else r.draw(rng) for p, r in pairs])

    def _counted(
        self, replays: Replays, limits: EngineLimits, engine: SimulatedEngine
    ) -> Floats:
        """Return what counts of a replay; what failed, as in its live replay, always fails."""
        outcome = self.predictions.outcomes[limits]
        if isinstance(outcome, Failure):
            score = self._workload.score(outcome)
        else:
            score = replays.score(engine, limits, outcome.capacity)
        counted: Floats = drawn_of([score])[0]
        return counted

    def _engines(self, limits: EngineLimits, models: int) -> list[SimulatedEngine]:
        """Return the engine of a setting with each step model that is as possible."""
        profile, engine = self._predictor.profile, self._predictor.simulated(limits)
        if profile.uncertainty is None:
            shared = [engine.step_model] * models
            times = self._own_times(limits, models, self._own_error)
        else:
            shared = self._shared_models(models)
            times = self._own_times(limits, models, profile.uncertainty.setting)
        graphs = engine.step_model.graphs  # those of the setting's own start
        return [
            replace(engine, step_model=replace(model.scaled(t), graphs=graphs))
            for model, t in zip(shared, times.tolist(), strict=True)
        ]

    def _shared_models(self, models: int) -> list[StepModel]:
        """Return step models that are as possible for all settings as the stated one."""
        profile = self._predictor.profile
        uncertainty = profile.uncertainty
        if uncertainty is None or len(self._shared) >= models:
            return self._shared[:models]
        ways = range(1 + len(uncertainty.table) + 1)
        numbers = np.column_stack([self._normals(models, _COMMON, i) for i in ways])
        self._shared = [uncertainty.moved(profile.step_model, row) for row in numbers]
        return self._shared

    def alike(self, settings: Sequence[EngineLimits]) -> Floats:
        """Return how alike the batches are that settings make: what is off of them is as alike.

        Shapes: [settings, settings], a correlation.
        """
        found, visited = np.eye(len(settings)), [self._visits(x) for x in settings]
        for i, ours in enumerate(visited):
            for j, theirs in enumerate(visited[:i]):
                if ours is not None and theirs is not None:
                    found[i, j] = found[j, i] = (1.0 - OWN_SHARE) * float(ours @ theirs)
        return found

    def _visits(self, limits: EngineLimits) -> Floats | None:
        """Return which batches a setting makes of the recorded traffic, of a busy part of much.

        None of one that fails, and where vLLM's own scheduler is asked, which takes too long.
        """
        if limits not in self._visited:
            is_asked = not self._predictor.doubt
            self._visited[limits] = self._replayed_visits(limits) if is_asked else None
        return self._visited[limits]

    def _replayed_visits(self, limits: EngineLimits) -> Floats | None:
        engine = self._predictor.simulated(limits)
        plan = replace(self._workload.plan, keep_steps=True)
        try:
            logs = self._busy.logs(engine, limits, plan)
        except EngineError:
            return None
        steps = joined([log.kept_steps for log in logs if log.kept_steps is not None])
        return visits(steps, engine.step_model.graphs)

    @cached_property
    def _busy(self) -> Replays:
        """What of the traffic says which batches settings make."""
        pieces = self._workload.pieces
        return Replays(self._workload, [busy_part(p, MOST_VISITING) for p in pieces])

    @property
    def _own_error(self) -> float:
        """How far a setting's own steps are off by the stated error, in logarithms."""
        return math.log1p(self._predictor.wrong_ratio) / _OWN_ERRORS

    def _own_times(self, limits: EngineLimits, count: int, spread: float) -> Floats:
        """Return how many times as long a setting's own steps may take.

        Those of settings that make the same batches nearly the same.
        """
        own = self._normals(count, _OWN, limits.max_num_seqs, limits.max_num_batched_tokens)
        visited = self._visits(limits)
        if visited is not None:
            shared = self._shared_off(visited, count)
            own = math.sqrt(OWN_SHARE) * own + math.sqrt(1.0 - OWN_SHARE) * shared
        found: Floats = np.exp(spread * own)
        return found

    def _shared_off(self, visited: Floats, count: int) -> Floats:
        """Return normal numbers that are as alike for two settings as what they visit.

        What all have in common with the first that was predicted, or else asked for, is evenly
        spread.
        """
        first = self._visits(next(chain(self.predictions.outcomes, self._visited)))
        along = 0.0 if first is None else float(visited @ first)
        rest = visited if first is None else visited - along * first
        off: Floats = along * self._of_knot(count, -1)
        for knot in np.flatnonzero(rest.round(9)).tolist():
            off = off + rest[knot] * self._of_knot(count, knot)
        return off

    def _of_knot(self, count: int, knot: int) -> Floats:
        """Return what all settings have in common that make batches about a pair of knots."""
        if (count, knot) not in self._off_by:
            self._off_by[count, knot] = self._normals(count, _BATCHES, 1 + knot)
        return self._off_by[count, knot]

    def _normals(self, count: int, *place: int) -> Floats:
        """Return normal numbers of what has a place among what is drawn, evenly spread."""
        slices = DRAWS // FEW_DRAWS
        size = FEW_DRAWS // DRAWS_PER_MODEL
        blocks = range(-(-count // (slices * size)))
        place = (*place, self._engine) if self._engine else place
        parts = [even_normals(self._rng(*place, block), slices, size) for block in blocks]
        return np.concatenate(parts)[:count]

    def _rng(self, *place: int) -> np.random.Generator:
        """Return a generator of what has a place among what is drawn."""
        return np.random.default_rng(
            np.random.SeedSequence(self._predictor.seed, spawn_key=place)
        )


class Replays:
    """Replays of the pieces of one draw, laid out once for each load and cap of answers."""

    def __init__(self, workload: Workload, traffic: Sequence[Trace]) -> None:
        self._workload, self.traffic = workload, traffic
        self._laid_out: dict[tuple[float, int | None], list[PreparedTrace]] = {}

    def traffic_at(self, plan: ReplayPlan) -> list[PreparedTrace]:
        """Return the pieces at the load of a plan."""
        place = plan.load, None if plan.gate is None else plan.gate.max_output_tokens
        if place not in self._laid_out:
            self._laid_out[place] = [
                PreparedTrace(at_load(piece, plan.load), plan) for piece in self.traffic
            ]
        return self._laid_out[place]

    def logs(
        self, engine: SimulatedEngine, limits: EngineLimits, plan: ReplayPlan
    ) -> list[ReplayLog]:
        """Return the replay of each piece by a plan. Raises: EngineError."""
        pieces = self.traffic_at(plan)
        return [simulator.simulate(engine, piece, limits, plan) for piece in pieces]

    def score(
        self, engine: SimulatedEngine, limits: EngineLimits, usual: float | None
    ) -> Score:
        """Return the score of a setting on the drawn traffic; it bears about what is usual."""
        workload, load = self._workload, self._workload.plan.load
        at = partial(self.measure, engine, limits)
        if workload.scoring.objective is Objective.CAPACITY:
            near = usual / workload.pieces[0].load if usual else None
            found = measure_capacity(at, self.traffic, load, workload.slos, near)
            return workload.score(found)
        return workload.score(at(load))

    def measure(
        self, engine: SimulatedEngine, limits: EngineLimits, load: float
    ) -> Measurement | Failure:
        """Return what a setting does at a multiple of the recorded load."""
        try:
            logs = self.logs(engine, limits, replace(self._workload.plan, load=load))
        except EngineError as error:
            return Failure(error.message)
        measured = measure(logs, self._workload.slos, self._workload.scoring.statistics)
        return replace(measured, load=load * self.traffic[0].load)
