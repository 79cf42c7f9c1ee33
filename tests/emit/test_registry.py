"""Every target starts vLLM as it was tuned, by the target's own parser or schema."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.emit_parts import (
    CEILING,
    QWEN,
    RUN_ID,
    SHA256,
    WINNER,
    a_run_dir,
    an_outcome,
    vllm_serve_parser,
)
from support.emit_targets import SETS_ITS_OWN_PORT, STARTED, kubectl, loaded
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation
from tuner.emit.registry import TARGETS, emit, limits_in
from tuner.emit.sources import read_run
from tuner.emit.target import Names
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError

WHOLE_FILES = {Format.VLLM, Format.VLLM_EXACT}
WRITTEN = [chosen for chosen in Format if TARGETS[chosen].write is not None]
SHARED = [chosen for chosen in WRITTEN if chosen not in WHOLE_FILES]
OBJECTS = (Format.KUBERNETES, Format.AIBRIX)


@pytest.fixture
def rec(tmp_path: Path) -> Recommendation:
    """Return what a run recommends."""
    return read_run(a_run_dir(tmp_path))


def test_every_format_is_written_and_tested() -> None:
    assert set(TARGETS) == set(STARTED) == set(Format)
    assert set(Format) - set(WRITTEN) == {Format.VLLM_RUNTIME}


def test_an_object_that_is_only_changed_is_not_written(rec: Recommendation) -> None:
    with pytest.raises(UsageError, match="vllm-runtime changes an object that exists"):
        emit(Format.VLLM_RUNTIME, rec)


@pytest.mark.engine
@pytest.mark.parametrize("chosen", WRITTEN)
def test_vllm_is_started_as_it_was_tuned(
    chosen: Format, rec: Recommendation, tmp_path: Path
) -> None:
    words = STARTED[chosen](emit(chosen, rec), tmp_path)
    read = vllm_serve_parser().parse_args(["serve", *words])
    seqs, tokens = WINNER.max_num_seqs, WINNER.max_num_batched_tokens
    caps: tuple[int | None, int | None] = (None, None)
    if chosen is Format.VLLM_EXACT:
        caps = (seqs, tokens)
        seqs, tokens = CEILING.max_num_seqs, CEILING.max_num_batched_tokens
    assert (read.max_num_seqs, read.max_num_batched_tokens) == (seqs, tokens)
    assert (read.max_num_active_seqs, read.max_num_scheduled_tokens) == caps
    assert read.model_tag == QWEN["model"] or read.model == QWEN["model"]
    assert read.max_model_len == 8192
    assert read.gpu_memory_utilization == 0.85
    assert read.enable_prefix_caching is False


KNOBS = {
    "enable-prefix-caching": True,
    "long-prefill-token-threshold": 512,
    "watermark": 0.05,
    "cudagraph-capture-sizes": [1, 2, 4],
}


@pytest.mark.engine
@pytest.mark.parametrize("chosen", WRITTEN)
def test_the_knobs_that_pay_are_set_in_every_target(
    chosen: Format, rec: Recommendation, tmp_path: Path
) -> None:
    turned = replace(rec, knobs=KNOBS)
    words = STARTED[chosen](emit(chosen, turned), tmp_path)
    read = vllm_serve_parser().parse_args(["serve", *words])
    assert {key: getattr(read, key.replace("-", "_")) for key in KNOBS} == KNOBS
    assert not any(word.startswith("--no-enable-prefix-caching") for word in words)
    assert read.tensor_parallel_size == 2
    assert read.generation_config == "vllm"
    assert read.kv_transfer_config.kv_connector == "X"
    assert QWEN["model"] in (read.served_model_name or [read.model])
    assert chosen in SETS_ITS_OWN_PORT or read.port == 8010


@pytest.mark.parametrize("chosen", [each for each in SHARED if each is not Format.ARGS])
def test_the_limits_are_read_from_where_an_edit_sets_them(
    chosen: Format, rec: Recommendation, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(emit(chosen, rec))
    assert limits_in(path, chosen, Names()) == WINNER


def test_limits_in_an_array_of_a_script_are_read_and_comments_are_not(tmp_path: Path) -> None:
    script = (
        "set -e\n# --max-num-seqs 9\nARGS=(--max-num-seqs 256\n --max_num_batched_tokens=8K)"
    )
    path = tmp_path / "mine.yaml"
    line = 'exec vllm serve Qwen/Qwen2.5-7B-Instruct "${ARGS[@]}"'
    path.write_text(yaml.safe_dump({"services": {"llm": {"command": f"{script}\n{line}"}}}))
    assert limits_in(path, Format.DOCKER_COMPOSE, Names()) == EngineLimits(256, 8192)


@pytest.mark.parametrize(
    ("behind", "read"),
    [
        ("$MORE", None),
        ('"$@"', None),
        ("--port $PORT", EngineLimits(256, 8192)),
        ("$MORE --max-num-seqs 16 --max-num-batched-tokens=512", EngineLimits(16, 512)),
    ],
)
def test_limits_that_a_variable_may_override_are_unknown(
    behind: str, read: EngineLimits | None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    line = f"exec vllm serve m --max-num-seqs 256 --max-num-batched-tokens 8192 {behind}"
    service = {"entrypoint": ["sh", "-c"], "command": [line]}
    path.write_text(yaml.safe_dump({"services": {"llm": service}}))
    assert limits_in(path, Format.DOCKER_COMPOSE, Names()) == read


@pytest.mark.parametrize("chosen", WRITTEN)
def test_provenance_is_in_every_file(chosen: Format, rec: Recommendation) -> None:
    text = emit(chosen, rec)
    gain = rec.facts["gain"]
    assert ", interval -" in gain
    for fact in (SHA256[:8], "0.33.0", "NVIDIA H200", "2026", RUN_ID, gain.split(" ")[1]):
        assert fact in text
    found = re.findall(r"max-num-seqs-tuner/([\w-]+)", text)
    if chosen not in WHOLE_FILES | {Format.ARGS}:
        assert {"trace-sha256", "vllm-version", "device", "tuned-at", "gain", "run-id"} <= set(
            found
        )


@pytest.mark.parametrize("chosen", SHARED)
def test_a_file_that_is_shared_holds_no_secret(chosen: Format, rec: Recommendation) -> None:
    kept = replace(rec, values={**rec.values, "hf-token": "s3cret-value"}, lost=())
    text = emit(chosen, kept)
    assert "s3cret" not in text
    assert "left out hf-token, which is a secret: set HF_TOKEN" in text
    assert "s3cret-value" in emit(Format.VLLM, kept)


def check_objects(documents: list[dict[str, Any]]) -> None:
    """See that Kubernetes' own schemas take the objects, strictly."""
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        validate.validate(document, "1.33", strict=True)


