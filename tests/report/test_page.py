"""The page says what the run found, in order and to every reader, and loads nothing."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest

from support.report_parts import EVIL, changed, read, shadowed_run, write
from tuner.cli.commands import report
from tuner.errors import UsageError
from tuner.report.page import report_of, sections_of, write_report
from tuner.report.run_files import read_run
from tuner.report.summary import headline
from tuner.run.directory import RESULT_FILE, RUN_FILE, TIMELINES_FILE

ORDER = [
    *(
        "answer",
        "gain",
        "certainty",
        "tradeoff",
        "knobs",
        "sweep",
        "over-time",
        "agreement",
        "trace",
    ),
    *("trials", "caveats", "provenance"),
]
MAX_BYTES = 2_000_000
LIMITS = ("max_num_seqs", "max_num_batched_tokens")


class Outline(HTMLParser):
    """What a page holds: its sections, what it loads, its headings, its plots' words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.loads: list[str] = []
        self.levels: list[int] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element is."""
        found = dict(attrs)
        if tag == "section":
            self.sections.append(found["id"] or "")
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if found.get("role") == "img":
            self.images.append(found)
        self.ids.extend(value for name, value in attrs if name == "id" and value)
        self.loads.extend(v for k, v in attrs if k in {"src", "href", "action"} and v)


@pytest.fixture(scope="module")
def shadowed(live: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that a shadow ranked."""
    return shadowed_run(live, tmp_path_factory.mktemp("shadowed"))


# --- what the page says ---------------------------------------------------------------


def test_the_parts_stand_in_their_order_and_the_answer_first(page: str) -> None:
    assert Outline(page).sections == ORDER


def test_the_page_of_a_result_is_written_into_its_run(live: Path) -> None:
    assert write_report(live / "result.json") == live / "report.html"


def test_the_headline_is_the_recommendation(live: Path) -> None:
    advice = read(live, RESULT_FILE)["recommendation"]
    assert advice["verdict"] == "change"
    assert headline(read_run(live)) == (
        f"Change to max_num_seqs {advice['max_num_seqs']}, "
        f"max_num_batched_tokens {advice['max_num_batched_tokens']}"
    )


def test_the_gain_is_reported_with_its_interval(live: Path) -> None:
    advice = read(live, RESULT_FILE)["recommendation"]
    said = sections_of(read_run(live))[0].says[0]
    low, high = (
        f"{bound:+.1%}".replace("-", "\N{MINUS SIGN}") for bound in advice["gain_interval"]
    )
    assert f"{advice['gain_ratio']:+.1%}".replace("-", "\N{MINUS SIGN}") in said
    assert f"{low} … {high}" in said


def test_how_much_the_engine_was_used_stands_beside_the_answer(live: Path) -> None:
    result = read(live, RESULT_FILE)
    said = " ".join(sections_of(read_run(live))[0].says)
    assert result["load"]
    assert result["load"][1:] in said
    assert "kv_cache_usage_perc) peak" in said


@pytest.mark.parametrize(
    ("others_meet", "bears"), [(False, ""), (True, " and sustain the load")]
)
def test_where_nothing_meets_the_slos_it_says_that_and_who_is_nearest(
    live: Path, tmp_path: Path, bears: str, *, others_meet: bool
) -> None:
    nearest: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 2048}
    nearest |= {"p_slo": 0.31, "others_meet": others_meet}
    folder = changed(live, tmp_path, recommendation=None, nearest=nearest)
    run = read_run(folder)
    said = {section.anchor: " ".join(section.says) for section in sections_of(run)}
    assert headline(run) == "No configuration meets the SLOs"
    told = "meets them with probability 0.31"
    assert f"Nearest is max_num_seqs 8, max_num_batched_tokens 2048: {told}" in said["answer"]
    assert f"8/2048 is nearest and {told}" in said["certainty"]
    assert f"Nothing is likely to meet the SLOs{bears}, so that" in said["gain"]
    assert f"Nothing is likely to meet the SLOs{bears}: 8/2048" in said["certainty"]


def test_what_was_not_replayed_is_not_said_to_have_been(live: Path, tmp_path: Path) -> None:
    trials = [t for t in read(live, RESULT_FILE)["trials"] if t["phase"] == "race"]
    foretold = [{**t, "phase": "shadow", "engine": "shadow"} for t in trials]
    run = read_run(changed(live, tmp_path, trials=foretold))
    said = {section.anchor: " ".join(section.says) for section in sections_of(run)}
    assert "requests were predicted, the whole trace" in said["answer"]
    assert "Predicted: the whole trace" in said["trace"]
    assert "requests were replayed" in sections_of(read_run(live))[0].says[-2]


