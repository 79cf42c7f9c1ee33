"""What Prometheus scraped from vLLM's engines: counters, histograms and gauges.

Answers which models and engines there are, and what each of them read when it was scraped, by
the names of vLLM's older and newer versions.

Source: vllm/v1/metrics/loggers.py, PrometheusStatLogger; before V1, vllm/engine/metrics.py.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from tuner.errors import UsageError
from tuner.stats import Floats, Ints
from tuner.traffic.formats.columns import shown
from tuner.traffic.prometheus.client import Prometheus, Series, Span

PROMPT, OUTPUT = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
FINISHED = f"{PROMPT}_count"
"""Counts requests when they finish, whatever the reason, in step with their lengths."""

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
# Names are matched whole, so that neither a counter's `_created` nor `_by_reason` counts.
_IN_FLIGHT = "vllm:num_requests_(running|waiting|swapped)"

MAX_READINGS = 1_000_000
"""Ours: nearly a year at 30 s; the readings of one engine then take 400 MB."""

_NOT_OF_THE_ENGINE = frozenset({"__name__", "le", "finished_reason"})
Key = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which series are meant; None where the label does not matter.

    `labels` are more that they must have, such as job or instance: whoever is scraped may name
    any model.
    """

    model: str | None = None
    engine: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def query(self, names: str, *more: str) -> str:
        """Return the selector of the metrics whose whole name matches."""
        parts = [f"__name__=~{_quoted(names)}", *more]
        if self.model is not None:
            parts.append(f"model_name={_quoted(self.model)}")
        if self.engine is not None:
            parts.append(f"engine={_quoted(self.engine)}")
        parts += [f"{name}={_quoted(value)}" for name, value in self.labels.items()]
        return "{" + ",".join(parts) + "}"


@dataclass(frozen=True, slots=True)
class Scraped:
    """The engines whose metrics a Prometheus keeps: where it is, and which series are theirs.

    `headers` go with every query, and may hold a login.
    """

    url: str
    asked: Selection = Selection()
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True

    def connected(self) -> Prometheus:
        """Return the Prometheus, to be closed. Raises: UsageError."""
        return Prometheus(self.url, headers=self.headers, verify=self.verify)


@dataclass(frozen=True, slots=True, eq=False)
class LengthReadings:
    """A histogram of tokens as it stood at each scrape.

    vLLM's bounds follow max_model_len, so that an engine started anew may have others: these
    are all that it ever had.

    Shapes: bounds [b], ascending, the last inf; upto [m, b], how many were at most the bound,
        nan where it was none then, never for inf; totals [m], the sum of all lengths, nan
        where it is not there.
    """

    bounds: tuple[float, ...]
    upto: Floats
    totals: Floats


@dataclass(frozen=True, slots=True, eq=False)
class EngineReadings:
    """One engine at the instants when it was scraped.

    Shapes: all [m], m >= 2; rows are places in the span, scraped_s ascends and is distinct.
    Units: scraped_s in Unix seconds; in_flight is None where the gauges are missing.
    """

    rows: Ints
    scraped_s: Floats
    finished: Floats
    in_flight: Floats | None
    prompt: LengthReadings
    output: LengthReadings


def span_of(since_s: float, step_s: float, until_s: float | None) -> Span:
    """Return the instants to ask for, on whole steps. Raises: UsageError."""
    if not (step_s >= 1 and math.isfinite(step_s) and step_s == int(step_s)):
        raise UsageError(
            f"--step must be a whole number of seconds, at least 1, got {step_s:g} s",
            "take the interval at which Prometheus scrapes, or a multiple of it",
        )
    if not (math.isfinite(since_s) and since_s >= 2 * step_s):
        raise UsageError(
            f"--since must be at least two steps of {step_s:g} s, got {since_s:g} s",
            "for example --since 24h",
        )
    if since_s / step_s > MAX_READINGS:
        raise UsageError(
            f"--since of {since_s:g} s is more than {MAX_READINGS:,} steps of {step_s:g} s",
            "take a longer --step",
        )
    step = int(step_s)
    end_s = time.time() if until_s is None else until_s
    # On multiples of the step, where servers that cache answers look anyway.
    start, end = math.floor((end_s - since_s) / step), math.floor(end_s / step)
    return Span(start * step, end * step, step)


