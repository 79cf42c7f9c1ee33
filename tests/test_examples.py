"""The examples of a schedule are what systemd, cron, Kubernetes and Docker Compose take."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from support.examples_parts import (
    NAMESPACE,
    SCHEDULE,
    compose_file,
    cron_lines,
    interpolated,
    kustomized,
    need,
    ran,
    succeeded,
    tune_commands,
)
from support.paths import ROOT
from tuner.cli.commands import check, tune
from tuner.cli.watch_command import watch

# --- every command in them ---


@pytest.mark.parametrize("where", sorted(tune_commands()))
def test_tune_takes_every_command_of_the_examples(where: str) -> None:
    name, *words = tune_commands()[where]
    command: click.Command = check
    if name == "watch":
        command = watch
    with command.make_context(name, words) as context:
        assert context.params["prometheus"]
        assert context.params["since"] in {6 * 3600, 24 * 3600}
    with pytest.raises(click.UsageError, match="No such option"):
        command.make_context(name, [*words, "--no-such-option"])


@pytest.mark.parametrize("path", sorted(SCHEDULE.rglob("*.sh")), ids=lambda path: path.name)
def test_a_script_stops_at_the_first_error_and_shellcheck_has_no_remark(path: Path) -> None:
    assert "\nset -euo pipefail\n" in path.read_text()
    assert os.access(path, os.X_OK)
    need("shellcheck", "shellcheck")
    succeeded("shellcheck", path)


# --- systemd and cron ---


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Return copies of the units that start a program which exists, as systemd wants it."""
    need("systemd-analyze", "systemd")
    program = shutil.which("true")
    for unit in (SCHEDULE / "systemd").iterdir():
        text = unit.read_text().replace("/opt/tune/bin/tune", str(program))
        (tmp_path / unit.name).write_text(text)
    return sorted(tmp_path.iterdir())


def test_systemd_takes_the_units_without_a_remark(units: list[Path]) -> None:
    assert [unit.name for unit in units] == [
        *("tune-check.service", "tune-check.timer", "tune-watch.service"),
    ]
    assert succeeded("systemd-analyze", "verify", *units) == ""
    (calendar,) = re.findall(r"OnCalendar=(.*)", units[1].read_text())
    succeeded("systemd-analyze", "calendar", calendar)
    units[0].write_text(units[0].read_text().replace("Type=", "Typ="))
    assert "Unknown key 'Typ'" in ran("systemd-analyze", "verify", *units).stderr


def test_systemd_finds_the_services_shut_in(units: list[Path]) -> None:
    """Up to 2.5 of 10 is what systemd calls OK."""
    limit = ("--offline=yes", "--threshold=25")
    for unit in (units[0], units[2]):
        succeeded("systemd-analyze", "security", *limit, unit)


def test_cron_takes_its_lines() -> None:
    lines = cron_lines()
    assert len(lines) == 2
    for line in lines:
        for field, (low, high) in zip(
            line[:5], [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)], strict=True
        ):
            matched = re.fullmatch(r"(\*|\d+)(?:/([1-9]\d*))?", field)
            assert matched is not None
            assert matched[1] == "*" or low <= int(matched[1]) <= high
        assert line[5] == "tune"
        assert not re.search(r"(?<!\\)%", line[6])
    path = SCHEDULE / "cron" / "tune"
    assert re.fullmatch(r"[\w-]+", path.name)
    assert path.read_text().endswith("\n")


# --- Kubernetes ---


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """Return what `kubectl apply -k` would send, by kind."""
    need("kubectl", "kubernetes-client")
    return kustomized()


