"""The hooks of the examples, run for real: on a git repository, and with kubectl."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.examples_parts import (
    SCHEDULE,
    ApiServer,
    kustomized,
    need,
    ran,
    serving,
    succeeded,
)

BEST = (
    "# tuned 2026-11-21 on 174 requests\n"
    "#   e2e_p90  5.36 s -> 1.71 s\n"
    "model: m\nmax-num-seqs: 48\nmax-num-batched-tokens: 512\n"
)
PATH = ":charts/v llm/*best.yaml"


# --- git ---


class Repository:
    """A bare repository with one commit on main, and the hook that pushes there."""

    def __init__(self, folder: Path) -> None:
        self.bare, self.file = folder / "deploy repo.git", folder / "my best.yaml"
        self.file.write_text(BEST)
        # No configuration of whoever runs the tests.
        self.env = {**os.environ, "HOME": str(folder), "GIT_CONFIG_GLOBAL": os.devnull}
        self.env |= {"GIT_CONFIG_NOSYSTEM": "1"}
        self.git("init", "--quiet", "--bare", "--initial-branch=main", self.bare)
        self.clone = folder / "clone"
        self.git("clone", "--quiet", self.bare, self.clone)
        self.edit("README.md", "by hand\n")

    def git(self, *words: str | Path) -> str:
        """Run git as somebody."""
        who = ("-c", "user.name=me", "-c", "user.email=me@localhost")
        return succeeded("git", *who, *words, env=self.env)

    def edit(self, path: str, text: str) -> None:
        """Commit a file by hand, and push it."""
        (self.clone / path).parent.mkdir(parents=True, exist_ok=True)
        (self.clone / path).write_text(text)
        self.git("-C", self.clone, "add", "--all")
        self.git("-C", self.clone, "commit", "--quiet", "--message=by hand")
        self.git("-C", self.clone, "push", "--quiet", "origin", "HEAD:main")

    def hook(self, path: str = PATH, branch: str = "main") -> tuple[int, str]:
        """Run the hook; return its exit code and what it said."""
        script = SCHEDULE / "gitops" / "commit-and-push.sh"
        done = ran(script, self.file, f"file://{self.bare}", branch, path, env=self.env)
        return done.returncode, done.stdout + done.stderr

    def log(self, *words: str) -> list[str]:
        """Return the commits of main, latest first."""
        return self.git("-C", self.bare, "log", "--format=%s", *words, "main").splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Return a repository to push to, with blanks in all of its names."""
    need("git", "git")
    folder = tmp_path / "a folder"
    folder.mkdir()
    return Repository(folder)


def test_the_file_is_committed_with_its_limits_and_its_evidence(repository: Repository) -> None:
    code, said = repository.hook()
    assert code == 0, said
    subject = f"Tune {PATH}: max-num-seqs 48, max-num-batched-tokens 512"
    assert repository.log() == [subject, "by hand"]
    assert repository.git("-C", repository.bare, "show", f"main:{PATH}") == BEST
    (body,) = [repository.git("-C", repository.bare, "log", "-1", "--format=%b", "main")]
    assert "tuned 2026-11-21 on 174 requests\n  e2e_p90  5.36 s -> 1.71 s" in body


def test_a_roll_back_is_called_one_and_says_why(repository: Repository) -> None:
    repository.env |= {"TUNE_EVENT": "rollback", "TUNE_WHY": "e2e_p99 is 31% worse"}
    assert repository.hook()[0] == 0
    subject, why, _ = repository.log("-1", "--format=%s%n%b")[:3]
    assert subject.startswith("Roll back ")
    assert why == "e2e_p99 is 31% worse"


def test_nothing_is_committed_when_nothing_changed(repository: Repository) -> None:
    assert repository.hook()[0] == 0
    before = repository.log("--format=%H")
    code, said = repository.hook()
    assert (code, said) == (0, f"{PATH} is on main already\n")
    assert repository.log("--format=%H") == before


