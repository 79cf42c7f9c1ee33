"""The page of a surface holds the predictor's own numbers, says they are predicted, is safe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from support.explore_parts import explored
from support.surface_parts import CURRENT, LOADS, PREDICTOR, TRACE
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import Failure
from tuner.report.explore import Explored, explore_page, explore_sections
from tuner.report.parts import Section
from tuner.report.words import NOTHING, quantity
from tuner.shadow.calibration import StatedError

PLOTLY_BYTES = 1_200_000


class Cells(HTMLParser):
    """The rows of a table of a page, with what its columns are sorted by."""

    def __init__(self, page: str, anchor: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._anchor, self._is_in = anchor, False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a table, a row or a cell."""
        if tag == "table":
            self._is_in = dict(attrs)["id"] == self._anchor
        if self._is_in and tag == "tr":
            self.rows.append([])
        if self._is_in and tag in {"th", "td"}:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        """Add to the last cell."""
        if self._is_in and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        """End a table."""
        self._is_in = self._is_in and tag != "table"


def section(found: Explored, anchor: str) -> Section:
    return next(s for s in explore_sections(found) if s.anchor == anchor)


def predicted(limits: EngineLimits, load: float) -> Measurement:
    outcome = PREDICTOR.measure([TRACE], limits, ReplayPlan(load=load))
    assert isinstance(outcome, Measurement)
    return outcome


def test_the_table_holds_what_the_predictor_says_of_every_setting(
    explorer: str, found: Explored
) -> None:
    heads, *rows = Cells(explorer, "all-table").rows
    assert heads[:4] == ["load", "max_num_seqs", "max_num_batched_tokens", "E2E latency p95"]
    assert len(rows) == len(found.surface.settings) * len(LOADS)
    for row in rows:
        told = dict(zip(heads, row, strict=True))
        limits = EngineLimits(int(row[1]), int(row[2]))
        expected = predicted(limits, float(row[0].split()[0]))
        for name, metric in (("E2E latency", "e2e"), ("TTFT", "ttft"), ("TPOT", "tpot")):
            for statistic in ("p95", "p50"):
                value = expected.latency(f"{metric}_s", statistic)
                assert told[f"{name} {statistic}"] == quantity(f"{metric}_{statistic}", value)
        assert told["requests/s"] == quantity("requests_per_s", expected.requests_per_s)
        assert ("not sustained" in told["state"]) is not expected.is_sustained


