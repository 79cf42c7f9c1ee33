"""What the search remembers of a replay, what it asks for next, and who leads.

A replay is reduced to its score and to whether a limit ever bound. Which configuration to
measure next is decided in `search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.engine.limits import EngineLimits
from tuner.objective import RATE_TIE_RATIO, Score, Tier

# Single replays differ by a few percent on a quiet machine; closer ones tie here and are
# told apart, if at all, by the race: ours.
TIE_RATIO = 0.03
# A cap that exceeds the most ever running by a quarter cannot have bound: ours, the margin
# covers run-to-run variation of the peak.
NEVER_BOUND_RATIO = 1.25


class Phase(StrEnum):
    """Why a configuration is measured."""

    PRESENT = "present"
    LADDER = "ladder"
    EXTEND = "extend"
    REFINE = "refine"
    BUDGET = "budget"
    RACE = "race"
    CALIBRATE = "calibrate"
    SHADOW = "shadow"
    COLD = "cold"
    CAPACITY = "capacity"

    @property
    def is_search(self) -> bool:
        """Whether the live search asked for it."""
        return self in _SEARCH

    @property
    def is_on_windows(self) -> bool:
        """Whether the run's windows were replayed live, as they are."""
        return self in _SEARCH or self is Phase.RACE


_SEARCH = frozenset({Phase.PRESENT, Phase.LADDER, Phase.EXTEND, Phase.REFINE, Phase.BUDGET})


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replay said about a configuration, reduced to what the search needs.

    `peak_running` and `peak_step_tokens` tell whether a limit ever bound; a replay that failed
    says nothing about that. One that was cut short does: where a limit had not bound until
    then, a larger one would have come to the same place.
    """

    number: int
    limits: EngineLimits
    phase: Phase
    score: Score
    peak_running: int
    peak_step_tokens: int
    decode_step_s: float | None
    race_round: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the replay ran to its end."""
        return self.score.tier not in (Tier.CUT, Tier.FAILED)

    @property
    def cap_bound(self) -> bool:
        """Whether the cap was reached, so that it may have kept a request waiting."""
        return self.peak_running >= self.limits.max_num_seqs

    @property
    def cap_never_bound(self) -> bool:
        """Whether any higher cap would have led to the same batches."""
        was_seen = self.score.tier is not Tier.FAILED and self.peak_running > 0
        return was_seen and not self.cap_bound and self.has_room(self.limits.max_num_seqs)

    def has_room(self, cap: int) -> bool:
        """Whether a cap is beyond what ran at once: in the shadow exactly, live by a margin."""
        margin = 1.0 if self.phase is Phase.SHADOW else NEVER_BOUND_RATIO
        return cap >= self.peak_running * margin

    @property
    def budget_never_bound(self) -> bool:
        """Whether any higher token budget would have led to the same batches."""
        was_seen = self.score.tier is not Tier.FAILED and self.peak_step_tokens > 0
        return was_seen and self.peak_step_tokens < self.limits.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration to measure, and why."""

    limits: EngineLimits
    phase: Phase


def leader(seen: Sequence[Observation], rate_tie: float = RATE_TIE_RATIO) -> Observation | None:
    """Return the best observation; among ties the smallest limits.

    Of settings that all do not sustain the load those within `rate_tie` of the best rate are
    told apart by their tails.
    """
    whole = [o for o in seen if o.is_whole]
    if not whole:
        return None
    best = min(whole, key=lambda o: o.score.order)
    if best.score.tier is Tier.NOT_SUSTAINED:
        whole = [
            o
            for o in whole
            if o.score.tier is best.score.tier
            and o.score.value <= best.score.value * (1 + rate_tie)
        ]
        best = min(whole, key=lambda o: o.score.value_in(Tier.GOOD))
    tied = [o for o in whole if not o.score.clearly_worse_than(best.score, TIE_RATIO)]
    return min(tied, key=lambda o: o.limits)
