"""The whole job with a shadow: vLLM's scheduler predicts what the toy then measures.

The toy stands in for the live engine. It schedules as vLLM does and its costs are linear, so
that its shadow is nearly exact and the answer can be known beforehand.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.job_parts import Run, shown
from support.shadow_toy import InstalledSource
from support.toy_tune import job_on, write_trace
from support.traffic import replay_toy
from tuner.cli.commands import tune
from tuner.cli.replay import ReplayOptions, run_replay
from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.errors import NoFeasibleConfigError, ShadowError, TooFewSamplesError, UsageError
from tuner.replay.metrics import measure
from tuner.report.run_files import read_run
from tuner.report.sweep import rung_points
from tuner.run.calibrate.calibrator import Calibrator
from tuner.run.rounds import unpacked
from tuner.search.objective import Objective, Scoring, Tier
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.traffic.formats import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CURRENT = EngineLimits(4, 2048)
SOURCE = InstalledSource(current=CURRENT, num_blocks=20_000)
LADDER = ("--max-num-seqs", "4,16")
REQUESTS = 120
GOAL = Scoring(Objective.BALANCED, (), "p90")


def arguments_for(folder: Path, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    trace = write_trace(folder / "t.jsonl", n=REQUESTS)
    return [
        *("--trace", str(trace), "--run-dir", str(folder / "run")),
        *("-o", str(folder / "best.yaml"), *LADDER, *more),
    ]


def auto(folder: Path, source: InstalledSource, *more: str) -> Run:
    arguments = arguments_for(folder, "--budget", "4m", *more)
    said = shown(lambda: job_on(source, arguments))
    return Run(folder, said.err, said.out)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return one run that the tests look at."""
    return auto(tmp_path_factory.mktemp("auto"), SOURCE)


@pytest.fixture(scope="module")
def profile_path(tuned: Run) -> Path:
    """Return the profile of that run."""
    return tuned.run_dir / "profile.yaml"


def by_phase(run: Run, phase: str) -> list[dict[str, Any]]:
    return [trial for trial in run.trials if trial["phase"] == phase]


def test_it_recommends_what_the_toy_is_known_to_like(tuned: Run) -> None:
    trace = read_trace(tuned.run_dir.parent / "t.jsonl")

    def value_at(cap: int, budget: int) -> float:
        score = GOAL.score(measure([replay_toy(trace, EngineLimits(cap, budget), SOURCE)]))
        return score.value if score.tier is Tier.GOOD else math.inf

    found = tuned.result["recommendation"]
    assert found["verdict"] == "change"
    caps = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64)
    best = min(value_at(cap, budget) for cap in caps for budget in (512, 2048))
    winner = value_at(found["max_num_seqs"], found["max_num_batched_tokens"])
    # The toy's best is flat above what ever runs; the race calls 2 % a tie.
    assert winner <= best * 1.03
    expected = winner / value_at(CURRENT.max_num_seqs, CURRENT.max_num_batched_tokens)
    if math.isfinite(expected) and expected > 0:
        assert found["gain_ratio"] == pytest.approx(expected - 1, abs=0.1)


def test_it_calibrates_ranks_races_and_confirms_in_this_order(tuned: Run) -> None:
    phases = list(dict.fromkeys(trial["phase"] for trial in tuned.trials))
    assert phases == ["calibrate", "shadow", "race", "cold"]
    for trial in tuned.trials:
        assert trial["engine"] == ("shadow" if trial["phase"] == "shadow" else "live")
    assert tuned.result["trials"] == tuned.trials
    assert len({(key_of(trial), trial["race_round"]) for trial in by_phase(tuned, "cold")}) == 2
    taught = Counter(key_of(trial) for trial in by_phase(tuned, "calibrate"))
    # Two bursts at each of four settings, then what tells most.
    assert len(taught) >= 4
    assert taught.total() > 8
    assert (CURRENT.max_num_seqs, CURRENT.max_num_batched_tokens) in taught
    # One engine for calibration and race, one each for the winner and the current one, cold.
    assert tuned.result["provenance"]["engine_starts"] == 3
    assert tuned.result["method"] == "auto"
    stages = tuned.result["provenance"]["stages_s"]
    asked = {"start", "calibrate", "fit", "shadow", "draw", "race", "cold", "clients"}
    assert set(stages) == asked
    assert all(wall_s > 0 for wall_s in stages.values())


