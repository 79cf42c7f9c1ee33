"""Fuzz of every reader with inputs made of real samples, each bounded in time and memory.

Input n of a seed is always the same, whoever makes it. A process of its own reads them, with
an alarm after a second of processor time and no more than half a gigabyte beyond what it began
with; one that dies or hangs is followed by another, and the input it had is a fault as well.
Faulty inputs are kept: a file each under `fuzz_cases`, which a test reads for good.

    python -m support.fuzz_structured [--inputs 1000000] [--first 0] [--seed 0] [--only TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

from support.fuzz_mutations import mutated
from support.fuzz_targets import FaultError, Target, targets, tried
from support.paths import ROOT, TESTS

MAX_CPU_S: Final = 1.0
MAX_MORE_BYTES: Final = 512 << 20
MAX_HELD_S: Final = 10.0
"""Of the processor's time, for what holds the interpreter so that no alarm is heard."""
MAX_SILENT_S: Final = 600.0
"""By the clock, for what waits for ever; a busy machine takes long as well."""
BATCH: Final = 2000
"""Ours: after so many inputs a process is followed by a fresh one, whose memory is its own."""
CASES: Final = TESTS / "support" / "fuzz_cases"


class TooSlowError(BaseException):
    """The alarm: no reader may catch it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An input that a reader did not stand."""

    number: int
    target: str
    kind: str
    detail: str


