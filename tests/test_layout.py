"""The tree keeps to its own rules: layers, folders, words, and what is in the wheel."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import grimp
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

PACKAGES = {
    *("cli", "drift", "emit", "engine", "recorder", "replay"),
    *("report", "run", "search", "shadow", "traffic"),
}
FILES = {"__init__", "errors", "files", "gate", "library", "redact", "stats"}
MAX_MODULES_IN_FOLDER = 25
"""Ours: what one look at a folder takes in."""
MIN_LINES_OF_ITS_OWN = 100
"""Ours: a shorter module that one other module imports is a part of that one."""
ENTRIES_OF = {
    "tuner.cli.commands": "each command is imported when it runs, so that help is fast",
    "tuner.cli.predict.commands": "as tuner.cli.commands",
    "tuner.emit.registry": "one form of deployment a file",
    "tuner.report.page": "one section of the page a file",
    "tuner.traffic.formats.registry": "one format a file",
}
"""Modules that list others, each of which may be as short as it is."""
APART = {
    "tuner.cli.plots": "imports plotext, only where a plot is asked for",
}
"""Short modules with one importer that stay apart, and why."""


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


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Return which module imports which."""
    return grimp.build_graph("tuner", cache_dir=None)


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_a_newcomer_sees_the_algorithm_and_little_else() -> None:
    paths = list((ROOT / "tuner").iterdir())
    assert {path.name for path in paths if (path / "__init__.py").exists()} <= PACKAGES
    assert {path.stem for path in paths if path.suffix == ".py"} <= FILES


def test_no_folder_is_full() -> None:
    folders = {path.parent for path in MODULES}
    sizes = {named(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: n for name, n in sizes.items() if n > MAX_MODULES_IN_FOLDER} == {}


def test_a_short_module_with_one_importer_is_a_part_of_it(graph: grimp.ImportGraph) -> None:
    short = {}
    for module in graph.modules:
        path = file_of(module)
        importers = graph.find_modules_that_directly_import(module)
        is_short = len(path.read_text().splitlines()) < MIN_LINES_OF_ITS_OWN
        if path.name != "__init__.py" and is_short and len(importers) == 1:
            short[module] = min(importers)
    listed = {module for module, importer in short.items() if importer in ENTRIES_OF}
    assert set(short) - listed - set(APART) == set()
    assert set(APART) <= set(short), "these exceptions are needed no more"


def test_no_module_imports_itself_by_way_of_others(graph: grimp.ImportGraph) -> None:
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("module", ["tuner", "tuner.recorder"])
def test_a_server_that_imports_the_recorder_pays_for_nothing_else(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"numpy", "click", "vllm"} & set(done.stdout.split()) == set()


def test_the_recorder_stays_where_commands_in_production_name_it() -> None:
    recorder = getattr(importlib.import_module("tuner.recorder"), "TraceRecorder", None)
    assert callable(recorder)


# Compiled code, in which handing arrays from part to part is most of what a part costs.
LONG = {
    "tuner/shadow/schedule/clock.py": {"note_steps"},
    "tuner/shadow/schedule/replay.py": {"_complete", "_decode_on"},
    "tuner/shadow/schedule/admission.py": {"admit_waiting"},
    "tuner/shadow/schedule/steps.py": {"_schedule_running"},
}


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_functions_stay_short(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    walked = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)
    ]
    long = {f.name for f in walked if function_lines(f) >= MAX_FUNCTION_LINES}
    assert long == LONG.get(named(path), set())


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
    code = (
        "from tuner.engine.demo import bundled; print(bundled('traces'), bundled('profiles'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=unpacked, check=True, capture_output=True, text=True
    )
    data = unpacked / "tuner" / "_data"
    assert found.stdout.split() == [str(data / "traces"), str(data / "profiles")]
