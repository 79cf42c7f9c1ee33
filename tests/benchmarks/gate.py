"""Goodput of a real vLLM server under overload, behind the gate that `tune gate` finds or not.

    python tests/benchmarks/gate.py [TRACE] [--overload 2] [--requests 300] [--rounds 3]
                                    [--slo ttft_p95=1s] [--dtype auto] [-o FILE]

Two API servers on the demo model are started, one of them behind `tuner.gate.Gate`. What one
sustains is measured first, in a closed loop of twice its max_num_seqs. The bundled profile is
slowed to that rate, and the gate is found by it for the beginning of the trace, thinned to that
rate, and for `--overload` times that, which is `--requests`. These are then replayed in turns
over HTTP, in real time, with streaming: one server idles while the other is measured. What is
predicted of the same requests stands beside. Requests within the SLO count per second in which
requests came. A round in which less than nine tenths of the overload was sent ends it.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tuner.engine.demo import bundled
from tuner.engine.limits import EngineLimits
from tuner.gate import SETTINGS
from tuner.replay.load import arrival_span_s
from tuner.replay.metrics import Measurement, good_requests
from tuner.replay.plan import ReplayPlan
from tuner.replay.server.client import Endpoint, HttpRun, replay_http
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.loads.gate import GateAnswer, find_gate, goodput_per_s
from tuner.search.budget import Aim
from tuner.search.objective import Objective
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, read_profile
from tuner.traffic.formats import read_trace
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import whole

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorder_server import MODEL, serving

LIMITS = EngineLimits(16, 2048)
ARGUMENTS = (
    *("--max-num-seqs", str(LIMITS.max_num_seqs)),
    *("--max-num-batched-tokens", str(LIMITS.max_num_batched_tokens)),
)
# Of the overload that was asked for: ours, below it nothing is said of it.
LEAST_SENT = 0.9
CLOSED = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=2 * LIMITS.max_num_seqs)
# Requests that measure what is sustained: ours, ten full batches.
SATURATING = 160
WITHOUT, BEHIND = "without a gate", "behind the gate"


def sent(port: int, trace: Trace, profile: Profile, plan: ReplayPlan, seed: int) -> HttpRun:
    """Replay on a server, with prompts that none before had."""
    prompts = PromptSource(trace, profile.shape.vocab_size, seed)
    endpoint = Endpoint(f"http://127.0.0.1:{port}", MODEL)
    return replay_http(endpoint, trace, prompts, plan, lambda: None)


def figures_of(run: HttpRun, slo: Slo) -> dict[str, float]:
    """Return what a client saw under overload."""
    line, done = run.timelines, run.timelines.completed
    away = sum(count for words, count in run.errors.items() if words.startswith("HTTP 503"))
    ttft_s = line.ttft_s
    return {
        "goodput_per_s": float(good_requests(line, [slo]).sum()) / arrival_span_s(line),
        "offered_per_s": len(line) / arrival_span_s(line),
        "completed": float(done.mean()),
        "turned_away": away / len(line),
        "ttft_p50_s": float(np.quantile(ttft_s, 0.5)) if ttft_s.size else float("nan"),
        "ttft_p95_s": float(np.quantile(ttft_s, 0.95)) if ttft_s.size else float("nan"),
        "send_lag_p99_s": run.lag_p99_s,
    }


def slowed(profile: Profile, trace: Trace, per_s: float) -> Profile:
    """Return the profile with steps so long that it sustains just so many requests a second."""
    for _ in range(4):
        reached = Predictor(profile).measure([trace], LIMITS, CLOSED)
        assert isinstance(reached, Measurement)
        times = reached.requests_per_s / per_s
        profile = replace(profile, step_model=profile.step_model.scaled(times))
    return profile


def gate_for(profile: Profile, trace: Trace, overload: float, slo: Slo) -> GateAnswer:
    """Return the gate for a trace at what is sustained."""
    aim = Aim(Objective.GOODPUT, (slo,), ReplayPlan(), None)
    workload = Workload.of("traffic", trace, (whole(trace),), aim)
    return find_gate(Predictor(profile), LIMITS, workload, (1.0, overload), print)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, find the gate, and measure in turns."""
    slo, trace = Slo.parse(options.slo), read_trace(options.trace)
    profile = read_profile(bundled("profiles") / "demo.profile.yaml")
    few = trace.slice_rows(np.arange(len(trace)) < SATURATING)
    arguments = (*ARGUMENTS, "--dtype", options.dtype)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        ports = {WITHOUT: stack.enter_context(serving(folders[0], *arguments))}
        sent(ports[WITHOUT], few, profile, CLOSED, 1)  # compiles and warms up
        run = sent(ports[WITHOUT], few, profile, CLOSED, 2)
        sustained = run.timelines.completed.sum() / run.wall_s
        print(f"sustains {sustained:.2f} requests/s", flush=True)
        lasts_s = options.requests / options.overload / sustained
        part = trace.between(trace.due_s[0], trace.due_s[0] + lasts_s)
        # By the rate of just these requests, whatever that of the whole trace is.
        base = at_load(part, sustained * part.duration_s / len(part))
        answer = gate_for(slowed(profile, few, sustained), base, options.overload, slo)
        print(f"gate: {answer.gate}", flush=True)
        door = ("--middleware", "tuner.gate.Gate")
        environment = {SETTINGS: str(answer.gate)}
        made = serving(folders[1], *arguments, *door, environment=environment)
        ports[BEHIND] = stack.enter_context(made)
        sent(ports[BEHIND], few.slice_rows(np.arange(len(few)) < 8), profile, CLOSED, 1)
        offered, wanted = at_load(base, options.overload), options.overload * sustained
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for number in range(options.rounds):
            for name, port in ports.items():
                run = sent(port, offered, profile, ReplayPlan(), 10 + number)
                rounds[name].append(figures_of(run, slo))
                sent_per_s = rounds[name][-1]["offered_per_s"]
                if sent_per_s < LEAST_SENT * wanted:
                    sys.exit(f"sent {sent_per_s:.2f}/s, wanted {wanted:.2f}/s: no overload")
                print(f"round {number + 1}, {name}: {rounds[name][-1]}", flush=True)
    overloaded = answer.loads[-1]
    return {
        "sustained_per_s": sustained,
        "requests": len(offered),
        "gate": asdict(answer.gate),
        "predicted": {
            WITHOUT: goodput_per_s(overloaded.before),
            BEHIND: goodput_per_s(overloaded.gated),
        },
        "rounds": rounds,
    }


def tell(found: dict[str, Any], slo: str) -> None:
    """Print the table."""
    print(
        f"{found['requests']} requests a round, within {slo}, median (least … greatest)\n"
        "| | goodput/s | predicted | completed | turned away | TTFT p95, s |\n"
        "|---|---|---|---|---|---|"
    )
    for name, rounds in found["rounds"].items():
        cells = [
            f"{median(values):.2f} ({min(values):.2f} … {max(values):.2f})"
            for values in (
                [one[key] for one in rounds]
                for key in ("goodput_per_s", "completed", "turned_away", "ttft_p95_s")
            )
        ]
        predicted = f"{found['predicted'][name]:.2f}"
        print(f"| {name} | {cells[0]} | {predicted} | {' | '.join(cells[1:])} |")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = bundled("traces") / "translation.jsonl"
    parser.add_argument("trace", nargs="?", type=Path, default=default)
    parser.add_argument("--overload", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slo", default="ttft_p95=1s")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    found = measured(options)
    tell(found, options.slo)
    if options.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "load_average": os.getloadavg(),
            **found,
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
