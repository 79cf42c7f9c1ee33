"""What clients of a server should hold to: connections, time-outs, retries, and their prompts.

By a replay of the traffic in the shadow, at the load of the workload's plan, and by its largest
load at which the SLOs hold. What prompts could share follows from the hash ids alone. Of what
comes before a window nothing is counted but who is still in flight in it, and what the cache
has of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.errors import TooFewSamplesError
from tuner.replay.metrics import Measurement, good_requests, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Timelines
from tuner.run.context import Workload
from tuner.run.loads.alone import logs_alone
from tuner.run.loads.records import PATIENCE, ClientAdvice, Prefix, Sharing
from tuner.shadow.predictor import Predictor
from tuner.stats import Floats, Ints, WeightedSamples
from tuner.traffic.describe import reused_tokens
from tuner.traffic.prefixes import HashIds
from tuner.traffic.resample import at_load, multiple_of
from tuner.traffic.traces import Trace

# The share of the time for which a pool has to suffice: ours, all but 3.6 s of an hour.
POOLED: Final = 0.999
# Prefixes that are named: ours.
PREFIXES: Final = 5


def advise(predictor: Predictor, limits: EngineLimits, workload: Workload) -> ClientAdvice:
    """Return what clients should hold to at the workload's load.

    Raises: EngineError for a request that cannot be served; TooFewSamplesError where all
        requests come at one instant; ShadowError, UsageError.
    """
    plan, slos, pieces = workload.plan, workload.slos, workload.pieces
    now = measure([predictor.replay(piece, limits, plan) for piece in pieces], slos)
    flight = _in_flight(predictor, limits, pieces, plan)
    if flight.total_weight <= 0:
        raise TooFewSamplesError(
            "all requests come at one instant, so that how many clients have in flight while "
            "they send, and what more load would bring, cannot be told",
            "record when requests come, or say how many are kept in flight: "
            "--load-model closed --concurrency N",
        )
    p99_s = now.latency("e2e_s", "p99")
    most, there, borne = None, None, 0.0
    if slos and plan.bears_loads:
        found = predictor.measure_capacity(pieces, limits, plan, slos)
        if isinstance(found, Measurement) and found.capacity:
            borne, most = found.capacity, found.capacity / pieces[0].load
            at = replace(plan, load=most)
            there = _in_flight(predictor, limits, pieces, at)
    return ClientAdvice(
        load=plan.load * pieces[0].load,
        in_flight=flight.mean().value,
        connections=math.ceil(flight.value_at(POOLED)),
        most_in_flight=None if there is None else max(1, math.ceil(there.value_at(0.99))),
        timeout_s=None if p99_s is None or math.isinf(p99_s) else PATIENCE * p99_s,
        retries=None
        if most is None
        else max(0.0, borne / (plan.load * multiple_of(pieces)) - 1.0),
        too_long=_too_long(predictor, limits, workload) if slos else None,
        sharing=_sharing(pieces, plan, now.prefix_cache_hit_ratio or 0.0),
    )


def _in_flight(
    predictor: Predictor, limits: EngineLimits, pieces: Sequence[Trace], plan: ReplayPlan
) -> WeightedSamples:
    """Return how many requests are in flight for how long while those measured come.

    With those of the lead-in that are still there, which a log leaves out.
    """
    weights = np.zeros(1)
    for piece in pieces:
        log = predictor.replay(piece.all_measured(), limits, plan)
        held_s = _held_s(log.timelines, piece.lead_in_s)
        size = max(weights.size, held_s.size)
        weights = np.pad(weights, (0, size - weights.size))
        weights[: held_s.size] += held_s
    return WeightedSamples(np.arange(weights.size, dtype=np.float64), weights)


def _held_s(line: Timelines, since_s: float) -> Floats:
    ends_s = np.where(line.completed, line.last_s, line.due_s)
    times_s = np.concatenate([line.due_s, ends_s])
    changes = np.repeat([1, -1], len(line))
    order = np.lexsort((changes, times_s))
    level = np.maximum(np.cumsum(changes[order])[:-1], 0)
    times_s = np.clip(times_s[order], since_s, line.due_s.max())
    held_s: Floats = np.bincount(level, np.diff(times_s)).astype(np.float64)
    return held_s


def _too_long(predictor: Predictor, limits: EngineLimits, workload: Workload) -> float:
    """Return the share of requests that break an SLO one at a time, with nothing cached."""
    logs = logs_alone(predictor, limits, workload.pieces)
    good = [good_requests(log.timelines, workload.slos) for log in logs]
    return 1.0 - float(np.concatenate(good).mean())


def _sharing(pieces: Sequence[Trace], plan: ReplayPlan, found: float) -> Sharing | None:
    """Return what prompts share; of several pieces, of the largest."""
    piece = at_load(max(pieces, key=lambda one: one.measured), plan.load)
    hashes, prompts = piece.hashes, piece.prompt_tokens
    if hashes is None or not hashes.ids.size:
        return None
    # What is found is of those that are measured; what came before may have had it.
    counts = piece.is_measured
    reused = float(reused_tokens(hashes, prompts)[counts].sum())
    moved, tokens = moved_blocks(hashes, piece.led_in), float(prompts[counts].sum())
    return Sharing(
        possible=reused / tokens,
        found=found,
        moved=None if moved is None else moved * hashes.block_size / tokens,
        prefixes=tuple(shared_prefixes(hashes, piece.led_in)),
    )


def _rows_and_places(hashes: HashIds) -> tuple[Ints, Ints]:
    rows = np.repeat(np.arange(len(hashes)), hashes.counts)
    return rows, np.arange(hashes.ids.size) - np.repeat(hashes.offsets[:-1], hashes.counts)


def moved_blocks(hashes: HashIds, led_in: int = 0) -> int | None:
    """Return how many blocks an earlier row has, but behind another beginning.

    Of all rows but the first `led_in`, which others may go on from. None where the ids are
    chained, as no id has two blocks before it then.

    >>> moved_blocks(HashIds.from_rows([(1, 2, 3), (9, 2, 3)], 16))
    2
    """
    rows, places = _rows_and_places(hashes)
    before = np.where(places > 0, np.roll(hashes.ids, 1), -1)
    names, first, which = np.unique(hashes.ids, return_index=True, return_inverse=True)
    pairs = np.unique(np.column_stack([which, before]), axis=0)
    if len(pairs) == names.size:
        return None
    was_there = first[which] < np.repeat(hashes.offsets[:-1], hashes.counts)
    is_hit = places < np.repeat(hashes.leading_hits(), hashes.counts)
    return int((was_there & ~is_hit & (rows >= led_in)).sum())


def shared_prefixes(hashes: HashIds, led_in: int = 0) -> Iterator[Prefix]:
    """Yield the prefixes that spare most, none of them the beginning of another.

    Of all rows but the first `led_in`.

    >>> next(shared_prefixes(HashIds.from_rows([(1, 2), (1, 2), (1, 3)], 16))).saved_tokens
    32
    """
    since = int(hashes.offsets[led_in])
    rows, places = (column[since:] for column in _rows_and_places(hashes))
    _, first, counts = np.unique(hashes.ids[since:], return_index=True, return_counts=True)
    row, depth = rows[first], places[first] + 1
    saved = (counts - 1) * depth * hashes.block_size
    for _ in range(PREFIXES if first.size else 0):
        at = int(np.lexsort((depth, saved))[-1])
        if saved[at] <= 0:
            return
        tokens = int(depth[at]) * hashes.block_size
        yield Prefix(int(row[at]), tokens, int(counts[at]), int(saved[at]))
        shared = np.minimum(depth, depth[at]) - 1
        mine = hashes.ids[hashes.offsets[row[at]] + shared]
        saved = np.where(hashes.ids[hashes.offsets[row] + shared] == mine, 0, saved)
