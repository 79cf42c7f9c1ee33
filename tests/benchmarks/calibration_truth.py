"""How wrong a calibration leaves the speed of settings, on machines whose truth is known.

    python tests/benchmarks/calibration_truth.py --traces DIR --cases 20 -o results.json

Each case of `planted_truth` is calibrated as a run of `tune` does it, in the mood of a seed,
which is then ended. What the step model says of every batch that the true machine makes at the
current setting, at the best and at four others that lose at most 15 % is held to what those
batches truly take. A level that is off for all of them alike matters little; how far settings
are apart decides. What the model says that it leaves open is held to that: as many times the
standard deviations that it states are the errors, once were it right. Units: logarithms, so
0.01 is 1 %.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.paths import SHARED_TRACES
from support.planted import VirtualClock
from support.planted_cases import LADDER, PlantedCase, Truth, drawn_case, recordings
from support.virtual_time import on_virtual_time
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.replay.loop import replay
from tuner.replay.plan import ReplayPlan
from tuner.run.listener import Listener
from tuner.run.options import TuningOptions
from tuner.run.tune import tune
from tuner.shadow.design import spreads
from tuner.shadow.profiles import Profile, read_profile
from tuner.shadow.speed import Visited
from tuner.shadow.step_model import StepModel
from tuner.traffic.prompts import PromptSource

NEAR_LOSS, OTHERS = 0.15, 4
# Settings of which less is open make the same batches.
SAME_SD = 1e-6


@dataclass(frozen=True)
class Calibrated:
    """What one calibration took, in seconds of the engine, and how far off it is by setting.

    `deviations` are the errors of each other setting less the current one's, over the standard
    deviations that the profile states of the difference.
    """

    case: str
    seed: int
    calibrate_s: float
    off: dict[str, float]
    deviations: list[float]

    @property
    def apart(self) -> float:
        """The largest difference between what two settings are off by."""
        return max(self.off.values()) - min(self.off.values())


class _CalibratedError(Exception):
    """Ends a run as soon as it has a step model."""


class _UntilFitted(Listener):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self.started_s = clock, 0.0

    def note(self, text: str) -> None:
        if text.startswith("engine started in"):
            self.started_s = self._clock.now_s
        if text.startswith("step model from"):
            raise _CalibratedError


def calibrated(
    case: PlantedCase, truth: Truth[PlantedCase], seed: int
) -> tuple[Profile, float]:
    """Return the profile of a calibration, and the engine's seconds that it took."""
    source, current = case.source(seed), case.current
    listener = _UntilFitted(source.clock)
    with tempfile.TemporaryDirectory() as folder:
        options = TuningOptions(
            trace=case.trace,
            config={
                "model": "planted",
                "max-num-seqs": current.max_num_seqs,
                "max-num-batched-tokens": current.max_num_batched_tokens,
            },
            slos=truth.slos,
            budget_s=case.budget_s,
            ladder=LADDER,
            run_dir=Path(folder) / "run",
            seed=seed,
        )
        try:
            with on_virtual_time(source.clock):
                tune(options, listener, source=source)
        except _CalibratedError:
            pass
        profile = read_profile(Path(folder) / "run" / "profile.yaml")
    return profile, source.clock.now_s - listener.started_s


def settings_of(case: PlantedCase, truth: Truth[PlantedCase]) -> list[EngineLimits]:
    """Return the current setting, the best, and others that lose little."""
    best = truth.best()
    near = [s for s in case.grid if truth.loss(s, best) < NEAR_LOSS]
    others = [s for s in near if s not in (case.current, best)]
    others = others[:: max(1, len(others) // OTHERS)][:OTHERS]
    return list(dict.fromkeys((case.current, best, *others)))


def true_steps(case: PlantedCase, limits: EngineLimits) -> StepColumns:
    """Return all batches that the true machine makes at a setting, and what they take."""
    engine = case.truth().start({}, limits)
    log = replay(
        engine, case.trace, PromptSource(case.trace, 1000), ReplayPlan(keep_steps=True)
    )
    if log.kept_steps is None:
        raise AssertionError("steps were asked for")
    return log.kept_steps


def off_by(model: StepModel, steps: StepColumns) -> float:
    """Return the logarithm of what is predicted of all true batches over what they take."""
    predicted_s = float((model.predict_s(steps) * steps.repeats).sum())
    return math.log(predicted_s / float(steps.duration_s.sum()))


def deviations(profile: Profile, settings: Mapping[EngineLimits, StepColumns]) -> list[float]:
    """Return how far off each other is beside the first, in the profile's own deviations.

    Those that make the same batches as the first are left out.
    """
    models = [profile.step_model_at(limits) for limits in settings]
    pairs = [*zip(models, settings.values(), strict=True)]
    if profile.uncertainty is None:
        raise AssertionError("a calibration says what it leaves open")
    off = [off_by(model, columns) for model, columns in pairs]
    means = [Visited.of(model, columns).mean for model, columns in pairs]
    wanted = np.array([mean - means[0] for mean in means[1:]]).reshape(-1, len(means[0]))
    others = zip(off[1:], spreads(profile.uncertainty, wanted).tolist(), strict=True)
    return [(o - off[0]) / sd for o, sd in others if sd > SAME_SD]


def main() -> None:
    """Calibrate the cases and print how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=SHARED_TRACES)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    traces, missing = recordings(args.traces)
    for line in missing:
        print(line)
    rows = []
    for number in range(args.first, args.first + args.cases):
        case = drawn_case(number, traces, asynchronous=args.asynchronous)
        truth = Truth.of(case, args.cache)
        profile, took_s = calibrated(case, truth, args.seed)
        steps = {limits: true_steps(case, limits) for limits in settings_of(case, truth)}
        found = {str(at): off_by(profile.step_model_at(at), s) for at, s in steps.items()}
        off = deviations(profile, steps)
        rows.append(Calibrated(case.name, args.seed, took_s, found, off))
        level = np.mean(list(found.values()))
        print(
            f"{case.name}: {took_s:.0f} s, level {level:+.1%}, apart {rows[-1].apart:.1%}, "
            f"deviations {', '.join(f'{x:+.1f}' for x in off)}",
            flush=True,
        )
    _tell(rows)
    if args.output:
        args.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _tell(rows: list[Calibrated]) -> None:
    figures = {
        "engine seconds": [row.calibrate_s for row in rows],
        "level off": [abs(float(np.mean(list(row.off.values())))) for row in rows],
        "settings apart by": [row.apart for row in rows],
    }
    for name, values in figures.items():
        middle, worst = np.median(values), max(values)
        print(f"{name}: mean {np.mean(values):.3g}, median {middle:.3g}, most {worst:.3g}")
    off = np.array([x for row in rows for x in row.deviations])
    print(
        f"errors in stated deviations: root mean square {np.sqrt(np.mean(off**2)):.2f}, "
        f"within 1.645 {np.mean(np.abs(off) < 1.645):.0%} (90 % were they right), n={len(off)}"
    )


if __name__ == "__main__":
    main()
