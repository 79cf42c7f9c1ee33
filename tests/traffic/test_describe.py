"""A description agrees with published numbers, and warns exactly where it should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import Caveat
from tuner.stats import Floats
from tuner.traffic.describe import describe
from tuner.traffic.formats import read_trace
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import ReadNotes, Trace

PUBLIC = (
    "azure_2023_code.open.csv",
    "azure_2023_conv.open.csv",
    "mooncake_conversation.open.jsonl",
)


def a_trace(
    due_s: npt.ArrayLike,
    prompt: npt.ArrayLike | None = None,
    output: npt.ArrayLike | None = None,
    *,
    hashes: HashIds | None = None,
    e2e_s: Floats | None = None,
    notes: ReadNotes | None = None,
) -> Trace:
    """Return a trace whose lengths vary where none are given."""
    n = np.asarray(due_s).size
    varied = 10 + np.arange(n) % 97
    return Trace(
        due_s=np.asarray(due_s, np.float64),
        prompt_tokens=varied if prompt is None else np.asarray(prompt, np.int64),
        output_tokens=varied if output is None else np.asarray(output, np.int64),
        hashes=hashes,
        e2e_s=e2e_s,
        source="prod.jsonl",
        notes=notes or ReadNotes(rows=n),
    )


def codes(trace: Trace, largest_cap: int = 1) -> set[str]:
    return {warning.code for warning in describe(trace, largest_cap=largest_cap).warnings}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_slices_agree_with_their_manifest(shared_traces: Path, name: str) -> None:
    manifest = json.loads((shared_traces / "MANIFEST.json").read_text())
    entry = next(entry for entry in manifest["files"] if entry["file"] == name)
    trace = read_trace(shared_traces / name)
    assert trace.sha256 == entry["sha256"]
    shown, stats = describe(trace), entry["stats"]
    arrival = stats["arrival"]
    assert shown.rows == stats["rows"]
    assert shown.duration_s == pytest.approx(arrival["duration_s"], abs=0.005)
    assert shown.rate_per_s == pytest.approx(arrival["mean_rate"], abs=0.0005)
    assert shown.iat_cv == pytest.approx(arrival["iat_cv"], abs=0.0005)
    assert shown.peak_1s == arrival["peak_1s_count"]
    assert shown.peak_60s == arrival["peak_60s_count"]
    for lengths, expected in (
        (shown.prompt_tokens, stats["prompt"]),
        (shown.output_tokens, stats["output"]),
    ):
        for key, value in expected.items():
            assert getattr(lengths, key) == pytest.approx(value, abs=0.05)
    for key, value in stats["inflight_20ms_per_output_token"].items():
        assert getattr(shown.in_flight, key) == pytest.approx(value, abs=0.05)
    if "reuse_within_slice" in stats:
        expected = stats["reuse_within_slice"]["token_prefix_hit_share"]
        assert shown.prefix_reuse_ratio == pytest.approx(expected, abs=0.00005)
    else:
        assert shown.prefix_reuse_ratio is None
    is_coarse = Caveat.QUANTISED_CLOCK in {warning.code for warning in shown.warnings}
    assert is_coarse == name.startswith("mooncake")


def test_in_flight_is_worked_out_by_hand() -> None:
    # Due at 0, 1 and 4 and living 2 s each: one, two, one, none until the last is due.
    shown = describe(
        a_trace([0, 1, 4], output=[2, 2, 2]), seconds_per_output_token=1.0
    ).in_flight
    assert shown.mean == pytest.approx((1 + 2 + 1 + 0) / 4)
    assert (shown.p50, shown.p90, shown.peak, shown.recorded_ratio) == (1.0, 2.0, 2, 0.0)


def test_recorded_latencies_replace_the_estimate() -> None:
    trace = a_trace([0, 1, 4], output=[99, 99, 2], e2e_s=np.array([2.0, 2.0, np.nan]))
    shown = describe(trace, seconds_per_output_token=1.0)
    assert shown.in_flight.mean == pytest.approx(1.0)
    assert shown.in_flight.recorded_ratio == pytest.approx(2 / 3)
    assert "latency_gaps" in {warning.code for warning in shown.warnings}


@given(st.lists(st.floats(0, 500), min_size=2, max_size=60), st.floats(0.1, 10))
def test_time_in_flight_scales_with_time(due: list[float], factor: float) -> None:
    due_s = np.sort(np.array(due))
    slow = describe(a_trace(due_s), 0.02).in_flight
    fast = describe(a_trace(due_s * factor), 0.02 * factor).in_flight
    assert fast.peak == pytest.approx(slow.peak, abs=1)
    if slow.mean is not None and due_s[-1] - due_s[0] > 1e-3:
        assert fast.mean == pytest.approx(slow.mean, rel=1e-6, abs=1e-6)


def test_prefix_reuse_counts_tokens_of_an_unbounded_cold_cache() -> None:
    hashes = HashIds.from_rows([(1, 2), (1, 2), (3, 2)], block_size=8)
    shown = describe(a_trace([0, 1, 2], prompt=[16, 12, 16], hashes=hashes))
    assert shown.prefix_reuse_ratio == pytest.approx(12 / 44)


def test_one_request_has_no_rate_and_no_burstiness() -> None:
    shown = describe(a_trace([0.0]))
    assert (shown.rate_per_s, shown.iat_cv, shown.in_flight.mean) == (None, None, None)
    assert (shown.peak_1s, shown.peak_60s, shown.in_flight.peak) == (1, 1, 1)
    assert any("unknown/s mean" in line for line in shown.lines())


def test_coarse_clocks_are_told_from_bursts_and_fine_clocks() -> None:
    rng = np.random.default_rng(0)
    free_s = np.cumsum(rng.exponential(0.1, 2000))
    assert Caveat.QUANTISED_CLOCK in codes(a_trace(np.floor(free_s)))
    assert Caveat.QUANTISED_CLOCK in codes(a_trace(np.floor(free_s / 3) * 3))
    assert Caveat.QUANTISED_CLOCK not in codes(a_trace(free_s))
    assert Caveat.QUANTISED_CLOCK not in codes(a_trace(np.round(free_s, 3)))
    busy_ms = np.round(free_s / 50, 3)
    assert np.mean(np.diff(busy_ms) == 0) > 0.2
    assert Caveat.QUANTISED_CLOCK not in codes(a_trace(busy_ms))
    batches_s = np.repeat(np.cumsum(rng.exponential(1.0, 200)), 10)
    assert Caveat.QUANTISED_CLOCK not in codes(a_trace(batches_s))


def test_equal_lengths_mislead_and_mixed_ones_do_not() -> None:
    due_s = np.arange(100.0)
    mixed = np.arange(100) + 10
    assert Caveat.UNIFORM_TRACE in codes(a_trace(due_s, mixed, np.full(100, 128)))
    assert Caveat.UNIFORM_TRACE in codes(a_trace(due_s, np.full(100, 128), mixed))
    assert Caveat.UNIFORM_TRACE not in codes(a_trace(due_s, mixed, mixed))
    assert Caveat.UNIFORM_TRACE not in codes(a_trace([0.0], [128], [128]))


def test_long_silences_and_sorted_rows_are_reported() -> None:
    busy_s = np.cumsum(np.tile([0.05, 0.15], 50))
    assert "long_silence" in codes(a_trace(np.concatenate([busy_s, busy_s + 200])))
    assert "long_silence" not in codes(a_trace(busy_s * 1000))
    assert "unsorted" in codes(a_trace(busy_s, notes=ReadNotes(rows=100, moved=3)))
    assert codes(a_trace(busy_s)) == set()


def test_low_demand_names_the_cap_that_an_engine_that_keeps_up_does_not_fill() -> None:
    trace = a_trace(np.zeros(40), output=np.full(40, 50) + np.arange(40))
    (warning,) = (w for w in describe(trace, largest_cap=41).warnings if w.code == "low_demand")
    assert warning.caveat is Caveat.LOW_DEMAND
    assert "estimate at 20 ms per output token" in warning.text
    assert "an engine that keeps up so fills no cap above 40" in warning.text
    assert "a slower or overloaded one may" in warning.text
    assert "low_demand" not in codes(trace, largest_cap=40)


def test_json_has_the_agreed_keys_and_the_terminal_the_same_facts() -> None:
    trace = a_trace([0, 1, 2], notes=ReadNotes(rows=5).with_dropped("output of 0 tokens", 2))
    shown = describe(trace)
    plain = json.loads(json.dumps(shown.as_json(), allow_nan=False))
    agreed = (
        "format rows duration_s rate_per_s iat_cv peak_1s peak_60s prompt_tokens output_tokens "
        "prefix_reuse_ratio in_flight warnings dropped"
    )
    assert list(plain) == agreed.split()
    assert plain["dropped"] == {"output of 0 tokens": 2}
    lines = shown.lines()
    assert "dropped        2 (output of 0 tokens)" in lines
    assert all(line.isprintable() for line in lines)


def test_requests_at_even_distances_are_warned_of() -> None:
    rng, even = np.random.default_rng(0), np.arange(200) * 0.5
    assert "even_arrivals" in codes(a_trace(even))
    assert "even_arrivals" in codes(a_trace(even + rng.uniform(0.0, 0.01, 200)))
    for due_s in (np.cumsum(rng.exponential(0.5, 200)), np.zeros(200), even[:40]):
        assert "even_arrivals" not in codes(a_trace(due_s))
