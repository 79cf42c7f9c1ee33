"""How long a re-tune without an engine takes: an hour of traffic over sixty settings.

    python tests/benchmarks/retune_cost.py TRACE [--hours 1] [--runs 3] [--current 32/2048]
                                           [--budget 30m] [-o results.json]

TRACE is repeated until it lasts --hours. The whole command is timed from its start to its end,
imports and the report included, by the clock and in time of the processor. The engine is the
demo's profile with the steps of a larger model: 16 ms, 0.15 ms more for a sequence and 0.01 ms
more for a prompt token. The current limits are replayed whole in any case, so those of a cap
that is far too small, whose queue never ends, make it slower. A small --budget has the command
replay stretches of the traffic, the busiest and a typical one, instead of all of it; which is
told.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from knobs import an_hour

from tuner.shadow.profiles import read_profile, write_profile
from tuner.shadow.step_model import StepModel
from tuner.traffic.formats import read_trace
from tuner.traffic.formats.native import native_rows

ROOT = Path(__file__).resolve().parents[2]
CAPS = "1,2,4,8,16,24,32,64"  # and 128 and 256 past them, times six budgets
STEPS = StepModel.linear(0.016, 0.00015, 0.00001)


def prepare(folder: Path, path: str, hours: float) -> int:
    """Write the traffic and the profile; return the number of requests."""
    trace = read_trace(Path(path))
    long = an_hour(trace, hours * 3600)
    with (folder / "hour.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in native_rows(long))
    kept = read_profile(ROOT / "profiles" / "demo.profile.yaml")
    write_profile(folder / "profile.yaml", replace(kept, step_model=STEPS))
    return len(long)


def processor_s() -> float:
    """Return what the commands that were run have taken of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(folder: Path, number: int, current: str, budget: str) -> dict[str, Any]:
    """Run the command once."""
    run_dir = folder / f"run-{number}"
    seqs, tokens = current.split("/")
    command = [
        *(sys.executable, "-m", "tuner.cli", "--method", "shadow", "--force-profile"),
        *("--profile", str(folder / "profile.yaml"), "--trace", str(folder / "hour.jsonl")),
        *("--too-long", "clip", "--max-num-seqs", CAPS, "--budget", budget),
        *("--run-dir", str(run_dir), "-o", str(folder / "best.yaml")),
        *("--engine-arg", f"max-num-seqs={seqs}"),
        *("--engine-arg", f"max-num-batched-tokens={tokens}"),
    ]
    began_s, before_s = time.monotonic(), processor_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall_s = time.monotonic() - began_s
    if done.returncode != 0:
        sys.exit(done.stderr)
    result = json.loads((run_dir / "result.json").read_text())
    trials = result["trials"]
    return {
        "wall_s": wall_s,
        "processor_s": processor_s() - before_s,
        "replays": len(trials),
        "cut_short": sum(t["tier"].startswith("3") for t in trials),
        "ranked": next(x for x in done.stderr.splitlines() if x.startswith("predicted ")),
        "recommendation": result["recommendation"],
        "stages_s": result["provenance"]["stages_s"],
        "window": result["provenance"]["trace"]["window"],
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--current", default="32/2048", metavar="SEQS/TOKENS")
    parser.add_argument("--budget", default="30m")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tune-retune-") as name:
        folder = Path(name)
        requests = prepare(folder, args.trace, args.hours)
        runs = []
        for number in range(args.runs):
            runs.append(timed(folder, number, args.current, args.budget))
            print(f"{runs[-1]['wall_s']:.1f} s, {runs[-1]['ranked']}", file=sys.stderr)
    walls_s, processors_s = ([run[of] for run in runs] for of in ("wall_s", "processor_s"))
    print(
        f"{requests} requests in {args.hours:g} h: {median(walls_s):.1f} s "
        f"({min(walls_s):.1f} … {max(walls_s):.1f}), {median(processors_s):.1f} s of the "
        f"processor ({min(processors_s):.1f} … {max(processors_s):.1f}), n {len(runs)}; "
        f"{runs[0]['ranked']}, "
        f"{runs[0]['cut_short']} of them cut short; {runs[0]['window']}; "
        f"{[r['recommendation']['best_measured'] for r in runs]}"
    )
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "requests": requests,
            "current": args.current,
            "budget": args.budget,
            "runs": runs,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
