"""The instants of a request and the latencies that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.replay.timeline import Outcome, TimelineRecorder, Timelines

gaps_s = st.floats(0, 1e3, allow_nan=False)


@dataclass(frozen=True)
class Lived:
    """A request's stamps, made from gaps so that they never run backwards."""

    due_s: float
    sent_s: float
    token_s: tuple[float, ...]


@st.composite
def lives(draw: st.DrawFn, least_tokens: int = 0) -> Lived:
    gaps = draw(st.lists(gaps_s, min_size=2 + least_tokens, max_size=20))
    due_s, sent_s, *token_s = np.cumsum(gaps).tolist()
    return Lived(due_s, sent_s, tuple(token_s))


def recorded(lived: list[Lived], outcome: Outcome = Outcome.COMPLETED) -> Timelines:
    record = TimelineRecorder(np.array([life.due_s for life in lived]))
    for row, life in enumerate(lived):
        record.sent(row, life.sent_s)
        for at_s in life.token_s:
            record.tokens(row, 1, at_s)
        record.ended(row, outcome)
    return record.finish()


@given(st.lists(lives(least_tokens=2), min_size=1, max_size=8))
def test_first_token_and_decode_time_make_up_the_whole_latency(lived: list[Lived]) -> None:
    lines = recorded(lived)
    decode_s = (lines.output_tokens - 1) * lines.tpot_s
    assert (lines.ttft_s + decode_s).tolist() == pytest.approx(lines.e2e_s.tolist())
    assert lines.send_lag_s.min() >= 0


@given(st.lists(lives(least_tokens=2), min_size=1, max_size=8))
def test_columns_say_what_the_stamps_of_each_request_say(lived: list[Lived]) -> None:
    lines = recorded(lived)
    assert lines.ttft_s.tolist() == pytest.approx([t.token_s[0] - t.due_s for t in lived])
    assert lines.e2e_s.tolist() == pytest.approx([t.token_s[-1] - t.due_s for t in lived])
    per_token_s = [(t.token_s[-1] - t.token_s[0]) / (len(t.token_s) - 1) for t in lived]
    assert lines.tpot_s.tolist() == pytest.approx(per_token_s)
    assert lines.send_lag_s.tolist() == pytest.approx([t.sent_s - t.due_s for t in lived])
    decode_s = sum(life.token_s[-1] - life.token_s[0] for life in lived)
    gaps = sum(len(life.token_s) - 1 for life in lived)
    assert lines.gap_s.total_weight == gaps
    assert lines.gap_s.mean().value * gaps == pytest.approx(decode_s)


def test_below_two_tokens_there_is_no_time_per_token_and_it_is_not_zero() -> None:
    line = recorded([Lived(0.0, 0.1, (0.5,))])
    assert line.tpot_s.size == 0
    assert line.ttft_s.tolist() == line.e2e_s.tolist() == [0.5]


def test_without_a_token_nothing_is_known() -> None:
    line = recorded([Lived(0.0, 0.1, ())])
    assert np.isnan([*line.ttft_s, *line.e2e_s]).all()


def test_latency_counts_from_the_due_time_and_not_from_the_send() -> None:
    line = recorded([Lived(1.0, 3.0, (4.0, 5.0))])
    assert line.ttft_s.tolist() == [3.0]
    assert line.e2e_s.tolist() == [4.0]
    assert line.send_lag_s.tolist() == [2.0]


def test_only_answered_requests_have_latencies() -> None:
    record = TimelineRecorder(np.zeros(len(Outcome)))
    for row, outcome in enumerate(Outcome):
        record.sent(row, 0.5)
        record.tokens(row, 1, 1.0)
        record.tokens(row, 1, 2.0)
        record.ended(row, outcome)
    line = record.finish()
    assert [line.count(outcome) for outcome in Outcome] == [1] * len(Outcome)
    assert line.ttft_s.size == line.e2e_s.size == line.tpot_s.size == 1


def test_a_row_that_is_never_touched_counts_as_aborted_and_was_never_sent() -> None:
    line = TimelineRecorder(np.array([0.0, 1.0])).finish()
    assert len(line) == line.count(Outcome.ABORTED) == 2
    assert line.send_lag_s.size == line.gap_s.values.size == line.gap_s.total_weight == 0


def test_tokens_that_come_together_are_one_output_as_vllm_counts_them() -> None:
    """Of drafts that were accepted the median gap was none at all."""
    record = TimelineRecorder(np.array([0.0]))
    record.tokens(0, 2, 1.0)
    record.tokens(0, 3, 4.0)
    record.ended(0, Outcome.COMPLETED)
    line = record.finish()
    assert line.gap_s.values.tolist() == pytest.approx([3.0])
    assert line.gap_s.weights.tolist() == [1.0]
    assert line.tpot_s.tolist() == [0.75]


def test_the_recorder_keeps_its_hands_off_the_traces_column() -> None:
    due_s = np.array([5.0])
    due_s.flags.writeable = False
    record = TimelineRecorder(due_s)
    record.due(0, 7.0)
    assert record.finish().due_s.tolist() == [7.0]
    assert due_s.tolist() == [5.0]


def test_gaps_are_counted_all_however_many_come() -> None:
    record = TimelineRecorder(np.zeros(2))
    n = 150_000
    for at in range(n):
        record.tokens(0, 1, float(at))
    record.tokens(1, 1, 0.0)
    record.tokens(1, 1, 3.0)
    gap_s = record.finish().gap_s
    assert gap_s.values.tolist() == pytest.approx([1.0, 3.0])
    assert gap_s.weights.tolist() == [n - 1, 1]
