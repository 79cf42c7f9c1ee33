"""The pictures of the README, drawn from what was measured and kept; nothing is measured here.

    python tests/benchmarks/pictures.py [-o examples/pictures]

`terminal.svg` shows `results/terminal.txt`, what one run wrote to the terminal; `ladder.svg`
the run in `examples/demo/run`; `restarts.svg` the wall times in `results/auto_cost*.json`;
`step_model.svg` what the profile of 8B on an H200 says of batches, and how far that is open.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tuner.engine.protocol import Batch
from tuner.shadow.profiles import read_profile
from tuner.shadow.step_model import StepModel

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PICTURES = ROOT / "examples" / "pictures"
COMMAND = (
    "tune --trace traces/translation.jsonl --config examples/demo/current.yaml "
    "--budget 105s -o best.yaml"
)
COLUMNS = 112
"""Columns of the terminal: ours, the longest that can be read in a page's width."""
LIVE, SHADOW, RESTART, INK, FAINT = "#2166ac", "#92c5de", "#b2182b", "#222222", "#dddddd"


# The terminal


def terminal() -> str:
    """Return the log of a run as it looked."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        highlight=False,
        color_system="truecolor",
    )
    console.print(Text(f"$ {COMMAND}", style="bold"), no_wrap=True, overflow="ellipsis")
    for line in (RESULTS / "terminal.txt").read_text(encoding="utf-8").splitlines():
        styles = {"trial": "cyan", "change": "bold green", "keep": "bold green"}
        styles |= {"caveat:": "yellow", "warning": "yellow"}
        style = styles.get(line.split(" ")[0], "")
        console.print(Text(line, style=style), no_wrap=True, overflow="ellipsis")
    # Without the fonts that rich would have a browser fetch from elsewhere.
    local = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="tune", code_format=local, unique_id="tune")


# The charts


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of a chart with its two logarithmic axes.

    Units: places in pixels, the ranges in what is drawn.
    """

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """Return the place of a value across."""
        return self.left + self.width * _share(value, self.x_range)

    def y(self, value: float) -> float:
        """Return the place of a value downwards."""
        return self.top + self.height * (1 - _share(value, self.y_range))


def _share(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return math.log(value / low) / math.log(high / low)


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def _line(points: Sequence[tuple[float, float]], color: str, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" {more}/>'


def _picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *parts, "</svg>", ""])


Points = Sequence[tuple[int, float]]
_MIDDLE = 'text-anchor="middle"'


def _panel(area: Area, title: str, ticks: Sequence[float], shadow: Points, live: Points) -> str:
    """Return one curve over the caps: predicted as a line, each live replay as a dot."""
    bottom = area.top + area.height
    parts = [_text(area.left, area.top - 12, title, 'font-weight="bold"')]
    for tick in ticks:
        y = area.y(tick)
        parts.append(_line([(area.left, y), (area.left + area.width, y)], FAINT))
        parts.append(_text(area.left - 6, y + 4, f"{tick:g}", 'text-anchor="end"'))
    parts += [_text(area.x(cap), bottom + 18, str(cap), _MIDDLE) for cap, _ in shadow]
    parts.append(_line([(area.x(c), area.y(v)) for c, v in shadow], SHADOW, 'stroke-width="2"'))
    for points, look in (
        (shadow, f'r="4" fill="#ffffff" stroke="{SHADOW}" stroke-width="2"'),
        (live, f'r="3.5" fill="{LIVE}" fill-opacity="0.8"'),
    ):
        places = [(area.x(cap), area.y(value)) for cap, value in points]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}/>' for x, y in places]
    return "\n".join(parts)


def _value(trial: dict[str, Any], metric: str) -> float:
    measured = trial["measurement"]
    return float(measured["e2e_s"]["p95"] if metric == "e2e_p95" else measured[metric])


