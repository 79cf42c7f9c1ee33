"""The page itself: sections in their order, put into one file that needs nothing else.

The template escapes all text. Scripts are allowed by their hashes and nothing may be loaded, so
that a page that was tampered with shows less and reaches nobody.

What draws is plotly.js, its basic bundle, byte for byte as the npm package
plotly.js-basic-dist-min 4.1.1 has it: lines, points and bars are all that a page has. Plotly's
Python package would bring the whole of it, which makes each page four times as large, beside
70 MB that nothing here uses.

Source: Content Security Policy Level 3, W3C, hash sources.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from tuner.files import write_atomic
from tuner.report.advice import clients, variants
from tuner.report.agreement import agreement
from tuner.report.certainty import certainty
from tuner.report.field_strategies import strategies
from tuner.report.gain import gain
from tuner.report.knobs import knobs
from tuner.report.over_time import over_time
from tuner.report.parts import Section
from tuner.report.run_files import RunFiles, read_run
from tuner.report.summary import answer, caveats, headline, provenance, trace_facts
from tuner.report.sweep import sweep
from tuner.report.tradeoff import tradeoff
from tuner.report.trials import trials
from tuner.run.directory import folder_of_run

REPORT_FILE = "report.html"
_SECTIONS: Final[Sequence[Callable[[RunFiles], Section | None]]] = (
    *(answer, gain, certainty, tradeoff, knobs, sweep, over_time, agreement),
    *(variants, strategies, clients, trace_facts, trials, caveats, provenance),
)


def sections_of(run: RunFiles) -> list[Section]:
    """Return the sections that the run has, in the page's order, the answer first."""
    return [section for make in _SECTIONS if (section := make(run))]


def report_of(path: Path) -> str:
    """Return the page of a run directory as the text of one HTML file.

    Raises: UsageError if the directory holds no result, or a damaged one.
    """
    run = read_run(path)
    made = run.result.provenance
    eyebrow = f"{made.model} · run {run.name} · {made.made_at[:10]}"
    return page_of(sections_of(run), headline(run), eyebrow, run.name)


def write_report(run_dir: Path, target: Path | None = None) -> Path:
    """Write the page of a run, to `target` or else into the run, and return where it is.

    Raises: UsageError.
    """
    folder = folder_of_run(run_dir)
    written = target or folder / REPORT_FILE
    write_atomic(written, report_of(folder))
    return written


def page_of(sections: Sequence[Section], headline: str, eyebrow: str, name: str) -> str:
    """Return one HTML file of the sections, the answer first; `name` stands in its title."""
    library, scripts = _template_text("plotly-basic.min.js"), [_template_text("page.js")]
    if any(section.explorer for section in sections):
        scripts.append(_template_text("explorer.js"))
    environment = Environment(
        loader=PackageLoader("tuner.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        headline=headline,
        eyebrow=eyebrow,
        name=name,
        sections=sections,
        specs=[plot.spec for section in sections for plot in section.plots],
        style=_template_text("style.css"),
        library=library,
        scripts=scripts,
        script_hashes=[_hash(text) for text in (library, *scripts)],
    )


def _template_text(name: str) -> str:
    return (files("tuner.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return a script's hash as a content security policy writes it."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
