"""What the tree depends on: declared, bounded, pinned as it was tested, and audited.

    python tests/support/dependencies.py            check it, as `make check` does
    python tests/support/dependencies.py --pin      write tests/constraints.txt anew

Every library that the code imports is declared with the least version it needs, and
`constraints.txt` names the versions that the tests ran with, so that such an environment can
be made again: `make setup CONSTRAINTS=tests/constraints.txt`. Whether a known vulnerability is
among them is asked of pip-audit where a service can be reached, and said where none can.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.installed import RECORDER, SOURCES, TUNER, needed_by
from support.paths import ROOT, TESTS

CONSTRAINTS = TESTS / "constraints.txt"
HEAD = """\
# The versions that the tests ran with, extras cpu, predict, postgres and dev included.
# Written by `python tests/support/dependencies.py --pin`; to have the same:
# make setup CONSTRAINTS=tests/constraints.txt
"""
GPU_ONLY = {"vllm"}
"""Declared for other machines: this set is that of the CPU build."""
BY_OTHERS = {"vllm", "torch", "llvmlite"}
"""Imported, and declared by extras, or brought in the one version that fits by what is."""


def declared(name: str) -> dict[str, list[Requirement]]:
    """Return the requirements of one of our distributions, by extra; those of all under ""."""
    project: dict[str, Any] = tomllib.loads((SOURCES[name] / "pyproject.toml").read_text())[
        "project"
    ]
    groups = {"": project["dependencies"], **project.get("optional-dependencies", {})}
    return {extra: [Requirement(one) for one in listed] for extra, listed in groups.items()}


def all_declared() -> list[Requirement]:
    """Return every requirement on the work of others."""
    groups = [group for name in SOURCES for group in declared(name).values()]
    return [one for group in groups for one in group if canonicalize_name(one.name) != TUNER]


def imported(folder: Path, apart: Path | None = None) -> dict[str, str]:
    """Return the outside packages that code imports, and a file that does."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        if apart is not None and path.is_relative_to(apart):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    # What a later Python has built in is declared for the others.
    ours = {*sys.stdlib_module_names, "compression", "tuner"}
    return {name: where for name, where in found.items() if name not in ours}


def undeclared() -> list[str]:
    """Return what is imported and not declared, in words."""
    owners = metadata.packages_distributions()
    recorder = SOURCES[RECORDER]
    faults = []
    for name, found in (
        (TUNER, imported(ROOT / "tuner", apart=recorder)),
        (RECORDER, imported(recorder)),
    ):
        known = {
            canonicalize_name(one.name) for group in declared(name).values() for one in group
        }
        for package, where in found.items():
            owned = {canonicalize_name(one) for one in owners.get(package, [package])}
            if package not in BY_OTHERS and not owned & known:
                faults.append(f"{where} imports {package}, which {name} does not declare")
    return faults


def unused() -> list[str]:
    """Return what everybody has to install and nothing imports, in words."""
    owners = metadata.packages_distributions()
    used = {
        canonicalize_name(one)
        for package in imported(ROOT / "tuner")
        for one in owners.get(package, [package])
    }
    needed = [one.name for name in SOURCES for one in declared(name)[""]]
    return [
        f"{name} is declared, and nothing imports it"
        for name in needed
        if canonicalize_name(name) not in used
    ]


def unbounded() -> list[str]:
    """Return what is declared without the least version that it needs, in words."""
    return [
        f"{one.name} is declared without a least version"
        for one in all_declared()
        if one.name not in BY_OTHERS
        and not any(bound.operator in {">=", "==", "~="} for bound in one.specifier)
    ]


def pins() -> dict[str, Version]:
    """Return the tested versions."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line[:1] not in {"", "#"}]
    return {
        name: Version(version) for name, _, version in (one.partition("==") for one in lines)
    }


def untested() -> list[str]:
    """Return what is declared and pinned nowhere, or pinned outside of its bounds, in words."""
    tested, faults = pins(), []
    for one in all_declared():
        name = canonicalize_name(one.name)
        if name in GPU_ONLY or not (one.marker is None or one.marker.evaluate({"extra": ""})):
            continue
        if name not in tested:
            faults.append(f"{CONSTRAINTS.name} lacks {name}")
        elif not one.specifier.contains(tested[name], prereleases=True):
            faults.append(f"{CONSTRAINTS.name} has {name} {tested[name]}, declared is {one}")
    return faults


def pin() -> None:
    """Write the versions that are installed here."""
    wanted = {one.name for one in all_declared()}
    lines = [
        # Without what a build adds to its version: +cpu is not on every index.
        f"{name}=={Version(metadata.version(name)).public}"
        for name in sorted(needed_by(*wanted))
        if name not in SOURCES
    ]
    CONSTRAINTS.write_text(HEAD + "\n".join(lines) + "\n")


def audited() -> tuple[list[str], str]:
    """Return the vulnerabilities that are known, and what kept from asking, if anything."""
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "-f", "json"]
    how = ["--no-deps", "--disable-pip", "--timeout", "10", "-r", str(CONSTRAINTS)]
    done = subprocess.run([*command, *how], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        return [], (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    asked = json.loads(done.stdout)["dependencies"]
    if all("skip_reason" in one for one in asked):
        return [], f"no service knows any of {len(asked)} distributions"
    return [
        f"{one['name']} {one['version']}: {fault['id']}, mended in {fault['fix_versions']}"
        for one in asked
        for fault in one.get("vulns", ())
    ], ""


def main() -> int:
    """Check everything, print what is wrong, and return the exit code."""
    if sys.argv[1:] == ["--pin"]:
        pin()
    faults = [*undeclared(), *unused(), *unbounded(), *untested()]
    known, kept_from = audited()
    for fault in (*faults, *known):
        sys.stdout.write(f"error: {fault}\n")
    if kept_from:
        sys.stdout.write(f"not audited for known vulnerabilities: {kept_from}\n")
    return 1 if faults or known else 0


if __name__ == "__main__":
    sys.exit(main())
