"""`tune check`: only a shift that a re-tune pays for ends with 10."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import click
import numpy as np
import pytest

from support.drift_parts import busy_traffic, longer_outputs
from support.job_parts import SHORT, arguments_for
from support.paths import ROOT
from support.prometheus_parts import need_prometheus, with_history
from support.prometheus_past import SHAKEN, PastEngine
from support.retune_parts import a_retune, an_aim
from support.shadow_files import a_profile, a_trace_file, crowded
from support.shadow_parts import a_shape
from support.toy import ToyCosts, ToySource
from support.toy_tune import CROWDED, job_on, write_trace
from tuner.cli.commands import check as check_command
from tuner.drift.baseline import read_baseline
from tuner.drift.check import Checked, DriftVerdict, check, without_replay
from tuner.drift.compare import drift_between
from tuner.drift.retune import RetuneOptions
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.plan import ReplayPlan
from tuner.run.options import TuningOptions
from tuner.run.start import aim_of
from tuner.search.space import Reach
from tuner.shadow.profiles import Profile, write_profile
from tuner.shadow.step_model import StepModel
from tuner.traffic.formats import ReadOptions, read_traces
from tuner.traffic.prefixes import HashIds, offsets_of
from tuner.traffic.prometheus import readings
from tuner.traffic.reshape import Router, thin
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
from tuner.traffic.traces import LoadModel, RemarkKind, Trace
from tuner.traffic.windows import Window, parse_window

BEFORE, TODAY = (busy_traffic(seed, minutes=4, per_s=1.5, output=30.0) for seed in (0, 1))


def checked(
    now: Trace,
    current: int,
    costs: ToyCosts = CROWDED,
    wrong_ratio: float = 0.03,
) -> tuple[Checked, int]:
    """Check new traffic on a toy; return the verdict and how many replays it took."""
    drift = drift_between(sketch_of(BEFORE), sketch_of(now))
    retune, predictor = a_retune(EngineLimits(current, 2048), costs, wrong_ratio)
    found = without_replay(drift, retune.space.current)
    return found or check(drift, now, retune, an_aim()), len(predictor.asked)


def test_unchanged_traffic_takes_no_replay() -> None:
    found, replays = checked(TODAY, current=2)
    assert (found.verdict, found.exit_code, replays) == (DriftVerdict.UNCHANGED, 0, 0)


@pytest.mark.slow
def test_a_shift_that_the_current_cap_does_not_bear_pays() -> None:
    found, _ = checked(longer_outputs(TODAY), current=2)
    assert (found.verdict, found.exit_code) == (DriftVerdict.PAYS, 10)
    assert found.best is not None
    assert found.best.max_num_seqs > 2
    assert found.gain is not None
    assert 0 < found.gain.interval[0] < found.gain.value < found.gain.interval[1]
    assert list(found.lines())[-1].startswith("shifted, re-tune pays ")
    # A change for the sake of a bound that may cost latency leads with the bound.
    ratio = replace(found.gain.ratio, value=0.9, low=0.7, high=1.02)
    for meets_more, told in ((True, "pays: "), (False, "pays 10% (-2% … 30%): ")):
        gain = replace(found.gain, ratio=ratio, meets_more=meets_more)
        last = list(replace(found, gain=gain).lines())[-1]
        assert last.startswith(f"shifted, re-tune {told}")

    again, _ = checked(longer_outputs(TODAY), current=2)
    assert again == found


@pytest.mark.slow
def test_nobody_who_shapes_traffic_moves_a_cap_further_than_its_reach() -> None:
    """Beyond ten requests a step pays dearly here, so that a large cap is far from the best."""
    now, current = longer_outputs(TODAY), EngineLimits(64, 2048)
    drift = drift_between(sketch_of(BEFORE), sketch_of(now))
    retune, predictor = a_retune(current, CROWDED, 0.03)
    free = check(drift, now, retune, an_aim())
    assert free.best is not None
    assert free.best.max_num_seqs < 16
    for reach, lowest in ((Reach(4.0), 16), (Reach(4.0, min_max_num_seqs=32), 32)):
        predictor.asked.clear()
        held = replace(retune, space=replace(retune.space, reach=reach))
        found = check(drift, now, held, an_aim())
        assert found.best is not None
        assert lowest <= found.best.max_num_seqs <= 64
        assert all(reach.holds(limits, current) for limits in predictor.asked)


@pytest.mark.slow
def test_a_shift_that_no_other_cap_serves_better_is_reported_as_such() -> None:
    found, replays = checked(longer_outputs(TODAY), current=5)
    assert (found.verdict, found.exit_code) == (DriftVerdict.STILL_BEST, 0)
    assert replays > 0
    assert "output_tokens" in found.why


@pytest.mark.slow
def test_a_gain_within_the_shadows_error_does_not_pay() -> None:
    found, _ = checked(longer_outputs(TODAY), current=2, wrong_ratio=50.0)
    assert found.verdict is DriftVerdict.STILL_BEST
    assert found.gain is not None
    assert found.gain.interval[0] < 0 < found.gain.value


def test_with_too_little_data_nothing_is_asked_of_the_shadow() -> None:
    drift = drift_between(sketch_of(BEFORE), sketch_of(TODAY.between(0.0, 30.0)))
    found = without_replay(drift, EngineLimits(2, 2048))
    assert found is not None
    assert (found.verdict, found.exit_code) == (DriftVerdict.TOO_LITTLE, 0)


@pytest.mark.parametrize(
    ("load_model", "in_flight", "lead_in_s"),
    [(LoadModel.OPEN, None, 20.0), (LoadModel.CLOSED, 4, 0.0)],
)
def test_a_window_of_new_traffic_begins_as_warm_as_where_it_is_tuned_for(
    load_model: LoadModel, in_flight: int | None, lead_in_s: float, kept: Path
) -> None:
    baseline, chosen = read_baseline(kept), parse_window("60s:120s")
    options = RetuneOptions(window=chosen, load_model=load_model, concurrency=in_flight)
    tuning = TuningOptions(TODAY, window=chosen, load_model=load_model, concurrency=in_flight)
    aim = options.aim(baseline, TODAY)
    assert aim.window == aim_of(tuning, TODAY).window == Window(60.0, 120.0, lead_in_s)
    retune, _ = a_retune(EngineLimits(2, 2048), CROWDED, 0.03)
    assert retune.rank(TODAY, aim).workload.requests == len(TODAY.between(60.0, 120.0))


def test_what_was_replayed_in_a_closed_loop_is_checked_in_one(tmp_path: Path) -> None:
    """With as many in flight, and clients that leave as soon, unless it is said otherwise."""
    run = tmp_path / "run"
    shutil.copytree(ROOT / "examples" / "demo" / "run", run)
    result = json.loads((run / "result.json").read_text())
    result["provenance"]["options"] |= {"concurrency": 6, "request_timeout_s": 9.0}
    (run / "result.json").write_text(json.dumps(result))
    baseline = read_baseline(run)
    aim = RetuneOptions().aim(baseline, TODAY)
    assert aim.plan == ReplayPlan(LoadModel.CLOSED, 6, timeout_s=9.0)
    said = RetuneOptions(load_model=LoadModel.OPEN, request_timeout_s=3.0)
    assert said.aim(baseline, TODAY).plan == ReplayPlan(timeout_s=3.0)


def test_the_result_of_a_run_is_as_good_a_baseline_as_the_run() -> None:
    run = ROOT / "examples" / "demo" / "run"
    of_file, of_run = read_baseline(run / "result.json"), read_baseline(run)
    assert (of_file.label, of_file.current) == (of_run.label, of_run.current)


def run_check(*arguments: str) -> int:
    """Run the command as `tune check` does. Raises: TunerError."""
    context = check_command.make_context("check", list(arguments))
    code: int = check_command.invoke(context)
    return code


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a profile beside the sketch of what it was made for, before.jsonl."""
    folder = tmp_path_factory.mktemp("kept")
    write_profile(folder / "profile.yaml", a_profile())
    path = a_trace_file(folder / "before.jsonl", 1000, per_s=4.0)
    before = read_traces([str(path)], None, ReadOptions())
    write_sketch(folder / TRAFFIC_FILE, sketch_of(before))
    return folder / "profile.yaml"


