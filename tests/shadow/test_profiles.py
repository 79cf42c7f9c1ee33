"""A profile comes back as it was measured, and says where it fits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import yaml
from hypothesis import given, settings

from support.optional import not_none
from support.paths import ROOT
from support.profile_parts import MODEL, PROFILE, SHAPE, limits, profiles, written
from support.run_parts import a_profile
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.shadow.calibration import Calibration
from tuner.shadow.profiles import (
    SCHEMA,
    KvStart,
    Profile,
    Seen,
    check_fits,
    read_profile,
    write_profile,
)
from tuner.shadow.speed import DERIVED_SETTING, SETTING


@settings(max_examples=25, deadline=None)
@given(profiles)
def test_what_is_read_is_what_was_written(profile: Profile) -> None:
    with TemporaryDirectory() as folder:
        assert read_profile(written(Path(folder), profile)) == profile


def test_types_survive_the_file(tmp_path: Path) -> None:
    read = read_profile(written(tmp_path))
    assert read == PROFILE
    assert {key: type(value) for key, value in read.shape.scheduler.items()} == {
        "policy": str,
        "enable_chunked_prefill": bool,
        "a_ratio": float,
        "none": type(None),
    }


def test_the_file_can_be_read_by_people(tmp_path: Path) -> None:
    text = written(tmp_path).read_text()
    assert text.startswith("# A profile of one vLLM engine")
    assert "tune --method shadow --profile" in text
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert body[0] == f"schema: {SCHEMA}"
    assert "  base_s: 0.0061" in body
    assert "  token_slopes_s_per_token: [0.0, 1.0e-05, 1.1e-05]" in body
    assert "  token_knots: [0, 64, 512]" in body
    assert "!!" not in text
    assert "&id" not in text


def test_a_key_that_has_its_default_may_stand_there_or_be_left_out(tmp_path: Path) -> None:
    plain = a_profile()
    path = tmp_path / "profile.yaml"
    write_profile(path, plain)
    short = yaml.safe_load(path.read_text())
    usual: dict[str, object] = {
        **dict.fromkeys(["agreement", "uncertainty", "seen"]),
        **{key: [] for key in ("doubts", "caveats")},
        "origin": "",
        "moved_ratio": 1.0,
        "variants": {},
    }
    assert not set(usual) & set(short)
    assert not {"host", "factors"} & set(short["step_model"])
    factors = [list(row) for row in plain.step_model.factors.rows]
    steps = {**short["step_model"], "host": None, "factors": factors}
    path.write_text(yaml.safe_dump({**short, **usual, "step_model": steps}))
    assert read_profile(path) == plain
    engine = {k: v for k, v in short["engine"].items() if k not in {"kv_groups", "block_bytes"}}
    path.write_text(yaml.safe_dump({**short, "engine": engine}))
    assert read_profile(path) == plain


def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path: Path) -> None:
    model = replace(
        MODEL,
        base_s=np.float64(0.0061),
        token_slopes_s=tuple(np.array(MODEL.token_slopes_s)),
    )
    assert read_profile(written(tmp_path, replace(PROFILE, step_model=model))) == PROFILE


def test_a_secret_is_not_written(tmp_path: Path) -> None:
    values = {"api-key": "sesame", "nested": {"hf-token": "sesame"}, "seed": 1}
    path = written(tmp_path, replace(PROFILE, serve_values=values))
    assert "sesame" not in path.read_text()
    assert read_profile(path).serve_values["seed"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_could_not_be_read_again_is_not_written(value: float, tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="metric_error_ratio"):
        write_profile(path, replace(PROFILE, metric_error_ratio=value))
    assert path.read_bytes() == before


def test_who_reads_while_a_new_profile_is_written_sees_the_old_one_whole(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    before = path.read_text()
    with path.open(encoding="utf-8") as reader:
        write_profile(path, replace(PROFILE, metric_error_ratio=None))
        assert reader.read() == before
    assert read_profile(path).metric_error_ratio is None


def test_a_target_that_cannot_be_replaced_is_told_and_leaves_no_litter(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    for target in (folder, tmp_path / "none" / "profile.yaml"):
        with pytest.raises(UsageError, match="cannot be written"):
            write_profile(target, PROFILE)
    assert list(tmp_path.iterdir()) == [folder]


def starting(*starts: tuple[int, int, int]) -> Profile:
    """Return a profile with starts of seqs, tokens and blocks."""
    return replace(
        PROFILE, kv_starts=tuple(KvStart(EngineLimits(n, m), b) for n, m, b in starts)
    )


@settings(max_examples=25, deadline=None)
@given(profiles, limits)
def test_a_measured_start_answers_with_its_own_blocks(
    profile: Profile, wanted: EngineLimits
) -> None:
    for start in profile.kv_starts:
        same = [s.num_blocks for s in profile.kv_starts if s.limits == start.limits]
        assert profile.num_blocks_at(start.limits) == min(same)
    assert profile.num_blocks_at(wanted) >= 1
    more = replace(wanted, max_num_batched_tokens=2 * wanted.max_num_batched_tokens)
    only = replace(profile, kv_starts=profile.kv_starts[:1])
    assert only.num_blocks_at(more) == only.num_blocks_at(wanted)


@pytest.mark.parametrize(
    ("wanted", "blocks"),
    [
        ((80, 2000), 900),
        ((93, 2000), 900),
        ((95, 2000), 800),  # above 94, the middle of 80 and 110 in ratios, but not 95
        ((2000, 2000), 800),
    ],
)
def test_the_nearest_start_is_nearest_in_ratios(wanted: tuple[int, int], blocks: int) -> None:
    profile = starting((80, 2000, 900), (110, 2000, 800), (80, 2500, 1000))
    assert profile.num_blocks_at(EngineLimits(*wanted)) == blocks


def test_starts_of_several_budgets_tell_what_a_token_costs() -> None:
    """Planted: a block for every 32 tokens, of 2,000; the cap was the same."""
    profile = starting((64, 2048, 1936), (64, 16384, 1488))
    assert profile.num_blocks_at(EngineLimits(64, 512)) == pytest.approx(1984, abs=1)
    assert profile.num_blocks_at(EngineLimits(16, 8192)) == pytest.approx(1744, abs=1)
    assert profile.num_blocks_at(EngineLimits(8, 10**7)) == 1


def test_of_one_start_its_largest_batch_tells_what_a_token_costs() -> None:
    shape = replace(PROFILE.shape, block_bytes=1 << 20, token_bytes=1 << 15)
    one = replace(starting((64, 16384, 1488)), shape=shape)
    assert one.num_blocks_at(EngineLimits(16, 2048)) == 1488 + (16384 - 2048) // 32
    # What starts have shown counts more.
    two = replace(starting((64, 16384, 1488), (64, 2048, 1600)), shape=shape)
    assert two.num_blocks_at(EngineLimits(64, 9216)) == pytest.approx(1544, abs=1)


def planted(seqs: int, tokens: int) -> tuple[int, int, int]:
    """Return a start of a device on which a token costs 1/32 and a sequence 5/8 blocks."""
    return seqs, tokens, 2000 - tokens // 32 - 5 * seqs // 8


def test_starts_at_other_limits_tell_what_both_cost() -> None:
    wanted = [EngineLimits(8, 512), EngineLimits(512, 4096), EngineLimits(32, 16384)]
    starts = [planted(1024, 16384), planted(256, 2048), planted(16, 8192)]
    profile = starting(*starts)
    for at in wanted:
        truth = planted(at.max_num_seqs, at.max_num_batched_tokens)[2]
        assert profile.num_blocks_at(at) == pytest.approx(truth, abs=1)
    two = starting(*starts[:2])
    for at in wanted:
        truth = planted(at.max_num_seqs, at.max_num_batched_tokens)[2]
        assert two.num_blocks_at(at) == pytest.approx(truth, rel=0.08)


@pytest.mark.parametrize("order", [1, -1])
def test_of_equally_near_starts_the_smaller_cache_answers(order: int) -> None:
    starts = [(25, 64, 1000), (36, 64, 900)][::order]
    assert starting(*starts).num_blocks_at(EngineLimits(30, 64)) == 900


def test_a_profile_without_starts_or_blocks_is_refused() -> None:
    for starts in ((), (KvStart(EngineLimits(8, 512), 0),)):
        with pytest.raises(ValueError, match="kv_starts"):
            replace(PROFILE, kv_starts=starts)


def test_a_profile_fits_where_it_was_made() -> None:
    here = check_fits(PROFILE, vllm_version="0.20.2", device=SHAPE.device, model=SHAPE.model)
    assert here == []
    assert check_fits(PROFILE, vllm_version="0.20.2", device=None, model=None) == []


def test_each_difference_is_a_sentence_with_both_sides() -> None:
    assert check_fits(PROFILE, vllm_version="0.32.0", device="cpu", model="other") == [
        "the profile was made with vLLM 0.20.2, here is 0.32.0",
        "the profile was made with the device NVIDIA H100 80GB HBM3, here is cpu",
        "the profile was made with the model org/model-7b, here is other",
    ]
    assert check_fits(PROFILE, vllm_version="0.20.2", device="cpu", model=None) == [
        "the profile was made with the device NVIDIA H100 80GB HBM3, here is cpu"
    ]


PREBUILT = sorted((ROOT / "profiles" / "gpu").glob("*.yaml"))
"""Derived by `tests/support/make_gpu_profiles.py`."""


@pytest.mark.parametrize("path", PREBUILT, ids=lambda path: path.stem)
def test_what_lies_ready_is_derived_and_can_be_replayed(path: Path) -> None:
    profile = read_profile(path)
    assert profile.origin.startswith("derived from published tables of NVIDIA AIConfigurator")
    assert profile.num_blocks_at(profile.current_limits) >= 4000
    # Tables leave more open of a setting beside others than measurements do.
    assert not_none(profile.uncertainty).setting == DERIVED_SETTING > 5 * SETTING
    # It is emitted for as many GPUs as it is of.
    assert profile.shape.devices == profile.serve_values.get("tensor-parallel-size", 1)
    step_s = profile.step_model.tables(64)[0] + profile.step_model.base_s
    assert 0.0005 < step_s[1] <= step_s[64] < 0.5


def test_five_models_on_six_gpus_and_two_on_five_lie_ready() -> None:
    models = {path.name.rpartition(".yaml")[0].rpartition(".")[0] for path in PREBUILT}
    assert (len(models), len(PREBUILT)) == (7, 40)


def test_a_bare_name_stands_for_a_profile_that_comes_with_the_package() -> None:
    assert read_profile(Path("demo")).shape.model == "tuner/demo_model"
    named = read_profile(Path("qwen3-32b.1xh200_sxm"))
    assert (named.shape.model, named.shape.device) == ("Qwen/Qwen3-32B", "NVIDIA H200")
    with pytest.raises(UsageError, match=r"qwen3-32b\.2xh100_sxm"):
        read_profile(Path("qwen3-32b.1xh100_sxm"))


def test_the_newest_start_at_the_same_limits_counts() -> None:
    """An estimate, or what an engine had with less memory, goes once one was started."""
    profile = a_profile()
    at = EngineLimits(16, 2048)
    calibration = Calibration(profile.shape, (KvStart(at, 900),), (), at, {})
    again = calibration.and_start(at, 1200).and_start(EngineLimits(32, 2048), 1100)
    assert again.starts == (KvStart(at, 1200), KvStart(EngineLimits(32, 2048), 1100))


def test_only_a_profile_that_knows_its_reach_is_asked_for_larger_caps() -> None:
    learnt = a_profile()
    assert not learnt.tells_beyond
    assert replace(learnt, seen=Seen(8, 2048)).tells_beyond
    assert replace(learnt, origin="derived from published tables").tells_beyond
