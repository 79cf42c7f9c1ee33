"""Agent sessions: every request is read, and each waits for what it waited for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.describe import prefix_reuse_ratio
from tuner.errors import TraceError, TunerError, UsageError
from tuner.formats.assemble import assemble
from tuner.formats.columns import Columns, ReadOptions, TimeUnit
from tuner.formats.weka import WEKA
from tuner.formats.weka_sessions import Item, Request, SubAgent, lay_out
from tuner.merging import merge
from tuner.traces import Trace, ZeroOutput

ANY = ReadOptions(skip_invalid=True, max_invalid_ratio=1.0)
ONE = ReadOptions(zero_output=ZeroOutput.ONE)

PUBLISHED = [f"trace_{number}.json" for number in ("0028", "0091", "0277", "0358", "0375")]


def asked(t: float, **more: object) -> dict[str, Any]:
    """Return a request of 130 tokens in and 5 out, with two whole blocks hashed."""
    return {"t": t, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2], **more}


def agent(t: float, requests: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": requests, **more}


def session(*requests: object, **more: object) -> dict[str, Any]:
    head = {"id": "s", "block_size": 64, "hash_id_scope": "local"}
    return {**head, **more, "requests": list(requests)}


def written(folder: Path, content: Mapping[str, Any] | str | bytes) -> Path:
    path = folder / "s.json"
    text = json.dumps(content) if isinstance(content, Mapping) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def columns_of(folder: Path, *requests: object, **more: object) -> Columns:
    return WEKA.read(written(folder, session(*requests, **more)), ReadOptions())


def read(path: Path, options: ReadOptions | None = None) -> Trace:
    options = options or ReadOptions()
    columns = WEKA.read(path, options)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return assemble(columns, options, source=path.name, format_name="weka", sha256=sha256)


def message(path: Path, options: ReadOptions | None = None) -> str:
    """Return what reading says about a wrong file."""
    with pytest.raises(TraceError) as caught:
        read(path, options)
    assert caught.value.hint
    return caught.value.message.replace(str(path), path.name)


def is_ours(said: TunerError) -> bool:
    """Say whether an error is one that a user can read."""
    return said.exit_code == 2 and said.message.isprintable() and len(said.message) < 500


# --- published sessions -----------------------------------------------------------------


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
    assert any("placed by their end: 4" in remark for remark in columns.remarks)


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
    assert columns.remarks[0].startswith("sub-agents placed by their end: 1;")
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
    assert columns.remarks[0].startswith("sub-agents that went on")
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
    assert 'mixes 2 models ("large" 2, "small" 1)' in read(path).notes.remarks[-1]
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


# --- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"t": 9, "in": 1}, "lacks out"),
        ([1], "must be a JSON object, got [1]"),
        (asked(1), "t must not be less than 2, that of the request before it, got 1"),
        (asked(9) | {"t": "soon"}, 't must be a number of seconds, at least 0, got "soon"'),
        (asked(9) | {"t": -1}, "t must be a number of seconds, at least 0, got -1"),
        (asked(9) | {"t": 10**400}, "t must be at most 1,000,000,000 seconds"),
        (asked(9, out=1.5), "out must be a whole number of tokens, got 1.5"),
        (asked(9, out=True), "out must be a whole number of tokens, got true"),
        (asked(9, **{"in": 10**9}), "in must be at most 10,000,000 tokens"),
        (asked(9, api_time="1"), 'api_time must be a number of seconds, at least 0, got "1"'),
        (asked(9, model=7), "model must be text, got 7"),
        (
            asked(9, hash_ids=[1]),
            "hash_ids must hold 2 or 3 ids for 130 tokens in blocks of 64",
        ),
        (asked(9, hash_ids=[]), "hash_ids must hold 2 or 3 ids"),
        (asked(9, hash_ids=[1, "x"]), "hash_ids must be a list of 64-bit whole numbers"),
        (asked(9, hash_ids=[1, 1 << 63]), "hash_ids must be a list of 64-bit whole numbers"),
    ],
)
def test_a_wrong_request_is_named_by_its_number_and_may_be_skipped(
    tmp_path: Path, row: object, reason: str
) -> None:
    path = written(tmp_path, session(agent(0.0, [asked(0)]), asked(2), row, asked(9)))
    said = message(path)
    assert said.startswith(f"s.json request 3: {reason}")
    assert len(said) < 250
    trace = read(path, ANY)
    assert len(trace) == 3
    assert sum(trace.notes.dropped.values()) == 1
    assert trace.turns is not None
    assert trace.turns.after.tolist() == [-1, 0, 1]
    assert "1 of 4 rows are invalid" in message(path, ReadOptions(skip_invalid=True))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (session(agent(-1, [asked(0)])), "sub-agent 1: t must be a number of seconds"),
        (session(agent(1, [asked(0)], duration_ms="x")), "sub-agent 1: duration_ms must be a"),
        (session(), "holds no request"),
        (session(asked(0), hash_id_scope="here"), 'must be "local" or "global", got "here"'),
        (session(asked(0), block_size=0), "block_size must be a whole number above 0, got 0"),
        ({"block_size": 64, "requests": {}}, "requests must be a list, got {}"),
        ("[1]", "must be a JSON object, got [1]"),
        ('{"requests": [', "is not JSON"),
        ('{"requests": []}\n{"requests": []}', "is not JSON: Extra data"),
        ('{"requests": NaN}', "is not as expected: JSON is malformed"),
        (b'{"requests": "\xff"}', "is not UTF-8: byte 15 is 0xff"),
        ('{"requests": ' + "[" * 100_000, "is nested too deep"),
        ('{"requests": ' + "9" * 9000 + "}", "holds a number that is too long"),
    ],
)
def test_a_wrong_session_is_refused(
    tmp_path: Path, content: dict[str, Any] | str | bytes, reason: str
) -> None:
    assert reason in message(written(tmp_path, content))


def test_sub_agents_without_end_are_refused(tmp_path: Path) -> None:
    row = asked(0)
    for _ in range(60):
        row = agent(0.0, [row])
    assert "nested at most 32 deep" in message(written(tmp_path, session(row)))


def test_a_time_unit_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, session(asked(0)))
    with pytest.raises(UsageError, match="--time-unit"):
        read(path, ReadOptions(time_unit=TimeUnit.MILLISECONDS))


# --- anything at all --------------------------------------------------------------------

GOOD = json.dumps(
    session(
        asked(0, api_time=2.5, think_time=0.0, model="m"),
        agent(3.0, [asked(0), asked(1.5)], duration_ms=2000),
        asked(8, ttft=0.5),
    )
)
oddities = st.sampled_from(
    [
        "NaN", "-1", "1e999", "9" * 400, "9" * 5000, "null", "true", '"x"', "{}", "[]", "\0",
        "[" * 3000, '{"a":' * 3000, '"' + "y" * 10_000 + '"', "\ud83d", "0.5", "1e300", ",",
        '"subagent"', '{"type": "subagent", "t": 1, "requests": [{}]}',
    ]
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, good: str = GOOD) -> bytes:
    """Return a good document with some stretches replaced by something odd."""
    text = good
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(start + 12, len(text))))
        text = text[:start] + draw(oddities) + text[end:]
    return text.encode("utf-8", "surrogatepass")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.one_of(st.binary(max_size=200), mutated()), st.sampled_from([ReadOptions(), ANY, ONE])
)
def test_any_bytes_give_a_trace_or_an_error_of_ours(
    tmp_path: Path, data: bytes, options: ReadOptions
) -> None:
    WEKA.matches(data)
    try:
        trace = read(written(tmp_path, data), options)
    except TunerError as error:
        said = error
    else:
        assert len(trace) >= 1
        "".join(trace.notes.remarks).encode()
        return
    assert is_ours(said)


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
keys = st.sampled_from(
    ["t", "in", "out", "hash_ids", "api_time", "think_time", "ttft", "model", "type",
     "requests", "duration_ms", "block_size", "hash_id_scope"]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_in_any_field_gives_a_trace_or_an_error_of_ours(
    tmp_path: Path, data: st.DataObject
) -> None:
    content = json.loads(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        places = [content, *(r for r in content["requests"] if isinstance(r, dict))]
        places[data.draw(st.integers(0, len(places) - 1))][data.draw(keys)] = data.draw(values)
        if not isinstance(content["requests"], list):
            break
    try:
        trace = read(
            written(tmp_path, content), data.draw(st.sampled_from([ReadOptions(), ANY]))
        )
    except TunerError as error:
        said = error
    else:
        assert len(trace) >= 1
        return
    assert is_ours(said)
