"""A trace from what Prometheus kept of a vLLM server when nobody recorded its requests.

Answers which requests agree with the counters: as many as came between two scrapes, as long as
the histograms say. Bursts between scrapes and which prompt had which answer are drawn at
random, so the trace is marked as sampled and says what it cannot know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.errors import UsageError
from tuner.stats import Floats, Ints
from tuner.traffic.concurrency import SECONDS_PER_OUTPUT_TOKEN, Concurrency
from tuner.traffic.formats.columns import Columns, ReadOptions, assemble
from tuner.traffic.prometheus.client import Span
from tuner.traffic.prometheus.counters import (
    EngineWindows,
    levels_in_flight,
    pooled,
    stretches,
    windows_of,
)
from tuner.traffic.prometheus.prefixes import MIN_RATIO, SharedPrefixes, shared_prefixes
from tuner.traffic.prometheus.readings import (
    RUNNING,
    EngineReadings,
    Scraped,
    ServerFacts,
    choose,
    read_engines,
    read_facts,
    span_of,
    when,
)
from tuner.traffic.prometheus.remarks import (
    on_arrivals,
    on_gaps,
    on_in_flight,
    on_lengths,
    on_prefixes,
    on_the_server,
)
from tuner.traffic.sampling import (
    MAX_REQUESTS,
    LengthShape,
    arrivals_within,
    as_changes,
    draw_by_group,
    requests_in_flight,
    shape_of,
)
from tuner.traffic.traces import ClockOrigin, Trace

FORMAT = "prometheus"

MIN_LENGTHS = 200
"""Ours: a stretch of the day with 200 finished requests has a shape of its own, and lasts long
enough that most of those that came in it also finished in it."""

_TICKS_PER_S = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class _Lengths:
    """Which lengths requests have, by the instant of the span at which they come.

    Shapes: stretch_of is [span.points], indices into prompt and output.
    """

    stretch_of: Ints
    prompt: list[LengthShape]
    output: list[LengthShape]

    def draw(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return prompt and output lengths of requests at these places of the span."""
        at = self.stretch_of[rows]
        return draw_by_group(self.prompt, at, rng), draw_by_group(self.output, at, rng)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch of time of a server, and how many requests are drawn of it at most."""

    span: Span
    place: str
    max_requests: int

    def check_count(self, count: int) -> None:
        """Refuse a stretch without any request, or with too many. Raises: UsageError."""
        if count < 1:
            raise UsageError(
                f"{self.place} counted no request that came {when(self.span)}",
                "widen --since to a time with traffic",
            )
        if count > self.max_requests:
            raise UsageError(
                f"{self.place} counted {count:,} requests {when(self.span)}, more than "
                f"{self.max_requests:,}",
                "take a shorter --since, or one engine with --label instance=HOST:PORT",
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """Requests in the order in which they come, and at which places of the span that is.

    Shapes: rows is [n].
    """

    columns: Columns
    rows: Ints


def trace_from_prometheus(
    of: Scraped,
    since_s: float,
    step_s: float,
    *,
    seed: int = 0,
    concurrency: bool = False,
    until_s: float | None = None,
    max_requests: int = MAX_REQUESTS,
) -> Trace:
    """Return a sampled trace of the last `since_s` seconds, or of those before `until_s`.

    With `concurrency` it holds the number of requests in flight, for a closed loop, with as
    many requests as keep it up at 20 ms per output token; else arrivals. All engines that are
    meant are added up.

    Units: seconds; until_s in Unix seconds.
    Raises: UsageError if the server, its data or what was asked of it is not as it must be.
    """
    span = span_of(since_s, step_s, until_s)
    with of.connected() as server:
        chosen = choose(server, span, of.asked)
        engines, facts = read_engines(server, span, chosen), read_facts(server, span, chosen)
        place, sha256 = f"Prometheus at {server.place}", server.sha256
    windows = [windows_of(readings, span.step_s) for readings in engines]
    lengths = _lengths(windows, span, place)
    rng, stretch = np.random.default_rng(seed), _Stretch(span, place, max_requests)
    if concurrency:
        drawn, first = _in_flight(engines, lengths, stretch, rng), on_in_flight(span)
    else:
        drawn, first = _arrivals(windows, lengths, stretch, rng), on_arrivals(windows, facts)
    drawn, shared = _with_prefixes(drawn, lengths, facts, rng)
    notes = (
        first,
        *on_lengths(windows, drawn.columns, len(lengths.prompt), MIN_LENGTHS),
        *on_gaps(windows, span),
        on_prefixes(facts, shared),
        *on_the_server(windows, facts),
    )
    columns = replace(drawn.columns, remarks=notes, sampled_from=place)
    return assemble(columns, ReadOptions(), source=place, format_name=FORMAT, sha256=sha256)


def _lengths(windows: Sequence[EngineWindows], span: Span, place: str) -> _Lengths:
    """Return the lengths by stretch: each of `MIN_LENGTHS` or more requests, or the whole.

    Raises: UsageError if no request finished.
    """
    finished = np.zeros(span.points)
    for engine in windows:
        np.add.at(finished, engine.rows, engine.finished)
    if not finished.any():
        raise UsageError(
            f"{place} counted no finished request {when(span)}",
            "widen --since to a time with traffic",
        )
    stretch_of = stretches(finished, MIN_LENGTHS)
    return _Lengths(
        stretch_of=stretch_of,
        prompt=[shape_of(found) for found in pooled(windows, lambda e: e.prompt, stretch_of)],
        output=[shape_of(found) for found in pooled(windows, lambda e: e.output, stretch_of)],
    )


def _arrivals(
    windows: Sequence[EngineWindows],
    lengths: _Lengths,
    stretch: _Stretch,
    rng: np.random.Generator,
) -> _Drawn:
    """Return as many requests as came between the scrapes.

    Raises: UsageError if none did, or too many.
    """
    total = sum(int(engine.arrived.sum()) for engine in windows)
    stretch.check_count(total)
    drawn = [
        arrivals_within(engine.starts_s, engine.ends_s, engine.arrived, rng)
        for engine in windows
    ]
    times_s = np.concatenate([times for times, _ in drawn])
    rows = np.concatenate(
        [engine.rows[which] for engine, (_, which) in zip(windows, drawn, strict=True)]
    )
    order = np.argsort(times_s, kind="stable")
    prompt, output = lengths.draw(rows[order], rng)
    return _Drawn(_columns(times_s[order], prompt, output, None), rows[order])


def _in_flight(
    engines: Sequence[EngineReadings],
    lengths: _Lengths,
    stretch: _Stretch,
    rng: np.random.Generator,
) -> _Drawn:
    """Return the number in flight over time, and requests to keep it up.

    Raises: UsageError if it was not recorded, or never above 0.
    """
    span, place = stretch.span, stretch.place
    if all(engine.in_flight is None for engine in engines):
        raise UsageError(
            f"{place} has no {RUNNING} {when(span)}",
            "leave --concurrency out, or let Prometheus keep vLLM's gauges",
        )
    levels, is_known = levels_in_flight(engines, span)
    busy, known = np.flatnonzero(levels[:-1]), np.flatnonzero(is_known)
    if not busy.size or busy[0] >= known[-1]:
        raise UsageError(
            f"{place} never saw a request in flight {when(span)}",
            "widen --since to a time with traffic",
        )
    rows = np.arange(busy[0], known[-1] + 1)
    times_s = span.times_s[rows]
    flow = Concurrency(times_s - times_s[0], np.rint(levels[rows]).astype(np.int64))
    means = np.array([shape.mean for shape in lengths.output])
    lives_s = means[lengths.stretch_of[rows]] * SECONDS_PER_OUTPUT_TOKEN
    stretch.check_count(int(flow.in_flight @ (span.step_s / lives_s)))
    due_s, readings = requests_in_flight(flow, lives_s)
    prompt, output = lengths.draw(rows[readings], rng)
    columns = _columns(times_s[0] + due_s, prompt, output, as_changes(flow))
    return _Drawn(columns, rows[readings])


def _with_prefixes(
    drawn: _Drawn, lengths: _Lengths, facts: ServerFacts, rng: np.random.Generator
) -> tuple[_Drawn, SharedPrefixes | None]:
    """Return requests of whose prompts as much hits as on the server.

    They come back as they are where hardly anything did, or nothing is known of it.
    """
    hits = facts.prefix_hits
    if hits is None or hits.ratio < MIN_RATIO:
        return drawn, None
    ratios = hits.by_stretch(lengths.stretch_of)[lengths.stretch_of[drawn.rows]]
    prompt = drawn.columns.prompt_tokens
    shared = shared_prefixes(prompt, ratios, hits.ratio, facts.running or 1.0, rng)
    columns = replace(drawn.columns, hashes=shared.hashes, local_hashes=True)
    return _Drawn(columns, drawn.rows), shared


def _columns(times_s: Floats, prompt: Ints, output: Ints, flow: Concurrency | None) -> Columns:
    return Columns(
        arrived=np.rint(times_s * _TICKS_PER_S).astype(np.int64),
        ticks_per_s=_TICKS_PER_S,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=flow,
        origin=ClockOrigin.WALL,
    )
