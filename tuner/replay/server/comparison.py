"""Measured over HTTP beside predicted: what the server and its front end add.

A request that failed was never answered, so it is later than any bound: SLOs count it as
infinitely late. Quantiles are order statistics, hence that is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.engine.steps import StepLog
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import Measurement, measure
from tuner.replay.server.client import HttpRun
from tuner.replay.server.scrape import Scraper
from tuner.replay.slo import Slo
from tuner.stats import QUANTILES, WeightedSamples, short

# Past this the client measures itself: ours, a decode step of a fast server.
LAG_BUDGET_S = 0.050
# Past this share of failed requests no run is good, with SLOs or without: ours, the share at
# which the p99 of all requests, the largest quantile that an SLO can name, is infinite.
MAX_FAILED_RATIO = 0.01

COMPARED = (
    *(("ttft_s", "p50"), ("ttft_s", "p95"), ("ttft_s", "p99")),
    *(("tpot_s", "p50"), ("tpot_s", "p99")),
    *(("e2e_s", "p50"), ("e2e_s", "p95"), ("e2e_s", "p99")),
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What the server did, what was predicted, and whether the SLOs hold.

    `predicted` is None where nothing predicted it. `cache_usage` is (mean, max) of
    gpu_cache_usage_perc from the server's metrics page, None where it is missing there.
    `foretold` names the SLOs that break and were predicted to.
    """

    measured: Measurement
    predicted: Measurement | None
    cache_usage: tuple[float, float] | None
    broken: tuple[str, ...]
    lag_p99_s: float
    errors: Mapping[str, int]
    missed_scrapes: int
    start_s: float | None
    max_lag_s: float = LAG_BUDGET_S
    foretold: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        """How many requests got no full answer, apart from those refused for their length."""
        return self.measured.timed_out + self.measured.aborted

    @property
    def failure(self) -> str:
        """Why so many failed that the run is void whatever its latencies; else empty."""
        if self.measured.lost_ratio <= MAX_FAILED_RATIO:
            return ""
        return (
            f"{self._failed_line()}, at most {MAX_FAILED_RATIO:.0%} may; most often: "
            f"{max(self.errors, key=self.errors.__getitem__, default='no word of why')}"
        )

    def _failed_line(self) -> str:
        m = self.measured
        if not self.failed:
            return f"none of {m.offered} requests failed"
        return f"{self.failed} of {m.offered} requests failed ({m.lost_ratio:.1%})"

    @property
    def void(self) -> str:
        """Why the run measured this client and not the server; else empty."""
        if self.lag_p99_s <= self.max_lag_s:
            return ""
        return (
            f"this client fell behind: p99 send lag {self.lag_p99_s * 1000:.0f} ms, at most "
            f"{self.max_lag_s * 1000:.0f} ms are borne"
        )

    @property
    def advice(self) -> str:
        """What to do where SLOs break; the server is to blame only if it was not foretold."""
        if self.predicted is None:
            return (
                "--predict live or shadow says whether they break without a server as well; "
                "if so, relax them, lower --load, or tune with these SLOs"
            )
        if not self.foretold:
            return (
                "predicted, without HTTP, they hold: give the API server more cores, or tune "
                "again with bounds that are smaller by what was added here"
            )
        known = ", ".join(self.foretold)
        is_all = len(self.foretold) == len(self.broken)
        which = "the prediction breaks them" if is_all else f"the prediction breaks {known}"
        rest = "" if is_all else "; the others hold in it, and break by what HTTP adds"
        return (
            f"{which} as well, so it is not the server that differs: relax them, lower --load, "
            f"or tune with these SLOs{rest}"
        )

    def rows(self) -> list[tuple[str, str, float | None, float | None]]:
        """Return (metric, unit, predicted, measured), in the order of the printed table."""
        theirs = self.predicted
        rows: list[tuple[str, str, float | None, float | None]] = [
            (
                f"{metric.removesuffix('_s')} {statistic}",
                "s",
                theirs.latency(metric, statistic) if theirs is not None else None,
                self.measured.latency(metric, statistic),
            )
            for metric, statistic in COMPARED
        ]
        rate = None if theirs is None else theirs.requests_per_s
        rows.append(("requests/s", "", rate, self.measured.requests_per_s))
        usage = None if theirs is None else theirs.kv_usage
        estimate = (None, None) if usage is None else (usage.mean, usage.max)
        real = self.cache_usage or (None, None)
        for at, statistic in enumerate(("mean", "max")):
            rows.append((f"gpu_cache_usage_perc {statistic}", "", estimate[at], real[at]))
        return rows

    def lines(self) -> list[str]:
        """Return the table for people, and what has to be said with it."""
        m = self.measured
        notes = [
            self._failed_line(),
            f"{'':<26}{'predicted':>11}{'measured':>11}{'added':>11}{'':>3}",
            *(_line(*row) for row in self.rows()),
            f"{m.completed} of {m.offered} requests completed; p99 send lag "
            f"{self.lag_p99_s * 1000:.1f} ms",
        ]
        if m.refused:
            notes.append(f"{m.refused} requests exceed the server's max_model_len: not counted")
        notes += [f"{count} requests: {what}" for what, count in self.errors.items()]
        if self.missed_scrapes:
            notes.append(f"/metrics did not answer {self.missed_scrapes} times")
        if self.predicted is None:
            notes.append("nothing predicted this run: --predict live or shadow adds the column")
        notes += [f"SLO broken: {said}" for said in self.broken]
        if self.void:
            notes.append(f"VOID: {self.void}")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {
            "failed": self.failed,
            "failed_ratio": self.measured.lost_ratio,
            "measured": self.measured.as_json(),
            "predicted": None if self.predicted is None else self.predicted.as_json(),
            "added": {name: _added(*both) for name, _, *both in self.rows()},
            "gpu_cache_usage_perc": None
            if self.cache_usage is None
            else {"mean": self.cache_usage[0], "max": self.cache_usage[1]},
            "slos_hold": not self.broken,
            "slos_broken": list(self.broken),
            "slos_broken_as_predicted": list(self.foretold),
            "send_lag_p99_s": self.lag_p99_s,
            "void": self.void,
            "errors": dict(self.errors),
            "server_start_s": self.start_s,
        }


