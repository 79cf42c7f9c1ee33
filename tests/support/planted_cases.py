"""Cases on planted machines: real traffic, a current configuration, and what is truly best.

The truth of a case is the whole of its traffic, replayed at every setting of the grid on the
machine at the mean of its mood, each on an engine started with just that setting.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from support.planted import ACTIVATION_TIMES, PlantedSource
from support.planted_machine import ASYNCHRONOUS, MACHINES, MOODS
from tuner.engine.limits import EngineLimits
from tuner.replay.loop import replay
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.runner import measure_capacity
from tuner.replay.slo import Slo
from tuner.search.budget import Aim
from tuner.search.objective import RATE, Objective, Score, Scoring, Tier, make_scoring
from tuner.traffic.formats import read_trace
from tuner.traffic.prompts import PromptSource
from tuner.traffic.resample import at_load
from tuner.traffic.traces import LoadModel, Trace

ROOT = Path(__file__).resolve().parents[2]
# Which traffic goes with which machine: a CPU gets the short prompts that it can serve.
GPU_TRACES: Final = (
    "azure_2023_conv.open.csv",
    "azure_2023_code.open.csv",
    "mooncake_conversation.open.jsonl",
)
CPU_TRACES: Final = ("chat.jsonl", "translation.jsonl")
CURRENTS: Final = ((8, 2048), (16, 2048), (32, 4096), (64, 2048), (64, 8192), (256, 8192))
BUDGETS: Final = (512, 1024, 2048, 4096, 8192, 16384)
LADDER: Final = (8, 16, 32)
"""Caps to climb; the tool goes four times past the last."""
BLOCK_SIZE: Final = 16
SLO_METRICS: Final = (("ttft_s", "p95"), ("e2e_s", "p95"), ("tpot_s", "p95"), ("ttft_s", "p90"))
# Recommendations within this of each other are the same advice: ours.
SEED_PAIR_RATIO: Final = 0.02
NEED_SLO: Final = (Objective.GOODPUT, Objective.CAPACITY)
"""What cannot be judged without an SLO, and is not of one replay alone."""
CLOSED: Final = "closed"
"""What the name of a case in a closed loop ends with."""
SPEEDS: Final = (1.0, 0.98, 1.02)
"""What holds at all of these is no chance of one replay near overload: ours."""


class KnownCase(Protocol):
    """A case whose truth can be replayed, at steps so many times as long and any load."""

    @property
    def name(self) -> str:
        """What tells it from others."""

    @property
    def trace(self) -> Trace:
        """The traffic."""

    @property
    def current(self) -> EngineLimits:
        """What is deployed."""

    @property
    def plan(self) -> ReplayPlan:
        """How the traffic is replayed."""

    @property
    def objective(self) -> Objective:
        """What is optimised."""

    @property
    def slo_metric(self) -> tuple[str, str] | None:
        """Of what an SLO is asked, None where none is."""

    @property
    def slo_share(self) -> float:
        """Which share of the settings breaks it."""

    @property
    def grid(self) -> list[EngineLimits]:
        """Every setting that may be the best."""

    def replayed(
        self,
        limits: EngineLimits,
        times: float = 1.0,
        load: float = 1.0,
        slos: Sequence[Slo] = (),
    ) -> Measurement:
        """Return what so much of the traffic truly comes to at a setting."""


@dataclass(frozen=True, slots=True)
class PlantedCase:
    """What a run is made on, but for its seed; `activation_times` as the planted source's.

    With a `concurrency` a closed loop keeps so many in flight, whatever the load.

    Units: seconds; `load` a share of the most.
    """

    name: str
    trace: Trace
    machine: str
    mood: str
    current: EngineLimits
    num_blocks: int
    load: float
    budget_s: float
    slo_metric: tuple[str, str] | None
    slo_share: float
    activation_times: float = ACTIVATION_TIMES
    accepted: tuple[float, ...] = ()
    objective: Objective = Objective.BALANCED
    concurrency: int | None = None

    @property
    def plan(self) -> ReplayPlan:
        """How the traffic is replayed."""
        if self.concurrency is None:
            return ReplayPlan()
        return ReplayPlan(LoadModel.CLOSED, self.concurrency)

    def source(self, seed: int) -> PlantedSource:
        """Return the machine in the mood of a seed."""
        return self._machine(seed)

    def truth(self, times: float = 1.0) -> PlantedSource:
        """Return the machine at the mean of its mood, every step so many times as long."""
        source = self._machine(None)
        return replace(source, times=(times * source.times[0], times * source.times[1]))

    def _machine(self, seed: int | None) -> PlantedSource:
        machine, sizes = MACHINES[self.machine], MOODS[self.mood]
        source = PlantedSource.of(machine, self.current, self.num_blocks, sizes, seed)
        told = self.activation_times
        return replace(source, activation_times=told, accepted=self.accepted)

    @property
    def grid(self) -> list[EngineLimits]:
        """Every setting that may be the best, as the tool spans it; the current one too."""
        top = max(4 * LADDER[-1], self.current.max_num_seqs)
        return grid_of(self.trace, self.current, top)

    def replayed(
        self,
        limits: EngineLimits,
        times: float = 1.0,
        load: float = 1.0,
        slos: Sequence[Slo] = (),
    ) -> Measurement:
        """Replay so much of the traffic on the truth at a setting, started cold with it."""
        engine, trace = self.truth(times).start({}, limits), at_load(self.trace, load)
        return measure([replay(engine, trace, PromptSource(trace, 1000), self.plan)], slos)


def grid_of(trace: Trace, current: EngineLimits, top: int) -> list[EngineLimits]:
    """Return the current setting, and caps from the ladder to a top at useful budgets."""
    caps = list(LADDER)
    while 2 * caps[-1] <= top:
        caps.append(2 * caps[-1])
    budgets = sorted({*_useful(trace), current.max_num_batched_tokens})
    settings = [EngineLimits(cap, max(cap, budget)) for cap in caps for budget in budgets]
    return list(dict.fromkeys((current, *settings)))


def _useful(trace: Trace) -> tuple[int, ...]:
    """Return the token budgets up to the first that holds several of the longest prompts."""
    tokens = 4 * int(trace.prompt_tokens.max())
    return tuple(b for i, b in enumerate(BUDGETS) if i == 0 or BUDGETS[i - 1] < tokens)


def recordings(folder: Path) -> tuple[dict[str, Trace], list[str]]:
    """Return the recordings that are there, and a sentence for each that is missing."""
    traces, missing = {}, []
    for name in GPU_TRACES:
        if (folder / name).exists():
            traces[name] = read_trace(folder / name)
        else:
            missing.append(f"{folder / name} is missing: traffic of the repository instead")
    for name in CPU_TRACES:
        traces[name] = read_trace(ROOT / "traces" / name)
    return traces, missing


def drawn_case(
    number: int,
    traces: Mapping[str, Trace],
    *,
    asynchronous: bool = False,
    has_drafts: bool = False,
    is_closed: bool = False,
    objective: Objective = Objective.BALANCED,
) -> PlantedCase:
    """Return the case of a number; machines take turns, the rest is drawn.

    With `asynchronous` all are GPUs whose host launches ahead; with drafts all verify one to
    four tokens, the first accepted in three to nine of ten steps and each next one less often;
    `is_closed` keeps 4 to 128 requests in flight.
    """
    rng = np.random.default_rng([0, number])
    machine = ("gpu-8b", "gpu-70b", "gpu-8b", "gpu-70b" if asynchronous else "cpu")[number % 4]
    wanted = CPU_TRACES if machine == "cpu" else GPU_TRACES
    names = [name for name in wanted if name in traces] or list(CPU_TRACES)
    name = names[int(rng.integers(len(names)))]
    requests = int(rng.integers(300, 1200 if machine == "gpu-8b" else 600))
    machine += ASYNCHRONOUS * asynchronous
    trace = _slice(traces[name], requests, rng)
    current = EngineLimits(*CURRENTS[int(rng.integers(len(CURRENTS)))])
    is_scarce = bool(rng.random() < 0.35)
    has_slo = bool(rng.random() < 0.5) or objective in NEED_SLO
    metric = SLO_METRICS[int(rng.integers(len(SLO_METRICS)))]
    case = PlantedCase(
        name="",
        trace=trace,
        machine=machine,
        mood=("usual", "calm", "rough")[int(rng.choice(3, p=(0.5, 0.25, 0.25)))],
        current=current,
        num_blocks=_blocks(machine, trace, float(rng.uniform(12, 40)) if is_scarce else 400),
        load=round(float(rng.uniform(0.3, 1.5)), 2),
        budget_s=float(rng.choice((600.0, 900.0, 1200.0))),
        slo_metric=metric if has_slo else None,
        slo_share=float(rng.uniform(0.25, 0.75)),
    )
    if has_drafts:
        apart = np.random.default_rng([6, number])
        tokens, rate = int(apart.integers(1, 5)), float(apart.uniform(0.3, 0.9))
        falls = float(apart.uniform(0.5, 1.0))
        rates = np.cumprod(rate * falls ** np.arange(tokens)).tolist()
        case = replace(case, accepted=tuple(round(each, 3) for each in rates))
    if is_closed:
        apart = np.random.default_rng([7, number])
        case = replace(case, concurrency=int(apart.choice((4, 8, 16, 32, 64, 128))))
    pressed = "scarce" if is_scarce else "ample"
    label = f"{number}:{machine}:{name.partition('.')[0]}:{case.load:g}x:{pressed}:{case.mood}"
    label += f":{len(case.accepted)}-drafts" if has_drafts else ""
    label += f":{case.concurrency}-{CLOSED}" if is_closed else ""
    label += f":{objective}" if objective is not Objective.BALANCED else ""
    return replace(_at_load(replace(case, name=label)), objective=objective)


def _slice(trace: Trace, requests: int, rng: np.random.Generator) -> Trace:
    """Return so many requests in a row, without what was hashed: nothing is cached here."""
    return part_of(trace, int(rng.integers(0, max(1, len(trace) - requests))), requests)


def part_of(trace: Trace, first: int, requests: int) -> Trace:
    """Return so many requests from one on, without what was hashed."""
    rows = slice(first, first + requests)
    due_s = trace.due_s[rows] - trace.due_s[first]
    prompts = np.minimum(trace.prompt_tokens[rows], 24_000)
    source = f"{trace.source} from {first}"
    return Trace(due_s, prompts, trace.output_tokens[rows].copy(), source=source)


def _blocks(machine: str, trace: Trace, requests: float) -> int:
    """Return KV blocks for so many requests of mean length, and for the longest at least."""
    tokens = trace.prompt_tokens + trace.output_tokens
    least = -(-int(tokens.max()) // BLOCK_SIZE) + 2
    taken = int(MACHINES[machine].blocks_per_token * BUDGETS[-1])
    return max(least, int(requests * float(tokens.mean()) / BLOCK_SIZE)) + taken


def _at_load(case: PlantedCase) -> PlantedCase:
    """Return the case with arrivals at its share of what the machine can serve at the most."""
    trace = case.trace
    at_once = replace(case, trace=replace(trace, due_s=np.zeros(len(trace))), concurrency=None)
    busy_s = min(at_once.replayed(EngineLimits(cap, 8192)).busy_s for cap in (32, 128))
    pace = busy_s / case.load / max(trace.duration_s, 1e-9)
    return replace(case, trace=replace(trace, due_s=trace.due_s * pace))


_Case = TypeVar("_Case", bound=KnownCase)
_Other = TypeVar("_Other", bound=KnownCase)


@dataclass(slots=True)
class Truth(Generic[_Case]):
    """What is true of a case, worked out as it is asked for and kept in a file.

    Near overload a replay is chaotic: a machine 1 % faster may have half the tail. So
    everything can be asked for at steps so many `times` as long.
    """

    case: _Case
    cache: Path | None = None
    slos: tuple[Slo, ...] = ()
    _known: dict[float, dict[EngineLimits, Measurement]] = field(default_factory=dict)
    _by_slo: dict[tuple[float, EngineLimits], Measurement] = field(default_factory=dict)
    _has_new: bool = False

    @classmethod
    def of(cls, case: _Case, cache: Path | None = None) -> Truth[_Case]:
        """Return the truth of a case over its whole grid, with the SLO that it is given."""
        path = None if cache is None else cache / f"{_key(case)}.pickle"
        truth = cls(case, path)
        if path is not None and path.exists():
            truth._known = pickle.loads(path.read_bytes())  # noqa: S301 - our own file
        for limits in case.grid:
            truth.measurement(limits)
        if case.slo_metric is not None:
            truth.slos = (truth._bound(*case.slo_metric),)
        truth.keep()
        return truth

    def with_case(self, case: _Other) -> Truth[_Other]:
        """Return what is known of the same traffic on the same machine, as that of a case."""
        return Truth(case, self.cache, self.slos, self._known, self._by_slo)

    def keep(self) -> None:
        """Write down what was worked out since."""
        if self.cache is not None and self._has_new:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            self.cache.write_bytes(pickle.dumps(self._known))
            self._has_new = False

    def measurement(self, limits: EngineLimits, times: float = 1.0) -> Measurement:
        """Return what the whole traffic comes to at a setting."""
        known = self._known.setdefault(times, {})
        if limits not in known:
            alike = next((m for own, m in known.items() if _alike(own, m, limits)), None)
            known[limits] = alike or self.case.replayed(limits, times)
            self._has_new = True
        return known[limits]

    @property
    def scoring(self) -> Scoring:
        """How settings are judged on the whole traffic."""
        case = self.case
        aim = Aim(case.objective, self.slos, case.plan, None)
        return make_scoring(aim.objective, self.slos, len(case.trace))

    def score(self, limits: EngineLimits, times: float = 1.0) -> Score:
        """Return how a setting is truly judged."""
        if self.case.objective not in NEED_SLO:
            return self.scoring.score(self.measurement(limits, times))
        place = times, limits
        if place not in self._by_slo:
            self._by_slo[place] = self._measured_by_slo(limits, times)
        return self.scoring.score(self._by_slo[place])

    def _measured_by_slo(self, limits: EngineLimits, times: float) -> Measurement:
        """Return what a setting does within the SLO, or at the largest load that keeps it."""
        if self.case.objective is Objective.GOODPUT:
            return self.case.replayed(limits, times, slos=self.slos)
        at = partial(self.case.replayed, limits, times)
        found = measure_capacity(at, [self.case.trace], 1.0, self.slos)
        assert isinstance(found, Measurement)
        return found

    def loss(self, limits: EngineLimits, best: EngineLimits, times: float = 1.0) -> float:
        """Return by how much a setting is worse than the best; of another tier, by its tail."""
        mine, its = self.score(limits, times), self.score(best, times)
        ratio = ratio_of(mine, its)
        if ratio is not None:
            return max(0.0, ratio - 1)
        return max(0.0, mine.value_in(Tier.GOOD) / its.value_in(Tier.GOOD) - 1)

    def rate_loss(self, limits: EngineLimits) -> float | None:
        """Return what share of the requests a second is lost to the grid's highest rate."""
        values = [self.value(setting, RATE) for setting in (limits, *self.case.grid)]
        known = [value for value in values if value is not None]
        return None if values[0] is None else 1 - min(known) / values[0]

    def is_better(self, limits: EngineLimits, other: EngineLimits, times: float = 1.0) -> bool:
        """Whether a setting is truly judged better than another."""
        mine, its = self.score(limits, times), self.score(other, times)
        if _is_out(mine, its) or _is_out(its, mine):
            return _is_out(its, mine)
        if mine.tier is not its.tier:
            return mine.tier < its.tier
        ratio = ratio_of(mine, its)
        return ratio is not None and ratio < 1

    def best(self, *others: EngineLimits) -> EngineLimits:
        """Return the best of the grid and of others; of the best tier, whatever else it is.

        Of those that no other is to be had for, which bears the load and is nearer its bounds.
        """
        every = {limits: self.score(limits) for limits in (*self.case.grid, *others)}
        scores = {
            limits: score
            for limits, score in every.items()
            if not any(_is_out(score, other) for other in every.values())
        }
        tier = min(score.tier for score in scores.values())
        of_tier = {limits: score for limits, score in scores.items() if score.tier is tier}
        return min(of_tier, key=lambda limits: _judged_by(of_tier[limits]))

    def value(self, limits: EngineLimits, metric: str) -> float | None:
        """Return a setting's true value by a metric as the tool names it; less is better."""
        if metric.startswith("e2e_"):
            return self.measurement(limits).latency("e2e_s", metric.removeprefix("e2e_"))
        return self.score(limits).value_of(metric)

    def _bound(self, metric: str, statistic: str) -> Slo:
        """Return a bound that some settings meet and others do not, in the widest gap there."""
        found = {
            self.measurement(limits).latency(metric, statistic) for limits in self.case.grid
        }
        values = sorted(value for value in found if value is not None and math.isfinite(value))
        if len(values) < 2:
            return Slo(metric, statistic, 2 * values[0])
        middle = self.case.slo_share * (len(values) - 1)
        near = range(max(0, int(middle) - 2), min(len(values) - 1, int(middle) + 3))
        at = max(near, key=lambda i: values[i + 1] / values[i])
        return Slo(metric, statistic, float(f"{math.sqrt(values[at] * values[at + 1]):.3g}"))


