"""How often a decision by a profile alone is right, and how sure it was.

    python tests/benchmarks/predicted_truth.py --traces DIR [--first 0] [--cases 100]
                                               [--recorded] [--seed 0] [-o FILE]

Profiles are derived, and machines as far off them as published ones
(tests/support/derived_cases.py); with --recorded they are learnt of what a planted machine did
while it served the traffic at its current limits (tests/support/recorded_cases.py). Nothing
else is measured. The truth is the whole traffic at every setting, and of derived profiles what
comes right after it in the recording, too.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from planted_truth import Figure, is_feasible, of_changes, of_losses, share, write

from support.derived_cases import derived_case, published_systems
from support.foreseen import REFUSED, Foreseen, ForetoldCase, foreseen
from support.paths import SHARED_TRACES
from support.planted_cases import Truth, drawn_case, recordings
from support.planted_judged import INFEASIBLE, Judged
from support.recorded_cases import recorded_case

# Edges of the probabilities that are told together: ours.
EDGES = (0.0, 0.6, 0.7, 0.8, 0.9, 0.97, 1.01)


def tell(found: Sequence[Foreseen]) -> list[Figure]:
    """Print and return the figures of answers, and of what was said of rivals."""
    runs = [one.run for one in found]
    answered = [run for run in runs if run.said.limits is not None]
    nothing = [run for run in runs if run.ended == INFEASIBLE]
    refused = [run for run in runs if run.ended == REFUSED]
    with_slos = [run for run in answered if run.true.breaks_slo is not None]
    rivals = [one.rival for one in found if one.rival is not None]
    later = [one.later for one in found if one.later is not None and one.run.is_change]
    return [
        share("refused to rank by the profile", runs, lambda run: run in refused),
        share("changed", answered, lambda run: run.is_change),
        *of_changes(answered),
        *of_losses(runs, answered),
        share("breaks an SLO", with_slos, lambda run: bool(run.true.breaks_slo)),
        share("nothing feasible said, and something is", nothing, is_feasible),
        share("gain of who is closest within the interval", _bounded(rivals), _is_covered),
        share("a change is better on the traffic after", later, _is_better),
        share("  and gains within that of other hours", _bounded(later), _is_covered),
        *_by_probability("P(better)", found, lambda one: one.p_better, _rival_is_better),
        *_by_probability("P(SLO)", found, lambda one: one.p_slo, _keeps_slo),
    ]


def _bounded(runs: Sequence[Judged]) -> list[Judged]:
    return [run for run in runs if run.is_covered is not None]


def _is_covered(run: Judged) -> bool:
    return bool(run.is_covered)


def _is_better(run: Judged) -> bool:
    return bool(run.true.is_better)


def _rival_is_better(one: Foreseen) -> bool | None:
    return None if one.rival is None else one.rival.true.is_better


def _keeps_slo(one: Foreseen) -> bool | None:
    return None if one.run.true.breaks_slo is None else not one.run.true.breaks_slo


def _by_probability(
    name: str,
    found: Sequence[Foreseen],
    told: Callable[[Foreseen], float | None],
    true: Callable[[Foreseen], bool | None],
) -> list[Figure]:
    """Print and return how often what was told with a probability was so."""
    pairs = [
        (p, holds)
        for one in found
        if (p := told(one)) is not None and (holds := true(one)) is not None
    ]
    table: list[Figure] = []
    for low, high in pairwise(EDGES):
        inside = [(p, holds) for p, holds in pairs if low <= p < high]
        if not inside:
            continue
        mean = float(np.mean([p for p, _ in inside]))
        hits = sum(holds for _, holds in inside)
        print(f"{name} told {mean:.2f}, true {hits / len(inside):.2f}, n {len(inside)}")
        table.append({"name": name, "told": mean, "hits": hits, "n": len(inside)})
    return table


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=SHARED_TRACES)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--recorded", action="store_true", help="profiles of what was served")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="of what is true of recorded machines")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    traces, missing = recordings(args.traces)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    systems, found = published_systems(), []
    for number in range(args.first, args.first + args.cases):
        truth: Truth[ForetoldCase]
        if args.recorded:
            planted = drawn_case(number, traces)
            truth = Truth.of(planted, args.cache).with_case(recorded_case(planted, args.seed))
        else:
            truth = Truth.of(derived_case(number, traces, systems))
        one = foreseen(truth, args.seed)
        truth.keep()
        run = one.run
        print(
            f"{run.case}: {run.current} {run.said.verdict} {run.said.limits}, best "
            f"{run.true.best}, loss {run.true.loss} (current {run.true.could_gain:.3f})",
            file=sys.stderr,
            flush=True,
        )
        found.append(one)
    table = tell(found)
    if args.output:
        write(args.output, table, found)


if __name__ == "__main__":
    main()
