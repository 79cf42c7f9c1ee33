"""Agent sessions: every request is read, and each waits for what it waited for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.weka_parts import (
    ONE,
    PUBLISHED,
    agent,
    asked,
    columns_of,
    message,
    read,
    session,
    written,
)
from tuner.traffic.describe import prefix_reuse_ratio
from tuner.traffic.formats.columns import ReadOptions
from tuner.traffic.formats.weka import WEKA, Item, Request, SubAgent, lay_out
from tuner.traffic.reshape import merge
from tuner.traffic.traces import ZeroOutput


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sessions_have_the_numbers_they_should(
    shared_traces: Path, name: str
) -> None:
    files = json.loads((shared_traces / "MANIFEST.json").read_text())["files"]
    entry = next(entry for entry in files if entry["file"] == f"agentic_weka/{name}")
    expected, path = entry["stats"], shared_traces / entry["file"]
    with path.open("rb") as file:
        assert WEKA.matches(file.read(1 << 16))
    columns = WEKA.read(path, ReadOptions())
    assert columns.e2e_s is not None
    found = {
        "requests": len(columns.prompt_tokens),
        "sum_in": int(columns.prompt_tokens.sum()),
        "sum_out": int(columns.output_tokens.sum()),
        "out0_rows": int((columns.output_tokens == 0).sum()),
        "rows_without_api_time": int(np.isnan(columns.e2e_s).sum()),
    }
    assert found == {key: expected[key] for key in found}
    trace = read(path, ONE)
    assert trace.hashes is not None
    assert trace.hashes.block_size == expected["block_size"]
    assert trace.hash_scope
    assert prefix_reuse_ratio(trace) == pytest.approx(expected["token_prefix_reuse"], abs=5e-5)
    if not expected["subagents"]:
        assert trace.duration_s == expected["duration_s"]
    assert trace.turns is not None
    assert trace.turns.waiting == len(trace) - 1
    assert np.all(trace.turns.after < np.arange(len(trace)))


def test_published_sub_agents_run_between_the_requests_around_them(
    shared_traces: Path,
) -> None:
    """Their t shows when they ended: only so do all of them fit between these requests.

    Taken as a start, the last of them would begin 723 s after the session and end at 1,061 s,
    when the answer that needs it is long over; the whole would take 1,002.533 s, not 818.
    """
    columns = WEKA.read(shared_traces / "agentic_weka" / "trace_0277.json", ReadOptions())
    assert columns.turns is not None
    assert columns.e2e_s is not None
    # Row 0 asks for three explorers at once; row 34 reads their answers.
    firsts = [1, 5, 17]
    assert columns.turns.after[firsts].tolist() == [0, 0, 0]
    assert columns.arrived[firsts] == pytest.approx([19.47] * 3, abs=0.02)
    assert columns.turns.after[34] == 33
    ends = columns.arrived + columns.e2e_s
    assert ends[1:34].max() < columns.arrived[34] == 228.0
    assert columns.arrived.max() == 818.0
    assert any("placed by their end: 4" in str(remark) for remark in columns.remarks)


# --- who waits for whom -----------------------------------------------------------------


def test_a_request_follows_the_answer_before_it(tmp_path: Path) -> None:
    columns = columns_of(
        tmp_path,
        asked(0, api_time=5.0, think_time=0.0),
        asked(10, think_time=4.5),
        asked(20, think_time=14.5, api_time=3.0),
        asked(30, api_time=9.0),
        asked(38),
    )
    assert columns.turns is not None
    assert columns.turns.after.tolist() == [-1, 0, 1, 2, 3]
    # The third one's think_time was counted from the first answer, as the second has no end;
    # the fifth came before the recorded end of the fourth.
    assert columns.turns.pause_s.tolist() == [0.0, 4.5, 10.0, 7.0, 0.0]
    assert columns.remarks == (
        "answers without a recorded end (api_time): 1; the pause after each counts from when "
        "its request was sent",
    )
    assert columns.e2e_s is not None
    assert columns.e2e_s.tolist()[:1] == [5.0]
    assert np.isnan(columns.e2e_s[[1, 4]]).all()


def test_sub_agents_start_after_their_parent_and_it_waits_for_the_last_answer(
    tmp_path: Path,
) -> None:
    columns = columns_of(
        tmp_path,
        asked(0, api_time=4.0),
        agent(5.0, [asked(0, api_time=12.0), asked(4, api_time=2.0)]),
        agent(6.5, [asked(0, api_time=3.0)]),
        asked(20, api_time=1.0, think_time=16.0),
    )
    assert columns.turns is not None
    assert columns.arrived.tolist() == [0.0, 5.0, 9.0, 6.5, 20.0]
    assert columns.turns.after.tolist() == [-1, 0, 1, 0, 1]
    # The think_time of the last was counted from its parent's answer, not from this one.
    assert columns.turns.pause_s.tolist() == [0.0, 1.0, 0.0, 2.5, 3.0]
    assert columns.remarks == ()


def test_sub_agents_nest_and_their_clocks_add_up(tmp_path: Path) -> None:
    inner = agent(3.0, [asked(0), asked(2)])
    columns = columns_of(
        tmp_path, asked(1), agent(10.0, [asked(0), inner, asked(9)]), asked(40)
    )
    assert columns.turns is not None
    assert columns.arrived.tolist() == [1.0, 10.0, 13.0, 15.0, 19.0, 40.0]
    assert columns.turns.after.tolist() == [-1, 0, 1, 2, 3, 4]


def test_a_sub_agent_logged_when_it_ended_is_placed_by_its_start(tmp_path: Path) -> None:
    work = [asked(0, api_time=2.0), asked(90, api_time=8.0)]
    rows = asked(0, api_time=5.0), agent(105.0, work, duration_ms=100_000), asked(110)
    columns = columns_of(tmp_path, *rows)
    assert columns.turns is not None
    assert columns.arrived.tolist() == [0.0, 5.0, 95.0, 110.0]
    assert columns.turns.after.tolist() == [-1, 0, 1, 2]
    assert columns.turns.pause_s.tolist() == [0.0, 0.0, 88.0, 7.0]
    assert str(columns.remarks[0]).startswith("sub-agents placed by their end: 1;")
    # Nothing contradicts a start when the next request came late enough.
    late = columns_of(tmp_path, *rows[:2], asked(300))
    assert late.arrived.tolist() == [0.0, 105.0, 195.0, 300.0]


def test_a_sub_agent_that_outlives_the_next_request_is_not_waited_for(tmp_path: Path) -> None:
    work = [asked(0, api_time=2.0), asked(50, api_time=8.0)]
    columns = columns_of(
        tmp_path, asked(0, api_time=5.0), agent(10.0, work, duration_ms=60_000), asked(20)
    )
    assert columns.turns is not None
    assert columns.arrived.tolist() == [0.0, 10.0, 60.0, 20.0]
    assert columns.turns.after.tolist() == [-1, 0, 1, 0]
    assert str(columns.remarks[0]).startswith("sub-agents that went on")
    # Once sorted by time everybody still waits for an earlier row.
    trace = read(tmp_path / "s.json")
    assert trace.turns is not None
    assert trace.turns.after.tolist() == [-1, 0, 0, 1]


def test_requests_of_a_sub_agent_may_count_from_the_session(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, asked(0), agent(10.0, [asked(10), asked(15)]), asked(30))
    assert columns.arrived.tolist() == [0.0, 10.0, 15.0, 30.0]


times = st.floats(0, 1000, allow_subnormal=False)
maybe = st.one_of(st.just(float("nan")), st.floats(0, 100, allow_subnormal=False))


def requests_at(t_s: float, api_s: float, think_s: float) -> Item:
    return Request(t_s, 130, 5, None, api_s, float("nan"), think_s, None)


def in_order(items: list[Item]) -> tuple[Item, ...]:
    """Put the requests in the order of their clock, the sub-agents wherever they are."""
    clocks = iter(sorted(item.t_s for item in items if isinstance(item, Request)))
    return tuple(
        requests_at(next(clocks), item.api_s, item.think_s)
        if isinstance(item, Request)
        else item
        for item in items
    )


sent = st.builds(requests_at, times, maybe, maybe)
sessions = st.recursive(
    st.lists(sent, max_size=4).map(in_order),
    lambda inner: st.lists(
        st.one_of(sent, st.builds(SubAgent, times, maybe, inner)), max_size=6
    ).map(in_order),
    max_leaves=12,
)


@given(sessions)
def test_nobody_waits_in_a_circle_nor_goes_early(items: tuple[Item, ...]) -> None:
    layout = lay_out(items)
    after, start_s = layout.turns.after, layout.start_s
    rows = np.arange(len(after))
    assert np.all(after < rows)
    assert np.all(start_s[after[after >= 0]] <= start_s[after >= 0])
    # At the recorded speed, and but for think times, nobody goes before it was recorded.
    replayed_s = start_s.copy()
    for row in np.flatnonzero(after >= 0):
        api_s = np.nan_to_num(layout.requests[after[row]].api_s)
        replayed_s[row] = replayed_s[after[row]] + api_s + layout.turns.pause_s[row]
        if np.isnan(layout.requests[row].think_s):
            assert replayed_s[row] >= replayed_s[after[row]]
            if replayed_s[after[row]] >= start_s[after[row]]:
                assert replayed_s[row] >= start_s[row] - 1e-6


# --- ids, models, empty answers ---------------------------------------------------------


def test_ids_of_one_session_are_not_those_of_another(tmp_path: Path) -> None:
    def reuse(scope: str) -> float | None:
        """Return the reuse within two sessions of two equal requests each."""
        both = [
            read(written(tmp_path, session(asked(0), asked(9), id=name, hash_id_scope=scope)))
            for name in ("a", "b")
        ]
        return prefix_reuse_ratio(merge(both))

    assert reuse("local") == pytest.approx(256 / 520)
    assert reuse("global") == pytest.approx(384 / 520)


def test_models_are_told_apart(tmp_path: Path) -> None:
    work = agent(2.0, [asked(0, model="small")])
    path = written(tmp_path, session(asked(0, model="large"), work, asked(9, model="large")))
    assert 'mixes 2 models ("large" 2, "small" 1)' in read(path).notes.texts[-1]
    assert len(read(path, ReadOptions(only_model="large"))) == 2


def test_empty_answers_follow_their_policy(tmp_path: Path) -> None:
    path = written(tmp_path, session(asked(0), asked(3, out=0), asked(9)))
    assert dict(read(path).notes.dropped) == {"output of 0 tokens": 1}
    assert read(path, ONE).output_tokens.tolist() == [5, 1, 5]
    refuse = ReadOptions(zero_output=ZeroOutput.REFUSE)
    assert message(path, refuse) == "s.json request 2: out must be at least 1, got 0"


def test_pretty_and_marked_documents_are_read_too(tmp_path: Path) -> None:
    text = "\ufeff" + json.dumps(session(asked(0), asked(3)), indent=2).replace("\n", "\r\n")
    path = written(tmp_path, text)
    assert WEKA.matches(path.read_bytes())
    assert not WEKA.matches(b'{"requests": 3, "block_size": 64}')
    assert read(path).due_s.tolist() == [0.0, 3.0]
