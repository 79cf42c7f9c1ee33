"""How often `tune check` is right: false alarms, shifts that pay and are found, and regret.

    python tests/benchmarks/drift_truth.py --traces DIR --pairs 200 -o results.json
    python tests/benchmarks/drift_truth.py --pairs 4

A pair is one recording dealt into two: its time is cut into blocks, and chance gives each block
to the baseline or to the current traffic. So both come from the same traffic, bursts within a
block included, until a shift is planted into the second: a rate of 1.5 times, outputs of twice
the length, arrivals pressed into the first third of every half minute, or prompts that share
no prefix any more. Every other pair has none.

The shadows tune the baseline, `check` says what to do about the current traffic, and a full
re-tune on that traffic says what would have been right. The engine is a step model that is
exactly true, so that its stated error is the least there is. Prints, each with n and a 95 %
interval: unshifted pairs that are called shifted, or are told to re-tune; of the planted shifts
whose re-tune pays 5 % or more, those that were told to re-tune; and the regret of following the
advice against a full re-tune. Of two samples of the same traffic the second is often served
better by another setting than was tuned for the first; so the shifts whose re-tune pays only
since they were planted, and would not have paid without, are counted by themselves too. DIR
holds azure_2023_conv.open.csv, azure_2023_code.open.csv and mooncake_conversation.open.jsonl;
without it the traffic is drawn at random, as in the tests.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.drift_parts import busy_traffic, in_bursts, longer_outputs, without_reuse
from support.shadow_files import crowded
from tuner.drift.check import DriftVerdict, check, without_replay
from tuner.drift.compare import drift_between
from tuner.drift.retune import Retune
from tuner.engine.limits import EngineLimits
from tuner.replay.plan import ReplayPlan
from tuner.search.budget import Aim
from tuner.search.objective import Objective, Score
from tuner.search.space import SearchSpace
from tuner.search.trials import Observation, leader
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, read_profile
from tuner.shadow.step_model import FitError, StepModel
from tuner.stats import Ints
from tuner.traffic.formats import ReadOptions, read_traces
from tuner.traffic.resample import at_load
from tuner.traffic.sketch import sketch_of
from tuner.traffic.traces import Trace

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "azure_2023_conv.open.csv": 30.0,
    "azure_2023_code.open.csv": 30.0,
    "mooncake_conversation.open.jsonl": 10.0,
}
"""The recordings, with the length of the blocks that they are dealt in."""
PAYS_RATIO = 0.05
AIM = Aim(Objective.BALANCED, (), ReplayPlan(), None)
SPACE = SearchSpace(EngineLimits(64, 2048), (8, 16, 32, 64), (2048,), EngineLimits(64, 2048))
# Beyond 32 sequences a step grows fast, so that too high a cap hurts as well.
STEPS = crowded(StepModel.linear(0.007, 0.0001, 0.000012, decode_context_s=1e-9), knee=32)


@dataclass(frozen=True, slots=True)
class Tried:
    """One pair: what was planted, what was said, and what would have been right.

    `regret` is the score of the advised setting over the best's, minus 1; None where the two
    are judged by different metrics, which `is_worse_tier` tells.
    """

    source: str
    planted: str
    verdict: str
    shifts: tuple[str, ...]
    current: str
    best: str
    pays: float | None
    regret: float | None
    is_worse_tier: bool
    paid_anyway: float | None
    """What a full re-tune would have gained had nothing been planted."""

    @property
    def pays_enough(self) -> bool:
        """Whether a re-tune pays at all."""
        return self.pays is not None and self.pays >= PAYS_RATIO

    @property
    def pays_since(self) -> bool:
        """Whether it pays because of what was planted."""
        return self.pays_enough and (self.paid_anyway or 0.0) < PAYS_RATIO


def a_profile() -> Profile:
    """Return the demo engine's profile with steps that are exactly true."""
    kept = read_profile(ROOT / "profiles" / "demo.profile.yaml")
    return replace(
        kept, step_model=STEPS, fit=FitError(1000, 0.0, 0.0, 0.0, 0.0), metric_error_ratio=0.0
    )


