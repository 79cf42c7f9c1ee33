"""What the documents tell people to type is what the commands understand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import click
import pytest

from tuner.cli.commands import tune
from tuner.emit.sources import read_source
from tuner.emit.target import Names
from tuner.traffic.formats import ReadOptions

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "tuner" / "COMMANDS.md"
FIGURES = ROOT / "tests" / "benchmarks" / "README.md"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("examples/**/*.md")),
    *(ROOT / folder / "README.md" for folder in ("traces", "profiles", "tuner")),
    FIGURES,
]
BENCHMARKS = re.compile(r"python\s+(tests/benchmarks/\w+\.py)([^`]*)")
LINKS = re.compile(r"\]\(([^)\s]+)\)")
MODULES = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py|(?:[a-z_]+/)+)`")
MAX_README_LINES = 200
"""Ours: what is read in one sitting; what is longer stands beside what it speaks of."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_and_words(text: str) -> Iterator[str]:
    """Yield the lines of code blocks, joined where they go on, and what stands in backticks."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for words in re.findall(r"`([^`]+)`", prose):
        yield " ".join(words.split())


def commands_in(page: Path) -> list[str]:
    """Return every `tune` command of a page; a name alone is none."""
    lines = (line.strip() for line in blocks_and_words(page.read_text(encoding="utf-8")))
    return [line for line in lines if re.match(r"tune\s+\S+\s+\S", line)]


def commands_of_the_help() -> list[str]:
    """Return the example commands in the reference, which stand a little in."""
    text = REFERENCE.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^ {2,6}(tune \S+ \S.*)$", text, re.MULTILINE)


TOLD = [
    *((page, line) for page in PAGES for line in commands_in(page)),
    *((REFERENCE, line) for line in commands_of_the_help()),
]


def parse(command: click.Command, name: str, words: list[str]) -> None:
    """Let click read the words as the command would, and run nothing."""
    if isinstance(command, click.Group) and words and words[0] in command.commands:
        parse(command.commands[words[0]], words[0], words[1:])
    else:
        command.make_context(name, words)


def test_the_documents_tell_commands() -> None:
    assert len(TOLD) > 60
    assert {page.parent.name for page, _ in TOLD} > {"traces", "profiles", "examples", "tuner"}
    assert any(
        page == ROOT / "profiles" / "README.md" and "calibrate" in line for page, line in TOLD
    )


@pytest.mark.parametrize(("page", "line"), TOLD, ids=lambda part: str(part)[-60:])
def test_a_command_that_is_told_is_understood(page: Path, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    try:
        parse(tune, "tune", [word for word in words if word != "…"])
    except click.ClickException as wrong:
        pytest.fail(f"{page.name}: {line}: {wrong.format_message()}")


def benchmarks() -> list[tuple[str, str]]:
    """Return every benchmark that a document names, with its options."""
    texts = (" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)
    return sorted({found for text in texts for found in BENCHMARKS.findall(text)})


@pytest.mark.slow
def test_a_figure_stands_beside_a_benchmark_that_knows_the_options() -> None:
    found = benchmarks()
    assert len(found) >= 8
    for script in sorted({script for script, _ in found}):
        command = [sys.executable, str(ROOT / script), "--help"]
        reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        options = {o for s, more in found if s == script for o in re.findall(r"--[\w-]+", more)}
        missing = [option for option in sorted(options) if option not in reported]
        assert not missing, f"{script} does not know {missing}"


def test_the_readme_is_read_in_one_sitting() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES


def test_the_readme_quotes_the_file_that_a_run_wrote() -> None:
    quoted = re.search(
        r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert quoted is not None
    written = (ROOT / "examples" / "demo" / "best.yaml").read_text().splitlines()
    assert [line for line in quoted[1].splitlines() if line not in written] == []


def anchors(page: Path) -> set[str]:
    """Return what a link may name after the # of a page, by its headings."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, REFERENCE], ids=named)
def test_a_link_leads_somewhere(page: Path) -> None:
    links = LINKS.findall(page.read_text(encoding="utf-8"))
    for link in (link for link in links if not link.startswith("https://")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_modules_that_the_code_s_page_names_exist() -> None:
    found = MODULES.findall((ROOT / "tuner" / "README.md").read_text(encoding="utf-8"))
    assert len(found) > 20
    assert [name for name in found if not (ROOT / "tuner" / name).exists()] == []


def write_with(script: str, output: Path) -> str:
    """Run a script that writes documents; return the command that writes them in place."""
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / script), "-o", str(output)]
    subprocess.run(command, check=True)
    return f"python tests/benchmarks/{script}"


def test_the_command_reference_is_what_the_help_says(tmp_path: Path) -> None:
    command = write_with("command_reference.py", tmp_path / "COMMANDS.md")
    made = (tmp_path / "COMMANDS.md").read_text(encoding="utf-8")
    is_current = made == REFERENCE.read_text(encoding="utf-8")
    assert is_current, f"{named(REFERENCE)} is stale, make it anew: {command}"


def words_of(picture: Path) -> list[str]:
    """Return the words of a picture: how rich draws around them is its own business."""
    return ["".join(e.itertext()) for e in ET.parse(picture).iter() if e.tag.endswith("}text")]  # noqa: S314 - our own file


def test_the_pictures_show_what_was_measured(tmp_path: Path) -> None:
    command = write_with("pictures.py", tmp_path)
    made = sorted(tmp_path.iterdir())
    assert len(made) == 4
    for picture in made:
        kept = ROOT / "examples" / "pictures" / picture.name
        is_same = words_of(picture) == words_of(kept)
        assert is_same, f"{named(kept)} is stale, make it anew: {command}"


def code_of(heading: str) -> dict[str, Any]:
    """Return what the Python under a heading of the code's page defines."""
    text = (ROOT / "tuner" / "README.md").read_text(encoding="utf-8")
    code = re.search(rf"^## {heading}$.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    defined: dict[str, Any] = {}
    exec(code[1], defined)  # noqa: S102 - our own page
    return defined


def test_the_trace_format_of_the_documents_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("when,asked,answered\n0,10,2\n1500,20,3\n")
    gateway = code_of("Add a trace format")["GATEWAY"]
    assert gateway.matches(path.read_bytes())
    columns = gateway.read(path, ReadOptions())
    assert (columns.arrived / columns.ticks_per_s).tolist() == [0.0, 1.5]
    assert columns.output_tokens.tolist() == [2, 3]


def test_the_deployment_target_of_the_documents_writes_a_file() -> None:
    launcher = code_of("Add a deployment target")["LAUNCHER"]
    written = launcher.write(
        read_source(ROOT / "examples" / "demo" / "best.yaml"), Names("l.yaml")
    )
    assert "maxNumSeqs: 64" in written
    assert written.startswith("# launch l.yaml\n")
