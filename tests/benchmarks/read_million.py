"""How long reading and describing a million requests takes, and how much memory.

Each run is a fresh process, so that imports count and memory is its own.

    python tests/benchmarks/read_million.py [ROWS] [--only azure.csv] [--runs 5] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RUNS = 5
ROWS = 1_000_000
SEED = 0
CASES = ("azure.csv", "plain.jsonl", "hashed.jsonl")


def write_files(folder: Path, rows: int, names: Sequence[str]) -> None:
    """Write the same traffic as CSV, as JSON Lines, and as JSON Lines with 14 hash ids each."""
    import polars as pl

    rng = np.random.default_rng(SEED)
    ticks = np.cumsum(rng.exponential(0.05, rows) * 1e7).astype(np.int64)
    prompt = np.minimum(rng.lognormal(7, 1, rows).astype(np.int64) + 1, 8000)
    output = np.minimum(rng.lognormal(4.5, 1, rows).astype(np.int64) + 1, 1000)
    if "azure.csv" in names:
        moments = np.datetime64("2023-11-16T18:15:46", "ns") + ticks * np.timedelta64(100, "ns")
        columns = {"TIMESTAMP": moments, "ContextTokens": prompt, "GeneratedTokens": output}
        pl.DataFrame(columns).write_csv(
            folder / "azure.csv",
            datetime_format="%Y-%m-%d %H:%M:%S%.6f",
            line_terminator="\r\n",
        )
    for name in names:
        if name.endswith(".csv"):
            continue
        with (folder / name).open("w") as file:
            lines = zip(ticks // 10_000, prompt, output, strict=True)
            for i, (t, p, o) in enumerate(lines):
                if name == "plain.jsonl":
                    line = f'{{"timestamp": {t}, "input_length": {p}, "output_length": {o}}}\n'
                else:
                    line = (
                        f'{{"timestamp": {t}, "input_length": 7000, "output_length": {o}, '
                        f'"hash_ids": {list(range(7 * i, 7 * i + 14))}}}\n'
                    )
                file.write(line)


def child(path: Path) -> None:
    """Read and describe one file in this process and print the figures as JSON."""
    started_s = time.perf_counter()
    from tuner.traffic.describe import describe
    from tuner.traffic.formats import read_trace

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


def main(rows: int, names: Sequence[str], runs: int, output: Path | None) -> None:
    """Print one table row for each kind of file."""
    sys.stdout.write(f"{platform.machine()}, Python {platform.python_version()}, seed {SEED}\n")
    sys.stdout.write("| file | rows | n | import, read, describe s | rows/s read | peak MB |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), rows, names)
        for name in names:
            command = [sys.executable, __file__, "--child", str(Path(folder) / name)]
            found = [
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                for _ in range(runs)
            ]
            kept[name] = found
            per_s = statistics.median(run["rows"] / run["read_s"] for run in found)
            all_s, rss = ([run[key] for run in found] for key in ("all_s", "rss_mb"))
            sys.stdout.write(
                f"| {name} | {found[0]['rows']:,} | {runs} | {spread(all_s)} "
                f"| {per_s:,.0f} | {spread(rss)} |\n"
            )
    if output:
        command_line = " ".join(Path(word).name for word in sys.argv)
        content = {"command": command_line, "machine": platform.machine(), "runs": kept}
        output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="?", default=ROWS)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.child)
    else:
        main(args.rows, (args.only,) if args.only else CASES, args.runs, args.output)
