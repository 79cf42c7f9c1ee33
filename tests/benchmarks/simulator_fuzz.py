"""Whether the simulator and vLLM's own scheduler agree on random replays.

    python tests/benchmarks/simulator_fuzz.py [--first 0] [--cases 1000] [-o results.json]

Each case is a trace, an engine and a plan drawn from its seed: small numbers, so that caps,
budgets and blocks bind. Both replay it, vLLM's scheduler asked at every step, and everything is
compared: each batch, each instant to a microsecond, blocks, hits, preemptions, outcomes. The
first departure ends with its seed. Needs vLLM; run several with different --first side by side.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.same_replay import assert_same_result, referenced_case, simulated_case
from support.schedule_cases import Case, random_case
from tuner.replay.loop import ReplayLog


def met(case: Case, log: ReplayLog) -> Counter[str]:
    """Return what of the scheduler a case met, for the account of what was tried."""
    shape, steps = case.engine.shape, log.steps
    options = shape.scheduler
    facts = {
        "asynchronous": shape.asynchronous,
        "prefix cache": shape.prefix_caching,
        "hits": steps.cached_tokens > 0,
        "preemption": steps.preempted > 0,
        "priority policy": options["policy"] == "priority",
        "long-prefill threshold": bool(options["long_prefill_token_threshold"]),
        "no chunked prefill": not options["enable_chunked_prefill"],
        "watermark": bool(options["watermark"]),
        "sessions": case.trace.turns is not None,
        "cut": log.cut_reason is not None,
    }
    return Counter({name: 1 for name, holds in facts.items() if holds})


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    steps = preempted = 0
    seen: Counter[str] = Counter()
    began_s = time.monotonic()
    for done, seed in enumerate(range(args.first, args.first + args.cases), 1):
        case = random_case(seed)
        wanted = referenced_case(case)
        try:
            assert_same_result(simulated_case(case), wanted)
        except AssertionError as departure:
            sys.exit(f"seed {seed} departs: {departure}")
        if isinstance(wanted, ReplayLog):
            steps += wanted.steps.steps
            preempted += wanted.steps.preempted
            seen += met(case, wanted)
        if done % 250 == 0 or done == args.cases:
            took_s = time.monotonic() - began_s
            print(f"{done} cases, {steps:,} steps, {took_s:.0f} s", file=sys.stderr, flush=True)
    print(f"{args.cases} cases, {steps:,} steps, {preempted:,} preemptions: all agree")
    print(", ".join(f"{name} in {count}" for name, count in seen.most_common()))
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "cases": args.cases,
            "first": args.first,
            "steps": steps,
            "preempted": preempted,
            "met": dict(seen),
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
