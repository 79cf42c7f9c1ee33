"""From a server in production to what it would do with other limits, without a spare machine.

A real API server is recorded with its steps while it serves a trace over HTTP, streamed, in
real time. `tune profile fit` learns a profile of the recording alone. What it says of other
limits is held to what the same server then does with them: its own recordings of the same
traffic, each on a server of its own, in shuffled turns. An effect is by how much a setting
differs from the recorded one, so that what the machine's mood adds to both cancels in part; how
far two recordings of one setting differ stands beside it.

    python tests/benchmarks/production.py [TRACE] [--window typical:40s] [--load 0.6]
                                          [--rounds 3] [--drafts] [-o FILE]

With --drafts an EAGLE head of random weights drafts three tokens a step, of which the sampler
accepts 80, 50 and 30 %, whatever they are.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.drafting import accepting_environment, drafting
from support.recorder_server import MIDDLEWARE, MODEL, serving
from tuner.engine.demo import DEMO_MODEL_DIR, bundled
from tuner.engine.limits import EngineLimits
from tuner.recorder.settings import FILE, STEPS
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.server.client import Endpoint, replay_http
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, read_profile
from tuner.traffic.formats import read_trace
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import parse_window

SERVED = EngineLimits(8, 2048)
OTHERS = (EngineLimits(4, 2048), EngineLimits(8, 512), EngineLimits(16, 2048))
DETAILS = "--enable-logging-iteration-details"
VOCABULARY = 4096
ACCEPTED = (0.8, 0.5, 0.3)
GREEDY = ("--override-generation-config", '{"temperature": 0}')
SHOWN = (
    *(("ttft_s", "p50"), ("tpot_s", "p50"), ("e2e_s", "p50")),
    *(("tpot_s", "p95"), ("e2e_s", "p95")),
)
Figures = dict[str, float]


def served(trace: Trace, limits: EngineLimits, folder: Path, *, has_drafts: bool) -> Path:
    """Serve the trace under record and return the recording, its warm-up included."""
    folder.mkdir(parents=True)
    prod = folder / "prod.jsonl"
    named = [
        *("--max-num-seqs", str(limits.max_num_seqs)),
        *("--max-num-batched-tokens", str(limits.max_num_batched_tokens)),
    ]
    environment = {FILE: str(prod), STEPS: "1"}
    if has_drafts:
        drafts = drafting(DEMO_MODEL_DIR, folder / "eagle", len(ACCEPTED))
        named += ["--speculative-config", json.dumps(drafts), *GREEDY]
        environment |= accepting_environment(folder / "on", ACCEPTED)
    with serving(folder, *MIDDLEWARE, DETAILS, *named, environment=environment) as port:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", MODEL)
        few = trace.between(trace.due_s[0], trace.due_s[0] + 2.0)
        for part, seed in ((few, 1), (trace, 0)):
            prompts = PromptSource(part, VOCABULARY, seed)
            replay_http(endpoint, part, prompts, ReplayPlan(), lambda: None)
    header, *rows = prod.read_text().splitlines()
    rows.sort(key=lambda row: float(json.loads(row)["arrived_at_s"]))
    (folder / "traffic.jsonl").write_text("\n".join([header, *rows[len(few) :]]) + "\n")
    return prod


def recorded(recording: Path) -> tuple[Figures, Trace]:
    """Return what the server's own recording says of the traffic, and that as a trace."""
    trace = read_trace(recording.with_name("traffic.jsonl"))
    if trace.ttft_s is None or trace.e2e_s is None:
        raise SystemExit(f"{recording} holds no times")
    several = trace.output_tokens > 1
    tpot_s = ((trace.e2e_s - trace.ttft_s) / np.maximum(trace.output_tokens - 1, 1))[several]
    values = {"ttft_s": trace.ttft_s, "tpot_s": tpot_s, "e2e_s": trace.e2e_s}
    found = {f"{m} {s}": float(np.quantile(values[m], int(s[1:]) / 100)) for m, s in SHOWN}
    ends_s = trace.due_s + trace.e2e_s
    return {**found, "requests/s": len(trace) / float(ends_s.max() - trace.due_s[0])}, trace


