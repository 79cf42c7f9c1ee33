"""The same traffic inside the engine's process and over HTTP, and a recording of it replayed.

In turns, each round: the trace is replayed in process; then over HTTP, streamed, in real time,
on a real API server under record; then the recording is read back (count and every length
have to be those that were sent) and itself replayed, in process and by the shadow of the
bundled profile, as it is and corrected by the recording of the round before. Beside what the
client saw stand the engine core's own stamps from the recording, so that what HTTP adds and
what makes the engine's steps themselves slower can be told apart. How far each replay is off
the recording of its round is told beside how far two recordings in a row differ. With --busy
the recording is replayed once more while the last core runs an empty loop, as the API server
and this client keep it busy while serving. `--bind 0` leaves the second core to the API server,
for both.

    python tests/benchmarks/served.py [TRACE] [--window typical:45s] [--load 0.4] [--rounds 5]
                                      [--executor uni] [--busy] [--bind CORES] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tuner.engine.demo import bundled, demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.steps import StepLog
from tuner.recorder.settings import FILE
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.server.client import Endpoint, replay_http
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import read_profile
from tuner.shadow.served import by_recording
from tuner.shadow.step_model import StepModel
from tuner.traffic.formats import read_trace
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import parse_window

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorder_server import MIDDLEWARE, MODEL, serving

LIMITS = EngineLimits(16, 2048)
SHOWN = (
    *(("ttft_s", "p50"), ("ttft_s", "p95"), ("tpot_s", "p50"), ("tpot_s", "p95")),
    *(("e2e_s", "p50"), ("e2e_s", "p95")),
)
REPLAYS = ("recording replayed", "shadow", "shadow, corrected")
Figures = dict[str, float]


def in_process(host: EngineProcess, trace: Trace) -> Figures:
    """Replay inside the engine's process."""
    host.load("trace", trace, 0)
    log = host.replay("trace", LIMITS, ReplayPlan())
    return figures_of(log)


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep the last core busy with nothing."""
    last = max(os.sched_getaffinity(0))
    loop = f"import os\nos.sched_setaffinity(0, {{{last}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", loop])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def figures_of(log: ReplayLog) -> Figures:
    """Return the latencies of a replay, in seconds, and its rate."""
    found = measure([log])
    shown = {f"{m} {s}": found.latency(m, s) or 0.0 for m, s in SHOWN}
    return {**shown, "requests/s": found.requests_per_s}


def over_http(
    trace: Trace, folder: Path, vocab_size: int, executor: str
) -> tuple[Figures, Path]:
    """Replay on an API server under record; return what the client saw, and the recording."""
    prod = folder / "prod.jsonl"
    limits = (
        *("--max-num-seqs", str(LIMITS.max_num_seqs)),
        *("--max-num-batched-tokens", str(LIMITS.max_num_batched_tokens)),
    )
    doors = (*MIDDLEWARE, "--distributed-executor-backend", executor)
    with serving(folder, *doors, *limits, environment={FILE: str(prod)}) as port:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", MODEL)
        prompts = PromptSource(trace, vocab_size, 0)
        few = trace.between(trace.due_s[0], trace.due_s[0] + 2.0)
        # Warm up with a few requests, which the recording holds too and is cut by.
        replay_http(endpoint, few, PromptSource(few, vocab_size, 1), ReplayPlan(), lambda: None)
        run = replay_http(endpoint, trace, prompts, ReplayPlan(), lambda: None)
    steps, _ = StepLog().finish()
    found = figures_of(ReplayLog(run.timelines, steps, run.wall_s, run.wall_s, None))
    return {**found, "send lag p99": run.lag_p99_s}, drop_first(prod, len(few))


def drop_first(prod: Path, count: int) -> Path:
    """Return the recording without the requests that warmed up."""
    header, *rows = prod.read_text().splitlines()
    rows.sort(key=lambda row: float(json.loads(row)["arrived_at_s"]))
    cut = prod.with_name("recording.jsonl")
    cut.write_text("\n".join([header, *rows[count:]]) + "\n")
    return cut


def engine_stamps(recording: Path) -> Figures:
    """Return the engine core's own latencies, as the recording holds them."""
    rows = [json.loads(line) for line in recording.read_text().splitlines()[1:]]
    ttft_s = [row["queue_s"] + row["prefill_s"] for row in rows]
    tpot_s = [
        row["decode_s"] / (row["output_length"] - 1) for row in rows if row["output_length"] > 1
    ]
    e2e_s = [row["queue_s"] + row["prefill_s"] + row["decode_s"] for row in rows]
    named = {"ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}
    return {f"{m} {s}": float(np.quantile(named[m], int(s[1:]) / 100)) for m, s in SHOWN}


def recorded(trace: Trace) -> Figures:
    """Return the latencies as they were recorded."""
    assert trace.ttft_s is not None
    assert trace.e2e_s is not None
    several = trace.output_tokens > 1
    tpot_s = ((trace.e2e_s - trace.ttft_s) / np.maximum(trace.output_tokens - 1, 1))[several]
    named = {"ttft_s": trace.ttft_s, "tpot_s": tpot_s, "e2e_s": trace.e2e_s}
    return {f"{m} {s}": float(np.quantile(named[m], int(s[1:]) / 100)) for m, s in SHOWN}


def shadowed(trace: Trace, before: Trace | None) -> dict[str, Figures]:
    """Replay a recording by the shadow of the bundled profile, and as `before` corrects it."""
    profile = read_profile(bundled("profiles") / "demo.profile.yaml")

    def replay(model: StepModel, recording: Trace) -> ReplayLog:
        predictor = Predictor(replace(profile, step_model=model))
        return predictor.replay(recording, LIMITS, ReplayPlan())

    found = {"shadow": figures_of(replay(profile.step_model, trace))}
    if before is not None:
        corrected, learnt = by_recording(
            profile, before, LIMITS, lambda model: replay(model, before).timelines
        )
        sys.stderr.write("\n".join(learnt.lines()) + "\n")
        found["shadow, corrected"] = figures_of(replay(corrected.step_model, trace))
    return found


def check_lengths(sent: Trace, recording: Path) -> Trace:
    """Refuse a recording that does not hold exactly what was sent."""
    read = read_trace(recording)
    for name in ("prompt_tokens", "output_tokens"):
        if not np.array_equal(np.sort(getattr(sent, name)), np.sort(getattr(read, name))):
            raise SystemExit(f"{recording}: {name} are not those that were sent")
    return read


def rounds_of(options: argparse.Namespace) -> list[dict[str, Figures]]:
    """Measure in turns, each round on a server of its own."""
    whole = at_load(read_trace(options.trace), options.load)
    trace = parse_window(options.window).resolve(whole).of(whole)
    found: list[dict[str, Figures]] = []
    before: Trace | None = None
    with tempfile.TemporaryDirectory(prefix="tune-served-") as name:
        root = Path(name)
        for number in range(options.rounds):
            folder = root / str(number)
            folder.mkdir()
            with EngineProcess(LiveSource(), root / "engine.log") as host:
                info = host.start(demo_engine_args(), LIMITS).info
                inside = in_process(host, trace)
            client, recording = over_http(trace, folder, info.vocab_size, options.executor)
            read = check_lengths(trace, recording)
            this = {
                "in process": inside,
                "client over HTTP": client,
                "engine's own stamps": engine_stamps(recording),
                "recorded": recorded(read),
            }
            with EngineProcess(LiveSource(), root / "engine.log") as host:
                host.start(demo_engine_args(), LIMITS)
                this["recording replayed"] = in_process(host, read)
                if options.busy:
                    with busy_core():
                        this["beside a busy core"] = in_process(host, read)
            this |= shadowed(read, before)
            found.append(this)
            before = read
            sys.stderr.write(f"round {number + 1}: {len(trace)} requests, {found[-1]}\n")
    return found


def shown(values: Sequence[float]) -> str:
    """Return the middle, the least and the greatest, in milliseconds."""
    low, mid, high = (1000 * f(values) for f in (min, median, max))
    return f"{mid:.1f} ({low:.1f} … {high:.1f})"


def tell_apart(rounds: Sequence[dict[str, Figures]]) -> None:
    """Print how far replays are off the recording of their round, and two recordings differ."""
    replays = [name for name in rounds[-1] if name in REPLAYS]
    sys.stdout.write(
        "off the recording of its round, median (least … greatest)\n"
        f"| metric | {' | '.join(replays)} | two recordings in a row |\n"
        f"|---|{'---|' * (len(replays) + 1)}\n"
    )
    for metric in (f"{m} {s}" for m, s in SHOWN):
        off = [
            [r[n][metric] / r["recorded"][metric] - 1 for r in rounds if n in r]
            for n in replays
        ]
        off.append(
            [b["recorded"][metric] / a["recorded"][metric] - 1 for a, b in pairwise(rounds)]
        )
        cells = [
            f"{median(values):+.0%} ({min(values):+.0%} … {max(values):+.0%})" if values else ""
            for values in off
        ]
        sys.stdout.write(f"| {metric} | {' | '.join(cells)} |\n")


def main(options: argparse.Namespace) -> None:
    """Measure, print a table and write the figures."""
    if options.bind:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = options.bind
    rounds = rounds_of(options)
    names = list(rounds[-1])
    sys.stdout.write(
        f"{platform.machine()}, {os.cpu_count()} cores, engine on {options.bind or 'all'}, "
        f"{options.rounds} rounds, milliseconds, median (least … greatest)\n"
        f"| metric | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
    )
    for metric in (f"{m} {s}" for m, s in SHOWN):
        cells = [shown([r[name][metric] for r in rounds if name in r]) for name in names]
        sys.stdout.write(f"| {metric} | {' | '.join(cells)} |\n")
    tell_apart(rounds)
    if options.output:
        content: dict[str, Any] = {**vars(options), "trace": Path(options.trace).name}
        content = {**content, "cores": os.cpu_count(), "rounds_found": rounds}
        Path(options.output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="in process, over HTTP, and recorded")
    parser.add_argument("trace", nargs="?", default=str(bundled("traces") / "chat.jsonl"))
    parser.add_argument("--window", default="typical:45s")
    parser.add_argument("--load", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="also beside an empty loop")
    parser.add_argument("--bind", help="cores of the engine, as VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument(
        "--executor",
        default="mp",
        choices=["mp", "uni"],
        help="mp: the model in a process of its own, vLLM's default on CPUs; uni: in the "
        "scheduler's, as in process",
    )
    parser.add_argument("-o", "--output", metavar="FILE")
    main(parser.parse_args())
