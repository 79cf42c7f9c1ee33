"""The tree keeps to its own rules: layers, sizes, words, and what is in the wheel."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "tuner").rglob("*.py"))
BANNED = re.compile(
    r"(?<![-\w])(?:comprehensive|robust|seamless|powerful|flexible|sophisticated|leverag|enabl)"
    r"(?:e|es|ed|ing|ly|ness)?(?![-_\w])",
    re.IGNORECASE,
)
"""Whole words: enable-prefix-caching and FlexibleArgumentParser are vLLM's, not ours."""
MAX_FUNCTION_LINES = 40


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function has, without its docstring."""
    last = function.end_lineno or function.lineno
    lines = last - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_imports_point_down_and_each_library_has_one_owner() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
    ]
    done = subprocess.run(
        [*command, "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_functions_stay_short(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    walked = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)
    ]
    assert [f.name for f in walked if function_lines(f) >= MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", [p for p in MODULES if ">>>" in p.read_text()], ids=named)
def test_the_examples_in_docstrings_are_true(path: Path) -> None:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    tried = doctest.testmod(importlib.import_module(dotted))
    assert tried.attempted > 0
    assert tried.failed == 0


def test_no_word_promises_what_a_number_should_show() -> None:
    pages = [*MODULES, *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = [
        f"{named(page)}: {match.group()}"
        for page in pages
        for match in BANNED.finditer(page.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_top_level_has_only_the_agreed_folders() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],  # noqa: S607 - the git on the path
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: its files cannot be listed")
    folders = {line.split("/")[0] for line in listed.stdout.splitlines() if "/" in line}
    agreed = {"examples", "profiles", "tests", "traces", "tuner"}
    assert {folder for folder in folders if not folder.startswith(".")} <= agreed


def test_the_wheel_carries_the_model_the_traces_and_the_profiles(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    wheel = next(tmp_path.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("traces", "profiles"):
        shipped = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert {f"tuner/_data/{path.relative_to(ROOT)}" for path in shipped} <= names
    model = {
        f"tuner/demo_model/{p.name}" for p in (ROOT / "tuner" / "demo_model").glob("*.json")
    }
    assert {"tuner/py.typed", "tuner/cli/__init__.py", *model} <= names

    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = "from tuner.demo import bundled; print(bundled('traces'), bundled('profiles'))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=unpacked, check=True, capture_output=True, text=True
    )
    data = unpacked / "tuner" / "_data"
    assert found.stdout.split() == [str(data / "traces"), str(data / "profiles")]
