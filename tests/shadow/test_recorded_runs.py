"""Runs that were recorded on GPUs come back from layer tables of the same cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.layer_tables import card, cards
from support.paths import SHARED

CARDS = cards(SHARED / "gpu-data" / "llmservingsim")


@pytest.mark.slow
@pytest.mark.skipif(
    not CARDS,
    reason="no ../shared/gpu-data/llmservingsim: put LLMServingSim's there",
)
@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.name)
def test_a_recorded_run_is_predicted_from_the_layers_of_its_card(path: Path) -> None:
    found = card(path)
    off = {name: of["off"] for name, of in found["latencies"].items()}
    for metric in ("tpot_p50", "tpot_p99", "e2e_p99"):
        assert off[metric] == pytest.approx(0, abs=0.035), metric
    for metric in ("e2e_p50", "ttft_p50"):
        assert off[metric] == pytest.approx(0, abs=0.055), metric
    assert found["step_mape_ratio"] < 0.02
    # One of the two is bound by its KV cache.
    assert (found["preempted"] > 150) == ("4090" in path.name)
