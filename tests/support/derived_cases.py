"""Cases decided by a derived profile alone, on machines as far off it as published ones.

Of each published system, a model on so many GPUs, it is known how much longer its time per
output token was than the tables say, at each number in flight and for prompts of several
lengths. A machine of a case is a derived profile's, off by what one of these systems was off:
its decodes by a factor for their number, its batches with a prompt by another, and every kind
of batch by what the two leave unexplained.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from support.planted_cases import (
    CURRENTS,
    GPU_TRACES,
    ROOT,
    SLO_METRICS,
    grid_of,
    part_of,
)
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.search.objective import Objective
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, read_profile
from tuner.shadow.step_model import Factors, StepModel
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace

POINTS: Final = ROOT / "tests" / "benchmarks" / "results" / "published.json"
PROFILES: Final = ROOT / "profiles" / "gpu"
# What ran with kernels that the tables do not have.
OTHER_KERNELS: Final = "gpt-oss"
# A first token that is so many times as late as was predicted, or the other way round, waited
# for room in a KV cache of which nothing is published: ours.
WAITED: Final = 3.0
TOP_CAP: Final = 1024
# Knots of factors up to a thousand sequences and 16,000 tokens.
_SEQS, _TOKENS = 12, 16


@dataclass(frozen=True, slots=True)
class System:
    """By how much a published system is slower than derived, as ratios.

    `decode` by the sequences in flight, `prompt` of batches with a prompt; `rest` is how far
    apart its points are from what these two say, a standard deviation of logarithms.
    """

    name: str
    gpu: str
    decode: Mapping[int, float]
    prompt: float
    rest: float

    def slowed(self, model: StepModel, rng: np.random.Generator) -> StepModel:
        """Return a step model that is off as the system was, the rest of it drawn."""
        seqs = np.concatenate(([0], 2 ** np.arange(_SEQS - 1)))
        known = sorted(self.decode)
        at = np.interp(
            np.log(np.maximum(seqs, 1)), np.log(known), [self.decode[n] for n in known]
        )
        times = np.full((_SEQS, _TOKENS), self.prompt)
        times[:, 0] = at
        times *= np.exp(self.rest * rng.standard_normal(times.shape))
        tokens = np.concatenate(([0], 2 ** np.arange(_TOKENS - 1)))
        own = model.factors.along(*np.meshgrid(seqs, tokens, indexing="ij"))
        return replace(model, factors=Factors(tuple(map(tuple, (times * own).tolist()))))


def published_systems(path: Path = POINTS) -> list[System]:
    """Return the systems of dense models that were published, by name."""
    rows = defaultdict(list)
    for row in json.loads(path.read_text())["points"]:
        if OTHER_KERNELS not in row["model"]:
            rows[f"{row['model']} {row['tp']}x{row['gpu']}"].append(row)
    return [_system(name, rows[name]) for name in sorted(rows)]


def _system(name: str, rows: Sequence[Mapping[str, Any]]) -> System:
    """Return what a system's points say: each is a mean of decodes alone and beside prompts."""
    waited = [row["ttft_ms"] / row["predicted"]["ttft_ms"] for row in rows]
    kept = [r for r, w in zip(rows, waited, strict=True) if 1 / WAITED < w < WAITED]
    seqs = sorted({row["concurrency"] for row in kept})
    shares, off = np.zeros((len(kept), len(seqs) + 1)), np.zeros(len(kept))
    for i, row in enumerate(kept):
        beside = row["predicted"]["beside_prompts"]
        shares[i, seqs.index(row["concurrency"])], shares[i, -1] = 1 - beside, beside
        off[i] = row["tpot_ms"] / row["predicted"]["tpot_ms"]
    found = np.linalg.lstsq(shares, off, rcond=None)[0].astype(np.float64)
    rest = float(np.std(np.log(off / (shares @ found))))
    decode = dict(zip(seqs, found[:-1].tolist(), strict=True))
    return System(name, str(rows[0]["gpu"]), decode, float(found[-1]), rest)


@dataclass(frozen=True, slots=True)
class DerivedCase:
    """Traffic, a derived profile, and the one that is true.

    `later` is as much traffic of the same recording right after, None where there is none.
    """

    name: str
    trace: Trace
    later: Trace | None
    profile: Profile
    true: Profile
    current: EngineLimits
    slo_metric: tuple[str, str] | None
    slo_share: float
    objective: Objective = Objective.BALANCED
    plan: ReplayPlan = field(default_factory=ReplayPlan)

    @property
    def grid(self) -> list[EngineLimits]:
        """Every setting that may be the best, up to as large a cap as is predicted."""
        return grid_of(self.trace, self.current, TOP_CAP)

    def replayed(
        self,
        limits: EngineLimits,
        times: float = 1.0,
        load: float = 1.0,
        slos: Sequence[Slo] = (),
    ) -> Measurement:
        """Return what so much of the traffic truly comes to at a setting."""
        true = replace(self.true, step_model=self.true.step_model.scaled(times))
        found = Predictor(true).measure([at_load(self.trace, load)], limits, self.plan, slos)
        assert isinstance(found, Measurement), found
        return found

    def on_later(self) -> DerivedCase | None:
        """Return the case with the traffic that came after."""
        return None if self.later is None else replace(self, trace=self.later, later=None)


def derived_case(
    number: int, traces: Mapping[str, Trace], systems: Sequence[System]
) -> DerivedCase:
    """Return the case of a number: its profile, system, traffic and the rest are drawn."""
    rng = np.random.default_rng([20, number])
    paths = sorted(path for path in PROFILES.glob("*.yaml") if OTHER_KERNELS not in path.name)
    path = paths[int(rng.integers(len(paths)))]
    profile, gpu = read_profile(path), path.stem.rpartition(".")[2].lstrip("12348").lstrip("x")
    near = [system for system in systems if system.gpu == gpu] or systems
    system = near[int(rng.integers(len(near)))]
    model = system.slowed(profile.step_model, np.random.default_rng([21, number]))
    names = [name for name in GPU_TRACES if name in traces] or sorted(traces)
    name = names[int(rng.integers(len(names)))]
    whole, requests = traces[name], int(rng.integers(300, 2000))
    first = int(rng.integers(0, max(1, len(whole) - requests)))
    has_later = first + 2 * requests <= len(whole)
    load = round(float(rng.uniform(0.3, 1.4)), 2)
    has_slo = bool(rng.random() < 0.6)
    case = DerivedCase(
        name=f"{number}:{path.stem}:{system.name}:{name.partition('.')[0]}:{load:g}x",
        trace=part_of(whole, first, requests),
        later=part_of(whole, first + requests, requests) if has_later else None,
        profile=profile,
        true=replace(profile, step_model=model, uncertainty=None),
        current=EngineLimits(*CURRENTS[int(rng.integers(len(CURRENTS)))]),
        slo_metric=SLO_METRICS[int(rng.integers(len(SLO_METRICS)))] if has_slo else None,
        slo_share=float(rng.uniform(0.25, 0.75)),
    )
    return _at_load(case, load)


def _at_load(case: DerivedCase, load: float) -> DerivedCase:
    """Return the case with arrivals at a share of what the machine can serve at the most."""
    trace = case.trace
    at_once = replace(case, trace=replace(trace, due_s=np.zeros(len(trace))))
    busy_s = min(at_once.replayed(EngineLimits(cap, 8192)).busy_s for cap in (32, 128, 256))
    pace = busy_s / load / max(trace.duration_s, 1e-9)
    later = case.later and replace(case.later, due_s=case.later.due_s * pace)
    return replace(case, trace=replace(trace, due_s=trace.due_s * pace), later=later)
