"""A trace from Prometheus holds what its counters say, whatever they went through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.prometheus_parts import (
    Page,
    backfill,
    need_prometheus,
    prometheus,
    read,
    refused,
    scraped,
    with_history,
)
from support.prometheus_past import (
    CHATTY,
    END_S,
    GAP_S,
    HOUR_S,
    MOVED,
    OLD,
    PLAIN,
    RESTART_S,
    SHAKEN,
    START_S,
    TERSE,
    TWINS,
    Floats,
)
from support.shadow_parts import a_reference, a_shape
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.loop import replay
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.traffic.describe import describe, prefix_reuse_ratio, reused_tokens
from tuner.traffic.formats.registry import read_trace
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.prometheus import (
    Scraped,
    Selection,
    another_load,
    known_in_part,
    trace_from_prometheus,
)
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import ClockOrigin, Trace


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus that knows several servers' past."""
    need_prometheus()
    folder = tmp_path_factory.mktemp("prometheus")
    with with_history(folder, PLAIN, SHAKEN, *TWINS, *MOVED, OLD, CHATTY, TERSE) as found:
        yield found


def between_scrapes(since_start_s: Floats, step_s: int = 30) -> list[int]:
    """Count instants by the scrape that saw them first, that of their own instant included."""
    places = np.ceil(since_start_s / step_s).astype(np.int64) - 1
    counts: list[int] = np.bincount(places, minlength=2 * HOUR_S // step_s).tolist()
    return counts


def drawn(trace: Trace, step_s: int = 30) -> list[int]:
    """Count a trace's requests likewise."""
    return between_scrapes(trace.due_s + (trace.zero_s - START_S), step_s)


def shown(trace: Trace) -> str:
    """Return all that the reader of a trace is told."""
    return " / ".join(trace.notes.texts)


def test_between_scrapes_come_as_many_requests_as_came(url: str) -> None:
    trace = read(url, "plain")
    assert drawn(trace) == between_scrapes(PLAIN.arrived_s - START_S)
    assert len(trace) == len(PLAIN.arrived_s)


def test_lengths_have_the_recorded_means_and_the_quantiles_within_their_ranges(
    url: str,
) -> None:
    trace = read(url, "plain")
    for tokens, true in (
        (trace.prompt_tokens, PLAIN.prompt),
        (trace.output_tokens, PLAIN.output),
    ):
        assert tokens.mean() == pytest.approx(true.mean(), rel=0.01)
        for q in (0.1, 0.5, 0.9, 0.99):
            assert np.quantile(tokens, q) == pytest.approx(np.quantile(true, q), rel=0.15)


def test_the_trace_says_where_it_comes_from_and_what_it_cannot_know(url: str) -> None:
    trace = read(url, "plain")
    assert trace.format == "prometheus"
    assert trace.origin is ClockOrigin.WALL
    assert trace.zero_s == pytest.approx(PLAIN.arrived_s[0], abs=30)
    assert trace.notes.sampled_from == f"Prometheus at {url.removeprefix('http://')}"
    assert len(trace.sha256) == 64
    for words in (
        "scrapes 30 s apart",
        "requests that clients gave up are in no counter",
        "of 200 or more finished requests",
        "of the prompts lie above the last bound, 5,000 tokens: they are drawn up to",
        "25% of the prompt tokens hit the server's own",
        "KV cache was at most 50% full",
    ):
        assert words in shown(trace)
    for words in ("no data", "began anew", "are added up", "abort"):
        assert words not in shown(trace)
    assert known_in_part(trace.notes) == another_load(trace.notes) == ""
    caveats = {warning.caveat for warning in describe(trace).warnings}
    assert Caveat.SAMPLED_TRACE in caveats
    assert Caveat.CLOSED_LOOP not in caveats


@pytest.mark.parametrize("concurrency", [False, True])
def test_as_many_prompt_tokens_hit_as_on_the_server_and_when_they_did(
    url: str, tmp_path: Path, *, concurrency: bool
) -> None:
    trace = read(url, "chatty", concurrency=concurrency)
    is_later = CHATTY.arrived_s > START_S + HOUR_S
    hits = CHATTY.prompt * np.where(is_later, 0.4, 0.8)
    true = float(hits.sum() / CHATTY.prompt.sum())
    assert prefix_reuse_ratio(trace) == pytest.approx(true, abs=0.01)
    assert trace.hashes is not None
    reused = reused_tokens(trace.hashes, trace.prompt_tokens)
    late = trace.due_s + trace.zero_s > START_S + HOUR_S
    for part, ratio in ((late, 0.4), (~late, 0.8)):
        found = reused[part].sum() / trace.prompt_tokens[part].sum()
        assert found == pytest.approx(ratio, abs=0.03)
    assert f"{true:.0%} of the prompt tokens hit the server's own prefix cache, and " in shown(
        trace
    )
    # Long prompts begin as others do as well as short ones.
    shares = reused / trace.prompt_tokens
    assert np.median(shares[~late]) == pytest.approx(0.8, abs=0.05)
    write_trace(trace, tmp_path / "chatty.jsonl")
    again = read_trace(tmp_path / "chatty.jsonl")
    assert prefix_reuse_ratio(again) == prefix_reuse_ratio(trace)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("num_blocks", [20_000, 2_000])
def test_vllms_own_scheduler_finds_as_many_hits_as_the_server_had(
    url: str, num_blocks: int
) -> None:
    trace = read(url, "chatty", since_s=HOUR_S)
    limits = EngineLimits(64, 2048)
    reference = a_reference(a_shape(max_model_len=16_384), limits, num_blocks)
    measured = measure([replay(reference, trace, PromptSource(trace, 1000), ReplayPlan())])
    assert measured.completed == len(trace)
    assert measured.prefix_cache_hit_ratio == pytest.approx(0.4, abs=0.02)


def test_hits_that_prompts_of_this_length_cannot_have_are_reported(url: str) -> None:
    trace = read(url, "terse")
    missed = another_load(trace.notes)
    assert missed.startswith("prefix hits cannot be imitated: 97% of the prompt tokens hit")
    assert re.search(r"prompts this short share 7\d% at most", missed)
    assert missed in shown(trace)
    assert known_in_part(trace.notes).endswith(missed)


def test_the_seed_decides_what_is_drawn_and_not_what_was_counted(url: str) -> None:
    first, again, other = (read(url, "plain", seed=seed) for seed in (3, 3, 4))
    assert first.due_s.tolist() == again.due_s.tolist()
    assert first.prompt_tokens.tolist() == again.prompt_tokens.tolist()
    assert first.output_tokens.tolist() == again.output_tokens.tolist()
    assert first.sha256 == again.sha256 == other.sha256
    assert first.due_s.tolist() != other.due_s.tolist()
    assert drawn(first) == drawn(other)


def test_a_restart_and_a_gap_neither_lose_nor_invent_requests_elsewhere(url: str) -> None:
    trace = read(url, "shaken")
    found, came = np.array(drawn(trace)), np.array(between_scrapes(SHAKEN.arrived_s - START_S))
    starts_s = START_S + 30.0 * np.arange(len(came))
    # What the process did between its last scrape and its death is lost with it.
    is_restart = (starts_s < RESTART_S) & (starts_s + 30 >= RESTART_S)
    is_gap = (starts_s >= GAP_S[0]) & (starts_s < GAP_S[1])
    sure = ~(is_restart | is_gap)
    assert found[sure].tolist() == came[sure].tolist()
    assert found[is_restart].sum() <= came[is_restart].sum()
    assert found[is_gap].sum() == 0
    assert f"{came[is_gap].sum():,} counted across gaps are left out" in shown(trace)
    assert "no data for 600 s in all, and no request was invented there" in shown(trace)
    assert known_in_part(trace.notes).startswith(
        "the current traffic is known in part only: there is no data for 600 s"
    )
    assert another_load(trace.notes) == ""
    assert "the counters began anew 1 times" in shown(trace)


def test_the_engines_of_a_model_are_added_up_or_one_is_picked(url: str) -> None:
    one, other = TWINS
    both = read(url, "twins")
    assert len(both) == len(one.arrived_s) + len(other.arrived_s)
    assert "2 engines at once are added up: tune trace thin --replicas 2" in shown(both)
    why = "the traffic is that of several engines at once, and a profile is of one: name one"
    assert known_in_part(both.notes).startswith(why)
    assert known_in_part(both.notes) == another_load(both.notes)
    assert len(read(url, "twins", engine="1")) == len(other.arrived_s)
    assert "2 engines are added up, each in place of the one before" in shown(
        read(url, "moved")
    )
    said = refused(Scraped(url, Selection("twins", "7")))
    assert 'knows no engine "7" of this model; it has "0", "1"' in said.message


def test_metrics_of_older_versions_are_read_and_without_gauges_finishes_are_arrivals(
    url: str,
) -> None:
    trace = read(url, OLD.model)
    is_done = OLD.ends_s <= END_S
    assert drawn(trace) == between_scrapes(OLD.ends_s[is_done] - START_S)
    late_s = float((OLD.ends_s - OLD.arrived_s)[is_done].mean())
    assert "arrivals stand where requests finished" in shown(trace)
    assert f"they came earlier, by {late_s:.3g} s on average" in shown(trace)
    assert "25% of the prompt tokens hit" in shown(trace)
    assert "KV cache was at most 50% full" in shown(trace)
    said = refused(scraped(url, OLD.model), concurrency=True)
    assert "has no vllm:num_requests_running between" in said.message


def test_requests_in_flight_become_a_closed_loop_trace(url: str, tmp_path: Path) -> None:
    trace = read(url, "plain", concurrency=True)
    flow = trace.concurrency
    assert flow is not None
    scrapes_s = np.arange(START_S, END_S + 1, 30.0)
    true = np.array([PLAIN.in_flight(at_s) for at_s in scrapes_s.tolist()])
    rows = np.searchsorted(flow.times_s, scrapes_s - trace.zero_s, side="right") - 1
    is_in = rows >= 0
    assert flow.in_flight[rows[is_in]].tolist() == true[is_in].tolist()
    assert not true[~is_in].any()
    work_s = float((true[:-1] * 30).sum())
    assert len(trace) == pytest.approx(work_s / (PLAIN.output.mean() * 0.02), rel=0.05)
    caveats = {warning.caveat for warning in describe(trace).warnings}
    assert {Caveat.SAMPLED_TRACE, Caveat.CLOSED_LOOP} <= caveats
    write_trace(trace, tmp_path / "flow.jsonl")
    again = read_trace(tmp_path / "flow.jsonl")
    assert again.concurrency is not None
    assert again.concurrency.in_flight.tolist() == flow.in_flight.tolist()
    assert again.due_s == pytest.approx(trace.due_s, abs=1e-5)


@pytest.mark.slow
def test_more_points_than_prometheus_gives_at_once_are_asked_for_in_turns(url: str) -> None:
    # 14,401 points; Prometheus refuses more than 11,000.
    fine = read(url, "plain", since_s=4 * HOUR_S, step_s=1)
    assert drawn(fine, 15) == between_scrapes(PLAIN.arrived_s - START_S, 15)
    assert "there is data for 2.0 h of the 4.0 h asked for" in known_in_part(fine.notes)


def page_of(finished: int, running: int) -> str:
    """Return a metrics page on which every request had 40 tokens in and 7 out."""
    lines = [
        f'vllm:num_requests_running{{model_name="m"}} {running}',
        'vllm:num_requests_waiting{model_name="m"} 0',
    ]
    for name, tokens in (("prompt", 40), ("generation", 7)):
        family = f"vllm:request_{name}_tokens"
        for bound in ("5.0", "10.0", "50.0", "+Inf"):
            count = finished if float(bound) >= tokens else 0
            lines.append(f'{family}_bucket{{model_name="m",le="{bound}"}} {count}')
        lines.append(f'{family}_count{{model_name="m"}} {finished}')
        lines.append(f'{family}_sum{{model_name="m"}} {finished * tokens}')
    return "\n".join([*lines, ""])


@pytest.mark.slow
def test_a_page_that_counts_up_and_begins_anew_is_followed(tmp_path: Path) -> None:
    need_prometheus()
    page = Page()
    try:
        with prometheus(tmp_path, scrapes=[page.port]) as live:
            for finished, running in ((100, 0), (100, 4), (120, 0), (5, 1), (9, 0), (9, 0)):
                page.show(page_of(finished, running))
            trace = trace_from_prometheus(Scraped(live), since_s=60, step_s=1)
    finally:
        page.close()
    # 20 until the restart; then 5 have finished and 1 is in flight, and 3 more come.
    assert len(trace) == 20 + 6 + 3
    assert set(trace.prompt_tokens.tolist()) <= set(range(11, 51))
    assert trace.prompt_tokens.mean() == pytest.approx(40, abs=0.5)
    assert trace.output_tokens.mean() == pytest.approx(7, abs=0.5)
    assert "the counters began anew 1 times" in shown(trace)


def test_what_is_asked_of_a_full_server_is_told_from_what_it_finishes(
    tmp_path: Path, shared_traces: Path
) -> None:
    need_prometheus()
    folder = shared_traces / "synthetic" / "vllm_0.33.0_metrics"
    lines = [
        f"{line} {START_S + 30 * at}"
        for at, page in enumerate(("t030", "t045", "t180"))
        for line in (folder / f"saturated_{page}.prom.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    backfill(tmp_path, lines)
    with prometheus(tmp_path) as full:
        trace = read(full, "Qwen/Qwen3-8B")
    finished, in_flight = 453 - 50, (16 + 316) - 9
    assert len(trace) == finished + in_flight
    assert trace.prompt_tokens.mean() == pytest.approx((419820 - 34433) / finished, rel=0.01)
    assert trace.output_tokens.mean() == pytest.approx((118180 - 5251) / finished, rel=0.01)
    assert "18% of the prompt tokens hit" in shown(trace)
