"""How long a token took while how many requests ran, and how many drafts were accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.errors import UsageError
from tuner.stats import Floats
from tuner.traffic.prometheus.client import Prometheus, Series, Span
from tuner.traffic.prometheus.readings import (
    OUTPUT,
    PROMPT,
    RUNNING,
    Key,
    Scraped,
    Selection,
    by_engine,
    choose,
    key_of,
    mean_of,
    read_prefix_hits,
    rise,
    rises_by_reading,
    span_of,
    when,
)

NAMES: Final = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""The time between two tokens, by its present name and that of before.
Source: vllm/v1/metrics/loggers.py."""

DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
"""How often requests had drafts verified, and how often that of each position was accepted.
Source: vllm/v1/spec_decode/metrics.py."""

MIN_TOKENS: Final = 2000
"""Ours: the mean of as many is known within 2 %, if they differ by as much as their mean."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The mean time between two tokens, and what the engine did meanwhile.

    Of an engine that drafts it is the time between two steps of a request, and `accepted` are
    the rates at which the first draft is accepted, the first two and so on; empty of others.
    `running` is how many requests ran, in the mean over the tokens: each token's step took as
    long as its own batch made it. `prompt_tokens` are those of a request that the prefix cache
    did not hold, and `cached_tokens` those that it held.

    Units: seconds, tokens.
    """

    itl_s: float
    running: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0
    accepted: tuple[float, ...] = ()


def token_times(
    of: Scraped, since_s: float, step_s: float, *, until_s: float | None = None
) -> TokenTimes:
    """Return what engines showed in the last `since_s` seconds, or in those before `until_s`.

    Several count as one that is like all of them.

    Units: seconds; until_s in Unix seconds.
    Raises: UsageError if the server, its data or what was asked of it is not as it must be, or
        too few tokens were brought out.
    """
    span = span_of(since_s, step_s, until_s)
    with of.connected() as server:
        chosen = choose(server, span, of.asked)
        seconds, tokens = _tokens(server, span, chosen)
        running = _running(server.over(chosen.query(RUNNING), span), tokens)
        prompt, output = (
            mean_of(server, span, chosen, name) or 0.0 for name in (PROMPT, OUTPUT)
        )
        hits = read_prefix_hits(server, span, chosen)
        accepted = _accepted(server.over(chosen.query(f"{DRAFTS}|{ACCEPTED}"), span))
    count = sum(float(rises.sum()) for rises in tokens.values())
    if count < MIN_TOKENS or running is None:
        raise UsageError(
            f"Prometheus at {server.place} counted {count:.0f} times between tokens "
            f"{when(span)}, at least {MIN_TOKENS} are needed",
            "name a busier stretch with --since, and let Prometheus keep "
            f"{NAMES[0]} and {RUNNING}",
        )
    held = 0.0 if hits is None else hits.ratio
    missed = max(1.0, (1.0 - held) * prompt)
    return TokenTimes(seconds / count, running, missed, output, held * prompt, accepted)


def _tokens(
    server: Prometheus, span: Span, chosen: Selection
) -> tuple[float, dict[Key, Floats]]:
    """Return the sum of all times, and each engine's tokens by reading."""
    for name in NAMES:
        found = server.over(chosen.query(f"{name}_(sum|count)"), span)
        if found:
            sums = [s for s in found if s.name == f"{name}_sum"]
            counts = [s for s in found if s.name == f"{name}_count"]
            return sum(rise(s.values) for s in sums), by_engine(counts, rises_by_reading)
    return 0.0, {}


def _accepted(found: Sequence[Series]) -> tuple[float, ...]:
    """Return how often the draft of each position was accepted, empty where none was made."""
    drafted = sum(rise(series.values) for series in found if series.name == DRAFTS)
    if not drafted:
        return ()
    taken: dict[int, float] = {}
    for series in found:
        if series.name == ACCEPTED:
            position = int(series.labels.get("position", 0))
            taken[position] = taken.get(position, 0.0) + rise(series.values)
    rates = [min(1.0, taken[position] / drafted) for position in sorted(taken)]
    # Counters are not read at the same instant: what is counted a little later is no more.
    return tuple(np.minimum.accumulate(rates).tolist())


def _running(found: Iterable[Series], tokens: Mapping[Key, Floats]) -> float | None:
    """Return how many requests ran in the mean over the tokens; None where nobody knows.

    While a counter rises from one reading to the next as many run as in the mean of both.
    """
    total = weight = 0.0
    for series in found:
        rises = tokens.get(key_of(series))
        if rises is None:
            continue
        at = np.flatnonzero(np.isfinite(series.values))
        between = (series.values[at[1:]] + series.values[at[:-1]]) / 2
        total += float((rises[at[1:]] * between).sum())
        weight += float(rises[at[1:]][between > 0].sum())
    return total / weight if weight > 0 and total > 0 else None
