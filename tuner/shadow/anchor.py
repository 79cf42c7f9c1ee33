"""Correct a profile by one point of production's own metrics.

A profile that was derived, or measured on another machine of the kind, has the shape of the
step times right and their level off. One measured time between tokens at a known number of
running requests, as any dashboard shows, sets the level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from tuner.engine.protocol import Batch
from tuner.errors import ShadowError, UsageError
from tuner.shadow.profiles import Profile
from tuner.shadow.step_model import TERMS
from tuner.traffic.windows import parse_duration

LARGEST_RATIO: Final = 2.0
"""Ours: what is further off is of another engine, or was not a step that only decodes."""

CONTEXT_TOKENS: Final = 1000
"""Ours, where nothing is said: a prompt of a chat and half of its answer."""

LEVEL, WRONG_RATIO = 0.05, 0.10
"""How far the level scatters once a point is known, in logarithms, and how wrong the profile is
said to be then: ours; of published points half come within 5 %, four in five within 10 %."""

_FORM = re.compile(
    r"(?P<metric>itl|tpot)=(?P<time>[^@,]+)@running=(?P<running>[\d.]+)(,context=(?P<context>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A time between tokens that was measured while so many requests ran.

    `context_tokens` is how much each of them attended to in the mean.

    Units: seconds.
    Raises: UsageError for a time or a number that cannot be.
    """

    itl_s: float
    running: float
    context_tokens: int = CONTEXT_TOKENS

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        if not (0 < self.itl_s < math.inf and 0.5 <= self.running < 1e6):
            raise UsageError(
                f"an anchor has a time above 0 and at least one running request, got {self}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an anchor.

        Raises: UsageError.

        >>> Anchor.parse("itl=12.5ms@running=14,context=900")
        Anchor(itl_s=0.0125, running=14.0, context_tokens=900)
        """
        found = _FORM.fullmatch(text.replace(" ", ""))
        if found is None:
            raise UsageError(
                f"--anchor must be as itl=12.3ms@running=14, got {text}",
                "the mean time between tokens and the mean number of running requests of a "
                "steady hour; add ,context=900 for how long prompt and answer are then",
            )
        context = int(found["context"] or CONTEXT_TOKENS)
        return cls(parse_duration(found["time"]), float(found["running"]), context)

    def __str__(self) -> str:
        """Return it as it is written."""
        return (
            f"itl={self.itl_s * 1e3:g}ms@running={self.running:g},context={self.context_tokens}"
        )


@dataclass(frozen=True, slots=True)
class Anchored:
    """By how much a point has corrected a profile."""

    anchor: Anchor
    predicted_s: float

    @property
    def ratio(self) -> float:
        """How many times as long a step takes as the profile said."""
        return self.anchor.itl_s / self.predicted_s

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {
            "anchor": str(self.anchor),
            "predicted_itl_s": self.predicted_s,
            "ratio": self.ratio,
        }

    def lines(self) -> Iterator[str]:
        """Yield what was corrected for people."""
        yield (
            f"a token takes {self.anchor.itl_s * 1e3:.2f} ms with {self.anchor.running:g} "
            f"requests running, predicted were {self.predicted_s * 1e3:.2f} ms"
        )
        yield f"every step takes {self.ratio:.2f} times as long as the profile said"


def anchored(profile: Profile, anchor: Anchor) -> tuple[Profile, Anchored]:
    """Return the profile whose steps take as long as was measured, and what that changed.

    Raises: ShadowError for a point that is too far from the profile.
    """
    predicted_s = _itl_s(profile, anchor)
    found = Anchored(anchor, predicted_s)
    if not 1 / LARGEST_RATIO <= found.ratio <= LARGEST_RATIO:
        raise ShadowError(
            f"{anchor} is {found.ratio:.2g} times the {predicted_s * 1e3:.2f} ms that the "
            f"profile says of {profile.shape.model} on {profile.shape.device}",
            "the profile is of another engine, or the point not one of steady decoding; learn "
            "one with tune profile fit",
        )
    return (
        replace(
            profile,
            step_model=profile.step_model.scaled(found.ratio),
            uncertainty=_narrowed(profile),
            metric_error_ratio=min(profile.metric_error_ratio or math.inf, WRONG_RATIO),
            calibrated_on=(*profile.calibrated_on, str(anchor)),
            origin=profile.origin and f"{profile.origin}; its level set by {anchor}",
        ),
        found,
    )


def _itl_s(profile: Profile, anchor: Anchor) -> float:
    """Return the time of a step of the running requests, between whole numbers linearly."""
    low = math.floor(anchor.running)
    share, model = anchor.running - low, profile.step_model_at(profile.current_limits)

    def step_s(seqs: int) -> float:
        seqs = max(seqs, 1)
        return model.step_s(Batch(seqs, 0, 0, seqs * anchor.context_tokens, 0, 0, 0))

    return (1 - share) * step_s(low) + share * step_s(low + 1)


def _narrowed(profile: Profile) -> Any:  # noqa: ANN401 - an Uncertainty or None
    """Return what is left open once the level is known: all terms moved alike by less."""
    uncertainty = profile.uncertainty
    if uncertainty is None:
        return None
    table = uncertainty.table
    for row in table:
        terms = row[: len(TERMS)]
        if terms.min() > LEVEL and terms.min() == terms.max():
            row[: len(TERMS)] = LEVEL
    return type(uncertainty).of(table)