def ladder() -> str:
    """Return what the demo run found at each cap of the ladder: rate and tail latency."""
    run = json.loads((ROOT / "examples" / "demo" / "run" / "result.json").read_text())
    current = run["baseline"]["max_num_batched_tokens"]
    rungs = {t["max_num_seqs"]: t for t in run["trials"] if t["engine"] == "shadow"}
    rungs |= {
        t["max_num_seqs"]: t
        for t in run["trials"]
        if t["engine"] == "shadow" and t["max_num_batched_tokens"] == current
    }
    raced = [t for t in run["trials"] if t["phase"] == "race"]
    parts = []
    for metric, title, left, y_range, ticks in (
        ("requests_per_s", "requests per second", 60, (2.0, 50.0), (2, 5, 10, 20, 50)),
        ("e2e_p95", "E2E p95 in seconds", 440, (2.0, 100.0), (2, 5, 10, 20, 50, 100)),
    ):
        area = Area(left, 50, 310, 210, (0.9, 140.0), y_range)
        shadow = [(cap, _value(rungs[cap], metric)) for cap in sorted(rungs)]
        shadow = [(cap, value) for cap, value in shadow if cap in run["ladder"]]
        live = [(t["max_num_seqs"], _value(t, metric)) for t in raced]
        parts.append(_panel(area, title, ticks, shadow, live))
        parts.append(_text(area.left + area.width / 2, 300, "max_num_seqs", _MIDDLE))
    parts += [
        f'<circle cx="70" cy="328" r="4" fill="#ffffff" stroke="{SHADOW}" stroke-width="2"/>',
        _text(82, 332, f"predicted by the shadow ({current:,} tokens a step)"),
        f'<circle cx="450" cy="328" r="3.5" fill="{LIVE}"/>',
        _text(462, 332, "measured live, one dot a replay (the race)"),
    ]
    return _picture(780, 350, "The ladder of max_num_seqs in examples/demo/run", parts)


@dataclass(frozen=True, slots=True)
class Bar:
    """How long one way took. Units: seconds; others are those of further runs."""

    name: str
    value_s: float
    others_s: tuple[float, ...]
    color: str