def recordings(folder: Path | None) -> Iterator[tuple[str, Trace, float]]:
    """Yield name, trace and block length of each recording."""
    if folder is None:
        yield "random", busy_traffic(0, minutes=20, per_s=4.0, shares=True), 30.0
        return
    for name, block_s in FILES.items():
        trace = read_traces([str(folder / name)], None, ReadOptions())
        yield name.partition(".")[0], trace, block_s


def dealt(trace: Trace, block_s: float, rng: np.random.Generator) -> tuple[Trace, Trace]:
    """Return two halves of a trace, block by block as chance has it, the order kept."""
    blocks = int(trace.duration_s // block_s)
    order = rng.permutation(blocks)
    first, second = np.sort(order[: blocks // 2]), np.sort(order[blocks // 2 :])
    return _joined(trace, first, block_s), _joined(trace, second, block_s)


def _joined(trace: Trace, blocks: Ints, block_s: float) -> Trace:
    rows, due_s = [], []
    for place, block in enumerate(blocks.tolist()):
        low, high = np.searchsorted(trace.due_s, (block * block_s, (block + 1) * block_s))
        rows.append(np.arange(low, high))
        due_s.append(trace.due_s[low:high] + (place - block) * block_s)
    joined = trace.slice_rows(np.concatenate(rows))
    return replace(joined, due_s=np.sort(np.concatenate(due_s)))


PLANTED: dict[str, Callable[[Trace], Trace]] = {
    "rate x1.5": lambda trace: at_load(trace, 1.5),
    "outputs x2": longer_outputs,
    "bursts": lambda trace: in_bursts(trace, period_s=30.0, share=1 / 3),
    "reuse gone": without_reuse,
}


def score_of(seen: Sequence[Observation], limits: EngineLimits) -> Score:
    """Return how a setting was judged; one that makes the batches of another as that one."""
    own = [o for o in seen if o.limits == limits]
    like = [o for o in seen if o.limits.max_num_seqs <= limits.max_num_seqs]
    return (own or sorted(like, key=lambda o: o.limits))[-1].score


@dataclass(frozen=True, slots=True)
class Pair:
    """One recording's two halves; `still` is the second without what was planted into it."""

    source: str
    planted: str
    before: Trace
    still: Trace
    now: Trace


def tried(retune: Retune, pair: Pair, seed: int) -> Tried:
    """Tune for what was, check what is, and compare with a full re-tune."""
    source, planted, before, now = pair.source, pair.planted, pair.before, pair.now
    tuned = leader(retune.rank(before, AIM).observations)
    if tuned is None:
        raise SystemExit(f"{source}: no setting survived the baseline")
    drift = drift_between(sketch_of(before), sketch_of(now), seed)
    retune = replace(retune, space=replace(retune.space, current=tuned.limits))
    found = without_replay(drift, tuned.limits) or check(drift, now, retune, AIM, PAYS_RATIO)
    seen = retune.rank(now, AIM).observations
    best = leader(seen)
    if best is None:
        raise SystemExit(f"{source}: no setting survived {planted}")
    current = score_of(seen, tuned.limits)
    pays = _gain(current, best.score)
    paid_anyway = pays
    if planted != "none":
        seen_still = retune.rank(pair.still, AIM).observations
        best_still = leader(seen_still)
        if best_still is not None:
            paid_anyway = _gain(score_of(seen_still, tuned.limits), best_still.score)
    advised_limits = (
        found.best if found.verdict is DriftVerdict.PAYS and found.best else tuned.limits
    )
    advised = score_of(seen, advised_limits)
    ideal = best.score
    return Tried(
        source=source,
        planted=planted,
        verdict=str(found.verdict),
        shifts=tuple(shift.name for shift in drift.relevant),
        current=str(tuned.limits),
        best=str(best.limits),
        pays=pays,
        regret=None if advised.metric != ideal.metric else advised.value / ideal.value - 1,
        is_worse_tier=advised.tier > ideal.tier,
        paid_anyway=paid_anyway,
    )


def _gain(current: Score, best: Score) -> float | None:
    """Return what a full re-tune gains; 1 where it mends what the current one breaks."""
    if current.tier is not best.tier:
        return 1.0
    return 1 - best.value / current.value if current.metric == best.metric else None


def pairs(folder: Path | None, count: int, seed: int) -> Iterator[Pair]:
    """Yield pairs; every other one has nothing planted."""
    known = list(recordings(folder))
    kinds = list(PLANTED)
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        source, trace, block_s = known[(number // 2) % len(known)]
        before, still = dealt(trace, block_s, rng)
        planted, now = "none", still
        if number % 2:
            usable = [k for k in kinds if k != "reuse gone" or trace.hashes is not None]
            planted = usable[(number // (2 * len(known))) % len(usable)]
            now = PLANTED[planted](still)
        yield Pair(source, planted, before, still, now)


def share(name: str, hits: int, n: int) -> dict[str, float | int | str]:
    """Print and return a share with its interval."""
    if not n:
        print(f"{name}: no pair")
        return {"name": name, "n": 0}
    interval = binomtest(hits, n).proportion_ci(0.95)
    print(f"{name}: {hits} of {n}, {hits / n:.1%} ({interval.low:.1%} … {interval.high:.1%})")
    return {"name": name, "n": n, "hits": hits, "low": interval.low, "high": interval.high}


def summary(found: Sequence[Tried]) -> dict[str, object]:
    """Print and return the figures."""
    still = [t for t in found if t.planted == "none"]
    moved = [t for t in found if t.planted != "none"]
    paying = [t for t in moved if t.pays_enough]
    since = [t for t in moved if t.pays_since]
    pays = str(DriftVerdict.PAYS)
    shares = [
        share("unshifted, called shifted", sum(bool(t.shifts) for t in still), len(still)),
        share("unshifted, told to re-tune", sum(t.verdict == pays for t in still), len(still)),
        share("pays 5 %, told to re-tune", sum(t.verdict == pays for t in paying), len(paying)),
        share("pays 5 %, called shifted", sum(bool(t.shifts) for t in paying), len(paying)),
        share(
            "pays 5 % since planted, told to re-tune",
            sum(t.verdict == pays for t in since),
            len(since),
        ),
        share("advice of a worse tier", sum(t.is_worse_tier for t in found), len(found)),
    ]
    for source in dict.fromkeys(t.source for t in found):
        of_it = [t for t in still if t.source == source]
        share(
            f"  {source}, unshifted, re-tune", sum(t.verdict == pays for t in of_it), len(of_it)
        )
        of_it = [t for t in since if t.source == source]
        share(
            f"  {source}, pays since, re-tune",
            sum(t.verdict == pays for t in of_it),
            len(of_it),
        )
    for kind in PLANTED:
        of_it = [t for t in moved if t.planted == kind]
        share(f"  {kind}, called shifted", sum(bool(t.shifts) for t in of_it), len(of_it))
    regrets = {
        name: [t.regret for t in group if t.regret is not None]
        for name, group in (
            ("told to re-tune", [t for t in found if t.verdict == pays]),
            *(("planted", moved), ("paying", paying), ("all", found)),
        )
    }
    shown = {}
    for name, values in regrets.items():
        if values:
            middle, p95, worst = mean(values), float(np.quantile(values, 0.95)), max(values)
            shown[name] = {"n": len(values), "mean": middle, "p95": p95, "max": worst}
            print(
                f"regret, {name}: mean {middle:.2%}, p95 {p95:.2%}, worst {worst:.2%}, "
                f"n {len(values)}"
            )
    return {"shares": shares, "regret": shown}


def main() -> None:
    """Try all pairs and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    profile, began_s, found = a_profile(), time.monotonic(), []
    retune = Retune(SPACE, Predictor(profile, SPACE.ceiling, given.seed))
    with suppress(KeyboardInterrupt):  # what was tried is told all the same
        for number, pair in enumerate(pairs(given.traces, given.pairs, given.seed)):
            one = tried(retune, pair, given.seed + number)
            found.append(one)
            print(f"{number:>4} {time.monotonic() - began_s:>6.0f} s {one}", file=sys.stderr)
    content = {
        "pairs": len(found),
        "seed": given.seed,
        "wall_s": time.monotonic() - began_s,
        **summary(found),
        "tried": [asdict(one) for one in found],
    }
    if given.output:
        given.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