def test_kubernetes_takes_the_manifests(objects: dict[str, dict[str, Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    assert set(objects) == {
        *("ConfigMap", "CronJob", "PersistentVolumeClaim"),
        *("Role", "RoleBinding", "ServiceAccount"),
    }
    for found in objects.values():
        for version in ("1.28", "1.33"):
            validate(found, version, strict=True)
        assert found["metadata"]["namespace"] == NAMESPACE
    role = objects["Role"]
    with pytest.raises(Exception, match="verb"):
        validate({**role, "rules": [{"verb": "get"}]}, "1.33", strict=True)


def test_kubernetes_takes_the_job_that_tunes_and_tune_its_arguments() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    (job,) = yaml.safe_load_all((ROOT / "examples" / "tune" / "job.yaml").read_text())
    for version in ("1.28", "1.33"):
        validate(job, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    places = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
    with tune.make_context("tune", container["args"]) as context:
        given = context.params
    files = [*given["trace"], *(given[name] for name in ("config", "output", "run_dir"))]
    assert all(file.startswith(places) for file in files)
    assert job["spec"]["activeDeadlineSeconds"] >= given["budget"] + given["start_timeout"]
    # Another try would find the folder of the first run and refuse it.
    assert job["spec"]["backoffLimit"] == 0


def test_the_job_gets_what_it_mounts_and_no_more_rights_than_one_object(
    objects: dict[str, dict[str, Any]],
) -> None:
    pod = objects["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert objects["CronJob"]["spec"]["concurrencyPolicy"] == "Forbid"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    mounted = {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
    assert mounted == {"tune-profile", objects["ConfigMap"]["metadata"]["name"]}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (rule,) = objects["Role"]["rules"]
    hook = [arg.removeprefix("--hook=") for arg in container["args"] if "--hook=" in arg]
    assert rule == {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [hook[1]],
        "verbs": ["get", "patch"],
    }
    account = {"kind": "ServiceAccount", "name": pod["serviceAccountName"]}
    assert objects["RoleBinding"]["subjects"] == [{**account, "namespace": NAMESPACE}]
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert hook[0] == "/scripts/" + next(iter(objects["ConfigMap"]["data"]))
    assert f"--emit={hook[2]}" in container["args"]


# --- Docker Compose ---


def test_docker_compose_takes_its_file_and_every_bind_is_explained() -> None:
    project = pytest.importorskip("compose_spec").PyCompose
    text = interpolated((SCHEDULE / "compose" / "docker-compose.yaml").read_text())
    assert set(project.from_yaml(text).services) == {"vllm", "prometheus", "watcher"}
    services = compose_file()["services"]
    binds = {v.split(":")[0] for s in services.values() for v in s["volumes"] if v[0] == "."}
    folder = SCHEDULE / "compose"
    missing = {bind for bind in binds if not (folder / bind).exists()}
    assert missing == {"./served", "./run", "./state"}
    assert "mkdir -p served state run" in (SCHEDULE / "README.md").read_text()
    build = services["watcher"]["build"]
    context = (folder / build["context"]).resolve()
    assert (context / "pyproject.toml").is_file()
    assert (context / build["dockerfile"]).is_file()


def test_no_port_is_open_to_others_without_a_key() -> None:
    services = compose_file()["services"]
    assert services["vllm"]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    open_to_others = {
        name
        for name, service in services.items()
        for port in service.get("ports", ())
        if not port.startswith("127.0.0.1:")
    }
    assert open_to_others == {"vllm"}
    (demo,) = yaml.safe_load((ROOT / "examples/demo/compose.yaml").read_text())[
        "services"
    ].values()
    assert demo["ports"] == ["127.0.0.1:8000:8000"]
    assert "environment" not in demo


# --- images ---

DOCKERFILES = sorted((ROOT / "examples").rglob("Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_can_be_made_of_digests_and_runs_as_nobody(path: Path) -> None:
    steps = [line.split() for line in path.read_text().splitlines() if line[:1] not in "# "]
    variables = {words[1].partition("=")[0] for words in steps if words[0] == "ARG"}
    bases = [words[1] for words in steps if words[0] == "FROM"]
    assert {base.strip("${}") for base in bases} == variables
    assert all(base.startswith("${") for base in bases)
    assert [words for words in steps if words[0] == "USER"] == [["USER", "65534:65534"]]


def test_an_image_is_built_of_the_sources_alone() -> None:
    """Neither the history nor an environment or a run, with whatever they hold, gets in."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *kept = [line for line in lines if not line.startswith("#")]
    assert first == "*"
    kept = [line.removeprefix("!") for line in kept if line.startswith("!")]
    assert all((ROOT / path).exists() for path in kept)
    for path in DOCKERFILES:
        copied = re.findall(r"^COPY (?!--from)(\S+)", path.read_text(), re.MULTILINE)
        assert all(one == "." or one.split("/")[0] in kept for one in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], *project["project"]["license-files"], "tuner"}
    needed |= {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]}
    assert {path for path in needed if not path.startswith("tuner/")} <= {*kept}


def test_each_service_that_is_scraped_is_one_of_the_compose_file() -> None:
    config = yaml.safe_load((SCHEDULE / "compose" / "prometheus.yml").read_text())
    targets = [job["static_configs"][0]["targets"][0] for job in config["scrape_configs"]]
    assert targets == ["vllm:8000", "watcher:9105"]
    assert "--listen=0.0.0.0:9105" in compose_file()["services"]["watcher"]["command"]
