"""How long reading and describing a million requests takes, and how much memory.

Each run is a fresh process, so that imports count and memory is its own.

    python tests/benchmarks/read_million.py [ROWS]
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RUNS = 5
ROWS = 1_000_000
SEED = 0
CASES = ("azure.csv", "plain.jsonl", "hashed.jsonl")


def write_files(folder: Path, rows: int) -> None:
    """Write the same traffic as CSV, as JSON Lines, and as JSON Lines with 14 hash ids each."""
    rng = np.random.default_rng(SEED)
    ticks = np.cumsum(rng.exponential(0.05, rows) * 1e7).astype(np.int64)
    prompt = np.minimum(rng.lognormal(7, 1, rows).astype(int) + 1, 8000)
    output = np.minimum(rng.lognormal(4.5, 1, rows).astype(int) + 1, 1000)
    moments = np.datetime64("2023-11-16T18:15:46") + ticks * np.timedelta64(100, "ns")
    columns = list(zip(moments, ticks // 10_000, prompt, output, strict=True))
    with (folder / CASES[0]).open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        file.writelines(
            f"{str(m)[:27].replace('T', ' ')},{p},{o}\r\n" for m, _, p, o in columns
        )
    with (folder / CASES[1]).open("w") as file:
        file.writelines(
            f'{{"timestamp": {t}, "input_length": {p}, "output_length": {o}}}\n'
            for _, t, p, o in columns
        )
    with (folder / CASES[2]).open("w") as file:
        file.writelines(
            f'{{"timestamp": {t}, "input_length": 7000, "output_length": {o}, '
            f'"hash_ids": {list(range(7 * i, 7 * i + 14))}}}\n'
            for i, (_, t, _, o) in enumerate(columns)
        )


def child(path: Path) -> None:
    """Read and describe one file in this process and print the figures as JSON."""
    started_s = time.perf_counter()
    from tuner.describe import describe
    from tuner.formats import read_trace

    imported_s = time.perf_counter()
    trace = read_trace(path)
    read_s = time.perf_counter()
    rows = describe(trace).rows
    figures = {
        "rows": rows,
        "read_s": read_s - imported_s,
        "all_s": time.perf_counter() - started_s,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    sys.stdout.write(json.dumps(figures))


def spread(values: list[float]) -> str:
    """Return median, smallest and largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} … {max(values):.2f})"


def main(rows: int) -> None:
    """Print one table row for each kind of file."""
    sys.stdout.write(f"{platform.machine()}, Python {platform.python_version()}, seed {SEED}\n")
    sys.stdout.write("| file | rows | n | import, read, describe s | rows/s read | peak MB |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), rows)
        for name in CASES:
            command = [sys.executable, __file__, "--child", str(Path(folder) / name)]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                for _ in range(RUNS)
            ]
            per_s = statistics.median(run["rows"] / run["read_s"] for run in runs)
            all_s, rss = ([run[key] for run in runs] for key in ("all_s", "rss_mb"))
            sys.stdout.write(
                f"| {name} | {runs[0]['rows']:,} | {RUNS} | {spread(all_s)} "
                f"| {per_s:,.0f} | {spread(rss)} |\n"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
