"""The remarks on a trace from Prometheus: how it was made, and what it cannot know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tuner.stats import Ints
from tuner.traffic.concurrency import SECONDS_PER_OUTPUT_TOKEN
from tuner.traffic.describe import hits_differ
from tuner.traffic.formats.columns import Columns
from tuner.traffic.prometheus.client import Span
from tuner.traffic.prometheus.counters import (
    MOST_AT_ONCE,
    EngineWindows,
    LengthRises,
    at_once,
    uncovered_s,
    usual,
)
from tuner.traffic.prometheus.prefixes import SharedPrefixes
from tuner.traffic.prometheus.readings import ServerFacts
from tuner.traffic.traces import ReadNotes, Remark, RemarkKind


def on_arrivals(windows: Sequence[EngineWindows], facts: ServerFacts) -> str:
    """Return what arrivals were derived from, and how far they may be off."""
    apart_s = usual(np.concatenate([w.ends_s - w.starts_s for w in windows]))
    if all(engine.has_gauges for engine in windows):
        return (
            "arrivals are the requests that finished plus the change of those in flight, "
            f"spread at random between scrapes {apart_s:g} s apart; requests that clients gave "
            "up are in no counter"
        )
    by = f", by {facts.mean_e2e_s:.3g} s on average" if facts.mean_e2e_s else ""
    return (
        "arrivals stand where requests finished, as the number in flight was not kept: they "
        f"came earlier{by}; they are spread at random between scrapes {apart_s:g} s apart"
    )


def on_in_flight(span: Span) -> str:
    """Return what a recording of requests in flight is made of."""
    return (
        f"in flight are the requests running and waiting, read every {span.step_s} s; there "
        f"are as many requests as keep this up at {SECONDS_PER_OUTPUT_TOKEN * 1000:g} ms per "
        "output token"
    )


def on_lengths(
    windows: Sequence[EngineWindows], columns: Columns, stretches: int, least: int
) -> Iterator[str]:
    """Return how lengths were drawn, and which of them lay beyond the last bound."""
    over = f"{stretches} stretches of {least} or more" if stretches > 1 else "all"
    yield (
        f"lengths are drawn from histograms of {over} finished requests: each range "
        "keeps its share and the whole its mean, where within a range they lie is a guess"
    )
    named = {
        "prompts": ([rises for w in windows for rises in w.prompt], columns.prompt_tokens),
        "outputs": ([rises for w in windows for rises in w.output], columns.output_tokens),
    }
    for name, (found, tokens) in named.items():
        if text := _beyond(name, found, tokens):
            yield text


def _beyond(name: str, found: Sequence[LengthRises], tokens: Ints) -> str:
    """Return how many lengths lay in the open range above the last bound, or nothing."""
    above = sum(float(rises.counts[:, -1].sum()) for rises in found)
    if not above:
        return ""
    total = sum(float(rises.counts.sum()) for rises in found)
    last = max((rises.bounds[-2] for rises in found if len(rises.bounds) > 1), default=0.0)
    return (
        f"{above / total:.2%} of the {name} lie above the last bound, {last:,.0f} tokens: they "
        f"are drawn up to {int(tokens.max()):,}, as their sum allows"
    )


def on_gaps(windows: Sequence[EngineWindows], span: Span) -> Iterator[str | Remark]:
    """Return for how long there is no data, and what was counted in the meantime."""
    starts_s = np.concatenate([w.starts_s[~w.is_gap] for w in windows])
    ends_s = np.concatenate([w.ends_s[~w.is_gap] for w in windows])
    first_s = min(float(engine.starts_s[0]) for engine in windows)
    last_s = max(float(engine.ends_s[-1]) for engine in windows)
    # Its ends belong to it: an engine may begin or end with a gap.
    gaps_s = uncovered_s(
        np.concatenate([[first_s], starts_s, [last_s]]),
        np.concatenate([[first_s], ends_s, [last_s]]),
    )
    missed = sum(engine.missed for engine in windows)
    if gaps_s or missed:
        text = (
            f"there is no data for {_lasting(gaps_s)} in all, and no request was invented there"
        )
        left_out = f"; {missed:,} counted across gaps are left out" if missed else ""
        yield Remark(text + left_out, RemarkKind.KNOWN_IN_PART)
    requested_s = span.end_s - span.start_s
    if last_s - first_s < 0.9 * requested_s:
        have, requested = _lasting(last_s - first_s), _lasting(requested_s)
        text = f"there is data for {have} of the {requested} asked for"
        yield Remark(text, RemarkKind.KNOWN_IN_PART)
    restarts = sum(engine.restarts for engine in windows)
    if restarts:
        yield f"the counters began anew {restarts} times, as after restarts"


def on_prefixes(facts: ServerFacts, shared: SharedPrefixes | None) -> str | Remark:
    """Return how much hit the server's prefix cache, and how the drawn prompts do as much."""
    if facts.prefix_hits is None:
        return "no hits of a prefix cache were counted: no two prompts share a prefix"
    ratio = facts.prefix_hits.ratio
    on_server = f"{ratio:.0%} of the prompt tokens hit the server's own prefix cache"
    if shared is None:
        return f"{on_server}: no two prompts share a prefix"
    if hits_differ(shared.hit_ratio, ratio):
        return Remark(
            f"prefix hits cannot be imitated: {on_server}, prompts this short share "
            f"{shared.hit_ratio:.0%} at most",
            RemarkKind.PREFIX_HITS_MISSED,
        )
    return (
        f"{on_server}, and {shared.hit_ratio:.0%} do here: each prompt begins as others of "
        f"about its length, in {shared.groups} groups; which do in truth is in no counter"
    )


