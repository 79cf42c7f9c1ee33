"""What replaying costs beside vLLM's own offline `LLM.generate`, in output tokens per second.

Every request is due at once, so that the engine is saturated. Both sides get the same prompts,
answers of the same length and the same limits; each run is a fresh process that goes through
the requests once to warm up and once to be measured. Runs alternate: ours, vLLM's, ours, …

    python tests/benchmarks/replay_overhead.py [--quick] [--json FILE] [--in-process]

vLLM puts its engine into a process of its own unless told otherwise; --in-process tells it so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PAIRS, REQUESTS = 7, 300
QUICK_PAIRS, QUICK_REQUESTS = 1, 40
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 2048
SEED = 0
VOCAB_SIZE = 1000
"""Tokens are taken from the first of the demo model's, on both sides."""


def a_trace(requests: int) -> Any:
    """Return requests with the lengths of a translation service, all due at 0."""
    from tuner.traffic.traces import Trace

    rng = np.random.default_rng(SEED)
    return Trace(
        due_s=np.zeros(requests),
        prompt_tokens=rng.integers(10, 200, requests),
        output_tokens=rng.integers(10, 200, requests),
        source="all at once",
    )


def values() -> dict[str, object]:
    """Return the configuration of both sides; a prefix cache would remember the warm-up."""
    from tuner.engine.demo import demo_engine_args

    return demo_engine_args() | {"enable-prefix-caching": False, "skip-tokenizer-init": True}


def ours(requests: int) -> float:
    """Return the seconds that a replay takes."""
    from tuner.engine.limits import EngineLimits
    from tuner.engine.live import LiveSource
    from tuner.replay.loop import replay
    from tuner.replay.plan import ReplayPlan
    from tuner.traffic.prompts import PromptSource

    trace = a_trace(requests)
    limits = EngineLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    engine = LiveSource().start(values(), limits)
    prompts = PromptSource(trace, VOCAB_SIZE, SEED)
    took_s = 0.0
    for _ in range(2):
        began_s = time.perf_counter()
        log = replay(engine, trace, prompts, ReplayPlan())
        took_s = time.perf_counter() - began_s
    answered = int(log.timelines.output_tokens.sum())
    engine.close()
    check(answered, trace)
    return took_s


def vllms(requests: int) -> float:
    """Return the seconds that LLM.generate takes."""
    from vllm import LLM, SamplingParams

    from tuner.traffic.prompts import PromptSource

    trace = a_trace(requests)
    prompts = PromptSource(trace, VOCAB_SIZE, SEED)
    keywords: dict[str, Any] = {k.replace("-", "_"): v for k, v in values().items()}
    llm = LLM(
        **keywords, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
    )
    inputs = [{"prompt_token_ids": prompts.tokens(row)} for row in range(requests)]
    params = [
        SamplingParams(max_tokens=int(n), ignore_eos=True, temperature=0.0, detokenize=False)
        for n in trace.output_tokens
    ]
    took_s = 0.0
    for _ in range(2):
        began_s = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        took_s = time.perf_counter() - began_s
    check(sum(len(out.outputs[0].token_ids) for out in outputs), trace)
    return took_s


def check(answered: int, trace: Any) -> None:
    """Refuse a run that did not do the whole work."""
    asked = int(trace.output_tokens.sum())
    if answered != asked:
        raise SystemExit(f"{answered} tokens came out, {asked} were asked for")


def measured(side: str, requests: int, *, in_process: bool) -> float:
    """Run one side in a fresh process and return its output tokens per second."""
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if in_process:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, __file__, "--side", side, "--requests", str(requests)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    rate: float = figures["output_tokens"] / figures["took_s"]
    return rate


def spread(numbers: list[float], digits: int) -> str:
    """Return median, smallest and largest."""
    middle = statistics.median(numbers)
    return f"{middle:,.{digits}f} ({min(numbers):,.{digits}f} … {max(numbers):,.{digits}f})"


def main(options: argparse.Namespace) -> None:
    """Run the pairs and print one table."""
    pairs, requests = (
        (QUICK_PAIRS, QUICK_REQUESTS) if options.quick else (options.pairs, options.requests)
    )
    rates: dict[str, list[float]] = {"ours": [], "vllm": []}
    for number in range(pairs):
        for side, found in rates.items():
            found.append(measured(side, requests, in_process=options.in_process))
        sys.stderr.write(f"pair {number + 1} of {pairs}\n")
    ratios = [a / b for a, b in zip(rates["ours"], rates["vllm"], strict=True)]
    where = "in our process" if options.in_process else "in a process of its own"
    sys.stdout.write(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"seed {SEED}; {requests} requests at once, limits {MAX_NUM_SEQS}/"
        f"{MAX_NUM_BATCHED_TOKENS}; vLLM's engine {where}\n"
        "| | n | output tokens/s, median (min … max) |\n|---|---|---|\n"
        f"| replay | {pairs} | {spread(rates['ours'], 0)} |\n"
        f"| LLM.generate | {pairs} | {spread(rates['vllm'], 0)} |\n"
        f"| ratio, by pair | {pairs} | {spread(ratios, 3)} |\n"
    )
    if options.json:
        content = {"requests": requests, "in_process": options.in_process, **rates}
        Path(options.json).write_text(json.dumps(content | {"ratio": ratios}, indent=2) + "\n")


def child(side: str, requests: int) -> None:
    """Measure one side and print the figures as JSON."""
    took_s = ours(requests) if side == "ours" else vllms(requests)
    tokens = int(a_trace(requests).output_tokens.sum())
    sys.stdout.write(json.dumps({"took_s": took_s, "output_tokens": tokens}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="replay against LLM.generate")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--side", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.side:
        child(typed.side, typed.requests)
    else:
        main(typed)
