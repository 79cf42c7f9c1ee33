"""What live replays have shown of an engine, the profile made of it, and how wrong that is.

Answers whether what was learnt is good enough to rank by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape, Graphs, accepted_rates
from tuner.engine.steps import StepColumns, joined
from tuner.errors import Caveat, ShadowError, TooFewSamplesError
from tuner.shadow.fit import Fit, fit, host_of, model_of, times_as_long, undistorted
from tuner.shadow.launches import PASSES, on_device
from tuner.shadow.profiles import KvStart, Profile, drafts_words
from tuner.shadow.speed import Speed
from tuner.shadow.speed_fit import learn, with_host
from tuner.shadow.step_model import StepModel
from tuner.stats import Floats

# A shadow that is wrong by more than this on a configuration it has not seen ranks nothing:
# ours; the settings of a sweep differ by about as much.
LARGEST_ERROR_RATIO = 0.20
# No shadow is trusted to less than this, however well it fits: ours, what two live replays of
# the same configuration differ by on a quiet machine.
MIN_ERROR_RATIO = 0.03

_Steps = tuple[tuple[EngineLimits, StepColumns], ...]
"""What was measured at each of some limits, in order."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What live replays have shown of an engine: its shape, its starts, its steps.

    With `has_own_graphs` the steps of a setting ran with the graphs of an engine of its own,
    else with those of the engine that all were replayed on. `brought` counts the steps of
    answers by how many tokens they brought out, as ReplayLog does.
    """

    shape: EngineShape
    starts: tuple[KvStart, ...]
    steps: _Steps
    current: EngineLimits
    serve_values: Mapping[str, object]
    has_own_graphs: bool = True
    brought: tuple[int, ...] = ()

    @property
    def accepted(self) -> tuple[float, ...]:
        """How often the first draft was accepted, the first two, and so on; empty of none."""
        return accepted_rates(self.brought)

    def and_brought(self, brought: Sequence[int]) -> Calibration:
        """Return the calibration with what the steps of one more replay brought out."""
        if not any(brought):
            return self
        before = self.brought or (0,) * len(brought)
        both = (a + b for a, b in zip(before, brought, strict=True))
        return replace(self, brought=tuple(both))

    def graphs_of(self, limits: EngineLimits) -> Graphs:
        """Return the graphs that the steps of a setting ran with."""
        if not self.has_own_graphs:
            return self.shape.graphs
        return self.shape.graphs_at(limits, [start.limits for start in self.starts])

    def and_steps(self, limits: EngineLimits, steps: Sequence[StepColumns]) -> Calibration:
        """Return the calibration with the steps of one more replay."""
        more = tuple((limits, columns) for columns in steps if len(columns))
        return replace(self, steps=(*self.steps, *more))

    def and_start(self, limits: EngineLimits, num_blocks: int) -> Calibration:
        """Return the calibration with the blocks of one more start, newest at its limits."""
        others = (start for start in self.starts if start.limits != limits)
        return replace(self, starts=(*others, KvStart(limits, num_blocks)))

    def learn(self) -> tuple[Fit, Speed]:
        """Fit a step-time model, and learn what the steps leave open of it.

        Raises: TooFewSamplesError with too few steps.
        """
        if self.shape.drafts is not None and not self.accepted:
            raise TooFewSamplesError("no step was seen that could bring out all its drafts")
        seen = self._seen_on_device()
        own = [self.graphs_of(limits) for limits in _by_limits(seen)]
        found = fit(list(_by_limits(seen).values()), self.shape.graphs, own)
        ran_with = [self.graphs_of(limits) for limits, _ in seen]
        speed = learn(found.model, [columns for _, columns in seen], ran_with)
        return found, self._with_host(speed)

    def _seen_on_device(self) -> _Steps:
        """Return the steps of which is known what they took the device, with that time."""
        if not any(columns.is_late.any() for _, columns in self.steps):
            return self.steps
        seen = self._on_device([np.zeros(len(columns)) for _, columns in self.steps])
        for _ in range(PASSES):
            by_limits = _by_limits(seen)
            own = [self.graphs_of(limits) for limits in by_limits]
            model = model_of(list(by_limits.values()), self.shape.graphs, own)
            seen = self._on_device(self._predicted_s(model))
        return seen

    def _predicted_s(self, model: StepModel) -> list[Floats]:
        """Return what a model says of the steps of each replay."""
        return [
            replace(model, graphs=self.graphs_of(limits)).predict_s(seen)
            for limits, seen in self.steps
        ]

    def _on_device(self, predicted_s: Sequence[Floats]) -> _Steps:
        """Return what steps took the device, by what is predicted of those noticed late."""
        found = on_device([seen for _, seen in self.steps], predicted_s)
        return tuple(
            (limits, seen) for (limits, _), seen in zip(self.steps, found, strict=True)
        )

    def _with_host(self, speed: Speed) -> Speed:
        """Return the speed with what launching took the host, where it waits for no batch."""
        if not self.shape.asynchronous:
            return speed
        ran_with = [self.graphs_of(limits) for limits, _ in self.steps]
        replays = [columns for _, columns in self.steps]
        return with_host(speed, host_of(replays, ran_with), replays, ran_with)

    def profile(self) -> Profile:
        """Learn from the steps and put the profile together.

        Raises: TooFewSamplesError with too few steps.
        """
        return self.profile_of(*self.learn())

    def profile_of(self, found: Fit, speed: Speed) -> Profile:
        """Put the profile together of what was learnt."""
        return Profile(
            shape=self.shape,
            kv_starts=self.starts,
            step_model=speed.model,
            fit=found.error,
            metric_error_ratio=None,
            made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            calibrated_on=tuple(dict.fromkeys(str(limits) for limits, _ in self.steps)),
            current_limits=self.current,
            serve_values=self.serve_values,
            uncertainty=speed.uncertainty,
            accepted=self.accepted,
        )

    def corrected(self, profile: Profile) -> Profile:
        """Return a profile of before whose steps take as long in all as those seen here.

        Of few settings, those of a race say, no model can be learnt that holds for others.

        Raises: TooFewSamplesError with no step.
        """
        times = self.times_of(profile)
        return profile.with_steps(lambda model: model.scaled(times))

    def times_of(self, profile: Profile) -> float:
        """Return how many times as long the steps took as the profile says of them.

        What a turn took that launched an asynchronous engine's first batch counts with that.

        Raises: TooFewSamplesError with no step.
        """
        took_s, predicted_s, _ = self._beside(profile)
        return times_as_long(took_s, predicted_s)

    def stretched_ratio(self, profile: Profile) -> float:
        """Return what share those steps added to the time that the machine stretched.

        Raises: TooFewSamplesError with no step.
        """
        took_s, predicted_s, alone = self._beside(profile)
        kept = undistorted(took_s, predicted_s, alone > 0)
        usual = float(took_s[kept].sum() / predicted_s[kept].sum())
        return float(took_s.sum() / predicted_s.sum()) / usual - 1.0

    def _beside(self, profile: Profile) -> Floats:
        """Return what each step took, what was predicted, and whether it only decodes.

        Shapes: [3, steps]. Raises: TooFewSamplesError with no step.
        """
        if not self.steps:
            raise TooFewSamplesError("no steps were seen to correct the profile by")
        tables = []
        for limits, seen in self._on_device(self._predicted_s(profile.step_model)):
            model = replace(profile.step_model, graphs=self.graphs_of(limits))
            table = [seen.duration_s, model.predict_s(seen), seen.prefill_tokens == 0]
            tables.append(np.column_stack(table)[seen.has_batch])
        found: Floats = np.concatenate(tables).T
        return found


def _by_limits(steps: _Steps) -> dict[EngineLimits, StepColumns]:
    """Return the steps by setting, so that one left out is left out of all rounds."""
    seen = dict.fromkeys(limits for limits, _ in steps)
    return {at: joined([c for limits, c in steps if limits == at]) for at in seen}


def error_ratio(profile: Profile) -> float:
    """Return how wrong the shadow of a profile is said to be, never below the live noise.

    The worse of two: on the replays that it was fitted to, and on a configuration left out, or
    on steps left out of a profile that says what is open of what lies beyond those seen.
    """
    left_out = profile.fit.heldout_steps_ratio
    if profile.uncertainty is None:
        left_out = profile.fit.heldout_config_ratio or left_out
    return max(MIN_ERROR_RATIO, profile.metric_error_ratio or 0.0, left_out)


def error_words(share: str, *, is_derived: bool) -> str:
    """Return how wrong predictions are said to be, and what that rests on.

    >>> error_words("4%", is_derived=False)
    'wrong by 4% on what was measured'
    """
    if is_derived:
        return f"taken to be wrong by {share}, as the profile was derived and not measured"
    return f"wrong by {share} on what was measured"


@dataclass(frozen=True, slots=True)
class StatedError:
    """How wrong the predictions of a profile are said to be, and the caveats they carry.

    `is_corrected` says that a derived profile was corrected since by what its engine does,
    `doubts` why it may be further off than others, `accepted` at which rates drafts are.
    """

    wrong_ratio: float
    caveats: tuple[Caveat, ...] = ()
    is_corrected: bool = False
    doubts: tuple[str, ...] = ()
    accepted: tuple[float, ...] = ()

    @classmethod
    def of(cls, profile: Profile, *, is_forced: bool = False) -> StatedError:
        """Return what is said of a profile's predictions, which may be forced on an engine."""
        holds = {Caveat.DERIVED: bool(profile.origin), Caveat.PROFILE_FORCED: is_forced}
        said = (caveat for caveat, applies in holds.items() if applies)
        caveats = (*profile.caveats, *said)
        wrong, doubts = error_ratio(profile), profile.doubts
        return cls(wrong, caveats, profile.is_corrected, doubts, profile.accepted)

    @property
    def texts(self) -> dict[Caveat, str]:
        """The text of each caveat, with this error in it."""
        expected = f": expect {self.expected}"
        if self.is_corrected:
            wrong = f"{100 * self.wrong_ratio:.0f} % wrong"
            expected = f"; corrected since by what its engine does, it is taken to be {wrong}"
        own = {Caveat.DERIVED: "; ".join((expected, *self.doubts))}
        if self.accepted:
            own[Caveat.DRAFTS_ON_RANDOM_TEXT] = f"; there {drafts_words(self.accepted)}"
        return {caveat: f"{caveat.text}{own.get(caveat, '')}" for caveat in self.caveats}

    @property
    def expected(self) -> str:
        """How far a derived profile is off, in words; of published points eight in ten are."""
        percent = f"{100 * self.wrong_ratio:.0f} %"
        return f"a time per output token up to {percent} off, a first token up to twice as late"

    def words(self, share: str = "") -> str:
        """Return it in words; `share` is the error as a page writes it."""
        shown = share or f"{self.wrong_ratio:.0%}"
        return error_words(shown, is_derived=Caveat.DERIVED in self.caveats)

    def lines(self) -> list[str]:
        """Return the caveats for people, a line each."""
        return [f"caveat: {text}" for text in self.texts.values()]

    def as_json(self) -> dict[str, Any]:
        """Return the error and the caveats for --json."""
        caveats = [{"id": str(c), "text": text} for c, text in self.texts.items()]
        return {"error_ratio": self.wrong_ratio, "caveats": caveats}


def check_rank_by(profile: Profile) -> None:
    """Refuse a profile that is too wrong to rank by. Raises: ShadowError."""
    wrong = error_ratio(profile)
    if wrong > LARGEST_ERROR_RATIO:
        raise ShadowError(
            f"the shadow is wrong by {wrong:.0%} on what it was calibrated with, "
            f"more than {LARGEST_ERROR_RATIO:.0%}",
            "calibrate on a quiet machine, record for longer, or use --method live; --method "
            "shadow ranks by it all the same with --force-profile",
        )
