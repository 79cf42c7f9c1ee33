"""Layer tables and recorded runs as LLMServingSim publishes them, and what comes of the tables.

The time of each layer measured inside vLLM 0.19 (dense.csv, attention.csv, per_sequence.csv),
and a run of 300 requests of ShareGPT on the same card (requests.jsonl, meta.json). The tables
are asked about batches of all kinds, a step model is fitted to what they say, and the requests
are replayed on it with the run's limits, blocks, graphs and asynchronous scheduling. Nothing is
fitted to the run.

Source: github.com/casys-kaist/LLMServingSim, commit 5daddb2, MIT, Copyright CASYS Lab at KAIST.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import spread_tokens
from tuner.engine.shape import FULL_ATTENTION, EngineShape
from tuner.engine.steps import StepColumns
from tuner.files import parse_yaml
from tuner.replay.plan import ReplayPlan
from tuner.replay.timeline import Timelines
from tuner.shadow.fit import Fit, fit
from tuner.shadow.prepared import PreparedTrace
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.simulator import simulate
from tuner.stats import Floats
from tuner.traffic.traces import Trace

LAYERS: Final = 32
"""Of Llama 3.1 8B; the tables are of one."""

ONCE: Final = ("embedding", "final_layernorm")
TWICE: Final = ("layernorm",)
BATCHES: Final = 6000
ENOUGH_BLOCKS: Final = 30_000
"""Ours, where a run does not tell its blocks: what a card of 96 GB holds beside the model."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the tables are asked about: contexts of decodes, and one prompt."""

    contexts: tuple[int, ...]
    prefill: int = 0
    cached: int = 0


class Tables:
    """The layers' times of one card.

    `skew` is by what share of the way to a batch whose decodes are all as long as the longest
    uneven ones take longer than even ones, as fitted by who measured it; 0 where nobody did.
    """

    def __init__(self, folder: Path) -> None:
        self._dense = _curves(folder / "dense.csv", "layer", "tokens")
        self._seqs = _curves(folder / "per_sequence.csv", "layer", "sequences")
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        self._attention = {
            tuple(int(row[name]) for name in names): float(row["time_us"])
            for row in _rows(folder / "attention.csv")
            # What lies between the powers of two was not measured everywhere.
            if all(int(row[name]) & (int(row[name]) - 1) == 0 for name in names)
        }
        keys = zip(*self._attention, strict=True)
        self._axes = [np.array(sorted(set(key))) for key in keys]
        meta: Any = parse_yaml((folder / "profile-meta.yaml").read_bytes())
        fitted = meta["skew_fit"].get("per_tp", {}).get(1, {})
        self.skew = float(fitted.get("alpha_default", 0.0))

    def step_s(self, batch: Batch, shape: EngineShape) -> float | None:
        """Return how long a batch takes, None where the tables do not reach."""
        seqs = len(batch.contexts)
        tokens, has_prompt = seqs + batch.prefill, batch.prefill > 0
        run = shape.graphs.padded(tokens, has_prompt=has_prompt) or tokens
        attention_us = self._uneven_us(batch)
        if attention_us is None:
            return None
        dense_us = sum(
            float(np.interp(run, *curve))
            * (1 if name in ONCE else LAYERS + LAYERS * (name in TWICE))
            for name, curve in self._dense.items()
        )
        heads_us = sum(float(np.interp(seqs + has_prompt, *c)) for c in self._seqs.values())
        return (dense_us + heads_us + LAYERS * attention_us) / 1e6

    def _uneven_us(self, batch: Batch) -> float | None:
        """Return the attention of a layer, with what uneven contexts add."""
        seqs = len(batch.contexts)
        mean = sum(batch.contexts) / seqs if seqs else 0.0
        even = self._attention_us(batch, mean)
        longest = self._attention_us(batch, max(batch.contexts)) if seqs and self.skew else even
        if even is None or longest is None:
            return None
        return even + self.skew * (longest - even)

    def _attention_us(self, batch: Batch, context: float) -> float | None:
        """Return the attention of a layer where all decodes have one context.

        Linear between what was measured; None where a corner was not.
        """
        asked = (
            batch.prefill,
            batch.cached if batch.prefill else 0,
            len(batch.contexts),
            context,
        )
        corners = []
        for axis, x in zip(self._axes, asked, strict=True):
            if x > axis[-1]:
                return None
            i = int(np.searchsorted(axis, x, "right")) - 1
            above = min(i + 1, len(axis) - 1)
            share = (x - axis[i]) / (axis[above] - axis[i]) if above > i else 0.0
            corners.append([(int(axis[i]), 1 - share), (int(axis[above]), share)])
        total_us = 0.0
        for corner in product(*([c for c in pair if c[1] > 0] for pair in corners)):
            found = self._attention.get(_measured_key(tuple(x for x, _ in corner)))
            if found is None:
                return None
            total_us += found * float(np.prod([share for _, share in corner]))
        return total_us


