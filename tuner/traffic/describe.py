"""What a trace asks of a server, before anything is started, and why it may mislead.

Answers how much, how bursty, how long, how much prefix reuse and how many at once; each warning
is a reason to doubt these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from tuner.errors import Caveat
from tuner.stats import Floats, Ints
from tuner.traffic.concurrency import (
    SECONDS_PER_OUTPUT_TOKEN,
    Concurrency,
    InFlightShares,
    in_flight_shares,
)
from tuner.traffic.prefixes import HashIds
from tuner.traffic.reshape import MANY_ROWS, clock_tick_s, tied_ratio
from tuner.traffic.traces import RemarkKind, Trace, counts_text

_UNIFORM_SPREAD = 1.1
"""Ours: p90 within 10 % of p10; the narrowest public trace has a ratio above 5."""

_MANY_ABORTED = 0.01
"""Ours: the share past which a p99 of all answers may hang on unrecorded lengths."""

_SILENCE_S = 30.0
_SILENCE_GAPS = 20.0
"""Ours: a silence is worth a word when it is half a minute and twenty mean gaps long."""


@dataclass(frozen=True, slots=True)
class TraceWarning:
    """A reason to doubt what the trace shows: a short code, and a sentence with its numbers."""

    code: str
    text: str

    @property
    def caveat(self) -> Caveat | None:
        """The caveat that the result must carry, if this is one."""
        return Caveat(self.code) if self.code in set(Caveat) else None


def warnings_of(
    trace: Trace, *, in_flight: InFlight, largest_cap: int
) -> tuple[TraceWarning, ...]:
    """Return every reason to doubt the trace, the gravest about reading first."""
    return (
        *_on_reading(trace),
        *_on_clock(trace.due_s),
        *_on_evenness(trace),
        *_on_silence(trace.due_s),
        *_on_demand(in_flight, largest_cap),
    )


def _on_reading(trace: Trace) -> Iterator[TraceWarning]:
    notes = trace.notes
    if notes.sampled_from:
        yield TraceWarning(
            Caveat.SAMPLED_TRACE,
            f"sampled from {notes.sampled_from}, not recorded: bursts within its windows and "
            "which prompt came with which answer are drawn at random",
        )
    if trace.concurrency is not None:
        yield TraceWarning(
            Caveat.CLOSED_LOOP,
            "a recording of requests in flight, not of arrivals: it is replayed in a closed "
            "loop, whose latencies never compare with an open one",
        )
    if notes.aborted > _MANY_ABORTED * notes.kept:
        yield TraceWarning(
            Caveat.ANSWERS_CUT,
            f"clients left before {notes.aborted:,} answers were whole: what they asked for "
            "is not recorded, compare with --aborted keep, which is the least that it was",
        )
    for remark in notes.remarks:
        is_missed = remark.kind is RemarkKind.LOAD_MISSED
        yield TraceWarning(Caveat.LOAD_MISSED if is_missed else "remark", remark.text)
    if notes.moved:
        yield TraceWarning(
            "unsorted",
            f"{notes.moved:,} rows were out of order in the file and have been sorted",
        )


def _on_clock(due_s: Floats) -> Iterator[TraceWarning]:
    if (tick_s := clock_tick_s(due_s)) is not None:
        yield TraceWarning(
            Caveat.QUANTISED_CLOCK,
            f"the clock ticks every {tick_s:.3g} s and {tied_ratio(due_s):.0%} of the requests "
            "share an instant: these bursts may be the clock's, not the users'; --spread "
            "undoes it",
        )


def _on_evenness(trace: Trace) -> Iterator[TraceWarning]:
    columns = {"prompt": trace.prompt_tokens, "output": trace.output_tokens}
    uniform = [name for name, tokens in columns.items() if _is_uniform(tokens)]
    if uniform:
        yield TraceWarning(
            Caveat.UNIFORM_TRACE,
            f"{' and '.join(uniform)} lengths are nearly all equal: uniform data misleads, "
            "replay recorded lengths",
        )
    gaps = np.diff(trace.due_s)
    if trace.concurrency is None and gaps.any() and _is_uniform(gaps):
        yield TraceWarning(
            "even_arrivals",
            "requests come at nearly equal distances: users come in bursts, and what queues "
            "behind one does not show here",
        )


def _is_uniform(values: Ints | Floats) -> bool:
    if values.size < MANY_ROWS:
        return False
    low, high = np.quantile(values, (0.1, 0.9))
    return bool(high <= _UNIFORM_SPREAD * low)


def _on_silence(due_s: Floats) -> Iterator[TraceWarning]:
    gaps = np.diff(due_s)
    longest_s = float(gaps.max(initial=0.0))
    if longest_s >= _SILENCE_S and longest_s >= _SILENCE_GAPS * gaps.mean():
        yield TraceWarning(
            "long_silence",
            f"the longest silence is {longest_s:,.0f} s: the mean rate hides how busy the rest "
            "is",
        )


def _on_demand(in_flight: InFlight, largest_cap: int) -> Iterator[TraceWarning]:
    if in_flight.recorded_ratio not in {0.0, 1.0}:
        yield TraceWarning(
            "latency_gaps",
            f"{1 - in_flight.recorded_ratio:.1%} of the requests have no recorded latency; "
            "theirs is estimated from their output tokens",
        )
    peak = in_flight.peak
    if peak < largest_cap:
        yield TraceWarning(
            Caveat.LOW_DEMAND,
            f"at most {peak} requests are in flight at once ({in_flight.basis}): an engine "
            f"that keeps up so fills no cap above {peak}, a slower or overloaded one may",
        )


FELT_HITS_RATIO = 0.10
"""Ours: fewer prefix hits, or prefill that differs by less, move no best cap by a rung."""

LARGEST_CAP = 256
"""vLLM's smallest default of max_num_seqs on a GPU (EngineArgs, vllm/engine/arg_utils.py)."""


