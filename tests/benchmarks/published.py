"""What derived profiles predict beside what others have published: level, trend, best setting.

    python tests/benchmarks/published.py --points [-o results.json]
    python tests/benchmarks/published.py --tables tables.json [-o results.json]
    python tests/benchmarks/published.py --orders [-o results.json]

--points takes the points of vLLM that come with the tables' library (Apache-2.0, most from
InferenceX) of models that are derived: Llama 3.1 70B in FP8, Qwen3 32B and gpt-oss-120b on 1 to
8 H100, H200 and B200, 4 to 128 requests in flight in a closed loop. As InferenceX measures,
lengths are uniform in 80 to 100 % of the nominal ones, ten requests for each in flight,
max_num_seqs is the concurrency and the budget 8,192; of Qwen3 32B that is taken to be so, too.
Each is replayed on a profile derived for it, and once more on that profile corrected, as `tune
calibrate --anchor` does it, by one point of the same GPUs, the one in the middle. gpt-oss was
served with Marlin's kernels on H100 and H200, and with activations and a KV cache of eight bits
on B200, which the tables do not have.

--tables replays what GPUStack published of the two limits, one at a time, with 512 requests in
flight on an H100: of a hybrid model, for which a dense one of its size stands in, and of
lengths of which the means alone are known. --orders replays strategies and caps whose order the
field reports, on a profile of a 7B model on an A100.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from tuner.engine.demo import bundled
from tuner.engine.limits import EngineLimits
from tuner.replay.arrivals import StaticBatches
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.run.loads.strategies import strategies, uniform
from tuner.shadow.correction import Anchor, by_anchor
from tuner.shadow.derived.derive import derive
from tuner.shadow.derived.gpus import gpu_of
from tuner.shadow.derived.models import library
from tuner.shadow.derived.wanted import Wanted
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile
from tuner.traffic.formats import read_trace
from tuner.traffic.resample import at_load
from tuner.traffic.traces import LoadModel, Trace

BUDGET, LONGEST = 8192, 20480
SEVEN_B = Path(__file__).resolve().parents[2] / "examples" / "qwen2.5-7b-shape"
MODELS = {
    ("meta-llama/Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("Qwen/Qwen3-32B", ""): "Qwen/Qwen3-32B",
    ("openai/gpt-oss-120b", "fp4"): "openai/gpt-oss-120b",
}
"""What is derived for published points, by their model and precision."""

_NOT_SPREAD = ("pp_size", "attention_dp_size", "moe_ep_size")
MOST_IN_FLIGHT = 128
"""Of 512 in flight the points are of caps that nobody has published."""


def closed_trace(isl: int, osl: int, count: int) -> Trace:
    """Return requests of lengths uniform in 80 to 100 % of the nominal ones."""
    rng = np.random.default_rng(0)
    prompts, outputs = (rng.integers(int(0.8 * n), n + 1, count) for n in (isl, osl))
    return Trace(np.zeros(count), prompts, outputs, source="published")


def point(profile: Profile, row: dict[str, Any]) -> dict[str, float]:
    """Return the mean latencies that a profile predicts for a published point.

    And the share of the time that sequences decode in which a prompt is computed beside them.
    """
    seqs = int(row["concurrency"])
    limits = EngineLimits(seqs, BUDGET)
    trace = closed_trace(row["isl"], row["osl"], 10 * seqs)
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=seqs, keep_steps=True)
    log = Predictor(profile).replay(trace, limits, plan)
    lines, steps = log.timelines, log.kept_steps
    tpot_s = (lines.last_s - lines.first_s) / np.maximum(lines.output_tokens - 1, 1)
    # In a closed loop a request is due when it is sent.
    ttft_s = lines.first_s - lines.due_s
    assert steps is not None
    decoded_s = steps.duration_s * steps.decode_seqs
    return {
        "ttft_ms": 1e3 * float(ttft_s.mean()),
        "tpot_ms": 1e3 * float(tpot_s.mean()),
        "beside_prompts": float(decoded_s[steps.prefill_tokens > 0].sum() / decoded_s.sum()),
    }


def published() -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """Return the points that come with the library, by model, GPU and how many of it."""
    found: dict[tuple[str, str, int], dict[tuple[object, ...], dict[str, Any]]]
    found = defaultdict(dict)
    path = Path(str(library("aiconfigurator_core").__file__)).parent / "systems"
    with (path / "silicon_sample.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            model = MODELS.get((row["model_path"], row["precision"]))
            spread = {row[name] or "1" for name in _NOT_SPREAD}
            if (row["backend"], row["mode"], spread) != ("vllm", "agg", {"1"}):
                continue
            point: dict[str, Any] = {
                "isl": int(row["isl"]),
                "osl": int(row["osl"]),
                "concurrency": int(row["batch_size"]),
                "vllm": row["backend_version"],
            }
            if model and point["concurrency"] <= MOST_IN_FLIGHT:
                took = {name: float(row[f"silicon_{name}"]) for name in ("ttft_ms", "tpot_ms")}
                # Some stand there twice.
                key = model, row["system"], int(row["tp_size"])
                found[key][tuple(point.values())] = point | took
    return {key: list(rows.values()) for key, rows in sorted(found.items())}


def derived(model: str, gpu: str, parallel: int) -> Profile:
    """Return the profile that points are predicted by."""
    limits = EngineLimits(MOST_IN_FLIGHT, BUDGET)
    return derive(Wanted(gpu_of(gpu), model, parallel, limits, max_model_len=LONGEST))


def points() -> list[dict[str, Any]]:
    """Return the published points with what is predicted, derived and with one point known."""
    found: list[dict[str, Any]] = []
    for (model, gpu, parallel), mine in published().items():
        profile = derived(model, gpu, parallel)
        predicted = [point(profile, row) for row in mine]
        middle = sorted(range(len(mine)), key=lambda i: mine[i]["tpot_ms"])[len(mine) // 2]
        seqs = int(mine[middle]["concurrency"])
        prompt, output = (round(0.9 * mine[middle][name]) for name in ("isl", "osl"))
        tpot_s = mine[middle]["tpot_ms"] / 1e3
        anchor = Anchor(tpot_s, seqs, prompt + output // 2, prompt, output)
        level, _ = by_anchor(profile, anchor, EngineLimits(seqs, BUDGET))
        for i, row in enumerate(mine):
            more = {
                "predicted": predicted[i],
                "anchored": None if i == middle else point(level, row),
            }
            found.append({"model": model, "gpu": gpu, "tp": parallel, **row, **more})
        print(model, gpu, parallel, len(mine), file=sys.stderr, flush=True)
    return found


def tell_points(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print and return how far off they are, by model and GPU, and whether orders hold."""
    by_kind = defaultdict(list)
    for row in found:
        by_kind[f"{row['model']} {row['gpu']}"].append(row)
    figures = {kind: _errors(kind, rows) for kind, rows in by_kind.items()}
    sweeps = defaultdict(list)
    for row in found:
        sweeps[tuple(row[name] for name in _SWEEP)].append(row)
    kept = [rows for rows in sweeps.values() if len(rows) >= 3]
    ranks = [
        float(spearmanr([r["tpot_ms"] for r in rows], [_predicted(r) for r in rows]).statistic)
        for rows in kept
    ]
    # Tokens per second of a closed loop: what is in flight over the time per token.
    hits = sum(
        max(rows, key=lambda r: r["concurrency"] / r["tpot_ms"])
        is max(rows, key=lambda r: r["concurrency"] / _predicted(r))
        for rows in kept
    )
    mean = float(np.mean(ranks))
    figures["rank correlation within a sweep"] = {"mean": mean, "n": len(ranks)}
    figures["same best concurrency"] = {"hits": hits, "n": len(kept)}
    print(f"rank correlation {mean:.3f}, the same best concurrency in {hits} of {len(kept)}")
    return figures


