"""Random replays on which the compiled schedule is compared with vLLM's own scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from support.profile_parts import SHAPE
from tuner.engine.compat.serve import installed_vllm
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import (
    DRAFTS_IN,
    NO_GRAPHS,
    RETENTION,
    Drafts,
    EngineShape,
    Graphs,
    KvGroup,
    is_since,
)
from tuner.gate import GateLimits
from tuner.replay.arrivals import Sessions, StaticBatches
from tuner.replay.plan import CutRule, ReplayPlan
from tuner.shadow.simulated import SimulatedEngine
from tuner.shadow.step_model import NO_HOST, Factors, Host, StepModel
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import LoadModel, Trace, Turns

# The option by which a request is let in when the cache holds all of it.
RESERVES = "scheduler_reserve_full_isl"
CHUNKS = "enable_chunked_prefill"

# The lengths of a case are drawn below this, so that every model that stands in has room.
LONGEST = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One replay: what is simulated, and how."""

    engine: SimulatedEngine
    trace: Trace
    limits: EngineLimits
    plan: ReplayPlan


def random_case(
    seed: int,
    *,
    is_by_priority: bool = False,
    has_windows: bool | None = None,
    has_drafts: bool = False,
    has_states: bool = False,
) -> Case:
    """Return the case of a seed: small numbers, so that every edge is met often.

    One in seven serves by priority, or every one; one in four has layers that look back a
    window, or every one, or none. None drafts, or every one; none has state-space layers, or
    every one, of which one in five drafts.
    """
    if has_states:
        return _with_states(seed, is_by_priority=is_by_priority)
    plain = _plain_case(seed, is_by_priority, has_windows)
    return _with_drafts(seed, plain) if has_drafts else plain