def test_every_step_that_taught_is_kept(tuned: Run) -> None:
    lines = (tuned.run_dir / "steps.jsonl").read_text().splitlines()
    kept = unpacked([json.loads(line) for line in lines])
    taught = [*by_phase(tuned, "calibrate"), *by_phase(tuned, "race")]
    seen = Counter((limits.max_num_seqs, limits.max_num_batched_tokens) for limits, _ in kept)
    assert not Counter(key_of(trial) for trial in taught) - seen
    steps = sum(int(columns.has_batch.sum()) for _, columns in kept)
    assert steps == read_profile(tuned.run_dir / "profile.yaml").fit.steps


def test_what_was_predicted_of_the_race_stands_beside_what_was_measured(tuned: Run) -> None:
    pairs = tuned.result["live_against_shadow"]
    raced = {key_of(t) for t in by_phase(tuned, "race")}
    assert {key_of(pair) for pair in pairs} == raced
    assert {pair["metric"] for pair in pairs} == {"requests_per_s", "tpot_p50", "e2e_p50"}
    for pair in pairs:
        assert pair["shadow"] == pytest.approx(pair["live"], rel=0.2)
    # Of the same requests: the page says nothing of other stretches of the trace.
    assert read_run(tuned.run_dir).predicted_same_requests


def test_every_rung_of_the_ladder_has_a_value_in_the_report(tuned: Run) -> None:
    """The chart that the tool is for: also those that lose, and those that never bind."""
    assert tuned.result["ladder"] == [4, 16, 32, 64]
    points = rung_points(read_run(tuned.run_dir))
    assert {4, 16, 32, 64} <= {p.limits.max_num_seqs for p in points}
    assert {p.limits.max_num_batched_tokens for p in points} == {2048}
    for metric in ("decode_step_p50", "e2e_p90", "gpu_cache_usage_perc"):
        assert all(p.value(metric) is not None for p in points)
    assert not any(p.is_cut for p in points)
    # Each rung has a prediction of its own; where another stands for a cap, it says so.
    assert {p.limits.max_num_seqs for p in points if p.twin is None} == {4, 16, 32, 64}
    twins = [p for p in points if p.twin is not None]
    assert all(f"at {p.twin}, the same batches" in p.how for p in twins)


def test_nothing_is_doubted_that_went_well(tuned: Run) -> None:
    doubted = {"shadow_unfit", "shadow_only", "shadow_disagrees", "profile_forced"}
    assert not tuned.caveats & (doubted | {"not_confirmed_cold", "cold_differs", "windowed"})
    assert "replayed in the shadow" in tuned.emitted.read_text()
    assert "confirmed on engines started cold" in tuned.emitted.read_text()


def test_the_shadow_predicted_what_was_then_measured(tuned: Run) -> None:
    """The same whole trace, replayed by vLLM's scheduler and by the toy."""
    predicted = {
        (t["max_num_seqs"], t["max_num_batched_tokens"]): t for t in by_phase(tuned, "shadow")
    }
    compared = 0
    for trial in by_phase(tuned, "race"):
        guess = predicted.get((trial["max_num_seqs"], trial["max_num_batched_tokens"]))
        if guess is not None:
            assert guess["measurement"]["offered"] == trial["measurement"]["offered"]
            assert guess["value"] == pytest.approx(trial["value"], rel=0.05)
            compared += 1
    assert compared


def test_a_profile_is_left_that_reads_back(tuned: Run, profile_path: Path) -> None:
    profile = read_profile(profile_path)
    assert profile.current_limits == CURRENT
    assert profile.shape.vllm_version == serve.vllm_version()
    assert profile.fit.heldout_steps_ratio < 0.05
    assert profile.uncertainty is not None
    assert str(CURRENT) in profile.calibrated_on
    starts = {start.limits for start in profile.kv_starts}
    found = tuned.result["recommendation"]
    winner = EngineLimits(found["max_num_seqs"], found["max_num_batched_tokens"])
    assert {CURRENT, winner} <= starts
    facts = tuned.result["provenance"]["profile"]
    assert facts["calibrated_on"] == list(profile.calibrated_on)


def test_at_capacity_live_and_shadow_are_compared_at_the_load_that_raced(
    tmp_path: Path, profile_path: Path
) -> None:
    slo = ("--objective", "capacity", "--slo", "e2e_p90=4s", "--profile", str(profile_path))
    found = auto(tmp_path, SOURCE, *slo)
    loads = {trial["measurement"]["load"] for trial in by_phase(found, "race")}
    assert len(loads) == 1
    assert not 0.9 < loads.pop() < 1.1
    assert "live and predicted disagree" not in found.talk
    assert found.result["live_against_shadow"]
    for pair in found.result["live_against_shadow"]:
        assert pair["shadow"] == pytest.approx(pair["live"], rel=0.2)


