"""The emitted file is what `vllm serve --config` takes, and reaches the disk whole."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from support.emit_parts import vllm_serve_parser
from tuner.emit.vllm import render
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import FLAGS_WITHOUT_NO, hyphenated, limits, read_config
from tuner.errors import UsageError
from tuner.files import write_atomic

KEYS = st.from_regex(r"[a-z]{2,8}(-[a-z]{1,6}){0,2}", fullmatch=True).filter(
    lambda key: not key.startswith("no-") and key not in FLAGS_WITHOUT_NO
)
PLAIN = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.just(True))
VALUES = st.one_of(PLAIN, st.lists(PLAIN), st.dictionaries(st.text(), PLAIN))


@given(st.dictionaries(KEYS, VALUES), st.integers(1, 4096), st.integers(0, 16384), st.text())
def test_whatever_the_user_had_comes_back_with_the_two_limits(
    values: dict[str, object], seqs: int, more: int, comment: str
) -> None:
    text = render(values, EngineLimits(seqs, seqs + more), [comment, comment])
    read = yaml.safe_load(text)
    assert read == values | {"max-num-seqs": seqs, "max-num-batched-tokens": seqs + more}
    assert [key for key in read if key in values] == list(values)


def test_the_limits_take_the_place_of_the_users_own() -> None:
    text = render(
        {"max_num_seqs": 256, "model": "m", "max-num-batched-tokens": 1},
        EngineLimits(16, 512),
        [],
    )
    assert text == "max-num-seqs: 16\nmodel: m\nmax-num-batched-tokens: 512\n"


def test_a_false_is_written_as_the_flag_that_says_so() -> None:
    values = {"enable-prefix-caching": False, "headless": False, "no-enforce-eager": False}
    assert yaml.safe_load(render(values, EngineLimits(1, 1), [])) == {
        "no-enable-prefix-caching": True,
        "max-num-seqs": 1,
        "max-num-batched-tokens": 1,
    }


def test_a_key_that_would_cap_the_tuned_limits_goes_and_a_comment_says_so() -> None:
    text = render({"max_num_active_seqs": 4, "model": "m"}, EngineLimits(16, 512), ["why"])
    assert text.startswith("# why\n# left out max-num-active-seqs: 4, ")
    assert "max-num-active-seqs" not in yaml.safe_load(text)


def test_one_value_used_twice_is_written_out_twice() -> None:
    shared = [1, 2]
    assert "&" not in render({"a": shared, "b": shared}, EngineLimits(1, 1), [])


def test_a_null_is_never_written() -> None:
    with pytest.raises(ValueError, match="seed must have a value"):
        render({"seed": None}, EngineLimits(1, 1), [])


def test_what_we_emit_we_read_back(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    write_atomic(
        path, render(demo_engine_args(), EngineLimits(16, 2048), ["why"]), secret=False
    )
    assert limits(read_config(path)) == (16, 2048)


def test_a_file_with_a_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    write_atomic(path, "model: m\n", secret=False)
    assert path.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))
    write_atomic(path, "hf-token: x\n", secret=True)
    assert path.stat().st_mode & 0o777 == 0o600
    write_atomic(path, "model: m\n", secret=False)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old\n")
    (tmp_path / "best.yaml").symlink_to("real.yaml")
    write_atomic(tmp_path / "best.yaml", "new\n", secret=False)
    assert (tmp_path / "best.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "new\n"


def test_standard_output_can_be_named_as_the_file() -> None:
    code = "from pathlib import Path; from tuner.files import write_atomic; "
    code += "write_atomic(Path('/dev/stdout'), 'model: m\\n', secret=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "model: m\n"


def test_a_disk_that_fills_up_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text("old\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UsageError, match=os.strerror(errno.EFBIG)):
            write_atomic(path, "x" * 100_000, secret=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.yaml"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none/best\.yaml cannot be written: No such file"):
        write_atomic(tmp_path / "none" / "best.yaml", "", secret=False)


@pytest.mark.engine
def test_vllm_serve_reads_the_emitted_file_as_it_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    values: dict[str, object] = demo_engine_args() | {
        "enable_prefix_caching": False,
        "max-model-len": 4096,
        "gpu-memory-utilization": 0.5,
        "served-model-name": ["a", "b"],
        "generation-config": "vllm",
        "kv-transfer-config": {"kv_connector": "X", "kv_role": "kv_both"},
        "headless": False,
        "max-num-active-seqs": 2,
        "max-num-scheduled-tokens": 100,
    }
    write_atomic(path, render(values, EngineLimits(16, 2048), ["why"]), secret=False)
    read: argparse.Namespace = vllm_serve_parser().parse_args(["serve", "--config", str(path)])
    wanted = {hyphenated(key).replace("-", "_"): value for key, value in values.items()}
    wanted |= {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
    del wanted["kv_transfer_config"]
    wanted |= {"max_num_active_seqs": None, "max_num_scheduled_tokens": None}
    assert {key: getattr(read, key, None) for key in wanted} == wanted
    assert read.kv_transfer_config.kv_connector == "X"
