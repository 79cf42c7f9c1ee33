"""What replays, live and predicted, say of a shadow: its errors, how it ranks, what it costs.

Pure: kept results in, figures out. Measuring is done by `shadow_truth`.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations, permutations
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, changed
from tuner.search.trials import read_metric
from tuner.stats import tail_statistic

METRICS = (
    "requests_per_s",
    "tpot_p50",
    "e2e_p50",
    "tpot_p99",
    "e2e_p99",
    "ttft_p50",
    "ttft_p99",
    "steps",
)
# TTFT below this is a step or two, of which no scheduler model says when they begin.
TTFT_FLOOR_S = 0.05
# Settings nearer to each other than this are as good as each other.
APART_RATIO = 0.03


def limits_of(text: str) -> EngineLimits:
    """Read `8/512`."""
    seqs, _, tokens = text.partition("/")
    return EngineLimits(int(seqs), int(tokens))


def at_limits(values: Mapping[str, object], limits: EngineLimits) -> dict[str, object]:
    """Return a configuration with these limits."""
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    return changed(values, {MAX_NUM_SEQS: seqs, MAX_NUM_BATCHED_TOKENS: tokens})


@dataclass
class Errors:
    """By how much predictions and live runs of one metric differ, relative and absolute.

    `off` is the shadow's of each setting, `own_off` that of each live run at its own speed,
    `noise` that of each two live runs of a setting. `log_ratios` are the shadow's over what is
    live of each setting.
    """

    off: list[float] = field(default_factory=list)
    own_off: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    log_ratios: list[float] = field(default_factory=list)

    @property
    def apart(self) -> float | None:
        """How far settings scatter about what their errors have in common, in logarithms."""
        return stdev(self.log_ratios) if len(self.log_ratios) > 1 else None


def errors(result: dict[str, Any]) -> dict[str, Errors]:
    """Return what is off, by metric."""
    found = {metric: Errors() for metric in METRICS}
    for name in result["predicted"]:
        for metric in METRICS:
            measured = [read_metric(m, metric) for m in result["live"][name]]
            predicted = read_metric(result["shadow"][name], metric)
            real = [value for value in measured if value]
            if not real or not predicted:
                continue
            if metric.startswith("ttft") and median(real) < TTFT_FLOOR_S:
                continue
            of = found[metric]
            of.off.append(abs(predicted / median(real) - 1))
            of.log_ratios.append(math.log(predicted / median(real)))
            of.noise.extend(abs(a / b - 1) for a, b in combinations(real, 2))
            of.own_off += _own_errors(result, name, metric)
    return found


def _own_errors(result: dict[str, Any], name: str, metric: str) -> list[float]:
    """Return what is off of each live run of a setting at its own speed, where that is kept."""
    shown, live = result.get("own_speed", {}).get(name, ()), result["live"][name]
    pairs = [
        (told and read_metric(told, metric), read_metric(real, metric))
        for told, real in zip(shown, live, strict=False)
    ]
    return [abs(told / real - 1) for told, real in pairs if told and real]


@dataclass(frozen=True)
class Ranking:
    """How one source orders the settings, judged by live runs that it did not see.

    `tau` is Kendall's over pairs of settings more than APART_RATIO apart, NaN where there are
    none; `tau_of_all` over all pairs. `regret` is the chosen setting over the best one,
    minus 1.
    """

    tau: float
    tau_of_all: float
    regret: float


def rankings(result: dict[str, Any]) -> dict[str, Ranking]:
    """Return how the shadow orders, judged by the live median and by single live runs.

    By the tail that the tool itself would judge a window of so many requests by. Settings that
    made the same schedule live count as one: only noise could order them. Beside the shadow
    stands how one live run orders, judged by another: no more can be had of a single replay of
    each setting.
    """
    shadow, runs = _values(result)
    found = {"shadow by live median": _judged(shadow, np.median(runs, axis=0))}
    by_one = [_judged(shadow, run) for run in runs]
    others = [_judged(a, b) for a, b in permutations(runs, 2)]
    for name, several in (("shadow by one live run", by_one), ("live run by another", others)):
        if several:
            names = [field.name for field in fields(Ranking)]
            found[name] = Ranking(*(mean(getattr(r, of) for r in several) for of in names))
    return found


def against_grid(result: dict[str, Any]) -> float:
    """Return how much worse the shadow's choice is than that of a live run of every setting.

    Relative, judged by live runs that neither saw, so that no luck of the judge's own best is
    in it; below 0 the shadow chose better.
    """
    shadow, runs = _values(result)
    chosen = int(np.argmin(shadow))
    return mean(
        float(judge[chosen] / judge[int(np.argmin(grid))]) - 1
        for grid, judge in permutations(runs, 2)
    )


def _values(result: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what is predicted, [schedules], and what was measured, [runs, schedules]."""
    metric = f"e2e_{tail_statistic(result['requests'])}"
    shown, live = result["shadow"], result["live"]
    kinds: list[list[str]] = []
    for name in live:
        kind = next((k for k in kinds if _is_same_schedule(live, name, k[0])), None)
        if kind is None:
            kinds.append([name])
        else:
            kind.append(name)
    values = {name: [read_metric(m, metric) or np.inf for m in live[name]] for name in live}
    measured = [np.median([values[name] for name in kind], axis=0) for kind in kinds]
    predicted = [read_metric(shown[kind[0]], metric) or np.inf for kind in kinds]
    return np.array(predicted), np.array(measured).T


