"""The whole circle on real parts: record, tune, serve, shift, notice, re-tune, guard.

A real API server records its traffic; `tune` tunes for the recording; the emitted file is
served and a real Prometheus scrapes it; `tune watch` finds nothing to do. Then the load loop
asks for more and longer answers. The watch has to notice, re-tune from the run's profile with
no engine, write the file and run its hook, upon which the server is started anew; and its guard
has to come to an end. The load goes on all the while, and no process is told what others do.

Some twelve minutes on two cores. Prints what happened when, and how the server did before and
after; ends with 1 if a station of the circle was not reached or the change was taken back.

    python tests/benchmarks/circle.py [--seed 0] [-o FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np
import yaml

from tuner.engine.demo import demo_engine_args
from tuner.recorder.settings import FILE
from tuner.replay.server.process import free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.prometheus_parts import answers, prometheus, wait_for

TUNE = (sys.executable, "-m", "tuner.cli")
SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
MODEL = "demo"
CURRENT = {"max-num-seqs": 8, "max-num-batched-tokens": 2048}
PATIENCE_S = 180.0
RECORD_S, CALM_S, SINCE_S, GUARD_S = 150.0, 100.0, 90, 60
MAX_IN_FLIGHT = 128


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the load loop asks for: Poisson arrivals, log-normal lengths of these medians."""

    per_s: float
    prompt: float
    output: float


CALM = Traffic(3.0, 150.0, 40.0)
SHIFTED = Traffic(10.0, 150.0, 120.0)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of the load loop: when it was sent, in Unix seconds, and how long it took."""

    at_s: float
    e2e_s: float


@dataclass(slots=True)
class Load:
    """Asks a server until it is stopped; what is refused while it restarts is counted."""

    port: int
    rng: np.random.Generator
    traffic: Traffic = CALM
    answered: list[Answered] = field(default_factory=list)
    refused: int = 0
    left_out: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask, from a thread of its own, until the block ends."""
        thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()))
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    async def _ask_all(self) -> None:
        open_ = set[asyncio.Task[None]]()
        due_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._is_over.is_set():
                due_s += self.rng.exponential(1 / self.traffic.per_s)
                await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
                if len(open_) >= MAX_IN_FLIGHT:
                    self.left_out += 1
                    continue
                task = asyncio.create_task(self._ask(session))
                open_.add(task)
                task.add_done_callback(open_.discard)
            await asyncio.gather(*open_)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        lengths = self.rng.lognormal(np.log([self.traffic.prompt, self.traffic.output]), 0.5)
        prompt, output = np.clip(lengths, 2, 600).astype(int).tolist()
        tokens = self.rng.integers(3, 4000, prompt).tolist()
        body = {"model": MODEL, "prompt": tokens, "max_tokens": output, "ignore_eos": True}
        at_s, began_s = time.time(), time.monotonic()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        try:
            async with session.post(url, json=body | {"temperature": 0}) as response:
                response.raise_for_status()
                await response.read()
        except (aiohttp.ClientError, TimeoutError):
            self.refused += 1
            return
        self.answered.append(Answered(at_s, time.monotonic() - began_s))

    def shown(self, since_s: float, until_s: float) -> dict[str, float]:
        """Return how the requests did that were sent in a stretch of time."""
        e2e_s = [one.e2e_s for one in list(self.answered) if since_s <= one.at_s < until_s]
        if not e2e_s:
            return {"requests": 0}
        p50, p95 = np.quantile(e2e_s, (0.5, 0.95)).tolist()
        return {"requests": len(e2e_s), "e2e_p50_s": p50, "e2e_p95_s": p95}


@dataclass(slots=True)
class Server:
    """The API server: started from a file, and anew when the file was handed over."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self, config: Path, *more: str, **environment: str) -> None:
        """Serve from a file and wait until it answers."""
        log = self.folder / "server.log"
        command = [*SERVE, "--config", str(config), "--host", "127.0.0.1"]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *more],
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **environment},
                cwd=self.folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        wait_for(
            lambda: answers(self.port, "/health"), lambda: log.read_text()[-3000:], PATIENCE_S
        )

    def stop(self) -> None:
        """Stop the server, if there is one."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None


