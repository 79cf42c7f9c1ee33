"""What recording costs a real API server: requests per second and time to first token.

One server with the recorder's two doors open gets the same load in turns, recording and not
recording, so that the machine's drift falls on both; which of the two goes first changes from
pair to pair. Two servers side by side could not be compared: two processes of one program are
not equally fast, and on few cores vLLM binds both to the same one. While it does not record,
the recorder costs the server one look at a flag per request and per iteration. `--null` records
in neither turn: what it shows is the noise that the real figures stand in. With `--steps` the
engine's steps are recorded too, of an engine that gives their details in both turns.

Under load a small machine's time to first token is mostly queueing, and scatters far more than
the recorder could add. So it is also taken from single requests, one at a time, recorded and
not in turns; and the API server's own processor time per request is counted, which bounds what
can be added to any latency.

    python tests/benchmarks/recorder_overhead.py [--starts 2] [--pairs 40] [--probes 200]
                                                 [--null] [--steps] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp
from scipy.stats import ttest_1samp

from tuner.recorder.recorder import process_recorder
from tuner.recorder.settings import FILE, STEPS
from tuner.stats import CONFIDENCE, quantile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorder_server import MIDDLEWARE, serving, wanted

IN_FLIGHT = 16
PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 512, 256, 32
"""Four blocks of the CPU's cache, two of them shared by all."""

SETTLE_S = 0.4
"""Longer than the recorder gathers before it writes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one server did with the load; cpu_s is the API server's processor time."""

    requests_per_s: float
    ttft_p50_s: float
    cpu_per_request_s: float


class Switch:
    """An ASGI middleware of the server: `/recording/on` and `/recording/off`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer what is meant for the switch and pass on the rest."""
        _, _, wanted_state = str(scope.get("path", "")).partition("/recording/")
        recorder = process_recorder()
        if not wanted_state or recorder is None:
            await self._app(scope, receive, send)
            return
        recorder.is_on = wanted_state == "on"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its port, and its process of the HTTP side."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Where completions are asked for."""
        return f"http://127.0.0.1:{self.port}/v1/completions"

    def cpu_s(self) -> float:
        """Return the processor time of all threads so far."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in tasks) * 1e-9

    async def record(self, session: aiohttp.ClientSession, *, is_on: bool) -> None:
        """Begin or cease to record, after what is still on its way has been written."""
        await asyncio.sleep(SETTLE_S)
        url = f"http://127.0.0.1:{self.port}/recording/{'on' if is_on else 'off'}"
        async with session.get(url) as response:
            response.raise_for_status()


async def answer(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Stream one completion to its end and return the seconds to its first token."""
    prompt = [7] * SHARED_TOKENS
    own = [3 + number % 4000, 3 + number // 4000]
    prompt += own + [3 + i for i in range(PROMPT_TOKENS - SHARED_TOKENS - len(own))]
    began_s, first_s = time.perf_counter(), None
    async with session.post(url, json=wanted(prompt, OUTPUT_TOKENS, stream=True)) as response:
        response.raise_for_status()
        async for line in response.content:
            if first_s is None and line.startswith(b"data: "):
                first_s = time.perf_counter()
    if first_s is None:
        raise SystemExit("a response held no token")
    return first_s - began_s


async def turn(server: Server, numbers: Sequence[int], *, is_recorded: bool) -> Turn:
    """Put the load on the server, with a fixed number of requests in flight."""
    left, ttft_s = list(numbers), list[float]()

    async def client(session: aiohttp.ClientSession) -> None:
        while left:
            ttft_s.append(await answer(session, server.url, left.pop()))

    async with aiohttp.ClientSession() as session:
        await server.record(session, is_on=is_recorded)
        began_s, cpu_s = time.perf_counter(), server.cpu_s()
        await asyncio.gather(*(client(session) for _ in range(IN_FLIGHT)))
        took_s, n = time.perf_counter() - began_s, len(numbers)
        await asyncio.sleep(SETTLE_S)
    return Turn(n / took_s, median(ttft_s), (server.cpu_s() - cpu_s) / n)


async def probed(server: Server, numbers: Iterable[int], sides: Sequence[bool]) -> list[float]:
    """Return how much later a recorded request's first token came than the next plain one's."""
    later_s: list[float] = []
    async with aiohttp.ClientSession() as session:
        for number in numbers:
            order = (0, 1) if number % 2 == 0 else (1, 0)
            ttft_s = [0.0, 0.0]
            for at in order:
                await server.record(session, is_on=sides[at])
                ttft_s[at] = await answer(session, server.url, 2 * number + at)
            later_s.append(ttft_s[0] - ttft_s[1])
    return later_s


@dataclass(slots=True)
class Found:
    """What was measured, pair by pair: (recorded, plain)."""

    turns: list[tuple[Turn, Turn]] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)

    def add(self, options: argparse.Namespace, start: int) -> None:
        """Start a server and measure it with and without recording, in turns."""
        sides = (not options.null, False)
        with tempfile.TemporaryDirectory(prefix="tune-overhead-") as name:
            folder = Path(name)
            environment = {FILE: str(folder / "prod.jsonl"), "PYTHONPATH": _import_path()}
            doors: tuple[str, ...] = (*MIDDLEWARE, "--middleware", "recorder_overhead.Switch")
            if options.steps:
                environment[STEPS] = "1"
                doors = (*doors, "--enable-logging-iteration-details")
            with serving(folder, *doors, environment=environment) as port:
                server = Server(port, int((folder / "server.pid").read_text()))
                # Recording in any case: the first recorded request starts the thread.
                asyncio.run(turn(server, range(2 * IN_FLIGHT), is_recorded=True))
                first = 10_000 * (start + 1)
                numbers = range(first, first + options.probes)
                self.later_s += asyncio.run(probed(server, numbers, sides))
                for pair in range(options.pairs):
                    first += 1000
                    numbers = range(first, first + options.requests)
                    order = (0, 1) if pair % 2 == 0 else (1, 0)
                    turns = {
                        at: asyncio.run(turn(server, numbers[at::2], is_recorded=sides[at]))
                        for at in order
                    }
                    self.turns.append((turns[0], turns[1]))
                    sys.stderr.write(f"start {start + 1}, pair {pair + 1}: {self.turns[-1]}\n")
            check(folder / "prod.jsonl", options)