def choose(server: Prometheus, span: Span, asked: Selection) -> Selection:
    """Return the one model and the engines that are meant.

    Raises: UsageError if there is no data, no such model or engine, or several models and
        none is named.
    """
    model, engine = asked.model, asked.engine
    finished = server.over(Selection(labels=asked.labels).query(FINISHED), span)
    if not finished:
        raise UsageError(
            f"Prometheus at {server.place} has no {FINISHED} {when(span)}",
            "check that it scrapes /metrics of the vLLM servers, or widen --since",
        )
    models = _labels(finished, "model_name")
    if model is None and len(models) > 1:
        raise UsageError(
            f"Prometheus at {server.place} knows {len(models)} models: {_list(models)}",
            "pick the one to tune with --model",
        )
    if model is not None and model not in models:
        raise UsageError(
            f"Prometheus at {server.place} knows no model {shown(model)} {when(span)}; "
            f"it has {_list(models)}",
            "give the name under which vLLM serves it",
        )
    wanted = model if model is not None else (models[0] or None)
    engines = _labels(
        [s for s in finished if s.labels.get("model_name", "") == (wanted or "")], "engine"
    )
    if engine is not None and engine not in engines:
        raise UsageError(
            f"Prometheus at {server.place} knows no engine {shown(engine)} of this model; "
            f"it has {_list(engines)}",
            "leave --engine out to add all of them up",
        )
    return replace(asked, model=wanted)


def read_engines(
    server: Prometheus, span: Span, chosen: Selection
) -> tuple[EngineReadings, ...]:
    """Return the readings of each engine that was scraped twice or more.

    Raises: UsageError if no engine was, or the histograms of lengths are missing.
    """
    finished = by_engine(server.over(chosen.query(FINISHED), span))
    # The instants themselves: a step may hold several scrapes, or none.
    scraped = by_engine(server.over(f"timestamp({chosen.query(FINISHED)})", span))
    in_flight = by_engine(server.over(chosen.query(_IN_FLIGHT), span))
    prompt = _lengths(server, span, chosen, PROMPT)
    output = _lengths(server, span, chosen, OUTPUT)
    for name, lengths in ((PROMPT, prompt), (OUTPUT, output)):
        if not lengths:
            raise UsageError(
                f"Prometheus at {server.place} has no {name}_bucket {when(span)}",
                "lengths are drawn from it: let Prometheus keep vLLM's histograms",
            )
    engines = [
        _engine(scraped[key], finished[key], in_flight.get(key), prompt[key], output[key])
        for key in finished
        if key in scraped and key in prompt and key in output
    ]
    known = tuple(engine for engine in engines if engine is not None)
    if not known:
        raise UsageError(
            f"Prometheus at {server.place} scraped no engine twice {when(span)}",
            "widen --since",
        )
    return known


def when(span: Span) -> str:
    """Return what a span is.

    >>> when(Span(0, 7200, 60))
    'between 1970-01-01 00:00 and 1970-01-01 02:00 UTC'
    """
    start, end = (datetime.fromtimestamp(t, tz=UTC) for t in (span.start_s, span.end_s))
    return f"between {start:%Y-%m-%d %H:%M} and {end:%Y-%m-%d %H:%M} UTC"


