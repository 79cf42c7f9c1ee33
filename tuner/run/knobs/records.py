"""What a run says of its knobs: of each alone, and of all that pay together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from tuner.engine.limits import EngineLimits
from tuner.search.objective import Bounds, moved, moved_bounds, named

# A knob that gains less is left alone: ours, since each is one more thing to look after.
MIN_GAIN: Final = 0.02


class Standing(StrEnum):
    """How far what the knobs are to gain was shown."""

    PREDICTED = "predicted"
    CONFIRMED = "confirmed cold"
    REFUTED = "did not show cold"
    UNTRIED = "not tried cold"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobFinding:
    """What a knob does at the limits that were found, alone; less of the metric is better.

    `value` is the best of those tried, and `settings` how a configuration says it; `tried`
    holds what each costs over leaving the knob as it is, None where it fails. The gain is a
    share of the metric, -0.05 for 5 % less, on other traffic of the kind. `says` is all of it
    in words.
    """

    knob: str
    value: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    gain_ratio: float | None = None
    gain_interval: Bounds | None = None
    p_better: float | None = None
    is_recommended: bool = False
    says: str
    tried: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobAdvice:
    """Which knobs to turn beside which limits, and what that gains over those limits alone.

    `settings` are the keys to set, none where no knob pays; `limits` those that go with them,
    `before` those that were found without. `space` counts the combinations that there are, and
    `predicted` how many of them were predicted. `cold` are the ratios that engines started with
    and without showed.
    """

    metric: str
    before: EngineLimits
    limits: EngineLimits
    settings: dict[str, Any]
    gain_ratio: float | None
    gain_interval: Bounds | None
    p_better: float | None
    findings: tuple[KnobFinding, ...]
    space: int
    predicted: int
    standing: Standing = Standing.PREDICTED
    cold: tuple[float, ...] = ()
    cause: str = ""

    @property
    def is_deployed(self) -> bool:
        """Whether what is emitted has the knobs turned."""
        is_shown = self.standing in (Standing.PREDICTED, Standing.CONFIRMED)
        return bool(self.settings) and is_shown

    @property
    def together(self) -> str:
        """What is turned and what that gains, in a line; empty where nothing is."""
        return self.lines[-1] if self.settings else ""

    @property
    def below(self) -> list[str]:
        """What is left to say where what is deployed stands above already."""
        return self.lines[:-1] if self.is_deployed else self.lines

    @property
    def deployed(self) -> dict[str, Any]:
        """The keys that what is emitted sets beside the limits."""
        return self.settings if self.is_deployed else {}

    @property
    def lines(self) -> list[str]:
        """Return what is to be said, a line each."""
        lines = [f"knob {one.knob}: {one.says}" for one in self.findings]
        if not self.settings:
            return [*lines, f"no knob gains {MIN_GAIN:.0%} that is sure: left as they are"]
        how = {
            Standing.PREDICTED: "predicted, not measured",
            Standing.CONFIRMED: f"confirmed: {self._cold_text}",
            Standing.REFUTED: f"left as they are: {self.cause or self._cold_text}",
            Standing.UNTRIED: f"left as they are: {self.cause}",
        }[self.standing]
        together = f"knobs together: {settings_text(self.settings)}"
        if self.limits != self.before:
            together += f", with {self.limits} in place of {self.before}"
        gain = gain_text(self.metric, self.gain_ratio, self.gain_interval, self.p_better)
        return [*lines, f"{together}: {gain}; {how}"]

    @property
    def _cold_text(self) -> str:
        if not self.cold:
            return "engines started cold have nothing to compare without them"
        shown = ", ".join(f"{moved(self.metric, ratio - 1):+.1%}" for ratio in self.cold)
        return f"engines started cold showed {shown} in {self.metric}, n {len(self.cold)}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return keys and values in a line, as in "enable-prefix-caching false"."""
    return ", ".join(f"{key} {str(value).lower()}" for key, value in settings.items())


def gain_text(
    metric: str, ratio: float | None, interval: Bounds | None, p_better: float | None
) -> str:
    """Return a gain with its interval and its probability, in words."""
    if ratio is None or p_better is None:
        return "no gain that has a number"
    low, high = moved_bounds(metric, interval or (None, None))
    within = ""
    if low is not None and high is not None:
        within = f", interval {low:+.1%} … {high:+.1%}"
    return f"{named(metric)} {moved(metric, ratio):+.1%}{within}, P(better) {p_better:.2f}"