def test_what_the_script_shows_is_what_stands_in_the_table(
    explorer: str, found: Explored
) -> None:
    match = re.search(r'class="explorer-data">(.*?)</script>', explorer, re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    _, *rows = Cells(explorer, "all-table").rows
    by_setting = {(row[0], f"{row[1]}/{row[2]}"): row[3:] for row in rows}
    shown = 0
    for load, level in zip(found.loads, data["levels"], strict=True):
        for names, cells in zip(data["settings"], level["cells"], strict=True):
            for name, cell in zip(names, cells, strict=True):
                assert (name is None) is (cell is None)
                if name is not None:
                    assert (
                        cell["figures"] == by_setting[f"{load:g} \N{MULTIPLICATION SIGN}", name]
                    )
                    shown += 1
    assert shown == len(rows)


def test_marks_say_what_is_best_current_unsustained_and_in_breach(found: Explored) -> None:
    explorer = section(found, "map").explorer
    assert explorer is not None
    for i, at in enumerate(found.surface.loads):
        level = explorer.data["levels"][i]
        for names, cells in zip(explorer.data["settings"], level["cells"], strict=True):
            for name, cell in zip(names, cells, strict=True):
                if name is None:
                    continue
                cap, budget = map(int, name.split("/"))
                reached = at.reached(EngineLimits(cap, budget))
                marks = set(cell["mark"].split())
                assert ("unsustained" in marks) is not reached.is_sustained
                assert ("breaks" in marks) is bool(reached.broken)
                assert ("best" in marks) is (reached.limits == at.decision.best)
                assert ("current" in marks) is (name == str(CURRENT))
                # Only what is in the running is coloured.
                assert (cell["heats"][0] is not None) is (reached.holds or not at.best.holds)


def test_the_curve_says_where_each_line_ends_and_marks_it(found: Explored) -> None:
    load = section(found, "load")
    times = "\N{MULTIPLICATION SIGN}"
    assert load.bullets == (
        f"Best of each load: holds up to 1 {times}; "
        f"not sustained, breaks ttft_p95 from 3 {times}.",
        f"Current 4/512: holds up to 0.5 {times}; "
        f"not sustained, breaks ttft_p95 from 1 {times}.",
    )
    plot = load.plots[0]
    assert [shape["x0"] for shape in plot.layout["shapes"]] == [3.0, 1.0]
    best, current = plot.traces[:2]
    assert best["marker"]["symbol"] == ["circle", "circle", "x"]
    assert current["marker"]["symbol"] == ["circle", "x", "x"]
    tails = [predicted(CURRENT, x).latency("e2e_s", "p95") for x in LOADS]
    assert current["y"] == tails
    go.Figure(plot.traces, plot.layout)  # raises for an attribute it does not know


def test_a_single_load_and_no_slo_make_a_page_too() -> None:
    alone = explored((0.5,), slos=())
    assert section(alone, "load").bullets[1].startswith("Current 4/512: holds at every load")
    explorer = section(alone, "map").explorer
    assert explorer is not None
    assert [mark for mark, _ in explorer.legend] == ["best", "current", "unsustained"]
    assert "goodput" not in explorer.metrics
    assert explore_page(alone)


def test_where_no_setting_meets_the_slos_it_says_that_and_who_is_nearest() -> None:
    hopeless = explored((1.0,), slos=("ttft_p95=0.1ms",))
    (at,) = hopeless.surface.loads
    slack = {limits: at.score(limits).value for limits in hopeless.surface.settings}
    nearest = at.decision.best
    assert slack[nearest] == pytest.approx(min(slack.values()), rel=0.01)
    page = explore_page(hopeless)
    words = f"max_num_seqs {nearest.max_num_seqs}, max_num_batched_tokens "
    head = f"<h1>Predicted: no setting meets the SLOs, nearest is {words}"
    assert f"{head}{nearest.max_num_batched_tokens}</h1>" in page.replace("<wbr>", "")
    map_section = section(hopeless, "map")
    assert map_section.explorer is not None
    assert f"no setting meets the SLOs; nearest is {nearest} with" in map_section.explorer.says
    assert "keep" not in map_section.explorer.says
    assert [cell.note for row in map_section.explorer.map.rows for cell in row].count(
        "nearest"
    ) == 1
    assert map_section.explorer.figures.heads[2] == "nearest"


def test_a_setting_that_failed_has_no_figure_and_says_so(found: Explored) -> None:
    at = found.surface.loads[1]
    outcomes = {**at.predictions.outcomes, CURRENT: Failure("no blocks are left")}
    failing = replace(at, predictions=replace(at.predictions, outcomes=outcomes))
    surface = replace(found.surface, loads=(failing,))
    page = explore_page(replace(found, surface=surface))
    told = {tuple(row[1:3]): row for row in Cells(page, "all-table").rows}["4", "512"]
    assert told[-1] == "failed"
    assert set(told[3:-1]) == {NOTHING}
    assert "the current configuration is 4/512 with E2E latency p95 \N{EN DASH}, failed" in page


def test_it_says_first_that_all_is_predicted_and_in_the_end_from_what(
    explorer: str, found: Explored
) -> None:
    sections = explore_sections(found)
    error = f"{found.surface.error.wrong_ratio:.1%}"
    first = "Every number on this page is predicted, none was measured: wrong by"
    assert sections[0].says[0].startswith(f"{first} {error}")
    told = dict(Cells(explorer, "sources-table").rows[1:])
    assert told["profile"].endswith(f"made {found.profile.made_at}")
    assert told["vLLM"] == found.profile.shape.vllm_version
    assert told["stated error"] == error
    assert told["trace SHA-256"] == TRACE.sha256
    assert "E2E latency p95" in explorer


def test_what_was_predicted_from_a_derived_profile_says_so(found: Explored) -> None:
    derived = replace(found.profile, origin="derived from tables, not measured")
    surface = replace(found.surface, error=StatedError.of(derived))
    page = explore_page(replace(found, profile=derived, surface=surface))
    assert "as the profile was derived and not measured" in page
    assert Caveat.DERIVED.text in page
    assert "on what was measured" not in page
    assert "its step times are derived from tables, not measured" in page


def test_text_of_the_users_is_never_markup_and_nothing_is_loaded(explorer: str) -> None:
    assert "<script>alert" not in explorer
    assert "&lt;script&gt;alert(&#39;profile&#39;)" in explorer
    assert "a&amp;b &lt;b&gt;.jsonl" in explorer
    markup = explorer[: explorer.index("plot-specs")]
    assert re.findall(r'(?:src|href|action)="([^#"][^"]*)"', markup) == ["data:,"]
    assert len(explorer.encode()) < PLOTLY_BYTES + 500_000
    ids = re.findall(r' id="([^"]+)"', markup)
    assert len(ids) == len(set(ids))
