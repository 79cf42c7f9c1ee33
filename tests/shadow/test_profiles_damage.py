"""A profile that is damaged is refused by name; nothing is guessed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.profile_parts import damaged, refusal, written
from tuner.errors import UsageError
from tuner.shadow.profiles import SCHEMA, Profile, read_profile


def put(*keys: str | int, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a damage that sets what stands under the keys."""

    def damage(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (put("speed", value=1), "unknown key `speed`"),
        (put("kv_starts", 1, "speed", value=1), "kv_starts[1]: unknown key `speed`"),
        (lambda d: d.pop("fit"), "key `fit` is missing"),
        (
            put("engine", "block_size", value="16"),
            "engine.block_size: expected `int`, got '16'",
        ),
        (
            put("kv_starts", 0, "num_blocks", value=None),
            "kv_starts[0].num_blocks: expected `int`, got None",
        ),
        (put("step_model", "token_knots", value=[0, 10**400]), "step_model"),
        (put("fit", value=None), "fit: expected `object`, got None"),
        (
            put("step_model", "token_slopes_s_per_token", 1, value=math.nan),
            "step_model.token_slopes_s_per_token[1]: expected `float` >= 0.0, got nan",
        ),
        (
            put("step_model", "tidy_s", value=math.inf),
            "step_model.tidy_s: expected `float` <= 1.7e+308, got inf",
        ),
        (put("engine", "scheduler", value={"a": [1]}), "engine.scheduler"),
        (put("kv_starts", value=[]), "kv_starts must hold a start"),
        (put("kv_starts", 0, "num_blocks", value=0), "num_blocks of at least 1"),
        (put("current_limits", "max_num_batched_tokens", value=4), "current_limits: max_num_b"),
        (
            put("kv_starts", 1, "limits", "max_num_seqs", value=0),
            "kv_starts[1].limits: max_num_seqs must be at least 1, got 0",
        ),
        (put("step_model", "token_knots", value=[0, 9, 9]), "step_model: token_knots"),
        (put("engine", "captured_sizes_tokens", value=[4, 2]), "engine: captured_sizes"),
        (put("made_at", value="yesterday"), "made_at must be as 2026-01-31T12:00:00Z"),
        (lambda d: d.pop("schema"), "is no profile: it has no schema"),
        (put("schema", value=SCHEMA + 1), f"schema must be {SCHEMA}, got {SCHEMA + 1}"),
        (put("schema", value=True), f"schema must be {SCHEMA}, got True"),
    ],
)
def test_damage_is_told_with_its_key(
    damage: Callable[[dict[str, Any]], object], shown: str, tmp_path: Path
) -> None:
    assert shown in refusal(damaged(tmp_path, damage))


def test_of_a_run_directory_the_profile_in_it_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    named = path.rename(tmp_path / "profile.yaml")
    with pytest.raises(UsageError, match="is a folder, and no profile") as caught:
        read_profile(tmp_path)
    assert caught.value.hint == f"the profile in it is {named}"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("  base_s: 0.0061\n", "  base_s: 0.0061\n  base_s: 0.01\n"))
    assert "key base_s stands twice" in refusal(path)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "got None"),
        (b"- 1\n", "got [1]"),
        (b"schema\n", "got 'schema'"),
        (b"\x7fELF\x02\x01\x00\x00\xff", "is not YAML"),
        (b"schema: !!python/name:os.system x\n", "is not YAML"),
        (b"[" * 5000, "is not YAML"),
        (b"{[1]: 2}\n", "is not YAML"),
    ],
)
def test_what_is_no_profile_at_all_is_told(content: bytes, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_bytes(content)
    assert shown in refusal(path)


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "is a folder, and no profile" in refusal(tmp_path)


@settings(max_examples=60, deadline=None)
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
