"""How often `tune` is right on machines whose truth is known, and what being wrong costs.

    python tests/benchmarks/planted_truth.py --traces DIR --cache DIR --runs 200 -o results.json
    python tests/benchmarks/planted_truth.py --asynchronous --traces DIR --cache DIR --runs 200
    python tests/benchmarks/planted_truth.py --budget 265 --traces DIR --cache DIR --runs 200
    python tests/benchmarks/planted_truth.py --method live --traces DIR --cache DIR --runs 80
    python tests/benchmarks/planted_truth.py --drafts --traces DIR --cache DIR --runs 80
    python tests/benchmarks/planted_truth.py --closed --traces DIR --cache DIR --runs 80
    python tests/benchmarks/planted_truth.py --objective latency --traces DIR --runs 80
    python tests/benchmarks/planted_truth.py --only 3 --cache DIR

A case is a slice of a recording, a machine, its mood, a load, a KV cache, SLOs or none, and a
current configuration (`support/planted_cases.py`). The machine schedules as vLLM does
(`support/planted.py`); its steps take what the tool's step model cannot say, times drift,
noise, stalls and bursts of other work (`support/planted_machine.py`). With --asynchronous every
machine is a GPU whose host launches the next batch while one is computed, as vLLM's does by
default: slower than the device where it launches without a graph; with --drafts every one
verifies one to four drafts beside each token, with --closed a number of requests is kept in
flight. A run is the whole of
`tune` on it, with a seed of its own, on time that the engine alone moves; how long it may take
is drawn with the case unless --budget says it. The truth is the whole traffic at every setting
on the machine at its mean speed; what is said to hold at any speed, or least, holds 2 % above
and below it too, since near overload one replay is chaotic.

Shares have Wilson intervals, means and quantiles are of cases drawn again, all of 90 %. Runs of
one case have something in common, which the intervals of shares leave out. DIR holds recordings
named in `planted_cases`; where they are missing, traffic of the repository stands in.
"""

# ruff: noqa: T201 - a benchmark prints

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.paths import SHARED_TRACES
from support.planted_cases import CLOSED, PlantedCase, Truth, apart, drawn_case, recordings
from support.planted_judged import INFEASIBLE, PAYS_RATIO, Judged, Known, judged_run
from support.planted_machine import ASYNCHRONOUS
from tuner.run.listener import Listener
from tuner.run.options import Method
from tuner.search.objective import Objective, Tier
from tuner.traffic.traces import Trace

ROOT = Path(__file__).resolve().parents[2]
CONFIDENCE = 0.90
# Cases drawn again for an interval: ours.
DRAWS = 2000


Figure = dict[str, Any]
"""A figure by its name, with n, its value or share, and its interval."""


class Printer(Listener):
    """Prints what a run says of itself."""

    def note(self, text: str) -> None:
        """Print a sentence."""
        print(f"  {text}")

    def trial_ended(self, trial: Any, left_s: float) -> None:
        """Print a trial."""
        what = f"{trial.phase} {trial.limits}"
        print(f"  #{trial.number} {what}: {trial.tier} {trial.value}, {left_s:.0f} s left")


def share(name: str, rows: Sequence[Judged], holds: Callable[[Judged], bool]) -> Figure:
    """Print and return a share with its interval."""
    n, hits = len(rows), sum(map(holds, rows))
    return _share(name, hits, n)


def _share(name: str, hits: int, n: int) -> Figure:
    if not n:
        print(f"{name:<58} none")
        return {"name": name, "n": 0}
    low, high = binomtest(hits, n).proportion_ci(CONFIDENCE, "wilson")
    print(f"{name:<58} {hits / n:7.1%}  ({low:.1%} … {high:.1%})  {hits} of {n}")
    return {"name": name, "n": n, "hits": hits, "share": hits / n, "low": low, "high": high}


def statistic(
    name: str,
    rows: Sequence[Judged],
    value: Callable[[Judged], float | None],
    of: Callable[[Any], Any],
    unit: str = "%",
) -> Figure:
    """Print and return a statistic, with the interval that cases drawn again give."""
    by_case: dict[str, list[float]] = {}
    for row in rows:
        if (found := value(row)) is not None:
            by_case.setdefault(row.case, []).append(found)
    groups = [np.array(values) for values in by_case.values()]
    n = sum(len(values) for values in groups)
    if not n:
        print(f"{name:<58} none")
        return {"name": name, "n": 0}
    rng = np.random.default_rng(0)
    drawn = [
        float(
            of(np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))]))
        )
        for _ in range(DRAWS)
    ]
    point = float(of(np.concatenate(groups)))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    show = "{:7.1%}" if unit == "%" else "{:7.0f}"
    low_text, high_text = show.format(low).strip(), show.format(high).strip()
    print(f"{name:<58} {show.format(point)}  ({low_text} … {high_text})  n={n}")
    return {
        "name": name,
        "n": n,
        "cases": len(groups),
        "value": point,
        "low": low,
        "high": high,
    }


