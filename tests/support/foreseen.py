"""A run that predicts alone, and its answer held to what is true."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from support.planted_cases import KnownCase, Truth
from support.planted_judged import INFEASIBLE, Judged, Known, Said
from tuner.errors import NoFeasibleConfigError, ShadowError
from tuner.run.options import Method, TuningOptions
from tuner.run.records import Advice
from tuner.run.result import RunResult, read_result
from tuner.run.tune import tune
from tuner.search.objective import Bounds, moved, moved_bounds
from tuner.shadow.profiles import Profile

BUDGET_S: Final = 600.0
REFUSED: Final = "too wrong to rank by"


class ForetoldCase(KnownCase, Protocol):
    """A case that is decided by a profile alone."""

    @property
    def profile(self) -> Profile:
        """What is known of the machine."""

    def on_later(self) -> ForetoldCase | None:
        """Return the case with the traffic that came after, None where there is none."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A run that predicts alone, what is true of it, and how sure it was.

    `rival` is what it changed to, or was closest to changing to, held to the truth as if it had
    been recommended, by the interval of this traffic; `later` is the same on the traffic after,
    by the interval of other hours. None where there is no rival, and no such traffic.
    """

    run: Judged
    rival: Judged | None = None
    later: Judged | None = None
    p_better: float | None = None
    p_slo: float | None = None


def foreseen(truth: Truth[ForetoldCase], seed: int = 0) -> Foreseen:
    """Decide by the case's profile alone, and hold the answer to the truth."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ended, result = _decided(truth, Path(folder) / "run", seed)
    took_s = time.perf_counter() - began_s

    def judged(truth: Truth[ForetoldCase], said: Said) -> Judged:
        case = truth.case
        parts = (case.name, seed, ended, case.current, said, Known.of(truth, said))
        return Judged(*parts, budget_s=BUDGET_S, engine_s=0.0, took_s=took_s)

    said = Said() if result is None else Said.of(result)
    advice = None if result is None else result.recommendation
    if advice is None or advice.odds is None:
        return Foreseen(judged(truth, said))
    found = Foreseen(judged(truth, said), None, None, advice.odds.p_better, advice.odds.p_slo)
    if advice.shown == truth.case.current or advice.gain_ratio is None:
        return found
    here, elsewhere = (
        _told_of(said, advice, bounds)
        for bounds in (advice.gain_here_interval, advice.gain_interval)
    )
    later = truth.case.on_later()
    after = None if later is None else judged(Truth(later, slos=truth.slos), elsewhere)
    return replace(found, rival=judged(truth, here), later=after)


def _told_of(said: Said, advice: Advice, bounds: Bounds | None) -> Said:
    """Return what was said of the setting whose gain is shown, with an interval of it."""
    low, high = moved_bounds(advice.gain_metric, bounds or (None, None))
    return replace(
        said,
        verdict="change",
        limits=advice.shown,
        gain=moved(advice.gain_metric, advice.gain_ratio or 0.0),
        gain_low=low,
        gain_high=high,
    )


def _decided(
    truth: Truth[ForetoldCase], run_dir: Path, seed: int
) -> tuple[str, RunResult | None]:
    """Return how a run ended, and its result if it has one."""
    case = truth.case
    limits = {
        "max-num-seqs": case.current.max_num_seqs,
        "max-num-batched-tokens": case.current.max_num_batched_tokens,
    }
    options = TuningOptions(
        trace=case.trace,
        config={**case.profile.serve_values, **limits},
        slos=truth.slos,
        objective=case.objective,
        budget_s=BUDGET_S,
        method=Method.SHADOW,
        profile=case.profile,
        run_dir=run_dir,
        seed=seed,
    )
    try:
        return "complete", tune(options)
    except NoFeasibleConfigError:
        return INFEASIBLE, read_result(run_dir)
    except ShadowError:
        return REFUSED, None
