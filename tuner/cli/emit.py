"""`tune emit`: write a run's recommendation as what a deployment takes, or into its file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.console import say
from tuner.cli.options import Params, path_of
from tuner.emit.names import Format, PatchKind
from tuner.emit.recommendation import Recommendation
from tuner.emit.registry import emit, emit_patch, merge_into
from tuner.emit.sources import read_source
from tuner.emit.target import Names
from tuner.engine.serve_config import human_integer
from tuner.errors import UsageError
from tuner.files import ExpectedText, is_no_file, write_atomic
from tuner.redact import has_secrets


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """What is written of which recommendation, and where.

    `source` is a run directory or a YAML file that tune wrote. `output` is None for standard
    output, or with `merge`, the file to set both limits in, for that file itself. With `patch`
    only what changes is written. `model` goes before the model that was tuned.
    """

    source: Path
    format: Format
    output: Path | None
    merge: Path | None
    patch: PatchKind | None
    names: Names
    model: str | None
    allow_unauthenticated: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        output, patch = path_of(params["output"]), params["patch"]
        options = cls(
            source=Path(params["source"]),
            format=Format(params["emit_format"]),
            output=output,
            merge=path_of(params["merge"]),
            patch=PatchKind(patch) if patch else None,
            names=Names(file_name(output), params["name"] or "", params["container"] or ""),
            model=params["model"],
            allow_unauthenticated=params["allow_unauthenticated"],
        )
        check_ending(options.format, output)
        return options


def run_emit(options: EmitOptions) -> int:
    """Write the file, the patch or the change. Raises: UsageError."""
    rec = read_source(options.source)
    if not rec.facts:
        say(f"note: {options.source} says nothing of a tuning: its limits go as they are")
    if options.model:
        rec = rec.with_model(options.model)
    if options.patch is not None:
        _patch(options, rec, options.patch)
    elif options.merge is not None:
        _merge(options, rec, options.merge)
    else:
        rec = replace(rec, allow_unauthenticated=options.allow_unauthenticated)
        text = emit(options.format, rec, options.names)
        _put(options.output, text, secret=holds_secrets(options.format, rec))
    return 0


def file_name(output: Path | None) -> str:
    """Return the name by which a file says how it is used, empty for the usual one."""
    return "" if output is None or is_no_file(output) else output.name


def check_ending(chosen: Format, output: Path | None) -> None:
    """Refuse a file name that vLLM would refuse. Raises: UsageError."""
    if chosen not in (Format.VLLM, Format.VLLM_EXACT) or output is None:
        return
    if output.suffix not in {".yaml", ".yml"} and not is_no_file(output):
        raise UsageError(
            f"-o {output} must end in .yaml or .yml, got {output.suffix or 'no extension'}",
            "vLLM itself refuses a configuration under another name",
        )


def holds_secrets(chosen: Format, rec: Recommendation) -> bool:
    """Whether the file of a format holds the secrets of what is recommended."""
    return chosen in (Format.VLLM, Format.VLLM_EXACT) and has_secrets(rec.values)


# Settings in whatever a deployment writes them: flags, keys, camel case.
_WHOLE_PROMPTS = re.compile(
    r"no-enable-chunked-?prefill(?!\W*false)|enable-?chunked-?prefill\W{1,4}false",
    re.IGNORECASE,
)
_LONGEST = re.compile(r"max-?model-?len\W{1,6}(\d[\d-]*[km]?)\b", re.IGNORECASE)


def _doubts(path: Path | None, rec: Recommendation) -> Iterator[str]:
    """Yield why a file may not be one for these limits.

    It may serve another model, where the tuned one has no name in it, or in a way in which
    vLLM does not start with them.

    Source: vllm/config/scheduler.py, SchedulerConfig.verify_max_model_len.
    """
    name = re.escape(rec.model.rstrip("/").rpartition("/")[2])
    text = "" if path is None else path.read_text(encoding="utf-8")
    if not re.search(rf"(?<![\w.-]){name}(?![\w.-])", text, re.IGNORECASE):
        yield (
            f"{path} names {rec.model} nowhere, for which these limits were tuned: another "
            "model has others; --model says what it is called there"
        )
    hyphened, budget = text.replace("_", "-"), rec.limits.max_num_batched_tokens
    longest = [
        human_integer(found.replace("-", "")) or 0 for found in _LONGEST.findall(hyphened)
    ]
    if _WHOLE_PROMPTS.search(hyphened) and max(longest, default=budget + 1) > budget:
        yield (
            f"{path} switches chunked prefill off: vLLM then refuses to start with a "
            f"max-num-batched-tokens of {budget} that is less than max-model-len; leave it on, "
            "or tune with that configuration"
        )


def _put(output: Path | None, text: str, *, secret: bool) -> None:
    if output is not None:
        write_atomic(output, text, secret=secret)
    else:
        sys.stdout.write(text)


def _patch(options: EmitOptions, rec: Recommendation, kind: PatchKind) -> None:
    """Write the patch of the object in the file of --merge. Raises: UsageError."""
    patched = emit_patch(options.merge, options.format, rec, options.names, kind)
    for line in (*patched.notes, *_doubts(options.merge, rec)):
        say(f"note: {line}")
    _put(options.output, patched.text, secret=False)


def _merge(options: EmitOptions, rec: Recommendation, path: Path) -> None:
    """Show the difference and put the file in its place, or nothing if there is none."""
    merged = merge_into(path, options.format, rec, options.names)
    for line in (*merged.notes, *_doubts(path, rec)):
        say(f"note: {line}")
    if merged.diff:
        say(merged.diff.rstrip("\n"))
    else:
        say(f"{path} has these values already")
    if options.output is not None:
        write_atomic(options.output, merged.after, secret=merged.has_secrets, source=path)
    elif merged.after != merged.before:
        write_atomic(path, merged.after, secret=False, expected=ExpectedText(merged.before))
