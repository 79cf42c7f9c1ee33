"""What the page draws is what the trials say, in colours that can be told apart."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROOT
from tuner.engine.limits import EngineLimits
from tuner.report.parts import BETTER, CHOSEN, INK, LIVE, SHADOW, WORSE
from tuner.report.points import Point, frontier
from tuner.report.sweep import stop_of
from tuner.search.objective import Score, Tier
from tuner.search.trials import Observation, Phase

STYLE = ROOT / "tuner" / "report" / "templates" / "style.css"


def a_point(rate: float, e2e_s: float) -> Point:
    return Point(EngineLimits(1, 1), True, ({"requests_per_s": rate, "e2e_s": {"p95": e2e_s}},))


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(0.1, 9.0)), min_size=1, max_size=20))
def test_the_frontier_holds_exactly_what_nothing_beats(
    pairs: list[tuple[float, float]],
) -> None:
    best = frontier([a_point(*pair) for pair in pairs], "e2e_p95")
    kept = {(p.needed("requests_per_s"), p.needed("e2e_p95")) for p in best}

    def is_beaten(pair: tuple[float, float]) -> bool:
        return any(o != pair and o[0] >= pair[0] and o[1] <= pair[1] for o in pairs)

    assert kept == {pair for pair in pairs if not is_beaten(pair)}


def a_rung(
    cap: int, value: float, decode_s: float = 0.01, running: int | None = None
) -> Observation:
    score = Score(Tier.GOOD, value, "e2e_p95")
    peak = cap if running is None else running
    return Observation(EngineLimits(cap, 2048), Phase.LADDER, score, peak, 9, decode_s)


def test_the_stop_is_where_two_rungs_in_a_row_were_worse_and_slower() -> None:
    rungs = [a_rung(4, 3.0), a_rung(8, 1.0), a_rung(16, 2.0, 0.02), a_rung(32, 3.0, 0.03)]
    stop = stop_of([*rungs, a_rung(64, 9.0, 0.1)])
    assert stop.cap == 32
    assert stop.why == "16 and 32 were worse than 8, with slower decode steps"


def test_the_stop_is_where_the_cap_no_longer_binds_or_the_last_rung() -> None:
    rungs = [a_rung(4, 3.0), a_rung(8, 2.0)]
    assert stop_of(rungs).why == "it was the largest that was tried"
    loose = stop_of([*rungs, a_rung(32, 1.0, running=11)])
    assert (loose.cap, loose.why[:29]) == (32, "at most 11 requests ran at on")


def test_a_smaller_cap_that_ties_with_the_last_is_not_said_to_be_better() -> None:
    rungs = [a_rung(4, 3.0), a_rung(8, 2.02), a_rung(16, 2.0)]
    assert stop_of(rungs).why == "it was the ladder's last, and 8 was as good within 3%"
    worse = [*rungs[:2], a_rung(16, 2.5)]
    assert stop_of(worse).why == "it was the ladder's last, and 8 was better"


def test_no_cap_below_the_best_is_where_the_climb_ends() -> None:
    """One cap alone never bound, and a larger one runs the same batches faster."""
    rungs = [a_rung(1, 3.0, running=1), a_rung(2, 3.0, running=1), a_rung(8, 2.0, running=1)]
    stop = stop_of(rungs)
    assert (stop.cap, stop.why[:34]) == (8, "at most 1 request ran at once ther")


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb. Source: WCAG 2.2, relative luminance."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_can_be_told_from_the_page_in_light_and_dark() -> None:
    style = STYLE.read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+)", part)) for part in style.split("@media")[:2]
    )
    for colours in (light, {**light, **dark}):
        for colour in (LIVE, SHADOW, BETTER, WORSE, CHOSEN, INK):
            assert contrast(colour, colours["page"]) >= 3
        for text in ("ink", "soft", "link"):
            for ground in ("page", "raised"):
                assert contrast(colours[text], colours[ground]) >= 4.5
