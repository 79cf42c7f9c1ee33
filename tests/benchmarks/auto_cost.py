"""What `tune` costs with the shadow: beside its own --method live, and beside restarts.

    python tests/benchmarks/auto_cost.py [--window 4] [--budget 240] [--runs 1]
        [--every-setting] [-o FILE]
    python tests/benchmarks/auto_cost.py --alone [--budget 150] [--again] [-o FILE]

Both methods tune the demo model on the same window of traces/translation.jsonl from the same
current limits, over ten caps and six token budgets. What `vllm bench sweep serve` costs for
each setting is measured over --restarts of them and multiplied by the number of settings. With
--every-setting each of the sixty is replayed live once, on one engine, and nothing cut short:
what it takes to know of all of them without a shadow. With --alone only the command itself is
run, with the shadow; with --again each run is followed by one that is given its profile.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sweep_cost

LADDER = (1, 2, 4, 8, 12, 16, 24, 32)
# What both methods may try: past the ladder twice its last and twice that, and all budgets up
# to what is due within the busiest second, four times over.
CAPS, BUDGETS = (*LADDER, 64, 128), (512, 1024, 2048, 4096, 8192, 16384)
SETTINGS = [(cap, budget) for cap in CAPS for budget in BUDGETS]
CURRENT = ("max-num-seqs=8", "max-num-batched-tokens=2048")
AGAIN = "auto with its profile"
ROOT = Path(__file__).resolve().parents[2]


def tune(
    method: str, window_s: float, budget_s: float, folder: Path, profile: Path | None = None
) -> dict[str, Any]:
    """Run the command and return its result; its directory is named after the method."""
    run_dir = folder / (method if profile is None else AGAIN)
    command = [
        *(sys.executable, "-m", "tuner.cli", "--method", method),
        *("--trace", str(ROOT / "traces" / "translation.jsonl")),
        *(word for value in CURRENT for word in ("--engine-arg", value)),
        *("--max-num-seqs", ",".join(map(str, LADDER))),
        *("--window", f"peak:{window_s:g}s", "--budget", f"{budget_s:g}s"),
        *("--run-dir", str(run_dir), "-o", str(folder / f"{run_dir.name}.yaml")),
        *(() if profile is None else ("--profile", str(profile))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def every_setting(window_s: float) -> dict[str, Any]:
    """Replay the window live at every setting, on one engine."""
    from tuner.engine.demo import demo_engine_args
    from tuner.engine.limits import EngineLimits
    from tuner.engine.live import LiveSource
    from tuner.replay.plan import ReplayPlan
    from tuner.replay.process import EngineProcess

    ceiling = EngineLimits(max(CAPS), max(BUDGETS))
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(LiveSource(), Path(folder) / "live.log") as host,
    ):
        host.start(demo_engine_args(), ceiling)
        start_s = time.monotonic() - began_s
        host.load("window", sweep_cost.window(window_s), 0)
        walls_s = []
        for cap, budget in SETTINGS:
            before_s = time.monotonic()
            host.replay("window", EngineLimits(cap, budget), ReplayPlan())
            walls_s.append(time.monotonic() - before_s)
            print(f"{cap}/{budget}: {walls_s[-1]:.1f} s", file=sys.stderr, flush=True)
    return {
        "replays_s": walls_s,
        "start_s": start_s,
        "wall_s": time.monotonic() - began_s,
    }


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Return what of a result matters here."""
    trials = result["trials"]
    made = result["provenance"]
    return {
        "wall_s": made["wall_s"],
        "stages_s": made["stages_s"],
        "live_replays": sum(t["engine"] == "live" for t in trials),
        "shadow_replays": sum(t["engine"] == "shadow" for t in trials),
        "recommendation": result["recommendation"],
        "confirmed_cold": result["confirmed_cold"],
        "caveats": [c["id"] for c in result["caveats"]],
    }


def beside(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Measure, print and return what stands beside the tool's own runs."""
    each_s = sweep_cost.theirs(args.window, args.restarts)["each_s"]
    restarts_s = each_s * len(SETTINGS)
    print(
        f"restart sweep: {each_s:.1f} s each, {restarts_s:.0f} s for {len(SETTINGS)}, "
        f"extrapolated from {args.restarts}"
    )
    for run, other in zip(found["auto"], found["live"], strict=True):
        print(
            f"auto {run['wall_s']:.0f} s, live {other['wall_s']:.0f} s: ratio "
            f"{other['wall_s'] / run['wall_s']:.1f}; restarts {restarts_s / run['wall_s']:.1f}"
        )
    others = {"restart_each_s": each_s, "restarts": args.restarts}
    if not args.every_setting:
        return others
    all_live = every_setting(args.window)
    print(f"every setting live once: {all_live['wall_s']:.0f} s, start included")
    return {**others, "every_setting": all_live}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=float, default=4.0)
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--every-setting", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    methods = ["auto"] if args.alone else ["auto", "live"]
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for _ in range(args.runs):
        for method in methods:
            runs = found[method]
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                runs.append(brief(tune(method, args.window, args.budget, path)))
                print(f"{method}: {json.dumps(runs[-1])}", flush=True)
                if args.again and method == "auto":
                    profile = path / method / "profile.yaml"
                    again = tune(method, args.window, args.budget, path, profile)
                    found.setdefault(AGAIN, []).append(brief(again))
                    print(f"{AGAIN}: {json.dumps(found[AGAIN][-1])}", flush=True)
    others = {} if args.alone else beside(args, found)
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": len(SETTINGS),
            **others,
            **found,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