@dataclass(slots=True)
class Found:
    """What came of many inputs."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    cpu_s: float = 0.0
    slowest_s: float = 0.0

    def __str__(self) -> str:
        """Return all of it in one line."""
        each = ", ".join(f"{name} {count:,}" for name, count in sorted(self.outcomes.items()))
        return (
            f"{self.inputs:,} inputs ({each}), {len(self.faults)} faults, "
            f"{1e3 * self.cpu_s / max(self.inputs, 1):.1f} ms each, "
            f"at most {self.slowest_s:.2f} s"
        )


def made(known: dict[str, Target], seed: int, number: int) -> tuple[str, Target, bytes]:
    """Return which target an input is for, and its bytes."""
    rng = random.Random(f"{seed} {number}")
    name = list(known)[number % len(known)]
    target = known[name]
    return name, target, mutated(rng, rng.choice(target.samples))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise TooSlowError in what takes more than a second of the processor's time."""

    def ring(_: int, __: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, ring)
    # Again and again: an except clause that swallows the first is not to hide it.
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def limit_memory() -> None:
    """Let this process take so much more than it has, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def read_one(
    target: Target,
    folder: Path,
    data: bytes,
    limit: Callable[[], contextlib.AbstractContextManager[None]] = bounded,
) -> tuple[str, str, str]:
    """Return what came of an input, and of a fault its kind and its detail."""
    for left in folder.iterdir():
        left.unlink()
    for name, content in target.beside.items():
        (folder / name).write_bytes(content)
    path = folder / target.file
    path.write_bytes(data)
    try:
        with limit():
            return tried(target, path), "", ""
    except TooSlowError:
        return "", "slow", _where(sys.exception())
    except MemoryError:
        return "", "memory", _where(sys.exception())
    except FaultError as error:
        return "", "message", str(error)[:300]
    except Exception as error:  # noqa: BLE001 - whatever a reader lets out
        return "", type(error).__name__, f"{str(error)[:200]} {_where(error)}"


def _where(error: BaseException | None) -> str:
    """Return where in our own code an exception came from."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    ours = [one for one in frames if f"{ROOT}/tuner/" in one.filename]
    last = ours[-1] if ours else frames[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def work(seed: int, first: int, last: int, only: str) -> None:
    """Read inputs, and write a line for each on standard output."""
    known = chosen(only)
    with tempfile.TemporaryDirectory(prefix="tune-fuzz-") as name:
        folder = Path(name)
        for target in known.values():  # what is imported and compiled at first use
            for sample in target.samples:
                read_one(target, folder, sample, contextlib.nullcontext)
        limit_memory()
        for number in range(first, last):
            label, target, data = made(known, seed, number)
            sys.stdout.write(json.dumps([number, label]) + "\n")
            sys.stdout.flush()
            began_s = time.process_time()
            outcome, kind, detail = read_one(target, folder, data)
            took_s = time.process_time() - began_s
            sys.stdout.write(json.dumps([number, label, outcome, kind, detail, took_s]) + "\n")
            sys.stdout.flush()


def chosen(only: str) -> dict[str, Target]:
    """Return the targets whose name holds a text."""
    known = {name: target for name, target in targets().items() if only in name}
    if not known:
        raise SystemExit(f"no target has {only!r} in its name")
    return known


def _followed(
    process: subprocess.Popen[str], out: IO[str], found: Found
) -> tuple[int, str, str]:
    """Take what a process writes; return the input it was at, whose, and how it ended."""
    at, label = -1, ""
    ready = selectors.DefaultSelector()
    ready.register(out, selectors.EVENT_READ)
    silent_since_s, cpu_s = time.monotonic(), 0.0
    while True:
        if not ready.select(1.0):
            is_held = at >= 0 and _cpu_s(process.pid) - cpu_s > MAX_HELD_S
            if is_held or time.monotonic() - silent_since_s > MAX_SILENT_S:
                break
            continue
        line = out.readline()
        silent_since_s, cpu_s = time.monotonic(), _cpu_s(process.pid)
        if not line:
            code = process.wait()
            return at, label, "" if code == 0 else f"ended with {code}"
        number, label, *rest = json.loads(line)
        at = number
        if not rest:
            continue
        outcome, kind, detail, took_s = rest
        found.inputs += 1
        found.cpu_s += took_s
        found.slowest_s = max(found.slowest_s, took_s)
        found.outcomes[outcome or "fault"] += 1
        if kind:
            found.faults.append(Fault(number, label, kind, detail))
    process.kill()
    process.wait()
    return at, label, f"silent for {time.monotonic() - silent_since_s:.0f} s"


def _cpu_s(pid: int) -> float:
    """Return what a process has taken of the processor's time."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def fuzz(
    seed: int,
    first: int,
    last: int,
    only: str = "",
    on_batch: Callable[[Found], None] | None = None,
) -> Found:
    """Read inputs in processes of their own, one after the other."""
    found = Found()
    while first < last:
        until = min(first + BATCH, last)
        command = [sys.executable, "-m", "support.fuzz_structured", "--work"]
        words = [str(one) for one in (seed, first, until)]
        process = subprocess.Popen(
            [*command, *words, "--only", only],
            stdout=subprocess.PIPE,
            text=True,
            env=_threads(),
        )
        assert process.stdout is not None
        with process.stdout as out:
            at, label, how = _followed(process, out, found)
        if how and at < first:
            raise RuntimeError(f"the fuzz does not start: it {how}")
        if how:
            found.inputs += 1
            found.outcomes["fault"] += 1
            found.faults.append(Fault(at, label, "died", how))
        first = at + 1 if how else until
        if on_batch is not None:
            on_batch(found)
    return found


def _threads() -> dict[str, str]:
    """Return an environment of few threads, whose stacks count as memory."""
    return {**os.environ, "POLARS_MAX_THREADS": "2", "OMP_NUM_THREADS": "1"}


def keep(seed: int, fault: Fault, only: str = "") -> Path:
    """Write a faulty input down as a case for good."""
    name, target, data = made(chosen(only), seed, fault.number)
    folder = CASES / name.replace("/", "+")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(data).hexdigest()[:12]}-{target.file}"
    path.write_bytes(data)
    return path


def main(arguments: Sequence[str]) -> int:
    """Fuzz, keep what is faulty, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description="fuzz every reader")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name holds this")
    parser.add_argument("--work", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        seed, first, last = options.work
        work(seed, first, last, options.only)
        return 0
    said = 0

    def tell(found: Found) -> None:
        nonlocal said
        for fault in found.faults[said:]:
            path = keep(options.seed, fault, options.only)
            sys.stdout.write(f"{fault.target}: {fault.kind} {fault.detail}: {path}\n")
        said = len(found.faults)
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()

    last = options.first + options.inputs
    found = fuzz(options.seed, options.first, last, options.only, tell)
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