def _import_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parent), *([inherited] if inherited else [])])


def check(prod: Path, options: argparse.Namespace) -> None:
    """Refuse figures of a recorder that did not record, or of one that always did."""
    rows = prod.read_text().count("\n") - 1
    expected = 2 * IN_FLIGHT
    if not options.null:
        expected += options.probes + options.pairs * len(range(0, options.requests, 2))
    if rows != expected:
        raise SystemExit(f"{rows} requests were recorded, {expected} should have been")


Interval = tuple[float, float, float]
"""A value, and the low and high end of its interval."""


def mean_of(differences: Sequence[float]) -> Interval:
    """Return the mean of paired differences with Student's interval."""
    interval = ttest_1samp(differences, 0.0).confidence_interval(CONFIDENCE)
    return fmean(differences), float(interval.low), float(interval.high)


def shown(found: Interval, scale: float, unit: str) -> str:
    """Return a value with its interval."""
    value, low, high = (scale * one for one in found)
    return f"{value:+.3f}{unit} ({CONFIDENCE:.0%} interval {low:+.3f} … {high:+.3f})"


def main(options: argparse.Namespace) -> None:
    """Run all starts, print a table and write the figures."""
    found = Found()
    for start in range(options.starts):
        found.add(options, start)
    logs = mean_of([math.log(a.requests_per_s / b.requests_per_s) for a, b in found.turns])
    lost, least, most = (1 - math.exp(logs[i]) for i in (0, 2, 1))
    alone = quantile(found.later_s, 0.5)
    figures: dict[str, Interval] = {
        "requests_lost_ratio": (lost, least, most),
        "ttft_p50_later_under_load_s": mean_of(
            [a.ttft_p50_s - b.ttft_p50_s for a, b in found.turns]
        ),
        "ttft_p50_later_alone_s": (alone.value, alone.low or 0.0, alone.high or 0.0),
        "cpu_more_per_request_s": mean_of(
            [a.cpu_per_request_s - b.cpu_per_request_s for a, b in found.turns]
        ),
    }
    plain = [b for _, b in found.turns]
    what = "never recorded" if options.null else "recorded against not"
    sys.stdout.write(
        f"{platform.machine()}, {os.cpu_count()} cores, {what}; {options.requests // 2} "
        f"requests a turn, {IN_FLIGHT} in flight; {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} "
        f"output tokens, streamed; "
        f"without: {median(p.requests_per_s for p in plain):.2f} requests/s, "
        f"TTFT p50 {1e3 * median(p.ttft_p50_s for p in plain):.1f} ms under load, "
        f"{1e3 * median(p.cpu_per_request_s for p in plain):.2f} ms of CPU a request\n"
        "| | n | |\n|---|---|---|\n"
    )
    for name, interval in figures.items():
        scale, unit = (100, " %") if name.endswith("ratio") else (1e3, " ms")
        n = len(found.later_s) if "alone" in name else len(found.turns)
        sys.stdout.write(f"| {name} | {n} | {shown(interval, scale, unit)} |\n")
    if options.json:
        each = [[asdict(a), asdict(b)] for a, b in found.turns]
        content = {**vars(options), **figures, "turns": each, "later_s": found.later_s}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="what recording costs a real API server")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=192, help="of a pair of turns")
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--steps", action="store_true", help="record the engine's steps too")
    parser.add_argument("--null", action="store_true", help="record in neither turn")
    parser.add_argument("--json")
    main(parser.parse_args())
