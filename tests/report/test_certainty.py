"""The page says how sure the answer is, what would change it, and what would help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from support.report_parts import changed, read, write
from support.result_parts import CHANGE, made
from tuner.report.certainty import certainty
from tuner.report.run_files import read_run
from tuner.report.summary import answer, gain_words
from tuner.run.directory import RESULT_FILE
from tuner.search.draws import MODEL_ALONE
from tuner.search.race import MAX_LOSS, OTHER_TRAFFIC, Odds
from tuner.stats import Estimate

BEST, CURRENT, OTHER = (
    {"max_num_seqs": cap, "max_num_batched_tokens": 2048} for cap in (8, 32, 16)
)
LOSING = 0.04


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
    live: Path,
    folder: Path,
    verdict: str,
    here: tuple[float, float],
    elsewhere: tuple[float, float],
    loss: float = LOSING,
    **known: Any,
) -> str:
    """Return what the page says of a run of such an answer, with intervals of its gain."""
    advice = read(live, RESULT_FILE)["recommendation"]
    is_change = verdict == "change"
    odds = {**advice["odds"], "p_better": 0.95 if is_change else 0.8, "meets_more": False}
    odds |= known
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
    return " ".join(certainty(read_run(changed(live, folder, recommendation=advice))).says)


def test_a_whole_run_says_it_with_a_plot_and_a_table(live: Path) -> None:
    section = certainty(read_run(live))
    advice = read(live, RESULT_FILE)["recommendation"]
    assert "the best is" in section.says[0]
    (plot,), (table,) = section.plots, section.tables
    named = [row[0].text for row in table.rows]
    assert sum("(recommended)" in name for name in named) == 1
    assert len(named) == len(advice["standings"]) >= 2
    assert set(plot.traces[-1]["y"]) <= set(named)
    chances = [row[3].order for row in table.rows if isinstance(row[3].order, float)]
    assert sum(chances) == pytest.approx(1.0)


def test_values_have_their_unit_where_they_are_pointed_at_and_a_largest_loss_is_no_exact_one(
    live: Path, tmp_path: Path
) -> None:
    advice = read(live, RESULT_FILE)["recommendation"]
    advice["standings"] = [
        {**standing(BEST, 0.9, 0.01), "quantiles": [0.1, 0.12, 0.164, 0.2, 0.25]},
        {**standing(CURRENT, 0.1, MAX_LOSS), "quantiles": [4.0, 4.5, 5.0, 5.5, 6.0]},
    ]
    folder = changed(live, tmp_path, recommendation={**advice, "gain_metric": "e2e_p99"})
    section = certainty(read_run(folder))
    (plot,), (table,) = section.plots, section.tables
    assert plot.traces[-1]["customdata"] == ["5.00 s", "164 ms"]
    assert "%{customdata}" in plot.traces[-1]["hovertemplate"]
    assert plot.layout["xaxis"]["type"] == "log"
    assert {"200ms", "5s"} <= set(plot.layout["xaxis"]["ticktext"])
    assert [row[4].text for row in table.rows] == ["1.0%", "1000.0% or more"]


def test_it_says_by_how_much_another_answer_was_missed(live: Path, tmp_path: Path) -> None:
    # The middle -10.6 %, a standard deviation of 3.4 %: sure enough down to -4.2 %.
    text = said(live, tmp_path, "change", (-0.155, -0.055), (-0.155, -0.055))
    assert "keep 32/2048 if 8/2048 were worse beside it by 7.1% than is known" in text
    (tmp_path / "kept").mkdir()
    text = said(live, tmp_path / "kept", "keep", (-0.08, 0.04), (-0.08, 0.04))
    assert "would be 8/2048 if it were better beside 32/2048 by 2.6% than is known" in text


def test_it_says_which_measurement_would_help_most(live: Path, tmp_path: Path) -> None:
    for name, here, elsewhere, loss, expected in (
        ("engine", (-0.1, 0.02), (-0.1, 0.02), LOSING, "rounds of 32/2048 and 8/2048"),
        ("traffic", (-0.06, -0.04), (-0.2, 0.1), LOSING, "is a longer recording"),
        ("none", (-0.1, 0.02), (-0.1, 0.02), 0.002, "no measurement would help much"),
    ):
        (tmp_path / name).mkdir()
        text = said(live, tmp_path / name, "keep", here, elsewhere, loss)
        assert expected in text.lower() or expected in text, name


def test_what_may_be_better_than_the_answer_is_what_is_to_be_measured(
    live: Path, tmp_path: Path
) -> None:
    """The current one, which is surely worse than both, tells nothing of them."""
    open_ = (-0.155, -0.055), (-0.155, -0.055)
    for method, how in (("auto", "give --budget more"), ("shadow", "run without --method sh")):
        for name in ("before", "after"):
            (tmp_path / method / name).mkdir(parents=True)
        made = changed(live, tmp_path / method / "before", method=method)
        text = said(made, tmp_path / method / "after", "change", *open_)
        assert "rounds of 8/2048 and 16/2048 on a live engine" in text
        assert how in text


def test_numbers_of_the_recorded_traffic_are_not_told_as_of_other(
    live: Path, tmp_path: Path
) -> None:
    both = (-0.155, -0.055), (-0.155, -0.055)
    text = said(live, tmp_path, "change", *both, basis=OTHER_TRAFFIC)
    assert "on the recorded traffic, over the model's error; 8/2048 is expected" in text
    assert OTHER_TRAFFIC not in text


@pytest.mark.parametrize(
    ("slo", "load", "expected"),
    [
        (None, 0.2, "for the load that 32/2048 may not sustain: where there is less of it"),
        (0.2, 1.0, "for the SLOs that 32/2048 may not meet: where they are relaxed"),
        (0.2, 0.2, "for bounds that 32/2048 may not keep: where they are relaxed"),
    ],
)
def test_it_says_for_which_bound_the_current_setting_is_left(
    live: Path, tmp_path: Path, slo: float | None, load: float, expected: str
) -> None:
    folder = changed(live, tmp_path)
    result = read(folder, RESULT_FILE)
    advice = result["recommendation"]
    advice["odds"] |= {"meets_more": True, "p_sustained": 1.0, "confidence": 0.9}
    advice["standings"] = [
        standing({k: advice[k] for k in BEST}, 0.6, LOSING),
        {**standing(CURRENT, 0.1, LOSING), "p_slo": slo, "p_sustained": load},
    ]
    write(folder, RESULT_FILE, result)
    assert expected in " ".join(certainty(read_run(folder)).says)


def test_a_keep_says_what_is_likeliest_to_be_better_and_what_would_change_it(
    live: Path, tmp_path: Path
) -> None:
    """On top of the page, and where it says how sure the answer is."""
    folder = changed(live, tmp_path)
    result = read(folder, RESULT_FILE)
    advice = result["recommendation"]
    advice |= CURRENT
    advice |= {"verdict": "keep", "best_measured": CURRENT, "why": "nothing is better"}
    advice |= {"gain_ratio": None, "gain_interval": None, "gain_here_interval": None}
    advice["odds"] |= {"p_better": 0.3, "rival": OTHER, "loss": 0.004}
    advice["standings"] = [standing(CURRENT, 0.7, 0.004), standing(OTHER, 0.3, 0.009)]
    write(folder, RESULT_FILE, result)
    kept = read_run(folder)
    top = " ".join(answer(kept).says)
    assert "P(16/2048 better) 0.30" in top
    assert "keeping loses 0.4% to whoever is best" in top
    text = " ".join(certainty(kept).says)
    assert "not be 16/2048 unless it were better beside 32/2048 by 1.5% more than is" in text


def test_without_other_traffic_one_interval_and_one_probability_are_told() -> None:
    told = {}
    for basis in (MODEL_ALONE, OTHER_TRAFFIC):
        odds = Odds(0.99, None, 1.0, 0.25, 0.98, basis=basis)
        here = Estimate(0.8, 0.76, 0.84, 3)
        result = made(dataclasses.replace(CHANGE, odds=odds, gain_here=here, metric="e2e_p99"))
        assert result.recommendation is not None
        told[basis] = gain_words(result.recommendation) + odds.text
    assert told[MODEL_ALONE].count(" … ") == 1
    assert "other hours" not in told[MODEL_ALONE]
    assert told[OTHER_TRAFFIC].count(" … ") == 2
    assert "other hours 0.98" in told[OTHER_TRAFFIC]
