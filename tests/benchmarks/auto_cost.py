"""What `tune` costs with the shadow: beside its own --method live, and beside restarts.

    python tests/benchmarks/auto_cost.py [--window 4] [--budget 240] [--runs 1] [-o FILE]

Both methods tune the demo model on the same window of traces/translation.jsonl from the same
present limits. What `vllm bench sweep serve` costs for each setting is measured over --restarts
of them and multiplied by the number of settings that were ranked.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sweep_cost

PRESENT = ("max-num-seqs=8", "max-num-batched-tokens=2048")
ROOT = Path(__file__).resolve().parents[2]


def tune(method: str, window_s: float, budget_s: float, folder: Path) -> dict[str, Any]:
    """Run the command and return its result."""
    run_dir = folder / method
    command = [
        *(sys.executable, "-m", "tuner.cli", "--method", method),
        *("--trace", str(ROOT / "traces" / "translation.jsonl")),
        *(word for value in PRESENT for word in ("--engine-arg", value)),
        *("--window", f"peak:{window_s:g}s", "--budget", f"{budget_s:g}s"),
        *("--run-dir", str(run_dir), "-o", str(folder / f"{method}.yaml")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


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


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=float, default=4.0)
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--settings", type=int, default=60, help="to extrapolate restarts to")
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"auto": [], "live": []}
    for _ in range(args.runs):
        for method, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(brief(tune(method, args.window, args.budget, Path(folder))))
            print(f"{method}: {json.dumps(runs[-1])}", flush=True)
    each_s = sweep_cost.theirs(args.window, args.restarts)["each_s"]
    restarts_s = each_s * args.settings
    print(
        f"restart sweep: {each_s:.1f} s each, {restarts_s:.0f} s for {args.settings}, "
        f"extrapolated from {args.restarts}"
    )
    for run, other in zip(found["auto"], found["live"], strict=True):
        print(
            f"auto {run['wall_s']:.0f} s, live {other['wall_s']:.0f} s: ratio "
            f"{other['wall_s'] / run['wall_s']:.1f}; restarts {restarts_s / run['wall_s']:.1f}"
        )
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "restart_each_s": each_s,
            "restarts": args.restarts,
            "settings": args.settings,
            **found,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
