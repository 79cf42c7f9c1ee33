"""Derive a profile from published measurements of a GPU's operations.

NVIDIA's AIConfigurator keeps tables of how long the operations of a model take on a GPU,
measured inside vLLM, and answers how long a batch takes. Asked about batches of all kinds, it
gives steps like those that a calibration sees, and a step model is fitted to them. What the
tables leave out (scheduling, launches, sampling, the API server) makes real steps longer; by
how much is known from published results, and stays open within what they scatter by.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import hyphenated
from tuner.engine.shape import (
    FULL_ATTENTION,
    RETENTION,
    SETTING_GRAPHS,
    EngineShape,
    KvGroup,
    KvLayout,
)
from tuner.engine.steps import StepColumns
from tuner.errors import UsageError
from tuner.shadow.derived.gpus import GPUS, NODE_GPUS
from tuner.shadow.derived.models import LIBRARY, ModelConfig
from tuner.shadow.derived.tables import Tables
from tuner.shadow.derived.wanted import Served, Wanted
from tuner.shadow.fit import fit
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.speed import DERIVED_SETTING, Uncertainty
from tuner.shadow.step_model import TERMS, Factors, Host
from tuner.stats import Floats

ORIGIN: Final = "derived from published tables of NVIDIA AIConfigurator"

# By how much real steps are longer than the tables say, how far that scatters, and how far
# prefills and long contexts scatter besides, in logarithms: ours, from published points of
# dense models, whose time per output token is 0 to 20 % above a replay of the tables.
LONGER, LEVEL, PREFILL, CONTEXT = 1.10, 0.10, 0.20, 0.08
# How wrong the profile is said to be: eight of ten published points of dense models are within
# 14 %, nine within 22 (tests/benchmarks/README.md).
WRONG_RATIO: Final = 0.20


# What launching took the host of an H200 with 28 layers: one graph, one for each layer, a graph
# for none (tests/benchmarks/README.md, n 1). In other minutes it took a third longer.
SEEN_HOST, SEEN_LAYERS = Host(full_s=0.0016, mixed_s=0.0047, eager_s=0.011, spread=0.3), 28
# By how much that engine's steps were longer without asynchronous scheduling, of decodes alone
# and with a prompt: the host prepares a batch while the device has none (n 1).
PREPARING_S, PREPARING_PROMPT_S = 0.0018, 0.0037


def derive(wanted: Wanted) -> Profile:
    """Return the profile of a model on a GPU.

    Raises: UsageError if the library is missing, the model unknown or of a kind that cannot be
        predicted, it does not fit into the memory, or is served as the tables do not know.
    """
    config = ModelConfig.of(wanted.model)
    shape = _shape(wanted, config)
    config.check_attention(shape.max_model_len)
    config.check_weights()
    with config.folder() as folder:
        tables = Tables(wanted, config, folder)
        starts = tuple(_starts(wanted, tables))
        held_tokens = _longest_held(shape, wanted.at, starts[0].num_blocks)
        _check_longest(wanted, shape, held_tokens)
        steps = tables.steps(shape, held_tokens)
    host = _host(config)
    if not shape.asynchronous:
        steps = _waited_for(steps, shape, host)
    found = fit([steps], shape.graphs)
    version = importlib.metadata.version(LIBRARY)
    return Profile(
        shape=shape,
        kv_starts=starts,
        step_model=replace(found.model.scaled(LONGER), host=host),
        fit=found.error,
        metric_error_ratio=WRONG_RATIO,
        made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        calibrated_on=(f"{LIBRARY} {version}, {wanted.gpu.name}, vLLM {wanted.gpu.tables}",),
        current_limits=wanted.at,
        serve_values=_serve_values(wanted, shape),
        uncertainty=replace(Uncertainty.of(_directions()), setting=DERIVED_SETTING),
        origin=f"{ORIGIN} ({LIBRARY} {version}, Apache-2.0), not measured",
        doubts=(*config.doubts(), *_doubts(wanted)),
    )


def _serve_values(wanted: Wanted, shape: EngineShape) -> dict[str, object]:
    """Return the configuration that the profile is of, on as many GPUs as were asked for."""
    named = {
        key: value
        for key, value in wanted.serve_values.items()
        if hyphenated(key).replace("-", "_") not in shape.parallelism
    }
    return {"model": wanted.model, **shape.parallel_values, **named}


def _doubts(wanted: Wanted) -> Iterator[str]:
    """Yield why a prediction on these GPUs is further off than usual."""
    if wanted.tensor_parallel > 1 and wanted.gpu.is_pcie:
        yield "tensor parallelism over PCIe: real steps are about a third longer than this"
    if wanted.tensor_parallel > 2 and wanted.gpu.name == "l40s":
        yield (
            "in the tables a prompt of 2,000 tokens takes four L40S three times and eight of "
            "them seven times as long as one: where cards talk faster, prompts do"
        )
    if wanted.tensor_parallel > NODE_GPUS:
        yield f"more than {NODE_GPUS} GPUs talk over a network, which the tables leave out"
    if wanted.gpu.tables != GPUS[0].tables:
        yield f"the tables of {wanted.gpu.name} were measured in vLLM {wanted.gpu.tables}"


def _starts(wanted: Wanted, tables: Tables) -> Iterator[KvStart]:
    """Yield the KV-cache blocks of the start that is wanted, and of one of another budget.

    That is a larger one as far as there is room. Raises: UsageError.
    """
    at, fixed = wanted.at, wanted.served.num_blocks
    if fixed is not None:
        yield KvStart(at, fixed)
        return
    yield KvStart(at, tables.blocks(at))
    for times in (4.0, 2.0, 0.5):
        budget = max(at.max_num_seqs, int(times * at.max_num_batched_tokens))
        other = EngineLimits(at.max_num_seqs, budget)
        if other == at:
            continue
        try:
            yield KvStart(other, tables.blocks(other))
        except UsageError:
            if times < 1:
                raise
            continue
        return


def _longest_held(shape: EngineShape, at: EngineLimits, num_blocks: int) -> int:
    """Return how many tokens a request may have for which there is room, alone in the KV cache.

    Of these it holds a block in the group of full attention, beside its windows in the others.
    """
    layout = shape.kv_layout or KvLayout()
    in_windows = sum(layout.looks_back) * shape.most_in_window(shape.in_flight_tokens(at))
    return max(0, num_blocks - in_windows) * shape.block_size


def _check_longest(wanted: Wanted, shape: EngineShape, held_tokens: int) -> None:
    """Refuse what vLLM would not start: a request that fills more than the KV cache.

    Raises: UsageError.
    """
    if held_tokens < shape.max_model_len:
        gpus = f"{wanted.tensor_parallel} x {wanted.gpu.name}"
        raise UsageError(
            f"the KV cache of {wanted.model} on {gpus} at {wanted.at} holds {held_tokens:,} "
            f"tokens, and a request may have {shape.max_model_len:,}: vLLM would not start",
            f"more GPUs with --tp, or in --config max-model-len: {held_tokens // 1024 * 1024}, "
            "or num-gpu-blocks-override as a start of yours has said",
        )


def _host(config: ModelConfig) -> Host:
    """Return what launching takes a host, by the number of layers that it launches."""
    times = config.integer("num_hidden_layers", SEEN_LAYERS) / SEEN_LAYERS
    mixed_s, eager_s = SEEN_HOST.mixed_s * times, SEEN_HOST.eager_s * times
    return replace(SEEN_HOST, mixed_s=mixed_s, eager_s=eager_s)


def _waited_for(steps: StepColumns, shape: EngineShape, host: Host) -> StepColumns:
    """Return the steps of a host that launches a batch once the one before is done.

    One takes no less than its launch. They are scaled by LONGER, which launching and preparing
    are not.
    """
    launch_s = (
        Host.loads_of(steps.decode_seqs, steps.prefill_tokens, steps.tokens, shape.graphs)
        @ host.each_s
    )
    added_s = np.where(steps.prefill_tokens > 0, PREPARING_PROMPT_S, PREPARING_S)
    took_s = np.maximum(steps.duration_s, launch_s / LONGER) + added_s / LONGER
    return replace(steps, duration_s=took_s)


def _shape(wanted: Wanted, config: ModelConfig) -> EngineShape:
    """Return the engine that would be started, with vLLM's own options where none are named.

    Raises: UsageError.
    """
    served, longest = wanted.served, config.longest
    if (wanted.max_model_len or 0) > longest:
        raise UsageError(
            f"max-model-len: {wanted.max_model_len} is more than the {longest} of the model, "
            "which vLLM refuses"
        )
    quantised = wanted.serve_values.get("quantization")
    if quantised is not None and not config.is_quantised:
        raise UsageError(
            f"quantization: {quantised} of a model whose weights are not stored so is not in "
            "the tables",
            "name the folder of the quantised model, or measure: tune on one such GPU",
        )
    groups = _kv_groups(config.window, served)
    shape = EngineShape(
        model=wanted.model,
        device=wanted.gpu.device,
        dtype=config.dtype,
        vllm_version=wanted.vllm_version,
        parallelism={
            "tensor_parallel_size": wanted.tensor_parallel,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        vocab_size=config.integer("vocab_size", 32000),
        max_model_len=wanted.max_model_len or config.usual_length,
        block_size=served.block_size,
        kv_kind=" and ".join(str(group["kind"]) for group in groups) or FULL_ATTENTION,
        prefix_caching=served.prefix_caching,
        asynchronous=served.asynchronous,
        captured_sizes=(),
        scheduler=dict(served.scheduler),
        model_sets_graphs=config.architecture in SETTING_GRAPHS,
        kv_groups=groups,
    )
    sizes = () if served.is_eager else shape.chosen_sizes(wanted.at)
    return replace(shape, captured_sizes=sizes)


def _kv_groups(window: int, served: Served) -> tuple[KvGroup, ...]:
    """Return the KV-cache groups of layers of which every other looks back a window.

    None for a window of 0, where all are of full attention. Raises: UsageError.
    """
    if not window:
        return ()
    if not served.has_hybrid_cache:
        raise UsageError(
            "disable-hybrid-kv-cache-manager: true keeps what lies behind a window, and how "
            "many blocks there are then is not in the tables",
            "leave it out, or measure: tune on one such GPU",
        )
    both = {"block_size": served.block_size, RETENTION: served.retention}
    return (
        {"kind": "SlidingWindowSpec", **both, "sliding_window": window},
        {"kind": "FullAttentionSpec", **both},
    )


def _directions() -> Floats:
    """Return in which directions the tables may be off: all, prompts, and long contexts.

    Tokens of prompts and of decodes are of one curve, so that batches with a prompt are off by
    the factor that they have.

    Shapes: [3, TERMS + factors without and with a prompt].
    """
    rows = np.zeros((3, len(TERMS) + Factors().table.size))
    rows[0, : len(TERMS)] = LEVEL
    rows[1, -1] = PREFILL
    for at, term in enumerate(TERMS):
        rows[2, at] = CONTEXT * term.endswith("context_s")
    return rows
