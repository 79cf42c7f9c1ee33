"""A profile comes back as it was measured, or is refused by name; nothing in between."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.engine.protocol import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.engine.step_model import FitError, StepModel
from tuner.errors import UsageError
from tuner.profiles import SCHEMA, KvStart, Profile, check_fits, read_profile, write_profile

SHAPE = EngineShape(
    model="org/model-7b",
    device="NVIDIA H100 80GB HBM3",
    dtype="bfloat16",
    vllm_version="0.20.2",
    parallelism={"tensor_parallel_size": 1},
    vocab_size=128_000,
    max_model_len=8192,
    block_size=16,
    kv_kind="full_attention",
    prefix_caching=True,
    asynchronous=True,
    captured_sizes=(1, 2, 4, 8),
    scheduler={"policy": "fcfs", "enable_chunked_prefill": True, "a_ratio": 1.0, "none": None},
)
MODEL = StepModel(
    decode_knots=(0, 32),
    decode_slopes_s=(1.5e-05, 2e-05),
    prefill_knots=(0, 64, 512),
    prefill_slopes_s=(0.0, 1e-05, 1.1e-05),
    base_s=0.0061,
    prefill_base_s=0.0005,
    decode_context_s=1.25e-08,
    prefill_context_s=3e-11,
    tidy_s=1e-05,
    captured_sizes=(1, 2, 4, 8),
)
FIT = FitError(
    steps=12_000,
    step_mape_ratio=0.031,
    heldout_steps_ratio=0.004,
    heldout_config_ratio=0.02,
    distorted_ratio=0.01,
)
PROFILE = Profile(
    shape=SHAPE,
    kv_starts=(
        KvStart(EngineLimits(8, 512), 1000),
        KvStart(EngineLimits(32, 2048), 900),
    ),
    step_model=MODEL,
    fit=FIT,
    metric_error_ratio=0.05,
    made_at="2026-01-31T12:00:00Z",
    calibrated_on=("8/512", "32/2048"),
    present_limits=EngineLimits(32, 2048),
    serve_values={"model": "org/model-7b", "max-num-seqs": 32},
)

counts = st.integers(1, 2**40)
amounts = st.floats(0, 1e300)
texts = st.text(max_size=120)
limits = st.tuples(st.integers(1, 4096), st.integers(0, 2**20)).map(
    lambda pair: EngineLimits(pair[0], sum(pair))
)
sizes = st.lists(counts, max_size=20, unique=True).map(lambda some: tuple(sorted(some)))
plain = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
# A key that names a secret has its value hidden, so keys are drawn that cannot.
harmless = st.text("bdfgx-_ ~:#'\"1é", min_size=1, max_size=12)
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(harmless, inner)
)


@st.composite
def curves(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[float, ...]]:
    knots = (0, *draw(sizes))
    slopes = draw(st.lists(st.floats(0, 1e3), min_size=len(knots), max_size=len(knots)))
    return knots, tuple(slopes)


@st.composite
def step_models(draw: st.DrawFn) -> StepModel:
    (decode_knots, decode_slopes_s), (prefill_knots, prefill_slopes_s) = (
        draw(curves()),
        draw(curves()),
    )
    return StepModel(
        decode_knots=decode_knots,
        decode_slopes_s=decode_slopes_s,
        prefill_knots=prefill_knots,
        prefill_slopes_s=prefill_slopes_s,
        base_s=draw(amounts),
        prefill_base_s=draw(amounts),
        decode_context_s=draw(amounts),
        prefill_context_s=draw(amounts),
        tidy_s=draw(amounts),
        captured_sizes=draw(sizes),
    )


shapes = st.builds(
    EngineShape,
    model=texts,
    device=texts,
    dtype=texts,
    vllm_version=texts,
    parallelism=st.dictionaries(texts, st.integers(), max_size=3),
    vocab_size=counts,
    max_model_len=counts,
    block_size=counts,
    kv_kind=texts,
    prefix_caching=st.booleans(),
    asynchronous=st.booleans(),
    captured_sizes=sizes,
    scheduler=st.dictionaries(texts, plain | st.none(), max_size=4),
)
profiles = st.builds(
    Profile,
    shape=shapes,
    kv_starts=st.lists(st.builds(KvStart, limits, counts), min_size=1, max_size=4).map(tuple),
    step_model=step_models(),
    fit=st.builds(
        FitError,
        steps=counts,
        step_mape_ratio=amounts,
        heldout_steps_ratio=amounts,
        heldout_config_ratio=st.none() | amounts,
        distorted_ratio=st.floats(0, 1),
    ),
    metric_error_ratio=st.none() | amounts,
    made_at=st.datetimes().map(lambda at: at.isoformat(timespec="seconds") + "Z"),
    calibrated_on=st.lists(limits.map(str), max_size=3).map(tuple),
    present_limits=limits,
    serve_values=st.dictionaries(harmless, nested, max_size=4),
)


def written(folder: Path, profile: Profile = PROFILE) -> Path:
    path = folder / "profile.yaml"
    write_profile(path, profile)
    return path


def damaged(folder: Path, damage: Callable[[dict[str, Any]], object]) -> Path:
    """Return a written profile's path after its mapping was damaged in place."""
    path = written(folder)
    data = yaml.safe_load(path.read_text())
    damage(data)
    path.write_text(yaml.safe_dump(data))
    return path


