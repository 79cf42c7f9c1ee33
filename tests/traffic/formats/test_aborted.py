"""An answer that its client did not wait for was asked for in full: so it is replayed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.recorder_parts import NOW_S, Reported, asked, finished, recording
from support.shadow_files import a_profile, a_trace_file
from tuner.cli import run
from tuner.errors import Caveat
from tuner.recorder.messages import Left, Unfinished
from tuner.run.result import read_result
from tuner.shadow.profiles import write_profile
from tuner.traffic.describe import describe
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.formats.columns import drawn_lengths
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.reshape import Router, thin
from tuner.traffic.traces import Aborted, Trace


def left(name: str, tokens: int) -> Left:
    """Return what the middleware tells of a client that went after so many tokens."""
    return Left(name, 0, NOW_S, [Unfinished(NOW_S - 3.0, 10, tokens, 0, 0.5)])


@pytest.fixture
def prod(tmp_path: Path) -> Path:
    """Return a recording of ten answers of 300 tokens and two clients that left."""
    path = tmp_path / "prod.jsonl"
    with recording(path) as recorder:
        recorder.source.sees_unfinished, recorder.source.block_size = True, 4
        for name, tokens in (("early", 0), ("late", 40)):
            recorder.offer(asked(name, list(range(10))))
            recorder.offer(left(name, tokens))
        for _ in range(10):
            recorder.offer(finished(Reported("whole", num_generation_tokens=300)))
    return path


def caveats(trace: Trace) -> set[Caveat | None]:
    return {warning.caveat for warning in describe(trace).warnings}


def test_clients_that_left_are_replayed_as_if_they_had_stayed(prod: Path) -> None:
    trace = read_trace(prod)
    assert trace.output_tokens.tolist() == [300] * 12
    assert Caveat.ANSWERS_CUT in caveats(trace)
    shown = "\n".join(describe(trace).lines())
    assert "2 of 12 answers (16.7%) were cut short: clients left; the rest of their" in shown
    assert "clients left before 2 answers were whole" in shown


def test_a_part_of_a_recording_that_is_written_has_its_share_of_them(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    row = {"input_length": 10, "output_length": 20}
    rows: list[dict[str, object]] = [{"arrived_at_s": i, **row} for i in range(1000)]
    for i in range(0, 1000, 200):
        rows[i]["status"] = "abort"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    part = tmp_path / "part.jsonl"
    write_trace(trace.slice_rows(range(700, 800)), part)
    assert Caveat.ANSWERS_CUT not in caveats(trace)  # 5 of 1,000
    assert Caveat.ANSWERS_CUT not in caveats(read_trace(part))
    write_trace(trace, part)
    assert read_trace(part).notes.aborted == 5


def test_the_share_of_them_is_of_the_rows_that_are_kept(tmp_path: Path) -> None:
    path, part = tmp_path / "prod.jsonl", tmp_path / "part.jsonl"
    row = {"input_length": 10, "output_length": 20}
    rows = [{"arrived_at_s": i, **row, "model": "ab"[i % 2]} for i in range(1000)]
    for i in range(0, 16, 2):
        rows[i]["status"] = "abort"
    path.write_text("\n".join(map(json.dumps, rows)))
    one_model = read_trace(path, options=ReadOptions(only_model="a"))
    assert Caveat.ANSWERS_CUT in caveats(one_model)  # 8 of 500, though of 1,000 rows
    assert Caveat.ANSWERS_CUT not in caveats(read_trace(path))
    write_trace(one_model, part)
    assert read_trace(part).notes.aborted == 8
    share = thin(one_model, 4, Router.ROUND_ROBIN, 0, 0.02)
    assert share.notes.aborted == 2


def test_they_can_be_kept_as_short_or_left_out(
    prod: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = read_trace(prod, options=ReadOptions(aborted=Aborted.KEEP))
    # Who got no token at all is an empty answer then, and there is an option for those.
    assert sorted(kept.output_tokens.tolist()) == [40, *[300] * 10]
    assert Caveat.ANSWERS_CUT in caveats(kept)
    assert "as short as they were cut (--aborted keep)" in kept.notes.texts[-1]
    dropped = read_trace(prod, options=ReadOptions(aborted=Aborted.DROP))
    assert dropped.output_tokens.tolist() == [300] * 10
    assert dropped.notes.dropped == {"aborted request": 2}
    assert Caveat.ANSWERS_CUT not in caveats(dropped)
    assert run(["trace", "inspect", str(prod), "--json", "--aborted", "drop"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 10


def test_a_converted_recording_still_says_that_lengths_were_drawn(prod: Path) -> None:
    copy = prod.with_name("copy.jsonl")
    write_trace(read_trace(prod), copy)
    again = read_trace(copy)
    assert again.output_tokens.tolist() == [300] * 12
    assert Caveat.ANSWERS_CUT in caveats(again)
    assert "clients left; the rest of their" in "\n".join(describe(again).lines())


@pytest.mark.slow
def test_what_is_doubtful_of_a_trace_is_a_caveat_of_the_run_on_it(tmp_path: Path) -> None:
    profile, path = tmp_path / "profile.yaml", tmp_path / "prod.jsonl"
    write_profile(profile, a_profile())
    rows = [json.loads(row) for row in a_trace_file(path, 200, per_s=16.0).open()]
    header = {"trace_header": {"version": 1, "sampled_from": "Prometheus"}}
    rows = [header, *({**row, "status": "abort"} for row in rows[::9]), *rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--method", "shadow", "--profile", str(profile), "--force-profile"]
    words += ["--run-dir", str(tmp_path / "run"), "-o", str(tmp_path / "best.yaml")]
    assert run([*words, "--trace", str(path)]) == 0
    found = {caveat.id for caveat in read_result(tmp_path / "run").caveats}
    assert {Caveat.ANSWERS_CUT, Caveat.SAMPLED_TRACE} <= found
    assert "# caveat: the trace was sampled" in (tmp_path / "best.yaml").read_text()


def test_a_few_are_reported_without_a_caveat_and_none_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "prod.jsonl"
    line = '{"arrived_at_s": 0, "input_length": 9, "output_length": 5, "status": %s}\n'
    path.write_text(line % '"stop"' * 100 + line % '"abort"')
    assert any("1 of 101 answers (1.0%)" in said for said in read_trace(path).notes.texts)
    assert Caveat.ANSWERS_CUT not in caveats(read_trace(path))
    # Other tools' words are their own.
    path.write_text("".join(line % word for word in ("200", "true", "null", "{}", '"aborted"')))
    assert read_trace(path).notes.texts == ()


@pytest.mark.parametrize("patience_tokens", [900.0, 400.0])
def test_the_demand_of_users_who_give_up_is_found_again(patience_tokens: float) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.choice([100, 3000], 20_000)
    # Longer prompts get longer answers; users leave after a time that is their own.
    asked_for = np.maximum(1, rng.lognormal(np.where(prompt > 1000, 6.0, 4.0), 0.7)).astype(int)
    stayed = rng.exponential(patience_tokens, prompt.size).astype(int)
    served, cut = np.minimum(asked_for, stayed), stayed < asked_for
    drawn = drawn_lengths(prompt, served, cut, seed=1)
    assert served.mean() < 0.8 * asked_for.mean()
    assert drawn.mean() == pytest.approx(asked_for.mean(), rel=0.05)
    for length in (100, 3000):
        for q in (0.5, 0.9):
            true = np.quantile(asked_for[prompt == length], q)
            assert np.quantile(drawn[prompt == length], q) == pytest.approx(true, rel=0.06)


rows = st.lists(st.tuples(st.integers(1, 99), st.integers(0, 9), st.booleans()), min_size=1)


@given(rows, st.integers(0, 3))
def test_no_answer_gets_shorter_and_whole_ones_stay(
    found: list[tuple[int, int, bool]], seed: int
) -> None:
    prompt, output, cut = (np.array(column) for column in zip(*found, strict=True))
    drawn = drawn_lengths(prompt, output, cut, seed)
    assert (drawn[~cut] == output[~cut]).all()
    assert (drawn >= output).all()
    can_grow = output < output.max()
    assert (drawn[cut & can_grow] > output[cut & can_grow]).all()
    assert set(drawn.tolist()) <= set(output.tolist())
    assert drawn.tolist() == drawn_lengths(prompt, output, cut, seed).tolist()