@dataclass(frozen=True, slots=True)
class LengthQuantiles:
    """Token counts over all requests; quantiles interpolate between neighbours."""

    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests in flight, weighted by time, from the first due time to the last.

    The last answers are left out of the mean and the quantiles (nothing arrives any more), but
    not out of the peak. A trace that is due in one instant has only its peak.

    `recorded_ratio` is the share of requests whose latency was recorded; the others are taken
    to live `seconds_per_output_token` for each output token, without waiting.
    """

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    peak: int
    recorded_ratio: float
    seconds_per_output_token: float

    @property
    def basis(self) -> str:
        """What the numbers rest on, in a few words."""
        if self.recorded_ratio:
            return "recorded latencies"
        return f"estimate at {self.seconds_per_output_token * 1000:g} ms per output token"


@dataclass(frozen=True, slots=True)
class TraceDescription:
    """The numbers of one trace.

    rate_per_s is requests over duration; peak_1s and peak_60s count requests in the busiest
    second and minute of a grid that starts at the first; prefix_reuse_ratio is the share of
    prompt tokens that an unbounded cache, cold at the start, would already hold.
    None where the trace does not show it.
    """

    source: str
    format: str
    rows: int
    duration_s: float
    rate_per_s: float | None
    iat_cv: float | None
    peak_1s: int
    peak_60s: int
    prompt_tokens: LengthQuantiles
    output_tokens: LengthQuantiles
    prefix_reuse_ratio: float | None
    in_flight: InFlight
    warnings: tuple[TraceWarning, ...]
    dropped: Mapping[str, int]

    def as_json(self) -> dict[str, object]:
        """Return plain values for json, with the keys in the order of the terminal's lines."""
        plain = asdict(self)
        del plain["source"]
        return plain

    def lines(self) -> list[str]:
        """Return the description as aligned plain text, one line per fact."""
        facts = {
            "trace": f"{self.source} ({self.format})",
            "requests": f"{self.rows:,} in {self.duration_s:,.1f} s",
            "rate": f"{_or_unknown(self.rate_per_s, '.2f')}/s mean, busiest second "
            f"{self.peak_1s}, busiest minute {self.peak_60s}",
            "burstiness": f"inter-arrival CV {_or_unknown(self.iat_cv, '.2f')} (Poisson: 1)",
            "prompt tokens": _lengths_text(self.prompt_tokens),
            "output tokens": _lengths_text(self.output_tokens),
            "prefix reuse": _reuse_text(self.prefix_reuse_ratio),
            "in flight": _in_flight_text(self.in_flight),
        }
        if self.dropped:
            facts["dropped"] = counts_text(self.dropped)
        named = [f"{name:<15}{text}" for name, text in facts.items()]
        return named + [f"{'warning':<15}{warning.text}" for warning in self.warnings]


def describe(
    trace: Trace,
    seconds_per_output_token: float = SECONDS_PER_OUTPUT_TOKEN,
    largest_cap: int = LARGEST_CAP,
) -> TraceDescription:
    """Return what the trace asks for, and why its numbers may mislead.

    `largest_cap` is the largest max_num_seqs of interest: a trace that never has as many
    requests in flight cannot tell the caps above its peak apart, which is a warning.
    """
    in_flight = _in_flight(trace, seconds_per_output_token)
    duration_s = trace.duration_s
    return TraceDescription(
        source=trace.source,
        format=trace.format,
        rows=len(trace),
        duration_s=duration_s,
        rate_per_s=len(trace) / duration_s if duration_s > 0 else None,
        iat_cv=_iat_cv(trace.due_s),
        peak_1s=_peak_count(trace.due_s, 1.0),
        peak_60s=_peak_count(trace.due_s, 60.0),
        prompt_tokens=_lengths(trace.prompt_tokens),
        output_tokens=_lengths(trace.output_tokens),
        prefix_reuse_ratio=prefix_reuse_ratio(trace),
        in_flight=in_flight,
        warnings=warnings_of(trace, in_flight=in_flight, largest_cap=largest_cap),
        dropped=dict(trace.notes.dropped),
    )


