"""One replica of a fleet: whose traffic stands for that of each engine that served at once.

A configuration is each replica's own, and so is a profile. Of several that served at once it is
the one with the middle load, by the requests that finished, among those that were there
longest: what comes and goes with the load has served only its peaks.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.stats import Floats
from tuner.traffic.prometheus.client import Span
from tuner.traffic.prometheus.counters import MOST_AT_ONCE, at_once
from tuner.traffic.prometheus.readings import (
    FINISHED,
    Key,
    Scraped,
    by_engine,
    choose,
    rise,
    span_of,
)
from tuner.traffic.prometheus.remarks import ON_SUMS
from tuner.traffic.reshape import on_the_middle
from tuner.traffic.traces import Remark

LASTING: Final = 0.9
"""Ours: an engine that was there for less of the time than this share of the longest is one of
those that come and go."""

# What a sum over servers keeps of the labels that tell an engine.
_OF_SUMS = frozenset({"engine", "job", "model_name"})


@dataclass(frozen=True, slots=True)
class Replica:
    """The labels that name it, and a remark on it, which is empty where there is one alone."""

    labels: Mapping[str, str]
    remark: str | Remark = ""


def one_replica(
    of: Scraped, since_s: float, step_s: float, *, until_s: float | None = None
) -> Replica:
    """Return the replica that stands for all that served at once, of those that are meant.

    Those that served one in place of the other are one, as is whoever was alone.

    Units: seconds; until_s in Unix seconds.
    Raises: UsageError if the server, its data or what was asked of it is not as it must be.
    """
    span, given = span_of(since_s, step_s, until_s), of.asked.labels
    with of.connected() as server:
        chosen = choose(server, span, of.asked)
        counted = by_engine(server.over(chosen.query(FINISHED), span))
    if all(_OF_SUMS.issuperset(dict(key)) for key in counted) and not given:
        return Replica(given, ON_SUMS)
    engines = [_Engine.of(key, values, span) for key, values in counted.items()]
    engines = [engine for engine in engines if engine.ends_s > engine.starts_s]
    together = at_once(*np.array([(e.starts_s, e.ends_s) for e in engines]).reshape(-1, 2).T)
    if together < MOST_AT_ONCE:
        return Replica(given)
    middle, loads = _middle(engines)
    own = _named(middle.key, [engine.key for engine in engines])
    option = " ".join(f"--label {shlex.quote(f'{name}={own[name]}')}" for name in own)
    return Replica({**given, **own}, on_the_middle(together, option, *loads))


@dataclass(frozen=True, slots=True)
class _Engine:
    """From when to when an engine was scraped, and how many requests it finished."""

    key: Key
    starts_s: float
    ends_s: float
    requests: float

    @classmethod
    def of(cls, key: Key, values: Floats, span: Span) -> _Engine:
        times_s = span.times_s[np.isfinite(values)]
        if not times_s.size:
            return cls(key, 0.0, 0.0, 0.0)
        return cls(key, float(times_s[0]), float(times_s[-1]), rise(values))


def _middle(engines: Sequence[_Engine]) -> tuple[_Engine, tuple[float, float]]:
    """Return the one with the middle load, and between which multiples of it the others lie.

    Of an even number the busier of the two in the middle.
    """
    longest_s = max(engine.ends_s - engine.starts_s for engine in engines)
    lasting = [e for e in engines if e.ends_s - e.starts_s >= LASTING * longest_s]
    lasting.sort(key=lambda engine: (engine.requests, sorted(engine.key)))
    middle = lasting[len(lasting) // 2]
    each = max(middle.requests, 1.0)
    return middle, (lasting[0].requests / each, lasting[-1].requests / each)


def _named(key: Key, keys: Sequence[Key]) -> dict[str, str]:
    """Return a label that no other engine has so, or all in which they differ.

    >>> a, b = (frozenset({("instance", x), ("job", "v"), ("pod", x)}) for x in ("a:1", "b:1"))
    >>> _named(b, [a, b])
    {'instance': 'b:1'}
    """
    all_labels = [dict(one) for one in keys]
    names = sorted({name for labels in all_labels for name in labels})
    own = dict(key)
    values = {name: [labels.get(name, "") for labels in all_labels] for name in names}
    for name in sorted(names, key=lambda name: (name != "instance", name)):
        if values[name].count(own.get(name, "")) == 1:
            return {name: own.get(name, "")}
    return {name: own.get(name, "") for name in names if len(set(values[name])) > 1}
