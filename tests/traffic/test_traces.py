"""A trace is cut, scaled and limited without losing or inventing a request."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traffic import request_at
from tuner.errors import TraceError, UsageError
from tuner.traffic.concurrency import in_flight_steps
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import ReadNotes, TooLong, Trace


def a_trace(
    due_s: list[float],
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    hashes: HashIds | None = None,
    e2e_s: list[float] | None = None,
) -> Trace:
    """Return a trace with lengths of 10 in and 5 out where none are given."""
    n = len(due_s)
    return Trace(
        due_s=np.array(due_s, np.float64),
        prompt_tokens=np.array(prompt or [10] * n, np.int64),
        output_tokens=np.array(output or [5] * n, np.int64),
        hashes=hashes,
        e2e_s=None if e2e_s is None else np.array(e2e_s, np.float64),
        request_ids=tuple(f"r{i}" for i in range(n)),
        source="prod.jsonl",
    )


lengths = st.integers(min_value=1, max_value=60)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a small trace, hashed half of the time, in stores that round down or up."""
    n = draw(st.integers(min_value=1, max_value=12))
    due_s = sorted(draw(st.lists(st.floats(0, 100), min_size=n, max_size=n)))
    prompt = draw(st.lists(lengths, min_size=n, max_size=n))
    output = draw(st.lists(lengths, min_size=n, max_size=n))
    hashes = None
    if draw(st.booleans()):
        block_size, is_ceil = draw(st.integers(1, 16)), draw(st.booleans())
        counts = [-(-p // block_size) if is_ceil else p // block_size for p in prompt]
        rows = [draw(st.lists(st.integers(0, 9), min_size=c, max_size=c)) for c in counts]
        hashes = HashIds.from_rows(rows, block_size)
    return a_trace(due_s, prompt, output, hashes)


def test_a_trace_lasts_from_its_first_request_to_its_last() -> None:
    assert a_trace([0.0, 1.5], [8, 12], [3, 4]).duration_s == 1.5


def test_columns_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="due_s must ascend"):
        a_trace([1.0, 0.0])
    with pytest.raises(ValueError, match="prompt_tokens must have 2 rows, got 1"):
        a_trace([0.0, 1.0], prompt=[1])
    with pytest.raises(ValueError, match="at least 1 prompt"):
        a_trace([0.0], prompt=[0])
    with pytest.raises(TraceError, match="no requests are left"):
        a_trace([])


def test_the_columns_of_a_trace_cannot_be_written_to() -> None:
    trace = a_trace([0.0])
    with pytest.raises(ValueError, match="read-only"):
        trace.due_s[0] = 1.0


def test_hash_ids_that_cannot_cover_the_prompt_are_refused_by_request() -> None:
    hashes = HashIds.from_rows([(1,), (1, 2, 3)], block_size=8)
    with pytest.raises(TraceError, match=r"request 2: hash_ids must hold 1 or 2 ids .* got 3"):
        a_trace([0.0, 1.0], [8, 12], hashes=hashes)


def test_hash_columns_check_themselves() -> None:
    ids = np.array([1, 2, 3])
    for offsets, block_size in (([0, 3], 0), ([1, 3], 8), ([0, 2], 8), ([0, 5, 3], 8)):
        with pytest.raises(ValueError, match="must"):
            HashIds(np.array(offsets), ids, block_size)


def test_a_model_that_holds_no_request_is_refused() -> None:
    with pytest.raises(UsageError, match="max_model_len must be at least 2, got 1"):
        a_trace([0.0]).limit_lengths(1, TooLong.CLIP)


def test_a_window_keeps_the_silence_before_its_first_request() -> None:
    part = a_trace([0.0, 5.0, 7.0, 9.0]).between(4.0, 9.0)
    assert part.due_s.tolist() == [1.0, 3.0]
    assert part.request_ids == ("r1", "r2")
    with pytest.raises(TraceError, match="no request is due between 1 s and 4 s"):
        a_trace([0.0, 5.0]).between(1.0, 4.0)


def test_recorded_concurrency_is_the_step_function_of_known_latencies() -> None:
    trace = a_trace([0.0, 1.0, 2.0], e2e_s=[2.0, 3.0, float("nan")])
    times_s, counts = trace.recorded_concurrency()
    assert times_s.tolist() == [0.0, 1.0, 2.0, 4.0]
    assert counts.tolist() == [1, 2, 1, 0]
    with pytest.raises(TraceError, match="needs e2e_s"):
        a_trace([0.0]).recorded_concurrency()


instants = st.floats(0, 50) | st.sampled_from([0.0, 1.0, 2.0])


@given(st.lists(st.tuples(instants, instants), min_size=1, max_size=30))
def test_time_in_flight_adds_up_to_the_sum_of_latencies(
    pairs: list[tuple[float, float]],
) -> None:
    due_s, e2e_s = np.array(sorted(pairs)).T
    times_s, counts = in_flight_steps(due_s, e2e_s)
    assert counts[-1] == 0
    assert counts.min() >= 0
    assert np.all(np.diff(times_s) > 0)
    assert np.dot(np.diff(times_s), counts[:-1]) == pytest.approx(e2e_s.sum(), abs=1e-6)


@given(traces(), st.integers(2, 130))
def test_clipped_requests_fit_and_the_others_are_untouched(trace: Trace, limit: int) -> None:
    over = trace.too_long(limit)
    clipped = trace.limit_lengths(limit, TooLong.CLIP)
    assert not clipped.too_long(limit).any()
    assert clipped.prompt_tokens[~over].tolist() == trace.prompt_tokens[~over].tolist()
    assert sum(clipped.notes.clipped.values()) == over.sum()
    keeps_output = over & (trace.output_tokens < limit)
    assert np.array_equal(
        clipped.output_tokens[keeps_output], trace.output_tokens[keeps_output]
    )
    for i in range(len(trace)):
        ids, kept = request_at(trace, i).hash_ids, request_at(clipped, i).hash_ids
        assert ids[: len(kept)] == kept


@given(traces(), st.integers(2, 130))
def test_dropped_and_kept_requests_add_up(trace: Trace, limit: int) -> None:
    over = trace.too_long(limit)
    assert trace.limit_lengths(limit, TooLong.REFUSE) is trace
    if over.all():
        with pytest.raises(TraceError):
            trace.limit_lengths(limit, TooLong.DROP)
        return
    kept = trace.limit_lengths(limit, TooLong.DROP)
    assert len(kept) + sum(kept.notes.dropped.values()) == len(trace)
    assert [request_at(kept, i).request_id for i in range(len(kept))] == [
        f"r{i}" for i in np.flatnonzero(~over)
    ]


@given(traces(), st.data())
def test_slicing_rows_takes_every_column_with_it(trace: Trace, data: st.DataObject) -> None:
    everything = range(len(trace))
    rows = sorted(data.draw(st.sets(st.sampled_from(everything), min_size=1)))
    part = trace.slice_rows(rows)
    for new, old in enumerate(rows):
        assert request_at(part, new).hash_ids == request_at(trace, old).hash_ids
        assert request_at(part, new).due_s == request_at(trace, old).due_s


@given(traces())
def test_leading_hits_are_what_a_growing_set_of_ids_finds(trace: Trace) -> None:
    if trace.hashes is None:
        return
    seen: set[int] = set()
    for row, hits in enumerate(trace.hashes.leading_hits().tolist()):
        ids = trace.hashes.row(row)
        expected = next((k for k, i in enumerate(ids) if i not in seen), len(ids))
        assert hits == expected
        seen.update(ids)


def test_a_trace_travels_between_processes() -> None:
    trace = a_trace([0.0, 1.0], hashes=HashIds.from_rows([(1, 2), (1, 3)], block_size=8))
    notes = ReadNotes(rows=2).with_dropped("empty", 3).with_dropped("empty", 1)
    copy, copied_notes = pickle.loads(pickle.dumps((trace, notes)))  # noqa: S301 - our own bytes
    assert request_at(copy, 1) == request_at(trace, 1)
    assert copied_notes == notes
    assert copied_notes.dropped == {"empty": 4}