def figures(rows: Sequence[Judged], truths: Sequence[Truth[Any]]) -> list[Figure]:
    """Print and return the table."""
    answered = [row for row in rows if row.said.limits is not None]
    nothing = [row for row in rows if row.ended == INFEASIBLE]
    errors = [row for row in rows if row.said.limits is None and row.ended != INFEASIBLE]
    with_slos = [row for row in answered if row.true.breaks_slo is not None]
    table = [
        _share("ended in an error", len(errors), len(rows)),
        share("changed", answered, lambda r: r.is_change),
        *of_changes(answered),
        *of_losses(rows, answered),
        share("breaks an SLO, told to meet it", with_slos, lambda r: bool(r.true.breaks_slo)),
        share("  and at any speed", with_slos, lambda r: bool(r.true.surely_breaks_slo)),
        share("nothing feasible said, and something is", nothing, is_feasible),
        share("answered by prediction, not raced", answered, lambda r: r.said.is_predicted),
        statistic("engine seconds, median", rows, lambda r: r.engine_s, np.median, "s"),
        statistic("engine seconds, mean", rows, lambda r: r.engine_s, np.mean, "s"),
        statistic(
            "engine seconds of the budget, p95", rows, lambda r: r.engine_s / r.budget_s, _p95
        ),
        _seed_pairs(answered, truths),
    ]
    took_s = [row.took_s for row in rows]
    print(f"real seconds a run: {np.mean(took_s):.1f} in the mean, {max(took_s):.1f} at most")
    return table


def of_changes(answered: Sequence[Judged]) -> list[Figure]:
    """Return whether changes were gains, and of the size that was told."""
    changed = [row for row in answered if row.is_change]
    bounded = [row for row in changed if row.is_covered is not None]
    whole = [row for row in bounded if not row.is_windowed]
    return [
        share("false change, of all that changed", changed, lambda r: not r.true.is_better),
        share("  and false at any speed", changed, lambda r: not r.true.is_ever_better),
        share("false change, of all", answered, lambda r: r.is_change and not r.true.is_better),
        statistic("told gain less the true one, mean", changed, lambda r: r.told_off, np.mean),
        statistic("told gain off the true one, mean", changed, _told_off, np.mean),
        share("true gain within the told interval", bounded, lambda r: bool(r.is_covered)),
        share("  where it is of the whole trace", whole, lambda r: bool(r.is_covered)),
    ]


def of_losses(rows: Sequence[Judged], answered: Sequence[Judged]) -> list[Figure]:
    """Return what the answers cost against the best there was."""
    could = [row for row in answered if row.true.could_gain >= PAYS_RATIO]
    surely = [row for row in answered if row.true.surely_could_gain >= PAYS_RATIO]
    return [
        share("kept where 5 % or more was to be had", could, lambda r: not r.is_change),
        share("  and was to be had at any speed", surely, lambda r: not r.is_change),
        statistic("loss to the true best, mean", answered, lambda r: r.true.loss, np.mean),
        statistic("  at the speed at which it is least", answered, _sure_loss, np.mean),
        statistic("loss to the true best, p95", answered, lambda r: r.true.loss, _p95),
        statistic("  at the speed at which it is least", answered, _sure_loss, _p95),
        statistic(
            "loss of the current settings, mean", rows, lambda r: r.true.could_gain, np.mean
        ),
        statistic(
            "requests a second lost, where nothing sustains", answered, _rate_loss, np.mean
        ),
        share("of a worse tier than the true best", answered, _is_worse_tier),
    ]


def _sure_loss(row: Judged) -> float | None:
    return row.true.sure_loss


def _rate_loss(row: Judged) -> float | None:
    return row.true.rate_loss


def _is_worse_tier(row: Judged) -> bool:
    return row.true.tier is not None and row.true.tier > row.true.best_tier


def is_feasible(row: Judged) -> bool:
    return row.true.best_tier < Tier.BREAKS_SLO


def _told_off(row: Judged) -> float | None:
    return None if row.told_off is None else abs(row.told_off)


def _p95(values: Any) -> float:
    return float(np.quantile(values, 0.95))