def _is_out(score: Score, other: Score) -> bool:
    """Whether one does not bear the load, and another does that is nearer to its bounds."""
    ours, theirs = score.load_used or 0.0, other.load_used or 0.0
    is_apart = theirs <= 1.0 < ours and other.tier < Tier.CUT
    return is_apart and max(ours, score.slo_used or 0.0) > max(theirs, other.slo_used or 0.0)


def ratio_of(one: Score, other: Score) -> float | None:
    """Return the ratio of what decides between them, None where none compares."""
    if one.tier is not other.tier or one.metric != other.metric:
        return None
    ours, theirs = _judged_by(one), _judged_by(other)
    return ours / theirs if 0 < ours < math.inf and 0 < theirs < math.inf else None


def _judged_by(score: Score) -> float:
    """Return what decides among settings of a tier: what is optimised, or how an SLO is missed.

    As the tool does it, also where no setting sustains the load.
    """
    return score.value if score.tier is Tier.BREAKS_SLO else score.value_in(Tier.GOOD)


def _alike(own: EngineLimits, measured: Measurement, limits: EngineLimits) -> bool:
    """Whether a setting leads to the schedule of another, whose limits were never reached."""
    if measured.kv_usage.max > 0.4 or measured.preemptions:
        return False
    seqs = own.max_num_seqs == limits.max_num_seqs or measured.running.max < min(
        own.max_num_seqs, limits.max_num_seqs
    )
    tokens = (
        own.max_num_batched_tokens == limits.max_num_batched_tokens
        or measured.max_step_tokens
        < min(own.max_num_batched_tokens, limits.max_num_batched_tokens)
    )
    return seqs and tokens