@pytest.mark.parametrize("folder", [False, True], ids=["hub", "folder"])
@pytest.mark.parametrize("chosen", OBJECTS)
def test_kubernetes_takes_the_objects(
    chosen: Format, rec: Recommendation, *, folder: bool
) -> None:
    documents = loaded(emit(chosen, rec.with_model("/srv/models/qwen") if folder else rec))
    check_objects(documents)
    for key, text in documents[0]["metadata"]["annotations"].items():
        assert re.fullmatch(r"[a-z0-9.-]{1,253}/[\w.-]{1,63}", key)
        assert isinstance(text, str)
    spec = documents[0]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    (container,) = spec["template"]["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["image"] == "vllm/vllm-openai:v0.33.0"
    assert container["ports"][0]["containerPort"] == 8010


def test_a_container_of_the_other_targets_is_one_of_kubernetes(rec: Recommendation) -> None:
    model = loaded(emit(Format.KSERVE, rec))[0]["spec"]["predictor"]["model"]
    own = {"name": "x", "args": model["args"], "resources": model["resources"]}
    held = loaded(emit(Format.KSERVE_LLM, rec))[0]["spec"]["template"]["containers"]
    for containers in ([own], held):
        pod = {"containers": containers}
        check_objects([{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod}])


def test_docker_compose_takes_its_file(rec: Recommendation) -> None:
    project = pytest.importorskip("compose_spec").PyCompose
    # docker compose puts the home folder in place of ~ before it looks at a path.
    text = emit(Format.DOCKER_COMPOSE, rec).replace("- ~/", "- /home/me/")
    read = project.from_yaml(text)
    assert "vllm" in read.services
    with pytest.raises(ValueError, match="imagee"):
        project.from_yaml("services: {vllm: {imagee: x}}")


def test_aibrix_routes_by_one_name(rec: Recommendation) -> None:
    deployment, service = loaded(emit(Format.AIBRIX, rec))
    name = service["metadata"]["name"]
    assert name == "qwen"
    assert service["spec"]["selector"]["model.aibrix.ai/name"] == name
    assert deployment["spec"]["template"]["metadata"]["labels"]["model.aibrix.ai/name"] == name
    assert deployment["metadata"]["labels"]["model.aibrix.ai/port"] == "8010"
    bare = replace(rec, values={"model": "Qwen/Qwen2.5-7B-Instruct"})
    deployment, service = loaded(emit(Format.AIBRIX, bare))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--served-model-name={service['metadata']['name']}" in container["args"]


def test_the_chart_gets_whole_numbers_and_words(rec: Recommendation) -> None:
    long = replace(rec, values={**rec.values, "max-model-len": "1M", "block-size": 16})
    (model,) = loaded(emit(Format.PRODUCTION_STACK, long))[0]["servingEngineSpec"]["modelSpec"]
    config = model["vllmConfig"]
    assert config["maxNumSeqs"] == 48
    assert "maxNumBatchedTokens" not in config
    assert config["enablePrefixCaching"] is False
    assert config["enableChunkedPrefill"] is True
    # Helm would write 1048576 as 1.048576e+06.
    assert "maxModelLen" not in config
    assert {"--max-model-len=1M", "--max-num-batched-tokens=4096"} <= set(config["extraArgs"])
    assert all(isinstance(word, str) for word in config["extraArgs"])


def test_kubectl_reads_provenance_as_text_whatever_it_looks_like(tmp_path: Path) -> None:
    awkward = ["12345e67", "1e5", "-.5", "1_0e3", "0o17", "-0x1F", "0b11", "y", "No", "on"]
    awkward += [".inf", ".NaN", "null", "~", "017", "2026-11-24", "1:30"]
    facts = {f"fact-{place}": text for place, text in enumerate(awkward)}
    rec = Recommendation({"model": "m"}, WINNER, facts=facts)
    (tmp_path / "deployment.yaml").write_text(emit(Format.KUBERNETES, rec))
    done = kubectl(
        *("annotate", "--local", "-f", str(tmp_path / "deployment.yaml")),
        *("checked=yes", "-o", "json"),
    )
    read = json.loads(done.stdout)["metadata"]["annotations"]
    assert read == rec.annotations() | {"checked": "yes"}


def test_numbers_in_quotes_are_numbers_and_other_words_are_refused() -> None:
    quoted = {"model": "m", "port": "9000", "tensor-parallel-size": "2"}
    (document,) = loaded(emit(Format.KUBERNETES, Recommendation(quoted, WINNER)))
    (container,) = document["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 9000}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    values = loaded(emit(Format.LLM_D, Recommendation(quoted, WINNER)))[0]
    assert values["decode"]["parallelism"]["tensor"] == 2
    for key, value in (("port", "http"), ("tensor-parallel-size", 2.0)):
        rec = Recommendation({**quoted, key: value}, WINNER)
        with pytest.raises(UsageError, match=f"{key} must be a whole number, got {value!r}"):
            emit(Format.KUBERNETES, rec)


@pytest.mark.parametrize("chosen", [Format.KUBERNETES, Format.DOCKER_COMPOSE])
def test_a_dollar_reaches_vllm_as_it_stands(chosen: Format, tmp_path: Path) -> None:
    rec = Recommendation({"model": "m", "chat-template": "$(A) $$ ${B}"}, WINNER)
    assert "--chat-template=$(A) $$ ${B}" in STARTED[chosen](emit(chosen, rec), tmp_path)


@pytest.mark.parametrize("chosen", sorted({*SHARED} - {Format.ARGS}))
def test_a_container_is_said_to_need_the_files_that_settings_name(chosen: Format) -> None:
    """An argument list is for the machine at hand."""
    values = {"chat-template": "/srv/chat.jinja", "root-path": "/v1", "seed": 1}
    text = emit(chosen, Recommendation({"model": "m", **values}, WINNER))
    said = [line for line in text.splitlines() if "names the file" in line]
    wanted = "chat-template names the file /srv/chat.jinja: mount it there, or make it part"
    assert [line.lstrip("# ").startswith(wanted) for line in said] == [True]


def test_a_shell_takes_any_value(tmp_path: Path) -> None:
    awkward = 'it\'s a "test" $HOME `id` \\ # no comment'
    rec = Recommendation({"model": "m m", "chat-template": awkward}, WINNER, ("two\nlines",))
    words = STARTED[Format.ARGS](emit(Format.ARGS, rec), tmp_path)
    assert words[:2] == ["m m", f"--chat-template={awkward}"]


def test_what_a_line_cannot_carry_is_left_out_and_said() -> None:
    rec = Recommendation({"model": "m", "chat-template": "a b", "seed": 1}, WINNER)
    text = emit(Format.KSERVE_LLM, rec)
    assert "# left out chat-template: its value has blanks" in text
    (container,) = loaded(text)[0]["spec"]["template"]["containers"]
    line = "--seed=1 --max-num-seqs=48 --max-num-batched-tokens=4096"
    assert container["env"][0]["value"] == line


def test_a_run_on_a_cpu_asks_for_no_gpu(tmp_path: Path) -> None:
    cpu = an_outcome(device="CPU (2 cores, x86_64)", version="0.32.0+cpu")
    rec = read_run(a_run_dir(tmp_path, cpu))
    for chosen in SHARED:
        text = emit(chosen, rec)
        assert "nvidia" not in text.lower()
        assert "+cpu" not in "".join(re.findall(r"(?:image|tag): .*", text))
    assert "image: vllm/vllm-openai-cpu:v0.32.0\n" in emit(Format.KUBERNETES, rec)


@pytest.mark.parametrize(
    ("version", "shadow", "shown"),
    [("0.31.2", False, "0.32 or later, the run had 0.31.2"), ("0.33.0", True, "predicted")],
)
def test_the_exact_form_is_refused_where_it_would_not_repeat_the_point(
    version: str, shown: str, tmp_path: Path, *, shadow: bool
) -> None:
    outcome = an_outcome(version=version)
    assert outcome.recommendation is not None
    advice = replace(outcome.recommendation, is_predicted=shadow)
    outcome = replace(outcome, recommendation=advice)
    rec = read_run(a_run_dir(tmp_path, outcome))
    with pytest.raises(UsageError, match=shown):
        emit(Format.VLLM_EXACT, rec)
    unknown = Recommendation({"model": "m"}, EngineLimits(8, 512))
    with pytest.raises(UsageError, match="limits that the engine was started with"):
        emit(Format.VLLM_EXACT, unknown)


def test_a_name_is_given_where_the_user_gives_one(rec: Recommendation) -> None:
    names = Names(workload="chat", container="engine")
    assert loaded(emit(Format.KUBERNETES, rec, names))[0]["metadata"]["name"] == "chat"
    service = Names(workload="chat")
    assert "chat" in loaded(emit(Format.DOCKER_COMPOSE, rec, service))[0]["services"]
    pod = loaded(emit(Format.KUBERNETES, rec, names))[0]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "engine"
    dotted = Names(workload="chat.v2")
    assert loaded(emit(Format.KUBERNETES, rec, dotted))[0]["metadata"]["name"] == "chat.v2"


@pytest.mark.parametrize("option", ["--name", "--container"])
@pytest.mark.parametrize("chosen", [c for c in Format if TARGETS[c].write is not None])
def test_a_name_is_written_or_refused(chosen: Format, option: str, rec: Recommendation) -> None:
    names = Names(workload="other") if option == "--name" else Names(container="other")
    if option in TARGETS[chosen].names[0]:
        assert emit(chosen, rec, names) != emit(chosen, rec)
    else:
        with pytest.raises(UsageError, match=f"{option} .other. has no place in"):
            emit(chosen, rec, names)


@pytest.mark.parametrize("name", ["Bad Name!", "Chat", "-chat", "chat_7b", "a" * 64])
@pytest.mark.parametrize("chosen", sorted(set(SHARED) - {Format.ARGS, Format.DOCKER_COMPOSE}))
def test_a_name_that_kubernetes_refuses_is_refused(
    chosen: Format, name: str, rec: Recommendation
) -> None:
    for option, names in (("--name", Names("", name)), ("--container", Names("", "", name))):
        if option not in TARGETS[chosen].names[0]:
            continue
        with pytest.raises(UsageError, match=rf"{option} .* cannot be a name in Kubernetes"):
            emit(chosen, rec, names)


@pytest.mark.parametrize("chosen", WRITTEN)
def test_the_command_above_a_file_takes_a_name_with_blanks(
    chosen: Format, rec: Recommendation
) -> None:
    first = emit(chosen, rec, Names("my best.yaml")).split("\n")[0]
    assert "my best.yaml" in shlex.split(first)


@pytest.mark.parametrize("chosen", WRITTEN)
def test_no_target_passes_control_characters_of_a_name_to_a_terminal(
    chosen: Format, rec: Recommendation
) -> None:
    said = ("tuned on 9 requests of a\x1b[31m.jsonl",)
    assert "# tuned on 9 requests of a?[31m.jsonl" in emit(chosen, replace(rec, comments=said))


@pytest.mark.parametrize("chosen", WRITTEN)
def test_a_model_that_is_named_by_an_address_is_loaded_from_there(
    chosen: Format, rec: Recommendation
) -> None:
    text = emit(chosen, rec.with_model("s3://bucket/folder/qwen"))
    assert re.search(r"(?<!/)s3://bucket/folder/qwen(?!:)", text)
    assert "the model is a folder" not in text
    assert "/models/qwen" not in text