def _plain_case(seed: int, is_by_priority: bool, has_windows: bool | None) -> Case:
    """Return a case without drafts or states."""
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 4, 8, 16, 16, 16, 32]))
    # Drawn apart, so that cases without sessions stay what they were.
    trace = _with_answers(np.random.default_rng([seed, 1]), _trace(rng, block))
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    max_len = int(longest if rng.random() < 0.9 else max(2, longest - 10))
    shape = _shape(rng, block, max_len)
    if is_by_priority:
        shape = replace(shape, scheduler={**shape.scheduler, "policy": "priority"})
    limits, ceiling = _limits(rng, shape, max_len)
    enough = int(np.ceil((trace.prompt_tokens + trace.output_tokens) / block).sum()) + 2
    least = -(-max_len // block) + 2
    scarce = least + int(rng.integers(0, 1 + 3 * least))
    blocks = int(rng.choice([enough, scarce, scarce]))
    if shape.scheduler["watermark"]:
        blocks = max(blocks, 2 * least)
    apart = np.random.default_rng([seed, 5])
    if apart.random() < 0.25 if has_windows is None else has_windows:
        groups = _groups(apart, block)
        groups = _with_sizes(np.random.default_rng([seed, 9]), groups, block)
        kinds = " and ".join(str(group["kind"]) for group in groups)
        shape, is_scarce = replace(shape, kv_kind=kinds, kv_groups=groups), blocks < enough
        scarce = _scarce(apart, shape, ceiling if shape.scheduler[RESERVES] else limits)
        blocks = scarce if is_scarce else (enough - 2) * len(shape.kv_groups) + 2
    model, plan = _model(rng), _plan(rng, trace)
    if rng.random() < 0.2:
        lead_in_s = float(rng.uniform(0, trace.due_s[-1]))
        is_open = plan.load_model is LoadModel.OPEN
        trace = replace(trace, lead_in_s=lead_in_s if is_open else 0.0)
    # Drawn apart too.
    rng = np.random.default_rng([seed, 4])
    if rng.random() < 0.5:
        model = replace(model, mixed_spread_s=2 * rng.random() * model.spread_s)
    rng = np.random.default_rng([seed, 3])
    interval = int(rng.choice([2, 3, 8])) if rng.random() < 0.2 else 1
    shape = replace(shape, scheduler={**shape.scheduler, "prefill_schedule_interval": interval})
    engine = SimulatedEngine(shape, blocks, model, ceiling)
    if shape.has_priorities:
        trace = _with_priorities(np.random.default_rng([seed, 2]), trace)
    rng = np.random.default_rng([seed, 4])
    if plan.load_model is LoadModel.OPEN and plan.batches is None and rng.random() < 0.4:
        plan = replace(plan, gate=_gate(rng))
    return Case(engine, trace, limits, plan)


def _with_priorities(rng: np.random.Generator, trace: Trace) -> Trace:
    if rng.random() >= 0.8:
        return trace
    priorities = rng.integers(-1, int(rng.choice([1, 2, 8])), len(trace))
    return replace(trace, priorities=priorities)


def _with_drafts(seed: int, case: Case) -> Case:
    """Return a case whose engine drafts some tokens, and accepts some of them."""
    rng, engine = np.random.default_rng([seed, 6]), case.engine
    tokens = int(rng.choice([1, 2, 3, 5]))
    drafts = Drafts(str(rng.choice(["eagle", "mtp", "medusa"])), tokens)
    ways = np.random.default_rng([seed, 7])
    if ways.random() < 0.5:
        drafts = _with_slots(ways, tokens, engine.shape)
    accepted = np.sort(rng.random(tokens))[::-1] * float(rng.choice([0.5, 1.0]))
    # Other graphs serve steps whose drafts the budget cuts short.
    is_ahead, shape = bool(rng.random() < 0.6), engine.shape
    if shape.kv_groups and drafts.is_eagle and not shape.is_since(32):
        shape = replace(shape, prefix_caching=False)
    graphs = NO_GRAPHS if is_ahead else replace(engine.step_model.graphs, has_mixed=True)
    longest = int(engine.shape.max_model_len)
    more = -(-3 * tokens // engine.shape.block_size)
    engine = replace(
        engine,
        shape=replace(shape, drafts=drafts, asynchronous=is_ahead),
        num_blocks=engine.num_blocks + more,
        step_model=replace(engine.step_model, graphs=graphs),
        accepted=tuple(accepted.tolist()),
    )
    limits, least = case.limits, drafts.slots + 1
    if not engine.shape.scheduler[CHUNKS]:
        least = longest + drafts.slots
    if not engine.shape.counts_slots_by_step:
        least += drafts.slots * (limits.max_num_seqs - 1)
    budget = max(limits.max_num_batched_tokens, least)
    limits = replace(limits, max_num_batched_tokens=budget)
    ceiling = replace(
        engine.ceiling,
        max_num_batched_tokens=max(budget, engine.ceiling.max_num_batched_tokens),
    )
    engine = replace(engine, ceiling=ceiling)
    if engine.shape.kv_groups:
        engine = _that_drafts_in(ways, engine)
    return replace(case, engine=engine, limits=limits)


def _that_drafts_in(rng: np.random.Generator, engine: SimulatedEngine) -> SimulatedEngine:
    """Return an engine with room for drafts, and in which groups they are, or not.

    Source: vllm/v1/core/kv_cache_utils.py, _annotate_eagle_groups.
    """
    kind = str(rng.choice(["FullAttentionSpec", "SlidingWindowSpec", "neither"]))
    is_said = engine.shape.drops_hit
    groups = tuple(
        {**group, DRAFTS_IN: True} if is_said and group["kind"] == kind else group
        for group in engine.shape.kv_groups
    )
    shape = replace(engine.shape, kv_groups=groups)
    ahead = shape.draft_tokens + shape.lookahead_tokens
    longest, in_flight = np.array([shape.max_model_len + ahead]), engine.ceiling
    least = int(shape.held_blocks(longest, 2 * in_flight.max_num_batched_tokens)[0]) + 2
    return replace(engine, shape=shape, num_blocks=max(engine.num_blocks, least))


def _with_states(seed: int, *, is_by_priority: bool) -> Case:
    """Return a case in which some layers keep a state, by itself or found by others too.

    The first hold as many blocks of each request as they draft tokens, and one more; they are
    all that the simulator knows of releases up to 0.29.
    """
    rng = np.random.default_rng([seed, 8])
    is_shared = bool(rng.random() < 0.7) and is_since(installed_vllm()[1], 30)
    drafts = bool(rng.random() < 0.6) if not is_shared else _drafts_too(seed)
    case = random_case(
        seed,
        is_by_priority=is_by_priority,
        has_windows=None if not is_shared and not drafts else False,
        has_drafts=drafts,
    )
    shape, blocks = case.engine.shape, case.engine.num_blocks
    block, drafted = shape.block_size, shape.draft_tokens
    two_every = int(rng.choice([0, 0, 1, 2, block])) if shape.is_since(32) and is_shared else 0
    two_every *= not drafts
    full: KvGroup = {"kind": "FullAttentionSpec", "block_size": block}
    if is_shared and shape.drops_hit:
        full = {**full, DRAFTS_IN: True}
    state: KvGroup = {
        "kind": "MambaSpec",
        "block_size": block if is_shared else shape.max_model_len,
        "mamba_cache_mode": "align" if is_shared else "none",
        "num_speculative_blocks": drafted,
        "num_prefill_checkpoint_blocks": int(two_every > 0),
        "prefill_checkpoint_alignment": two_every or None,
        "tokens_per_state": -1,
    }
    others = shape.kv_groups or (full,) * int(rng.choice([1, 1, 2]))
    made = [*others, *[state] * int(rng.choice([1, 2, 3]))]
    rng.shuffle(made)
    kept = [None, None, 0, block * int(rng.choice([1, 2, 5]))][int(rng.integers(0, 4))]
    groups = tuple({**group, RETENTION: kept if is_shared else None} for group in made)
    scheduler = {**shape.scheduler, CHUNKS: True} if is_shared else shape.scheduler
    shape = replace(
        shape,
        kv_kind=" and ".join(str(group["kind"]) for group in groups),
        kv_groups=groups,
        prefix_caching=is_shared,
        scheduler=scheduler,
    )
    enough = len(case.trace) * int(shape.held_blocks(np.array([shape.max_model_len]), 9)[0])
    ceiling = case.engine.ceiling if shape.scheduler[RESERVES] else case.limits
    blocks = _scarce(rng, shape, ceiling) if rng.random() < 0.6 else blocks + enough
    return replace(case, engine=replace(case.engine, shape=shape, num_blocks=blocks))


def _drafts_too(seed: int) -> bool:
    """Whether an engine drafts whose states others find, which this vLLM's may."""
    return is_since(installed_vllm()[1], 32) and np.random.default_rng([seed, 9]).random() < 0.4


def _with_slots(rng: np.random.Generator, tokens: int, shape: EngineShape) -> Drafts:
    """Return a way to draft of its vLLM for which each request takes some of the budget."""
    fills_in = shape.is_since(32) and bool(rng.random() < 0.5)
    ways = [
        Drafts("eagle", tokens, tokens - 1),
        Drafts("draft_model", tokens, 1),
        Drafts("draft_model", tokens, tokens),
    ]
    if shape.is_since(28):
        # Since 0.33 these draft in a pass of their own.
        takes = not shape.is_since(33)
        ways += [
            Drafts("dflash", tokens, takes * tokens, fills_in=True),
            Drafts("dspark", tokens, takes * (tokens - 1), fills_in=fills_in),
        ]
    return ways[int(rng.integers(len(ways)))]


def _groups(rng: np.random.Generator, block: int) -> tuple[KvGroup, ...]:
    """Return the groups of a model whose layers look back a window, or some of them."""
    windows = [(True, False), (False, True), (True, True, False), (True,), (True, False, False)]
    looks_back = windows[int(rng.integers(0, len(windows)))]
    window = int(rng.choice([2, block, block + 1, 2 * block, 3 * block + 2, 33, 200]))
    window = max(2, window)
    kept = [None, 0, 0, block * int(rng.choice([1, 2, 5]))][int(rng.integers(0, 4))]
    return tuple(
        {
            "kind": "SlidingWindowSpec" if looks else "FullAttentionSpec",
            "block_size": block,
            "sliding_window": window if looks else None,
            RETENTION: kept,
        }
        for looks in looks_back
    )


def _with_sizes(
    rng: np.random.Generator, groups: tuple[KvGroup, ...], block: int
) -> tuple[KvGroup, ...]:
    """Return the groups, in two of five cases with larger blocks of one kind, or of both."""
    full, back = [(1, 2), (2, 1), (1, 4), (4, 1), (2, 3), (3, 2)][int(rng.integers(0, 6))]
    kinds = {group["kind"] for group in groups}
    if rng.random() < 0.6 or len(kinds) == 1:
        return groups
    made: list[KvGroup] = []
    for group in groups:
        span = back if group["sliding_window"] else full
        kept = group[RETENTION] and int(group[RETENTION]) * full * back
        made.append({**group, "block_size": block * span, RETENTION: kept})
    return tuple(made)


def _scarce(rng: np.random.Generator, shape: EngineShape, limits: EngineLimits) -> int:
    """Return blocks of which a few requests hold all, with all tokens on their way."""
    longest, in_flight = np.array([shape.max_model_len]), 2 * limits.max_num_batched_tokens
    least = int(shape.held_blocks(longest, in_flight)[0]) + 2
    more = 2 if shape.scheduler["watermark"] else 1
    return more * least + int(rng.integers(0, 1 + least))


def _gate(rng: np.random.Generator) -> GateLimits:
    return GateLimits(
        max_in_flight=int(rng.choice([1, 2, 4, 16])),
        max_queued=int(rng.choice([0, 1, 3, 50])),
        queue_timeout_s=float(rng.choice([0.01, 0.1, 1.0])) if rng.random() < 0.6 else None,
        max_output_tokens=int(rng.choice([1, 8, 60])) if rng.random() < 0.4 else None,
    )


def _trace(rng: np.random.Generator, block: int) -> Trace:
    n = int(rng.integers(1, 60))
    longest = int(rng.choice([3, 20, 100, 250]))
    prompts = rng.integers(1, longest + 1, n)
    outputs = rng.integers(1, int(rng.choice([2, 30, longest + 1])) + 1, n)
    if rng.random() < 0.3:
        prompts = np.maximum(1, prompts // block * block)
    gaps_s = rng.exponential(float(rng.choice([0.0005, 0.01, 0.1, 1.0])), n)
    gaps_s[rng.random(n) < 0.3] = 0.0
    hashes = None
    if rng.random() < 0.6:
        hashes = _hashes(rng, prompts, block)
    turns = None
    if rng.random() < 0.3:
        after = np.array([int(rng.integers(-1, i)) if i else -1 for i in range(n)])
        after[rng.random(n) < 0.5] = -1
        pause_s = np.where(after >= 0, rng.exponential(0.05, n), 0.0)
        turns = Turns(after.astype(np.int64), pause_s)
    return Trace(
        due_s=np.cumsum(gaps_s),
        prompt_tokens=prompts.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        hashes=hashes,
        turns=turns,
    )


def _with_answers(rng: np.random.Generator, trace: Trace) -> Trace:
    """Let most next turns begin with the turn before and its answer, some not quite."""
    if trace.turns is None or rng.random() < 0.2:
        return trace
    prompts = trace.prompt_tokens.copy()
    rows = (
        [] if trace.hashes is None else [list(trace.hashes.row(i)) for i in range(len(trace))]
    )
    size = 1 if trace.hashes is None else trace.hashes.block_size
    for row in np.flatnonzero(trace.turns.after >= 0).tolist():
        past = int(trace.turns.after[row])
        tokens = int(prompts[past] + trace.output_tokens[past] + rng.integers(-2, 40))
        if tokens + trace.output_tokens[row] > LONGEST or rng.random() < 0.2:
            continue
        prompts[row] = max(tokens, 1)
        if rows:
            shared = rows[past][: int(prompts[past]) // size]
            count = int(prompts[row]) // size
            own = int(rng.choice([past, row])) * 1000 + 10**10
            rows[row] = (shared + [own + i for i in range(len(shared), count)])[:count]
            if rng.random() < 0.15 and count:
                rows[row][int(rng.integers(0, count))] = int(rng.integers(0, 300))
    hashes = None if trace.hashes is None else HashIds.from_rows(rows, size)
    return replace(trace, prompt_tokens=prompts, hashes=hashes)


def _hashes(rng: np.random.Generator, prompts: np.ndarray, block: int) -> HashIds:
    recorded = int(rng.choice([block, 2 * block, 16, 24, max(1, block // 2)]))
    rows = []
    for tokens in prompts:
        family, keeps = int(rng.integers(0, 3)), int(rng.integers(0, 8))
        count = int(tokens) // recorded + int(rng.random() < 0.5)
        count = min(count, -(-int(tokens) // recorded))
        own = int(rng.integers(1000, 10**9))
        rows.append([family * 100 + i if i < keeps else own + i for i in range(count)])
    return HashIds.from_rows(rows, recorded)


def _shape(rng: np.random.Generator, block: int, max_len: int) -> EngineShape:
    chunks = bool(rng.random() < 0.8)
    threshold = int(rng.choice([0, 0, 0, 7, 40])) if chunks else 0
    return replace(
        SHAPE,
        # What decides is the vLLM at hand.
        vllm_version=installed_vllm()[1],
        max_model_len=max_len,
        block_size=block,
        prefix_caching=bool(rng.random() < 0.7),
        asynchronous=bool(rng.random() < 0.5),
        captured_sizes=(),
        scheduler={
            "policy": "priority" if rng.random() < 0.15 else "fcfs",
            "enable_chunked_prefill": chunks,
            "long_prefill_token_threshold": min(threshold, max_len),
            "long_prefill_token_threshold_adaptive": bool(threshold and rng.random() < 0.4),
            RESERVES: bool(rng.random() < 0.5),
            "watermark": 0.05 if rng.random() < 0.2 else 0.0,
        },
    )


def _limits(
    rng: np.random.Generator, shape: EngineShape, max_len: int
) -> tuple[EngineLimits, EngineLimits]:
    cap = int(rng.choice([1, 2, 3, 5, 8, 16, 64]))
    budget = int(rng.choice([cap, cap + 3, 16, 40, 128, 2048]))
    if not shape.scheduler["enable_chunked_prefill"]:
        budget = max(budget, max_len)
    elif rng.random() < 0.15:
        # Fewer tokens than requests, so that some have to wait in the midst of their answers.
        budget = max(1, cap // 2)
    ceiling = EngineLimits(max(cap, 64), max(budget, 2048, max_len))
    return EngineLimits(min(cap, budget), budget) if budget < cap else EngineLimits(
        cap, budget
    ), ceiling


def _model(rng: np.random.Generator) -> StepModel:
    scale = float(rng.choice([0.0005, 0.01]))
    sizes = (1, 2, 4, 8, 16) if rng.random() < 0.5 else ()
    factors = np.exp(rng.normal(0.0, 0.3, rng.integers((1, 2), 9)))
    return StepModel(
        token_knots=(0, 4, 20, 64),
        token_slopes_s=tuple(scale * rng.random(4) * 0.02),
        base_s=scale * (0.5 + rng.random()),
        seq_s=scale * rng.random() * 0.1,
        eager_s=scale * rng.random(),
        prefill_base_s=scale * rng.random(),
        decode_context_s=scale * rng.random() * 1e-4,
        mixed_context_s=scale * rng.random() * 1e-4,
        spread_s=scale * rng.random() * 1e-3,
        mixed_spread_s=0.0,
        prefill_context_s=scale * rng.random() * 1e-5,
        tidy_s=scale * 0.1 * rng.random(),
        graphs=Graphs(sizes, has_mixed=bool(rng.random() < 0.5)),
        factors=Factors(tuple(map(tuple, factors.tolist()))),
        host=_host(rng.spawn(1)[0], scale),
    )


def _host(rng: np.random.Generator, scale: float) -> Host:
    """Return a host that launches now faster and now slower than the device computes."""
    if rng.random() < 0.4:
        return NO_HOST
    return Host(
        full_s=scale * 2.0 * rng.random(),
        mixed_s=scale * 4.0 * rng.random(),
        eager_s=scale * 4.0 * rng.random(),
        seq_s=scale * rng.random() * 0.1,
        token_s=scale * rng.random() * 0.01,
    )


def _plan(rng: np.random.Generator, trace: Trace) -> ReplayPlan:
    plan = ReplayPlan(keep_steps=True)
    kind = rng.random()
    if kind < 0.15:
        plan = replace(plan, load_model=LoadModel.CLOSED, concurrency=int(rng.integers(1, 9)))
    elif kind < 0.3:
        batches = StaticBatches(int(rng.integers(1, 6)), float(rng.choice([0.0, 0.05])))
        plan = replace(plan, batches=batches)
    if rng.random() < 0.3:
        plan = replace(plan, sessions=Sessions.RECORDED)
    if rng.random() < 0.25:
        plan = replace(plan, timeout_s=float(rng.choice([0.02, 0.2, 2.0])))
    if rng.random() < 0.15:
        cut = CutRule(late_s=float(rng.choice([0.05, 0.5])), allowed_late=len(trace) // 3)
        plan = replace(plan, cut=cut)
    elif rng.random() < 0.1:
        plan = replace(plan, cut=CutRule(max_clock_s=float(rng.choice([0.05, 0.5]))))
    return plan
