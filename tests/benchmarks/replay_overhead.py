"""What replaying costs beside vLLM's own offline `LLM.generate`, in output tokens per second.

Every request is due at once, so that the engine is saturated. Both sides get the same prompts,
answers of the same length and the same limits; each run is a fresh process that goes through
the requests once to warm up and once to be measured. Runs alternate: ours, vLLM's, ours, …

    python tests/benchmarks/replay_overhead.py [--quick] [--json FILE] [--in-process]
        [--value model=NAME …]
    python tests/benchmarks/replay_overhead.py --charged [--pairs 7] [--json FILE]

vLLM puts its engine into a process of its own unless told otherwise; --in-process tells it so.

--charged measures what the replay's own work adds to the steps of an asynchronous engine, whose
device computes between two turns: requests made ready ahead against the same replay with each
made when it goes. Long prompts with a shared beginning, so that hashing weighs more than
computing. vLLM on a CPU is no asynchronous engine by itself; its scheduler and queue of batches
are switched on, and nothing overlaps, so that all of the work shows.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PAIRS, REQUESTS = 7, 300
QUICK_PAIRS, QUICK_REQUESTS = 1, 40
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 2048
LONG_REQUESTS, LONG_PROMPT, SHARED_TOKENS, LONG_PER_S = 80, 12_000, 11_776, 25.0
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


def values(given: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the configuration of both sides; a prefix cache would remember the warm-up.

    Of the demo model unless one is given.
    """
    from tuner.engine.demo import demo_engine_args

    own = dict(given or {})
    usual = {} if "model" in own else demo_engine_args()
    return {**usual, **own, "enable-prefix-caching": False, "skip-tokenizer-init": True}


def ours(requests: int, given: Mapping[str, object]) -> float:
    """Return the seconds that a replay takes."""
    from tuner.engine.limits import EngineLimits
    from tuner.engine.live import LiveSource
    from tuner.replay.loop import replay
    from tuner.replay.plan import ReplayPlan
    from tuner.traffic.prompts import PromptSource

    trace = a_trace(requests)
    limits = EngineLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    engine = LiveSource(is_greedy=True).start(values(given), limits)
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


def a_long_trace() -> Any:
    """Return requests of which all but the end of each prompt is shared, at random times."""
    from tuner.traffic.prefixes import HashIds
    from tuner.traffic.traces import Trace

    rng, blocks = np.random.default_rng(SEED), SHARED_TOKENS // 128
    n = LONG_REQUESTS
    return Trace(
        due_s=np.cumsum(rng.exponential(1 / LONG_PER_S, n)),
        prompt_tokens=np.full(n, LONG_PROMPT),
        output_tokens=rng.integers(8, 33, n),
        hashes=HashIds.from_rows([[*range(blocks), 1000 + row] for row in range(n)], 128),
        source="long prompts",
    )


def charged(side: str) -> dict[str, float]:
    """Return what a replay's steps were charged with, on an asynchronous engine."""
    from tuner.engine.compat import serve
    from tuner.engine.limits import EngineLimits
    from tuner.engine.live import LiveEngine
    from tuner.replay.loop import replay
    from tuner.replay.plan import ReplayPlan
    from tuner.traffic.prompts import PromptSource

    serve.prepare_environment()
    arguments = serve.parse_serve_values(values() | {"enable-prefix-caching": True})
    make = arguments.create_engine_config

    def asynchronous(*args: Any) -> Any:
        config = make(*args)
        config.scheduler_config.async_scheduling = True
        return config

    arguments.create_engine_config = asynchronous
    engine: Any = LiveEngine(arguments, EngineLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS))
    if side == "spot":
        engine.prepare_now, engine.prepare = engine.prepare, lambda *_: None
        add = engine.add

        def made_when_it_goes(row: int, prompt: Any, output_tokens: int) -> None:
            engine.prepare_now(row, prompt, output_tokens)
            add(row, prompt, output_tokens)

        engine.add = made_when_it_goes
    between_s: list[float] = []
    stop = engine._between.stop

    def noted() -> float:
        between_s.append(stop())
        return between_s[-1]

    trace = a_long_trace()
    prompts = PromptSource(trace, VOCAB_SIZE, SEED)
    for _ in range(2):
        between_s.clear()
        engine._between.stop = noted
        log = replay(engine, trace, prompts, ReplayPlan())
    check(int(log.timelines.output_tokens.sum()), trace)
    engine.close()
    return {
        "between_ms_per_step": 1000 * sum(between_s) / len(between_s),
        "longest_ms": 1000 * max(between_s),
        "share_of_steps": sum(between_s) / log.steps.duration_s,
        "ttft_p50_ms": 1000 * float(np.median(log.timelines.ttft_s)),
    }