def _engine(
    scraped_s: Floats,
    finished: Floats,
    in_flight: Floats | None,
    prompt: LengthReadings,
    output: LengthReadings,
) -> EngineReadings | None:
    """Keep the rows of a span in which an engine was scraped anew; None below two.

    A gauge without a single number is as one that is missing.
    """
    if in_flight is not None and not np.isfinite(in_flight).any():
        in_flight = None
    is_known = np.isfinite(scraped_s) & np.isfinite(finished)
    for lengths in (prompt, output):
        is_known &= np.isfinite(lengths.upto[:, -1])
    if in_flight is not None:
        is_known &= np.isfinite(in_flight)
    rows = np.flatnonzero(is_known)
    _, first = np.unique(scraped_s[rows], return_index=True)
    rows = rows[first]
    if rows.size < 2:
        return None
    return EngineReadings(
        rows=rows.astype(np.int64),
        scraped_s=scraped_s[rows],
        finished=finished[rows],
        in_flight=in_flight[rows] if in_flight is not None else None,
        prompt=LengthReadings(prompt.bounds, prompt.upto[rows], prompt.totals[rows]),
        output=LengthReadings(output.bounds, output.upto[rows], output.totals[rows]),
    )


def _lengths(
    server: Prometheus, span: Span, chosen: Selection, name: str
) -> dict[Key, LengthReadings]:
    """Return each engine's histogram over the whole span."""
    totals = by_engine(server.over(chosen.query(f"{name}_sum"), span))
    ranges: dict[Key, dict[float, Floats]] = {}
    for series in server.over(chosen.query(f"{name}_bucket"), span):
        if (bound := series.bound) is not None:
            ranges.setdefault(key_of(series), {})[bound] = series.values
    unknown = np.full(span.points, np.nan)
    return {
        key: LengthReadings(
            bounds=tuple(sorted(found)),
            upto=np.column_stack([found[bound] for bound in sorted(found)]),
            totals=totals.get(key, unknown),
        )
        for key, found in ranges.items()
        if np.isinf(max(found))
    }


def by_engine(
    answers: Iterable[Series], of: Callable[[Floats], Floats] = lambda values: values
) -> dict[Key, Floats]:
    """Add up the series of each engine, or what `of` makes of their values."""
    sums: dict[Key, Floats] = {}
    for series in answers:
        key, more = key_of(series), of(series.values)
        sums[key] = sums[key] + more if key in sums else more
    return sums


def key_of(series: Series) -> Key:
    """Return what tells an engine from others: instance, job, engine, model, and the like."""
    return frozenset(
        (name, value) for name, value in series.labels.items() if name not in _NOT_OF_THE_ENGINE
    )


def _labels(answers: Sequence[Series], name: str) -> list[str]:
    return sorted({series.labels.get(name, "") for series in answers})


def _list(names: Sequence[str]) -> str:
    return ", ".join(shown(name) for name in names)


def _quoted(text: str) -> str:
    """Return a text as PromQL writes it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)


E2E = "vllm:e2e_request_latency_seconds"
"""The same name in vLLM's older and newer versions."""

_SUCCESS = "vllm:request_success_total"
# The names before V1 and after it.
_PREFIX_CACHES = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")
_KV_USAGE = "vllm:(kv|gpu)_cache_usage_perc"


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHits:
    """Prompt tokens that the server's prefix cache was asked for, and those that it had.

    Shapes: both [span.points], at the reading that counted them first; some were asked for.
    """

    queried: Floats
    found: Floats

    @property
    def ratio(self) -> float:
        """The share that was found."""
        return float(self.found.sum() / self.queried.sum())

    def by_stretch(self, stretch_of: Ints) -> Floats:
        """Return the share that was found in each stretch, or in all where nothing was asked.

        Shapes: stretch_of is [span.points], ascending from 0; the result [stretches].
        """
        queried = np.bincount(stretch_of, weights=self.queried)
        found = np.bincount(stretch_of, weights=self.found)
        whole = np.full(len(queried), self.ratio)
        ratios = np.divide(found, queried, out=whole, where=queried > 0)
        # Scrapes of the two may be a moment apart.
        shares: Floats = np.clip(ratios, 0.0, 1.0)
        return shares


@dataclass(frozen=True, slots=True, eq=False)
class ServerFacts:
    """What the counters tell of the server; None where they do not.

    `running` is how many requests ran at once, in the mean and over all engines.
    `unsuccessful` counts requests that ended in abort or error.

    Units: ratios from 0 to 1.
    """

    prefix_hits: PrefixHits | None
    running: float | None
    peak_kv_usage_ratio: float | None
    mean_e2e_s: float | None
    unsuccessful: int


