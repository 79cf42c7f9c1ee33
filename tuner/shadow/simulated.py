"""What a simulated replay begins with: an engine that is known, and the arrays of `schedule`.

What the scheduler is told comes from an EngineShape, how long a batch takes from a StepModel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape, KvLayout, check_rates, left_for_tokens
from tuner.errors import EngineError, ShadowError
from tuner.replay.plan import ReplayPlan
from tuner.shadow.prepared import PreparedTrace, fixed
from tuner.shadow.schedule import layout as s
from tuner.shadow.step_model import StepModel
from tuner.stats import Floats
from tuner.traffic.answers import HeldAnswers

# What an option has to be so that the schedule is the one that is compiled; of those that it
# knows, None.
_KNOWN: Final[Mapping[str, tuple[object, ...] | None]] = {
    "policy": (None, "fcfs", "priority"),
    "enable_chunked_prefill": None,
    "long_prefill_token_threshold": None,
    "long_prefill_token_threshold_adaptive": None,
    "scheduler_reserve_full_isl": None,
    "watermark": None,
    "prefill_schedule_interval": None,
    "max_num_queued_reqs": (None,),
    "max_num_queued_tokens": (None,),
    # Of no consequence to the schedule of a text model with groups as they are.
    "disable_chunked_mm_input": None,
    "disable_hybrid_kv_cache_manager": None,
    "enable_prefix_caching": None,
    "max_num_partial_prefills": (None, 1),
    "max_long_partial_prefills": (None, 1),
    "num_lookahead_slots": (None, 0),
    "num_lookahead_tokens": (None, 0),
    "delay_factor": (None, 0.0),
    "cuda_graph_sizes": None,
    "send_delta_data": None,
    "preemption_mode": (None, "recompute"),
    "num_scheduler_steps": (None, 1),
    "multi_step_stream_outputs": None,
}


def unknown_options(shape: EngineShape) -> list[str]:
    """Return what of an engine the compiled schedule does not know, a few words each."""
    notes = [
        f"{name}: {value}"
        for name, value in sorted(shape.scheduler.items())
        if name not in _KNOWN or ((allowed := _KNOWN[name]) and value not in allowed)
    ]
    layout = shape.kv_layout
    if shape.drops_hit and layout is not None and layout.keeps_states and layout.back_drops:
        notes.append("drafts of which vLLM does not say that they read no states")
    # Up to 0.31 nothing was looked up beyond the end of a hit, of which the last was dropped.
    drops = shape.drops_hit and shape.prefix_caching and not shape.is_since(32)
    if drops and layout is not None and any(layout.looks_back):
        notes.append("drafts beside layers that look back a window, before vLLM 0.32")
    if layout is None:
        kinds = Counter(shape.kv_kind.split(" and ")).items()
        words = " and ".join(f"{n} {kind}" if n > 1 else kind for kind, n in kinds)
        notes.append(f"a KV cache of {words}")
    return notes


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """An engine that is simulated: its scheduler's options, its blocks, its steps.

    `ceiling` are the limits it was started with, which an adaptive threshold for long prompts
    goes by. Drafts are `accepted` at rates: the first, the first two and so on.

    Units: num_blocks as vLLM counts them, one of which it keeps for itself.
    Raises: ShadowError naming options that the simulator does not know.
    """

    shape: EngineShape
    num_blocks: int
    step_model: StepModel
    ceiling: EngineLimits
    accepted: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_rates(self.accepted, self.shape.draft_tokens)
        if unknown := unknown_options(self.shape):
            raise ShadowError(
                f"the simulator does not know {', '.join(unknown)}",
                "install vLLM, whose own scheduler is asked then",
            )
        if self.num_blocks < 2:
            raise ShadowError(f"a KV cache has 2 blocks or more, got {self.num_blocks}")

    @property
    def layout(self) -> KvLayout:
        """The groups of its KV cache, which are known."""
        return self.shape.kv_layout or KvLayout()


def first_slots(engine: SimulatedEngine, prepared: PreparedTrace, limits: EngineLimits) -> int:
    """Return for how many requests that run or were preempted there is room at first."""
    slots = min(limits.max_num_seqs, len(prepared.trace)) + 1
    if engine.shape.has_priorities:
        # Whoever was preempted may wait behind those who came later.
        slots = min(4 * slots, len(prepared.trace) + 1)
    return slots


def keeps_each_block(engine: SimulatedEngine, prepared: PreparedTrace) -> bool:
    """Whether a replay keeps each block of the KV cache, and not only how many are in use.

    It does where something may be found in the prefix cache, or where states are held of which
    no count tells when they are given back.
    """
    may_find = prepared.may_share or engine.layout.keeps_states
    return engine.shape.prefix_caching and may_find


def check_sizes(engine: SimulatedEngine, prepared: PreparedTrace, limits: EngineLimits) -> None:
    """Refuse what would be preempted for ever. Raises: EngineError."""
    shape, blocks = engine.shape, engine.num_blocks - 1
    # Where it is let in by what it will hold, vLLM reckons with the limits of the start.
    reserves = bool(_option(shape, "scheduler_reserve_full_isl"))
    in_flight = shape.in_flight_tokens(engine.ceiling if reserves else limits)
    # The last token of an answer is never computed, but the drafts beside it are.
    longest, _ = prepared.longest(shape.max_model_len)
    ahead = shape.draft_tokens + shape.lookahead_tokens - 1
    longest = min(longest + ahead, shape.max_model_len)
    if shape.held_blocks(np.array([longest]), in_flight)[0] > blocks:
        tokens = prepared.prompts + prepared.outputs
        needed = shape.held_blocks(np.minimum(tokens + ahead, shape.max_model_len), in_flight)
        needed = np.where(tokens <= shape.max_model_len, needed, 0)
        row = int(np.argmax(needed > blocks))
        raise EngineError(
            f"request {row} is larger than the KV cache: it takes {needed[row]} blocks of"
            f" {shape.block_size} tokens, there are {blocks}",
            "give the cache more memory, or refuse such requests with a smaller max-model-len",
        )


def _option(shape: EngineShape, name: str, default: float = 0) -> float:
    """Return a number among the scheduler's options, the default where it is not set."""
    value = shape.scheduler.get(name)
    return default if value is None else float(value)


