"""How much longer a served engine's steps take than its profile says, learnt from a recording.

An API server, its connections and a worker process of its own keep an engine from stepping as
fast as it does in process. A recording holds when tokens came; the profile's shadow replays it,
and what is missing goes into the profile. Replaying is up to the caller.

Two figures are learnt, no more than a recording can tell apart: seconds added to every step,
from the time per output token, and a factor on prefill, from how first-token times spread. What
then remains of the first token's delay is told and left out: it is no engine's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import ShadowError, TooFewSamplesError
from tuner.replay.timeline import Timelines
from tuner.shadow.correction import WRONG_RATIO, check_near, corrected, shown
from tuner.shadow.profiles import Profile
from tuner.shadow.step_model import StepModel
from tuner.stats import QUANTILES, Bools, Floats, Ints, tail_statistic
from tuner.traffic.traces import Trace

MIN_REQUESTS: Final = 40
"""Ours: twice what a median demands, of those learnt from and of those checked on."""

ROUNDS: Final = 14
SETTLED_RATIO: Final = 0.01
LARGEST_APART: Final = 0.05
"""Ours: what is learnt from agrees within the first, and no further round is needed, or at
least within the second: a few requests' median moves in leaps."""

MIN_SPREAD: Final = 0.1
"""Ours: first-token times that spread by less of their median do not show prefill's part."""

Replay = Callable[[StepModel], Timelines]
"""Replays the recording with a step model."""


@dataclass(frozen=True, slots=True)
class ServingOverhead:
    """What was learnt, and how far the shadow was off before and is now.

    `off_before` and `off_now` are relative and signed, by metric, on `checked` requests that
    came after the `learnt` ones and taught nothing. `first_token_s` is by how much first tokens
    come later than steps explain. `has_prefill` is off where first tokens did not tell.
    """

    limits: EngineLimits
    added_step_s: float
    prefill_ratio: float
    has_prefill: bool
    first_token_s: float
    learnt: int
    checked: int
    off_before: Mapping[str, float]
    off_now: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {
            "limits": self.limits,
            "added_step_s": self.added_step_s,
            "prefill_ratio": self.prefill_ratio if self.has_prefill else None,
            "first_token_s": self.first_token_s,
            "learnt_requests": self.learnt,
            "checked_requests": self.checked,
            "off_before": dict(self.off_before),
            "off_now": dict(self.off_now),
        }

    def lines(self) -> Iterator[str]:
        """Yield what was learnt for people."""
        yield f"served at {self.limits}"
        sense = "longer" if self.added_step_s >= 0 else "shorter"
        yield f"a step takes {abs(self.added_step_s) * 1000:.2f} ms {sense} than it said"
        if self.has_prefill:
            yield f"prefill takes {self.prefill_ratio:.2f} times as long"
        else:
            yield "prefill is as it was: first tokens that did not queue are too few, or alike"
        apart = "later" if self.first_token_s >= 0 else "earlier"
        late_ms = abs(self.first_token_s) * 1000
        yield f"first tokens come {late_ms:.1f} ms {apart} than steps explain"
        yield f"learnt from {self.learnt} requests; off on the {self.checked} after them:"
        for name, before in self.off_before.items():
            yield f"  {name:<9} {before:+7.1%}, now {self.off_now[name]:+.1%}"


def by_recording(
    profile: Profile, trace: Trace, limits: EngineLimits, replay: Replay
) -> tuple[Profile, ServingOverhead]:
    """Return the profile of the engine as it is served, and what was learnt.

    The first half of the requests teaches, the second is compared. `limits` are those that the
    recorded server ran with.

    Raises: TooFewSamplesError if too few requests have both times and two tokens; ShadowError
        if replay and recording do not come together.
    """
    first = _Try(0.0, 1.0, replay(profile.step_model))
    seen = _Seen.of(trace, limits.max_num_seqs, first.lines)
    has_prefill = seen.tells_prefill(first.lines)
    best = _settled(seen, first, profile.step_model, replay, has_prefill=has_prefill)
    found = ServingOverhead(
        limits=limits,
        added_step_s=best.added_s,
        prefill_ratio=best.prefill_ratio,
        has_prefill=has_prefill,
        first_token_s=seen.first_token_s(best.lines),
        learnt=int(seen.taught.sum()),
        checked=int(seen.checked.sum()),
        off_before=seen.off(first.lines),
        off_now=seen.off(best.lines),
    )
    wrong, ratio = max(abs(found.off_now["tpot p50"]), abs(found.off_now["e2e p50"])), 1.0
    if profile.origin:
        # What was never measured is held to what holds for all corrections of it.
        ratio = 1 / (1 + found.off_before["tpot p50"])
        check_near(
            profile, ratio, f"recorded tokens take {shown(ratio)} times as long as those"
        )
        wrong = max(wrong, min(profile.metric_error_ratio or math.inf, WRONG_RATIO))
    served = methodcaller("served", best.added_s, best.prefill_ratio)
    by = f"{limits}, served"
    return corrected(profile, served, by, wrong, profile.uncertainty, ratio), found


def off_recorded(trace: Trace, limits: EngineLimits, lines: Timelines) -> dict[str, float]:
    """Return by how much a replay of a recording is off it, relative and signed, by metric.

    On the second half of its requests.

    Raises: TooFewSamplesError if too few of them have their times.
    """
    return _Seen.of(trace, limits.max_num_seqs, lines).off(lines)