def _seed_pairs(rows: Sequence[Judged], truths: Sequence[Truth[Any]]) -> Figure:
    """Compare what seeds of one case recommend."""
    n = hits = 0
    for truth in truths:
        of_case = [row.said.limits for row in rows if row.case == truth.case.name]
        said = [limits for limits in of_case if limits is not None]
        for pair in combinations(said, 2):
            n, hits = n + 1, hits + apart(truth, pair)
    return _share("seeds of one case recommend what is 2 % apart", hits, n)


def run_all(args: argparse.Namespace, numbers: Sequence[int]) -> None:
    """Make all the runs, each case's first seed before any second, and tell the figures."""
    traces, missing = recordings(args.traces)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    earlier = [row for path in args.also or () for row in _read(path)]
    drawn = {row.case: _drawn(row, traces) for row in earlier}
    truths = {name: Truth.of(case, args.cache) for name, case in sorted(drawn.items())}
    # What was said stands; what is true of it is told anew.
    rows = [replace(row, true=Known.of(truths[row.case], row.said)) for row in earlier]
    began_s = time.monotonic()
    for number in range(args.runs):
        if time.monotonic() - began_s > args.most_s:
            print(f"stopped after {number} runs: {args.most_s:g} s are over", file=sys.stderr)
            break
        case = drawn_case(
            numbers[number % len(numbers)],
            traces,
            asynchronous=args.asynchronous,
            has_drafts=args.drafts,
            is_closed=args.closed,
            objective=args.objective,
        )
        seed = args.seed + number // len(numbers)
        truth = truths.get(case.name) or Truth.of(case, args.cache)
        truths[case.name] = truth
        if args.budget is not None:
            truth.case = replace(truth.case, budget_s=args.budget)
        listener = Printer() if args.only is not None else None
        row = judged_run(truth, seed, listener, args.method)
        truth.keep()
        rows.append(row)
        print(
            f"{number + 1}/{args.runs} {row.case} seed {seed}: {row.ended}, "
            f"{row.said.verdict} {row.said.limits}, best {row.true.best}, loss "
            f"{_percent(row.true.loss)} (current {_percent(row.true.could_gain)}), "
            f"{row.engine_s:.0f} engine s, {row.took_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    table = figures(rows, list(truths.values()))
    ended_as = Counter(row.ended for row in rows)
    if args.output:
        took_s = round(sum(row.took_s for row in rows), 1)
        write(args.output, table, rows, took_s=took_s, ended=dict(ended_as))
    for ended, count in ended_as.most_common():
        print(f"{count} ended: {ended}")


def _drawn(row: Judged, traces: Mapping[str, Trace]) -> PlantedCase:
    """Return the case of an earlier run."""
    number, machine, *words = row.case.split(":")
    asked = [word for word in words if word in set(Objective)]
    return drawn_case(
        int(number),
        traces,
        asynchronous=machine.endswith(ASYNCHRONOUS),
        has_drafts=any(word.endswith("drafts") for word in words),
        is_closed=any(word.endswith(CLOSED) for word in words),
        objective=Objective(asked[0]) if asked else Objective.BALANCED,
    )


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.1%}"


def _read(path: Path) -> list[Judged]:
    """Return the runs of an earlier result."""
    return msgspec.convert(json.loads(path.read_text())["runs"], list[Judged])


def write(path: Path, table: Sequence[Any], rows: Sequence[Any], **told: object) -> None:
    """Write figures and what else is told, and the runs that they are of, one to a line."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(head, capture_output=True, text=True, check=False)
    content = {
        "command": " ".join(Path(word).name for word in sys.argv),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": found.stdout.strip(),
        "confidence": CONFIDENCE,
        **told,
        "figures": table,
    }
    runs = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
    text = json.dumps(content, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n "runs": [\n  {runs}\n ]\n}}\n')


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=SHARED_TRACES)
    parser.add_argument("--runs", type=int, help="100, or 1 with --only")
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--drafts", action="store_true", help="speculative decoding in all")
    parser.add_argument("--closed", action="store_true", help="4 to 128 in flight in all")
    parser.add_argument("--objective", type=Objective, default=Objective.BALANCED)
    parser.add_argument("--method", type=Method, default=Method.AUTO, help="auto or live")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, metavar="S", help="of all runs, not the drawn")
    parser.add_argument("--most-s", type=float, default=float("inf"))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--also", type=Path, action="append", help="count these results too")
    parser.add_argument("--only", type=int, metavar="CASE")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    args.runs = args.runs or (100 if args.only is None else 1)
    drawn = range(args.first, args.first + args.cases)
    run_all(args, drawn if args.only is None else [args.only])


if __name__ == "__main__":
    main()
