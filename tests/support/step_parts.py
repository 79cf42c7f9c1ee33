"""Step models, and the steps of engines that follow them, with noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tuner.engine.protocol import Batch
from tuner.engine.shape import Graphs
from tuner.engine.steps import StepColumns
from tuner.shadow.step_model import SCALARS, StepModel
from tuner.stats import Floats

LINEAR = StepModel.linear(
    4e-3,
    3e-5,
    2e-5,
    prefill_base_s=1e-3,
    decode_context_s=1e-8,
    prefill_context_s=2e-10,
    tidy_s=1e-4,
)
KNEE = replace(LINEAR, token_knots=(0, 64), token_slopes_s=(0.0, 3e-5))
CAPTURED = replace(
    LINEAR,
    token_slopes_s=(6e-5,),
    eager_s=3e-3,
    graphs=Graphs((1, 2, 4, 8, 16, 32, 64, 128, 256)),
)
LIMITS = ((8, 512), (32, 2048), (64, 512), (128, 4096))

Noise = Callable[[np.random.Generator, int], Floats]


def columns(**given_columns: object) -> StepColumns:
    """Return columns of which those not given are ones for repeats and zero otherwise."""
    size = len(np.atleast_1d(np.asarray(given_columns["duration_s"])))
    made = {f.name: np.zeros(size) for f in fields(StepColumns)} | {"repeats": np.ones(size)}
    for name, values in given_columns.items():
        made[name] = np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), size))
    return StepColumns(**made)


def lognormal(sigma: float) -> Noise:
    return lambda rng, n: rng.lognormal(-(sigma**2) / 2, sigma, n)


def uniform(half_width: float) -> Noise:
    return lambda rng, n: rng.uniform(1 - half_width, 1 + half_width, n)


def batches(
    rng: np.random.Generator, n: int, seqs: int, budget: int, spread: float = 150.0
) -> StepColumns:
    """Return batches such as a replay makes under the limits, each lasting one second."""
    decode = np.round(seqs * rng.beta(2, 1.2, n))
    prefill = np.minimum(np.ceil(rng.lognormal(5, 1.2, n)), budget - decode)
    prefill = np.where(rng.random(n) < 0.3, budget - decode, prefill)  # as when prompts wait
    prefill = np.where((rng.random(n) < 0.25) | (decode == 0), prefill, 0.0)
    return columns(
        duration_s=np.ones(n),
        decode_seqs=decode,
        prefill_tokens=prefill,
        decode_context_tokens=np.round(decode * rng.lognormal(6, 0.3, n)),
        decode_spread_tokens=np.sqrt(decode) * spread * rng.lognormal(0, 0.5, n),
        prefill_context_tokens=np.round(prefill**2 / 2 + prefill * rng.integers(0, 500, n)),
    )


def replays(
    truth: StepModel,
    noise: Noise,
    *,
    seed: int = 0,
    steps: int = 3000,
    stalled: float = 0.0,
    spread: float = 150.0,
) -> list[StepColumns]:
    """Return a measured replay for each of LIMITS, a share of whose steps stalled 5 to 20x."""
    rng = np.random.default_rng(seed)
    measured = []
    for seqs, budget in LIMITS:
        plain = batches(rng, steps, seqs, budget, spread)
        stretch = np.where(rng.random(steps) < stalled, rng.uniform(5, 20, steps), 1.0)
        took_s = truth.predict_s(plain) * noise(rng, steps) * stretch
        measured.append(replace(plain, duration_s=took_s))
    return measured


def off_ratio(found: StepModel, truth: StepModel, *, seed: int = 99) -> Floats:
    """Return the relative errors on fresh batches within all of LIMITS."""
    fresh = batches(np.random.default_rng(seed), 4000, 96, 1024)
    return np.abs(found.predict_s(fresh) / truth.predict_s(fresh) - 1.0)


def batch_of(steps: StepColumns, row: int) -> Batch:
    """Return the row as the scalar interface wants it."""
    names = ("decode_seqs", "prefill_tokens", "decode_context_tokens", "prefill_context_tokens")
    counts = {name: int(getattr(steps, name)[row]) for name in names}
    spread = float(steps.decode_spread_tokens[row])
    return Batch(
        **counts, prefill_seqs=0, preempted=0, cached_tokens=0, decode_spread_tokens=spread
    )


def batch(
    decode: int, prefill: int, decode_context: int, prefill_context: int, spread: float = 0.0
) -> Batch:
    return Batch(decode, prefill, 0, decode_context, prefill_context, 0, 0, spread)


coefficients = st.floats(0.0, 1.0)


@st.composite
def models(draw: st.DrawFn) -> StepModel:
    more = draw(st.lists(st.integers(1, 300), unique=True, max_size=4))
    size = len(more) + 1
    slopes_s = draw(st.lists(coefficients, min_size=size, max_size=size))
    sizes = draw(st.lists(st.integers(1, 200), unique=True, max_size=5))
    scalars: dict[str, Any] = {name: draw(coefficients) for name in (*SCALARS, "tidy_s")}
    return replace(
        LINEAR,
        token_knots=(0, *sorted(more)),
        token_slopes_s=tuple(slopes_s),
        graphs=Graphs(tuple(sorted(sizes)), has_mixed=draw(st.booleans())),
        **scalars,
    )


counts = st.tuples(
    *(st.integers(0, 400), st.integers(0, 400), st.integers(0, 10**5), st.integers(0, 10**5)),
    st.integers(0, 10**4),
)
