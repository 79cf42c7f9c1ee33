"""What is said about the winner follows from the records, and nothing more is said."""

from __future__ import annotations

from typing import Any

import pytest

from support.optional import not_none
from tuner.engine.gpu import GpuLog
from tuner.engine.limits import EngineLimits
from tuner.replay.slo import Slo
from tuner.run.evidence import (
    MetricChange,
    gpu_text,
    kv_text,
    limited_by,
    load_text,
    metric_changes,
)
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial

WINNER, CURRENT = EngineLimits(8, 2048), EngineLimits(32, 2048)


def a_record(
    limits: EngineLimits,
    p99_s: float,
    phase: Phase = Phase.LADDER,
    round_: int = 0,
    **measured: Any,
) -> Trial:
    content = {
        "e2e_s": {"p50": p99_s / 2, "p99": p99_s},
        "tpot_s": {"p50": 0.01, "p99": 0.02},
        "requests_per_s": 1 / p99_s,
        "gpu_cache_usage_perc": {"mean": 0.1, "p99": 0.2, "max": 0.3},
        "preemptions": 0,
        "running": {"mean": 4.0, "max": limits.max_num_seqs},
        "queue_depth": {"mean": 0.0, "max": 0.0},
        "cut_reason": None,
        **measured,
    }
    return Trial.of(0, limits, phase, round_, Score(Tier.GOOD, p99_s, "e2e_p99"), content)


def test_rows_pair_the_rounds_that_both_raced() -> None:
    records = [a_record(WINNER, 2.0, Phase.RACE, n) for n in (1, 2, 3, 4)]
    records += [a_record(CURRENT, 4.0, Phase.RACE, n) for n in (1, 2, 3)]
    made = {row.metric: row for row in metric_changes(records, WINNER, CURRENT, "p99")}
    row = made["e2e_p99"]
    assert (row.before, row.after, row.rounds) == (4.0, 2.0, 3)
    assert row.change_ratio == pytest.approx(-0.5, abs=0.01)
    low, high = map(not_none, not_none(row.change_interval))
    assert -0.55 < low < -0.5 < high < -0.45
    assert f"4.00 s -> 2.00 s   (-50.0%, interval {low:+.1%} … {high:+.1%})" in row.text
    assert made["requests_per_s"].change_ratio == pytest.approx(1.0, abs=0.02)
    assert made["requests_per_s"].text.split()[1:4] == ["0.250/s", "->", "0.500/s"]


def test_one_round_has_a_wide_interval_and_none_has_no_row() -> None:
    records = [a_record(WINNER, 2.0, Phase.RACE, 1), a_record(CURRENT, 4.0, Phase.RACE, 1)]
    (row, *_) = metric_changes(records, WINNER, CURRENT, "p99")
    assert row.change_ratio == pytest.approx(-0.5, abs=0.01)
    low, high = not_none(row.change_interval)
    # Two replays of one setting differ by 5 %, which nobody has measured better yet.
    assert not_none(high) - not_none(low) > 2 * 1.645 * 0.05 * 2**0.5 * 0.5
    searched = [a_record(WINNER, 2.0), a_record(CURRENT, 4.0)]
    assert metric_changes(searched, WINNER, CURRENT, "p99") == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "0.0123"),
        (1234.5, "1,234"),
        (float("inf"), "inf"),
        (9.999, "10.00"),
    ],
)
def test_numbers_have_three_digits_that_count_and_no_exponent(value: float, text: str) -> None:
    shown = MetricChange(
        metric="e2e_p99",
        unit="s",
        before=value,
        after=value,
        change_ratio=None,
        change_interval=None,
        rounds=1,
    ).text
    assert f"{text} s ->" in shown


def test_a_full_cache_and_preemptions_are_told_under_both_names() -> None:
    full = a_record(WINNER, 2.0, gpu_cache_usage_perc={"max": 0.99}, preemptions=3)
    text = kv_text([full], WINNER)
    assert text == "gpu_cache_usage_perc (kv_cache_usage_perc) peak 0.99, 3 preemptions"
    assert "KV cache" in limited_by([full], WINNER, (), "p99")
    assert kv_text([full], CURRENT) == "KV cache not measured"
    assert limited_by([full], CURRENT, (), "p99") == "nothing that was measured"


