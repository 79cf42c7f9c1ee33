"""`tune emit`: write a run's recommendation as what a deployment takes, or into its file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.emit.names import Format, PatchKind
from tuner.errors import UsageError


def run_emit(options: Mapping[str, Any]) -> int:
    """Write the file, the patch or the change. Raises: UsageError."""
    from tuner.emit.registry import emit as whole
    from tuner.emit.sources import read_source
    from tuner.emit.target import Names

    chosen, output = Format(options["chosen"]), options["output"]
    check_ending(chosen, output)
    rec = read_source(Path(options["source"]))
    if options["model"]:
        rec = rec.with_model(options["model"])
    file = Path(output).name if output else ""
    names = Names(file, options["name"] or "", options["container"] or "")
    if options["patch"]:
        return _patch(options, chosen, rec, names)
    if options["merge"]:
        return _merge(options, chosen, rec, names)
    if options["allow_unauthenticated"]:
        rec = replace(rec, allow_unauthenticated=True)
    _put(output, whole(chosen, rec, names), secret=holds_secrets(chosen, rec))
    return 0


def check_ending(chosen: Format, output: str | None) -> None:
    """Refuse a file name that vLLM would refuse. Raises: UsageError."""
    if chosen in (Format.VLLM, Format.VLLM_EXACT) and output:
        suffix = Path(output).suffix
        if suffix not in {".yaml", ".yml"} and not output.startswith("/dev/"):
            raise UsageError(
                f"-o {output} must end in .yaml or .yml, got {suffix or 'no extension'}",
                "vLLM itself refuses a configuration under another name",
            )


def holds_secrets(chosen: Format, rec: Any) -> bool:
    """Whether the file of a format holds the secrets of what is recommended."""
    from tuner.redact import has_secrets

    return chosen in (Format.VLLM, Format.VLLM_EXACT) and has_secrets(rec.values)


def _put(output: str | None, text: str, *, secret: bool) -> None:
    from tuner.files import write_atomic

    if output:
        write_atomic(Path(output), text, secret=secret)
    else:
        sys.stdout.write(text)


def _patch(options: Mapping[str, Any], chosen: Format, rec: Any, names: Any) -> int:
    """Write the patch of the object in the file of --merge. Raises: UsageError."""
    from tuner.cli.console import say
    from tuner.emit.registry import emit_patch

    path = Path(options["merge"]) if options["merge"] else None
    patched = emit_patch(path, chosen, rec, names, PatchKind(options["patch"]))
    for line in patched.notes:
        say(f"note: {line}")
    _put(options["output"], patched.text, secret=False)
    return 0


def _merge(options: Mapping[str, Any], chosen: Format, rec: Any, names: Any) -> int:
    """Show the difference and put the file in its place, or nothing if there is none."""
    from tuner.cli.console import say
    from tuner.emit.registry import merge_into
    from tuner.files import ExpectedText, write_atomic

    path = Path(options["merge"])
    merged = merge_into(path, chosen, rec, names)
    for line in merged.notes:
        say(f"note: {line}")
    if merged.diff:
        say(merged.diff.rstrip("\n"))
    else:
        say(f"{path} has these values already")
    if options["output"]:
        write_atomic(Path(options["output"]), merged.after, secret=merged.has_secrets)
    elif merged.after != merged.before:
        write_atomic(path, merged.after, secret=False, expected=ExpectedText(merged.before))
    return 0