def _measured_key(key: tuple[int, ...]) -> tuple[int, ...]:
    """Return where a batch stands that has no prompt or no decodes, or next to no context."""
    prefill, cached, seqs, context = key
    return (prefill, cached if prefill else 0, seqs, max(context, 16) if seqs else 0)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _curves(path: Path, name: str, axis: str) -> dict[str, tuple[Floats, Floats]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in _rows(path):
        found.setdefault(row[name], []).append((float(row[axis]), float(row["time_us"])))
    return {key: tuple(np.array(sorted(points)).T) for key, points in found.items()}


def asked(limits: EngineLimits, longest: int, held_tokens: int) -> Iterator[Batch]:
    """Yield batches of all kinds, a half with a prompt; contexts are apart as traffic's are."""
    rng = np.random.default_rng(0)
    for number in range(BATCHES):
        seqs = int(np.exp(rng.uniform(0, np.log(limits.max_num_seqs + 0.5))))
        prefill = cached = 0
        if number % 2:
            seqs = 0 if number % 4 == 1 else seqs
            most = limits.max_num_batched_tokens - seqs
            prefill = int(np.exp(rng.uniform(np.log(16), np.log(most))))
            cached = int(rng.choice([0, 0, 0.5, 1, 3]) * prefill)
        mean = min(np.exp(rng.uniform(np.log(64), np.log(longest))), held_tokens / max(seqs, 1))
        lengths = mean * rng.lognormal(0.0, rng.uniform(0.0, 1.0), seqs)
        contexts = np.clip(lengths.astype(np.int64), 16, longest)
        yield Batch(tuple(contexts.tolist()), prefill, cached)


def fitted(tables: Tables, shape: EngineShape, limits: EngineLimits, blocks: int) -> Fit:
    """Return the step model that is fitted to what the tables say of batches."""
    held = min(blocks * shape.block_size, 400_000)
    pairs = [
        (batch, took_s)
        for batch in asked(limits, 8192, held)
        if (took_s := tables.step_s(batch, shape)) is not None
    ]
    return fit([_columns(*zip(*pairs, strict=True))], shape.graphs)


def _columns(batches: Sequence[Batch], took_s: Sequence[float]) -> StepColumns:
    contexts = [batch.contexts for batch in batches]
    prefill = np.array([batch.prefill for batch in batches], np.float64)
    cached = np.array([batch.cached for batch in batches], np.float64)
    seqs = np.array([len(each) for each in contexts], np.float64)
    spreads = [spread_tokens(c) for c in contexts]
    return StepColumns.of_batches(
        np.array(took_s),
        seqs,
        prefill,
        np.array([sum(each) for each in contexts], np.float64),
        prefill * cached + prefill * (prefill + 1) / 2,
        (prefill > 0).astype(np.float64),
        np.array(spreads),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run: its engine and its requests, in the order in which they were queued.

    Shapes: first_s and last_s are [requests], on the trace's clock.
    """

    shape: EngineShape
    limits: EngineLimits
    num_blocks: int
    trace: Trace
    first_s: Floats
    last_s: Floats

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what lies in a card's folder."""
        meta = json.loads((folder / "meta.json").read_text())
        rows = [json.loads(line) for line in (folder / "requests.jsonl").open()]
        rows.sort(key=lambda row: row["queued_ts"])
        table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        args, began_s = meta["engine_kwargs"], float(table["queued_ts"][0])
        limits = EngineLimits(args["max_num_seqs"], args["max_num_batched_tokens"])
        shape = EngineShape(
            model=meta["model"],
            device=folder.name,
            dtype=args["dtype"],
            vllm_version=meta["vllm_version"],
            parallelism={"tensor_parallel_size": 1},
            vocab_size=128_256,
            max_model_len=args["max_model_len"] or 131_072,
            block_size=16,
            kv_kind=FULL_ATTENTION,
            prefix_caching=True,
            asynchronous=True,
            captured_sizes=(),
            scheduler={
                "policy": "fcfs",
                "enable_chunked_prefill": True,
                "scheduler_reserve_full_isl": True,
            },
        )
        return cls(
            shape=replace(shape, captured_sizes=shape.chosen_sizes(limits)),
            limits=limits,
            num_blocks=meta.get("kv_cache", {}).get("num_gpu_blocks", ENOUGH_BLOCKS),
            trace=Trace(
                table["queued_ts"] - began_s,
                table["input_toks"].astype(np.int64),
                table["output_toks"].astype(np.int64),
                source=folder.name,
            ),
            first_s=table["first_token_ts"] - began_s,
            last_s=table["last_token_ts"] - began_s,
        )

    def latencies(self, first_s: Floats, last_s: Floats) -> dict[str, Floats]:
        """Return each request's latencies from when it was queued."""
        due_s, outputs = self.trace.due_s, self.trace.output_tokens
        tpot_s = (last_s - first_s) / np.maximum(outputs - 1, 1)
        return {"ttft": first_s - due_s, "tpot": tpot_s, "e2e": last_s - due_s}


def compared(run: Run, lines: Timelines) -> dict[str, dict[str, float]]:
    """Return each metric as recorded, as simulated, and how far that is off."""
    recorded = run.latencies(run.first_s, run.last_s)
    simulated = run.latencies(lines.first_s, lines.last_s)
    found = {}
    for metric, values in recorded.items():
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            there, here = (float(np.quantile(v, q)) for v in (values, simulated[metric]))
            found[f"{metric}_{name}"] = {
                "recorded_s": there,
                "simulated_s": here,
                "off": here / there - 1,
            }
    return found


def card(folder: Path) -> dict[str, Any]:
    """Return what comes of one card's folder."""
    run, tables = Run.read(folder), Tables(folder)
    found = fitted(tables, run.shape, run.limits, run.num_blocks)
    engine = SimulatedEngine(run.shape, run.num_blocks, found.model, run.limits)
    plan = ReplayPlan()
    log = simulate(engine, PreparedTrace(run.trace, plan), run.limits, plan)
    model = found.model
    return {
        "requests": len(run.trace),
        "preempted": log.steps.preempted,
        "step_mape_ratio": found.error.step_mape_ratio,
        "heldout_steps_ratio": found.error.heldout_steps_ratio,
        "step_model": {
            name: getattr(model, name)
            for name in type(model).__dataclass_fields__
            if name.endswith(("_s", "knots"))
        },
        "latencies": compared(run, log.timelines),
    }


def cards(folder: Path) -> list[Path]:
    """Return the folders of cards, by name."""
    return sorted(path.parent for path in folder.glob("*/requests.jsonl"))