def test_with_the_profile_of_an_earlier_run_nothing_is_calibrated(
    tmp_path: Path, tuned: Run, profile_path: Path
) -> None:
    found = auto(tmp_path, SOURCE, "--profile", str(profile_path))
    phases = list(dict.fromkeys(trial["phase"] for trial in found.trials))
    assert phases == ["shadow", "race", "cold"]
    again, before = found.result["recommendation"], tuned.result["recommendation"]
    assert again["verdict"] == before["verdict"]
    # The optimum is flat: neighbours that tie may change places from race to race.
    assert 0.6 < again["max_num_seqs"] / before["max_num_seqs"] < 1.7
    assert "profile_forced" not in found.caveats
    kept, given = read_profile(found.run_dir / "profile.yaml"), read_profile(profile_path)
    # The race's steps have corrected its speed, of which nothing was off.
    assert kept.step_model.base_s == pytest.approx(given.step_model.base_s, rel=0.1)
    assert set(given.kv_starts) <= set(kept.kv_starts)


def test_too_little_time_for_the_whole_window_is_no_reason_to_keep_what_is_there(
    tmp_path: Path, profile_path: Path
) -> None:
    """Two rounds take 48 s by the prediction: a stretch races, or the prediction stands."""
    found = auto(tmp_path, SOURCE, "--budget", "40s", "--profile", str(profile_path))
    advice = found.result["recommendation"]
    assert advice["verdict"] == "change"
    assert advice["gain_interval"][1] < 0
    is_stretch = "do not fit into the time; racing" in found.talk
    assert is_stretch or advice["is_predicted"]
    assert advice["is_predicted"] == ("not_raced" in found.caveats)
    if is_stretch:
        assert found.result["provenance"]["trace"]["replayed_requests"] < REQUESTS
    if advice["is_predicted"]:
        assert "predicted, not raced" in found.talk
        assert "PREDICTED, not raced" in (found.run_dir.parent / "best.yaml").read_text()


def test_a_profile_that_is_wrong_here_is_learnt_anew_from_the_race(
    tmp_path: Path, profile_path: Path
) -> None:
    """The machine of the profile took five times as long for every step."""
    profile = read_profile(profile_path)
    slow = tmp_path / "slow.yaml"
    write_profile(slow, replace(profile, step_model=profile.step_model.scaled(5.0)))
    found = auto(tmp_path / "run", SOURCE, "--profile", str(slow))
    assert "after round 1" in found.talk
    kept = read_profile(found.run_dir / "profile.yaml")
    assert kept.step_model.base_s == pytest.approx(profile.step_model.base_s, rel=0.2)