_SWEEP = ("model", "gpu", "tp", "isl", "osl", "vllm")
"""Points alike in these differ in how many are in flight."""


def _errors(kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print and return by how much longer than published the predictions of some points are."""
    told: dict[str, Any] = {}
    for source in ("predicted", "anchored"):
        for metric in ("tpot_ms", "ttft_ms"):
            has = [row for row in rows if row[source]]
            off = np.array([row[source][metric] / row[metric] - 1 for row in has])
            low, middle, high = np.quantile(off, (0.1, 0.5, 0.9))
            figure = {
                "p10": float(low),
                "median": float(middle),
                "p90": float(high),
                "median_size": float(np.median(np.abs(off))),
                "worst": float(np.abs(off).max()),
            }
            told[f"{source} {metric}"] = {**figure, "n": len(off)}
            shown = ", ".join(f"{name} {value:+.1%}" for name, value in figure.items())
            print(f"{kind}, {source} {metric}: {shown}, n {len(off)}")
    return told


def _predicted(row: dict[str, Any]) -> float:
    return float(row["predicted"]["tpot_ms"])


STAND_IN, IN_FLIGHT = "Qwen/Qwen3-8B", 512


def knobs(tables: Path) -> list[dict[str, Any]]:
    """Print and return what the limits change of a closed loop, as published and predicted.

    Lengths are drawn from exponential distributions of the published means.
    """
    table = next(t for t in json.loads(tables.read_text())["tables"] if "gpustack" in t["id"])
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    rng, count = np.random.default_rng(0), int(rows[0]["requests"])
    prompts, outputs = (
        1 + rng.exponential(rows[0][name] / count, count).astype(np.int64)
        for name in ("input_tokens", "output_tokens")
    )
    trace = Trace(np.zeros(count), prompts, outputs, source="published")
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=IN_FLIGHT)
    usual = EngineLimits(1024, 8192)
    wanted = Wanted(gpu_of("h100_sxm"), STAND_IN, limits=usual)
    predictor = Predictor(derive(wanted))

    def told(limits: EngineLimits) -> tuple[float, float]:
        m = measure([predictor.replay(trace, limits, plan)])
        return m.output_tokens_per_s, m.latency("ttft_s", "mean") or 0.0

    found, base, published = [], told(usual), rows[0]
    for row in rows[4:]:
        flags = dict(re.findall(r"--(max-num-\S+)=(\d+)", row["flags"]))
        seqs = int(flags.get("max-num-seqs", usual.max_num_seqs))
        tokens = int(flags.get("max-num-batched-tokens", usual.max_num_batched_tokens))
        rate, ttft_s = told(EngineLimits(seqs, tokens))
        change = {
            "limits": f"{seqs}/{tokens}",
            "rate_published": row["output_tok_s"] / published["output_tok_s"] - 1,
            "rate_predicted": rate / base[0] - 1,
            "ttft_published": row["ttft_mean_ms"] / published["ttft_mean_ms"],
            "ttft_predicted": ttft_s / base[1],
        }
        found.append(change)
        print(
            ", ".join(
                f"{k} {v if isinstance(v, str) else f'{v:.3f}'}" for k, v in change.items()
            )
        )
    return found


def orders() -> dict[str, Any]:
    """Print and return the orders that the field reports, as predicted for a 7B on an A100."""
    limits = EngineLimits(256, 2048)
    profile = derive(Wanted(gpu_of("a100_sxm"), str(SEVEN_B), limits=limits))
    predictor = Predictor(profile)
    trace = read_trace(bundled("traces") / "translation.jsonl")

    def at(plan: ReplayPlan, setting: EngineLimits, traffic: Trace) -> Measurement:
        return measure([predictor.replay(traffic, setting, plan)])

    saturated = at_load(trace, 8.0)
    grid = [EngineLimits(s, t) for s in (32, 64, 128, 256, 512) for t in (2048, 4096, 8192)]
    tuned = max(grid, key=lambda s: at(ReplayPlan(), s, saturated).requests_per_s)
    found: dict[str, Any] = {"strategies": {}, "caps": {}}
    for strategy in strategies(limits, tuned, [StaticBatches(16, 0.05)]):
        m = at(strategy.plan(ReplayPlan()), strategy.limits, saturated)
        found["strategies"][strategy.name] = m.requests_per_s
        print(f"{strategy.name:<45} {strategy.limits!s:>10} {m.requests_per_s:8.1f} requests/s")
    for seqs in (1, 2, 4, 8, 16, 32, 64):
        setting = EngineLimits(seqs, 2048)
        m, alike = (at(ReplayPlan(), setting, t) for t in (trace, uniform(trace)))
        found["caps"][seqs] = {
            "requests_per_s": m.requests_per_s,
            "e2e_p99": m.latency("e2e_s", "p99"),
            "tpot_p99": m.latency("tpot_s", "p99"),
            "e2e_p99_uniform": alike.latency("e2e_s", "p99"),
            "requests_per_s_uniform": alike.requests_per_s,
        }
        cells = ", ".join(f"{k} {v:.3g}" for k, v in found["caps"][seqs].items())
        print(f"cap {seqs:>3}: {cells}")
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="derived profiles beside published results")
    parser.add_argument("--points", action="store_true", help="points of the tables' library")
    parser.add_argument("--tables", type=Path, help="published changes of one limit")
    parser.add_argument("--orders", action="store_true", help="orders that the field reports")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    content: dict[str, Any] = {"command": " ".join(Path(word).name for word in sys.argv)}
    if args.points:
        found = points()
        content |= {"figures": tell_points(found), "points": found}
    if args.tables:
        content["knobs"] = knobs(args.tables)
    if args.orders:
        content["orders"] = orders()
    if args.output:
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
