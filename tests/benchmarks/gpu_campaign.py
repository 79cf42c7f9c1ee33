"""A first look at a CUDA device, stage by stage: what of the tool holds there, and how well.

    python tests/benchmarks/gpu_campaign.py --traces DIR --out DIR [--slice 9m] [--only NAME …]
        [--race-budget 330s]
    python tests/benchmarks/gpu_campaign.py --out DIR --table

Begin it when nothing else computes on the card, and carry OUT away whole: the steps that were
measured lie in it, from which later versions may learn.

Each call runs the stages that have no result yet, in order, for as long as the slice lasts; a
stage that would not fit is left to the next call. Each runs in a process of its own, is ended
when it takes twice what it should, and leaves OUT/STAGE.json, whatever became of it; --again
runs those named by --only once more. What teaches most comes first: `tune` itself, then live
replays of other settings beside what the profile that it learnt foretold. A table of what is
known ends each call. With less than 330 s the race has no time for cold engines.

DIR holds azure_2023_conv.open, azure_2023_code.open and mooncake_conversation.open, as CSV or
as JSON Lines (`tune trace convert`; CSV needs Polars); models are shapes with random weights
(examples/*-shape). With
--small everything is done on the bundled demo model and the sample traces, as its test does:
the figures then mean nothing.

On a machine that has this folder and packages in SITE but no installation:

    PYTHONPATH=SITE:$PWD python3 tests/benchmarks/gpu_campaign.py …
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_stages import (
    LEFT_S,
    Campaign,
    derived,
    doctor,
    large,
    overhead,
    race,
    scenarios,
    small,
    starts,
    sweep,
    truth,
)

from tuner.search.objective import moved
from tuner.traffic.windows import parse_duration

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """One part of the campaign, and how long it should take on an 80 GB card.

    Units: seconds; `needs_gpu` says whether it runs an engine.
    """

    name: str
    run: Callable[[Campaign], Any]
    expected_s: float
    row: Callable[[dict[str, Any]], str] = field(default=lambda result: str(result)[:90])


def _starts_row(result: dict[str, Any]) -> str:
    blocks = ", ".join(f"{s['num_blocks']:,} at {s['limits']}" for s in result["starts"])
    took = ", ".join(f"{s['start_s']:.0f} s" for s in result["starts"])
    off = f"the third foretold {result['third_off']:+.1%} off, "
    return (
        f"{blocks} blocks, in {took}; {off}the second by the first {result['second_off']:+.1%}"
    )


def _truth_row(result: dict[str, Any]) -> str:
    figures = result["figures"]
    parts = [
        f"{metric} off {figures[metric]['median']:.1%} (at own speed "
        f"{figures[metric]['own_speed_median'] or 0:.1%}"
        + (f", live {noise:.1%})" if (noise := figures[metric]["live_noise"]) else ")")
        for metric in ("e2e_p50", "tpot_p50", "e2e_p99")
        if metric in figures
    ]
    graphs = f"{result['captured'][0]} graphs to {result['captured'][1]}"
    own = "of each setting" if result["has_own_graphs"] else "of the ceiling"
    return "; ".join([*parts, f"{graphs}, {own}", f"{result['num_blocks']:,} blocks"])


def _race_row(result: dict[str, Any]) -> str:
    advice, cold = result["recommendation"], result["confirmed_cold"]
    if advice is None:
        return "nothing feasible"
    gain, metric = advice["gain_ratio"], advice["gain_metric"]
    gain = "no gain" if gain is None else f"{metric} {moved(metric, gain):+.1%}"
    ratio = "not confirmed" if not cold or not cold["ratio"] else f"{cold['ratio'] - 1:+.1%}"
    setting = f"{advice['max_num_seqs']}/{advice['max_num_batched_tokens']}"
    return f"{advice['verdict']} {setting}, {gain}, cold {ratio}, {result['wall_s']:.0f} s"


def _derived_row(result: dict[str, Any]) -> str:
    parts = []
    for stage, one in result.items():
        if "skipped" in one:
            parts.append(f"{stage}: {one['skipped']}")
        else:
            off = one["tpot_p50"]
            parts.append(f"{stage}: TPOT off {off['derived']:.1%}, learnt {off['learnt']:.1%}")
    return "; ".join(parts) or "nothing to hold them to"


def stages() -> tuple[Stage, ...]:
    """Return all stages, what teaches most first."""
    found = scenarios()
    truths = {name: truth(name, make) for name, make in found.items()}

    def true(name: str, expected_s: float) -> Stage:
        return Stage(name, truths[name], expected_s, _truth_row)

    return (
        Stage(
            "doctor",
            doctor,
            40,
            lambda r: f"{r['card'] or 'no card'}; missing: {', '.join(r['missing']) or 'none'}",
        ),
        Stage("race", race, 360, _race_row),
        true("truth-qwen", 180),
        Stage("starts", starts, 140, _starts_row),
        true("truth-kv", 210),
        true("truth-eager", 170),
        true("truth-llama", 270),
        true("truth-sync", 160),
        true("truth-drafts", 200),
        true("truth-windows", 200),
        Stage("overhead", overhead, 120, lambda r: f"replay/LLM.generate {r['ratio']:.3f}"),
        Stage("sweep", sweep, 120, lambda r: f"one point by a restart {r['each_s']:.0f} s"),
        true("truth-mooncake", 190),
        Stage("derived", derived, 30, _derived_row),
    )


# One call.


def run_stage(campaign: Campaign, stage: Stage) -> None:
    """Run a stage in this process and keep what became of it."""
    began_s = time.monotonic()
    kept: dict[str, Any] = {"stage": stage.name, "state": "done"}
    try:
        kept["result"] = stage.run(campaign)
    except Exception as error:  # noqa: BLE001 - what went wrong is the stage's result
        kept |= {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        kept["traceback"] = traceback.format_exc()[-4000:]
    kept["took_s"] = time.monotonic() - began_s
    write(campaign, kept)


def write(campaign: Campaign, kept: Mapping[str, Any]) -> None:
    """Keep what became of a stage."""
    path = campaign.out / f"{kept['stage']}.json"
    path.write_text(json.dumps(kept, indent=1, default=str) + "\n")


def in_a_process(campaign: Campaign, stage: Stage, argv: list[str]) -> None:
    """Run a stage in a process of its own, which is ended when it takes far too long."""
    left_s = campaign.ends_s - time.monotonic() - LEFT_S / 2
    limit_s = min((10 if campaign.is_small else 2) * stage.expected_s, left_s)
    command = [sys.executable, __file__, *argv, "--stage", stage.name]
    command += ["--slice", f"{max(1.0, limit_s):.0f}s"]
    began_s = time.monotonic()
    log = campaign.out / f"{stage.name}.log"
    with log.open("ab") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if campaign.kept(stage.name) is None:
        took_s = time.monotonic() - began_s
        how = f"ended after {took_s:.0f} s (status {child.returncode})"
        tail = log.read_text(errors="replace")[-1500:]
        lost = {"stage": stage.name, "state": "lost", "error": how, "log": tail}
        write(campaign, {**lost, "took_s": took_s})


def table(campaign: Campaign) -> str:
    """Return what is known of every stage, as a table."""
    lines = ["| stage | state | took | what came of it |", "|---|---|---|---|"]
    for stage in stages():
        kept = campaign.kept(stage.name)
        if kept is None:
            lines.append(f"| {stage.name} | not run | | should take {stage.expected_s:.0f} s |")
            continue
        told = kept.get("error", "")
        if kept["state"] == "done":
            told = stage.row(kept["result"])
        told = told.replace("\n", " ").replace("|", "/")
        lines.append(f"| {stage.name} | {kept['state']} | {kept['took_s']:.0f} s | {told} |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=Path(".traces"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slice", type=parse_duration, default=540.0, metavar="TIME")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE")
    parser.add_argument("--race-budget", type=parse_duration, metavar="TIME")
    parser.add_argument("--again", action="store_true", help="run what --only names anew")
    parser.add_argument("--small", action="store_true", help="the demo model, on a CPU too")
    parser.add_argument("--table", action="store_true", help="nothing but the table")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size = (small if args.small else large)(args.traces)
    campaign = Campaign(
        replace(size, race_s=args.race_budget or size.race_s),
        args.traces,
        args.out,
        time.monotonic() + args.slice,
        is_small=args.small,
    )
    known = {stage.name: stage for stage in stages()}
    if unknown := sorted(set(args.only) - known.keys()):
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(known)}")
    if args.stage:
        run_stage(campaign, known[args.stage])
        return
    if not args.table:
        argv = ["--traces", str(args.traces), "--out", str(args.out)]
        argv += ["--small"] if args.small else []
        argv += [f"--race-budget={args.race_budget}s"] if args.race_budget else []
        go(campaign, args, argv)
    print(table(campaign))


def go(campaign: Campaign, args: argparse.Namespace, argv: list[str]) -> None:
    """Run the stages that have no result, for as long as the slice lasts."""
    for stage in stages():
        if args.only and stage.name not in args.only:
            continue
        if args.again and stage.name in args.only:
            (campaign.out / f"{stage.name}.json").unlink(missing_ok=True)
        if campaign.kept(stage.name) is not None:
            continue
        left_s = campaign.ends_s - time.monotonic() - LEFT_S
        if stage.expected_s > left_s:
            print(f"{stage.name} wants {stage.expected_s:.0f} s: left to the next slice")
            continue
        print(f"{stage.name} …", flush=True)
        in_a_process(campaign, stage, argv)


if __name__ == "__main__":
    main()