def _settled(
    seen: _Seen, first: _Try, model: StepModel, replay: Replay, *, has_prefill: bool
) -> _Try:
    """Replay with what was missing before, until nothing is, and return the best try."""
    best, tried, pace = first, first, 1.0
    for _ in range(ROUNDS):
        tried.missing_s = seen.missing_step_s(tried.lines)
        tried.longer = seen.prefill_ratio(tried.lines) if has_prefill else 1.0
        tried.apart = max(abs(tried.missing_s) / seen.typical_tpot_s, abs(tried.longer - 1))
        if tried is first or tried.apart < best.apart:
            best = tried
        else:
            # Longer steps mean more requests at once, and so longer steps again.
            pace /= 2
        if best.apart < SETTLED_RATIO:
            break
        added_s = best.added_s + pace * best.missing_s
        ratio = best.prefill_ratio * min(max(best.longer, 0.5), 2.0) ** pace
        tried = _Try(added_s, ratio, replay(model.served(added_s, ratio)))
    if best.apart > LARGEST_APART:
        raise ShadowError(
            f"after {ROUNDS} replays the shadow still does not come up with the recorded times",
            "record under less load, and name the limits that the server ran with",
        )
    return best


@dataclass(slots=True)
class _Try:
    """One replay of the recording, and by how much it misses what it should come up with."""

    added_s: float
    prefill_ratio: float
    lines: Timelines
    missing_s: float = 0.0
    longer: float = 1.0
    apart: float = math.inf


@dataclass(frozen=True, slots=True)
class _Seen:
    """The recorded times; masks say which requests teach and which are compared.

    Shapes: all [requests].
    """

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    taught: Bools
    checked: Bools
    at_once: Bools
    """Requests that found room when they came, so that their first token did not queue."""

    @classmethod
    def of(cls, trace: Trace, cap: int, lines: Timelines) -> _Seen:
        """Return the times of requests that a replay answers too: it may refuse long ones."""
        if trace.ttft_s is None or trace.e2e_s is None:
            raise TooFewSamplesError(
                f"{trace.source} does not say when tokens came",
                "record the server with this tool's recorder: its rows have ttft_s and e2e_s",
            )
        ttft_s, e2e_s, tokens = trace.ttft_s, trace.e2e_s, trace.output_tokens.astype(float)
        usable = np.isfinite(ttft_s) & np.isfinite(e2e_s) & (tokens >= 2) & lines.completed
        rows = np.flatnonzero(usable)
        if rows.size < 2 * MIN_REQUESTS:
            raise TooFewSamplesError(
                f"{rows.size} requests of {trace.source} have a first and a later token with "
                "their times, and are answered when they are replayed, at least "
                f"{2 * MIN_REQUESTS} are needed",
                "record for longer, or widen --window",
            )
        middle = rows[rows.size // 2]
        is_early = np.arange(len(trace)) < middle
        tpot_s = (e2e_s - ttft_s) / np.maximum(tokens - 1, 1)
        at_once = _in_flight(trace.due_s, e2e_s) < cap
        return cls(ttft_s, tpot_s, e2e_s, usable & is_early, usable & ~is_early, at_once)

    def tells_prefill(self, lines: Timelines) -> bool:
        """Whether first-token times are enough, and differ enough, to compare their spread."""
        rows = self._prompt(lines)
        if rows.sum() < MIN_REQUESTS:
            return False
        told_s = _ttft_s(lines)[rows]
        return _spread(told_s) > MIN_SPREAD * float(np.median(told_s))

    @property
    def typical_tpot_s(self) -> float:
        """The recorded median time per output token."""
        return float(np.median(self.tpot_s[self.taught]))

    def prefill_ratio(self, lines: Timelines) -> float:
        """Return how first tokens spread by how they were predicted to."""
        rows = self._prompt(lines)
        return _spread(self.ttft_s[rows]) / max(_spread(_ttft_s(lines)[rows]), 1e-9)

    def missing_step_s(self, lines: Timelines) -> float:
        """Return by how much a token takes longer than predicted."""
        rows = self.taught & lines.completed
        return float(np.median((self.tpot_s - _tpot_s(lines))[rows]))

    def first_token_s(self, lines: Timelines) -> float:
        """Return by how much the middle first token comes later than predicted."""
        rows = self._prompt(lines)
        rows = rows if rows.any() else self.taught & lines.completed
        return float(np.median(self.ttft_s[rows]) - np.median(_ttft_s(lines)[rows]))

    def off(self, lines: Timelines) -> dict[str, float]:
        """Return by how much what is predicted differs from what was recorded."""
        rows = self.checked & lines.completed
        tail = tail_statistic(max(int(rows.sum()), 20))
        pairs = {
            "ttft": (self.ttft_s, _ttft_s(lines)),
            "tpot": (self.tpot_s, _tpot_s(lines)),
            "e2e": (self.e2e_s, lines.last_s - lines.due_s),
        }
        found = {}
        for name, (real_s, told_s) in pairs.items():
            for statistic in dict.fromkeys(("p50", tail)):
                q = QUANTILES[statistic]
                real = float(np.quantile(real_s[rows], q))
                found[f"{name} {statistic}"] = float(np.quantile(told_s[rows], q)) / real - 1
        return found

    def _prompt(self, lines: Timelines) -> Bools:
        return self.taught & self.at_once & lines.completed


def _ttft_s(lines: Timelines) -> Floats:
    return lines.first_s - lines.due_s


def _tpot_s(lines: Timelines) -> Floats:
    tpot_s: Floats = (lines.last_s - lines.first_s) / np.maximum(lines.output_tokens - 1, 1)
    return tpot_s


def _spread(values: Floats) -> float:
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)


def _in_flight(due_s: Floats, e2e_s: Floats) -> Ints:
    """Return how many requests were in flight when each came; due_s ascends."""
    ends_s = np.sort(due_s + np.where(np.isfinite(e2e_s), e2e_s, 0.0))
    return np.arange(due_s.size) - np.searchsorted(ends_s, due_s, "right")