_CODE: Final = tuple(
    f"tests/support/{name}.py" for name in ("planted", "planted_machine", "planted_cases")
)
_ENGINE: Final = ("limits", "protocol", "shape", "steps")
"""Modules of the engine that a planted one needs; no real one is started."""


def _key(case: Any) -> str:
    """Return what a case's truth follows from: its traffic, its machine, and the code."""
    told = hashlib.sha256(repr(replace(case, trace=None)).encode())
    for column in (case.trace.due_s, case.trace.prompt_tokens, case.trace.output_tokens):
        told.update(column.tobytes())
    sources = [*_CODE, *(str(p) for p in _sources())]
    for source in sources:
        told.update((ROOT / source).read_bytes())
    return told.hexdigest()[:24]


def _sources() -> Iterator[Path]:
    for name in _ENGINE:
        yield Path("tuner/engine") / f"{name}.py"
    for path in sorted((ROOT / "tuner/replay").glob("*.py")):
        yield path.relative_to(ROOT)


def apart(truth: Truth[Any], settings: Sequence[EngineLimits]) -> bool:
    """Whether two recommended settings are truly further apart than chance may decide."""
    one, other = (truth.score(limits) for limits in settings)
    ratio = ratio_of(one, other)
    return ratio is None or abs(math.log(ratio)) > math.log1p(SEED_PAIR_RATIO)
