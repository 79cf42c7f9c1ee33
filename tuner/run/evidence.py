"""What the trials say about a winner: its gain metric by metric, its KV cache, what limits it.

Every sentence follows from what was measured or predicted. Which configuration wins is decided
in `search.choice`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tuner.engine.gpu import GpuLog
from tuner.engine.limits import EngineLimits
from tuner.replay import metrics
from tuner.replay.slo import Slo
from tuner.search.effects import Effects
from tuner.search.objective import Bounds, recorded_s
from tuner.search.race import CONFIDENCE
from tuner.search.replayed import LIVE_SPREADS
from tuner.search.trials import (
    Phase,
    Trial,
    decisive,
    paired_records,
    predictions,
    ranked,
    read_metric,
)
from tuner.stats import Estimate, short, significant, student_quantile

# A KV cache this full is what limits, a bound this close is what binds: ours.
KV_FULL_RATIO = 0.95
BINDING_RATIO = 0.10
# Where more wait than this share of those who run, in the mean, enough requests came: ours.
WAITING_RATIO = 0.1
# Effects of a neighbouring cap below this are not worth a sentence: ours.
TELLING_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChange:
    """One metric of the winner beside the current configuration's.

    `change_ratio` is the ratio minus one with its interval: paired in `rounds` of live replays,
    None without any, or, for the metric that decides, by all that is known.

    Units: `unit` is s or /s.
    """

    metric: str
    unit: str
    before: float
    after: float
    change_ratio: float | None
    change_interval: Bounds | None
    rounds: int

    @property
    def moved_ratio(self) -> float:
        """The paired change, or the plain one where there is none."""
        if self.change_ratio is not None:
            return self.change_ratio
        return self.after / self.before - 1

    @property
    def text(self) -> str:
        """Return the row as the emitted file and the terminal show it."""
        gain = f"{self.moved_ratio:+.1%}"
        if self.rounds == 0:
            gain += ", predicted"
        elif self.change_ratio is None:
            gain += ", no interval"
        low, high = self.change_interval or (None, None)
        if low is not None and high is not None:
            gain += f", interval {low:+.1%} … {high:+.1%}"
        unit = self.unit if self.unit.startswith("/") else f" {self.unit}"
        return (
            f"{self.metric:<16} {significant(self.before)}{unit} -> "
            f"{significant(self.after)}{unit}   ({gain})"
        )


def metric_changes(
    records: Sequence[Trial],
    winner: EngineLimits,
    current: EngineLimits,
    tail: str,
    slos: Sequence[Slo] = (),
) -> list[MetricChange]:
    """Return the comparison of two configurations over the rounds that both raced.

    Where nothing raced, what was predicted of them, in no round. What SLOs bound is compared
    too.
    """
    pairs: list[_Pair] = [*paired_records(records, winner, current)]
    is_raced = bool(pairs)
    if not is_raced:
        ours, theirs = _predicted(records, winner), _predicted(records, current)
        pairs = [(ours, theirs)] if ours and theirs else []
    wanted = [
        (f"e2e_{tail}", "s"),
        ("e2e_p50", "s"),
        (f"ttft_{tail}", "s"),
        *((slo.name, "s") for slo in slos),
        ("tpot_p50", "s"),
        ("decode_step_p50", "s"),
        ("requests_per_s", "/s"),
        ("output_tokens_per_s", "/s"),
    ]
    rows = (
        _row(metric, unit, _values(pairs, metric), is_raced=is_raced)
        for metric, unit in dict(wanted).items()
    )
    return [row for row in rows if row is not None]


_Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _values(pairs: Sequence[_Pair], metric: str) -> list[tuple[float, float]]:
    """Return a metric of both where both have it."""
    found = ((read_metric(a, metric), read_metric(b, metric)) for a, b in pairs)
    return [(after, before) for after, before in found if after and before]


def _predicted(records: Sequence[Trial], limits: EngineLimits) -> Mapping[str, Any] | None:
    found = (t.measurement for t in predictions(records) if t.limits == limits)
    return next(filter(None, found), None)


def _row(
    metric: str, unit: str, pairs: Sequence[tuple[float, float]], *, is_raced: bool
) -> MetricChange | None:
    if not pairs:
        return None
    ratio = paired_ratio(pairs) if is_raced else None
    after, before = (statistics.median(values) for values in zip(*pairs, strict=True))
    return MetricChange(
        metric=metric,
        unit=unit,
        before=before,
        after=after,
        change_ratio=None if ratio is None else ratio.value - 1,
        change_interval=None if ratio is None else change_bounds(ratio),
        rounds=len(pairs) if is_raced else 0,
    )


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Return the ratio of values of a setting to those of another, with its 90 % interval.

    `pairs` are the values of a round, both of which the machine's mood has in common; one
    round has an interval too, by how far replays usually differ.
    """
    middle = math.log(pairs[0][1])
    replays = [
        (number, setting, math.log(value) - middle)
        for number, pair in enumerate(pairs)
        for setting, value in enumerate(pair)
    ]
    found = Effects.of(2, replays, LIVE_SPREADS)
    apart = np.array([1.0, -1.0])
    mean, sd = float(apart @ found.mean), float(np.linalg.norm(apart @ found.root))
    half = student_quantile(found.freedom, 0.5 + CONFIDENCE / 2) * sd
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(pairs))