def _is_same_schedule(live: dict[str, list[dict[str, Any]]], a: str, b: str) -> bool:
    """Whether what two settings differ in bound in none of their live replays."""
    both = (limits_of(a), limits_of(b))
    seen = [*live[a], *live[b]]
    running = max(m["running"]["max"] for m in seen)
    step_tokens = max(m["max_step_tokens"] for m in seen)
    caps = {limits.max_num_seqs for limits in both}
    budgets = {limits.max_num_batched_tokens for limits in both}
    same_cap = len(caps) == 1 or running < min(caps)
    return same_cap and (len(budgets) == 1 or step_tokens < min(budgets))


def _judged(values: NDArray[np.float64], truth: NDArray[np.float64]) -> Ranking:
    chosen = float(truth[int(np.argmin(values))])
    return Ranking(
        tau(truth, values, APART_RATIO),
        tau(truth, values, 0.0),
        chosen / float(truth.min()) - 1,
    )


def tau(truth: NDArray[np.float64], values: NDArray[np.float64], apart_ratio: float) -> float:
    """Return Kendall's tau of the pairs that are truly further apart than so; NaN of none.

    >>> tau(np.array([1.0, 1.01, 2.0]), np.array([1.1, 1.0, 3.0]), 0.03)
    1.0
    """
    agree = [
        float(np.sign(truth[b] - truth[a]) * np.sign(values[b] - values[a]))
        for a, b in combinations(range(len(truth)), 2)
        if max(truth[a], truth[b]) > (1 + apart_ratio) * min(truth[a], truth[b])
    ]
    return mean(agree) if agree else math.nan


def show(result: dict[str, Any]) -> None:
    """Print one scenario."""
    print(f"{'':>10} " + " ".join(f"{metric:>24}" for metric in METRICS))
    for name in result["predicted"]:
        cells = []
        for metric in METRICS:
            real = [read_metric(m, metric) or float("nan") for m in result["live"][name]]
            shown = read_metric(result["shadow"][name], metric) or float("nan")
            both = " ".join(f"{value:.4g}" for value in real)
            cells.append(f"{both} / {shown:.4g} {shown / median(real) - 1:+.1%}")
        print(f"{name:>10} " + " ".join(f"{cell:>24}" for cell in cells))
    walls = ", ".join(f"{k} {v:.2f} s" for k, v in result["walls_s"].items())
    print(f"stated error {result['error_ratio']:.1%}; {walls}", flush=True)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the figures over all scenarios."""
    pooled = {metric: Errors() for metric in METRICS}
    for result in results:
        for metric, found in errors(result).items():
            pooled[metric].off += found.off
            pooled[metric].own_off += found.own_off
            pooled[metric].noise += found.noise
    print(
        f"\n{'metric':<16} {'shadow off':>11} {'worst':>8} {'at own speed':>13} {'worst':>8} "
        f"{'live noise':>11} {'n':>4}"
    )
    figures: dict[str, Any] = {}
    for metric, of in pooled.items():
        if of.off:
            figures[metric] = {
                "median": median(of.off),
                "worst": max(of.off),
                "own_speed_median": median(of.own_off) if of.own_off else None,
                "own_speed_worst": max(of.own_off, default=None),
                "live_noise": median(of.noise) if of.noise else None,
                "n": len(of.off),
            }
            shares = [figures[metric][key] for key in list(figures[metric])[:-1]]
            cells = ["" if share is None else f"{share:.1%}" for share in shares]
            widths = (11, 8, 13, 8, 11)
            row = " ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
            print(f"{metric:<16} {row} {len(of.off):>4}")
    for result in results:
        name = result["scenario"]["name"]
        for source, ranking in rankings(result).items():
            print(
                f"{name:<20} {source:<24} tau {ranking.tau:.2f} "
                f"(of all {ranking.tau_of_all:.2f}), regret {ranking.regret:.1%}"
            )
            figures[f"ranking, {name}, {source}"] = asdict(ranking)
        if len(_values(result)[1]) > 1:
            figures[f"regret against a live grid, {name}"] = against_grid(result)
    _say_ranking(figures)
    return figures


def _say_ranking(figures: dict[str, Any]) -> None:
    """Print what the rankings come to over all scenarios."""
    for source in ("shadow by live median", "shadow by one live run", "live run by another"):
        found = [value for key, value in figures.items() if key.endswith(source)]
        if found:
            taus, every, regrets = (
                [f[what] for f in found] for what in ("tau", "tau_of_all", "regret")
            )
            print(
                f"{source:<24} tau {mean(taus):.2f} ({min(taus):.2f} to {max(taus):.2f}; "
                f"of all {mean(every):.2f}), "
                f"regret {mean(regrets):.1%} ({min(regrets):.1%} to {max(regrets):.1%})"
            )
    over = [value for key, value in figures.items() if key.startswith("regret against")]
    if over:
        each = ", ".join(f"{value:+.1%}" for value in over)
        print(f"the shadow's choice over a live grid's: {mean(over):+.1%} ({each})")
