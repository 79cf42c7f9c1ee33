"""Which configurations a search may try: the ladder of caps, the token budgets, the ceiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts
from tuner.errors import UsageError
from tuner.traffic.traces import Trace
from tuner.traffic.windows import busiest

DEFAULT_LADDER = (1, 2, 4, 8, 16, 32)
# How far the sweep may go past the top of the ladder.
PAST_LADDER = 4
MAX_CAP = 1 << 18
"""The largest cap of a ladder: ours, so that what is past it still fits into a run's study."""
MOST_PREDICTED_SEQS = 1024
"""How far caps go where nothing is started: vLLM's own largest default."""
MAX_BUDGET = 1 << 24
"""The largest token budget that fits into a run's study."""
# Powers of two that span vLLM's own defaults: ours.
TOKEN_BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far limits may be from the current ones, as a multiple, and how low their cap.

    Nobody looks on where a watch writes what follows from traffic, and whoever sends requests
    or is scraped has a hand in that.

    Raises: UsageError for a multiple that leaves nothing to change.
    """

    times: float
    min_max_num_seqs: int = 1

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to change."""
        if not self.times > 1:
            raise UsageError(
                f"--max-change must be above 1, got {self.times:g}", "for example 4x"
            )

    def holds(self, limits: EngineLimits, current: EngineLimits) -> bool:
        """Return whether a change from the current limits may lead to these.

        >>> reach, current = Reach(4.0, min_max_num_seqs=16), EngineLimits(32, 2048)
        >>> [reach.holds(EngineLimits(cap, 2048), current) for cap in (8, 16, 128, 256)]
        [False, True, True, False]
        """
        pairs = (
            (limits.max_num_seqs, current.max_num_seqs),
            (limits.max_num_batched_tokens, current.max_num_batched_tokens),
        )
        is_near = all(max(pair) <= self.times * min(pair) for pair in pairs)
        floor = min(self.min_max_num_seqs, current.max_num_seqs)
        return is_near and limits.max_num_seqs >= floor


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be tried.

    `current` is the user's configuration and always trial 0. `ceiling` bounds everything,
    `reach` how far from the current limits it may be, None for any distance. Caps above `top`
    are tried only where the largest before them may be the best; None for the ceiling's.

    Raises: UsageError if the ladder is empty, or a cap is below 1 or too large.
    """

    current: EngineLimits
    ladder: tuple[int, ...]
    budgets: tuple[int, ...]
    ceiling: EngineLimits
    min_budget: int = 1
    reach: Reach | None = None
    top: int | None = None

    def __post_init__(self) -> None:
        """Refuse an empty ladder, and caps that no engine starts with."""
        if not self.ladder or min(self.ladder) < 1:
            raise UsageError(
                f"--max-num-seqs must list caps of at least 1, got {list(self.ladder)}",
                "for example --max-num-seqs 1,2,4,8,16,32",
            )
        if max(self.ladder) > MAX_CAP:
            raise _too_large(f"--max-num-seqs must list caps up to {MAX_CAP:,}", self.ladder)
        most = EngineLimits(PAST_LADDER * MAX_CAP, MAX_BUDGET)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            now, bound = getattr(self.current, name), getattr(most, name)
            if now > bound:
                raise _too_large(f"{name} must be at most {bound:,}", [now])

    @property
    def reference_budget(self) -> int:
        """Return the token budget at which the ladder is climbed: the current one."""
        return max(self.current.max_num_batched_tokens, self.min_budget)

    @property
    def whatever_wins(self) -> EngineLimits:
        """Return the largest limits that are tried whatever wins."""
        seqs = self.ceiling.max_num_seqs
        least = seqs if self.top is None else min(seqs, self.top)
        return EngineLimits(least, self.ceiling.max_num_batched_tokens)

    def caps(self) -> list[int]:
        """Return the caps of the ladder and past it, ascending."""
        caps, cap = list(self.ladder), self.ladder[-1]
        while (cap := 2 * cap) <= self.whatever_wins.max_num_seqs:
            caps.append(cap)
        return caps

    def grid(self) -> list[EngineLimits]:
        """Return every setting: caps of the ladder, past it and now, times token budgets."""
        now = self.current.max_num_seqs
        return self._at_every_budget(sorted({*self.caps(), now, *self._furthest_caps()}))

    def past(self, largest: int) -> list[EngineLimits]:
        """Return the settings of the next cap above the largest that was tried."""
        return self._at_every_budget([2 * largest])

    def _at_every_budget(self, caps: Sequence[int]) -> list[EngineLimits]:
        budgets = sorted({*self.budgets, self.reference_budget})
        settings = [self.at(cap, budget) for cap in caps for budget in budgets]
        return list(dict.fromkeys(f for f in settings if self._holds(f)))

    def _furthest_caps(self) -> list[int]:
        """Return how far the cap may go, so that a long way is gone in steps."""
        if self.reach is None:
            return []
        now, times = self.current.max_num_seqs, self.reach.times
        return [max(1, math.ceil(now / times)), int(now * times)]

    def _holds(self, limits: EngineLimits) -> bool:
        is_near = self.reach is None or self.reach.holds(limits, self.current)
        return is_near and limits.within(self.ceiling)

    def below(self, ceiling: EngineLimits) -> SearchSpace:
        """Return what of the space an engine can try that starts at no more than a ceiling."""
        seqs, budget = ceiling.max_num_seqs, ceiling.max_num_batched_tokens
        return replace(
            self,
            ladder=tuple(cap for cap in self.ladder if cap <= seqs) or (seqs,),
            budgets=tuple(b for b in self.budgets if b <= budget) or (budget,),
            ceiling=ceiling,
        )

    def at(self, seqs: int, budget: int) -> EngineLimits:
        """Return limits with the budget raised to what vLLM demands."""
        return EngineLimits(seqs, max(budget, seqs, self.min_budget))


def _too_large(expected: str, got: Sequence[int]) -> UsageError:
    return UsageError(
        f"{expected}, got {max(got)}",
        "vLLM sets memory aside for as many sequences, max_model_len token ids each, and for "
        "as many tokens of a step: far above what is ever in flight that brings nothing",
    )


def token_budgets(useful_tokens: int, min_tokens: int) -> tuple[int, ...]:
    """Return the token budgets worth trying for a trace.

    Nothing above the first that holds useful_tokens can matter.

    >>> token_budgets(3000, min_tokens=1)
    (512, 1024, 2048, 4096)
    """
    budgets = [b for b in TOKEN_BUDGETS if b >= min_tokens]
    for i, budget in enumerate(budgets):
        if budget >= useful_tokens:
            return tuple(budgets[: i + 1])
    return tuple(budgets) or (min_tokens,)


def search_space(
    facts: EngineFacts,
    trace: Trace,
    ladder: tuple[int, ...],
    current: EngineLimits,
    *,
    may_grow: bool = False,
) -> SearchSpace:
    """Return what may be tried for this trace on this engine.

    The ceiling holds the current limits, the ladder with room past its top, and the largest
    token budget that could matter: what is due within the busiest second, or the longest
    prompt, several times over. Where caps `may_grow`, as no engine is started with it, which
    would take memory for all of it, there is more room for them while they win.
    """
    min_tokens = 1 if facts.chunks_prefill else facts.max_model_len
    peak = busiest(trace, 1.0).of(trace)
    useful = 4 * max(int(peak.prompt_tokens.sum()), int(trace.prompt_tokens.max()))
    budgets = token_budgets(useful, min_tokens)
    top = min(max(ladder, default=1), MAX_CAP) * PAST_LADDER  # a larger cap is refused below
    seqs = top = max(current.max_num_seqs, top)
    if may_grow:
        seqs = max(top, MOST_PREDICTED_SEQS)
    ceiling = EngineLimits(
        seqs, max(current.max_num_batched_tokens, *budgets, seqs, min_tokens)
    )
    caps = tuple(sorted(set(ladder)))
    return SearchSpace(current, caps, budgets, ceiling, min_tokens, top=top)
