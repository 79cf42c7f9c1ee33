"""Whether the simulator and vLLM's own scheduler agree on random replays.

    python tests/benchmarks/simulator_fuzz.py [--first 0] [--cases 1000] [--priorities]
        [--windows] [--drafts] [--states] [-o results.json]

Each case is a trace, an engine and a plan drawn from its seed: small numbers, so that caps,
budgets and blocks bind. Both replay it, vLLM's scheduler asked at every step, and everything is
compared: each batch, each instant to a microsecond, blocks, hits, preemptions, outcomes. One
case in seven serves by priority, with --priorities every one; in one of four layers look back a
window, with --windows in every one; none drafts tokens, with --drafts every one; none has
state-space layers, with --states every one.
Departures are told with their seeds. Options that this vLLM's scheduler does not have are left
out. Needs vLLM; run several with different --first side by side.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.same_replay import assert_same_result, referenced_case, simulated_case
from support.schedule_cases import Case, random_case
from tuner.engine.compat import serve
from tuner.engine.shape import KvLayout
from tuner.errors import TunerError
from tuner.replay.loop import ReplayLog
from tuner.replay.timeline import Outcome


def options_of_vllm() -> set[str]:
    """Return the names of the options that this vLLM's scheduler has."""
    from vllm.config import SchedulerConfig

    return {field.name for field in fields(SchedulerConfig)}


def only_with(case: Case, options: set[str]) -> Case:
    """Return a case whose scheduler has no other options than these."""
    shape = case.engine.shape
    kept = {name: value for name, value in shape.scheduler.items() if name in options}
    return replace(case, engine=replace(case.engine, shape=replace(shape, scheduler=kept)))


def met(case: Case, log: ReplayLog) -> Counter[str]:
    """Return what of the scheduler a case met, for the account of what was tried."""
    shape, steps = case.engine.shape, log.steps
    options, layout = shape.scheduler, shape.kv_layout or KvLayout()
    facts = {
        "asynchronous": shape.asynchronous,
        "prefix cache": shape.prefix_caching,
        "hits": steps.cached_tokens > 0,
        "preemption": steps.preempted > 0,
        "priority policy": options["policy"] == "priority",
        "priorities": case.trace.priorities is not None,
        "interval between prompts": options.get("prefill_schedule_interval") not in (None, 1),
        "long-prefill threshold": bool(options["long_prefill_token_threshold"]),
        "no chunked prefill": not options["enable_chunked_prefill"],
        "watermark": bool(options.get("watermark")),
        "drafts": shape.drafts is not None,
        "windows": layout.window > 0 and not layout.keeps_states,
        "blocks of two sizes": layout.aligned > 1,
        "states of its own": layout.fixed > 0,
        "states that others find": layout.keeps_states,
        "sessions": case.trace.turns is not None,
        "cut": log.cut_reason is not None,
        "turned away at a gate": log.timelines.count(Outcome.TURNED_AWAY) > 0,
        "answers cut by a gate": log.timelines.count(Outcome.TRUNCATED) > 0,
    }
    return Counter({name: 1 for name, holds in facts.items() if holds})


def departure(case: Case, wanted: ReplayLog | TunerError) -> str:
    """Return in what the simulator departs from what vLLM made of a case, "" for nothing."""
    try:
        assert_same_result(simulated_case(case), wanted)
    except AssertionError as departed:
        return " ".join(str(departed).split())
    return ""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--priorities", action="store_true", help="serve all by priority")
    parser.add_argument("--windows", action="store_true", help="windows in every case")
    parser.add_argument("--drafts", action="store_true", help="speculative decoding in all")
    parser.add_argument("--states", action="store_true", help="state-space layers in all")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    serve.prepare_environment()
    options = options_of_vllm()
    without = set(random_case(args.first).engine.shape.scheduler) - options
    steps = preempted = 0
    seen: Counter[str] = Counter()
    departures = []
    began_s = time.monotonic()
    for done, seed in enumerate(range(args.first, args.first + args.cases), 1):
        drawn = random_case(
            seed,
            is_by_priority=args.priorities,
            has_windows=args.windows or None,
            has_drafts=args.drafts,
            has_states=args.states,
        )
        case = only_with(drawn, options)
        wanted = referenced_case(case)
        facts: Counter[str] = Counter()
        if isinstance(wanted, ReplayLog):
            steps += wanted.steps.steps
            preempted += wanted.steps.preempted
            facts = met(case, wanted)
        seen += facts
        if words := departure(case, wanted):
            departures.append({"seed": seed, "words": words, "met": list(facts)})
            print(f"seed {seed} departs: {words}", file=sys.stderr, flush=True)
        if done % 250 == 0 or done == args.cases:
            took_s = time.monotonic() - began_s
            print(f"{done} cases, {steps:,} steps, {took_s:.0f} s", file=sys.stderr, flush=True)
    agree = f"{len(departures)} depart" if departures else "all agree"
    print(f"{args.cases} cases, {steps:,} steps, {preempted:,} preemptions: {agree}")
    print(", ".join(f"{name} in {count}" for name, count in seen.most_common()))
    if args.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "vllm_version": serve.vllm_version(),
            "cases": args.cases,
            "first": args.first,
            "steps": steps,
            "preempted": preempted,
            "met": dict(seen),
            "without": sorted(without),
            "departures": departures,
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(bool(departures))


if __name__ == "__main__":
    main()
