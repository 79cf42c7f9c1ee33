"""Byte-level fuzz of every trace reader, guided by coverage.

The first byte of an input chooses how it is read: with the format detected, or with one that is
named. Whatever the rest holds, a reader returns a trace or raises an error of ours.

    python -m support.fuzz_readers [-max_total_time=20] [options of libFuzzer] [CORPUS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from support.fuzz_seeds import LENGTHS, SEEDS

with atheris.instrument_imports(include=["tuner"]):
    from tuner.errors import TunerError
    from tuner.traffic.formats import read_trace
    from tuner.traffic.formats.columns import ReadOptions
    from tuner.traffic.formats.registry import format_names

NAMES = (None, *format_names())
SKIPPING = ReadOptions(skip_invalid=True, max_invalid_ratio=1.0)
ALL_SKIPPED = len(NAMES) * -(-128 // len(NAMES))


def read(data: bytes, path: Path) -> None:
    """Read the bytes as the first of them says; errors that are not ours end the fuzz."""
    if not data:
        return
    name = NAMES[data[0] % len(NAMES)]
    path.write_bytes(data[1:])
    try:
        trace = read_trace(path, name, SKIPPING if data[0] >= 128 else None)
    except TunerError as error:
        if error.exit_code != 2 or len(error.message) > 2000:
            raise AssertionError(error.message[:200]) from error
    else:
        if not len(trace):
            raise AssertionError("a trace without requests")


def main() -> None:
    """Fuzz until libFuzzer's options say stop."""
    with tempfile.TemporaryDirectory(prefix="tune-fuzz-") as folder:
        corpus, path = Path(folder) / "corpus", Path(folder) / "chunk-0-trace.csv"
        corpus.mkdir()
        path.with_name("chunk-0-dataset.json").write_bytes(LENGTHS)
        for number, (name, seed) in enumerate(SEEDS.items()):
            choice = bytes([NAMES.index(name)])
            (corpus / f"{number}").write_bytes(choice + seed)
            (corpus / f"{number}-detected").write_bytes(b"\0" + seed)
            # A file of which every row is skipped.
            head = seed.split(b"\n", 1)[0]
            (corpus / f"{number}-skipped").write_bytes(
                bytes([ALL_SKIPPED + choice[0]]) + head + b"\n,\n"
            )
        # A line of 10 kB, ten seconds and a gigabyte are the most that one input may take.
        bounds = ["-max_len=10240", "-len_control=0", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([*sys.argv, *bounds, str(corpus)], lambda data: read(data, path))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
