"""The user's configuration is read as vLLM reads it, or refused with file and key."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.emit_parts import vllm_serve_parser
from tuner.engine.compat import serve as compat
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import (
    FLAGS_WITHOUT_NO,
    INTEGER_KEYS,
    ON_OR_CHOSEN,
    as_deployed,
    limits,
    parse_engine_args,
    read_config,
    shown_argument,
    to_argv,
)
from tuner.errors import UsageError
from tuner.redact import has_secrets, redacted

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}
GIVEN = {
    **DRAFTS,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.2,
    "synthetic_acceptance_rates": [0.8, 0.4],
}
SCALARS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="ascii", min_codepoint=32), min_size=1),
)


def written(tmp_path: Path, text: str, name: str = "current.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_come_out_hyphenated_and_in_the_users_order(tmp_path: Path) -> None:
    path = written(tmp_path, "port: 8000\nmodel: m\nmax_num_seqs: 64\nkv-x.inner_key: 1\n")
    assert list(read_config(path)) == ["port", "model", "max-num-seqs", "kv-x.inner_key"]


def test_a_false_in_a_file_is_the_default_as_for_vllm_serve_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, "model: m\nenable_prefix_caching: off\nenforce-eager: false\n")
    assert [read_config(path) for _ in range(2)] == [{"model": "m"}] * 2
    (said,) = caplog.messages
    assert said.startswith(
        f"{path}: `enable-prefix-caching: false` says nothing to `vllm serve"
    )
    assert said.endswith("write `no-enable-prefix-caching: true`")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "got nothing"),
        ("- a\n", "got a list"),
        ("a: [\n", "line 2"),
        ("port: 1\nport: 2\n", "port stands twice in line 2"),
        ("max_num_seqs: 1\nmax-num-seqs: 2\n", "max-num-seqs stands there twice"),
        (
            "enforce-eager: true\nno-enforce-eager: true\n",
            "no-enforce-eager stands there twice",
        ),
        ("max-num-seqs: 32.0\n", "max-num-seqs must be a whole number, got 32.0"),
        ("model:\n", "model must have a value, got null"),
        ("middleware: [a, null]\n", "middleware must have a value, got null"),
        ("1: 2\n", "a key must be text, got 1"),
        ("x: {since: 2026-01-01}\n", "x cannot be written as JSON"),
        ("x: &x [*x]\n", "stands within what it refers to in line 1"),
        ("x: 2026-13-45\n", "is not YAML"),
        ("x: " + "[" * 5000, "is not YAML"),
        ("apiVersion: apps/v1\nkind: Deployment\n", "is a Kubernetes manifest"),
        ("services: {vllm: {image: vllm/vllm-openai}}\n", "is a Docker Compose file"),
        (
            "servingEngineSpec: {modelSpec: []}\n",
            "is a values file of the vLLM Production Stack",
        ),
        ("schema: 4\nkv_starts: []\nagreement:\n", "is a profile of this tool"),
        ("objective: balanced\nslo: []\n", "is a preset for --tuning"),
        ("max_num_batchd_tokens: 8\n", "max-num-batchd-tokens is no whole key of"),
        ("no-prefix-caching: true\nmax-num-seq: 8\n", "max-num-seq is no whole key of"),
    ],
)
def test_a_file_that_vllm_would_misread_is_refused_by_name_and_key(
    tmp_path: Path, text: str, shown: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert str(path) in caught.value.message
    assert shown in caught.value.message
    assert caught.value.hint


def test_limits_that_no_engine_counts_to_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 2,147,483,647, got 99999999999999999999"):
        EngineLimits(8, 99999999999999999999)


def test_a_key_that_overrides_a_merged_one_is_no_double(tmp_path: Path) -> None:
    path = written(tmp_path, "x: &x {a: 1}\ny:\n  <<: *x\n  a: 2\n")
    assert read_config(path)["y"] == {"a": 2}


def test_a_file_under_another_extension_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.yaml or \.yml, got \.json"):
        read_config(written(tmp_path, "{}", "current.json"))
    with pytest.raises(UsageError, match="does not exist"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_config(tmp_path / "folder.yaml")


def test_an_error_in_the_file_does_not_show_the_secret_beside_it(tmp_path: Path) -> None:
    path = written(tmp_path, "hf-token: hf_s3cret: x\n")
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert "hf_s3cret" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("a=1", 1),
        ("a=-0.5", -0.5),
        ("a=true", True),
        ("a=False", False),
        ("a=on", "on"),
        ("a=0123", "0123"),
        ("a=8k", "8k"),
        ("a=12:30", "12:30"),
        ("a=b=c: d # e", "b=c: d # e"),
        ('a={"b": [1, null]}', {"b": [1, None]}),
        ("a=[x, y]", ["x", "y"]),
        ("a='true'", "true"),
    ],
)
def test_an_engine_argument_is_read_as_json_or_else_as_plain_text(
    argument: str, value: object
) -> None:
    read = parse_engine_args([argument])["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "arguments",
    [["a"], ["=1"], ["a="], ["a=null"], ["a={"], ["a b=1"], ["a-b=1", "a_b=2"], ["seed=1.5"]],
)
def test_an_engine_argument_of_another_form_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="--engine-arg"):
        parse_engine_args(arguments)


def test_limits_are_whole_numbers_of_at_least_one_or_absent() -> None:
    assert limits({}) == (None, None)
    assert limits({"max_num_seqs": 8, "max-num-batched-tokens": "2.5k"}) == (8, 2500)
    for wrong in (0, -1, True, 8.0, "8.0", "many", [8]):
        with pytest.raises(UsageError, match="max-num-seqs must be a whole number"):
            limits({"max-num-seqs": wrong})


@pytest.mark.parametrize(
    ("given", "deployed"),
    [
        (
            {"speculative-config": json.dumps(GIVEN)},
            {"speculative-config": json.dumps(DRAFTS)},
        ),
        (
            {"speculative_config": GIVEN, "model": "m"},
            {"speculative_config": DRAFTS, "model": "m"},
        ),
        (
            {f"speculative-config.{key}": value for key, value in GIVEN.items()},
            {f"speculative-config.{key}": value for key, value in DRAFTS.items()},
        ),
        ({"speculative-config": DRAFTS}, {"speculative-config": DRAFTS}),
        ({"speculative-config": "{broken"}, {"speculative-config": "{broken"}),
    ],
)
def test_drafts_accepted_at_a_given_rate_are_not_deployed(
    given: dict[str, object], deployed: dict[str, object]
) -> None:
    assert as_deployed(given) == deployed


def test_no_secret_survives_redaction_wherever_it_stands() -> None:
    values: dict[str, object] = {
        "api-key": ["s3cret"],
        "model-loader-extra-config": {"deep": [{"hf_token": "s3cret"}]},
        "additional-config": json.dumps({"password": "s3cret", "kept": 1}),
        "otlp-traces-endpoint": "http://me:s3cret@host:4317",
        "model": "m",
        "max-num-seqs": 4,
    }
    shown = redacted(values)
    assert "s3cret" not in repr(shown)
    assert (shown["model"], shown["max-num-seqs"]) == ("m", 4)
    assert "kept" in str(shown["additional-config"])
    assert [key for key in values if not has_secrets({key: values[key]})] == [
        "model",
        "max-num-seqs",
    ]
    assert "s3cret" not in shown_argument("api_key=s3cret")


@pytest.mark.engine
def test_vllm_itself_agrees_on_the_words_of_a_configuration(tmp_path: Path) -> None:
    parser, serve = compat._parser(), vllm_serve_parser()
    names = sorted(
        o[2:] for action in parser._actions for o in action.option_strings if o[:2] == "--"
    )
    switches = [name for name in names if f"no-{name}" in names]
    others = [name for name in names if name not in switches and not name.startswith("no-")]
    valued = st.one_of(
        SCALARS,
        st.lists(SCALARS, max_size=3),
        st.dictionaries(st.text("ab_", min_size=1), SCALARS),
    )

    @settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(
        st.dictionaries(st.sampled_from(switches), st.booleans()),
        st.dictionaries(st.sampled_from([n for n in others if n not in INTEGER_KEYS]), valued),
        st.dictionaries(st.sampled_from(sorted(FLAGS_WITHOUT_NO & {*names})), st.booleans()),
    )
    def agree(
        switched: dict[str, bool], given_: dict[str, object], flags: dict[str, bool]
    ) -> None:
        path = written(tmp_path, yaml.safe_dump(switched | given_ | flags, sort_keys=False))
        assert to_argv(read_config(path)) == serve.load_config_file(str(path))

    agree()


@pytest.mark.engine
def test_the_flags_and_integers_we_list_are_those_of_the_installed_vllm() -> None:
    actions = compat._parser()._actions
    names = {
        o[2:]: action for action in actions for o in action.option_strings if o[:2] == "--"
    }
    only_on = {
        n for n, a in names.items() if a.nargs == 0 and n != "help" and f"no-{n}" not in names
    }
    assert {n for n in only_on if not n.startswith("no-")} <= FLAGS_WITHOUT_NO
    switches = {n: names[n].default for n in names if f"no-{n}" in names}
    assert {n for n, default in switches.items() if default is not False} <= ON_OR_CHOSEN
    for key in sorted(INTEGER_KEYS & {*names}):
        assert names[key].type("8192") == 8192
        with pytest.raises((ValueError, argparse.ArgumentTypeError)):
            names[key].type("8192.0")
    assert {"max-num-seqs", "max-num-batched-tokens"} <= {*names}


@pytest.mark.engine
def test_no_key_of_the_installed_vllm_passes_for_a_slip_of_another() -> None:
    actions = compat._parser()._actions
    known = {o[2:] for a in actions for o in a.option_strings if o[:2] == "--"}
    assert len(known) > 100
    for key in (known - {"help"}) | {"max-num-seqs-x"}:
        assert parse_engine_args([f"{key}=1"]) == {key: 1}
