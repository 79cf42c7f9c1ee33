"""Sample traces made from seeds: a translation service, bursty chat, shared prefixes.

They exist so that a first run needs no recording and tests have known traffic. They are
invented from start to end and never stand for production data. The files in traces/ are what
`python tests/support/make_samples.py DIR` writes with seed 0.

Shapes of the loads are ours, chosen for the bundled demo model at about 4 ms per output token:
the translation service keeps 2 to 20 requests in flight with peaks near 25.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tuner.stats import Floats, Ints
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import ReadNotes, Trace

_CLOCK_DECIMALS = 4
"""Ours: a tenth of a millisecond, finer than any step of an engine."""


def translation(seed: int = 0) -> Trace:
    """Return two minutes of a translation service: phrases and paragraphs, 10 to 200 tokens.

    Arrivals follow a slow wave from 6 to 54 requests/s with two short bursts of 70, and come
    more evenly than Poisson's, as from clients that each wait for their answer. A translation
    is about as long as its source, so outputs follow prompts.
    """
    rng = np.random.default_rng([seed, 1])
    due_s = _arrivals(rng, _translation_rate, duration_s=120.0, cv=0.5)
    n = due_s.size
    is_paragraph = rng.random(n) < 0.35
    prompt = np.where(is_paragraph, rng.lognormal(4.85, 0.25, n), rng.lognormal(3.7, 0.5, n))
    output = prompt * rng.lognormal(0.08, 0.18, n)
    return _trace("translation", due_s, _tokens(prompt, 10, 200), _tokens(output, 10, 200))


def _translation_rate(t_s: Floats) -> Floats:
    wave = 30.0 - 24.0 * np.cos(2 * math.pi * t_s / 60.0)
    in_burst = np.zeros(t_s.size, dtype=np.bool_)
    for start_s in (30.0, 88.5):
        in_burst |= (t_s >= start_s) & (t_s < start_s + 0.8)
    return np.where(in_burst, 70.0, wave)


def chat(seed: int = 0) -> Trace:
    """Return near three minutes of bursty chat: gamma arrivals (CV 2.5) with quiet periods.

    Eight requests/s over the whole; prompts of 50 to 1,500 tokens, answers of 20 to 400.
    """
    rng = np.random.default_rng([seed, 2])
    due_s = _arrivals(rng, _chat_rate, duration_s=180.0, cv=2.5)
    n = due_s.size
    prompt = _tokens(rng.lognormal(5.7, 0.8, n), 50, 1500)
    return _trace("chat", due_s, prompt, _tokens(rng.lognormal(4.6, 0.7, n), 20, 400))


def _chat_rate(t_s: Floats) -> Floats:
    return np.where(t_s % 30.0 < 20.0, 12.0, 0.0)


def shared_prefix(seed: int = 0) -> Trace:
    """Return two minutes of five assistants, each with its own long system prompt.

    Popularity falls as 1/rank. Hash ids in blocks of 128 tokens cover whole blocks only, so a
    system prompt is shared up to its last whole block; what a user adds is never shared.
    """
    rng = np.random.default_rng([seed, 3])
    block_size = 128
    system_blocks = np.array([6, 4, 9, 3, 12])
    popularity = 1 / np.arange(1, 6)
    due_s = _arrivals(rng, lambda t_s: np.full(t_s.size, 10.0), duration_s=120.0, cv=1.0)
    n = due_s.size
    assistant = rng.choice(5, size=n, p=popularity / popularity.sum())
    own = rng.lognormal(6.1, 0.7, n)
    prompt = _tokens(system_blocks[assistant] * block_size + own, 300, 2500)
    output = _tokens(rng.lognormal(3.9, 0.6, n), 10, 150)
    rows, unused = [], int(system_blocks.sum())
    starts = np.concatenate([[0], np.cumsum(system_blocks)])
    for which, tokens in zip(assistant.tolist(), prompt.tolist(), strict=True):
        whole, shared = tokens // block_size, int(system_blocks[which])
        fresh = whole - shared
        rows.append([*range(starts[which], starts[which + 1]), *range(unused, unused + fresh)])
        unused += fresh
    hashes = HashIds.from_rows(rows, block_size)
    return _trace("shared_prefix", due_s, prompt, output, hashes)


SAMPLES: Mapping[str, Callable[[int], Trace]] = {
    "translation": translation,
    "chat": chat,
    "shared_prefix": shared_prefix,
}
"""Every sample by the name of its file."""


def write_samples(folder: Path, seed: int = 0) -> list[Path]:
    """Write every sample as native JSON Lines and return the files' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in SAMPLES.items():
        path = folder / f"{name}.jsonl"
        write_trace(make(seed), path)
        paths.append(path)
    return paths


def _arrivals(
    rng: np.random.Generator,
    rate_per_s: Callable[[Floats], Floats],
    *,
    duration_s: float,
    cv: float,
) -> Floats:
    """Return arrivals of a varying rate: gamma gaps in operational time, then stretched.

    In operational time one request arrives per unit; the inverse of the cumulative rate maps
    it to seconds. cv is that of the gaps before stretching; 1 is Poisson.

    Source: inversion for non-stationary renewal processes, Gerhardt and Nelson (2009).
    """
    grid_s = np.linspace(0.0, duration_s, int(duration_s * 1000) + 1)
    rates = rate_per_s(grid_s[:-1])
    expected = np.concatenate([[0.0], np.cumsum(rates * np.diff(grid_s))])
    shape = 1 / cv**2
    operational = np.cumsum(rng.gamma(shape, 1 / shape, size=int(expected[-1] * 2) + 100))
    due_s: Floats = np.interp(operational[operational < expected[-1]], expected, grid_s)
    return due_s


def _tokens(lengths: Floats, low: int, high: int) -> Ints:
    return np.clip(np.rint(lengths), low, high).astype(np.int64)


def _trace(
    name: str, due_s: Floats, prompt: Ints, output: Ints, hashes: HashIds | None = None
) -> Trace:
    return Trace(
        due_s=np.round(due_s - due_s[0], _CLOCK_DECIMALS),
        prompt_tokens=prompt,
        output_tokens=output,
        hashes=hashes,
        source=f"{name}.jsonl",
        notes=ReadNotes(rows=due_s.size),
    )


def main(arguments: list[str]) -> int:
    """Write the samples into the folder that was named; return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python tests/support/make_samples.py DIR\n")
        return 2
    for path in write_samples(Path(arguments[0])):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