def prefix_reuse_ratio(trace: Trace) -> float | None:
    """Return the share of prompt tokens an unbounded, cold cache would hold; None unhashed."""
    if trace.hashes is None:
        return None
    return float(reused_tokens(trace.hashes, trace.prompt_tokens).sum()) / float(
        trace.prompt_tokens.sum()
    )


def reused_tokens(hashes: HashIds, prompt_tokens: Ints) -> Ints:
    """Return how much of each prompt an unbounded cache that starts cold would hold.

    Shapes: prompt_tokens and the result are [n].
    """
    return np.minimum(hashes.leading_hits() * hashes.block_size, prompt_tokens)


def hits_differ(found_ratio: float, expected_ratio: float) -> bool:
    """Return whether one share of prefix hits makes another load of a trace than the other.

    What is left to compute is compared: from 90 to 80 % hits it doubles, from 20 to 15 % it
    grows by a sixteenth.

    >>> hits_differ(0.8, 0.9), hits_differ(0.0, 0.6)
    (True, True)
    >>> hits_differ(0.15, 0.2), hits_differ(0.0, 0.09)
    (False, False)
    """
    if max(found_ratio, expected_ratio) <= FELT_HITS_RATIO:
        return False
    return abs(found_ratio - expected_ratio) > FELT_HITS_RATIO * (1 - expected_ratio)


def _lengths(tokens: Ints) -> LengthQuantiles:
    p50, p90, p99 = np.quantile(tokens, (0.5, 0.9, 0.99)).tolist()
    return LengthQuantiles(
        mean=float(tokens.mean()),
        min=int(tokens.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(tokens.max()),
    )


def _iat_cv(due_s: Floats) -> float | None:
    gaps = np.diff(due_s)
    if gaps.size < 2 or not gaps.any():
        return None
    return float(gaps.std() / gaps.mean())


def _peak_count(due_s: Floats, window_s: float) -> int:
    """Count the requests of the fullest window of a grid laid from the first request."""
    places = (due_s - due_s[0]) // window_s
    starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
    return int(np.diff(np.append(starts, places.size)).max())


def _in_flight(trace: Trace, seconds_per_output_token: float) -> InFlight:
    recorded_ratio = 0.0
    if trace.concurrency is not None:
        shares, recorded_ratio = _recorded_shares(trace.concurrency), 1.0
    else:
        lives_s: Floats = trace.output_tokens * np.float64(seconds_per_output_token)
        if trace.e2e_s is not None:
            is_recorded = ~np.isnan(trace.e2e_s)
            lives_s = np.where(is_recorded, trace.e2e_s, lives_s)
            recorded_ratio = float(is_recorded.mean())
        shares = in_flight_shares(trace.due_s, lives_s)
    mean, p50, p90, p99 = _time_weighted(shares.spent_s)
    return InFlight(
        mean=mean,
        p50=p50,
        p90=p90,
        p99=p99,
        peak=shares.peak,
        recorded_ratio=recorded_ratio,
        seconds_per_output_token=seconds_per_output_token,
    )


def _recorded_shares(recorded: Concurrency) -> InFlightShares:
    """Return what a recording of requests in flight says itself, up to its last reading."""
    spent_s: Floats = np.bincount(
        recorded.in_flight[:-1], weights=np.diff(recorded.times_s)
    ).astype(np.float64)
    return InFlightShares(spent_s, int(recorded.in_flight.max()))


def _time_weighted(
    spent_s: Floats,
) -> tuple[float | None, float | None, float | None, float | None]:
    """Return mean, p50, p90 and p99 of a level by the time spent at each; None without time."""
    total_s = float(spent_s.sum())
    if total_s <= 0:
        return None, None, None, None
    within = np.cumsum(spent_s) / total_s
    p50, p90, p99 = (float(np.searchsorted(within, q)) for q in (0.5, 0.9, 0.99))
    return float(np.arange(spent_s.size) @ spent_s / total_s), p50, p90, p99


def _or_unknown(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _reuse_text(ratio: float | None) -> str:
    if ratio is None:
        return "unknown, the trace has no hash ids"
    return f"{ratio:.1%} of prompt tokens (unbounded cache, cold start)"


def _lengths_text(lengths: LengthQuantiles) -> str:
    return (
        f"p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, p99 {lengths.p99:,.0f}, "
        f"max {lengths.max:,} (mean {lengths.mean:,.1f}, min {lengths.min:,})"
    )


def _in_flight_text(in_flight: InFlight) -> str:
    return (
        f"mean {_or_unknown(in_flight.mean, '.1f')}, p50 {_or_unknown(in_flight.p50, '.0f')}, "
        f"p90 {_or_unknown(in_flight.p90, '.0f')}, p99 {_or_unknown(in_flight.p99, '.0f')}, "
        f"peak {in_flight.peak} ({in_flight.basis})"
    )
