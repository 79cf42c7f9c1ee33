"""The page says how sure the answer is, what would change it, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.report_parts import changed, live_run, read
from tuner.report.certainty import certainty
from tuner.report.run_files import read_run
from tuner.run.directory import RESULT_FILE

BEST, CURRENT, OTHER = (
    {"max_num_seqs": cap, "max_num_batched_tokens": 2048} for cap in (8, 32, 16)
)
LOSING = 0.04


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a whole run."""
    return live_run(tmp_path_factory.mktemp("certainty"))


def standing(limits: dict[str, int], p_best: float, loss: float) -> dict[str, Any]:
    return {
        "limits": limits,
        "quantiles": [0.8, 0.9, 1.0, 1.1, 1.2],
        "p_slo": 0.97,
        "p_sustained": 1.0,
        "p_best": p_best,
        "loss": loss,
    }


def said(
    run: Path,
    folder: Path,
    verdict: str,
    here: tuple[float, float],
    elsewhere: tuple[float, float],
    loss: float = LOSING,
) -> str:
    """Return what the page says of a run of such an answer, with intervals of its gain."""
    advice = read(run, RESULT_FILE)["recommendation"]
    is_change = verdict == "change"
    odds = {**advice["odds"], "p_better": 0.95 if is_change else 0.8, "meets_more": False}
    advice |= BEST if is_change else CURRENT
    advice |= {
        "verdict": verdict,
        "best_measured": BEST,
        "gain_here_interval": here,
        "gain_interval": elsewhere,
        "odds": odds,
        "standings": [
            standing(BEST, 0.6, loss),
            standing(OTHER, 0.3, 2 * loss),
            standing(CURRENT, 0.1, loss),
        ],
    }
    return " ".join(certainty(read_run(changed(run, folder, recommendation=advice))).says)


def test_a_whole_run_says_it_with_a_plot_and_a_table(run: Path) -> None:
    section = certainty(read_run(run))
    advice = read(run, RESULT_FILE)["recommendation"]
    assert "the best is" in section.says[0]
    (plot,), (table,) = section.plots, section.tables
    named = [row[0].text for row in table.rows]
    assert sum("(recommended)" in name for name in named) == 1
    assert len(named) == len(advice["standings"]) >= 2
    assert set(plot.traces[-1]["y"]) <= set(named)
    chances = [row[3].order for row in table.rows if isinstance(row[3].order, float)]
    assert sum(chances) == pytest.approx(1.0)


def test_it_says_by_how_much_another_answer_was_missed(run: Path, tmp_path: Path) -> None:
    # The middle -10.6 %, a standard deviation of 3.4 %: sure enough down to -4.2 %.
    text = said(run, tmp_path, "change", (-0.155, -0.055), (-0.155, -0.055))
    assert "keep 32/2048 if 8/2048 were worse beside it by 7.1% than is known" in text
    (tmp_path / "kept").mkdir()
    text = said(run, tmp_path / "kept", "keep", (-0.08, 0.04), (-0.08, 0.04))
    assert "would be 8/2048 if it were better beside 32/2048 by 2.6% than is known" in text


def test_it_says_which_measurement_would_help_most(run: Path, tmp_path: Path) -> None:
    for name, here, elsewhere, loss, expected in (
        ("engine", (-0.1, 0.02), (-0.1, 0.02), LOSING, "rounds of 32/2048 and 8/2048"),
        ("traffic", (-0.06, -0.04), (-0.2, 0.1), LOSING, "is a longer recording"),
        ("none", (-0.1, 0.02), (-0.1, 0.02), 0.002, "no measurement would help much"),
    ):
        (tmp_path / name).mkdir()
        text = said(run, tmp_path / name, "keep", here, elsewhere, loss)
        assert expected in text.lower() or expected in text, name
