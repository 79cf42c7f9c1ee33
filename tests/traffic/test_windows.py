"""Windows hold what they promise: the most work, the usual work, or the asked span."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import TraceError, UsageError
from tuner.search.budget import least_window, window_text
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import (
    Window,
    WindowKind,
    busiest,
    parse_duration,
    parse_window,
    typical,
    whole,
)


def a_trace(due_s: list[float], prompt: list[int] | None = None) -> Trace:
    n = len(due_s)
    return Trace(
        due_s=np.array(due_s, np.float64),
        prompt_tokens=np.array(prompt or [9] * n, np.int64),
        output_tokens=np.ones(n, np.int64),
        source="prod.jsonl",
    )


def work(trace: Trace, window: Window) -> int:
    inside = (trace.due_s >= window.start_s) & (trace.due_s < window.end_s)
    return int((trace.prompt_tokens + trace.output_tokens)[inside].sum())


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("5m", 300), ("2h", 7200), (" .5m ", 30)]
)
def test_durations_need_their_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "-5s", "5 s", "1e3s", "5d", "\u0665s", "nan", "9" * 400 + "h"]
)
def test_what_is_no_duration_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration(text)
    assert "500ms" in caught.value.hint


def test_windows_are_parsed_as_written() -> None:
    assert parse_window("all").kind is WindowKind.ALL
    assert parse_window("peak:300s").length_s == 300
    assert parse_window("typical:5m").kind is WindowKind.TYPICAL
    assert parse_window("0s:10m").span == Window(0.0, 600.0)


@pytest.mark.parametrize(
    "text", ["", "peak", "peak:", "peak:0s", "10m:5m", "5m:5m", "1:2", "low:5s"]
)
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_window(text)


def test_the_whole_window_holds_the_last_request() -> None:
    trace = a_trace([0.0, 1.0, 7.25])
    assert len(parse_window("all").resolve(trace).of(trace)) == 3
    assert len(whole(a_trace([0.0])).of(a_trace([0.0]))) == 1


def test_requests_that_come_at_once_are_a_window_whatever_part_is_wanted() -> None:
    batch = a_trace([0.0] * 40)
    for window in (whole(batch), least_window(batch), busiest(batch, 1e-9)):
        assert len(window.of(batch)) == 40
    assert whole(batch).length_s * 1e6 > 1


def test_the_busiest_window_counts_tokens_and_not_requests() -> None:
    trace = a_trace([0.0, 0.1, 0.2, 50.0, 100.0], [9, 9, 9, 5000, 9])
    window = parse_window("peak:10s").resolve(trace)
    assert window.start_s <= 50.0 < window.end_s
    assert window.length_s == 10.0


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=25),
    st.floats(0.5, 40),
    st.floats(0, 100),
)
def test_no_window_holds_more_work_than_the_busiest(
    rows: list[tuple[float, int]], length_s: float, start_s: float
) -> None:
    trace = a_trace([t for t, _ in sorted(rows)], [p for _, p in sorted(rows)])
    best = busiest(trace, length_s)
    assert work(trace, best) >= work(trace, Window(start_s, start_s + length_s))
    assert best.start_s >= 0


def test_the_typical_window_is_the_median_one_beside_the_peak() -> None:
    # Ten windows of 10 s with 1, 2, ... 9 requests, and a peak of 100 in the sixth.
    counts = [1, 2, 3, 4, 5, 100, 6, 7, 8, 9]
    due_s = [10.0 * k + 9.0 * i / c for k, c in enumerate(counts) for i in range(c)]
    trace = a_trace(due_s)
    window = typical(trace, 10.0)
    assert work(trace, window) == 50
    assert not window.overlaps(busiest(trace, 10.0))


def test_a_typical_window_does_not_share_requests_with_the_peak() -> None:
    # Windows 2 and 3 hold the median of 30 each, but together, around 30 s, they are the peak.
    due_s = [30 - 0.001 * i for i in range(1, 31)] + [30 + 0.001 * i for i in range(30)]
    for k, count in ((0, 10), (1, 20), (4, 45), (5, 50), (6, 55)):
        due_s += [10.0 * k + 9.9 * i / count for i in range(count)]
    window = typical(a_trace(sorted(due_s)), 10.0)
    assert window == Window(10.0, 20.0)


def test_a_trace_shorter_than_the_window_is_taken_whole() -> None:
    trace = a_trace([0.0, 1.0, 2.0])
    for text in ("peak:60s", "typical:60s", "0s:60s", "all"):
        assert parse_window(text).resolve(trace) == whole(trace)
        assert (
            window_text((parse_window(text).resolve(trace),), trace) == "the whole trace, 2 s"
        )
    assert parse_window("1s:60s").resolve(trace) == Window(1.0, whole(trace).end_s)


@given(
    tick_s=st.sampled_from([0.1, 0.3, 1.0]) | st.floats(0.01, 100.0),
    counts=st.lists(st.integers(0, 30), min_size=2, max_size=30),
    parts=st.integers(1, 40) | st.floats(1.0, 40.0),
)
def test_windows_of_a_clock_that_ticks_hold_the_burst_that_they_were_chosen_for(
    tick_s: float, counts: list[int], parts: float
) -> None:
    """An instant between two windows is in one of them, however it is rounded."""
    due_s = np.repeat(np.arange(len(counts)) * tick_s, counts)
    if due_s.size < 2 or due_s[0] == due_s[-1]:
        return
    trace = a_trace((due_s - due_s[0]).tolist())
    length_s = trace.duration_s / parts
    for window in (typical(trace, length_s), busiest(trace, length_s)):
        assert len(window.of(trace)) > 0
        assert window.length_s == pytest.approx(length_s)


def test_a_silent_window_cannot_be_replayed() -> None:
    with pytest.raises(TraceError, match="no request is due"):
        parse_window("10s:20s").resolve(a_trace([0.0])).of(a_trace([0.0]))


@given(
    start_s=st.floats(0.0, 30.0), length_s=st.floats(1.0, 20.0), lead_in_s=st.floats(0.0, 40.0)
)
def test_a_lead_in_adds_what_came_before_and_measures_the_same(
    start_s: float, length_s: float, lead_in_s: float
) -> None:
    """Also what is due at the very instant at which the window starts."""
    start_s = round(start_s, 1)
    trace = a_trace([0.1 * k for k in range(600)])
    window = Window(start_s, start_s + length_s)
    bare, warm = window.of(trace), window.with_lead_in(lead_in_s).of(trace)
    assert warm.measured == len(bare) == bare.measured
    assert len(warm) - warm.measured == pytest.approx(10 * warm.lead_in_s, abs=1)
    tail = warm.due_s[len(warm) - warm.measured :] - warm.lead_in_s
    np.testing.assert_allclose(tail, bare.due_s, atol=1e-9)
    # Another load is over the same time, and so is what comes before.
    assert at_load(warm, 2.0).lead_in_s == at_load(warm, 0.5).lead_in_s == warm.lead_in_s
    part = window.with_lead_in(lead_in_s).of(at_load(trace, 0.5))
    assert at_load(part, 2.0).measured == len(bare)