@pytest.mark.slow
@pytest.mark.engine
def test_a_profile_with_its_sketch_is_all_that_a_check_needs(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        *(
            "--baseline",
            str(kept),
            "--trace",
            str(kept.with_name("before.jsonl")),
            "--force-profile",
        ),
        *("--max-num-seqs", "6,12", "--json"),
    ]
    assert run_check(*command) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["verdict"], shown["gain"]) == ("unchanged", None)

    # Three times the load: more than the current cap of four can bear.
    assert run_check(*command, "--load", "3") == 10
    shown = json.loads(capfd.readouterr().out)
    assert shown["verdict"] == "shifted, re-tune pays"
    assert shown["current"] == {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    assert shown["gain"]["interval"][0] > 0
    rate = next(shift for shift in shown["shifts"] if shift["name"] == "arrival_rate")
    assert rate["matters"]
    assert rate["interval"][0] < rate["effect"] < rate["interval"][1]


def test_a_configuration_is_read_and_compared_also_where_traffic_is_the_same(
    tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ("--baseline", str(kept), "--trace", str(kept.with_name("before.jsonl")))
    with pytest.raises(UsageError, match=r"gone.yaml does not exist"):
        run_check(*same, "--config", str(tmp_path / "gone.yaml"))
    served = tmp_path / "served.yaml"
    others = "but the configuration has 1/512 and the baseline 4/512"
    cache = "the profile was made with no-enable-prefix-caching: not set, here it is True"
    off = "no-enable-prefix-caching: true\n"
    for seqs, more, words in (
        (1, "", others),
        (4, "", ""),
        (4, off, f"but {cache}"),
        (1, off, f"{others}; {cache}"),
    ):
        served.write_text(f"model: none\nmax-num-seqs: {seqs}\n{more}")
        assert run_check(*same, "--config", str(served), "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["verdict"] == "unchanged"
        assert shown["current"] == {"max_num_seqs": seqs, "max_num_batched_tokens": 512}
        assert shown["why"].partition("to matter")[2].removeprefix(", ") == words


def test_a_window_is_of_what_is_predicted_and_all_traffic_is_compared(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ("--baseline", str(kept), "--trace", str(kept.with_name("before.jsonl")))
    assert run_check(*same, "--window", "0s:5s", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "unchanged"
    window = next(p for p in check_command.params if p.name == "window")
    assert isinstance(window, click.Option)
    assert "to predict, if all of it has shifted: all, 5m:10m" in (window.help or "")


@pytest.mark.slow
def test_a_run_that_kept_no_traffic_says_what_to_name(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "tuned.jsonl")
    assert job_on(ToySource(CROWDED), arguments_for(trace, *SHORT)) == 0
    run_dir = tmp_path / "run"
    (run_dir / TRAFFIC_FILE).unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"traffic.json is missing .* tuned.jsonl") as refused:
        run_check("--baseline", str(run_dir), "--trace", str(trace))
    assert "--baseline-trace" in refused.value.hint


@pytest.mark.slow
def test_a_live_run_is_checked_at_what_it_recommends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "tuned.jsonl", n=1200)
    assert job_on(ToySource(CROWDED), arguments_for(trace, *SHORT, "--window", "0s:10s")) == 0
    run_dir = tmp_path / "run"
    advised = json.loads((run_dir / "result.json").read_text())["recommendation"]
    assert (run_dir / "profile.yaml").exists()
    capsys.readouterr()
    same = ("--baseline", str(run_dir), "--baseline-trace", str(trace), "--trace", str(trace))
    assert run_check(*same, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "unchanged"
    assert shown["current"]["max_num_seqs"] == advised["max_num_seqs"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--baseline is missing"),
        (("--baseline", "gone"), "gone does not exist"),
        (("--baseline", "."), "result.json is missing"),
    ],
)
def test_what_cannot_be_checked_is_reported(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        run_check(*arguments, "--trace", "today.jsonl")


def test_the_current_traffic_has_one_source(kept: Path) -> None:
    both = ("--trace", "today.jsonl", "--prometheus", "http://localhost:9")
    for given in ((), both):
        with pytest.raises(UsageError, match="either --trace or --prometheus"):
            run_check("--baseline", str(kept), *given)


@pytest.mark.parametrize(
    "words", [("--since", "6h"), ("--label", "job=vllm"), ("--no-verify",)]
)
def test_no_recording_is_cut_by_what_prometheus_is_asked(
    words: tuple[str, ...], kept: Path
) -> None:
    with pytest.raises(UsageError, match=f"{words[0]} is for --prometheus, which is not"):
        run_check("--baseline", str(kept), "--trace", "today.jsonl", *words)


def test_without_a_prometheus_there_is_no_verdict(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="Prometheus"):
        run_check("--baseline", str(kept), "--prometheus", "http://127.0.0.1:9")
    assert capsys.readouterr().out == ""


def test_of_a_server_that_prometheus_saw_in_part_there_is_no_verdict(
    tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_prometheus()
    with with_history(tmp_path, SHAKEN) as url:
        asked = ("--prometheus", url, "--since", "490m", "--step", "30s", "--json")
        assert run_check("--baseline", str(kept), *asked) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "too little data"
    assert "there is no data for" in shown["why"]
    assert shown["shifts"] == []


HIT_RATIO, CHAT_S = 0.7, 300.0


def chat(seed: int, per_s: float) -> Trace:
    """Return traffic of which seven tenths of each prompt are one of eight beginnings."""
    rng = np.random.default_rng(seed)
    n = rng.poisson(per_s * CHAT_S)
    prompt, output = (
        np.rint(rng.uniform(*of, n)).astype(int) for of in ((400, 1200), (30, 90))
    )
    offsets = offsets_of(prompt // 16)
    ids = np.arange(offsets[-1]) + 1_000_000
    for row, beginning in enumerate(rng.integers(8, size=n).tolist()):
        shared = int(HIT_RATIO * (prompt[row] // 16) + rng.random())
        ids[offsets[row] : offsets[row] + shared] = 1000 * beginning + np.arange(shared)
    due_s = np.sort(rng.uniform(0, CHAT_S, n))
    return Trace(due_s - due_s[0], prompt, output, HashIds(offsets, ids, 16), source="chat")


def a_chat_profile(*, prefix_caching: bool = True) -> Profile:
    """Return the profile of an engine that could not compute all of those prompts."""
    return replace(
        a_profile(),
        shape=a_shape(prefix_caching=prefix_caching),
        step_model=crowded(StepModel.linear(0.004, 0.00012, 0.00012, decode_context_s=1e-9)),
        current_limits=EngineLimits(8, 512),
    )


@contextmanager
def chat_served(
    folder: Path, profile: Profile, hit_ratio: float, rates: tuple[float, ...] = (8.0,)
) -> Iterator[list[str]]:
    """Serve chat of late, each replica so much a second; give a check's arguments.

    A little less than was tuned for comes by default. The clock stands at the last scrape:
    what a slow machine asks later is of the same seconds.
    """
    need_prometheus()
    write_profile(folder / "profile.yaml", profile)
    write_sketch(folder / TRAFFIC_FILE, sketch_of(chat(1, 9.5)))
    end_s = int(time.time()) // 15 * 15
    scrapes_s = np.arange(end_s - CHAT_S, end_s + 1, 15.0, dtype=np.float64)
    engines = [
        PastEngine(
            arrived_s=scrapes_s[0] + now.due_s,
            prompt=now.prompt_tokens,
            output=now.output_tokens,
            scrapes_s=scrapes_s,
            hit_ratio=hit_ratio,
            instance=f"{name}:8000",
        )
        for name, now in zip("abc", (chat(i, r) for i, r in enumerate(rates, 2)), strict=False)
    ]
    stopped = SimpleNamespace(time=lambda: float(end_s))
    with with_history(folder, *engines) as url, patch.object(readings, "time", stopped):
        asked = ("--prometheus", url, "--since", f"{CHAT_S:.0f}s", "--step", "15s", "--json")
        shadow = ("--force-profile", "--max-num-seqs", "4,8,16")
        yield ["--baseline", str(folder / "profile.yaml"), *asked, *shadow]


@pytest.mark.engine
@pytest.mark.slow
def test_a_server_whose_prompts_hit_its_prefix_cache_is_not_told_to_re_tune_for_prefill(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with chat_served(tmp_path, a_chat_profile(), HIT_RATIO) as arguments:
        assert run_check(*arguments) == 0
        shown = json.loads(capfd.readouterr().out)
        assert shown["verdict"] == "shifted, current config still best"
        # A cap of 7 is likely a percent better, which is a reason for who asks for no more.
        assert shown["why"].endswith("but by less than --min-gain 5%")
        assert run_check(*arguments, "--min-gain", "1%") == 10
        assert json.loads(capfd.readouterr().out)["gain"]["interval"][1] < 0.05
        # Of a server on which nothing hits the same counters are another story.
        (tmp_path / "cold").mkdir()
    with chat_served(tmp_path / "cold", a_chat_profile(), 0.0) as arguments:
        assert run_check(*arguments) == 10
        shown = json.loads(capfd.readouterr().out)
        assert shown["gain"]["interval"][0] > 0.05


def test_of_a_fleet_the_replica_with_the_middle_load_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All three together, and each of the others, have shifted from the 9.5 before."""
    found = {}
    with chat_served(tmp_path, a_chat_profile(), HIT_RATIO, (6.0, 9.5, 14.0)) as arguments:
        for named in ((), ("--label", "instance=b:8000")):
            assert run_check(*arguments, *named) == 0
            found[named] = json.loads(capsys.readouterr().out)
    of_all, of_one = found.values()
    assert of_one["verdict"] == "unchanged"
    assert of_all["why"].startswith(f"{of_one['why']}; of 3 engines served at once: ")
    assert "the middle load, --label instance=b:8000; they finished 0.6" in of_all.pop("why")
    assert of_all == {name: of_one[name] for name in of_all}


def served_by(folder: Path, engines: list[int], *, named: bool) -> str:
    """Write a recording of engines of which each served traffic of the baseline's kind."""
    rows = []
    for number, times in enumerate(engines):
        for part in range(times):
            trace = busy_traffic(10 * number + part + 1)
            rows += [
                {
                    "arrived_at_s": float(trace.due_s[i]),
                    "input_length": int(trace.prompt_tokens[i]),
                    "output_length": int(trace.output_tokens[i]),
                    **({"engine_index": number} if named else {}),
                }
                for i in range(len(trace))
            ]
    rows.sort(key=lambda row: row["arrived_at_s"])
    remark = f"{len(engines)} engines are recorded together: tune trace thin --replicas 3"
    said = {"text": remark, "kind": "engines_together"}
    head = {"trace_header": {"version": 1, "clock": "wall", "remarks": [said]}}
    path = folder / f"fleet-{named}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (head, *rows)))
    return str(path)


def test_of_a_recording_of_several_engines_one_engine_s_own_requests_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(tmp_path / "profile.yaml", a_profile())
    write_sketch(tmp_path / TRAFFIC_FILE, sketch_of(busy_traffic(0)))
    asked = ("--baseline", str(tmp_path / "profile.yaml"), "--json", "--trace")
    assert run_check(*asked, served_by(tmp_path, [1, 2, 1], named=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "unchanged"
    assert "; of 3 engines served at once: this is the one with the middle" in shown["why"]
    # Where no row says who answered, nothing is judged, and the way out is told.
    together = served_by(tmp_path, [1, 2, 1], named=False)
    assert run_check(*asked, together) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "too little data"
    assert "recorded together: tune trace thin --replicas 3" in shown["why"]
    share = thin(read_traces([together], None, ReadOptions()), 3, Router.LEAST_LOADED, 0, 0.02)
    assert not share.notes.told(RemarkKind.ENGINES_TOGETHER)


@pytest.mark.slow
@pytest.mark.engine
def test_a_shadow_that_finds_other_hits_than_the_server_had_gives_no_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = a_chat_profile(prefix_caching=False)
    with chat_served(tmp_path, profile, HIT_RATIO) as arguments:
        assert run_check(*arguments) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["verdict"] == "too little data"
    assert (
        "the shadow's cache hits 0% of the prompt tokens and the server's 70%" in (shown["why"])
    )


def test_hits_that_cannot_be_imitated_give_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Whatever these prompts share, their last block is always computed.
    with chat_served(tmp_path, a_chat_profile(), 0.999) as arguments:
        assert run_check(*arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "too little data"
    assert "prefix hits cannot be imitated: 100% of the prompt tokens hit" in shown["why"]