def fitted(recording: Path) -> Profile:
    """Return the profile that the command learns of a recording."""
    output = recording.with_name("profile.yaml")
    command = [sys.executable, "-m", "tuner.cli", "profile", "fit", "--recording"]
    done = subprocess.run(
        [*command, str(recording), "-o", str(output)],
        check=True,
        capture_output=True,
        text=True,
    )
    print(done.stdout, file=sys.stderr, flush=True)
    return read_profile(output)


def foretold(profile: Profile, trace: Trace, limits: EngineLimits) -> Figures:
    """Return what a profile says of the traffic at a setting."""
    found = measure([Predictor(profile).replay(trace, limits, ReplayPlan())])
    shown = {f"{m} {s}": found.latency(m, s) or 0.0 for m, s in SHOWN}
    return {**shown, "requests/s": found.requests_per_s}


def rounds_of(
    trace: Trace, rounds: int, root: Path, *, has_drafts: bool
) -> list[dict[str, dict[str, Figures]]]:
    """Serve each setting once a round, in shuffled turns, and foretell it from the first."""
    order, found = random.Random(0), []
    for number in range(rounds):
        turn = [SERVED, *OTHERS]
        order.shuffle(turn)
        recordings = {}
        for limits in turn:
            name = f"{number}-{limits.max_num_seqs}-{limits.max_num_batched_tokens}"
            recordings[limits] = served(trace, limits, root / name, has_drafts=has_drafts)
        profile = fitted(recordings[SERVED])
        _, sent = recorded(recordings[SERVED])
        this = {
            str(limits): {
                "served": recorded(recordings[limits])[0],
                "foretold": foretold(profile, sent, limits),
            }
            for limits in (SERVED, *OTHERS)
        }
        print(f"round {number + 1}: {this}", file=sys.stderr, flush=True)
        found.append(this)
    return found


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):+.1%} ({min(values):+.1%} … {max(values):+.1%})"


def tell(rounds: Sequence[dict[str, dict[str, Figures]]]) -> None:
    """Print how far what was foretold is off, as it is and as an effect of the limits."""
    base = str(SERVED)
    for limits in rounds[0]:
        print(f"\n{limits}, median (least … greatest) of {len(rounds)}")
        print("| metric | effect served | foretold off | effect off | two recordings differ |")
        print("|---|---|---|---|---|")
        for metric in rounds[0][base]["served"]:
            real = [r[limits]["served"][metric] for r in rounds]
            told = [r[limits]["foretold"][metric] for r in rounds]
            real_base = [r[base]["served"][metric] for r in rounds]
            told_base = [r[base]["foretold"][metric] for r in rounds]
            effects = [a / b for a, b in zip(real, real_base, strict=True)]
            said = [a / b for a, b in zip(told, told_base, strict=True)]
            cells = [
                [effect - 1 for effect in effects],
                [a / b - 1 for a, b in zip(told, real, strict=True)],
                [a / median(effects) - 1 for a in said],
                [a / b - 1 for a, b in combinations(real, 2)] or [0.0],
            ]
            print(f"| {metric} | {' | '.join(map(_shown, cells))} |")


def main(options: argparse.Namespace) -> None:
    """Measure, print tables and write the figures."""
    whole = at_load(read_trace(options.trace), options.load)
    trace = parse_window(options.window).resolve(whole).of(whole)
    with tempfile.TemporaryDirectory(prefix="tune-production-") as name:
        rounds = rounds_of(trace, options.rounds, Path(name), has_drafts=options.drafts)
    tell(rounds)
    if options.output:
        content = {
            "command": " ".join(Path(word).name for word in sys.argv),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "requests": len(trace),
            "rounds": rounds,
        }
        Path(options.output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="foretell a server from its own recording")
    parser.add_argument("trace", nargs="?", default=str(bundled("traces") / "chat.jsonl"))
    parser.add_argument("--window", default="typical:40s")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("-o", "--output", metavar="FILE")
    main(parser.parse_args())
