"""Go on with an earlier run, and take defaults from a tuning profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tuner.engine.demo import bundled
from tuner.engine.serve_config import read_tuning, shown_argument
from tuner.errors import UsageError
from tuner.redact import REDACTED
from tuner.run.directory import RUN_FILE, RunDir

# Options that hold for one invocation, not for the run.
_NOT_STORED = ("--resume", "--run-dir")
# Trace and configuration may have moved; that they are the same is checked by their hashes.
_MAY_CHANGE = (
    *("--resume", "--trace", "--config", "--budget", "-o", "--output", "--storage"),
    "--engine-arg",
)


def with_stored(
    command: click.Command, arguments: Sequence[str], options: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments to keep, and the options with those of a resumed run beneath them.

    Raises: UsageError if the directory holds no run, or a secret has to be given again.
    """
    if not options["resume"]:
        return _without_secrets(arguments), dict(options)
    run_dir = RunDir(Path(options["resume"]), resume=True)
    try:
        stored = [str(a) for a in run_dir.read_json(RUN_FILE)["arguments"]]
    finally:
        run_dir.close()
    check_begun_here(stored, run_dir.path)
    missing = [a for a in stored if a.endswith(f"={REDACTED}")]
    given = {a.partition("=")[0] for a in arguments}
    again = [a for a in missing if a.partition("=")[0] not in given]
    if again:
        name = again[0].partition("=")[0]
        option = name if name.startswith("--") else f"--engine-arg {name}"
        raise UsageError(f"{name} is a secret and was not kept", f"give it again: {option}=…")
    _refuse_changes(arguments, {a.partition("=")[0] for a in missing})
    before = _drop_redacted(stored)
    if "--trace" in given:
        before = _without_traces(before)
    merged = [*before, *arguments]
    context = command.make_context("tune", list(merged))
    return _without_secrets(merged), dict(context.params)


def check_begun_here(arguments: Sequence[str], folder: Path) -> None:
    """Refuse a run that no command line has begun: its options are in a program.

    Raises: UsageError.
    """
    if not arguments:
        raise UsageError(
            f"{folder} was begun by a Python program, whose options are not kept",
            "go on there, with the same TuningOptions and is_resumed=True",
        )


def _refuse_changes(arguments: Sequence[str], secrets: set[str]) -> None:
    """Refuse options that would mix measurements made under other conditions."""
    before = ""
    for argument in arguments:
        name = argument.partition("=")[0]
        is_secret = before == "--engine-arg" and name in secrets
        if name.startswith("-") and name not in _MAY_CHANGE:
            raise UsageError(
                f"{name} cannot change when a run is resumed",
                "only --budget, -o and --storage can; start a new run for the rest",
            )
        if before == "--engine-arg" and not is_secret:
            raise UsageError(
                f"--engine-arg {name} cannot change when a run is resumed", "start a new run"
            )
        before = argument


def _without_traces(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --trace, which is repeatable: new files replace the old."""
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--trace":
            kept.pop()
        elif not argument.startswith("--trace="):
            kept.append(argument)
    return kept


def _drop_redacted(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for argument in arguments:
        if argument.endswith(f"={REDACTED}"):
            if kept and kept[-1] == "--engine-arg":
                kept.pop()
            continue
        kept.append(argument)
    return kept


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments fit for a file: no secrets, nothing that holds for once only."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        name = argument.partition("=")[0]
        if skip or name in _NOT_STORED:
            skip = name in _NOT_STORED and "=" not in argument and not skip
            continue
        if kept and kept[-1] == "--engine-arg":
            argument = shown_argument(argument)  # noqa: PLW2901 - the shown form replaces it
        elif argument.startswith("--engine-arg="):
            argument = "--engine-arg=" + shown_argument(argument.partition("=")[2])  # noqa: PLW2901
        url = argument.removeprefix("--storage=")
        if "@" in url and (kept[-1:] == ["--storage"] or url != argument):
            # The login of a database; the redacted form is one word, so that it is missed.
            argument = f"--storage={REDACTED}"  # noqa: PLW2901 - the shown form replaces it
            kept = kept[:-1] if kept[-1:] == ["--storage"] else kept
        kept.append(argument)
    return kept


def with_tuning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fill what the command line leaves open: from the tuning profile, then by default."""
    from tuner.cli.options import LADDER, SLO

    filled = dict(options)
    if options["tuning"]:
        profile = read_tuning(_tuning_path(options["tuning"]))
        filled["objective"] = options["objective"] or profile.objective
        slos = [SLO.convert(text, None, None) for text in profile.slos]
        filled["slo"] = options["slo"] or tuple(slos)
        if profile.max_num_seqs and not options["max_num_seqs"]:
            filled["max_num_seqs"] = LADDER.convert(profile.max_num_seqs, None, None)
    filled["objective"] = filled["objective"] or "balanced"
    return filled


def _tuning_path(name: str) -> Path:
    """Return the file of a tuning profile, by path or by the name of a bundled one."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    found = bundled("profiles") / f"{name}.yaml"
    if not found.is_file():
        found_there = bundled("profiles").glob("*.yaml")
        known = sorted(p.stem for p in found_there if "." not in p.stem)
        raise UsageError(
            f"--tuning {name} is not known, expected {' or '.join(known)} or a YAML file",
            "name one of them, or a path that ends in .yaml",
        )
    return found