def _line(name: str, unit: str, estimate: float | None, real: float | None) -> str:
    scale, shown = (1000.0, "ms") if unit == "s" else (1.0, "")
    cells = [
        "-" if value is None else f"{value * scale:.3f}" if not unit else f"{value * scale:.1f}"
        for value in (estimate, real, _added(estimate, real))
    ]
    return f"{name:<26}" + "".join(f"{cell:>11}" for cell in cells) + f" {shown}"


def _added(estimate: float | None, real: float | None) -> float | None:
    return None if estimate is None or real is None else real - estimate


def verification(
    run: HttpRun,
    scraper: Scraper,
    predicted: Measurement | None,
    slos: Sequence[Slo],
    start_s: float | None,
    max_lag_s: float = LAG_BUDGET_S,
) -> Verification:
    """Return the verification of a replay over HTTP."""
    steps, _ = StepLog().finish()
    log = ReplayLog(run.timelines, steps, run.wall_s, run.wall_s, None)
    measured = measure([log], slos)
    broken = {slo: said for slo in slos if (said := _broken(run, slo, measured.lost_ratio))}
    return Verification(
        measured=measured,
        predicted=predicted,
        cache_usage=scraper.spread(run.since_s),
        broken=tuple(broken.values()),
        lag_p99_s=run.lag_p99_s,
        errors=run.errors,
        missed_scrapes=scraper.missed,
        start_s=start_s,
        max_lag_s=max_lag_s,
        foretold=tuple(
            slo.name for slo in broken if predicted is not None and slo.is_broken_by(predicted)
        ),
    )


def _broken(run: HttpRun, slo: Slo, failed_ratio: float) -> str:
    """Say how an SLO is broken; empty where it holds."""
    value_s = slo_value_s(run, slo)
    if value_s is None:
        return f"{slo.name} was not measured"
    if value_s == np.inf:
        return f"{slo.name} is infinite, as {failed_ratio:.1%} failed"
    is_late = value_s > slo.bound_s
    return f"{slo.name} {short(value_s)} s exceeds {slo.bound_s:g} s" if is_late else ""


def slo_value_s(run: HttpRun, slo: Slo) -> float | None:
    """Return what an SLO bounds, requests that failed being infinitely late.

    None where there is nothing to measure: no request, or a latency that HTTP does not show.
    """
    samples = _samples_s(run, slo.metric)
    if samples is None or not samples.total_weight:
        return None
    if slo.statistic == "mean":
        return samples.mean().value
    return samples.value_at(QUANTILES[slo.statistic])


def _samples_s(run: HttpRun, metric: str) -> WeightedSamples | None:
    """Return a latency's samples, those of failed requests at infinity."""
    line, failed = run.timelines, run.timelines.lost
    if metric == "itl_s":
        # Every token that was asked for and never came is a gap without end.
        missing = np.maximum(run.requested_tokens - np.maximum(line.output_tokens, 1), 0)
        return _with_late(line.gap_s, int(missing[failed].sum()))
    seconds = {"ttft_s": line.ttft_s, "tpot_s": line.tpot_s, "e2e_s": line.e2e_s}.get(metric)
    if seconds is None:
        return None
    if metric == "tpot_s":
        failed &= run.requested_tokens >= 2
    return _with_late(
        WeightedSamples(np.sort(seconds), np.ones(seconds.size)), int(failed.sum())
    )


def _with_late(samples: WeightedSamples, late: int) -> WeightedSamples:
    """Return the samples with so many more that never ended."""
    if not late:
        return samples
    return WeightedSamples(
        np.append(samples.values, np.inf), np.append(samples.weights, float(late))
    )
