"""A profile of a GPU that is not at hand, from published measurements of its operations.

NVIDIA's AIConfigurator keeps tables of how long the operations of a model take on a GPU,
measured inside vLLM, and answers how long a batch takes. Asked about batches of all kinds, it
gives steps like those that a calibration sees, and a step model is fitted to them. What the
tables leave out (scheduling, launches, sampling, the API server) makes real steps longer; by
how much is known from published results, and stays open within what they scatter by.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import SUPPORTED_KV, EngineShape
from tuner.engine.steps import StepColumns
from tuner.errors import UsageError
from tuner.shadow.fit import fit
from tuner.shadow.profiles import KvStart, Profile
from tuner.shadow.speed import Uncertainty
from tuner.shadow.step_model import TERMS, Factors, Host
from tuner.stats import Floats

LIBRARY: Final = "aiconfigurator-core"
ORIGIN: Final = "derived from published tables of NVIDIA AIConfigurator"
INSTALL: Final = "pip install 'max-num-seqs-tuner[predict]'"

# By how much real steps are longer than the tables say, how far that scatters, and how far
# prefills and long contexts scatter besides, in logarithms: ours, from published points of
# dense models, whose time per output token is 0 to 20 % above a replay of the tables.
LONGER, LEVEL, PREFILL, CONTEXT = 1.10, 0.10, 0.20, 0.08
# What is told of the error, and how wrong the profile is said to be: ours, of the same points.
EXPECTED: Final = "time per output token up to 20 % longer, first token 10 ms later and +- 30 %"
WRONG_RATIO: Final = 0.20
# Batches that are asked about: ours; twenty microseconds each.
ASKED: Final = 6000
BLOCK_SIZE: Final = 16
MEMORY_SHARE: Final = 0.92
"""Source: vLLM config/cache.py, CacheConfig.gpu_memory_utilization, 0.32."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with tables: its name there, whose vLLM they were measured in, and vLLM's name.

    `is_pcie` says whether several talk over PCIe, whose collectives the tables leave out.
    `seqs` and `tokens` are vLLM's own limits on it.

    Source: vLLM engine/arg_utils.py, EngineArgs.get_batch_defaults.
    """

    name: str
    tables: str
    device: str
    is_pcie: bool = False
    seqs: int = 1024
    tokens: int = 8192


GPUS: Final = (
    Gpu("h100_sxm", "0.24.0", "NVIDIA H100 80GB HBM3"),
    Gpu("h200_sxm", "0.24.0", "NVIDIA H200"),
    Gpu("b200_sxm", "0.24.0", "NVIDIA B200"),
    Gpu("b300_sxm", "0.24.0", "NVIDIA B300 SXM6 AC"),
    Gpu("gb200", "0.24.0", "NVIDIA GB200"),
    Gpu("l40s", "0.24.0", "NVIDIA L40S", is_pcie=True, seqs=256, tokens=2048),
    Gpu(
        "rtx_pro_6000_server",
        "0.24.0",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        is_pcie=True,
    ),
    Gpu("a100_sxm", "0.14.0", "NVIDIA A100-SXM4-80GB", seqs=256, tokens=2048),
)

# What launching took the host of an H200 with 28 layers: one graph, one for each layer, a graph
# for none (tests/benchmarks/README.md, n 1). In other minutes it took a third longer.
SEEN_HOST, SEEN_LAYERS = Host(full_s=0.0016, mixed_s=0.0047, eager_s=0.011, spread=0.3), 28

SCHEDULER: Final[Mapping[str, bool | int | float | str | None]] = {
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "policy": "fcfs",
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
}
"""vLLM's own options where a configuration says nothing. Source: config/scheduler.py."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a profile is derived for.

    Units: memory_share as gpu-memory-utilization.
    """

    gpu: Gpu
    model: str
    tensor_parallel: int = 1
    limits: EngineLimits | None = None
    max_model_len: int | None = None
    memory_share: float = MEMORY_SHARE
    vllm_version: str = "0.32.0"
    serve_values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Derived:
    """The profile, and why it may be further off than usual, a sentence each."""

    profile: Profile
    warnings: tuple[str, ...]


def gpu_of(name: str) -> Gpu:
    """Return the GPU of that name. Raises: UsageError, with the nearest that is known."""
    wanted = name.lower().replace("-", "_")
    known = {gpu.name: gpu for gpu in GPUS}
    for candidate in (wanted, f"{wanted}_sxm", f"{wanted}_server"):
        if candidate in known:
            return known[candidate]
    near = difflib.get_close_matches(wanted, known, 1, 0.0)
    raise UsageError(
        f"--gpu {name}: no measured tables of it; the nearest that is known is {near[0]}",
        f"one of {', '.join(known)}; of another, measure: tune on one, or tune profile fit",
    )


def derive(wanted: Wanted) -> Derived:
    """Return the profile of a model on a GPU.

    Raises: UsageError if the library is missing, the model unknown or of a kind that cannot be
        predicted, or it does not fit into the memory.
    """
    config = _config_of(wanted.model)
    warnings = tuple(_warnings(wanted, config))
    limits = wanted.limits or EngineLimits(wanted.gpu.seqs, wanted.gpu.tokens)
    shape = _shape(wanted, config, limits)
    starts = tuple(
        KvStart(at, _blocks(wanted, at))
        for at in (limits, EngineLimits(limits.max_num_seqs, 4 * limits.max_num_batched_tokens))
    )
    steps = _asked(wanted, shape, starts[0].num_blocks * BLOCK_SIZE)
    found = fit([steps], shape.graphs)
    version = importlib.metadata.version(LIBRARY)
    profile = Profile(
        shape=shape,
        kv_starts=starts,
        step_model=replace(found.model.scaled(LONGER), host=_host(config)),
        fit=found.error,
        metric_error_ratio=WRONG_RATIO,
        made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        calibrated_on=(f"{LIBRARY} {version}, {wanted.gpu.name}, vLLM {wanted.gpu.tables}",),
        current_limits=limits,
        serve_values={"model": wanted.model, **wanted.serve_values},
        uncertainty=Uncertainty.of(_directions()),
        origin=f"{ORIGIN} ({LIBRARY} {version}, Apache-2.0), not measured",
    )
    return Derived(profile, warnings)


def _host(config: Mapping[str, Any]) -> Host:
    """Return what launching takes a host, by the number of layers that it launches."""
    times = int(config.get("num_hidden_layers", SEEN_LAYERS)) / SEEN_LAYERS
    mixed_s, eager_s = SEEN_HOST.mixed_s * times, SEEN_HOST.eager_s * times
    return replace(SEEN_HOST, mixed_s=mixed_s, eager_s=eager_s)


def _shape(wanted: Wanted, config: Mapping[str, Any], limits: EngineLimits) -> EngineShape:
    """Return the engine that would be started with the limits, with vLLM's own options."""
    longest = int(config.get("max_position_embeddings", 8192))
    shape = EngineShape(
        model=wanted.model,
        device=wanted.gpu.device,
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        vllm_version=wanted.vllm_version,
        parallelism={
            "tensor_parallel_size": wanted.tensor_parallel,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        vocab_size=int(config.get("vocab_size", 32000)),
        max_model_len=min(wanted.max_model_len or longest, longest),
        block_size=BLOCK_SIZE,
        kv_kind=SUPPORTED_KV[0],
        prefix_caching=True,
        asynchronous=True,
        captured_sizes=(),
        scheduler=dict(SCHEDULER),
    )
    return replace(shape, captured_sizes=shape.chosen_sizes(limits))


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


def _library(name: str) -> Any:  # noqa: ANN401 - untyped, and not there everywhere
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("aiconfigurator_core"):
            raise
        raise UsageError(f"{LIBRARY} is not installed", INSTALL) from None


def _known_models() -> dict[str, Path]:
    """Return the configurations that come with the tables, by model."""
    package = Path(_library("aiconfigurator_core").__file__ or "").parent / "model_configs"
    return {
        path.name.removesuffix("_config.json").replace("--", "/"): path
        for path in package.glob("*_config.json")
        if not path.name.endswith("_hf_quant_config.json")
    }


def _config_of(model: str) -> dict[str, Any]:
    """Return a model's configuration, of a folder or by its name. Raises: UsageError."""
    path = Path(model) / "config.json"
    if not path.is_file():
        known = _known_models()
        if model not in known:
            near = ", ".join(difflib.get_close_matches(model, known, 3, 0.3)) or "none"
            raise UsageError(
                f"--model {model}: neither a folder with a config.json nor a model that the "
                f"tables know; the nearest of these: {near}",
                "name a folder that holds the model's config.json",
            )
        path = known[model]
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else found


def _warnings(wanted: Wanted, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a prediction is further off than usual.

    Raises: UsageError for what cannot be predicted.
    """
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds or config.get("kv_lora_rank"):
        what = (
            "latent attention (MLA)" if not kinds else f"layers of {', '.join(sorted(kinds))}"
        )
        raise UsageError(
            f"{wanted.model} has {what}, whose KV cache the shadow does not know",
            "measure it: tune on one such GPU",
        )
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if any(int(config.get(name) or 0) > 1 for name in names):
        yield "a mixture of experts: published points are 5 to 12 % off, first tokens far more"
    heads = int(config.get("num_attention_heads") or 0)
    if heads and heads == int(config.get("num_key_value_heads") or heads):
        yield "every head has keys of its own: published points are 8 to 33 % faster"
    if config.get("quantization_config"):
        yield "quantised weights: small prefills may be far off in the tables"
    if wanted.tensor_parallel > 1 and wanted.gpu.is_pcie:
        yield "tensor parallelism over PCIe: real steps are about a third longer than this"
    if wanted.gpu.tables != GPUS[0].tables:
        yield f"the tables of {wanted.gpu.name} were measured in vLLM {wanted.gpu.tables}"


def _blocks(wanted: Wanted, limits: EngineLimits) -> int:
    """Return the KV-cache blocks of a start. Raises: UsageError where there is no room."""
    try:
        with _quiet():
            return int(
                _library("aiconfigurator_core.sdk").estimate_num_gpu_blocks(
                    wanted.model,
                    wanted.gpu.name,
                    "vllm",
                    wanted.gpu.tables,
                    scheduler_block_size=BLOCK_SIZE,
                    max_num_tokens=limits.max_num_batched_tokens,
                    max_batch_size=limits.max_num_seqs,
                    memory_fraction_kind="of_total",
                    memory_fraction_value=wanted.memory_share,
                    tp_size=wanted.tensor_parallel,
                )
            )
    except ValueError as error:
        gpus = f"{wanted.tensor_parallel} x {wanted.gpu.name}"
        raise UsageError(
            f"{wanted.model} on {gpus} at {limits}: {error}",
            "more of them with --tp, or a smaller model",
        ) from error


def _asked(wanted: Wanted, shape: EngineShape, held_tokens: int) -> StepColumns:
    """Return batches of all kinds with what the tables say of them. Raises: UsageError."""
    rows = list(_batches(min(shape.max_model_len, held_tokens), held_tokens))
    seqs, contexts, prefill, prompts, cached = np.array(rows, np.float64).T
    each = np.divide(prefill, prompts, out=np.zeros_like(prefill), where=prompts > 0)
    duration_s = np.array(_times_ms(wanted, shape, rows)) / 1e3
    nothing = np.zeros(len(rows))
    return StepColumns(
        end_s=np.cumsum(duration_s),
        duration_s=duration_s,
        repeats=np.ones(len(rows)),
        decode_seqs=seqs,
        prefill_tokens=prefill,
        decode_context_tokens=contexts,
        prefill_context_tokens=prompts * (each * cached + each * (each + 1) / 2),
        decode_spread_tokens=nothing,
        running=seqs + prompts,
        waiting=nothing,
        kv_usage_ratio=nothing,
        kv_peak_ratio=nothing,
        preempted=nothing,
        cached_tokens=nothing,
        launch_s=nothing,
        is_late=nothing,
    )


_Batch = tuple[int, int, int, int, int]
"""Decoding sequences, their contexts in all, prefilled tokens, of how many prompts, and how
much of each was prefilled before."""


def _batches(longest: int, held_tokens: int) -> Iterator[_Batch]:
    """Yield what the tables are asked about.

    Half only decode, the others prefill a prompt or more beside none or some decodes; sizes and
    contexts are spread evenly in logarithms, as far as the KV cache holds them.
    """
    rng = np.random.default_rng(0)
    for number in range(ASKED):
        seqs = int(np.exp(rng.uniform(0, np.log(1024))))
        context = int(np.exp(rng.uniform(np.log(16), np.log(longest))))
        context = max(1, min(context, held_tokens // seqs))
        prefill = prompts = cached = 0
        if number % 2:
            seqs = 0 if number % 4 == 1 else seqs
            prefill = int(np.exp(rng.uniform(np.log(16), np.log(16384))))
            prompts = max(1, prefill // int(np.exp(rng.uniform(np.log(16), np.log(8192)))))
            cached = int(rng.choice([0, 0, 0.5, 1, 3]) * prefill / prompts)
        yield seqs, seqs * context, prefill, prompts, cached


def _times_ms(wanted: Wanted, shape: EngineShape, rows: Sequence[_Batch]) -> list[float]:
    """Return how long each batch takes. Raises: UsageError where the tables do not know."""
    model = _model(wanted)
    missing = _library("aiconfigurator_core.sdk.errors").PerfDataNotAvailableError
    try:
        with _quiet():
            return [_time_ms(model, shape, row) for row in rows]
    except missing as error:
        raise UsageError(
            f"the tables of {wanted.gpu.name} lack a measurement that {wanted.model} needs: "
            f"{str(error).partition(': tried')[0]}",
            "measure it: tune on one such GPU, or derive for another",
        ) from error


def _model(wanted: Wanted) -> Any:  # noqa: ANN401 - the library's
    """Return what answers how long a batch takes. Raises: UsageError."""
    sdk = _library("aiconfigurator_core.sdk")
    try:
        with _quiet():
            return sdk.RustForwardPassPerfModel.from_native(
                {
                    "schema_version": 1,
                    "model_name": wanted.model,
                    "system_name": wanted.gpu.name,
                    "backend": "vllm",
                    "backend_version": wanted.gpu.tables,
                    "tp_size": wanted.tensor_parallel,
                    "pp_size": 1,
                    "extra": {},
                }
            )
    except ValueError as error:
        raise UsageError(
            f"the tables do not know {wanted.model} on {wanted.gpu.name}: {error}",
            "architectures that they know are those of Llama, Qwen2, Qwen3, Gemma and others",
        ) from error


def _time_ms(model: Any, shape: EngineShape, row: _Batch) -> float:  # noqa: ANN401
    """Return how long a batch takes, in a captured graph padded to its size.

    What pads it are decodes, or tokens of the prompts, that attend to nothing.
    """
    seqs, contexts, prefill, prompts, cached = row
    run = shape.graphs.padded(seqs + prefill, has_prompt=prefill > 0)
    more = 0 if run is None else run - seqs - prefill
    scheduled = {
        "num_prefill_requests": prompts,
        "sum_prefill_tokens": prefill + more * (prefill > 0),
        "sum_prefill_kv_tokens": prompts * cached,
        "num_decode_requests": seqs + more * (prefill == 0),
        "sum_decode_kv_tokens": contexts,
    }
    asked = {"version": 1, "scheduled_requests": scheduled}
    return float(model.estimate_forward_pass_time_ms(asked))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's own warnings of tables for other models off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
