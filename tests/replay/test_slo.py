"""What an SLO asks, when a window can carry it, and which requests keep it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import TooFewSamplesError, UsageError
from tuner.replay.slo import LATENCIES, Slo
from tuner.stats import QUANTILES


@dataclass(frozen=True)
class Said:
    """A measurement in which one number stands for all."""

    value: float | None

    def slo_value(self, metric: str, statistic: str) -> float | None:
        """Return the number."""
        assert (metric, statistic) == ("ttft_s", "p99")
        return self.value


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft_p99=500ms", Slo("ttft_s", "p99", 0.5)),
        (" tpot_mean=50ms ", Slo("tpot_s", "mean", 0.05)),
        ("itl_p50=1s", Slo("itl_s", "p50", 1.0)),
        ("e2e_p90=2m", Slo("e2e_s", "p90", 120.0)),
        ("decode_step_p95=20ms", Slo("decode_step_s", "p95", 0.02)),
    ],
)
def test_slos_are_read_as_written(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft=1s",
        "ttft_p99",
        "ttft_p99=",
        "ttft_p98=1s",
        "ttft_p99<1s",
        "ttft_p99=1",
        "ttft_p99=-1s",
        "ttft_p99=0s",
        "TTFT_p99=1s",
        "latency_p99=1s",
        "ttft_p99=1s,tpot_p99=1s",
    ],
)
def test_what_is_no_slo_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Slo.parse(text)
    assert caught.value.exit_code == 2


@given(
    st.sampled_from(LATENCIES),
    st.sampled_from([*QUANTILES, "mean"]),
    st.integers(1, 100_000),
)
def test_an_slo_reads_back_from_what_it_says_of_itself(
    metric: str, statistic: str, bound_ms: int
) -> None:
    slo = Slo.parse(f"{metric.removesuffix('_s')}_{statistic}={bound_ms}ms")
    assert Slo.parse(str(slo)).name == slo.name
    assert Slo.parse(str(slo)).bound_s == pytest.approx(slo.bound_s, rel=1e-5)


def test_slack_is_how_far_beyond_the_bound_it_is() -> None:
    slo = Slo.parse("ttft_p99=500ms")
    assert slo.slack_ratio(Said(0.75)) == 0.5
    assert slo.slack_ratio(Said(0.5)) == 0.0
    assert slo.slack_ratio(Said(0.25)) == -0.5
    assert slo.slack_ratio(Said(None)) is None


@pytest.mark.parametrize(
    ("statistic", "least"), [("p50", 2), ("p90", 10), ("p95", 20), ("p99", 100), ("mean", 1)]
)
def test_a_window_must_put_a_request_beyond_the_quantile(statistic: str, least: int) -> None:
    slo = Slo("ttft_s", statistic, 1.0)
    slo.check_carried_by(least)
    with pytest.raises(TooFewSamplesError, match=f"at least {least}"):
        slo.check_carried_by(least - 1)


def test_each_request_keeps_a_bound_by_its_own_latency() -> None:
    column = np.array([0.5, 1.0, 1.5, np.nan])
    high = np.full(4, 9.0)
    kept = [True, True, False, True]
    assert Slo("ttft_s", "p99", 1.0).is_met_by(column, high, high).tolist() == kept
    assert Slo("tpot_s", "p99", 1.0).is_met_by(high, column, high).tolist() == kept
    assert Slo("e2e_s", "p99", 1.0).is_met_by(high, high, column).tolist() == kept


def test_latencies_that_are_not_a_requests_own_bind_no_request() -> None:
    high = np.full(2, 9.0)
    for metric in ("itl_s", "decode_step_s"):
        assert Slo(metric, "p99", 1.0).is_met_by(high, high, high).all()