def refusal(path: Path) -> str:
    """Return the message of the refusal, which names the file and says what to do."""
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert str(path) in caught.value.message
    assert "every live run writes profile.yaml" in caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value.message


@settings(max_examples=60, deadline=None)
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
    assert "  decode_slopes_s_per_seq: [1.5e-05, 2.0e-05]" in body
    assert "  prefill_knots_tokens: [0, 64, 512]" in body
    assert "!!" not in text
    assert "&id" not in text


def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path: Path) -> None:
    model = replace(
        MODEL,
        base_s=np.float64(0.0061),
        decode_slopes_s=tuple(np.array(MODEL.decode_slopes_s)),
    )
    assert read_profile(written(tmp_path, replace(PROFILE, step_model=model))) == PROFILE


def test_a_secret_is_not_written(tmp_path: Path) -> None:
    values = {"api-key": "sesame", "nested": {"hf-token": "sesame"}, "seed": 1}
    path = written(tmp_path, replace(PROFILE, serve_values=values))
    assert "sesame" not in path.read_text()
    assert read_profile(path).serve_values["seed"] == 1


def put(*keys: str | int, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a damage that sets what stands under the keys."""

    def damage(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (put("speed", value=1), "unknown key `speed`"),
        (put("step_model", "speed", value=1), "step_model: unknown key `speed`"),
        (put("kv_starts", 1, "speed", value=1), "kv_starts[1]: unknown key `speed`"),
        (lambda d: d.pop("fit"), "key `fit` is missing"),
        (lambda d: d["engine"].pop("dtype"), "engine: key `dtype` is missing"),
        (lambda d: d["step_model"].pop("tidy_s"), "step_model: key `tidy_s` is missing"),
        (
            put("engine", "block_size", value="16"),
            "engine.block_size: expected `int`, got '16'",
        ),
        (
            put("engine", "prefix_caching", value=1),
            "engine.prefix_caching: expected `bool`, got 1",
        ),
        (
            put("fit", "steps", value=True),
            "fit.steps: expected `int`, got True",
        ),
        (
            put("kv_starts", 0, "num_blocks", value=None),
            "kv_starts[0].num_blocks: expected `int`, got None",
        ),
        (put("engine", "block_size", value=-16), "engine.block_size: expected `int` >= 0"),
        (put("step_model", "decode_knots_seqs", value=[0, 10**400]), "step_model"),
        (put("fit", value=None), "fit: expected `object`, got None"),
        (
            put("step_model", "base_s", value=-0.1),
            "step_model.base_s: expected `float` >= 0.0, got -0.1",
        ),
        (
            put("step_model", "decode_slopes_s_per_seq", 1, value=math.nan),
            "step_model.decode_slopes_s_per_seq[1]: expected `float` >= 0.0, got nan",
        ),
        (
            put("step_model", "tidy_s", value=math.inf),
            "step_model.tidy_s: expected `float` <= 1.7e+308, got inf",
        ),
        (
            put("step_model", "base_s", value=10**400),
            "step_model.base_s: number out of range",
        ),
        (
            put("metric_error_ratio", value=-1),
            "metric_error_ratio: expected `float` >= 0.0, got -1",
        ),
        (put("engine", "parallelism", value={"tp": "one"}), "engine.parallelism"),
        (put("engine", "scheduler", value={"a": [1]}), "engine.scheduler"),
        (put("kv_starts", value=[]), "kv_starts must hold a start"),
        (put("kv_starts", 0, "num_blocks", value=0), "num_blocks of at least 1"),
        (put("present_limits", "max_num_batched_tokens", value=4), "present_limits: max_num_b"),
        (
            put("kv_starts", 1, "limits", "max_num_seqs", value=0),
            "kv_starts[1].limits: max_num_seqs must be at least 1, got 0",
        ),
        (put("step_model", "decode_knots_seqs", value=[1, 32]), "step_model: decode_knots"),
        (put("step_model", "decode_knots_seqs", value=[0]), "step_model: decode_"),
        (put("step_model", "prefill_knots_tokens", value=[0, 9, 9]), "step_model: prefill_"),
        (
            put("step_model", "captured_sizes_tokens", value=[4, 2]),
            "step_model: captured_sizes",
        ),
        (put("made_at", value="yesterday"), "made_at must be as 2026-01-31T12:00:00Z"),
        (put("made_at", value="2026-01-31T12:00:00+02:00"), "made_at"),
        (lambda d: d.pop("schema"), f"schema must be {SCHEMA}, got None"),
        (put("schema", value=SCHEMA + 1), f"schema must be {SCHEMA}, got {SCHEMA + 1}"),
        (put("schema", value=str(SCHEMA)), f"schema must be {SCHEMA}, got '{SCHEMA}'"),
        (put("schema", value=True), f"schema must be {SCHEMA}, got True"),
    ],
)
def test_damage_is_told_with_its_key(
    damage: Callable[[dict[str, Any]], object], told: str, tmp_path: Path
) -> None:
    assert told in refusal(damaged(tmp_path, damage))


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("  base_s: 0.0061\n", "  base_s: 0.0061\n  base_s: 0.01\n"))
    assert "key base_s stands twice" in refusal(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "got None"),
        (b"# only a comment\n", "got None"),
        (b"- 1\n", "got [1]"),
        (b"schema\n", "got 'schema'"),
        (b"schema: [1\n", "is not YAML"),
        (b"schema: 1\n\tfit: 2\n", "is not YAML"),
        (b"\x7fELF\x02\x01\x00\x00\xff", "is not YAML"),
        (b"\x00\x00", "is not YAML"),
        (b"schema: !!int x\n", "is not YAML"),
        (b"schema: !!timestamp x\n", "is not YAML"),
        (b"schema: !!python/name:os.system x\n", "is not YAML"),
        (b"[" * 5000, "is not YAML"),
        (b"{[1]: 2}\n", "is not YAML"),
    ],
)
def test_what_is_no_profile_at_all_is_told(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_bytes(content)
    assert told in refusal(path)


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "Is a directory" in refusal(tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_file_cut_or_changed_anywhere_is_read_or_refused_but_never_crashes(
    data: st.DataObject,
) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder))
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content)))
        removed = data.draw(st.integers(0, 30))
        added = data.draw(st.binary(max_size=3) | st.sampled_from([b"-", b"\n", b": ", b"1"]))
        path.write_bytes(content[:at] + added + content[at + removed :])
        with suppress(UsageError):
            assert isinstance(read_profile(path), Profile)


def test_a_file_cut_short_is_always_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    last_key = next(i for i, line in enumerate(lines) if line.startswith("serve_values"))
    for kept in range(last_key + 1):
        path.write_text("".join(lines[:kept]))
        refusal(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_could_not_be_read_again_is_not_written(value: float, tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="metric_error_ratio"):
        write_profile(path, replace(PROFILE, metric_error_ratio=value))
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_old_profile_and_no_litter(tmp_path: Path) -> None:
    path = written(tmp_path)
    larger = replace(PROFILE, serve_values={"note": "x" * 100_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UsageError, match=r"profile\.yaml cannot be written"):
            write_profile(path, larger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_profile(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]


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


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "profile.yaml"
    link.symlink_to(tmp_path / "there" / "kept.yaml")
    write_profile(link, PROFILE)
    assert link.is_symlink()
    assert read_profile(tmp_path / "there" / "kept.yaml") == PROFILE


def starting(*starts: tuple[int, int, int]) -> Profile:
    """Return a profile with starts of seqs, tokens and blocks."""
    return replace(
        PROFILE, kv_starts=tuple(KvStart(EngineLimits(n, m), b) for n, m, b in starts)
    )


@settings(deadline=None)
@given(profiles, limits)
def test_a_measured_start_answers_with_its_own_blocks(
    profile: Profile, wanted: EngineLimits
) -> None:
    for start in profile.kv_starts:
        same = [s.num_blocks for s in profile.kv_starts if s.limits == start.limits]
        assert profile.num_blocks_at(start.limits) == min(same)
    assert profile.num_blocks_at(wanted) in {s.num_blocks for s in profile.kv_starts}


@pytest.mark.parametrize(
    ("wanted", "blocks"),
    [
        ((8, 512), 1000),
        ((15, 2000), 900),
        ((18, 2000), 800),  # above 16, the middle of 8 and 32 in ratios, but below 20
        ((1, 1), 1000),
        ((4096, 65536), 800),
    ],
)
def test_the_nearest_start_is_nearest_in_ratios(wanted: tuple[int, int], blocks: int) -> None:
    profile = starting((8, 2000, 900), (32, 2000, 800), (8, 512, 1000))
    assert profile.num_blocks_at(EngineLimits(*wanted)) == blocks


def test_both_limits_count_for_nearness() -> None:
    profile = starting((8, 512, 1000), (8, 8192, 700))
    assert profile.num_blocks_at(EngineLimits(64, 4096)) == 700
    assert profile.num_blocks_at(EngineLimits(64, 1024)) == 1000


@pytest.mark.parametrize("order", [1, -1])
def test_of_equally_near_starts_the_smaller_cache_answers(order: int) -> None:
    starts = [(8, 64, 1000), (50, 64, 900)][::order]
    assert starting(*starts).num_blocks_at(EngineLimits(20, 64)) == 900


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
