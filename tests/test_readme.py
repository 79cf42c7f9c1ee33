"""What the documents tell people to type is what the commands understand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tuner.cli.commands import tune

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("examples/**/*.md"), *ROOT.glob("traces/*.md")]
BENCHMARKS = re.compile(r"python\s+(tests/benchmarks/\w+\.py)([^`]*)")


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


TOLD = [(page, line) for page in PAGES for line in commands_in(page)]


def parse(command: click.Command, name: str, words: list[str]) -> None:
    """Let click read the words as the command would, and run nothing."""
    if isinstance(command, click.Group) and words and words[0] in command.commands:
        parse(command.commands[words[0]], words[0], words[1:])
    else:
        command.make_context(name, words)


def test_the_documents_tell_commands() -> None:
    assert len(TOLD) > 30
    assert any(page.name == "README.md" and "calibrate" in line for page, line in TOLD)


@pytest.mark.parametrize(("page", "line"), TOLD, ids=lambda part: str(part)[-60:])
def test_a_command_that_is_told_is_understood(page: Path, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    try:
        parse(tune, "tune", [word for word in words if word != "…"])
    except click.ClickException as wrong:
        pytest.fail(f"{page.name}: {line}: {wrong.format_message()}")


def benchmarks() -> list[tuple[str, str]]:
    """Return every benchmark that the README names, with its options."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    return sorted(set(BENCHMARKS.findall(text)))


def test_a_figure_stands_beside_a_benchmark_that_knows_the_options() -> None:
    found = benchmarks()
    assert len(found) >= 8
    for script in sorted({script for script, _ in found}):
        command = [sys.executable, str(ROOT / script), "--help"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        options = {o for s, more in found if s == script for o in re.findall(r"--[\w-]+", more)}
        missing = [option for option in sorted(options) if option not in told]
        assert not missing, f"{script} does not know {missing}"
