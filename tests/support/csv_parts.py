"""Files of other tools' formats, written, read, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.errors import TraceError
from tuner.traffic.formats.columns import ReadOptions, TraceFormat, assemble
from tuner.traffic.traces import Trace

BURST_6 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_8 = BURST_6.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,")


def written(folder: Path, data: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def traced(path: Path, known: TraceFormat, options: ReadOptions | None = None) -> Trace:
    options = options or ReadOptions()
    columns = known.read(path, options)
    return assemble(columns, options, source=path.name, format_name=known.name, sha256="")


def message(path: Path, known: TraceFormat, options: ReadOptions | None = None) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        traced(path, known, options)
    return caught.value.message.replace(str(path), path.name)


def public(shared_traces: Path, name: str) -> tuple[Path, dict[str, dict[str, float]]]:
    """Return one of the public files and what its manifest says of it."""
    files = json.loads((shared_traces / "MANIFEST.json").read_text())["files"]
    return shared_traces / name, next(each for each in files if each["file"] == name)


# --- BurstGPT -------------------------------------------------------------------------
