"""Knobs beside the limits: each is predicted as the engine that has it, and set if it pays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.odd_toys import KnobSource
from support.optional import not_none
from support.run_parts import a_run
from support.shadow_files import a_profile
from support.toy import ToySource
from support.traffic import steady
from tuner.cli import run
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.errors import UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.run.context import Workload
from tuner.run.knobs import advice as advice_module
from tuner.run.knobs.advice import advise, confirm_knobs
from tuner.run.knobs.known import KNOBS, Change, Place, check_has, knob_named, short_first
from tuner.run.knobs.records import MIN_GAIN, KnobAdvice, Standing
from tuner.run.predict import Predictions, predict_more
from tuner.run.result import read_result
from tuner.search.budget import Aim
from tuner.search.objective import WORST_SLACK, Objective, Score, Tier
from tuner.search.space import SearchSpace
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, write_profile
from tuner.shadow.step_model import StepModel
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import Trace
from tuner.traffic.windows import whole

LIMITS = EngineLimits(16, 2048)
SPACE = SearchSpace(LIMITS, (8, 16, 32), (512, 2048), EngineLimits(64, 4096))
STEADY = steady(400, per_s=12.0, prompt=200, output=40, seed=3)
ROWS = [range(1, tokens // 64 + 1) for tokens in STEADY.prompt_tokens.tolist()]
SHARED = replace(STEADY, hashes=HashIds.from_rows(ROWS, 64))
"""Traffic of which a prompt begins with all of every shorter one."""


def profile_of(**changed: object) -> Profile:
    """Return a profile of which prompts take most of the time, its shape changed."""
    profile = a_profile()
    shape = replace(profile.shape, **changed)  # type: ignore[arg-type]
    return replace(profile, shape=shape, step_model=StepModel.linear(0.004, 0.0004, 0.0002))


def advice_on(
    profile: Profile, trace: Trace, *names: str, limits: EngineLimits = LIMITS
) -> KnobAdvice:
    """Return what is said of knobs at the limits."""
    aim = Aim(Objective.BALANCED, (), ReplayPlan(), None)
    workload = Workload.of("traffic", trace, (whole(trace),), aim)
    predictor = Predictor(profile)
    found = predict_more(predictor, Predictions(workload), [limits])
    return not_none(advise(predictor, found, limits, SPACE, names))


def changes_of(name: str, profile: Profile, trace: Trace) -> list[Change]:
    """Return the values of a knob that are tried."""
    changes = KNOBS[name].changes(Place(Predictor(profile), LIMITS, [trace]))
    assert not isinstance(changes, str), changes
    return [*changes]


def shape_with(change: Change, profile: Profile) -> EngineShape:
    return change.engine(Predictor(profile)).simulated(LIMITS).shape


def test_a_knob_that_pays_gains_what_such_an_engine_is_predicted_to() -> None:
    off, on = profile_of(), profile_of(prefix_caching=True)
    advice = advice_on(off, SHARED, "prefix-caching", "watermark")
    measured = [
        Predictor(profile).measure([SHARED], LIMITS, ReplayPlan()) for profile in (on, off)
    ]
    tails = [m.latency("e2e_s", "p95") or 0.0 for m in measured if isinstance(m, Measurement)]
    first, watermark = advice.findings
    assert first.tried["on"] == pytest.approx(tails[0] / tails[1], rel=1e-9)
    assert first.is_recommended
    assert not_none(first.gain_ratio) < -MIN_GAIN
    assert advice.settings == {"enable-prefix-caching": True}
    assert advice.is_deployed
    assert not watermark.is_recommended
    assert "left as it is" in watermark.says


def test_a_prefix_cache_of_states_is_not_predicted_but_started() -> None:
    groups = (
        {"kind": "FullAttentionSpec", "block_size": a_profile().shape.block_size},
        {"kind": "MambaSpec", "mamba_cache_mode": "none", "num_speculative_blocks": 0},
    )
    profile = profile_of(kv_kind="FullAttentionSpec and MambaSpec", kv_groups=groups)
    advice = advice_on(profile, SHARED, "prefix-caching")
    assert not advice.is_deployed
    assert "--variant starts one" in advice.findings[0].says


def test_limits_are_looked_at_again_with_the_knobs_turned() -> None:
    far = EngineLimits(2, 512)
    advice = advice_on(profile_of(), SHARED, "prefix-caching", limits=far)
    assert advice.before == far
    assert advice.limits != far
    assert f"with {advice.limits} in place of {far}" in advice.lines[-1]
    assert advice.predicted > len(SPACE.grid())


def test_what_gains_too_little_is_left_alone_and_that_is_said() -> None:
    quiet = steady(300, per_s=2.0, prompt=50, output=20, seed=1)
    advice = advice_on(profile_of(), quiet, "long-prefill", "reserve-full-isl", "watermark")
    assert advice.settings == {}
    assert not advice.is_deployed
    assert advice.lines[-1] == "no knob gains 2% that is sure: left as they are"


def test_every_value_becomes_the_engine_that_its_keys_would_start() -> None:
    profile = profile_of(captured_sizes=(1, 2, 4, 8, 16, 24, 32))
    prompts = replace(STEADY, prompt_tokens=STEADY.prompt_tokens + 3000)
    for change in changes_of("long-prefill", profile, prompts):
        (tokens,) = change.values.values()
        assert shape_with(change, profile).scheduler["long_prefill_token_threshold"] == tokens
    for change in changes_of("captured-sizes", profile, SHARED):
        sizes = change.values["cudagraph-capture-sizes"]
        graphs = change.engine(Predictor(profile)).simulated(LIMITS).step_model.graphs
        assert list(graphs.sizes) == sizes
    for change in changes_of("kv-memory", profile, SHARED):
        blocks = change.engine(Predictor(profile)).simulated(LIMITS).num_blocks
        assert blocks == change.values["num-gpu-blocks-override"]
    (change,) = changes_of("reserve-full-isl", profile, SHARED)
    assert shape_with(change, profile).scheduler["scheduler_reserve_full_isl"] is True


def test_memory_and_what_clients_would_have_to_send_are_told_and_not_set() -> None:
    answers = SHARED.output_tokens.copy()
    answers[::4] *= 20
    mixed = replace(SHARED, output_tokens=answers)
    advice = advice_on(profile_of(), mixed, "kv-memory", "priority")
    memory, priority = advice.findings
    assert "blocks would do" in memory.says
    assert "not set" in memory.says
    assert not memory.is_recommended
    assert not priority.is_recommended
    assert advice.settings == {}


@pytest.mark.parametrize(
    ("is_on", "says"),
    [(True, "on and stays on"), (False, "--variant async:async-scheduling=true")],
)
def test_launching_ahead_is_not_predicted_and_what_tells_is_named(
    says: str, *, is_on: bool
) -> None:
    profile = profile_of()
    profile = replace(profile, shape=replace(profile.shape, asynchronous=is_on))
    (found,) = advice_on(profile, SHARED, "async-scheduling").findings
    assert says in found.says
    assert not found.is_recommended


def test_no_kv_cache_is_named_that_vllm_would_not_start_with() -> None:
    """It has to hold one request of max-model-len."""
    profile = profile_of()
    blocks = Predictor(profile).simulated(LIMITS).num_blocks
    long = profile_of(max_model_len=blocks * profile.shape.block_size)
    kept = [
        change.engine(Predictor(long)).simulated(LIMITS).num_blocks
        for change in changes_of("kv-memory", long, SHARED)
    ]
    assert min(kept) > blocks
    (memory,) = advice_on(long, SHARED, "kv-memory").findings
    assert f"vLLM starts with no less than {blocks:,} blocks" in memory.says


def test_more_memory_brings_no_rate_where_all_requests_come_at_once() -> None:
    at_once = replace(STEADY, due_s=np.zeros(len(STEADY)))
    (memory,) = advice_on(profile_of(), at_once, "kv-memory").findings
    assert "nothing tells a rate of requests" in memory.says


def test_short_first_gives_each_doubling_of_a_request_its_own_class() -> None:
    trace = replace(
        steady(4, per_s=1.0),
        prompt_tokens=np.array([100, 200, 400, 800]),
        output_tokens=np.array([28, 28, 28, 28]),
    )
    classes = not_none(short_first(trace).priorities)
    assert classes.tolist() == [7, 7, 8, 9]


def test_a_knob_that_this_vllm_has_not_is_refused_with_the_release_that_has_it() -> None:
    check_has(["watermark"], "0.24.0")
    with pytest.raises(
        UsageError, match=r"vLLM 0\.23\.1 has no watermark: it came with vLLM 0\.24"
    ):
        check_has(["prefix-caching", "watermark"], "0.23.1")


def test_a_knob_is_known_by_vllms_key_too_and_an_unknown_one_is_refused_by_name() -> None:
    assert knob_named("enable_prefix_caching") is KNOBS["prefix-caching"]
    with pytest.raises(
        UsageError, match=r"no knob 'prefix-cashing'.*nearest is prefix-caching"
    ):
        knob_named("prefix-cashing")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a profile and traffic that shares its prompts."""
    folder = tmp_path_factory.mktemp("knobs")
    write_profile(folder / "profile.yaml", profile_of(vllm_version="0.23.0"))
    rows = zip(SHARED.due_s.tolist(), SHARED.prompt_tokens, SHARED.output_tokens, strict=True)
    lines = [
        {
            "arrived_at_s": due_s,
            "input_length": int(prompt),
            "output_length": int(output),
            "hash_ids": [*range(1, int(prompt) // 64 + 1)],
        }
        for due_s, prompt, output in rows
    ]
    (folder / "prod.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def asked(files: Path, *more: str) -> list[str]:
    """Return the words that name the profile and the trace, and more."""
    words = ["--profile", str(files / "profile.yaml"), "--trace", str(files / "prod.jsonl")]
    return [*words, "--hash-block-size", "64", "--force-profile", *more]


@pytest.mark.slow
def test_a_run_writes_the_knobs_that_pay_and_its_page_shows_them(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, best = files / "run", files / "best.yaml"
    words = asked(files, "--method", "shadow", "--knobs", "prefix-caching,kv-memory")
    words += ["--max-num-seqs", "8,16", "--run-dir", str(folder), "-o", str(best)]
    assert run(words) == 0
    told = capfd.readouterr().err
    knobs = not_none(read_result(folder).knobs)
    assert knobs.settings == {"enable-prefix-caching": True}
    assert knobs.together in told
    assert told.index(knobs.together) < told.index("the limits alone:")
    text = best.read_text()
    assert "\nenable-prefix-caching: true\n" in text
    assert f"max-num-seqs: {knobs.limits.max_num_seqs}\n" in text
    assert "# set beside the limits: enable-prefix-caching\n" in text
    page = (folder / "report.html").read_text()
    assert "Other knobs" in page
    assert run(["emit", str(best), "--format", "args"]) == 0
    assert "--enable-prefix-caching" in capfd.readouterr().out


def test_a_plan_tells_them_at_each_load(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *asked(files, "--knobs", "prefix-caching", "--loads", "0.5,1")]
    assert run([*words, "--max-num-seqs", "16", "--json"]) == 0
    light, heavy = json.loads(capfd.readouterr().out)["loads"]
    assert light["knobs"]["findings"][0]["knob"] == "prefix-caching"
    assert heavy["knobs"]["settings"] == {"enable-prefix-caching": True}


def test_a_run_refuses_what_the_profiles_vllm_has_not(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = asked(files, "--method", "shadow", "--knobs", "watermark", "-o", "-")
    assert run([*words[:-2], "--run-dir", str(files / "none")]) == 2
    assert "vLLM 0.23.0 has no watermark: it came with vLLM 0.24" in capfd.readouterr().err
    assert run(asked(files, "--method", "live", "--knobs", "watermark")) == 2


def test_explain_lists_all_knobs_and_the_release_that_has_each(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["explain"]) == 0
    told = capfd.readouterr().out
    assert all(f"{name} (--{knob.key};" in told for name, knob in KNOBS.items())
    assert "vLLM 0.24 and later" in told


@pytest.mark.engine
def test_explain_shows_vllms_own_help_of_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "long-prefill"]) == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "a request is considered long if the prompt is longer than this number" in told


FOUND = KnobAdvice(
    metric="e2e_p95",
    before=LIMITS,
    limits=EngineLimits(8, 2048),
    settings={"enable-prefix-caching": True},
    gain_ratio=-0.2,
    gain_interval=(-0.25, -0.15),
    p_better=0.99,
    findings=(),
    space=2,
    predicted=2,
)


def confirmed(folder: Path, left_s: float = 600.0, **source: Any) -> KnobAdvice:
    """Return what is said of the knobs once engines were started cold."""
    toy = KnobSource(log=str(folder / "starts"), **source)
    trace = steady(120, per_s=4.0, prompt=60, output=20, seed=2)
    with a_run(folder, trace, SPACE, toy) as made:
        made.engine.ensure_started()
        made.context.stopwatch.begin()
        made.context.stopwatch.total_s = left_s
        return confirm_knobs(made.runner, made.plan(LIMITS), FOUND)


def test_knobs_that_keep_an_slo_need_not_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are judged by what they were found for, and told by that."""
    kept = Score(Tier.GOOD, 2.04, "e2e_p95", ((WORST_SLACK, 0.4),), 0.4)
    broken = Score(Tier.BREAKS_SLO, 1.6, WORST_SLACK, (("e2e_p95", 2.0),), 1.6)
    found = replace(FOUND, metric=WORST_SLACK)
    monkeypatch.setattr(advice_module, "_started", lambda *args: args[-1])
    monkeypatch.setattr(Workload, "score", lambda _, settings: kept if settings else broken)
    with a_run(tmp_path, steady(120, per_s=4.0), SPACE, ToySource()) as made:
        made.context.stopwatch.begin()
        made.context.stopwatch.total_s = 600.0
        advice = confirm_knobs(made.runner, made.plan(LIMITS), found)
    assert advice.standing is Standing.CONFIRMED
    assert advice.cold == pytest.approx((0.25, 0.25))


@pytest.mark.slow
def test_engines_are_started_cold_with_the_knobs_and_without_in_turns(tmp_path: Path) -> None:
    advice = confirmed(tmp_path, times=0.7)
    assert advice.standing is Standing.CONFIRMED
    assert advice.is_deployed
    assert all(ratio < 0.95 for ratio in advice.cold)
    starts = (tmp_path / "starts").read_text().splitlines()[1:]
    with_it, without = "8/2048 on", "16/2048 off"
    assert starts == [with_it, without, without, with_it]
    kept = [json.loads(line) for line in (tmp_path / "run" / "knobs.jsonl").open()]
    assert [bool(one["settings"]) for one in kept] == [True, False, False, True]
    assert all(one["measurement"]["completed"] == 120 for one in kept)
    assert "n 2" in advice.lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "standing", "says"),
    [
        ({"times": 1.3}, Standing.REFUTED, "left as they are: engines started cold showed +"),
        ({"refuses": True}, Standing.REFUTED, "left as they are: the toy has no cache"),
        ({"left_s": 0.0}, Standing.UNTRIED, "left as they are: there was no time"),
    ],
)
def test_what_does_not_show_on_cold_engines_is_not_deployed(
    tmp_path: Path, source: dict[str, Any], standing: Standing, says: str
) -> None:
    advice = confirmed(tmp_path, **source)
    assert advice.standing is standing
    assert not advice.is_deployed
    assert advice.deployed == {}
    assert says in advice.lines[-1]
