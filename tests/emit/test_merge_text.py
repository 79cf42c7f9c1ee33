"""The text of the user's own file stays: blanks, tags, ends of lines, and JSON as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.emit_files import DEPLOYMENT, SHELL
from support.emit_parts import PLAIN, a_run_dir, changed
from tuner.emit.names import Format
from tuner.emit.registry import merge_into
from tuner.emit.sources import read_run
from tuner.emit.target import Names

FLAGS = "--max-num-seqs=48", "--max-num-batched-tokens=4096"


KEYS = st.from_regex(r"[a-z]{2,8}(-[a-z]{1,6}){0,2}", fullmatch=True)
SCALARS = st.one_of(
    st.integers(),
    st.booleans(),
    st.from_regex(r"[A-Za-z][a-z ./:=-]{0,20}[a-z]", fullmatch=True),
)
BODIES = st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, min_size=1)), max_size=8)


@given(BODIES, st.integers(2, 6), st.booleans(), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_else_a_file_says_it_says_afterwards(
    tmp_path: Path,
    body: dict[str, object],
    indent: int,
    flow: bool,
    dos: bool,
) -> None:
    values = {**body, "model": "m", "max-num-seqs": 7}
    text = yaml.safe_dump(values, sort_keys=False, indent=indent, default_flow_style=flow)
    text = "# mine\n" + text + "# the end\n"
    path = tmp_path / "mine.yaml"
    path.write_bytes((text.replace("\n", "\r\n") if dos else text).encode())
    after = merge_into(path, Format.VLLM, PLAIN, Names()).after
    limits = {"max-num-seqs": 48, "max-num-batched-tokens": 4096}
    assert yaml.safe_load(after) == values | limits
    assert after.startswith("# mine")
    assert "# the end" in after
    assert after.count("\r\n") == (after.count("\n") if dos else 0)


@pytest.mark.parametrize("value", ["!reset null", "!!str 8000", "!vault x", "1"])
def test_lines_beside_those_that_change_keep_their_blanks_and_tags(
    value: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    rest = f"        env: {{ A:  1,   B: 2 }}\n        ports: {value}\n"
    text = f"services:\n    vllm:\n        image:   x\n        command: [ m, -v ]\n{rest}"
    path.write_text(text)
    merged = merge_into(path, Format.DOCKER_COMPOSE, PLAIN, Names())
    assert changed(merged.before, merged.after) == [
        "-        command: [ m, -v ]",
        f"+        command: [m, -v, {', '.join(FLAGS)}]",
    ]


def test_lists_that_are_indented_in_two_ways_stay_as_they_are(tmp_path: Path) -> None:
    containers = "decode:\n  containers:\n  - name: vllm\n    modelCommand: vllmServe\n"
    env = "    env:\n      - name: A\n        value: b\n"
    path = tmp_path / "mine.yaml"
    path.write_text(containers + env)
    merged = merge_into(path, Format.LLM_D, PLAIN, Names())
    assert changed(merged.before, merged.after) == [
        "+    args:",
        *(f"+      - {flag}" for flag in FLAGS),
    ]


MIXED = """# mine\r
model: m
max-num-seqs: 4\r
# of the budget
max-num-batched-tokens: 512 # keep
prompt: |\r
  one
  two\r
seed: 1"""


def test_every_line_keeps_its_own_end(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(MIXED.encode())
    merged = merge_into(path, Format.VLLM, PLAIN, Names())
    wanted = MIXED.replace("seqs: 4", "seqs: 48").replace("tokens: 512", "tokens: 4096")
    assert merged.after == wanted
    assert "\r" not in merged.diff
    changed_lines = [line for line in merged.diff.splitlines() if line[:1] in "-+"]
    assert len(changed_lines) == 2 + 2 * 2
    path.write_bytes(merged.after.encode())
    assert merge_into(path, Format.VLLM, PLAIN, Names()).after == merged.after


def test_a_new_line_ends_as_those_above_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    cases = {
        "model: m\r\nseed: 1\n": "\n",
        "model: m\nseed: 1\r\n": "\r\n",
        "model: m\nseed: 1\r\nq: 1": "\r\n",
        "model: m": "\n",
    }
    for text, end in cases.items():
        path.write_bytes(text.encode())
        after = merge_into(path, Format.VLLM, PLAIN, Names()).after
        ended = text if text.endswith("\n") else text + end
        assert after == f"{ended}max-num-seqs: 48{end}max-num-batched-tokens: 4096{end}"


def test_lines_that_end_in_a_carriage_return_alone_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    old = "# mine\rmodel: m\rseed: 1\r"
    path.write_bytes(old.encode())
    after = merge_into(path, Format.VLLM, PLAIN, Names()).after
    assert after.startswith(old)
    assert yaml.safe_load(after)["max-num-seqs"] == 48


def as_kubectl_writes_it(text: str) -> str:
    """Return an object of Kubernetes as `kubectl get -o json` does."""
    found = list(yaml.safe_load_all(text))[-1]
    found["metadata"]["annotations"] = {"note": "a && b # c", "revision": "1"}
    return json.dumps(found, indent=4).replace("&", "\\u0026") + "\n"


@pytest.mark.parametrize("text", [DEPLOYMENT, SHELL])
def test_json_stays_json_with_the_lines_that_it_had(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(as_kubectl_writes_it(text))
    rec = read_run(a_run_dir(tmp_path))
    merged = merge_into(path, Format.KUBERNETES, rec, Names())
    annotations = json.loads(merged.after)["metadata"]["annotations"]
    assert annotations == {"note": "a && b # c", "revision": "1"} | rec.annotations()
    assert "48" in merged.after
    lines = changed(merged.before, merged.after)
    assert not [line for line in lines if "note" in line]
    assert len([line for line in lines if line[0] == "-"]) <= 4
    path.write_text(merged.after)
    assert merge_into(path, Format.KUBERNETES, rec, Names()).diff == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            '{\n\t"model": "é",\n\t"max_num_seqs": 7\n}',
            '{\n\t"model": "é",\n\t"max_num_seqs": 48,\n\t"max-num-batched-tokens": 4096\n}',
        ),
        (
            '{"model":"m # 1","max-num-seqs":7}\r\n',
            '{"model":"m # 1","max-num-seqs":48,"max-num-batched-tokens":4096}\r\n',
        ),
        (
            '{"max-num-batched-tokens": 7, "model": "m"}\n',
            '{"max-num-batched-tokens": 4096, "model": "m", "max-num-seqs": 48}\n',
        ),
        (
            '{ "model": "m"\n, "max-num-seqs": 7\n}\n',
            '{"model": "m", "max-num-seqs": 48, "max-num-batched-tokens": 4096}\n',
        ),
    ],
)
def test_json_keeps_its_indentation_and_its_end(
    before: str, after: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(before.encode())
    assert merge_into(path, Format.VLLM, PLAIN, Names()).after == after
