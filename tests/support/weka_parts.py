"""Agent sessions as their recorder writes them, and reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tuner.errors import TraceError
from tuner.traffic.formats.columns import Columns, ReadOptions, assemble
from tuner.traffic.formats.weka import WEKA
from tuner.traffic.traces import Trace, ZeroOutput

ANY = ReadOptions(skip_invalid=True, max_invalid_ratio=1.0)
ONE = ReadOptions(zero_output=ZeroOutput.ONE)

PUBLISHED = [f"trace_{number}.json" for number in ("0028", "0091", "0277", "0358", "0375")]


def asked(t: float, **more: object) -> dict[str, Any]:
    """Return a request of 130 tokens in and 5 out, with two whole blocks hashed."""
    return {"t": t, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2], **more}


def agent(t: float, requests: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": requests, **more}


def session(*requests: object, **more: object) -> dict[str, Any]:
    head = {"id": "s", "block_size": 64, "hash_id_scope": "local"}
    return {**head, **more, "requests": list(requests)}


def written(folder: Path, content: Mapping[str, Any] | str | bytes) -> Path:
    path = folder / "s.json"
    text = json.dumps(content) if isinstance(content, Mapping) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def columns_of(folder: Path, *requests: object, **more: object) -> Columns:
    return WEKA.read(written(folder, session(*requests, **more)), ReadOptions())


def read(path: Path, options: ReadOptions | None = None) -> Trace:
    options = options or ReadOptions()
    columns = WEKA.read(path, options)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return assemble(columns, options, source=path.name, format_name="weka", sha256=sha256)


def message(path: Path, options: ReadOptions | None = None) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        read(path, options)
    assert caught.value.hint
    return caught.value.message.replace(str(path), path.name)


# --- published sessions -----------------------------------------------------------------
