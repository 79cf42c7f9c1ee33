"""How far off the speed of a machine is told, and how far off it is said it may be.

    python tests/benchmarks/level_truth.py [--runs 24] [-o results.json]

On a planted machine whose speed wanders, a step model is learnt from blocks of three seconds of
different batches. What it says of 3,000 batches is compared with what they take in the mean of
all time, its stalls and bursts of other work included.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.planted_machine import MACHINES, MOODS, Mood
from support.step_parts import columns
from tuner.engine.protocol import Batch
from tuner.engine.shape import NO_GRAPHS
from tuner.engine.steps import StepColumns
from tuner.shadow.fit import fit
from tuner.shadow.speed import Uncertainty
from tuner.shadow.speed_fit import learn
from tuner.shadow.step_model import StepModel

MACHINE = MACHINES["cpu"]
KINDS = ((8, 2048), (64, 2048), (32, 512), (2, 2048), (16, 1024))
"""The caps and token budgets that make batches."""
SECONDS, BLOCK_S, MODELS = (30.0, 120.0, 300.0), 3.0, 60
NINE_IN_TEN = 1.645


def a_batch(kind: tuple[int, int], rng: np.random.Generator) -> Batch:
    """Return a batch that a cap and a token budget allow, seven in ten without a prompt."""
    cap, budget = kind
    seqs = int(rng.integers(max(1, cap // 4), cap + 1))
    prompt = int(min(budget - seqs, rng.lognormal(6, 1))) if rng.random() < 0.3 else 0
    return Batch(
        decode_seqs=seqs,
        prefill_tokens=prompt,
        decode_context_tokens=int(seqs * rng.lognormal(6, 0.4)),
        prefill_context_tokens=int(prompt * rng.lognormal(5, 0.5)),
        prefill_seqs=int(prompt > 0),
        preempted=0,
        cached_tokens=0,
    )


def true_s(batch: Batch, fixed: float, grows: float) -> float:
    """Return what a batch takes at factors of both of its parts."""
    longest = batch.decode_context_tokens // batch.decode_seqs
    parts = MACHINE.parts_s(batch, longest, NO_GRAPHS)
    return parts[0] * fixed + parts[1] * grows


def steps_of(batches: list[Batch], took_s: list[float]) -> StepColumns:
    """Return batches as the steps of a replay."""
    names = ("decode_seqs", "prefill_tokens", "decode_context_tokens", "prefill_context_tokens")
    of = {name: [getattr(batch, name) for batch in batches] for name in names}
    return columns(duration_s=took_s, **of)


def watched(mood: str, total_s: float, seed: int) -> list[StepColumns]:
    """Return the blocks that are run on a machine in so much time."""
    moods, rng = Mood(MOODS[mood], seed), np.random.default_rng([seed, 9])
    start, now_s, blocks = moods.of_a_start(), 0.0, []
    while now_s < total_s:
        kind, end_s = KINDS[rng.integers(len(KINDS))], now_s + BLOCK_S
        batches, took_s = list[Batch](), list[float]()
        while now_s < end_s:
            batches.append(a_batch(kind, rng))
            took_s.append(true_s(batches[-1], *moods.at(now_s)) * start * moods.of_a_step())
            now_s += took_s[-1]
        blocks.append(steps_of(batches, took_s))
    return blocks


def told(mood: str, total_s: float, seed: int) -> tuple[float, float]:
    """Return how far off the told speed is, and the deviation that is stated of it."""
    blocks, rng = watched(mood, total_s, seed), np.random.default_rng(5)
    speed = learn(fit(blocks).model, blocks)
    asked = [a_batch(KINDS[i % len(KINDS)], rng) for i in range(3000)]
    truly_s = sum(true_s(batch, *MOODS[mood].mean_ratios()) for batch in asked)
    steps = steps_of(asked, [1.0] * len(asked))
    off = math.log(float(speed.model.predict_s(steps).sum()) / truly_s)
    return off, _stated(speed.model, speed.uncertainty, steps)


def _stated(model: StepModel, uncertainty: Uncertainty, steps: StepColumns) -> float:
    numbers = np.random.default_rng(0).standard_normal((MODELS, 2 + len(uncertainty.table)))
    drawn = [uncertainty.moved(model, row).predict_s(steps).sum() for row in numbers]
    return float(np.log(drawn).std())


def figures(mood: str, total_s: float, runs: int) -> dict[str, Any]:
    """Return what so many runs tell, and print it."""
    off, stated = np.transpose([told(mood, total_s, seed) for seed in range(runs)])
    held = int((np.abs(off) < NINE_IN_TEN * stated).sum())
    found = {
        "mood": mood,
        "seconds": total_s,
        "runs": runs,
        "off_mean": round(float(off.mean()), 4),
        "off_rms": round(float(np.sqrt(np.square(off).mean())), 4),
        "stated_median": round(float(np.median(stated)), 4),
        "nine_in_ten_held": held,
    }
    print(
        f"{mood:6} {total_s:4.0f} s: told {off.mean():+.1%} off in the mean,"
        f" {found['off_rms']:.1%} (rms), stated {found['stated_median']:.1%},"
        f" {held} of {runs} intervals of 90 % hold"
    )
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    found = [
        figures(mood, s, given.runs) for mood in ("calm", "usual", "rough") for s in SECONDS
    ]
    if given.output is not None:
        given.output.write_text(
            json.dumps({"runs": given.runs, "found": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