def test_how_tokens_were_sampled_is_among_the_facts(live: Path, tmp_path: Path) -> None:
    made = read(live, RESULT_FILE)["provenance"]
    told = "tokens are sampled greedily"
    provenance = {**made, "engine": {**made["engine"], "sampling": told}}
    (table,) = sections_of(read_run(changed(live, tmp_path, provenance=provenance)))[-1].tables
    assert ("sampling", told) in [tuple(cell.text for cell in row) for row in table.rows]


def test_text_of_the_users_is_never_markup(page: str) -> None:
    assert EVIL not in page
    assert "&lt;script&gt;alert(&#39;model&#39;)&lt;/script&gt;" in page
    assert "a&b <b>" not in page
    assert "a&amp;b &lt;b&gt;.jsonl" in page


def test_the_page_is_one_file_of_bounded_size_that_loads_nothing(page: str) -> None:
    assert len(page.encode()) < MAX_BYTES
    loads = [target for target in Outline(page).loads if not target.startswith("#")]
    assert loads == ["data:,"]


def test_every_figure_is_one_that_plotly_draws(live: Path, shadowed: Path) -> None:
    for run_dir in (live, shadowed):
        plots = [plot for section in sections_of(read_run(run_dir)) for plot in section.plots]
        assert {"gain-plot", "tradeoff-e2e_p95", "sweep-plot", "over-time-current"} <= {
            plot.anchor for plot in plots
        }
        for plot in plots:
            go.Figure(plot.traces, plot.layout)  # raises for an attribute it does not know
            assert {trace["type"] for trace in plot.traces} <= {"scatter", "bar"}


def test_the_library_is_plotlys_own_byte_for_byte() -> None:
    """As npm packs it: plotly.js-basic-dist-min 4.1.1."""
    library = files("tuner.report") / "templates" / "plotly-basic.min.js"
    assert hashlib.sha256(library.read_bytes()).hexdigest() == (
        "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    )


def test_every_plot_has_its_numbers_in_words_and_headings_leave_no_level_out(page: str) -> None:
    outline = Outline(page)
    assert len(outline.images) >= 5
    for image in outline.images:
        names = (image["aria-labelledby"] or "").split()
        assert len(names) == 2
        assert set(names) <= set(outline.ids)
        words = re.search(rf'<figcaption id="{names[1]}">(.+?)</figcaption>', page)
        assert words is not None
        assert re.search(r"\d", words[1])
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(outline.levels))


def test_measured_and_predicted_are_told_apart(shadowed: Path) -> None:
    sections = {section.anchor: section for section in sections_of(read_run(shadowed))}
    cloud = {trace["name"] for trace in sections["tradeoff"].plots[0].traces}
    assert {"measured", "predicted"} <= cloud
    assert "predicted" in sections["knobs"].says[0]
    assert sections["sweep"].plots[0].says.startswith("Predicted")
    assert "stated error is 5.0%" in sections["agreement"].says[0]
    assert len(sections["agreement"].says) == 1


def test_a_shadow_that_replayed_other_requests_is_not_compared_as_if_it_had_not(
    live: Path, tmp_path: Path
) -> None:
    run_dir = shadowed_run(live, tmp_path, same_requests=False)
    said = {s.anchor: s.says for s in sections_of(read_run(run_dir))}["agreement"]
    assert "other stretches of the trace" in said[1]


def test_requests_are_the_same_whatever_warmed_the_engine_up(
    live: Path, tmp_path: Path
) -> None:
    run_dir = shadowed_run(live, tmp_path)
    run = read(run_dir, RUN_FILE)
    longer = [{**window, "lead_in_s": 1.0} for window in run["predicted_windows"]]
    write(run_dir, RUN_FILE, {**run, "predicted_windows": longer})
    assert read_run(run_dir).predicted_same_requests


def test_pairs_that_the_run_kept_are_what_is_compared(shadowed: Path, tmp_path: Path) -> None:
    pair = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "metric": "tpot_p50"}
    pairs = [{**pair, "live": 0.010, "shadow": 0.011}]
    run_dir = changed(shadowed, tmp_path, live_against_shadow=pairs)
    section = {s.anchor: s for s in sections_of(read_run(run_dir))}["agreement"]
    assert section.says[0].startswith(
        "At 1 configuration the shadow was off, in the middle, in"
    )
    assert [cell.text for cell in section.tables[0].rows[0]] == [
        *("8/512", "TPOT p50", "10.0 ms", "11.0 ms", "+10.0%")
    ]