def test_the_cache_is_told_of_an_engine_that_is_started_as_it_is_deployed() -> None:
    raced = a_record(
        WINNER, 2.0, phase=Phase.RACE, gpu_cache_usage_perc={"max": 0.99}, preemptions=3
    )
    roomy: dict[str, Any] = {"gpu_cache_usage_perc": {"max": 0.61}, "preemptions": 0}
    shadow = a_record(WINNER, 2.0, phase=Phase.SHADOW, **roomy)
    told = kv_text([raced, shadow], WINNER)
    assert "peak 0.99, 3 preemptions, on the engine that raced" in told
    assert "as deployed peak 0.61, no preemption (predicted)" in told
    cold = a_record(WINNER, 2.0, phase=Phase.COLD, **roomy)
    told = kv_text([raced, shadow, cold], WINNER)
    assert told.endswith("peak 0.61, no preemption, started as it is deployed")
    assert "KV cache" not in limited_by([raced, cold], WINNER, (), "p99")
    assert "KV cache" in limited_by([raced], WINNER, (), "p99")


def test_what_the_driver_said_is_pooled_over_all_replays() -> None:
    log = GpuLog(4, 1410.0, 1755.0, 1980.0, 600.0, 70.0, 0.5, 0.0, ("heat",))
    hot = a_record(WINNER, 2.0, gpu=log.as_json())
    text = gpu_text([hot, a_record(CURRENT, 2.0, gpu=None), hot])
    assert "SM clock 1,755 MHz (1,410 … 1,980)" in text
    assert "slowed down 50 % (heat)" in text
    assert gpu_text([a_record(CURRENT, 2.0)]) == ""


def test_an_slo_limits_when_it_is_near_and_not_when_it_is_far() -> None:
    records = [a_record(WINNER, 2.0)]
    near, far = Slo.parse("e2e_p99=2.1s"), Slo.parse("tpot_p99=1s")
    said = limited_by(records, WINNER, (near, far), "p99")
    assert "SLO e2e_p99=2.1s" in said
    assert "tpot" not in said
    endless = a_record(WINNER, 2.0, ttft_s={"p99": None, "lost": 9})
    assert "SLO ttft_p99=1s" in limited_by(
        [endless], WINNER, (Slo.parse("ttft_p99=1s"),), "p99"
    )


def test_neighbours_that_are_worse_are_named_with_what_they_raise() -> None:
    records = [
        a_record(EngineLimits(4, 2048), 3.0),
        a_record(WINNER, 2.0),
        a_record(EngineLimits(16, 2048), 2.02),
        a_record(EngineLimits(2, 2048), 9.0),
    ]
    assert limited_by(records, WINNER, (), "p99") == "4 raises e2e_p99 by 50%"


def test_a_neighbour_that_failed_or_was_cut_short_is_called_that() -> None:
    failed = Trial.of(
        1, CURRENT, Phase.LADDER, 0, Score(Tier.FAILED, 1, "failed"), None, "no memory"
    )
    cut = a_record(EngineLimits(4, 2048), 3.0, cut_reason="took too long")
    said = limited_by([failed, a_record(WINNER, 2.0), cut], WINNER, (), "p99")
    assert said == "4 was cut short: took too long; 32 failed"


def test_who_ran_at_once_is_of_the_whole_trace_where_a_window_raced() -> None:
    """A window of a second may hold fewer requests than the cap; its hour fills it."""
    few, many = ({"mean": 1.0, "max": float(n)} for n in (3, WINNER.max_num_seqs))
    raced = a_record(WINNER, 2.0, Phase.RACE, 1, running=few)
    full, idle = (a_record(WINNER, 2.0, Phase.SHADOW, running=ran) for ran in (many, few))
    never = "the traffic: at most 3 requests ran at once, the cap never bound"
    assert limited_by([raced, full], WINNER, (), "p99") == never
    told = limited_by([raced, full], WINNER, (), "p99", is_part=True)
    assert told == "nothing that was measured"
    told = limited_by([raced, idle], WINNER, (), "p99", is_part=True)
    assert told == f"{never} (predicted)"


