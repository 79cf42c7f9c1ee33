"""The live end of a run: the race of the finalists, and the winner on a cold engine.

Who races is decided by the searches, who has won by `confirm`; here the replays are made, in
turns, until the evidence or the time is through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import CutRule
from tuner.replay.series import TimelineRecord, timeline_record
from tuner.run.state import RunState
from tuner.run.time_plan import cold_cost_s
from tuner.search.objective import Score, Tier
from tuner.search.race import RaceDecision, RaceVerdict, decide, next_run
from tuner.search.trials import TIE_RATIO, Phase

# A cold engine's gain that is this far from the race's is told: ours, as much as two single
# replays may differ by.
COLD_DIFFERS_RATIO = 0.10


@dataclass(frozen=True, slots=True)
class Cold:
    """What the winner and the present configuration measured on engines of their own.

    `ratio` is winner / present of the score's value, None where the two cannot be compared, as
    when only one of them meets the SLOs and they are judged by different metrics.
    """

    winner: Score
    present: Score
    ratio: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the comparison for result.json."""
        return {
            "metric": self.winner.metric,
            "winner": self.winner.value,
            "present_metric": self.present.metric,
            "present": self.present.value,
            "ratio": self.ratio,
        }


def race(
    run: RunState,
    field: Sequence[EngineLimits],
    reserved_s: float = 0.0,
    on_log: Callable[[EngineLimits, ReplayLog], None] | None = None,
    until_round: int | None = None,
) -> RaceDecision:
    """Replay the finalists in turns until they are separated or the time is over.

    `reserved_s` is left for what comes after. on_log hears of the logs of the first round, of
    which the timelines are kept.

    Raises: EngineError when the engine cannot be kept alive.
    """
    began_s = time.monotonic()
    while True:
        runs = run.journal.race_runs()
        following = next_run(runs, field, run.space.present, run.attempt)
        is_over = _is_over(run, following, reserved_s)
        if following is None or is_over or _is_beyond(following[0], until_round):
            if is_over and len(field) > 1:
                run.caveats.add(Caveat.BUDGET_SPENT)
            run.walls_s["race"] = run.walls_s.get("race", 0.0) + time.monotonic() - began_s
            return decide(runs, field, run.space.present, run.forecasts)
        race_round, limits = following
        cut = CutRule(max_wall_s=max(30.0, run.left_s))
        if race_round == 1:
            _first_round(run, limits, cut, on_log)
        else:
            run.trial(limits, Phase.RACE, cut, race_round)


def _first_round(
    run: RunState,
    limits: EngineLimits,
    cut: CutRule,
    on_log: Callable[[EngineLimits, ReplayLog], None] | None,
) -> None:
    """Replay a finalist and keep what it looked like over time."""
    windows: list[TimelineRecord] = []

    def heard(log: ReplayLog) -> None:
        windows.append(timeline_record(log))
        if on_log is not None:
            on_log(limits, log)

    run.trial(limits, Phase.RACE, cut, 1, heard)
    if windows:
        run.keep_timelines(limits, "live", windows)


def _is_over(
    run: RunState, following: tuple[int, EngineLimits] | None, reserved_s: float
) -> bool:
    """Whether the time does not hold what would follow."""
    return following is not None and run.left_s - reserved_s < run.replay_s(following[1])


def _is_beyond(number: int, last: int | None) -> bool:
    return last is not None and number > last


def confirm_cold(run: RunState, decision: RaceDecision) -> tuple[RaceDecision, Cold | None]:
    """Start winner and present configuration as they would be deployed, and compare them.

    A winner that is not better there is not recommended.

    Raises: EngineError when the engine cannot be kept alive.
    """
    if decision.verdict is RaceVerdict.KEEP or run.bench.restarts_per_config:
        return decision, None
    known = [_known_cold(run, s) for s in (decision.winner, run.space.present)]
    if None in known and run.left_s < cold_cost_s(run, decision.winner):
        run.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, None
    began_s = time.monotonic()
    ours, theirs = (_cold_score(run, s) for s in (decision.winner, run.space.present))
    run.walls_s["cold"] = time.monotonic() - began_s
    compared = ours.ratio_to(theirs)
    cold = Cold(ours, theirs, None if compared is None else compared[1])
    if Tier.CUT in (ours.tier, theirs.tier) or (
        theirs.tier is Tier.FAILED and ours.tier is not Tier.FAILED
    ):
        who = decision.winner if ours.tier is Tier.CUT else run.space.present
        run.listener.note(f"nothing to compare, {who} started cold: {_cold_cause(run, who)}")
        run.caveats.add(Caveat.NOT_CONFIRMED_COLD)
        return decision, cold
    if ours.clearly_worse_than(theirs, 0.0) or (
        cold.ratio is not None and cold.ratio > 1 - TIE_RATIO / 3
    ):
        why = "the gain did not show on engines started cold"
        if ours.tier is Tier.FAILED:
            why = f"it failed when it was started cold: {_cold_cause(run, decision.winner)}"
        return replace(
            decision, verdict=RaceVerdict.KEEP, winner=run.space.present, why=why
        ), cold
    change = None if decision.gain is None else decision.gain.value
    if cold.ratio and change and abs(cold.ratio / change - 1) > COLD_DIFFERS_RATIO:
        run.caveats.add(Caveat.COLD_DIFFERS)
    return decision, cold


def _cold_cause(run: RunState, limits: EngineLimits) -> str:
    """Return what went wrong on the last cold engine with these limits."""
    mine = (
        record
        for record in reversed(run.journal.records())
        if record.phase is Phase.COLD and record.limits == limits
    )
    return next((record.cause or "its replay was cut short" for record in mine), "")


def _known_cold(run: RunState, limits: EngineLimits) -> Score | None:
    """Return what a cold engine showed before this run was resumed."""
    seen = [o for o in run.journal.observations() if o.phase is Phase.COLD]
    return next((o.score for o in seen if o.limits == limits and o.is_whole), None)


def _cold_score(run: RunState, limits: EngineLimits) -> Score:
    """Measure on an engine started with the limits, unless that was done."""
    known = _known_cold(run, limits)
    if known is not None:
        return known
    cut = CutRule(max_wall_s=max(30.0, run.left_s))
    return run.trial(limits, Phase.COLD, cut, is_cold=True).score
