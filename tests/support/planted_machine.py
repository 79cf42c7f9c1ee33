"""A machine of which every step is known, and the moods that its speed wanders in.

What a step takes is a formula that the tool's own step model does not contain: a roofline in
all tokens of a step, padding, eager launches, and attention that waits for the longest context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from tuner.engine.protocol import Batch
from tuner.engine.shape import NO_GRAPHS, Graphs

DRAFT_RATIO: Final = 0.05
"""What drafting a token takes, as a share of what is fixed in a step: ours, a head's layer."""


class StepFormula(Protocol):
    """What says how long a batch takes, apart into what is fixed and what grows with it."""

    @property
    def graphs(self) -> Graphs | None:
        """What was captured, None where it is what vLLM chooses for the limits of a start."""

    @property
    def tidy_s(self) -> float:
        """Seconds of a turn that completes no batch."""

    def parts_s(self, batch: Batch, longest: int, graphs: Graphs) -> tuple[float, float]:
        """Return the seconds that every batch takes, and those that this one adds.

        `longest` is the longest context of its decodes, in tokens.
        """

    def launch_s(self, batch: Batch, graphs: Graphs) -> float:
        """Return the seconds of a host that launches a batch while the device computes."""


@dataclass(frozen=True, slots=True)
class Host:
    """What launching a batch takes a host that does so while the device computes another.

    `full_s` is that of a graph, `mixed_s` that of one with a prompt, which leaves attention
    out, and `eager_s` and `eager_token_s` that of none.

    Units: seconds.
    """

    full_s: float
    mixed_s: float
    eager_s: float
    eager_token_s: float

    def launch_s(self, batch: Batch, graphs: Graphs) -> float:
        """Return what launching a batch takes."""
        has_prompt = batch.prefill_tokens > 0
        if graphs.padded(batch.tokens, has_prompt=has_prompt) is None:
            return self.eager_s + self.eager_token_s * batch.tokens
        return self.mixed_s if has_prompt else self.full_s


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of which every step is known: a roofline in all the tokens of a step.

    `memory_s` is the time to read the weights, below which no step gets; `token_s` a token's
    arithmetic, and the two pass into each other smoothly. A batch is padded to the size of its
    graph; without one it is launched eagerly, which takes `eager_s` longer. Decodes attend to
    `context_s` a token, and wait for the longest of them `uneven_s` for each token by which it
    is longer than their mean; beside a prompt that takes `beside_times` as long. Prompts take
    `pair_s` for each pair of tokens, and the host `host_s` a step; each draft of a sequence
    DRAFT_RATIO of what is fixed. With a `host` that launches
    ahead a step takes neither `host_s` nor `eager_s`, but what launching does where that is
    longer. None of it is fitted to a device: ours, of the order of an H100 with a model of 8
    or 70 billion weights, and of a server's CPU with a small one. On an RTX PRO 6000 the wait
    was 5 to 7 times `context_s` whatever the number of decodes, beside a prompt all took 1.6
    times as long, and eager launches cost 0.3 to 0.7 ms.

    Source: LLMServingSim, profiler/perf/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1, skew.csv,
        attention.csv and step.csv.
    Units: seconds; `blocks_per_token` how many KV blocks a token of the budget costs at start.
    """

    name: str
    host_s: float
    memory_s: float
    token_s: float
    context_s: float
    uneven_s: float
    pair_s: float
    eager_s: float
    beside_times: float
    graphs: Graphs | None
    start_s: float
    blocks_per_token: float = 1 / 64
    sharpness: float = 4.0
    tidy_s: float = 0.0002
    host: Host | None = None

    def parts_s(self, batch: Batch, longest: int, graphs: Graphs) -> tuple[float, float]:
        """Return the seconds that every batch takes, and those that this one adds."""
        padded = graphs.padded(batch.tokens, has_prompt=batch.prefill_tokens > 0)
        tokens, fixed_s = padded or batch.tokens, self.memory_s
        if self.host is None:
            fixed_s += self.host_s + self.eager_s * (padded is None)
        if batch.draft_tokens:
            fixed_s *= 1 + DRAFT_RATIO * batch.draft_tokens / batch.decode_seqs
        # The p-norm of both bounds, less the one of them that is fixed.
        bound = self.token_s * tokens / self.memory_s
        over = self.memory_s * ((1.0 + bound**self.sharpness) ** (1 / self.sharpness) - 1.0)
        grows_s = over + self.pair_s * batch.prefill_context_tokens
        if batch.decode_seqs:
            mean = batch.decode_context_tokens / batch.decode_seqs
            decodes_s = self.context_s * batch.decode_context_tokens
            decodes_s += self.uneven_s * (longest - mean)
            grows_s += decodes_s * (self.beside_times if batch.prefill_tokens else 1.0)
        return fixed_s, grows_s

    def launch_s(self, batch: Batch, graphs: Graphs) -> float:
        """Return the seconds of a host that launches ahead."""
        return 0.0 if self.host is None else self.host.launch_s(batch, graphs)


_SYNCHRONOUS: Final[Mapping[str, Machine]] = {
    machine.name: machine
    for machine in (
        Machine(
            name="gpu-8b",
            host_s=0.0025,
            memory_s=0.0065,
            token_s=0.0065 / 150,
            context_s=4e-8,
            uneven_s=2.8e-7,
            pair_s=6e-10,
            eager_s=0.001,
            beside_times=1.8,
            graphs=None,
            start_s=45.0,
        ),
        Machine(
            name="gpu-70b",
            host_s=0.004,
            memory_s=0.022,
            token_s=0.022 / 170,
            context_s=1e-7,
            uneven_s=7e-7,
            pair_s=2e-9,
            eager_s=0.002,
            beside_times=1.8,
            graphs=Graphs((1, 2, 4, *range(8, 65, 8)), has_mixed=False),
            start_s=80.0,
        ),
        Machine(
            name="cpu",
            host_s=0.002,
            memory_s=0.012,
            token_s=0.012 / 20,
            context_s=4e-7,
            uneven_s=2e-6,
            pair_s=1e-8,
            eager_s=0.0,
            beside_times=1.0,
            graphs=NO_GRAPHS,
            start_s=20.0,
        ),
    )
}
# What launching takes goes with the layers: of the order seen on an H200, which took 2, 8 and
# 13 ms for 28 of them (tests/benchmarks/results/gpu_h200).
_HOSTS: Final[Mapping[str, Host]] = {
    "gpu-8b": Host(full_s=0.002, mixed_s=0.009, eager_s=0.015, eager_token_s=1e-6),
    "gpu-70b": Host(full_s=0.004, mixed_s=0.022, eager_s=0.036, eager_token_s=1e-6),
}
ASYNCHRONOUS: Final = "-async"
MACHINES: Final[Mapping[str, Machine]] = {
    **_SYNCHRONOUS,
    **{
        name + ASYNCHRONOUS: replace(_SYNCHRONOUS[name], name=name + ASYNCHRONOUS, host=host)
        for name, host in _HOSTS.items()
    },
}
"""Machines by their name; one that ends so launches the next batch while one is computed."""


@dataclass(frozen=True, slots=True)
class MoodSizes:
    """How far a machine's speed wanders, as standard deviations of its logarithm.

    `fixed_ratio` is the drift of what every step takes, `grows_ratio` of what grows with the
    batch, each with a fast and a slow part of the lengths `drift_s`; `noise_ratio` the noise of
    a step and `start_ratio` what an engine keeps from its start to its end. A burst of other
    work comes `bursts_per_s`, lasts for `burst_s` and slows by `burst_ratio`; of the steps
    `stalls` are `stall_times` as long.
    """

    fixed_ratio: float = 0.0
    grows_ratio: float = 0.0
    noise_ratio: float = 0.0
    start_ratio: float = 0.0
    bursts_per_s: float = 0.0
    stalls: float = 0.0
    drift_s: tuple[float, float] = (4.0, 90.0)
    burst_s: tuple[float, float] = (1.0, 8.0)
    burst_ratio: tuple[float, float] = (0.2, 0.6)
    stall_times: tuple[float, float] = (3.0, 8.0)

    def mean_ratios(self) -> tuple[float, float]:
        """Return how much longer than without a mood both parts of a step take in the mean."""
        burst = self.bursts_per_s * sum(self.burst_s) / 2 * sum(self.burst_ratio) / 2
        stall = self.stalls * (sum(self.stall_times) / 2 - 1)
        common = (1 + burst) * (1 + stall)
        common *= math.exp((self.noise_ratio**2 + self.start_ratio**2) / 2)
        return tuple(
            common * math.exp(ratio**2 / 2) for ratio in (self.fixed_ratio, self.grows_ratio)
        )  # type: ignore[return-value]


MOODS: Final[Mapping[str, MoodSizes]] = {
    "none": MoodSizes(),
    "calm": MoodSizes(0.01, 0.01, 0.01, 0.005, 1 / 600, 1 / 5000),
    "usual": MoodSizes(0.03, 0.03, 0.02, 0.01, 1 / 180, 1 / 2000),
    "rough": MoodSizes(0.10, 0.08, 0.03, 0.01, 1 / 60, 1 / 800),
}

# Cells of the drift and draws of steps that are made at once: ours.
_CELL_S: Final = 0.5
_CELLS: Final = 2048
_DRAWS: Final = 8192


class Mood:
    """The speed of a machine over time, drawn from a seed; an engine's steps ask for it."""

    def __init__(self, sizes: MoodSizes, seed: int) -> None:
        self._sizes = sizes
        self._over_time = np.random.default_rng([seed, 1])
        self._of_starts = np.random.default_rng([seed, 2])
        self._of_steps = np.random.default_rng([seed, 3])
        self._drift = self._over_time.standard_normal((2, 2))
        self._burst_left, self._burst_times = 0, 1.0
        self._cells: list[tuple[float, float]] = []
        self._steps: list[float] = []

    def of_a_start(self) -> float:
        """Return the factor of an engine that starts now."""
        return math.exp(self._sizes.start_ratio * self._of_starts.standard_normal())

    def at(self, now_s: float) -> tuple[float, float]:
        """Return the factors of both parts of a step at a time."""
        cell = int(now_s / _CELL_S)
        while cell >= len(self._cells):
            self._draw_cells()
        return self._cells[cell]

    def of_a_step(self) -> float:
        """Return the factor of one step alone."""
        if not self._steps:
            self._draw_steps()
        return self._steps.pop()

    def _draw_cells(self) -> None:
        """Go on with the drift; rows are its parts, columns the fast and the slow one."""
        sizes, rng = self._sizes, self._over_time
        keeps = np.exp(-_CELL_S / np.array(sizes.drift_s))
        fresh = rng.standard_normal((_CELLS, 2, 2)) * np.sqrt(1 - keeps**2)
        # Of both lengths the same variance.
        of = np.array([sizes.fixed_ratio, sizes.grows_ratio]) / math.sqrt(2)
        for cell in range(_CELLS):
            self._drift = keeps * self._drift + fresh[cell]
            fixed, grows = np.exp(of * self._drift.sum(axis=1)).tolist()
            busy = self._burst()
            self._cells.append((fixed * busy, grows * busy))

    def _burst(self) -> float:
        """Return by how much other work slows the next cell."""
        sizes, rng = self._sizes, self._over_time
        if self._burst_left == 0 and rng.random() < sizes.bursts_per_s * _CELL_S:
            self._burst_left = round(rng.uniform(*sizes.burst_s) / _CELL_S)
            self._burst_times = 1 + rng.uniform(*sizes.burst_ratio)
        if self._burst_left == 0:
            return 1.0
        self._burst_left -= 1
        return self._burst_times

    def _draw_steps(self) -> None:
        sizes, rng = self._sizes, self._of_steps
        times = np.exp(sizes.noise_ratio * rng.standard_normal(_DRAWS))
        stalled = rng.random(_DRAWS) < sizes.stalls
        times[stalled] *= rng.uniform(*sizes.stall_times, int(stalled.sum()))
        self._steps = times.tolist()


@dataclass(frozen=True, slots=True)
class Modelled:
    """The tool's own kind of step model as a formula, to compare schedules by."""

    step_s: Callable[[Batch], float]
    tidy_s: float = 0.0
    launches_s: Callable[[Batch], float] | None = None
    graphs: Graphs = NO_GRAPHS

    def parts_s(self, batch: Batch, longest: int, graphs: Graphs) -> tuple[float, float]:
        """Return the model's seconds as fixed."""
        _ = longest, graphs
        return self.step_s(batch), 0.0

    def launch_s(self, batch: Batch, graphs: Graphs) -> float:
        """Return the model's seconds of a host, none without one."""
        _ = graphs
        return 0.0 if self.launches_s is None else self.launches_s(batch)
