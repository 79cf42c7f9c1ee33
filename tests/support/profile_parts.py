"""A profile for tests, random ones, and what becomes of a damaged file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape, Graphs
from tuner.errors import UsageError
from tuner.shadow.profiles import KvStart, Profile, read_profile, write_profile
from tuner.shadow.step_model import NO_HOST, SCALARS, FitError, Host, StepModel

SHAPE = EngineShape(
    model="org/model-7b",
    device="NVIDIA H100 80GB HBM3",
    dtype="bfloat16",
    vllm_version="0.20.2",
    parallelism={"tensor_parallel_size": 1},
    vocab_size=128_000,
    max_model_len=8192,
    block_size=16,
    kv_kind="full_attention",
    prefix_caching=True,
    asynchronous=True,
    captured_sizes=(1, 2, 4, 8),
    scheduler={"policy": "fcfs", "enable_chunked_prefill": True, "a_ratio": 1.0, "none": None},
)
MODEL = StepModel(
    token_knots=(0, 64, 512),
    token_slopes_s=(0.0, 1e-05, 1.1e-05),
    base_s=0.0061,
    seq_s=1.5e-05,
    eager_s=0.0003,
    prefill_base_s=0.0005,
    decode_context_s=1.25e-08,
    mixed_context_s=5e-09,
    spread_s=2e-08,
    mixed_spread_s=1e-08,
    prefill_context_s=3e-11,
    tidy_s=1e-05,
    graphs=SHAPE.graphs,
)
FIT = FitError(
    steps=12_000,
    step_mape_ratio=0.031,
    heldout_steps_ratio=0.004,
    heldout_config_ratio=0.02,
    distorted_ratio=0.01,
)
PROFILE = Profile(
    shape=SHAPE,
    kv_starts=(
        KvStart(EngineLimits(8, 512), 1000),
        KvStart(EngineLimits(32, 2048), 900),
    ),
    step_model=MODEL,
    fit=FIT,
    metric_error_ratio=0.05,
    made_at="2026-01-31T12:00:00Z",
    calibrated_on=("8/512", "32/2048"),
    current_limits=EngineLimits(32, 2048),
    serve_values={"model": "org/model-7b", "max-num-seqs": 32},
)

counts = st.integers(1, 2**40)
amounts = st.floats(0, 1e300)
texts = st.text(max_size=120)
limits = st.tuples(st.integers(1, 4096), st.integers(0, 2**20)).map(
    lambda pair: EngineLimits(pair[0], sum(pair))
)
sizes = st.lists(counts, max_size=20, unique=True).map(lambda some: tuple(sorted(some)))
plain = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
# A key that names a secret has its value hidden, so keys are drawn that cannot.
harmless = st.text("bdfgx-_ ~:#'\"1é", min_size=1, max_size=12)
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(harmless, inner)
)


@st.composite
def step_models(draw: st.DrawFn, graphs: Graphs) -> StepModel:
    knots = (0, *draw(sizes))
    slopes_s = draw(st.lists(st.floats(0, 1e3), min_size=len(knots), max_size=len(knots)))
    scalars: dict[str, Any] = {name: draw(amounts) for name in (*SCALARS, "tidy_s")}
    host = draw(st.just(NO_HOST) | st.builds(Host, *[amounts] * 6))
    return StepModel(
        token_knots=knots, token_slopes_s=tuple(slopes_s), graphs=graphs, host=host, **scalars
    )


shapes = st.builds(
    EngineShape,
    model=texts,
    device=texts,
    dtype=texts,
    vllm_version=texts,
    parallelism=st.dictionaries(texts, st.integers(), max_size=3),
    vocab_size=counts,
    max_model_len=counts,
    block_size=counts,
    kv_kind=texts,
    prefix_caching=st.booleans(),
    asynchronous=st.booleans(),
    captured_sizes=sizes,
    scheduler=st.dictionaries(texts, plain | st.none(), max_size=4),
    captures_mixed=st.booleans(),
)
profiles = shapes.flatmap(
    lambda shape: st.builds(
        Profile,
        shape=st.just(shape),
        kv_starts=st.lists(st.builds(KvStart, limits, counts), min_size=1, max_size=4).map(
            tuple
        ),
        step_model=step_models(shape.graphs),
        fit=st.builds(
            FitError,
            steps=counts,
            step_mape_ratio=amounts,
            heldout_steps_ratio=amounts,
            heldout_config_ratio=st.none() | amounts,
            distorted_ratio=st.floats(0, 1),
        ),
        metric_error_ratio=st.none() | amounts,
        made_at=st.datetimes().map(lambda at: at.isoformat(timespec="seconds") + "Z"),
        calibrated_on=st.lists(limits.map(str), max_size=3).map(tuple),
        current_limits=limits,
        serve_values=st.dictionaries(harmless, nested, max_size=4),
    )
)


def written(folder: Path, profile: Profile = PROFILE) -> Path:
    path = folder / "profile.yaml"
    write_profile(path, profile)
    return path


def damaged(folder: Path, damage: Callable[[dict[str, Any]], object]) -> Path:
    """Return a written profile's path after its mapping was damaged in place."""
    path = written(folder)
    data = yaml.safe_load(path.read_text())
    damage(data)
    path.write_text(yaml.safe_dump(data))
    return path


def refusal(path: Path) -> str:
    """Return the message of the refusal, which names the file and says what to do."""
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert str(path) in caught.value.message
    assert "every live run writes profile.yaml" in caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value.message