def test_where_a_window_raced_the_load_is_told_of_the_whole_trace_first() -> None:
    """The busiest second is more than the engine can take, the trace is not."""
    busy: dict[str, Any] = {"offered_per_s": 64.0, "utilisation": 2.2}
    calm: dict[str, Any] = {"offered_per_s": 30.0, "utilisation": 0.8}
    records = [
        a_record(WINNER, 2.0, Phase.RACE, 1, **busy),
        a_record(WINNER, 2.0, Phase.SHADOW, **calm),
    ]
    told = load_text(records, WINNER, is_part=True)
    whole, window = told.split("; in the window that raced ")
    assert whole == "offered 30/s, finished 0.5/s: utilisation 80%, predicted"
    assert (
        window == load_text(records, WINNER) == "offered 64/s, finished 0.5/s: overloaded 2.2 x"
    )
    assert "the load" not in limited_by(records, WINNER, (), "p99", is_part=True)
    assert "the load, 2.2 x" in limited_by(records, WINNER, (), "p99")


def test_a_load_that_is_not_the_runs_own_is_told_beside_the_rates() -> None:
    held: dict[str, Any] = {
        "offered_per_s": 120.8,
        "utilisation": 0.88,
        "requests_per_s": 119.2,
    }
    records = [a_record(WINNER, 2.0, Phase.SHADOW, load=4.0, capacity=4.0, **held)]
    assert load_text(records, WINNER) == (
        "offered 121/s, finished 119/s: utilisation 88%, at 4 x the recorded load, predicted"
    )


def test_requests_are_told_as_lost_of_replays_alone_that_were_not_cut_short() -> None:
    load: dict[str, Any] = {"offered_per_s": 30.0, "utilisation": 0.8, "lost_ratio": 0.25}
    whole = a_record(WINNER, 2.0, **load)
    cut = a_record(WINNER, 2.0, cut_reason="took too long", **load | {"lost_ratio": 0.5})
    assert load_text([whole, cut], WINNER).endswith("; 25.0% of the requests timed out")
    assert load_text([cut], WINNER).endswith("utilisation 80%")


def test_a_cap_that_never_bound_is_limited_by_the_traffic() -> None:
    idle = a_record(WINNER, 2.0, running={"mean": 1.0, "max": 3})
    said = limited_by([idle], WINNER, (), "p99")
    assert said == "the traffic: at most 3 requests ran at once, the cap never bound"


def test_where_many_wait_below_the_cap_it_is_their_prompts_that_limit() -> None:
    """A closed loop of 200 whose prompts fill every step never runs more than 57 at once."""
    limits = EngineLimits(256, 2048)
    held: dict[str, Any] = {
        "running": {"mean": 28.0, "max": 57.0},
        "queue_depth": {"mean": 165.0, "max": 199.0},
    }
    ran = "at most 57 requests ran at once, the cap never bound"
    full = a_record(limits, 2.0, max_step_tokens=2048, **held)
    said = f"reading prompts: up to 199 waited for the token budget, {ran}"
    assert limited_by([full], limits, (), "p99") == said
    # A prompt that waits for half the cache leaves that free.
    small = a_record(limits, 2.0, max_step_tokens=600, **held)
    said = f"the KV cache: up to 199 waited though no step was full, {ran}"
    assert limited_by([small], limits, (), "p99") == said


def test_of_a_winner_that_never_raced_what_is_predicted_is_told_as_that() -> None:
    predicted = a_record(
        WINNER,
        2.0,
        Phase.SHADOW,
        offered_per_s=30.0,
        utilisation=1.2,
        gpu_cache_usage_perc={"max": 0.99},
    )
    others = [a_record(CURRENT, 2.0, Phase.RACE, n) for n in (1, 2)]
    records = [predicted, *others]
    for is_part in (False, True):
        told = load_text(records, WINNER, is_part=is_part)
        assert told == "offered 30/s, finished 0.5/s: overloaded 1.2 x, predicted"
        said = limited_by(records, WINNER, (Slo.parse("e2e_p99=2.1s"),), "p99", is_part=is_part)
        assert said == (
            "SLO e2e_p99=2.1s (predicted); the load, 1.2 x what it can sustain (predicted); "
            "the KV cache, which was full (predicted)"
        )
    assert kv_text(records, WINNER).endswith("peak 0.99, no preemption, predicted")
    assert "predicted" not in kv_text(records, CURRENT)