def _kept(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((RESULTS / f"auto_cost{name}.json").read_text())
    return kept


def bars() -> list[Bar]:
    """Return the three ways, measured in one hour, with restarts in other hours."""
    one_hour = _kept("_worth")
    settings = one_hour["settings"]
    restarts = [
        *(settings * kept["restart_each_s"] for kept in (_kept(""), _kept("_again"))),
        *(
            settings * _kept(name)["restarts_same_hour"]["each_s"]
            for name in ("_rounds", "_blocks", "_spare", "_twice")
        ),
    ]
    sweep_s = settings * one_hour["restarts_same_hour"]["each_s"]
    return [
        Bar("restart sweep, 60 starts", sweep_s, tuple(restarts), RESTART),
        *(
            Bar(name, float(median(took_s)), took_s, LIVE)
            for name, way in (("tune", "auto"), ("tune --profile", "auto with its profile"))
            for took_s in [tuple(run["wall_s"] for run in one_hour[way])]
        ),
    ]


def restarts() -> str:
    """Return what 60 settings cost, by restarts and by this tool, as bars."""
    left, width, top, step = 190, 470, 46, 46
    every = bars()
    longest = max(max((bar.value_s, *bar.others_s)) for bar in every)
    title = "Seconds to choose among 60 settings"
    parts = [_text(20, 24, title, 'font-weight="bold"')]
    for at, bar in enumerate(every):
        y, ends = top + at * step, (bar.value_s, *bar.others_s)
        long = width * bar.value_s / longest
        low, high = (left + width * end / longest for end in (min(ends), max(ends)))
        parts += [
            _text(left - 10, y + 18, bar.name, 'text-anchor="end"'),
            f'<rect x="{left}" y="{y}" width="{long:.1f}" height="26" fill="{bar.color}"/>',
            _line([(low, y + 13), (high, y + 13)], INK, 'stroke-width="2"'),
            *(_line([(x, y + 8), (x, y + 18)], INK, 'stroke-width="2"') for x in (low, high)),
            _text(
                high + 10,
                y + 18,
                f"{bar.value_s:,.0f}"
                + (f" ({min(ends):,.0f} … {max(ends):,.0f})" if bar.others_s else ""),
            ),
        ]
    parts.append(
        _text(20, top + len(every) * step + 14, _RESTARTS_NOTE, 'font-size="11" fill="#555555"')
    )
    return _picture(850, top + len(every) * step + 30, "What 60 settings cost", parts)


_RESTARTS_NOTE = (
    "Bars: one hour, of two runs and two restarts. Whiskers: least and greatest, of the sweep "
    "in six hours. Two CPU cores, vLLM 0.32.0."
)


H200 = ROOT / "profiles" / "gpu" / "meta-llama-3.1-8b.1xh200_sxm.yaml"
CONTEXT = 1000
"""Tokens that each sequence of the picture attends to: ours, a chat's."""
MODELS = 200
"""Models that are drawn for the band: as many as a decision takes."""


def step_model() -> str:
    """Return how long the H200's profile says that batches take, by all their tokens."""
    profile = read_profile(H200)
    if profile.uncertainty is None:
        raise SystemExit(f"{H200} does not say how far it is open")
    rng = np.random.default_rng(0)
    ways = 2 + len(profile.uncertainty.table)
    models = [
        profile.uncertainty.moved(profile.step_model, rng.standard_normal(ways))
        for _ in range(MODELS)
    ]
    sizes = sorted({int(n) for n in np.geomspace(1, 4096, 240)} | {512, 513, 1024})
    parts = []
    for left, title, seqs, x_range in (
        (60, "decodes alone", None, (1, 1024)),
        (440, "a chunk of a prompt beside 16 decodes", 16, (17, 4096)),
    ):
        shown = [n for n in sizes if x_range[0] <= n <= x_range[1]]
        batches = [_batch(n, n if seqs is None else seqs) for n in shown]
        area = Area(left, 50, 310, 230, x_range, (1.0, 200.0))
        parts.append(_steps(area, title, shown, [profile.step_model, *models], batches))
    words = f"8B on an H200, derived; contexts of {CONTEXT:,} tokens"
    parts += [
        f'<rect x="60" y="342" width="16" height="8" fill="{SHADOW}" fill-opacity="0.5"/>',
        _text(82, 350, "the device's step, and where nine in ten possible models have it"),
        _line([(500, 346), (516, 346)], RESTART, 'stroke-width="2" stroke-dasharray="4 3"'),
        _text(522, 350, "what launching it takes the host"),
    ]
    return _picture(780, 365, f"Milliseconds of a step: {words}", parts)


def _batch(tokens: int, seqs: int) -> Batch:
    """Return a batch of so many tokens, those that decode no prompt's."""
    prefill, context = tokens - seqs, seqs * CONTEXT
    pairs = prefill * (prefill + 1) // 2
    return Batch(seqs, prefill, int(prefill > 0), context, pairs, 0, 0)


def _steps(
    area: Area, title: str, sizes: Sequence[int], models: list[StepModel], batches: list[Batch]
) -> str:
    """Return one curve over the tokens of a batch; the first model is the stated one."""
    bottom = area.top + area.height
    parts = [_text(area.left, area.top - 12, f"{title}: ms", 'font-weight="bold"')]
    for tick in (1, 2, 5, 10, 20, 50, 100, 200):
        y = area.y(tick)
        parts.append(_line([(area.left, y), (area.left + area.width, y)], FAINT))
        parts.append(_text(area.left - 6, y + 4, f"{tick:g}", 'text-anchor="end"'))
    first, last = area.x_range
    ticks = [n for n in (1, 4, 16, 64, 256, 1024, 4096) if first <= n <= last]
    parts += [_text(area.x(n), bottom + 18, f"{n:,}", _MIDDLE) for n in ticks]
    times_ms = 1e3 * np.array([[m.step_s(batch) for batch in batches] for m in models])
    low, high = np.quantile(times_ms[1:], (0.05, 0.95), axis=0)
    across = [area.x(n) for n in sizes]
    edge = [*zip(across, high, strict=True), *zip(across[::-1], low[::-1], strict=True)]
    band = " ".join(f"{x:.1f},{area.y(v):.1f}" for x, v in edge)
    parts.append(f'<polygon points="{band}" fill="{SHADOW}" fill-opacity="0.5"/>')
    launch_ms = [1e3 * models[0].launch_s(batch) for batch in batches]
    for values, look in (
        (times_ms[0].tolist(), (LIVE, 'stroke-width="2"')),
        (launch_ms, (RESTART, 'stroke-width="2" stroke-dasharray="4 3"')),
    ):
        line = [(x, area.y(v)) for x, v in zip(across, values, strict=True)]
        parts.append(_line(line, *look))
    parts.append(_text(area.left + area.width / 2, bottom + 36, "tokens of the batch", _MIDDLE))
    return "\n".join(parts)


DRAWN = {
    "terminal.svg": terminal,
    "ladder.svg": ladder,
    "restarts.svg": restarts,
    "step_model.svg": step_model,
}


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PICTURES)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
