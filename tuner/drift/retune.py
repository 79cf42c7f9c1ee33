"""Predictions for new traffic from a profile: a re-tune without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tuner.drift.baseline import Baseline
from tuner.engine.limits import EngineLimits
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.drawing import FEW_DRAWS, Drawing
from tuner.run.inputs import Config, ReplaySettings, engine_of_profile, fit_lengths
from tuner.run.predict import Predictions, predict, predict_more
from tuner.search.budget import Aim, asked_window
from tuner.search.draws import Draws
from tuner.search.objective import Objective
from tuner.search.race import RaceDecision
from tuner.search.space import DEFAULT_LADDER, Reach, SearchSpace, search_space
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import Window, WindowChoice, whole


@dataclass(frozen=True, slots=True)
class Retune:
    """What a profile predicts of the settings that may be tried."""

    space: SearchSpace
    predictor: Predictor

    def rank(self, trace: Trace, aim: Aim, parts: tuple[Window, ...] = ()) -> Predictions:
        """Predict the whole space on the traffic, or on the given parts of it.

        Raises: ShadowError, TooFewSamplesError, UsageError.
        """
        windows = parts or (aim.window or whole(trace),)
        workload = Workload.of("traffic", trace, windows, aim)
        return predict(self.predictor, self.space, workload)

    def decide(self, predicted: Predictions) -> RaceDecision:
        """Decide by draws of what was predicted, against the current limits.

        Raises: NoFeasibleConfigError if nothing could be predicted; ShadowError, UsageError.
        """
        return Drawing(self.predictor, predicted).decide(self.space.current, FEW_DRAWS)

    def draw(
        self, workload: Workload, settings: Sequence[EngineLimits], draws: int = FEW_DRAWS
    ) -> Draws:
        """Return draws of settings on a workload. Raises: ShadowError, UsageError."""
        predicted = predict_more(self.predictor, Predictions(workload), settings)
        return Drawing(self.predictor, predicted).draws(settings, draws)


@dataclass(frozen=True, slots=True)
class RetuneOptions(ReplaySettings):
    """What a re-tune by prediction aims at; what is None is the baseline's.

    With a `reach` nothing further from the current limits is tried. A gain below
    `min_gain_ratio` does not pay.

    Units: seconds; `ladder` caps of max_num_seqs.
    """

    objective: Objective | None = None
    slos: tuple[Slo, ...] = ()
    ladder: tuple[int, ...] = DEFAULT_LADDER
    window: WindowChoice | None = None
    seed: int = 0
    is_forced: bool = False
    reach: Reach | None = None
    min_gain_ratio: float = 0.0

    def aim(self, baseline: Baseline, trace: Trace) -> Aim:
        """Return what is aimed at on this trace. Raises: UsageError, TraceError."""
        plan = self._replayed_as(baseline).plan(trace)
        return Aim(
            self.objective or baseline.objective,
            self.slos or baseline.slos,
            plan,
            asked_window(self.window, trace, plan),
        )

    def _replayed_as(self, baseline: Baseline) -> Self:
        """Return the settings with what is open as the baseline was replayed."""
        left = self.request_timeout_s or baseline.request_timeout_s
        found = replace(self, request_timeout_s=left)
        if baseline.concurrency is None or self.load_model or self.concurrency:
            return found
        return replace(found, load_model=LoadModel.CLOSED, concurrency=baseline.concurrency)


@dataclass(frozen=True, slots=True)
class Ready:
    """A profile that can predict, what is aimed at, and the traffic as it can take it."""

    retune: Retune
    aim: Aim
    trace: Trace


def retune_on(
    read: Trace,
    baseline: Baseline,
    current: EngineLimits,
    config: Config,
    options: RetuneOptions,
    note: Callable[[str], None],
) -> Ready:
    """Return what the baseline's profile can predict of this traffic.

    `note` receives what there is to say of requests that are too long.

    Raises: ShadowError if the profile does not fit here; TunerError.
    """
    profile = baseline.profile
    source = ProfiledEngine(profile, is_forced=options.is_forced)
    facts = source.facts(engine_of_profile(profile, config).values)
    trace, message = fit_lengths(read, facts.max_model_len, options.too_long)
    if message:
        note(message)
    may_grow = profile.tells_beyond
    space = search_space(facts, trace, options.ladder, current, may_grow=may_grow)
    space = replace(space, reach=options.reach)
    aim = options.aim(baseline, trace)
    # What would be deployed: an engine that starts with the setting itself.
    predictor = Predictor(profile, seed=options.seed, is_forced=options.is_forced)
    return Ready(Retune(space, predictor), aim, trace)
