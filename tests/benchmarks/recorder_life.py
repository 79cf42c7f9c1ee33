"""What a recorded server does over a long time: its memory, and what the recorder holds of it.

A real API server on the demo model answers clients of every kind for as long as asked: most
read their streams to the end, some go away midway, some are refused, many of them under one id.
Every few seconds the server's own memory is read (RssAnon: what it has allocated, not what it
maps), and what the recorder holds. The slope is a straight line through what comes after a
warm-up, its interval from resampling blocks of a minute, since neighbouring values are alike.
With `--against` the same load then goes to a server that is not recorded, whose slope is vLLM's
own.

    python tests/benchmarks/recorder_life.py [--minutes 60] [--against] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.paths import TESTS
from support.recorder_server import MIDDLEWARE, serving, wanted
from tuner.recorder.settings import FILE
from tuner.stats import Floats

EVERY_S = 5.0
WARM_UP = 0.25
"""Ours: the part of the time in which caches fill, of which nothing is told."""
BLOCK_S = 60.0
DRAWS = 2000
KINDS = {"read": 0.80, "left": 0.10, "refused": 0.05, "same id": 0.05}
BAD = {"structured_outputs": {"grammar": "root ::= ("}}
SHARED = [7] * 256


@dataclass(slots=True)
class Life:
    """What was seen of one server. Units: at_s from the start; memory in MiB."""

    at_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    held_prompts: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    rows: int = 0

    def slope(self) -> tuple[float, float, float]:
        """Return MiB an hour after the warm-up, and the ends of its 95 % interval."""
        at_s, rss = np.array(self.at_s), np.array(self.rss_mib)
        late = at_s >= WARM_UP * at_s[-1]
        at_h, rss = at_s[late] / 3600, rss[late]
        line = np.polynomial.Polynomial.fit(at_h, rss, 1).convert().coef
        off = rss - (line[0] + line[1] * at_h)
        rng, block = np.random.default_rng(0), max(1, round(BLOCK_S / EVERY_S))
        slopes: list[float] = []
        for _ in range(DRAWS):
            starts = rng.integers(0, max(1, off.size - block), -(-off.size // block))
            drawn: Floats = np.concatenate([off[s : s + block] for s in starts])[: off.size]
            drawn = np.resize(drawn, off.size)
            again = np.polynomial.Polynomial.fit(at_h, line[0] + line[1] * at_h + drawn, 1)
            slopes.append(float(again.convert().coef[1]))
        low, high = np.quantile(slopes, [0.025, 0.975])
        return float(line[1]), float(low), float(high)


def rss_mib(pid: int) -> float:
    """Return what a process has allocated and holds in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this kernel tells no RssAnon")


async def client(port: int, life: Life, end_s: float, rng: random.Random) -> None:
    """Send requests one after the other until the time is over."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    patience = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=patience) as session:
        while time.monotonic() < end_s:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            prompt = SHARED + [rng.randrange(3, 4000) for _ in range(rng.randrange(1, 200))]
            body = wanted(prompt, rng.randrange(2, 24), stream=True)
            headers = {"X-Request-Id": "the-same"} if kind == "same id" else {}
            if kind in {"refused", "same id"}:
                body |= BAD
            async with session.post(url, json=body, headers=headers) as response:
                if kind == "left":
                    await response.content.readline()
                    response.close()
                else:
                    await response.read()
            life.sent[kind] += 1


async def watched(port: int, pid: int, life: Life, seconds: float) -> None:
    """Load a server and read its memory."""
    began_s = time.monotonic()
    end_s = began_s + seconds
    clients = [
        asyncio.create_task(client(port, life, end_s, random.Random(number)))
        for number in range(8)
    ]
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end_s:
            await asyncio.sleep(EVERY_S)
            life.at_s.append(time.monotonic() - began_s)
            life.rss_mib.append(rss_mib(pid))
            async with session.get(f"http://127.0.0.1:{port}/held") as response:
                if response.status == 200:
                    held = json.loads(await response.read())
                    life.held_prompts.append(held["prompts"])
                    life.held_bytes.append(held["bytes"])
    await asyncio.gather(*clients)


def lived(seconds: float, *, is_recorded: bool) -> Life:
    """Return what a server did for so long."""
    life = Life()
    with tempfile.TemporaryDirectory(prefix="tune-life-") as name:
        folder, prod = Path(name), Path(name) / "prod.jsonl"
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, **({FILE: str(prod)} if is_recorded else {})}
        doors = (*MIDDLEWARE, "--middleware", "support.recorder_probe.Held")
        with serving(folder, *doors, environment=environment) as port:
            pid = int((folder / "server.pid").read_text())
            asyncio.run(watched(port, pid, life, seconds))
        if is_recorded:
            life.rows = prod.read_text().count("\n") - 1
    return life


def shown(name: str, life: Life) -> dict[str, object]:
    """Print what one server did, and return it for the file."""
    slope, low, high = life.slope()
    sent = ", ".join(f"{kind} {count:,}" for kind, count in sorted(life.sent.items()))
    sys.stdout.write(
        f"{name}: {life.at_s[-1] / 60:.0f} min, {sum(life.sent.values()):,} requests ({sent}), "
        f"{life.rows:,} rows; RssAnon {life.rss_mib[0]:.1f} MiB at first, "
        f"{life.rss_mib[-1]:.1f} at last, after the warm-up {slope:+.2f} MiB an hour "
        f"(95 % interval {low:+.2f} … {high:+.2f})\n"
    )
    if life.held_prompts:
        sys.stdout.write(
            f"  held by the recorder: at most {max(life.held_prompts)} prompts, "
            f"{max(life.held_bytes):,} bytes; {life.held_prompts[-1]} at last\n"
        )
    return {
        "name": name,
        "slope_mib_per_h": (slope, low, high),
        "sent": dict(life.sent),
        "rows": life.rows,
        "at_s": life.at_s,
        "rss_mib": life.rss_mib,
        "held_prompts": life.held_prompts,
        "held_bytes": life.held_bytes,
    }


def main(options: argparse.Namespace) -> None:
    """Run one server or two, and write the figures."""
    seconds = 60 * options.minutes
    found = [shown("recorded", lived(seconds, is_recorded=True))]
    if options.against:
        found.append(shown("not recorded", lived(seconds, is_recorded=False)))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a recorded server over a long time")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--against", action="store_true", help="then one without recording")
    parser.add_argument("--json")
    main(parser.parse_args())
