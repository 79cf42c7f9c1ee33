"""The reference of every command, made from what `--help` prints.

    python tests/benchmarks/command_reference.py [-o tuner/COMMANDS.md]

Written anew after a change of the help; a test fails while the file is another than this makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import click

from tuner.cli.commands import tune

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tuner" / "COMMANDS.md"
COMMAND = "python tests/benchmarks/command_reference.py"
WIDTH = 96
"""Columns of the text: ours, as wide as the project's own lines."""


def commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all below it, each with the words that call it."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))


def help_text(name: str, command: click.Command) -> str:
    """Return what `--help` prints, at a fixed width whatever the terminal's is."""
    context = command.context_class(
        command, info_name=name, terminal_width=WIDTH, **command.context_settings
    )
    return command.get_help(context)


def anchor(name: str) -> str:
    """Return the link that a heading gets.

    >>> anchor("tune trace from-prometheus")
    'tune-trace-from-prometheus'
    """
    return name.replace(" ", "-")


def reference() -> str:
    """Return the whole page."""
    every = list(commands(tune, ("tune",)))
    lines = [
        "# Commands",
        "",
        f"What `--help` says of each command. Made by `{COMMAND}`; do not edit it by hand.",
        "",
        "| command | what it is for |",
        "|---|---|",
    ]
    lines += [
        f"| [`{name}`](#{anchor(name)}) | {command.get_short_help_str(limit=200)} |"
        for name, command in every
    ]
    for name, command in every:
        lines += ["", f"## {name}", "", "```", help_text(name, command).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=REFERENCE)
    parser.parse_args().output.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
