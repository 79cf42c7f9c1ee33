"""What the reader of BurstGPT accepts and refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.csv_parts import BURST_6, BURST_8, message, public, traced, written
from support.traffic import request_at
from tuner.traffic.formats.burstgpt import BURSTGPT, turns_of_sessions
from tuner.traffic.formats.columns import Labels, ReadOptions
from tuner.traffic.traces import ClockOrigin, ZeroOutput


def test_burstgpt_columns_are_found_by_name_wherever_they_stand(tmp_path: Path) -> None:
    rows = "12,GPT-4,50,7,57,API log\n10,ChatGPT,472,18,490,Conversation log\n"
    trace = traced(written(tmp_path, f"{BURST_6}\n{rows}"), BURSTGPT)
    assert trace.due_s.tolist() == [0.0, 2.0]
    assert trace.prompt_tokens.tolist() == [472, 50]
    assert trace.zero_s == 10
    assert trace.origin is ClockOrigin.SHARED
    moved = (
        "Log Type,Elapsed time, Response tokens ,Request tokens,Timestamp,Session ID,Model\r\n"
    )
    other = traced(written(tmp_path, moved + "API log,1.5,7,50,12,,GPT-4\r\n"), BURSTGPT)
    assert request_at(other, 0).prompt_tokens == 50
    assert request_at(other, 0).output_tokens == 7
    assert other.e2e_s is not None
    assert other.e2e_s.tolist() == [1.5]
    assert other.turns is None


def test_burstgpt_failures_are_left_out_and_counted_whatever_the_policy(tmp_path: Path) -> None:
    rows = "1,ChatGPT,5,0,5,API log\n2,ChatGPT,6,7,13,API log\n3,ChatGPT,0,7,7,API log\n"
    path = written(tmp_path, f"{BURST_6}\n{rows}")
    for policy in (ZeroOutput.DROP, ZeroOutput.ONE):
        trace = traced(path, BURSTGPT, ReadOptions(zero_output=policy))
        assert trace.prompt_tokens.tolist() == [6]
        assert dict(trace.notes.dropped) == {"failed request": 1, "prompt of 0 tokens": 1}
    said = message(path, BURSTGPT, ReadOptions(zero_output=ZeroOutput.REFUSE))
    assert said == "t.csv line 2: Response tokens must be at least 1, got 0"


def test_one_model_of_a_burstgpt_file_can_be_picked(tmp_path: Path) -> None:
    rows = "1,ChatGPT,5,1,6,API log\n2,GPT-4,6,1,7,API log\n3,ChatGPT,7,1,8,API log\n"
    path = written(tmp_path, f"{BURST_6}\n{rows}")
    mixed = traced(path, BURSTGPT)
    assert "mixes 2 models (" in mixed.notes.texts[0]
    alone = traced(path, BURSTGPT, ReadOptions(only_model="ChatGPT"))
    assert alone.prompt_tokens.tolist() == [5, 7]
    assert dict(alone.notes.dropped) == {"not of model ChatGPT": 1}


def test_a_turn_waits_for_the_answer_before_it_that_is_replayed(tmp_path: Path) -> None:
    rows = [
        "10,7,4.0,m,1,1,2,Conversation log",
        "11,8,,m,2,1,3,Conversation log",
        "12,,1.0,m,3,1,4,API log",
        "15,7,2.0,m,4,0,4,Conversation log",
        "16,7,2.0,m,0,9,9,Conversation log",
        "20,7,3.0,m,5,1,6,Conversation log",
        "21,8,1.0,m,6,1,7,Conversation log",
        "22,7,1.0,m,7,1,8,Conversation log",
    ]
    trace = traced(written(tmp_path, "\n".join([BURST_8, *rows])), BURSTGPT)
    assert trace.prompt_tokens.tolist() == [1, 2, 3, 5, 6, 7]
    assert trace.turns is not None
    assert trace.turns.after.tolist() == [-1, -1, -1, 0, 1, 3]
    # 20 - (10 + 4); 21 - 11, where the answer's end is not known; 22 comes before 20 + 3.
    assert trace.turns.pause_s.tolist() == [0.0, 0.0, 0.0, 6.0, 10.0, 0.0]
    (shown,) = trace.notes.texts
    assert shown.startswith("the answers that 1 turns wait for have no recorded end")


def test_an_elapsed_time_below_zero_is_not_a_latency(tmp_path: Path) -> None:
    rows = "1,,-2,m,5,1,6,API log\n2,,3,m,6,1,7,API log\n"
    trace = traced(written(tmp_path, f"{BURST_8}\n{rows}"), BURSTGPT)
    assert trace.e2e_s is not None
    assert np.isnan(trace.e2e_s).tolist() == [True, False]
    assert "an Elapsed time below 0 is taken as not recorded, in 1 rows" in trace.notes.texts


rows_of_sessions = st.lists(
    st.tuples(st.integers(-1, 3), st.booleans(), st.integers(0, 5)), min_size=1, max_size=30
)


@given(rows_of_sessions)
def test_every_session_is_one_chain_in_order_of_arrival(
    rows: list[tuple[int, bool, int]],
) -> None:
    sessions = Labels(np.array([code for code, _, _ in rows]), ("a", "b", "c", "d"))
    is_turn = np.array([turn for _, turn, _ in rows])
    arrived_s = np.array([float(at) for _, _, at in rows])
    found = turns_of_sessions(sessions, is_turn, arrived_s, np.full(len(rows), np.nan))
    expected = [-1] * len(rows)
    last: dict[int, int] = {}
    for row in sorted(range(len(rows)), key=lambda row: rows[row][2]):
        code, turn, _ = rows[row]
        if code >= 0 and turn:
            expected[row] = last.get(code, -1)
            last[code] = row
    assert (found.after.tolist() if found else [-1] * len(rows)) == expected


@pytest.mark.parametrize("name", ["v1_6col_with_fails.csv", "v1.2_8col_with_fails.csv"])
def test_burstgpt_files_hold_what_their_manifest_says(shared_traces: Path, name: str) -> None:
    path, says = public(shared_traces, f"synthetic/burstgpt_format/{name}")
    trace, expected = traced(path, BURSTGPT), says["expected"]
    assert trace.notes.rows == expected["rows"]
    assert trace.notes.dropped["failed request"] == expected["failures_zero_response"]
    assert trace.zero_s >= float(expected["first_timestamp"])
    assert (trace.e2e_s is not None) == name.startswith("v1.2")
    if trace.turns is not None:
        sessions = Counter(
            line.split(",")[1]
            for line in path.read_text().splitlines()[1:]
            if ",0," not in line
        )
        del sessions[""]
        assert trace.turns.waiting == sum(sessions.values()) - len(sessions)