def change_bounds(ratio: Estimate) -> Bounds:
    """Return the interval of a ratio as that of a change."""
    return (
        None if ratio.low is None else ratio.low - 1,
        None if ratio.high is None else ratio.high - 1,
    )


def kv_text(records: Sequence[Trial], limits: EngineLimits) -> str:
    """Say how full the KV cache became, under both of its names: as deployed, where known.

    An engine that is started with the limits alone has other blocks than the one that raced.
    """
    (mine, is_foretold), cold = _known(records, limits), _cold(records, limits)
    if not mine and not cold:
        return "KV cache not measured"
    text = f"gpu_cache_usage_perc (kv_cache_usage_perc) {_kv_words(cold or mine)}"
    if cold:
        return f"{text}, started as it is deployed"
    if is_foretold:
        return f"{text}, predicted"
    predicted = _predicted(records, limits)
    is_raced = any(t.phase is Phase.RACE for t in records if t.limits == limits)
    if predicted is None or not is_raced:
        return text
    return f"{text}, on the engine that raced; as deployed {_kv_words([predicted])} (predicted)"


def _kv_words(measured: Sequence[Mapping[str, Any]]) -> str:
    peak = max(m["gpu_cache_usage_perc"]["max"] for m in measured)
    preempted = max(m["preemptions"] for m in measured)
    how_often = f"{preempted} preemptions" if preempted else "no preemption"
    return f"peak {peak:.2f}, {how_often}"


def _cold(records: Sequence[Trial], limits: EngineLimits) -> list[dict[str, Any]]:
    """Return what engines measured that were started with the limits."""
    return [
        t.measurement
        for t in records
        if t.phase is Phase.COLD and t.measurement is not None and t.limits == limits
    ]


def gpu_text(records: Sequence[Trial]) -> str:
    """Say what the driver told of the GPUs during all live replays, nothing if not asked."""
    told = [(t.measurement or {}).get("gpu") for t in records if t.is_live]
    pooled = GpuLog.pooled([msgspec.convert(one, GpuLog) for one in told if one])
    return "" if pooled is None else pooled.text


def _known(
    records: Sequence[Trial], limits: EngineLimits
) -> tuple[list[Mapping[str, Any]], bool]:
    """Return what was measured of a setting, else what was predicted, and whether it is that.

    Rounds of others may make best who was never replayed.
    """
    mine = [t for t in decisive(records) if t.limits == limits and t.measurement is not None]
    if mine:
        return [t.measurement for t in mine if t.measurement is not None], not mine[0].is_live
    predicted = _predicted(records, limits)
    return [] if predicted is None else [predicted], True


def finishes_all(records: Sequence[Trial], limits: EngineLimits) -> bool:
    """Whether a configuration keeps up with all of the traffic, as predicted or else measured.

    In a closed loop none does: who is faster is sent more.
    """
    predicted = _predicted(records, limits)
    known = [predicted] if predicted is not None else _known(records, limits)[0]
    return bool(known) and all(m["sustained"] and m["utilisation"] is not None for m in known)


def load_text(records: Sequence[Trial], limits: EngineLimits, *, is_part: bool = False) -> str:
    """Say what was offered and whether it is more than the configuration can take.

    Where a part of the trace was replayed, mostly its busiest, what is predicted of all of it
    stands first: that is what was decided on.
    """
    mine, is_foretold = _known(records, limits)
    known = [m for m in mine if m.get("utilisation") is not None]
    if not known:
        return ""
    used = statistics.median(m["utilisation"] for m in known)
    rate = statistics.median(m["requests_per_s"] for m in known)
    text = metrics.load_text(known[-1]["offered_per_s"], rate, used) + _own_load(known[-1])
    whole = _predicted(records, limits) if is_part and not is_foretold else None
    if is_foretold:
        text += ", predicted"
    if whole is not None:
        told = (whole["offered_per_s"], whole["requests_per_s"], whole["utilisation"])
        first = f"{metrics.load_text(*told)}{_own_load(whole)}, predicted"
        text = f"{first}; in the window that raced {text}"
    # What this tool has cut short had no chance to answer.
    lost = max((m.get("lost_ratio", 0.0) for m in mine if not m.get("cut_reason")), default=0.0)
    return f"{text}; {lost:.1%} of the requests timed out" if lost else text