def known_in_part(notes: ReadNotes) -> str:
    """Return why the traffic is not as one engine served it; else empty."""
    if many := _of_many(notes):
        return many
    found = notes.told(RemarkKind.KNOWN_IN_PART, RemarkKind.PREFIX_HITS_MISSED)
    return f"the current traffic is known in part only: {'; '.join(found)}" if found else ""


def another_load(notes: ReadNotes) -> str:
    """Return why one engine computed another load than the traffic asks for, or nothing."""
    return _of_many(notes) or "".join(notes.told(RemarkKind.PREFIX_HITS_MISSED)[:1])


def _of_many(notes: ReadNotes) -> str:
    """Return that several engines served the traffic at once, or may have, or nothing."""
    if not notes.told(RemarkKind.ENGINES_ADDED_UP):
        return "".join(notes.told(RemarkKind.SUMS_OVER_SERVERS)[:1])
    return (
        "the traffic is that of several engines at once, and a profile is of one: name one "
        "with --label, for example instance=HOST:PORT or engine=0"
    )


def on_the_server(
    windows: Sequence[EngineWindows], facts: ServerFacts
) -> Iterator[str | Remark]:
    """Return what else is known of the server."""
    if facts.peak_kv_usage_ratio is not None:
        yield f"the server's KV cache was at most {facts.peak_kv_usage_ratio:.0%} full"
    if facts.unsuccessful:
        yield (
            f"{facts.unsuccessful:,} requests ended in abort or error; they are drawn with the "
            "lengths they had got to"
        )
    if len(windows) > 1:
        yield _on_engines(windows)


def _on_engines(windows: Sequence[EngineWindows]) -> str | Remark:
    """Return how many engines there were, and whether at once or in place of each other."""
    together = at_once(*np.array([(w.starts_s[0], w.ends_s[-1]) for w in windows]).T)
    if together < MOST_AT_ONCE:
        return f"{len(windows)} engines are added up, each in place of the one before it"
    replicas = max(2, round(together))
    return Remark(
        f"{together:.3g} engines at once are added up: tune trace thin --replicas {replicas} "
        "gives one of them its share",
        RemarkKind.ENGINES_ADDED_UP,
    )


ON_SUMS = Remark(
    "the series name no instance: sums over several servers look like one engine, and a "
    "profile is of one: query the Prometheus that scrapes the servers, or say with --label "
    "job=NAME that there is one",
    RemarkKind.SUMS_OVER_SERVERS,
)
"""That sums over servers cannot be told from one engine."""


def _lasting(seconds: float) -> str:
    """Return how long something lasts.

    >>> _lasting(90.0), _lasting(36000.0)
    ('90 s', '10.0 h')
    """
    return f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"
