"""How much load the answer bears: foretold by the shadow, confirmed live for the winner.

A line of every result with an SLO. What a capacity is, and how it is bisected, is in
`capacity`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import Measurement
from tuner.replay.plan import CutRule
from tuner.replay.runner import LARGEST_LOAD, Failure, holds
from tuner.run.forecast import Forecast
from tuner.run.state import RunState
from tuner.search.race import RaceDecision
from tuner.search.trials import Phase

# A live replay may take this many times what was foretold before it does not fit: ours.
COST_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """The loads that winner and present configuration bear, as multiples of the recorded one.

    None where the SLOs hold at no load. `is_shown` says whether what was replayed is long
    enough to show what becomes of a queue at the winner's load, `live` whether the SLOs held at
    it on the engine itself, None where nobody looked. `replay_s` is how long the shadow
    foretells the replay at it to take.
    """

    winner: float | None
    present: float | None
    live: bool | None
    is_shown: bool = True
    replay_s: float = 0.0

    @property
    def text(self) -> str:
        """Say it in a sentence.

        >>> CapacityResult(1.7, 1.2, None).text
        "holds up to 1.7 x today's load (the present one 1.2 x), foretold by the shadow"
        """
        if self.winner is None:
            return "the SLOs hold at no load, foretold by the shadow"
        before = "none" if self.present is None else f"{self.present:.2g} x"
        judged = {
            None: "foretold by the shadow",
            True: "foretold by the shadow and confirmed live",
            False: "foretold by the shadow, but live it did not hold at that load",
        }[self.live]
        if not self.is_shown:
            return (
                f"beyond what this window can show: it is too short to see a queue grow; never "
                f"above {self.winner:.2g} x today's load (the present one {before}), {judged}"
            )
        holds = f"holds up to {self.winner:.2g} x today's load"
        return f"{holds} (the present one {before}), {judged}"

    def as_json(self) -> dict[str, Any]:
        """Return the loads for result.json."""
        return {
            "winner": self.winner,
            "present": self.present,
            "confirmed_live": self.live,
            "is_shown": self.is_shown,
            "text": self.text,
        }


def predict_capacity(
    run: RunState, forecast: Forecast, decision: RaceDecision
) -> CapacityResult:
    """Ask the shadow how much load winner and present configuration bear."""
    began_s = time.monotonic()
    settings = list(dict.fromkeys([decision.winner, run.space.present]))
    found = dict(zip(settings, forecast.capacities(settings), strict=True))
    run.walls_s["capacity"] = time.monotonic() - began_s
    best, present = found[decision.winner], found[run.space.present]
    return CapacityResult(
        None if best is None else best.capacity,
        None if present is None else present.capacity,
        None,
        is_shown=best is None or _is_shown(best, run.trace.load),
        replay_s=0.0 if best is None else best.busy_s,
    )


def _is_shown(at_most: Measurement, recorded: float) -> bool:
    """Whether a replay at its capacity was long enough, and the capacity an edge at all."""
    is_edge = (at_most.capacity or 0.0) < LARGEST_LOAD * recorded
    return is_edge and at_most.spans_lives


def confirm_capacity(
    run: RunState, forecast: Forecast, winner: EngineLimits, found: CapacityResult
) -> CapacityResult:
    """Replay live what was foretold, at the load the winner is said to bear, if time allows.

    The same requests, judged in the same way: all of what the capacity was looked for on, or
    the windows that raced, if the shadow says that they hold that load too.
    """
    if found.winner is None:
        return found
    load = found.winner / run.trace.load
    start_s = 0.0 if run.bench.started is not None else run.bench.start_s
    names, replay_s = forecast.names, found.replay_s
    if run.left_s < start_s + COST_RATIO * replay_s:
        names = tuple(run.names)
        predicted = forecast.predict([winner], names, replace(run.aim.plan, load=load))[0]
        if isinstance(predicted, Failure) or not holds(predicted, run.aim.slos):
            return found
        replay_s = predicted.busy_s
    if run.left_s < start_s + COST_RATIO * replay_s:
        return found
    for name, part in zip(forecast.names, forecast.parts, strict=True):
        run.bench.use(name, part.of(run.trace))
    cut = CutRule(max_wall_s=max(30.0, run.left_s))
    outcome, _ = run.measure(winner, Phase.CAPACITY, cut, load=load, names=names)
    did_hold = not isinstance(outcome, Failure) and holds(outcome, run.aim.slos)
    return replace(found, live=did_hold)