def _own_load(measurement: Mapping[str, Any]) -> str:
    """Say at which load it was, where each is predicted at the largest that it bears."""
    if measurement.get("capacity") is None:
        return ""
    return f", at {short(measurement['load'])} x the recorded load"


def limited_by(
    records: Sequence[Trial],
    limits: EngineLimits,
    slos: Sequence[Slo],
    tail: str,
    *,
    is_part: bool = False,
) -> str:
    """Say what keeps the configuration from doing better, from what was measured.

    What was predicted says so, as the load and who ran are where a part of the trace was
    replayed.
    """
    mine, is_foretold = _known(records, limits)
    if not mine:
        return "nothing that was measured"
    said, own = [], " (predicted)" if is_foretold else ""
    for slo in slos:
        value_s = recorded_s(slo, mine[-1])
        if value_s is not None and value_s > (1 - BINDING_RATIO) * slo.bound_s:
            said.append(f"SLO {slo}{own}")
    whole = _predicted(records, limits) if is_part else None
    loads, how = (mine, own) if whole is None else ([whole], " (predicted)")
    used = [m["utilisation"] for m in loads if m.get("utilisation") is not None]
    if used and statistics.median(used) > 1:
        said.append(f"the load, {short(statistics.median(used), 2)} x what it can sustain{how}")
    cold = _cold(records, limits)
    if max(m["gpu_cache_usage_perc"]["max"] for m in cold or mine) > KV_FULL_RATIO:
        said.append(f"the KV cache, which was full{'' if cold else own}")
    said.extend(_neighbours(records, limits, tail))
    peak = int(loads[-1]["running"]["max"])
    if not said and peak < limits.max_num_seqs:
        said.append(f"{_below_cap(loads[-1], limits)}, the cap never bound{how}")
    return "; ".join(said) or "nothing that was measured"


def _below_cap(measurement: Mapping[str, Any], limits: EngineLimits) -> str:
    """Say why no more ran at once though the cap let them.

    None came, or who did waited: for the token budget where steps were as large as that, else
    for blocks, which may be kept free for a prompt that does not fit in yet.
    """
    running, waiting = measurement["running"], measurement["queue_depth"]
    peak, waited = int(running["max"]), int(waiting["max"])
    ran = f"at most {peak} request{'' if peak == 1 else 's'} ran at once"
    if waiting["mean"] <= WAITING_RATIO * running["mean"]:
        return f"the traffic: {ran}"
    if measurement["max_step_tokens"] < (1 - BINDING_RATIO) * limits.max_num_batched_tokens:
        return f"the KV cache: up to {waited} waited though no step was full, {ran}"
    return f"reading prompts: up to {waited} waited for the token budget, {ran}"


def _neighbours(records: Sequence[Trial], limits: EngineLimits, tail: str) -> list[str]:
    """Say what the next lower and the next higher cap would do, and whether it was measured."""
    along = {
        t.max_num_seqs: t
        for t in ranked(records)
        if t.max_num_batched_tokens == limits.max_num_batched_tokens
    }
    own = along.get(limits.max_num_seqs)
    if own is None or own.measurement is None:
        return []
    lower = max((n for n in along if n < limits.max_num_seqs), default=None)
    higher = min((n for n in along if n > limits.max_num_seqs), default=None)
    said = []
    for cap in (lower, higher):
        text = None if cap is None else _effect(along[cap], own, cap, tail)
        if cap is not None and text:
            said.append(f"{text} (predicted)" if not along[cap].is_live else text)
    return said


def _effect(other: Trial, own: Trial, cap: int, tail: str) -> str | None:
    """Say how a neighbouring cap worsens what matters, or None if it does not tell."""
    if other.measurement is None:
        return f"{cap} failed"
    if other.cut_reason:
        return f"{cap} was cut short: {other.cut_reason}"
    worse = []
    for metric in (f"e2e_{tail}", f"tpot_{tail}"):
        theirs, mine = (read_metric(t.measurement or {}, metric) for t in (other, own))
        if theirs and mine and theirs / mine - 1 > TELLING_RATIO:
            worse.append(f"{metric} by {theirs / mine - 1:.0%}")
    return f"{cap} raises {' and '.join(worse)}" if worse else None