@dataclass(slots=True)
class Diary:
    """What happened when."""

    began_s: float = field(default_factory=time.time)
    events: list[tuple[float, str]] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Note and print an event."""
        at_s = time.time() - self.began_s
        self.events.append((at_s, text))
        sys.stdout.write(f"{at_s:>6.0f} s  {text}\n")
        sys.stdout.flush()

    def has(self, pattern: str) -> bool:
        """Say whether an event of this kind was noted."""
        return any(re.search(pattern, text) for _, text in list(self.events))


def tune(diary: Diary, folder: Path, *words: str) -> None:
    """Run a command of ours and note what it says last."""
    done = subprocess.run(
        [*TUNE, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"tune {' '.join(words)}: {done.returncode}\n{done.stderr[-3000:]}")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    diary.note(f"tune {words[0]}: {lines[-1]}")


def limits_in(path: Path) -> str:
    """Return the limits of a file as we print them."""
    values = yaml.safe_load(path.read_text())
    return f"{values['max-num-seqs']}/{values['max-num-batched-tokens']}"


def recorded(diary: Diary, folder: Path, server: Server, load: Load) -> Path:
    """Record calm traffic on the current configuration; return the trace."""
    current, prod = folder / "current.yaml", folder / "prod.jsonl"
    values = {**demo_engine_args(), **CURRENT, "served-model-name": MODEL}
    current.write_text(yaml.safe_dump(values))
    door = ("--middleware", "tuner.recorder.TraceRecorder")
    server.start(current, *door, **{FILE: str(prod)})
    diary.note(f"serving {limits_in(current)} under record")
    with load.running():
        time.sleep(RECORD_S)
    server.stop()
    diary.note(f"recorded {prod.read_text().count(chr(10)) - 1} requests")
    return prod


def watch_words(url: str, *more: str) -> Sequence[str]:
    """Return the command line of the watch."""
    return (
        *("watch", "--prometheus", url, "--profile", "run", "--emit", "best.yaml"),
        *("--since", f"{SINCE_S}s", "--step", "5s", "--guard", f"{GUARD_S}s"),
        *("--min-interval", "1s", "--hook", "touch", "--hook", "handed", *more),
    )


@contextmanager
def watching(diary: Diary, folder: Path, url: str) -> Iterator[None]:
    """Run the watch as a daemon; what it says goes into the diary."""
    # It has no machine of its own here, so it gives way to the server.
    command = ("nice", *TUNE, *watch_words(url, "--every", "20s"))
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            diary.note(f"watch: {line.rstrip()}")

    ear = threading.Thread(target=listen)
    ear.start()
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        ear.join()


def shifted(
    diary: Diary, folder: Path, server: Server, load: Load, url: str
) -> dict[str, dict[str, float]]:
    """Shift the traffic under the watch's eyes; return how the server did before and after."""
    handed, best = folder / "handed", folder / "best.yaml"
    with watching(diary, folder, url):
        wait_for(lambda: diary.has("^watch: (unchanged|shifted)"), patience_s=PATIENCE_S)
        load.traffic = SHIFTED
        shift_s = time.time()
        diary.note(f"traffic shifts: {CALM} -> {SHIFTED}")
        wait_for(handed.exists, lambda: "nothing was handed over", 5 * PATIENCE_S)
        handed_s = time.time()
        diary.note(f"handed over: {limits_in(best)}; the server restarts")
        server.stop()
        server.start(best)
        up_s = time.time()
        diary.note("the server is up again")
        wait_for(
            lambda: diary.has("guard: .*(as predicted|worse than|gave up)"),
            lambda: "no word of the guard",
            3 * PATIENCE_S,
        )
        end_s = time.time()
    return {
        "before the shift": load.shown(0, shift_s),
        "shifted, old limits": load.shown(shift_s, handed_s - 5),
        "shifted, new limits": load.shown(up_s + 15, end_s - 5),
    }


def circle(diary: Diary, folder: Path, seed: int) -> dict[str, object]:
    """Go round once; return how the server did."""
    rng = np.random.default_rng(seed)
    server = Server(folder, free_port())
    load = Load(server.port, rng)
    try:
        prod = recorded(diary, folder, server, load)
        words = ("--config", "current.yaml", "--budget", "3m", "--run-dir", "run")
        tune(diary, folder, "--trace", prod.name, *words, "-o", "best.yaml")
        tuned = limits_in(folder / "best.yaml")
        server.start(folder / "best.yaml")
        diary.note(f"serving {tuned}, as emitted")
        load = replace(load, answered=[], refused=0, left_out=0, _is_over=threading.Event())
        with prometheus(folder, scrapes=[server.port]) as url, load.running():
            time.sleep(CALM_S)
            tune(diary, folder, *watch_words(url, "--once"))
            did = shifted(diary, folder, server, load, url)
    finally:
        server.stop()
    return {
        "tuned": tuned,
        "retuned": limits_in(folder / "best.yaml"),
        "refused": load.refused,
        "left_out": load.left_out,
        "server": did,
    }


def main(options: argparse.Namespace) -> int:
    """Go round, print how the server did, and keep it."""
    diary, found = Diary(), dict[str, object]()
    with tempfile.TemporaryDirectory(prefix="tune-circle-") as name:
        try:
            found = circle(diary, Path(name), options.seed)
        except AssertionError as lost:
            diary.note(f"the circle broke: {lost}")
    agreed = diary.has("does as well as predicted")
    # A served engine is slower than the profile of one in process predicts.
    abstained = diary.has("guard: gave up without a verdict")
    judged = "agrees" if agreed else "abstains" if abstained else "does not agree"
    diary.note(f"the guard {judged}")
    for key, value in found.items():
        sys.stdout.write(f"{key}: {value}\n")
    if options.output:
        events = [[round(at_s, 1), text] for at_s, text in diary.events]
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        content = {"machine": machine, "seed": options.seed, **found, "events": events}
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if agreed or abstained else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        sys.exit(main(parser.parse_args()))
