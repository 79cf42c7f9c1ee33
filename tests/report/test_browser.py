"""In a browser the page opens quietly, draws its plots, sorts, and suits screen and paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tuner.engine.limits import EngineLimits
from tuner.report.explore import Explored, explore_page, explore_sections
from tuner.report.page import sections_of
from tuner.report.run_files import read_run
from tuner.report.words import NOTHING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

pytestmark = pytest.mark.slow
CHROMIUM = Path("/usr/bin/chromium")
NARROW = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a Chromium without a window, or say what is missing."""
    if not CHROMIUM.exists():
        pytest.skip("no Chromium here: apt-get install chromium")
    drivers = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with drivers.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A page in the browser, and all that it complained of or asked for."""

    def __init__(self, browser: Browser, text: str, folder: Path, **options: object) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        path = folder / "report.html"
        path.write_text(text, encoding="utf-8")
        self.page: Page = browser.new_page(**options)  # type: ignore[arg-type]  # plain options
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".canvas .main-svg")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def column(self, at: int) -> list[str]:
        """Return the texts of a column of the trials, from the top."""
        cells = self.page.locator(f"#trials-table tbody tr > :nth-child({at + 1})")
        return cells.all_inner_texts()


def test_it_opens_without_complaint_or_request_and_draws_every_plot(
    browser: Browser, live: Path, page: str, tmp_path: Path
) -> None:
    visit = Visit(browser, page, tmp_path)
    assert visit.complaints == []
    assert [url[:5] for url in visit.requests if not url.startswith("data:")] == ["file:"]
    boxes = visit.page.locator(".canvas")
    sections = sections_of(read_run(live))
    assert boxes.count() == sum(len(section.plots) for section in sections)
    for i in range(boxes.count()):
        assert boxes.nth(i).locator(".scatterlayer .trace").count() > 0
    assert visit.page.title().startswith("Change to max_num_seqs")


def test_the_trials_sort_by_click_and_by_key(
    browser: Browser, page: str, tmp_path: Path
) -> None:
    visit = Visit(browser, page, tmp_path)
    rates = visit.page.locator("#trials-table thead button", has_text="requests/s")
    head = visit.page.get_by_role("columnheader", name="requests/s", exact=True)
    at = 6
    before = visit.column(at)
    rates.click()
    values = [float(text.rstrip("/s").replace(",", "")) for text in visit.column(at)]
    assert values == sorted(values)
    assert head.get_attribute("aria-sort") == "ascending"
    rates.focus()
    visit.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    turned = [float(text.rstrip("/s").replace(",", "")) for text in visit.column(at)]
    assert turned == sorted(values, reverse=True)
    assert visit.page.locator("th[aria-sort=descending]").count() == 1
    assert visit.page.get_by_role("status").inner_text() == "sorted by requests/s, descending"
    assert sorted(before) == sorted(visit.column(at))
    visit.page.locator("#trials-table thead button", has_text="round").click()
    rounds = visit.column(3)
    assert rounds[0] == "1"
    assert rounds[-1] == NOTHING


def test_the_keyboard_reaches_the_answer_the_map_and_the_table(
    browser: Browser, page: str, tmp_path: Path
) -> None:
    visit = Visit(browser, page, tmp_path)
    reached = []
    for _ in range(60):
        visit.page.keyboard.press("Tab")
        reached.append(
            visit.page.evaluate(
                "() => (document.activeElement.closest('[id], [aria-labelledby]') || {}).id"
                " + ' ' + document.activeElement.tagName + ' '"
                " + (document.activeElement.getAttribute('aria-labelledby') || '')"
            )
        )
    assert "A" in reached[0]
    assert any("knobs-map-caption" in place for place in reached)
    assert any("trials-table BUTTON" in place for place in reached)


def test_a_narrow_window_scrolls_tables_and_not_the_page(
    browser: Browser, page: str, tmp_path: Path
) -> None:
    visit = Visit(browser, page, tmp_path, viewport=NARROW)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_dark_is_dark_and_paper_is_white(browser: Browser, page: str, tmp_path: Path) -> None:
    visit = Visit(browser, page, tmp_path, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    assert visit.page.evaluate(ground) == "rgb(20, 24, 29)"
    assert visit.page.evaluate(ink) == "rgb(230, 234, 238)"
    visit.page.emulate_media(media="print")
    assert visit.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert visit.page.evaluate(ink) == "rgb(27, 33, 40)"
    assert len(visit.page.pdf()) > 10_000
    assert visit.complaints == []


def test_without_scripts_every_number_is_still_there(
    browser: Browser, page: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    shown = browser.new_page(java_script_enabled=False)
    shown.goto(path.as_uri())
    assert "On the measured frontier" in shown.locator("#tradeoff").inner_text()
    assert shown.locator("#trials-table tbody tr").count() > 5


# --- the page of tune explore -----------------------------------------------------------


def choose(visit: Visit, load: int, metric: str) -> None:
    visit.page.get_by_label("Metric").select_option(label=metric)
    slider = visit.page.get_by_role("slider", name="Load")
    slider.focus()
    visit.page.keyboard.press("Home")
    for _ in range(load):
        visit.page.keyboard.press("ArrowRight")


def test_the_map_follows_the_load_and_the_metric(
    browser: Browser, explorer: str, found: Explored, tmp_path: Path
) -> None:
    visit = Visit(browser, explorer, tmp_path)
    section = next(s for s in explore_sections(found) if s.explorer)
    assert section.explorer is not None
    data, metrics = section.explorer.data, section.explorer.metrics
    for load, metric in ((0, "E2E latency p95"), (2, "requests/s"), (1, "TTFT p50")):
        choose(visit, load, metric)
        at = metrics.index(metric)
        told = [
            [cell["figures"][at] for cell in row if cell]
            for row in data["levels"][load]["cells"]
        ]
        shown = [
            [cell.evaluate("c => c.firstChild.textContent") for cell in row.locator("td").all()]
            for row in visit.page.locator("#explorer-map tbody tr").all()
        ]
        assert shown == told
        assert (
            visit.page.locator(".explorer output").inner_text() == section.explorer.loads[load]
        )
        best = visit.page.locator("#explorer-map td.best")
        assert best.locator("small").inner_text() == data["levels"][load]["best_as"]
        assert visit.page.locator(".now").inner_text() == data["levels"][load]["says"]
    assert visit.complaints == []
    assert [url[:5] for url in visit.requests if not url.startswith("data:")] == ["file:"]


def test_pointer_and_arrow_keys_show_all_figures_of_a_setting(
    browser: Browser, explorer: str, found: Explored, tmp_path: Path
) -> None:
    visit = Visit(browser, explorer, tmp_path)
    figures = visit.page.locator("#explorer-figures")
    best = str(found.surface.loads[found.start].decision.best)
    head = figures.locator("thead th").nth(1)
    assert head.inner_text() == best
    current = visit.page.locator("#explorer-map td.current")
    current.hover()
    assert head.inner_text() == "4/512"
    columns = [figures.locator(f"tbody td:nth-child({n})").all_inner_texts() for n in (2, 4)]
    assert columns[0] == columns[1]
    assert columns[0][-1] == "not sustained, breaks ttft_p95"
    visit.page.locator("h1").hover()
    assert head.inner_text() == best
    current.focus()
    visit.page.keyboard.press("ArrowLeft")
    assert head.inner_text() == "2/512"
    visit.page.keyboard.press("ArrowUp")
    assert head.inner_text() == "2/2048"
    visit.page.keyboard.press("ArrowUp")
    assert head.inner_text() == "2/2048"


def test_arrow_keys_reach_every_setting_past_places_without_one(
    browser: Browser, found: Explored, tmp_path: Path
) -> None:
    """Of a row that has the largest cap alone, too."""
    gone = {EngineLimits(7, 512), EngineLimits(2, 2048), EngineLimits(4, 2048)}
    levels = []
    for at in found.surface.loads:
        kept = {x: y for x, y in at.predictions.outcomes.items() if x not in gone}
        levels.append(replace(at, predictions=replace(at.predictions, outcomes=kept)))
    few = replace(found, surface=replace(found.surface, loads=tuple(levels)))
    visit = Visit(browser, explore_page(few), tmp_path)
    head = visit.page.locator("#explorer-figures thead th").nth(1)
    visit.page.locator("#explorer-map td.current").focus()
    for key, expected in (
        ("ArrowRight", "8/512"),
        ("ArrowLeft", "4/512"),
        ("ArrowUp", "7/2048"),
        ("ArrowLeft", "7/2048"),
        ("ArrowDown", "4/512"),
    ):
        visit.page.keyboard.press(key)
        assert head.inner_text() == expected, key


def test_the_explorer_suits_narrow_dark_and_scriptless_readers(
    browser: Browser, explorer: str, found: Explored, tmp_path: Path
) -> None:
    visit = Visit(browser, explorer, tmp_path, viewport=NARROW, color_scheme="dark")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    ground = "getComputedStyle(document.body).backgroundColor"
    assert visit.page.evaluate(ground) == "rgb(20, 24, 29)"
    plain = browser.new_page(java_script_enabled=False)
    plain.goto((tmp_path / "report.html").as_uri())
    assert not plain.get_by_label("Metric").is_visible()
    assert plain.locator("#explorer-map td.best small").inner_text() == "best"
    rows = len(found.surface.settings) * len(found.surface.loads)
    assert plain.locator("#all-table tbody tr").count() == rows
