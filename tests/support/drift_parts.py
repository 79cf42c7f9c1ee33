"""Traffic for tests of drift: correlated in time, with known shifts planted into it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.stats import Floats, Ints
from tuner.traffic.prefixes import HashIds, offsets_of
from tuner.traffic.traces import Trace

BLOCK_TOKENS = 16


def busy_traffic(
    seed: int,
    minutes: float = 20.0,
    per_s: float = 4.0,
    output: float = 100.0,
    *,
    shares: bool = False,
) -> Trace:
    """Return arrivals whose rate wanders by a third within a minute or so, with long lengths.

    With `shares` half of the prompts begin as one of twenty did before.
    """
    rng = np.random.default_rng(seed)
    steps = int(minutes * 6)
    wander = np.zeros(steps)
    for step in range(1, steps):
        wander[step] = 0.8 * wander[step - 1] + rng.normal(0, 0.2)
    counts = rng.poisson(10 * per_s * np.exp(wander - 0.055))
    due_s = np.sort(10 * (np.repeat(np.arange(steps), counts) + rng.random(counts.sum())))
    n = len(due_s)
    prompts = np.maximum(1, rng.lognormal(6.0, 0.8, n)).astype(np.int64)
    outputs = np.maximum(1, rng.lognormal(np.log(output), 0.7, n)).astype(np.int64)
    hashes = _hashes(prompts, rng) if shares else None
    return Trace(due_s, prompts, outputs, hashes, source="busy.jsonl", sha256=f"{seed:064x}")


def session_traffic(seed: int, turn_s: float = 30.0) -> Trace:
    """Return an hour of sessions of eight turns in the mean, so long after each other.

    Each has lengths of its own kind, and prompts that grow with its turns; two requests come
    each second. They began before the hour, and go on after it.
    """
    rng = np.random.default_rng(seed)
    lead_s = 24 * turn_s
    begun_s = rng.uniform(-lead_s, 3600, rng.poisson((3600 + lead_s) * 2 / 8))
    turns = rng.geometric(1 / 8, len(begun_s))
    session = np.repeat(np.arange(len(turns)), turns)
    turn = np.arange(len(session)) - (np.cumsum(turns) - turns)[session]
    waits_s = np.cumsum(np.where(turn > 0, rng.exponential(turn_s, len(turn)), 0.0))
    due_s = begun_s[session] + waits_s - waits_s[turn == 0][session]
    times = np.exp(0.8 * rng.standard_normal(len(turns)))[session]
    outputs = np.ceil(150 * times * rng.lognormal(0.0, 0.6, len(turn))).astype(np.int64)
    prompts = np.ceil((300 + 200 * turn) * times).astype(np.int64)
    inside = np.flatnonzero((due_s >= 0) & (due_s < 3600))
    inside = inside[np.argsort(due_s[inside], kind="stable")]
    return Trace(due_s[inside] - due_s[inside[0]], prompts[inside], outputs[inside])


def _hashes(prompts: Ints, rng: np.random.Generator) -> HashIds:
    counts = prompts // BLOCK_TOKENS
    ids = np.arange(counts.sum()) + 1_000_000
    offsets = offsets_of(counts)
    families = rng.integers(20, size=len(prompts))
    for row in np.flatnonzero(rng.random(len(prompts)) < 0.5):
        shared = counts[row] // 2
        ids[offsets[row] : offsets[row] + shared] = 1000 * families[row] + np.arange(shared)
    return HashIds(offsets, ids, BLOCK_TOKENS)


def longer_outputs(trace: Trace, times: int = 2) -> Trace:
    """Return the trace with every output so many times as long."""
    return replace(trace, output_tokens=trace.output_tokens * times)


def in_bursts(trace: Trace, period_s: float = 20.0, share: float = 0.25) -> Trace:
    """Return the trace with each period's arrivals pressed into its first part."""
    start_s: Floats = np.floor(trace.due_s / period_s) * period_s
    return replace(trace, due_s=start_s + (trace.due_s - start_s) * share)


def without_reuse(trace: Trace) -> Trace:
    """Return the trace with prompts that have nothing in common any more."""
    hashes = trace.hashes
    assert hashes is not None
    fresh = np.arange(len(hashes.ids), dtype=np.int64)
    return replace(trace, hashes=HashIds(hashes.offsets, fresh, hashes.block_size))