def read_facts(server: Prometheus, span: Span, chosen: Selection) -> ServerFacts:
    """Return what else the counters tell of the chosen engines."""
    mean_e2e_s = mean_of(server, span, chosen, E2E)
    ended = chosen.query(_SUCCESS, 'finished_reason=~"abort|error"')
    usage = server.over(chosen.query(_KV_USAGE), span)
    running = server.over(chosen.query(RUNNING), span)
    return ServerFacts(
        prefix_hits=read_prefix_hits(server, span, chosen),
        running=mean_level(running),
        peak_kv_usage_ratio=max(
            (float(np.nanmax(s.values)) for s in usage if not np.isnan(s.values).all()),
            default=None,
        ),
        mean_e2e_s=mean_e2e_s,
        unsuccessful=round(sum(rise(series.values) for series in server.over(ended, span))),
    )


def mean_of(server: Prometheus, span: Span, chosen: Selection, name: str) -> float | None:
    """Return the mean of what a histogram of the chosen engines counted; None of nothing."""
    rises = rises_by_name(server.over(chosen.query(f"{name}_(sum|count)"), span))
    total, count = (
        float(rises.get(f"{name}_{part}", np.zeros(1)).sum()) for part in ("sum", "count")
    )
    return total / count if count > 0 else None


def mean_level(gauges: Sequence[Series]) -> float | None:
    """Return the mean over time of gauges that add up, None without any reading.

    Servers come and go: a gauge counts from its first reading to its last.

    >>> old, new = np.array([8.0, 8.0, np.nan, np.nan]), np.array([np.nan, np.nan, 2.0, 2.0])
    >>> mean_level([Series({}, old), Series({}, new)])
    5.0
    """
    total, first, last = 0.0, math.inf, -math.inf
    for one in gauges:
        known = np.flatnonzero(np.isfinite(one.values))
        if known.size:
            total += float(np.nanmean(one.values)) * float(known[-1] - known[0] + 1)
            first, last = min(first, int(known[0])), max(last, int(known[-1]))
    return total / (last - first + 1) if last >= first else None


def rise(values: Floats) -> float:
    """Return how much a counter rose over readings with gaps; a drop is a restart from 0.

    >>> rise(np.array([5.0, 7.0, np.nan, 1.0]))
    3.0
    """
    return float(rises_by_reading(values).sum())


def rises_by_reading(values: Floats) -> Floats:
    """Return how much a counter rose from the reading before, 0 where there was none.

    Shapes: both [points].

    >>> rises_by_reading(np.array([5.0, 7.0, np.nan, 1.0])).tolist()
    [0.0, 2.0, 0.0, 1.0]
    """
    at = np.flatnonzero(np.isfinite(values))
    steps = np.diff(values[at])
    rises = np.zeros(len(values))
    rises[at[1:]] = np.where(steps < 0, values[at[1:]], steps)
    return rises


def rises_by_name(answers: Iterable[Series]) -> dict[str, Floats]:
    """Return the rises of all series of each name together. Shapes: [span.points] each."""
    rises: dict[str, Floats] = {}
    for series in answers:
        more = rises_by_reading(series.values)
        rises[series.name] = rises[series.name] + more if series.name in rises else more
    return rises


def read_prefix_hits(server: Prometheus, span: Span, chosen: Selection) -> PrefixHits | None:
    """Return what was asked for and found; versions that have both names count both alike."""
    names = "|".join(_PREFIX_CACHES)
    query = chosen.query(f"({names})_(hits|queries)_total")
    rises = rises_by_name(server.over(query, span))
    for name in _PREFIX_CACHES:
        queried = rises.get(f"{name}_queries_total")
        if queried is not None and queried.any():
            hits = rises.get(f"{name}_hits_total", np.zeros(span.points))
            return PrefixHits(queried, hits)
    return None