def test_nothing_feasible_is_the_answer_too(live: Path, tmp_path: Path) -> None:
    run_dir = changed(live, tmp_path, recommendation=None, slos=["e2e_p95=0.001s"])
    run = read_run(run_dir)
    assert headline(run) == "No configuration meets the SLOs"
    assert "exceeds 0.001 s" in " ".join(sections_of(run)[0].says)
    assert Outline(report_of(run_dir)).sections == ORDER


def test_over_time_the_nearest_stands_beside_the_current_where_nothing_meets_the_slos(
    live: Path, tmp_path: Path
) -> None:
    saved = read(live, TIMELINES_FILE)
    other = saved["replays"][0]
    limits = {name: other[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    nearest = {**limits, "p_slo": 0.3}
    run_dir = changed(live, tmp_path, recommendation=None, nearest=nearest)
    other["windows"] = [{**window, "bin_s": 2 * window["bin_s"]} for window in other["windows"]]
    alone = [replay for replay in saved["replays"] if replay is not other]
    for replays, expected in ((saved["replays"], ["Nearest", "Current"]), (alone, ["Current"])):
        write(run_dir, TIMELINES_FILE, {**saved, "replays": replays})
        section = {s.anchor: s for s in sections_of(read_run(run_dir))}["over-time"]
        assert [plot.title.split(":")[0] for plot in section.plots] == expected
        said = " ".join(section.says)
        assert "stands alone" not in said
        assert ("Both pictures" in said) is (len(expected) == 2)
        # One axis of time for both.
        assert len({str(plot.layout["xaxis"]["range"]) for plot in section.plots}) == 1


def test_values_at_loads_that_differ_are_told_as_that(shadowed: Path, tmp_path: Path) -> None:
    """Of a capacity, that is predicted of each at the largest load that it bears."""
    result = read(shadowed, RESULT_FILE)
    predicted = [t for t in result["trials"] if t["phase"] == "shadow"]
    for trial in predicted:
        trial["measurement"] |= {"capacity": 2.0, "load": 2.0}
    told = {"rounds": 0, "change_ratio": None, "change_interval": None}
    evidence = [{**row, **told} for row in result["evidence"]]
    advice = {**result["recommendation"], "gain_metric": "capacity", "rounds": 0}
    fields = {"recommendation": advice, "evidence": evidence, "trials": predicted}
    run_dir = changed(shadowed, tmp_path, objective="capacity", **fields)
    saved = read(run_dir, TIMELINES_FILE)
    replays = [{**replay, "engine": "shadow"} for replay in saved["replays"]]
    write(run_dir, TIMELINES_FILE, {**saved, "replays": replays})
    for folder, expected in ((run_dir, True), (shadowed, False)):
        said = {s.anchor: " ".join(s.says) for s in sections_of(read_run(folder))}
        for anchor, words in (
            ("gain", "each at the largest load at which it keeps the SLOs"),
            ("tradeoff", "What was predicted stands at the largest load at which"),
            ("sweep", "What was predicted stands at the largest load at which"),
            ("over-time", "Drawn is the load of the run, 1 \N{MULTIPLICATION SIGN} the rec"),
        ):
            assert (words in said[anchor]) is expected, anchor


def test_keeping_is_reported_with_what_was_found_and_why_it_does_not_count(
    live: Path, tmp_path: Path
) -> None:
    found = read(live, RESULT_FILE)
    advice, current = found["recommendation"], found["baseline"]
    best = {name: advice[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    kept = {**advice, **current, "verdict": "keep", "why": "the gain is within noise"}
    run = read_run(changed(live, tmp_path, recommendation={**kept, "best_measured": best}))
    assert headline(run).startswith("Keep what you have: max_num_seqs 32")
    assert "but the gain is within noise" in sections_of(run)[0].says[0]


def test_what_is_kept_is_not_said_to_be_the_best(live: Path, tmp_path: Path) -> None:
    """Others may be better, by less than a restart is worth or less surely."""
    result = read(live, RESULT_FILE)
    current = {name: result["baseline"][name] for name in LIMITS}
    kept = {**result["recommendation"], **current, "best_measured": current, "verdict": "keep"}
    kept["why"] = "nothing is better by 1% in the mean"
    run = read_run(changed(live, tmp_path, recommendation=kept))
    said = {section.anchor: " ".join(section.says) for section in sections_of(run)}
    assert said["gain"].endswith("is what is recommended: nothing is better by 1% in the mean.")
    assert "The current configuration is what is recommended, so it stands" in said["over-time"]


def test_cold_engines_are_compared_by_one_metric_whatever_bound_one_breaks(
    live: Path, tmp_path: Path
) -> None:
    result = read(live, RESULT_FILE)
    ours, theirs = result["recommendation"], result["baseline"]
    template = next(t for t in result["trials"] if t["measurement"])
    cold = []
    for found, p95 in ((ours, 0.8), (theirs, 1.6)):
        e2e_s = {**template["measurement"]["e2e_s"], "p95": p95}
        trial = {**template, "phase": "cold", **{name: found[name] for name in LIMITS}}
        trial |= {"measurement": {**template["measurement"], "e2e_s": e2e_s}}
        trial |= {"tier": "0 good", "metric": "e2e_p95", "value": p95}
        cold.append(trial)
    shown = {"metric": "e2e_p95", "winner": 0.8, "current": 1.6, "ratio": 0.5}
    trials = [*(t for t in result["trials"] if t["phase"] != "cold"), *cold]
    run = read_run(changed(live, tmp_path, confirmed_cold=shown, trials=trials))
    said = {section.anchor: section.says for section in sections_of(run)}["gain"]
    assert said[1].endswith(
        "E2E latency p95 was 800 ms, with the current ones 1.60 s (\N{MINUS SIGN}50.0%)."
    )


def test_a_run_without_timelines_says_so(live: Path, tmp_path: Path) -> None:
    run_dir = changed(live, tmp_path, caveats=[])
    (run_dir / "timelines.json").unlink()
    said = {s.anchor: " ".join(s.says) for s in sections_of(read_run(run_dir))}
    assert "kept no timelines" in said["over-time"]
    assert said["caveats"].startswith("None")
    assert Outline(report_of(run_dir)).sections == ORDER


def test_windows_follow_each_other_and_preemptions_are_counted(
    live: Path, tmp_path: Path
) -> None:
    run_dir = changed(live, tmp_path)
    saved = read(run_dir, TIMELINES_FILE)
    for replay in saved["replays"]:
        (first,) = replay["windows"]
        replay["windows"] = [first, {**first, "preemptions": [1] * len(first["preemptions"])}]
    write(run_dir, TIMELINES_FILE, saved)
    section = {s.anchor: s for s in sections_of(read_run(run_dir))}["over-time"]
    bins = len(saved["replays"][-1]["windows"][0]["preemptions"])
    assert f"{bins} preemptions." in section.plots[0].says
    assert "400 requests" in section.plots[0].says
    assert "one after the other" in section.says[1]
    running = next(line for line in section.plots[0].traces if line["name"] == "running")
    assert running["y"].count(None) == running["x"].count(None) == 1
    times = [x for x in running["x"] if x is not None]
    assert times == sorted(times)


def test_an_unfinished_run_and_a_prediction_say_it_first(live: Path, tmp_path: Path) -> None:
    run_dir = changed(live, tmp_path, state="interrupted", method="shadow")
    said = sections_of(read_run(run_dir))[0].says
    assert "not complete (interrupted)" in said[0]
    assert "predicted, none was measured" in said[1]


# --- bad input ------------------------------------------------------------------------


def test_a_directory_without_a_result_is_reported(tmp_path: Path) -> None:
    for path, shown in (
        (tmp_path / "none", "not a run directory"),
        (tmp_path, "holds no result"),
    ):
        with pytest.raises(UsageError, match=shown) as caught:
            report_of(path)
        assert caught.value.exit_code == 2
        assert caught.value.hint


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        ("{", "cannot be read"),
        ('{"schema": 99}', "schema must be 2, got 99"),
        ('{"schema": 2}', "missing required field"),
    ],
)
def test_a_damaged_result_is_reported_and_the_last_page_stays(
    live: Path, tmp_path: Path, damage: str, shown: str
) -> None:
    run_dir = changed(live, tmp_path)
    (run_dir / RESULT_FILE).write_text(damage)
    target = tmp_path / "report.html"
    target.write_text("the last page")
    with pytest.raises(UsageError, match=shown):
        write_report(run_dir, target)
    assert target.read_text() == "the last page"


def test_a_trial_that_is_none_is_reported(live: Path, tmp_path: Path) -> None:
    run_dir = changed(live, tmp_path)
    result = read(run_dir, RESULT_FILE)
    result["trials"][0]["phase"] = "guess"
    write(run_dir, RESULT_FILE, result)
    with pytest.raises(UsageError, match="is damaged: Invalid enum value 'guess'"):
        report_of(run_dir)


def test_the_command_writes_beside_the_run_or_where_it_is_reported(
    live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = changed(live, tmp_path)
    assert report.main([str(run_dir)], standalone_mode=False) == 0
    typed = [str(run_dir), "-o", str(tmp_path / "r.html")]
    assert report.main(typed, standalone_mode=False) == 0
    assert (run_dir / "report.html").read_bytes() == (tmp_path / "r.html").read_bytes()
    out, err = capsys.readouterr()
    assert out == ""
    assert f"report written to {tmp_path / 'r.html'}" in err
