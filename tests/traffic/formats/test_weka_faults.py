"""Agent sessions with faults, and any bytes at all, give a trace or an error of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.any_bytes import gives_a_trace_or_an_error_of_ours, spoilt
from support.weka_parts import ANY, ONE, agent, asked, message, read, session, written
from tuner.errors import UsageError
from tuner.traffic.formats.columns import ReadOptions, TimeUnit
from tuner.traffic.formats.weka import WEKA

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


GOOD = json.dumps(
    session(
        asked(0, api_time=2.5, think_time=0.0, model="m"),
        agent(3.0, [asked(0), asked(1.5)], duration_ms=2000),
        asked(8, ttft=0.5),
    )
)
ODD = ['"subagent"', '{"type": "subagent", "t": 1, "requests": [{}]}']


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.one_of(st.binary(max_size=200), spoilt([GOOD], ODD)),
    st.sampled_from([ReadOptions(), ANY, ONE]),
)
def test_any_bytes_give_a_trace_or_an_error_of_ours(
    tmp_path: Path, data: bytes, options: ReadOptions
) -> None:
    WEKA.matches(data)
    gives_a_trace_or_an_error_of_ours(lambda: read(written(tmp_path, data), options))


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
    options = data.draw(st.sampled_from([ReadOptions(), ANY]))
    gives_a_trace_or_an_error_of_ours(lambda: read(written(tmp_path, content), options))
