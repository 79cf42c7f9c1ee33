"""Clients as ServeGen writes them, and what is drawn of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tuner.errors import TraceError
from tuner.traffic.formats.columns import Columns, ReadOptions, assemble
from tuner.traffic.formats.servegen import SERVEGEN
from tuner.traffic.formats.servegen_draw import LengthHistogram
from tuner.traffic.traces import Trace

ONE = LengthHistogram.of(np.array([1]), np.array([1.0]))
GAMMA = "0,2,1,Gamma,1,0.5\n"
LANGUAGE = {"input_tokens": "{5: 0.25, 8: 0.75}", "output_tokens": "{1: 0.5, 2: 0.5}"}
FILES = (
    "language_m-large/chunk-50-trace.csv",
    "language_m-large/chunk-57-trace.csv",
    "reason_deepseek-r1/chunk-48-trace.csv",
)


def client(folder: Path, rates: str | bytes, dataset: object = None, n: int = 7) -> Path:
    """Write the two files of a client; return the one with the rates."""
    path = folder / f"chunk-{n}-trace.csv"
    path.write_bytes(rates if isinstance(rates, bytes) else rates.encode())
    found = {"0": LANGUAGE} if dataset is None else dataset
    text = found if isinstance(found, str) else json.dumps(found, indent=2)
    (folder / f"chunk-{n}-dataset.json").write_text(text)
    return path


def drawn(path: Path, **chosen: object) -> Columns:
    options = ReadOptions(**chosen)  # type: ignore[arg-type]  # each case passes its own option
    return SERVEGEN.read(path, options)


def traced(path: Path, options: ReadOptions) -> Trace:
    columns = SERVEGEN.read(path, options)
    return assemble(columns, options, source=path.name, format_name="servegen", sha256="")


def message(path: Path, **chosen: object) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        drawn(path, **chosen)
    return caught.value.message.replace(str(path), path.name)


def counts_within(arrived_s: np.ndarray, start_s: float, end_s: float) -> int:
    return int(((arrived_s >= start_s) & (arrived_s < end_s)).sum())


# --- rates and gaps -------------------------------------------------------------------
