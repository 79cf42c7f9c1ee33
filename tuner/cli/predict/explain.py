"""`tune explain`: what each knob does, which vLLM has it, and when it is read."""

from __future__ import annotations

import shutil
import textwrap

from tuner.cli.console import show_result
from tuner.engine.compat import serve
from tuner.run.knobs.known import KNOBS, Knob, knob_named


def run_explain(name: str | None) -> int:
    """Print what a knob does, or all of them. Raises: UsageError for an unknown name."""
    knobs = [knob_named(name)] if name else [*KNOBS.values()]
    lines = [line for knob in knobs for line in _lines(knob, is_whole=name is not None)]
    show_result(None, lines, as_json=False)
    return 0


def _lines(knob: Knob, *, is_whole: bool) -> list[str]:
    """Return what is known of a knob; vLLM, which takes seconds, is asked of one alone."""
    told = [f"{knob.name} (--{knob.key}; {knob.since_text})", *_wrapped(knob.text)]
    told += _wrapped(f"Read {knob.acts}.")
    if is_whole and serve.installed_vllm()[0]:
        text = serve.flag_help(knob.key)
        version = serve.vllm_version()
        told += _wrapped(
            f"vLLM {version}: {text}" if text else f"vLLM {version} has no --{knob.key}."
        )
    return told


def _wrapped(text: str) -> list[str]:
    width = min(96, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