def vllms(requests: int, given: Mapping[str, object]) -> float:
    """Return the seconds that LLM.generate takes."""
    from vllm import LLM, SamplingParams

    from tuner.traffic.prompts import PromptSource

    trace = a_trace(requests)
    prompts = PromptSource(trace, VOCAB_SIZE, SEED)
    keywords: dict[str, Any] = {k.replace("-", "_"): v for k, v in values(given).items()}
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


def measured(
    side: str, requests: int, given: Mapping[str, object], *, in_process: bool
) -> float:
    """Run one side in a fresh process and return its output tokens per second."""
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if in_process:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, __file__, "--side", side, "--requests", str(requests)]
    command += ["--given", json.dumps(dict(given))]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    rate: float = figures["output_tokens"] / figures["took_s"]
    return rate


def compare_charged(options: argparse.Namespace) -> None:
    """Run both ways of making requests in turns and print one table."""
    found: dict[str, list[dict[str, float]]] = {"ahead": [], "spot": []}
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    for number in range(options.pairs):
        for side, figures in found.items():
            command = [sys.executable, __file__, "--side", side]
            done = subprocess.run(
                command, env=env, check=True, stdout=subprocess.PIPE, text=True
            )
            figures.append(json.loads(done.stdout.splitlines()[-1]))
        sys.stderr.write(f"pair {number + 1} of {options.pairs}\n")
    sys.stdout.write(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"seed {SEED}; {LONG_REQUESTS} prompts of {LONG_PROMPT} tokens, {SHARED_TOKENS} "
        f"of them shared, n {options.pairs} each, median (min … max)\n"
        "| | ready ahead | made when it goes |\n|---|---|---|\n"
    )
    for name in found["ahead"][0]:
        cells = [spread([run[name] for run in found[side]], 3) for side in ("ahead", "spot")]
        sys.stdout.write(f"| {name} | {cells[0]} | {cells[1]} |\n")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def spread(numbers: list[float], digits: int) -> str:
    """Return median, smallest and largest."""
    middle = statistics.median(numbers)
    return f"{middle:,.{digits}f} ({min(numbers):,.{digits}f} … {max(numbers):,.{digits}f})"


def rates_of(
    pairs: int, requests: int, given: Mapping[str, object], *, in_process: bool
) -> dict[str, list[float]]:
    """Run both sides in turns and return the output tokens per second of each."""
    rates: dict[str, list[float]] = {"ours": [], "vllm": []}
    for number in range(pairs):
        for side, found in rates.items():
            found.append(measured(side, requests, given, in_process=in_process))
        sys.stderr.write(f"pair {number + 1} of {pairs}\n")
    return rates


def main(options: argparse.Namespace) -> None:
    """Run the pairs and print one table."""
    pairs, requests = (
        (QUICK_PAIRS, QUICK_REQUESTS) if options.quick else (options.pairs, options.requests)
    )
    from tuner.engine.serve_config import parse_engine_args

    given = parse_engine_args(options.value)
    rates = rates_of(pairs, requests, given, in_process=options.in_process)
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


def child(side: str, requests: int, given: Mapping[str, object]) -> None:
    """Measure one side and print the figures as JSON."""
    if side in {"ahead", "spot"}:
        sys.stdout.write(json.dumps(charged(side)) + "\n")
        return
    took_s = ours(requests, given) if side == "ours" else vllms(requests, given)
    tokens = int(a_trace(requests).output_tokens.sum())
    sys.stdout.write(json.dumps({"took_s": took_s, "output_tokens": tokens}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="replay against LLM.generate")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--value", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--given", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--charged", action="store_true")
    sides = ["ours", "vllm", "ahead", "spot"]
    parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.side:
        child(typed.side, typed.requests, typed.given)
    elif typed.charged:
        compare_charged(typed)
    else:
        main(typed)
