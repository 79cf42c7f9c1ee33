"""The user's own file gets both limits, and nothing else in it moves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.emit_files import (
    AFTER,
    COMPOSE,
    DEPLOYMENT,
    FILES,
    KSERVE,
    KSERVE_LLM,
    LLM_D,
    SHELL,
    STACK,
    VLLM,
)
from support.emit_parts import PLAIN, a_run_dir, changed
from support.prometheus_parts import wait_for
from tuner.cli import run
from tuner.emit.names import Format
from tuner.emit.registry import TARGETS, emit, merge_into
from tuner.emit.sources import read_emitted, read_run
from tuner.emit.target import Names
from tuner.errors import UsageError

Output = pytest.CaptureFixture[str]
FLAGS = "--max-num-seqs=48", "--max-num-batched-tokens=4096"
NEW = f"{FLAGS[1]} {FLAGS[0]}"
"""Both flags as they are put behind the model."""


def test_every_yaml_format_is_merged_in_these_tests() -> None:
    able = {name for name, target in TARGETS.items() if target.edit is not None}
    assert able - set(FILES) == {Format.VLLM_EXACT, Format.AIBRIX}


@pytest.mark.parametrize("names", [Names(workload="other"), Names(container="other")])
@pytest.mark.parametrize("chosen", FILES)
def test_a_name_that_the_file_does_not_have_is_refused(
    chosen: Format, names: Names, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILES[chosen])
    with pytest.raises(UsageError):
        merge_into(path, chosen, PLAIN, names)


@pytest.mark.parametrize("chosen", FILES)
def test_only_our_own_lines_change(chosen: Format, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILES[chosen])
    merged = merge_into(path, chosen, PLAIN, Names())
    assert changed(merged.before, merged.after) == AFTER[chosen]
    assert path.read_text() == FILES[chosen]


@pytest.mark.parametrize("chosen", FILES)
def test_a_second_merge_changes_nothing(chosen: Format, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILES[chosen])
    rec = read_run(a_run_dir(tmp_path))
    path.write_text(merge_into(path, chosen, rec, Names()).after)
    again = merge_into(path, chosen, rec, Names())
    assert again.diff == ""
    assert again.before == again.after


@pytest.mark.parametrize("chosen", FILES)
def test_knobs_are_merged_once_and_replaced_by_those_of_the_next_run(
    chosen: Format, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILES[chosen])
    for caching, sizes in ((False, [1, 2, 4]), (True, [1, 3])):
        knobs = {"enable-prefix-caching": caching, "cudagraph-capture-sizes": sizes}
        rec = replace(PLAIN, knobs=knobs)
        path.write_text(merge_into(path, chosen, rec, Names()).after)
        assert merge_into(path, chosen, rec, Names()).diff == ""
    text = path.read_text()
    assert len(re.findall(r"no[-_]enable[-_]prefix[-_]caching", text)) == 0
    assert len(re.findall(r"enable-?[Pp]refix-?[Cc]aching", text)) == 1
    assert text.count("cudagraph-capture-sizes") == 1
    assert "4" not in re.sub(r"4096|48", "", text.partition("cudagraph-capture-sizes")[2])[:30]


def test_provenance_goes_where_the_target_has_a_place_for_it(tmp_path: Path) -> None:
    rec = read_run(a_run_dir(tmp_path))
    places = {
        Format.DOCKER_COMPOSE: ("services", "llm", "labels"),
        Format.KUBERNETES: ("metadata", "annotations"),
        Format.PRODUCTION_STACK: ("servingEngineSpec", "modelSpec", 0, "annotations"),
        Format.LLM_D: ("decode", "annotations"),
    }
    for chosen, place in places.items():
        path = tmp_path / f"{chosen}.yaml"
        path.write_text(FILES[chosen])
        found = list(yaml.safe_load_all(merge_into(path, chosen, rec, Names()).after))[-1]
        for key in place:
            found = found[key]
        assert found["max-num-seqs-tuner/run-id"] == rec.facts["run-id"]
    path = tmp_path / "vllm.yaml"
    path.write_text(VLLM)
    after = merge_into(path, Format.VLLM, rec, Names()).after
    assert "max_num_seqs: 48 # tuned 2" in " ".join(after.split())


@pytest.mark.parametrize("chosen", [Format.VLLM, Format.DOCKER_COMPOSE, Format.KUBERNETES])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_evidence_of_an_earlier_tuning_makes_room_for_that_of_this_one(
    chosen: Format, end: str, tmp_path: Path
) -> None:
    rec = read_run(a_run_dir(tmp_path))
    earlier = [
        "tuned 2025-01-02 on 9 requests of stale.jsonl (sha256 0123abcd…), busiest 9 s",
        "  e2e_p95  9.38 s -> 4.31 s   (-77.7%, interval -78.1% … -54.3%)",
        "caveat: told of the stale one",
        "evidence: runs/stale",
    ]
    facts = {"run-id": "stale", "gain": "e2e_p95 -77.7%", "knobs": "told of the stale one"}
    before = emit(chosen, replace(rec, comments=tuple(earlier), facts=facts))
    path = tmp_path / "mine.yaml"
    mine = (
        f"# mine, above\n{before.replace('runs/stale', f'runs/stale{chr(10)}# mine, below', 1)}"
    )
    path.write_text(mine.replace("\n", end), newline="")
    merged = merge_into(path, chosen, rec, Names())
    after = merged.after
    assert not [word for word in ("stale", "77.7", "2025") if word in after]
    above = "".join(f"# {line}{end}" for line in rec.comments)
    assert f"{above}# mine, below{end}" in after
    assert after.startswith(f"# mine, above{end}# ")
    assert end == "\n" or after.count("\n") == after.count(end)
    path.write_text(after, newline="")
    assert merge_into(path, chosen, rec, Names()).diff == ""
    if chosen is Format.VLLM:
        assert read_emitted(path).facts["trace"] == rec.facts["trace"]


def test_the_next_tuning_replaces_the_remark_of_the_last_one_and_no_other(
    tmp_path: Path,
) -> None:
    rec = read_run(a_run_dir(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text("model: m\nmax-num-seqs: 3\n")
    path.write_text(merge_into(path, Format.VLLM, rec, Names()).after)
    later = replace(rec, facts={**rec.facts, "tuned-at": "2031-05-06T07:08:09Z"})
    after = merge_into(path, Format.VLLM, later, Names()).after
    assert after.count("# tuned ") == 1
    assert "# tuned 2031-05-06" in after
    path.write_text("model: m\nmax-num-seqs: 3 # tuned for summer by Ann\n")
    assert "# tuned for summer by Ann" in merge_into(path, Format.VLLM, rec, Names()).after


@pytest.mark.parametrize("false", ["false", "off"])
def test_a_false_that_vllm_does_not_read_stays_and_is_told(false: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"model: m\nenable_prefix_caching: {false}\nenforce-eager: {false}\n")
    merged = merge_into(path, Format.VLLM, PLAIN, Names())
    assert not [line for line in changed(merged.before, merged.after) if line[0] == "-"]
    (note,) = merged.notes
    assert note.startswith("`enable-prefix-caching: false` says nothing")
    knob = replace(PLAIN, knobs={"enable-prefix-caching": False})
    assert not merge_into(path, Format.VLLM, knob, Names()).notes


def test_a_line_for_a_shell_is_changed_within(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SHELL)
    merged = merge_into(path, Format.KUBERNETES, PLAIN, Names())
    assert changed(merged.before, merged.after) == [
        "-            Qwen/Qwen2.5-7B-Instruct \\",
        "-            --max-num-seqs 256 --max-num-active-seqs 4",
        "+            Qwen/Qwen2.5-7B-Instruct --max-num-batched-tokens=4096 \\",
        "+            --max-num-seqs 48",
    ]


def test_a_limit_is_the_last_one_behind_a_variable_that_may_hold_another(
    tmp_path: Path, capsys: Output
) -> None:
    """Of flags that stand twice vLLM takes the last."""
    path = tmp_path / "mine.yaml"
    path.write_text(SHELL.replace("--max-num-active-seqs 4", "$EXTRA_ARGS"))
    command = ["emit", str(a_run_dir(tmp_path)), "--format", "kubernetes", "--merge", str(path)]
    assert run(command) == 0
    assert path.read_text().endswith(f"--max-num-seqs 48 $EXTRA_ARGS {' '.join(FLAGS)}\n")
    capsys.readouterr()
    assert run(command) == 0
    assert f"{path} has these values already" in capsys.readouterr().err


MODULE = "python3 -m vllm.entrypoints.openai.api_server"
SERVICES = [
    ("/bin/bash -c", ["exec vllm serve m"], "/bin/bash -c", [f"exec vllm serve m {NEW}"]),
    ("", "vllm serve m", "", f"vllm serve m {NEW}"),
    ("/entrypoint.sh", "--model m", "/entrypoint.sh", f"--model m {FLAGS[0]} {FLAGS[1]}"),
    (
        MODULE,
        "--model m --max-num-seqs 256",
        f"{MODULE} {FLAGS[1]}",
        "--model m --max-num-seqs 48",
    ),
    (
        MODULE,
        "--model m --max-num-seqs 256 ${EXTRA}",
        f"{MODULE} {FLAGS[1]}",
        f"--model m --max-num-seqs 48 ${{EXTRA}} {FLAGS[0]}",
    ),
    (
        "/entrypoint.sh",
        "--model m --max-num-seqs 256 ${EXTRA}",
        "/entrypoint.sh",
        f"--model m --max-num-seqs 48 ${{EXTRA}} {FLAGS[0]} {FLAGS[1]}",
    ),
    (
        MODULE,
        ["--max-num-seqs=256", "--max-num-active-seqs=4"],
        f"{MODULE} {FLAGS[1]}",
        ["--max-num-seqs=48"],
    ),
    (
        ["sh", "-c", "exec vllm serve m"],
        ["--max-num-seqs", "256"],
        ["sh", "-c", f"exec vllm serve m {NEW}"],
        ["--max-num-seqs", "256"],
    ),
    (
        ["bash", "-eo", "pipefail", "-c", 'exec vllm serve m "$@"', "--"],
        ["--max-num-seqs", "256"],
        ["bash", "-eo", "pipefail", "-c", f'exec vllm serve m "$@" {FLAGS[1]}', "--"],
        ["--max-num-seqs", "48"],
    ),
]


@pytest.mark.parametrize(("entrypoint", "command", "entered", "commanded"), SERVICES)
def test_compose_keeps_an_entrypoint_that_does_not_start_vllm(
    entrypoint: object, command: object, entered: object, commanded: object, tmp_path: Path
) -> None:
    path = tmp_path / "compose.yaml"
    services = {"vllm": {"entrypoint": entrypoint, "command": command}}
    path.write_text(yaml.safe_dump({"services": services}))
    after = yaml.safe_load(merge_into(path, Format.DOCKER_COMPOSE, PLAIN, Names()).after)
    assert after["services"]["vllm"] == {"entrypoint": entered, "command": commanded}


EXPORTER = "{name: exporter, image: acme/exporter, args: [--job, vllm]}"
ENGINE = "{name: engine, image: acme/inference, args: [--max-num-seqs, '256']}"
GATEWAY = "{name: vllm-gateway, env: [{name: TO, value: 'http://vllm:8000'}], args: [-v]}"


def pods(*containers: str) -> str:
    """Return a Deployment for each list of containers."""
    return "---\n".join(
        f"kind: Deployment\nmetadata: {{name: d{place}}}\n"
        f"spec:\n  template:\n    spec:\n      containers: [{listed}]\n"
        for place, listed in enumerate(containers)
    )


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (Format.KUBERNETES, pods(f"{EXPORTER}, {ENGINE}")),
        (Format.KUBERNETES, pods(GATEWAY, ENGINE)),
        (
            Format.DOCKER_COMPOSE,
            f"services:\n  vllm-exporter: {EXPORTER}\n"
            "  llm: {entrypoint: [python3, -m, vllm.entrypoints.openai.api_server], "
            "command: [--max-num-seqs, '256']}\n",
        ),
    ],
)
def test_what_only_mentions_vllm_is_not_what_runs_it(
    chosen: Format, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    after = merge_into(path, chosen, PLAIN, Names()).after
    limits = "--max-num-seqs, '48', '--max-num-batched-tokens', '4096'"
    assert after == text.replace("--max-num-seqs, '256'", limits)


def test_all_four_limits_are_set_for_the_exact_form(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(VLLM)
    rec = read_run(a_run_dir(tmp_path))
    after = yaml.safe_load(merge_into(path, Format.VLLM_EXACT, rec, Names()).after)
    assert after["max_num_seqs"] == 128
    assert after["max-num-batched-tokens"] == 16384
    assert (after["max-num-active-seqs"], after["max-num-scheduled-tokens"]) == (48, 4096)


REFUSED = [
    (
        Format.VLLM,
        "{a: 1, # why\n model: m}\n",
        "cannot be changed without losing a comm",
    ),
    (Format.VLLM, "a: [\n", "is not YAML: "),
    (Format.VLLM, "a: 1\na: 2\n", "is not YAML: a key stands there twice"),
    (Format.VLLM, '{"model": "m", "model": "n"}', "is not YAML: a key stands there twice"),
    (Format.VLLM, "{{- if .Values.x }}\nmodel: m\n", "is not YAML: "),
    (Format.VLLM, "", "expected a configuration of vLLM with model"),
    (Format.VLLM, "- a\n", "expected a configuration of vLLM with model"),
    (Format.VLLM, COMPOSE, "got keys x-logging, services"),
    (Format.DOCKER_COMPOSE, VLLM, "expected services.NAME.command, got no services"),
    (
        Format.DOCKER_COMPOSE,
        "services:\n  vllm: {image: vllm}\n",
        "a service without a command",
    ),
    (
        Format.DOCKER_COMPOSE,
        "services:\n  vllm: {entrypoint: /run.sh}\n",
        "got a text that does not start vLLM",
    ),
    (
        Format.DOCKER_COMPOSE,
        "services:\n  vllm: {entrypoint: [tini, --, bash, -lc], command: [run.sh]}\n",
        "a script without one",
    ),
    (
        Format.DOCKER_COMPOSE,
        "services:\n  vllm: {entrypoint: [/bin/bash], command: [-c, run.sh]}\n",
        "a script without one",
    ),
    (
        Format.DOCKER_COMPOSE,
        "services: {vllm: {command: [run.py, '--vllm=--seed 1 --max-num-seqs 9']}}\n",
        "expected --max-num-seqs and its value as words of their own",
    ),
    (
        Format.KUBERNETES,
        KSERVE,
        "expected kind: Deployment or StatefulSet or ReplicaSet, got Inf",
    ),
    (Format.KUBERNETES, "kind: Deployment\nspec: {}\n", "spec.containers[], got no template"),
    (
        Format.KUBERNETES,
        DEPLOYMENT.replace("max_num_seqs", "seed").replace("vllm", "x"),
        "one that runs vLLM, got proxy, engine",
    ),
    (
        Format.KUBERNETES,
        SHELL.replace("vllm serve", "run.sh --max-num-seqs 1").replace('"-c"', '"-eEuc"'),
        "a script without one",
    ),
    (
        Format.KUBERNETES,
        "kind: Deployment\nspec: {template: {spec: {containers: [{name: web, args: [-g]}]}}}\n",
        "one that runs vLLM, got web",
    ),
    (
        Format.PRODUCTION_STACK,
        LLM_D,
        "servingEngineSpec.modelSpec[].vllmConfig, got no serving",
    ),
    (Format.PRODUCTION_STACK, STACK.partition("    vllmConfig")[0], "got no vllmConfig"),
    (
        Format.PRODUCTION_STACK,
        STACK.replace('["--seed", "1"]', "--seed 1"),
        "expected a list of words in vllmConfig.extraArgs",
    ),
    (Format.VLLM_RUNTIME, DEPLOYMENT, "expected kind: VLLMRuntime, got Service chat"),
    (Format.KSERVE, "kind: InferenceService\nspec: {}\n", "model.args, got no predictor"),
    (Format.KSERVE_LLM, KSERVE_LLM.replace("main", "x"), "one named main, got x"),
    (Format.LLM_D, STACK, "decode.containers[], got no decode"),
    (Format.ARGS, VLLM, "--merge changes a YAML file"),
]


def test_what_refers_to_the_lines_that_are_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    chat = "  chat: {image: vllm/vllm-openai, command: *words}\n"
    code = "  code: {image: vllm/vllm-openai, command: *words}\n"
    for services, said in ((chat, ()), (chat + code, ("services.code.command",))):
        path.write_text(f"x-words: &words [m, --max-num-seqs, '4']\nservices:\n{services}")
        notes = merge_into(path, Format.DOCKER_COMPOSE, PLAIN, Names(workload="chat")).notes
        assert notes == tuple(
            f"what refers to the same lines changes as well: {part}" for part in said
        )


@pytest.mark.parametrize(("chosen", "text", "shown"), REFUSED)
def test_a_file_without_a_place_is_refused_and_stays(
    chosen: Format, text: str, shown: str, tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    folder = a_run_dir(tmp_path)
    assert run(["emit", str(folder), "--format", str(chosen), "--merge", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert shown in err
    assert err.startswith(f"error: {path} ") or chosen is Format.ARGS
    assert path.read_text() == text


def test_the_file_is_changed_in_place_and_the_difference_shown(
    tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        DEPLOYMENT.replace(
            "          args:\n", "          args:\n            - --api-key=abc123\n"
        )
    )
    path.chmod(0o640)
    run_dir = str(a_run_dir(tmp_path))
    command = ["emit", run_dir, "--format", "kubernetes", "--merge", str(path)]
    assert run([*command, "-o", str(tmp_path / "new.yaml")]) == 0
    assert '"256"' in path.read_text()
    assert '"48"' in (tmp_path / "new.yaml").read_text()
    capsys.readouterr()
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--- {path}\n" in err
    assert '\n+            - "48"' in err
    assert "abc123" not in err
    assert "abc123" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["2026-11-20T14-03-00", "mine.yaml", "new.yaml"]
    )
    assert run(command) == 0
    assert f"{path} has these values already" in capsys.readouterr().err


def test_a_copy_is_open_to_nobody_to_whom_the_file_is_closed(tmp_path: Path) -> None:
    path, copy = tmp_path / "mine.yaml", tmp_path / "new.yaml"
    path.write_text(DEPLOYMENT)
    command = ["emit", str(a_run_dir(tmp_path)), "--format", "kubernetes"]
    for mode, wanted in ((0o600, 0o600), (0o640, 0o640), (0o444, 0o644)):
        path.chmod(mode)
        copy.unlink(missing_ok=True)
        assert run([*command, "--merge", str(path), "-o", str(copy)]) == 0
        assert copy.stat().st_mode & 0o777 == wanted


def test_an_edit_made_while_the_difference_was_shown_is_not_written_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(VLLM)
    command = [sys.executable, "-m", "tuner.cli", "emit", str(a_run_dir(tmp_path))]
    reading, writing = os.pipe()
    # A terminal that shows nothing yet: the difference does not fit into what is left of it.
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    process = subprocess.Popen([*command, "--merge", str(path)], stderr=writing)
    os.close(writing)
    try:
        wait_for(lambda: "pipe" in Path(f"/proc/{process.pid}/wchan").read_text())
        others = VLLM + "seed: 7\n"
        path.write_text(others)
        with os.fdopen(reading, "rb") as terminal:
            shown = terminal.read().decode().lstrip(".")
        assert process.wait(30) == 2
    finally:
        process.kill()
        process.wait()
    assert f"error: {path} was changed by others meanwhile and is left alone" in shown
    assert path.read_text() == others
    assert run(["emit", command[-1], "--merge", str(path)]) == 0
    assert path.read_text().endswith("seed: 7\n")


def test_a_choice_is_left_to_the_user(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "mine.yaml"
    two = (
        DEPLOYMENT
        + "---\n"
        + DEPLOYMENT.rpartition("---\n")[2].replace("name: chat ", "name: code ")
    )
    path.write_text(two)
    command = ["emit", str(a_run_dir(tmp_path)), "--format", "kubernetes", "--merge", str(path)]
    assert run(command) == 2
    assert "2: chat, code\nhint:  choose one with --name" in capsys.readouterr().err
    assert run([*command, "--name", "code"]) == 0
    documents = list(yaml.safe_load_all(path.read_text()))
    caps = [d["spec"]["template"]["spec"]["containers"][1]["args"][1] for d in documents[1:]]
    assert caps == ["256", "48"]