def test_whoever_was_faster_keeps_their_commit(repository: Repository) -> None:
    repository.edit("theirs.txt", "first\n")
    theirs = repository.git("-C", repository.clone, "rev-parse", "HEAD").strip()
    repository.git("-C", repository.clone, "push", "--quiet", "origin", "HEAD:theirs")
    repository.git("-C", repository.bare, "update-ref", "refs/heads/main", f"{theirs}~1")
    # Somebody else's commit arrives when the hook has made its own.
    hooks = repository.clone.parent / "template" / "hooks"
    hooks.mkdir(parents=True)
    move = f"git --git-dir='{repository.bare}' update-ref refs/heads/main {theirs}"
    (hooks / "post-commit").write_text(
        f"#!/bin/sh\n[ -e ~/raced ] || {{ : >~/raced; {move}; }}\n"
    )
    (hooks / "post-commit").chmod(0o755)
    repository.env["GIT_TEMPLATE_DIR"] = str(hooks.parent)
    code, said = repository.hook()
    assert code == 0, said
    assert "try 1 of 3" in said
    assert [subject.split()[0] for subject in repository.log()] == ["Tune", "by", "by"]
    assert repository.git("-C", repository.bare, "show", "main:theirs.txt") == "first\n"


def test_a_push_that_is_refused_is_an_error_and_changes_nothing(repository: Repository) -> None:
    refusing = repository.bare / "hooks" / "pre-receive"
    refusing.write_text("#!/bin/sh\necho protected branch >&2\nexit 1\n")
    refusing.chmod(0o755)
    code, said = repository.hook()
    assert code == 2
    assert "protected branch" in said
    assert "could not be pushed to main" in said
    assert repository.log() == ["by hand"]


@pytest.mark.parametrize(
    "path",
    ["../out.yaml", "/etc/out.yaml", "a/../../b", ".git/config", "a/.git/hooks/x", "a/", ""],
)
def test_a_path_that_leaves_the_repository_is_refused(
    path: str, repository: Repository
) -> None:
    code, said = repository.hook(path)
    assert code == 2
    assert "must be a path inside of the repository" in said


def test_a_link_in_the_repository_leads_nowhere(repository: Repository) -> None:
    outside = repository.clone.parent / "outside"
    outside.mkdir()
    (repository.clone / "linked").symlink_to(outside)
    repository.edit("more.txt", "x")
    code, said = repository.hook("linked/best.yaml")
    assert code == 2
    assert "symbolic link" in said
    assert "could not be pushed" not in said
    assert list(outside.iterdir()) == []


def test_a_file_for_its_owner_alone_is_not_published(repository: Repository) -> None:
    repository.file.chmod(0o600)
    code, said = repository.hook()
    assert code == 2
    assert "may hold secrets" in said
    assert repository.log() == ["by hand"]
    kubernetes = SCHEDULE / "kubernetes" / "patch-configmap.sh"
    done = ran(kubernetes, "vllm-config", repository.file)
    assert done.returncode == 2
    assert "may hold secrets" in done.stderr


# --- kubectl ---


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    """Return what the job's account may do."""
    need("kubectl", "kubernetes-client")
    found: list[dict[str, Any]] = kustomized()["Role"]["rules"]
    return found


def test_the_hook_puts_the_file_into_the_config_map_within_the_rights_of_its_role(
    rules: list[dict[str, Any]], tmp_path: Path
) -> None:
    best = tmp_path / "best.yaml"
    best.write_text(f"{BEST}served-model-name: 'a \"b\" \\ … $HOME'\n", encoding="utf-8")
    api = ApiServer("vllm-config", {"other": "kept"}, rules)
    script = SCHEDULE / "kubernetes" / "patch-configmap.sh"
    with serving(api, tmp_path) as config:
        env = {**os.environ, "KUBECONFIG": str(config), "HOME": str(tmp_path)}
        succeeded(script, "vllm-config", best, env=env)
        assert api.config_map["data"] == {"other": "kept", "best.yaml": best.read_text()}
        assert set(api.asked) == {"get vllm-config", "patch vllm-config"}
        assert "no change" in succeeded(script, "vllm-config", best, env=env)
        denied = ran(script, "kube-root-ca.crt", best, env=env)
    assert denied.returncode != 0
    assert "Forbidden" in denied.stderr