def test_replays_that_leave_no_fit_model_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of the calibration still stands, and the profile that is kept is its own."""
    fitted, calls = Calibrator.profile, list[int]()

    def unfit_later(calibrator: Calibrator) -> Profile:
        calls.append(1)
        if len(calls) > 1:
            raise TooFewSamplesError("a step-time model wants more steps")
        return fitted(calibrator)

    monkeypatch.setattr(Calibrator, "profile", unfit_later)
    found = auto(tmp_path, SOURCE)
    assert len(calls) > 1
    assert "nothing is learnt of the replays: a step-time model wants more steps" in found.talk
    assert found.result["recommendation"]["verdict"] == "change"
    assert read_profile(found.run_dir / "profile.yaml").uncertainty is not None


def test_a_profile_of_another_vllm_is_refused_before_anything_is_measured(
    tmp_path: Path, profile_path: Path
) -> None:
    other = str(elsewhere(tmp_path, profile_path))
    with pytest.raises(ShadowError, match=r"made with vLLM 0\.1\.0, here is") as caught:
        auto(tmp_path / "run", SOURCE, "--profile", other)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "run" / "trials.jsonl").exists()


def test_an_engine_without_a_shadow_is_searched_live_and_that_is_told(tmp_path: Path) -> None:
    found = auto(tmp_path, replace(SOURCE, has_shadow=False), "--budget", "40s")
    assert "shadow_unfit" in found.caveats
    assert "no predictions: the shadow cannot stand in for a toy" in found.talk
    assert {t["engine"] for t in found.trials} == {"live"}
    assert "current" in {t["phase"] for t in found.trials}
    assert found.result["recommendation"]["verdict"] == "change"
    assert not (found.run_dir / "profile.yaml").exists()


def shadow_arguments(folder: Path, profile: Path, *more: str) -> list[str]:
    shadow = ("--method", "shadow", "--profile", str(profile), "--budget", "60s")
    return arguments_for(folder, *shadow, *more)


def run_shadow(arguments: list[str]) -> int:
    """Run without a source, as `tune` does: the profile is all there is."""
    return job_on(None, arguments)


def test_a_profile_alone_gives_a_prediction_that_says_so(
    tmp_path: Path, profile_path: Path, tuned: Run
) -> None:
    said = shown(lambda: run_shadow(shadow_arguments(tmp_path, profile_path)))
    done = Run(tmp_path, said.err, said.out)
    assert "shadow_only" in done.caveats
    assert "profile_forced" not in done.caveats
    kept = json.loads((done.run_dir / "timelines.json").read_text())["replays"]
    assert {replay["engine"] for replay in kept} == {"shadow"}
    assert {t["engine"] for t in done.trials} == {"shadow"}
    found = done.result["recommendation"]
    assert found["verdict"] == "change"
    emitted = yaml.safe_load(done.emitted.read_text())
    assert emitted["max-num-seqs"] == found["max_num_seqs"]
    assert "PREDICTED by the shadow of a profile" in done.emitted.read_text()
    assert done.result["provenance"]["engine"]["kind"] == "shadow"
    # What it predicts is what the run that made the profile predicted.
    guesses = {key_of(t): t["value"] for t in by_phase(tuned, "shadow")}
    again = {key_of(t): t["value"] for t in by_phase(done, "shadow")}
    assert guesses.keys() & again.keys()
    for key in guesses.keys() & again.keys():
        assert again[key] == pytest.approx(guesses[key], rel=0.01)


def test_where_the_median_stands_for_the_tail_a_caveat_says_so(
    tmp_path: Path, profile_path: Path, tuned: Run
) -> None:
    trace = write_trace(tmp_path / "few.jsonl", n=60)
    _, _, *arguments = shadow_arguments(tmp_path, profile_path, "--trace", str(trace))
    said = shown(lambda: run_shadow(arguments))
    assert "caveat: the median decided, as the requests are too few for a tail" in said.err
    assert Run(tmp_path, said.err, said.out).result["tail"] == "p50"
    assert "the median decided" not in tuned.talk


def test_slos_that_requests_break_alone_are_not_put_down_to_the_load(
    tmp_path: Path, profile_path: Path
) -> None:
    asked = shadow_arguments(tmp_path, profile_path, "--slo", "ttft_p90=1ms")
    with pytest.raises(NoFeasibleConfigError, match="already take longer: ttft_p90") as error:
        run_shadow(asked)
    assert error.value.hint.startswith("no load is low enough: relax ttft_p90, shorten prompts")
    assert "--load" not in error.value.hint


def test_nothing_is_said_of_limits_that_the_engine_did_not_start_at(tmp_path: Path) -> None:
    """Neither that larger caps may be better nor how a starting point there compares."""
    poor = replace(SOURCE, no_memory_above=10)
    arguments = arguments_for(tmp_path / "run", "--budget", "40s", "--load", "3")
    said = shown(lambda: job_on(poor, arguments))
    result = Run(tmp_path / "run", said.err, said.out).result
    texts = {caveat["id"]: caveat["text"] for caveat in result["caveats"]}
    assert (
        "so that nothing beyond 4/2048 was tried: with lower caps" in texts["ceiling_lowered"]
    )
    assert texts["at_space_edge"].endswith("at the edge of what was searched")
    assert not result["starting_points"]
    assert "starting point" not in said.err


def test_where_no_setting_answers_in_time_the_run_says_which_loses_least(
    tmp_path: Path,
) -> None:
    """Calibrating finds none to choose between, which is no reason to predict nothing."""
    arguments = arguments_for(tmp_path / "run", "--budget", "60s", "--slo", "ttft_p90=9s")
    with pytest.raises(NoFeasibleConfigError) as raised:
        shown(lambda: job_on(SOURCE, [*arguments, "--request-timeout", "1ms"]))
    assert "loses least, 100% of them" in raised.value.message
    assert "allow a longer --request-timeout" in raised.value.hint


def test_a_key_that_the_profile_hides_is_still_asked_for(
    tmp_path: Path, profile_path: Path
) -> None:
    profile, hidden = read_profile(profile_path), tmp_path / "hidden.yaml"
    write_profile(
        hidden, replace(profile, serve_values={**profile.serve_values, "api-key": "k3y-value"})
    )
    folder, few = tmp_path / "run", ("--max-num-seqs", "4", "--window", "peak:2s")
    said = shown(lambda: run_shadow(shadow_arguments(folder, hidden, *few, "--format", "args")))
    done = Run(folder, said.err, said.out)
    assert 'VLLM_API_KEY="${VLLM_API_KEY:?' in done.emitted.read_text()
    assert done.result["serve_values"]["api-key"] == "<redacted>"
    with pytest.raises(UsageError, match="an api-key which is not kept here"):
        run_shadow(shadow_arguments(tmp_path / "again", hidden))


def key_of(trial: dict[str, Any]) -> tuple[int, int]:
    return trial["max_num_seqs"], trial["max_num_batched_tokens"]


def test_a_damaged_profile_is_refused(tmp_path: Path, profile_path: Path) -> None:
    damaged = tmp_path / "damaged.yaml"
    text = profile_path.read_text()
    damaged.write_text(text.replace("num_blocks: ", "num_blocks: -"))
    assert damaged.read_text() != text
    with pytest.raises(UsageError, match="num_blocks") as caught:
        run_shadow(shadow_arguments(tmp_path / "run", damaged))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "best.yaml").exists()


@pytest.mark.parametrize(("load", "tells_nothing"), [("0.3", True), ("8", False)])
def test_a_rate_that_the_traffic_sets_is_told_to_be_that(
    tmp_path: Path, profile_path: Path, load: str, *, tells_nothing: bool
) -> None:
    more = ("--objective", "throughput", "--load", load)
    said = shown(lambda: run_shadow(shadow_arguments(tmp_path, profile_path, *more)))
    done = Run(tmp_path, said.err, said.out)
    assert ("all_finished" in done.caveats) == tells_nothing
    if tells_nothing:
        assert "how soon the last of them end: a higher --load" in done.talk


def elsewhere(folder: Path, path: Path) -> Path:
    """Write the profile as if another vLLM had been measured, and return its path."""
    profile = read_profile(path)
    shape = replace(profile.shape, vllm_version="0.1.0")
    write_profile(folder / "other.yaml", replace(profile, shape=shape))
    return folder / "other.yaml"


def test_a_profile_of_another_vllm_is_refused(tmp_path: Path, profile_path: Path) -> None:
    other = elsewhere(tmp_path, profile_path)
    with pytest.raises(ShadowError, match=r"made with vLLM 0\.1\.0, here is") as caught:
        run_shadow(shadow_arguments(tmp_path / "run", other))
    assert caught.value.exit_code == 2
    assert "--force-profile" in caught.value.hint


def test_a_profile_of_another_vllm_is_used_when_forced_and_that_is_told(
    tmp_path: Path, profile_path: Path
) -> None:
    other = elsewhere(tmp_path, profile_path)
    folder, few = tmp_path / "forced", ("--max-num-seqs", "4", "--window", "peak:2s")
    said = shown(lambda: run_shadow(shadow_arguments(folder, other, *few, "--force-profile")))
    done = Run(folder, said.err, said.out)
    assert {"shadow_only", "profile_forced"} <= done.caveats
    assert done.result["provenance"]["profile"]["vllm_version"] == "0.1.0"


def replayed(folder: Path, *more: str, source: InstalledSource | None = None) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    trace = write_trace(folder / "t.jsonl", n=REQUESTS)
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "1024")
    arguments = ["--json", "--trace", str(trace), *limits, *more]
    params = tune.commands["replay"].make_context("replay", arguments).params
    said = shown(lambda: run_replay(ReplayOptions.parse(params), source))
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_a_shadow_replay_answers_as_a_live_one_does(tmp_path: Path, profile_path: Path) -> None:
    shadow = ("--engine", "shadow", "--profile", str(profile_path))
    predicted = replayed(tmp_path / "shadow", *shadow)
    live = replayed(tmp_path / "live", source=SOURCE)
    assert set(predicted) == set(live)
    assert predicted["engine"] == "shadow"
    assert "shadow_only" in predicted["caveats"]
    assert predicted["limits"] == live["limits"]
    assert predicted["offered"] == live["offered"] == predicted["completed"]
    assert predicted["e2e_s"]["p50"] == pytest.approx(live["e2e_s"]["p50"], rel=0.05)
    assert predicted["requests_per_s"] == pytest.approx(live["requests_per_s"], rel=0.05)
