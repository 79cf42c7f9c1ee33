"""Files that a command on the shadow needs: a profile, traffic, a configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.shadow_parts import a_shape
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.shadow.profiles import KvStart, Profile, write_profile
from tuner.shadow.step_model import Factors, FitError, StepModel
from tuner.traffic.formats import ReadOptions, read_traces
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch


def crowded(model: StepModel, knee: int = 24, times: float = 6.0) -> StepModel:
    """Return the model of which each sequence beyond a knee costs so many times as much."""
    seqs = np.array([0, *(2**i for i in range(10))], dtype=np.float64)
    decode_s = model.seq_s + model.token_slopes_s[0]
    beyond_s = (times - 1) * decode_s * np.maximum(seqs - knee, 0.0)
    rows = 1 + beyond_s / (model.base_s + decode_s * seqs)
    return replace(model, factors=Factors(tuple((f, f) for f in rows.tolist())))


def a_profile() -> Profile:
    """Return the profile of an engine that there is not; steps grow with the batch."""
    return Profile(
        shape=a_shape(prefix_caching=False),
        kv_starts=(KvStart(EngineLimits(128, 4096), 20_000),),
        step_model=crowded(StepModel.linear(0.004, 0.0001, 0.00003, decode_context_s=1e-9)),
        fit=FitError(1000, 0.01, 0.01, 0.01, 0.0),
        metric_error_ratio=0.01,
        made_at="2026-01-31T12:00:00Z",
        calibrated_on=("8/512",),
        current_limits=EngineLimits(4, 512),
        serve_values={"model": "none"},
    )


def a_trace_file(path: Path, requests: int, per_s: float = 40.0) -> Path:
    """Write traffic that keeps a few dozen requests running, unless it comes more slowly."""
    trace = steady(requests, per_s=per_s, prompt=200, output=80, seed=3)
    rows = zip(trace.due_s, trace.prompt_tokens, trace.output_tokens, strict=True)
    lines = [
        json.dumps({"arrived_at_s": float(t), "input_length": int(p), "output_length": int(o)})
        for t, p, o in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with a profile, the traffic it was made for, and a file in use."""
    return furnished(tmp_path)


def furnished(folder: Path) -> Path:
    """Fill a folder as `home` is."""
    write_profile(folder / "profile.yaml", a_profile())
    path = a_trace_file(folder / "before.jsonl", 2600, per_s=4.0)
    before = read_traces([str(path)], None, ReadOptions())
    write_sketch(folder / TRAFFIC_FILE, sketch_of(before))
    served = "model: none\nmax-num-seqs: 4\nmax-num-batched-tokens: 512\n"
    (folder / "best.yaml").write_text(served)
    return folder
