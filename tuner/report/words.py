"""Numbers and names as the page says them.

Milliseconds exist here alone; everywhere else latencies are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.engine.limits import EngineLimits
from tuner.search.objective import WORST_SLACK, is_rate, named
from tuner.stats import significant

NOTHING = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E latency",
    "decode_step": "decode step",
}
_RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "goodput_per_s": "goodput",
}


def metric_name(metric: str) -> str:
    """Return a metric's name for people.

    >>> metric_name("decode_step_p50"), metric_name("requests_per_s")
    ('decode step p50', 'requests/s')
    """
    if metric in _RATES:
        return _RATES[metric]
    name, _, statistic = metric.rpartition("_")
    return f"{_NAMES[name]} {statistic}" if name in _NAMES else named(metric)


def is_latency(metric: str) -> bool:
    """Return whether a metric is a duration, in seconds."""
    return metric.rpartition("_")[0] in _NAMES


def plain(value: float) -> str:
    """Write three significant digits without an exponent.

    >>> plain(0.0123456), plain(1234.5), plain(0)
    ('0.0123', '1,234', '0')
    """
    return significant(value).replace("-", _MINUS)


def seconds(value_s: float | None) -> str:
    """Write a duration: milliseconds below one second.

    >>> seconds(0.0628), seconds(1.944)
    ('62.8 ms', '1.94 s')
    """
    if value_s is None:
        return NOTHING
    return f"{plain(value_s * 1000)} ms" if abs(value_s) < 1 else f"{plain(value_s)} s"


def quantity(metric: str, value: float | None) -> str:
    r"""Write a metric's value with its unit.

    >>> quantity(WORST_SLACK, 324.0) == "324 \N{MULTIPLICATION SIGN} its SLO"
    True
    >>> quantity("e2e_p99", math.inf)
    'without end'
    """
    if value is None:
        return NOTHING
    if math.isinf(value):
        return "without end"
    if metric == WORST_SLACK:
        return f"{plain(value)} \N{MULTIPLICATION SIGN} its SLO"
    if metric == "capacity":
        return f"{plain(value)} \N{MULTIPLICATION SIGN} the recorded load"
    if is_rate(metric):
        return f"{plain(value)}/s"
    return seconds(value) if is_latency(metric) else plain(value)


def score(metric: str, value: float | None) -> str:
    """Write a score: a rate stands in it as its inverse."""
    if value is None or not is_rate(metric):
        return quantity(metric, value)
    return quantity(metric, 1 / value) if value > 0 else NOTHING


def percent(ratio: float | None) -> str:
    """Write a share.

    >>> percent(0.417)
    '41.7%'
    """
    return NOTHING if ratio is None else f"{ratio:.1%}".replace("-", _MINUS)


def change(ratio: float | None) -> str:
    """Write a change with its sign.

    >>> change(0.031), change(0)
    ('+3.1%', '+0.0%')
    """
    return NOTHING if ratio is None else f"{ratio:+.1%}".replace("-", _MINUS)


def interval(bounds: Sequence[float | None] | None) -> str:
    """Write an interval of changes; a bound that is missing has no end."""
    if bounds is None or all(bound is None for bound in bounds):
        return NOTHING
    low, high = bounds
    first = f"{_MINUS}∞" if low is None else change(low)
    return f"{first} … {'+∞' if high is None else change(high)}"


def limits_words(limits: EngineLimits) -> str:
    """Write both limits with their names."""
    return (
        f"max_num_seqs {limits.max_num_seqs}, "
        f"max_num_batched_tokens {limits.max_num_batched_tokens}"
    )


def times(load: float) -> str:
    r"""Write a multiple.

    >>> times(1.25) == "1.25 \N{MULTIPLICATION SIGN}"
    True
    """
    return f"{load:g} \N{MULTIPLICATION SIGN}"


def counted(n: int, one: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "replay"), counted(12, "replay")
    ('1 replay', '12 replays')
    """
    return f"{n:,} {one}{'' if n == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """Write a list as a sentence does.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def sentence(text: str) -> str:
    """Begin with a capital letter and end with a full stop."""
    stop = "" if text.endswith((".", "!", "?")) else "."
    return text[:1].upper() + text[1:] + stop if text else text
