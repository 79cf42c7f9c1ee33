"""`tune plan --by hour`: a day's and a night's configuration, and whether switching pays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.retune_parts import a_retune, an_aim
from support.shadow_files import a_profile
from support.toy_tune import CROWDED
from support.traffic import a_trace
from tuner.cli.options import given_in
from tuner.cli.predict.commands import plan
from tuner.cli.predict.plan import PlanOptions, run_plan
from tuner.drift.by_hour import (
    Hour,
    calendar_of,
    clock_spans,
    day_plans,
    hours_of,
    parse_offset,
)
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.search.draws import MODEL_ALONE, Draws
from tuner.shadow.profiles import write_profile
from tuner.stats import Floats
from tuner.traffic.traces import ClockOrigin, Trace
from tuner.traffic.windows import Window

SMALL, LARGE, HUGE = (EngineLimits(n, 2048) for n in (4, 16, 64))
MONDAY_S = 1_767_571_200.0  # 2026-01-05 00:00 UTC, a Monday


def a_day(per_hour: Sequence[int], days: int = 1, zero_s: float = MONDAY_S) -> Trace:
    """Return so many requests in each hour of each day, spread evenly."""
    due_s = [
        (day * 24 + hour) * 3600.0 + 3600.0 * (i + 0.5) / count
        for day in range(days)
        for hour, count in enumerate(per_hour)
        for i in range(count)
    ]
    trace = a_trace(np.array(due_s), prompt=50, output=40)
    return replace(trace, origin=ClockOrigin.WALL, zero_s=zero_s)


def test_hours_of_several_dates_come_together() -> None:
    hours = hours_of(a_day([0, 50, 60, 0, 30], days=3))
    assert [(h.hour, len(h.parts), h.requests) for h in hours] == [(1, 3, 150), (2, 3, 180)]
    assert hours[0].parts[1] == Window(25 * 3600.0, 26 * 3600.0)
    assert hours[0].dates[1] == hours[0].dates[0] + 1


@given(st.integers(-14, 14), st.integers(0, 86_399))
def test_every_request_falls_into_the_hour_that_a_clock_there_shows(
    offset_h: int, zero: int
) -> None:
    trace = a_day([50] * 24, zero_s=MONDAY_S + zero)
    for hour in hours_of(trace, offset_h * 3600.0):
        for part in hour.parts:
            due_s = part.of(trace).due_s + part.start_s
            clock_s = (trace.zero_s + due_s + offset_h * 3600.0) % 86_400
            assert set(np.floor(clock_s / 3600)) == {hour.hour}


def test_without_a_calendar_clock_there_are_no_hours() -> None:
    with pytest.raises(UsageError, match="has no time of day"):
        hours_of(replace(a_day([50]), origin=ClockOrigin.OWN))


@pytest.mark.parametrize("text", ["", "Berlin", "+15", "2", "+1:99"])
def test_a_timezone_is_an_offset(text: str) -> None:
    with pytest.raises(UsageError, match="offset from UTC"):
        parse_offset(text)


@given(st.sets(st.integers(0, 23), min_size=1))
def test_spans_of_the_clock_cover_just_the_hours(hours: set[int]) -> None:
    covered: list[int] = []
    for span in clock_spans(list(hours)).removesuffix(" h").split(" h, "):
        start, end = (int(part) for part in span.split("-"))
        covered.extend(h % 24 for h in range(start, end if end > start else end + 24))
    assert sorted(covered) == sorted(hours)


def hours_with(requests: Sequence[int], dates: int = 3) -> list[Hour]:
    part = Window(0.0, 1.0)
    return [
        Hour(h, (part,) * dates, tuple(range(dates)), count) for h, count in enumerate(requests)
    ]


def among(
    settings: Sequence[EngineLimits], drawn: Floats, some: Sequence[EngineLimits]
) -> Floats:
    found: Floats = drawn[:, [settings.index(limits) for limits in some]]
    return found


def drawn(
    hours: Sequence[Hour], rows: Mapping[EngineLimits, Sequence[Any]], error: float = 0.0
) -> list[Draws]:
    """Return draws of each hour's dates around values of [hours] or [hours][dates].

    Settings are wrong by `error`, independently; a value below 0 breaks an SLO.
    """
    rng, found = np.random.default_rng(0), []
    wrong = np.exp(error * rng.normal(size=(50, len(rows))))
    for row, hour in enumerate(hours):
        parts = []
        for date in range(len(hour.dates)):
            at = [np.broadcast_to(of[row], len(hour.dates))[date] for of in rows.values()]
            cost, used = np.abs(at) * wrong, np.where(np.less(at, 0), 2.0, 0.5) + 0 * wrong
            here = np.stack([cost, used, 0 * wrong], axis=-1)
            parts.append(
                Draws(
                    tuple(rows),
                    "e2e_p99",
                    here,
                    partial(among, tuple(rows), here),
                    basis=MODEL_ALONE,
                    has_slos=True,
                )
            )
        found.append(Draws.pooled(parts))
    return found


def test_a_day_and_a_night_that_want_different_caps_make_a_pair() -> None:
    hours = hours_with([1000, 1000, 1000, 1000])
    rows = {SMALL: [1.0, 1.0, 4.0, 4.0], LARGE: [2.0, 2.0, 1.0, 1.0], HUGE: [3.0] * 4}
    plans = day_plans(hours, drawn(hours, rows, 0.03))
    assert plans.fixed.by_hour == (LARGE,) * 4
    assert plans.two.by_hour == plans.hourly.by_hour == (SMALL, SMALL, LARGE, LARGE)
    # Two hours halve, two stay; two settings that are each wrong by 3 % are by 4.2 % together,
    # and half of that where half of the day is switched.
    gain = plans.two.gain
    assert gain is not None
    assert gain.low is not None
    assert gain.high is not None
    assert gain.value == pytest.approx(1 - 0.5**0.5, abs=0.01)
    assert gain.high - gain.low == pytest.approx(2 * 1.645 * 0.021 * 0.5**0.5, rel=0.3)
    assert plans.two.pays


@pytest.mark.parametrize("dates", [[(1,), (1,), (0,), (0,)], [(1,), (1,), (0, 1), (0,)]])
def test_a_day_that_begins_at_noon_is_a_day(dates: list[tuple[int, ...]]) -> None:
    """Its hours lie on two dates, and one of these alone switches nothing."""
    part = Window(0.0, 1.0)
    hours = [Hour(h, (part,) * len(on), on, 1000 * len(on)) for h, on in enumerate(dates)]
    rows = {SMALL: [1.0, 1.0, 4.0, 4.0], LARGE: [2.0, 2.0, 1.0, 1.0]}
    gain = day_plans(hours, drawn(hours, rows, 0.03)).two.gain
    assert gain is not None
    assert gain.low is not None
    assert gain.value == pytest.approx(1 - 0.5**0.5, abs=0.01)
    assert gain.low == pytest.approx(gain.value, abs=0.05)


def test_differences_within_the_shadows_error_switch_nothing() -> None:
    hours = hours_with([500, 500])
    rows = {SMALL: [1.0, 1.04], LARGE: [1.04, 1.0]}
    plans = day_plans(hours, drawn(hours, rows, 0.05))
    assert len(plans.hourly.settings) == 1
    assert plans.hourly.gain is None
    assert not plans.two.pays


def test_an_hour_that_breaks_an_slo_is_mended_before_anything_is_faster() -> None:
    hours = hours_with([1000, 10], dates=1)
    plans = day_plans(hours, drawn(hours, {SMALL: [1.0, -1.0], LARGE: [1.5, 1.5]}))
    assert plans.fixed.by_hour == (LARGE, LARGE)
    assert plans.two.by_hour == (SMALL, LARGE)
    assert day_plans(hours[1:], drawn(hours[1:], {SMALL: [-1.0]})).fixed.hours_mended == 0


def test_what_differs_from_date_to_date_widens_the_interval() -> None:
    hours = hours_with([100, 100], dates=2)
    steady = {SMALL: [[1.0, 1.0], [3.0, 3.0]], LARGE: [[2.0, 2.0], [1.0, 1.0]]}
    varied = {SMALL: [[0.5, 1.5], [3.0, 3.0]], LARGE: [[2.0, 2.0], [1.0, 1.0]]}
    widths = []
    for rows in (steady, varied):
        gain = day_plans(hours, drawn(hours, rows, 0.02)).two.gain
        assert gain is not None
        assert gain.low is not None
        assert gain.high is not None
        widths.append(gain.high - gain.low)
    assert widths[1] > 2 * widths[0]


@pytest.mark.slow
def test_a_busy_hour_and_a_quiet_one_are_replayed_and_reported() -> None:
    quiet = a_day([60], days=2)
    # Within the same clock an hour with a burst every minute, which wants more at once.
    burst_s = np.sort(np.concatenate([quiet.due_s + 3600.0, _bursts(days=2)]))
    both = np.sort(np.concatenate([quiet.due_s, burst_s]))
    trace = replace(
        a_trace(both, prompt=50, output=40), origin=ClockOrigin.WALL, zero_s=MONDAY_S
    )
    hours = tuple(hours_of(trace))
    said: list[str] = []
    retune, _ = a_retune(EngineLimits(1, 2048), CROWDED, ladder=(1, 4, 16))
    found = calendar_of(trace, hours, retune, an_aim(), said.append)
    assert len(said) == 2
    shown: dict[str, Any] = json.loads(json.dumps(found.as_json()))
    assert [hour["hour"] for hour in shown["hours"]] == [0, 1]
    # Each by the tail that its requests carry, 60 and 480 of a date.
    assert shown["metric"] == "e2e_p50 or e2e_p95"
    assert shown["current"]["max_num_seqs"] == 1
    assert shown["plans"]["fixed"]["settings"][0]["max_num_seqs"] > 1
    assert any(line.startswith("one for all hours: ") for line in found.lines())


def _bursts(days: int) -> list[float]:
    return [
        (day * 24 + 1) * 3600.0 + 60.0 * minute + 0.01 * i
        for day in range(days)
        for minute in range(60)
        for i in range(8)
    ]


def plan_options(folder: Path, trace: Path) -> PlanOptions:
    """Return the options of `plan` with few caps; one as small as fits a test."""
    write_profile(folder / "profile.yaml", a_profile())
    given = ["--profile", str(folder / "profile.yaml"), "--trace", str(trace)]
    more = ["--force-profile", "--max-num-seqs", "2,8", "--json"]
    hours = ["--by", "hour", "--timezone", "+01:00"]
    made = plan.make_context("plan", [*given, *more, *hours])
    return PlanOptions.parse(made.params, given_in(made))


@pytest.mark.slow
@pytest.mark.engine
def test_a_week_is_planned_by_the_hour_from_its_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "week.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for hour, step_s in ((8, 20), (20, 5)):
        for second in range(0, 3600, step_s):
            clock = f"2026-01-05 {hour:02d}:{second // 60:02d}:{second % 60:02d}.0000000"
            lines.append(f"{clock},200,80")
    path.write_text("\n".join(lines) + "\n")
    assert run_plan(plan_options(tmp_path, path)) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [hour["hour"] for hour in shown["hours"]] == [9, 21]
    assert [hour["requests"] for hour in shown["hours"]] == [180, 720]


def test_a_recording_without_dates_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    path.write_text('{"arrived_at_s": 1.0, "input_length": 9, "output_length": 9}\n' * 50)
    options = plan_options(tmp_path, path)
    with pytest.raises(UsageError, match="has no time of day"):
        run_plan(options)