def integers(
    engine: SimulatedEngine,
    prepared: PreparedTrace,
    limits: EngineLimits,
    plan: ReplayPlan,
    slots: int,
    *,
    caches: bool,
) -> NDArray[np.int64]:
    """Return the integers of a replay's state before it begins."""
    shape, trace = engine.shape, prepared.trace
    n, block = len(trace), shape.block_size
    g = np.zeros(s.INTEGERS, np.int64)
    g[s.DONE], g[s.LAST_PREFILL] = -1, 0
    g[s.FREE] = g[s.ALL_BLOCKS] = engine.num_blocks - 1
    g[s.FREE_SLOTS] = g[s.SLOTS] = slots
    g[s.CAP] = min(limits.max_num_seqs, n)
    g[s.INPUT_BUDGET] = engine.ceiling.max_num_batched_tokens
    _go_by_slots(g, shape, limits)
    g[s.THRESHOLD] = int(_option(shape, "long_prefill_token_threshold"))
    g[s.ADAPTIVE] = bool(_option(shape, "long_prefill_token_threshold_adaptive"))
    g[s.CHUNKS] = bool(_option(shape, "enable_chunked_prefill", 1))
    g[s.RESERVES] = bool(_option(shape, "scheduler_reserve_full_isl"))
    g[s.WATERMARK] = int(_option(shape, "watermark") * engine.num_blocks)
    g[s.PRIORITY] = shape.has_priorities
    g[s.AHEAD], g[s.BLOCK] = shape.asynchronous, block
    g[s.MAX_LENGTH] = shape.max_model_len
    g[s.IS_CACHED], g[s.WOULD_CACHE] = caches, shape.prefix_caching
    g[s.ARRIVALS], g[s.REQUESTS] = prepared.arrivals, n
    g[s.MEASURES], g[s.LED_IN] = trace.lead_in_s == 0, trace.led_in
    _go_by_version(g, shape)
    _go_by_plan(g, plan)
    g[s.TARGETS] = len(prepared.targets)
    _go_by_keys(g, shape, 1 if trace.hashes is None else trace.hashes.block_size)
    longest, answer = prepared.longest(shape.max_model_len)
    _go_by_layout(g, engine, (longest + _go_by_drafts(g, shape)) // block + 2)
    # The calendar has days for more steps than any answer takes, a power of two.
    g[s.LAST_DAY] = (1 << (answer + 1).bit_length()) - 1
    return g


def _go_by_keys(g: NDArray[np.int64], shape: EngineShape, recorded: int) -> None:
    """Set what blocks are found by: beginnings of prompts, known in steps of so many tokens."""
    ahead = shape.hashed_ahead
    g[s.RECORDED_BLOCK], g[s.HASHED_AHEAD] = recorded, ahead
    g[s.LINK_KEYS] = recorded // shape.block_size + 1 + ahead


def _go_by_slots(g: NDArray[np.int64], shape: EngineShape, limits: EngineLimits) -> None:
    """Set how much of the token budget what drafts takes of it. Raises: EngineError."""
    slots, by_step = shape.draft_slots, shape.counts_slots_by_step
    g[s.BUDGET], g[s.DRAFT_SLOTS] = left_for_tokens(limits, slots, by_step=by_step), slots
    if slots and by_step:
        g[s.BESIDE], g[s.INPUT_BUDGET] = slots, g[s.BUDGET]


def _go_by_drafts(g: NDArray[np.int64], shape: EngineShape) -> int:
    """Set how much decoding requests verify; return for how many tokens ahead there is room."""
    g[s.DRAFTS], g[s.LOOKAHEAD] = shape.draft_tokens, shape.lookahead_tokens
    # Since 0.33 what is accepted has its keys at once, of a synchronous engine too.
    g[s.KEYS_AT_ONCE] = shape.asynchronous or (shape.drafts is not None and shape.is_since(33))
    batches = 2 if shape.asynchronous else 1
    return batches * shape.draft_tokens + shape.lookahead_tokens


def _go_by_layout(g: NDArray[np.int64], engine: SimulatedEngine, room: int) -> None:
    """Set what the groups of a KV cache hold, with room for so many blocks of a request."""
    layout = engine.layout
    g[s.GROUPS], g[s.WINDOWED] = len(layout.looks_back), sum(layout.looks_back)
    g[s.WINDOW], g[s.ROOM_OF_GROUP] = layout.window, room + layout.scratch
    g[s.WIDTH] = g[s.ROOM_OF_GROUP] * g[s.GROUPS]
    g[s.FULL_SPAN], g[s.BACK_SPAN] = layout.full_span, layout.back_span
    g[s.ALIGNED], drops = layout.aligned, engine.shape.drops_hit
    g[s.FULL_DROPS], g[s.BACK_DROPS] = drops and layout.full_drops, drops and layout.back_drops
    g[s.SCRATCH] = layout.scratch
    g[s.ROUND] = layout.aligned * engine.shape.block_size
    # Up to 0.25 what lies behind a window is given back while a batch on its way may read it.
    g[s.SETTLES] = engine.shape.asynchronous and engine.shape.is_since(26)
    # Up to 0.28 no configuration says how much is retained.
    kept = layout.retention if engine.shape.is_since(29) else None
    g[s.RETENTION] = -1 if kept is None else kept // engine.shape.block_size
    g[s.JUNCTIONS] = engine.shape.is_since(26)
    g[s.STATES], g[s.FIXED] = layout.keeps_states * g[s.WINDOWED], layout.fixed
    g[s.TWO_EVERY] = layout.leaves_two_every
    # Up to 0.31 a state is kept of a whole prompt too, that nobody can go on from.
    g[s.PARTS_BEFORE_LAST] = g[s.STATES] > 0 and engine.shape.is_since(32)
    # Only in 0.32, where others then do not find it until it is given back.
    g[s.KEYS_ANEW] = g[s.PARTS_BEFORE_LAST] and not engine.shape.is_since(33)
    in_flight = engine.shape.in_flight_tokens(engine.ceiling)
    g[s.MOST_IN_WINDOW] = engine.shape.most_in_window(in_flight)


def _go_by_plan(g: NDArray[np.int64], plan: ReplayPlan) -> None:
    """Set what a plan asks of any traffic."""
    g[s.ALLOWED_LATE], g[s.KEEPS_LOG] = plan.cut.allowed_late, plan.keep_steps
    g[s.BATCH_SIZE] = 0 if plan.batches is None else plan.batches.size
    g[s.GATE_CAP] = g[s.REQUESTS] if plan.gate is None else plan.gate.max_in_flight
    g[s.GATE_ROOM] = 0 if plan.gate is None else plan.gate.max_queued


def _go_by_version(g: NDArray[np.int64], shape: EngineShape) -> None:
    """Set what releases of vLLM decide otherwise."""
    # Up to 0.30 a threshold also holds for a request that is alone; up to 0.22 all freed blocks
    # wait in one queue, where later those that no prompt can find are handed out first: in 0.23
    # of layers that look back a window, since then all.
    g[s.LONE], g[s.KEYLESS_FIRST] = shape.is_since(31), shape.is_since(23) + shape.is_since(24)
    # Under priorities a step of up to 0.27 leaves one out for some that are preempted in it;
    # from 0.33 on who is preempted for its own sake does not end it. From 0.33 on an interval
    # between prompts holds for an engine alone, not only for data-parallel ones.
    g[s.OMITS] = shape.has_priorities and not shape.is_since(28)
    g[s.YIELDS] = shape.has_priorities and shape.is_since(33)
    # Up to 0.22 who is admitted has no blocks ahead of what it drafts, up to 0.24 no lone token
    # is padded, up to 0.28 it waits where that does not fit, up to 0.29 it is beside others.
    g[s.ADMITS_AHEAD] = shape.is_since(23)
    since = [shape.is_since(minor) for minor in (25, 29, 30)]
    g[s.PADDING] = (s.NEVER_PADS, s.PADS_OR_WAITS, s.PADS_BESIDE, s.PADS_ALONE)[sum(since)]
    interval = int(_option(shape, "prefill_schedule_interval", 1)) if shape.is_since(33) else 1
    g[s.INTERVAL], g[s.CARRIED] = interval, -interval


def seconds(model: StepModel, prepared: PreparedTrace, plan: ReplayPlan) -> Floats:
    """Return the instants and sums of a replay's state before it begins."""
    x = np.zeros(s.FLOATS)
    x[s.FIRST_DUE] = math.nan
    x[s.PATIENCE] = math.inf if plan.timeout_s is None else plan.timeout_s
    x[s.LATE_S] = math.inf if plan.cut.late_s is None else plan.cut.late_s
    x[s.MAX_CLOCK] = math.inf if plan.cut.max_clock_s is None else plan.cut.max_clock_s
    x[s.END_S] = prepared.end_s
    x[s.BASE_S], x[s.SEQ_S], x[s.TIDY_S] = model.base_s, model.seq_s, model.tidy_s
    x[s.EAGER_S] = model.eager_s if model.graphs.sizes else 0.0
    x[s.PREFILL_BASE_S] = model.prefill_base_s
    x[s.DECODE_CONTEXT_S], x[s.MIXED_CONTEXT_S] = model.decode_context_s, model.mixed_context_s
    x[s.SPREAD_S], x[s.MIXED_SPREAD_S] = model.spread_s, model.mixed_spread_s
    x[s.PREFILL_CONTEXT_S] = model.prefill_context_s
    x[s.HOST_MIXED_S], x[s.HOST_EAGER_S] = model.host.mixed_s, model.host.eager_s
    x[s.HOST_SEQ_S], x[s.HOST_TOKEN_S] = model.host.seq_s, model.host.token_s
    x[s.LEAD_S], x[s.GATE_WAIT_S] = prepared.trace.lead_in_s, plan.wait_s
    x[s.BATCH_WAIT_S] = 0.0 if plan.batches is None else plan.batches.wait_s
    return x


def table(model: StepModel, g: NDArray[np.int64], accepted: Sequence[float] = ()) -> Floats:
    """Return the seconds and factors of decodes alone, and how to find those of others.

    Which are the seconds of tokens in a graph, the curve beyond it, and all factors. Last come
    what launching decodes alone takes the host, and the rates at which drafts are accepted.
    """
    alone_s, mixed_s = model.tables(int(g[s.CAP]), int(g[s.DRAFTS]))
    if mixed_s.size == 1:
        mixed_s = mixed_s[:0]
    curve, factors = model.token_curve(), model.factors.table
    alone = model.factors.along(np.arange(alone_s.size, dtype=np.float64), np.zeros(1))
    g[s.AT_MIXED] = 2 * alone_s.size
    g[s.AT_KNOTS], g[s.KNOTS] = g[s.AT_MIXED] + mixed_s.size, curve.shape[1]
    g[s.AT_FACTORS] = g[s.AT_KNOTS] + curve.size
    g[s.FACTOR_ROWS], g[s.FACTOR_COLUMNS] = factors.shape
    g[s.AT_LAUNCHES] = g[s.AT_FACTORS] + factors.size
    launches_s = model.launches_s(int(g[s.CAP]), int(g[s.DRAFTS]))
    g[s.AT_RATES] = g[s.AT_LAUNCHES] + launches_s.size
    rates = np.array(accepted, dtype=np.float64)
    parts = [alone_s, alone, mixed_s, curve.ravel(), factors.ravel(), launches_s, rates]
    return np.concatenate(parts)


def work(g: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the room for lists, with where each begins."""
    slots, block = int(g[s.SLOTS]), int(g[s.BLOCK])
    days, counts = int(g[s.LAST_DAY]) + 1, bool(g[s.WINDOWED]) and not g[s.IS_CACHED]
    sizes = {
        s.AT_RUN: 2 * slots + 2,
        s.AT_CALENDAR: days,
        s.AT_WANTED: int(g[s.ROUND]),
        s.AT_BUCKETS: block,
        s.AT_FRONT: slots + 1,
        s.AT_FREE_SLOTS: slots,
        s.AT_UNSTEADY: 16 * slots if g[s.WINDOWED] else 0,
        s.AT_LONG: block * int(g[s.BACK_SPAN]) if counts else 0,
        s.AT_OVERTAKES: days if counts else 0,
        s.AT_SINGLES: s.PIPE * 2 * slots,
        s.AT_ENDS: s.PIPE * 2 * slots,
        s.AT_BATCHES: s.PIPE * s.BATCH_FIELDS,
    }
    at = 0
    for name, size in sizes.items():
        g[name] = at
        at += size
    work = np.zeros(at, np.int64)
    for at, size in ((s.AT_BUCKETS, block), (s.AT_CALENDAR, days)):
        work[g[at] : g[at] + size] = -1
    work[g[s.AT_FREE_SLOTS] : g[s.AT_FREE_SLOTS] + slots] = np.arange(slots)[::-1]
    return work


def ready(prepared: PreparedTrace, g: NDArray[np.int64]) -> Floats:
    """Return the heap of the sessions' requests that may go, by instant and row."""
    turns = prepared.trace.turns
    if not prepared.is_causal or turns is None:
        return np.empty((0, 2))
    roots = np.flatnonzero(turns.after < 0)
    ready = np.empty((len(prepared.trace), 2))
    ready[: roots.size, 0], ready[: roots.size, 1] = prepared.trace.due_s[roots], roots
    g[s.READY] = roots.size
    return ready


def cache(
    prepared: PreparedTrace, g: NDArray[np.int64], layout: KvLayout, *, caches: bool
) -> s.Cache:
    """Return the blocks of a replay that begins, next to nothing where they are but counted."""
    looks_back = fixed(np.array(layout.looks_back), np.bool_)
    if not caches:
        no_row = fixed(np.empty(0), np.int64)
        pool, keys = np.empty((1, s.BLOCK_FIELDS), np.int32), np.empty(1, np.int64)
        tables, heads = np.empty((2, 1, 1), np.int32), np.empty(1, np.int32)
        links = fixed(np.empty(0), np.int32)
        of_rows = (no_row, no_row, no_row, no_row, no_row, no_row)
        return s.Cache(pool, keys, tables, heads, links, *of_rows, looks_back)
    blocks = int(g[s.ALL_BLOCKS])
    pool = np.zeros((blocks + 1, s.BLOCK_FIELDS), np.int32)
    pool[:, s.NEXT_FREE] = np.roll(np.arange(blocks + 1), -1)
    pool[:, s.BEFORE_FREE] = np.roll(np.arange(blocks + 1), 1)
    pool[:, s.SAME_KEY] = pool[:, s.KEYED_IN] = -1
    links, starts, covered, count = prepared.chains
    block, ahead = int(g[s.BLOCK]), int(g[s.HASHED_AHEAD])
    firsts, count = prepared.own_keys(block, ahead, count * int(g[s.LINK_KEYS]))
    heads = np.full(max(1, count * len(layout.looks_back)), -1, np.int32)
    nobody = np.zeros(len(prepared.trace), np.int64)
    of = prepared.held or HeldAnswers(nobody, nobody, nobody)
    before, held, reached = (fixed(c, np.int64) for c in (of.before, of.held, of.reached))
    tables = np.empty((2, int(g[s.SLOTS]), int(g[s.WIDTH])), np.int32)
    keys = np.full(blocks + 1, s.NO_KEY, np.int64)
    numbered = (heads, links, starts, covered, before, held, reached, firsts)
    return s.Cache(pool, keys, tables, *numbered, looks_back)
