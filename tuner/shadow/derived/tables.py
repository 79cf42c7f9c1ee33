"""What the library that holds the measurements answers of a model on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import EngineShape
from tuner.engine.steps import StepColumns
from tuner.errors import UsageError
from tuner.shadow.derived.models import ModelConfig, library
from tuner.shadow.derived.wanted import Wanted
from tuner.stats import Floats

# Batches that are asked about: ours; twenty microseconds each.
ASKED: Final = 6000

_Batch = tuple[int, int, int, int, int]
"""Decoding sequences, their contexts in all, prefilled tokens, of how many prompts, and how
much of each was prefilled before."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The measurements, asked about a model in a folder as it is wanted."""

    wanted: Wanted
    config: ModelConfig
    folder: str

    def blocks(self, limits: EngineLimits) -> int:
        """Return the KV-cache blocks of a start. Raises: UsageError where there is no room."""
        wanted, size = self.wanted, self.wanted.served.block_size
        with self._asked(f"at {limits}"):
            found = library("aiconfigurator_core.sdk").estimate_kv_cache(
                self.folder,
                wanted.gpu.name,
                "vllm",
                wanted.gpu.tables,
                max_num_tokens=limits.max_num_batched_tokens,
                max_batch_size=limits.max_num_seqs,
                memory_fraction_kind="of_total",
                memory_fraction_value=wanted.memory_share,
                kvcache_quant_mode=self._kv_dtype,
                **self._parallel,
            )
            loaded = self.config.loaded_bytes
            if loaded is None:
                return int(found["total_kv_size_tokens"]) // size
            # The library takes experts to be smaller; half of the layers share a block.
            weights = found["memory_breakdown"]["weights_bytes"]
            room = found["total_kv_size_bytes"] + weights - loaded // wanted.tensor_parallel
            if room <= 0:
                raise ValueError(f"no KV budget: the weights take {loaded / 2**30:.1f} GiB")
            return int(2 * room / found["kv_size_per_token_bytes"]) // size

    def steps(self, shape: EngineShape, held_tokens: int) -> StepColumns:
        """Return batches of all kinds with how long each takes. Raises: UsageError."""
        rows = list(_batches(min(shape.max_model_len, held_tokens), held_tokens))
        wanted = self.wanted
        asked = {
            "schema_version": 1,
            "model_name": self.folder,
            "system_name": wanted.gpu.name,
            "backend": "vllm",
            "backend_version": wanted.gpu.tables,
            "pp_size": 1,
            "kv_cache_dtype": self._kv_dtype,
            "extra": {},
            **self._parallel,
        }
        sdk = library("aiconfigurator_core.sdk")
        with self._asked("in any batch"):
            model = sdk.RustForwardPassPerfModel.from_native(asked)
            times_ms = [_time_ms(model, shape, row) for row in rows]
        return _columns(rows, np.array(times_ms) / 1e3)

    @property
    def _kv_dtype(self) -> str:
        """What keys and values are kept in; the library takes eight bits for those of fp8."""
        return self.wanted.served.kv_dtype or self.config.kv_dtype

    @property
    def _parallel(self) -> dict[str, int]:
        """How the model is spread over GPUs; vLLM spreads each expert as all else."""
        size = self.wanted.tensor_parallel
        experts = {"moe_tp_size": size, "moe_ep_size": 1} if self.config.has_experts else {}
        return {"tp_size": size, **experts}

    @contextmanager
    def _asked(self, of_what: str) -> Iterator[None]:
        """Say in a sentence what the library cannot answer. Raises: UsageError."""
        errors = library("aiconfigurator_core.sdk.errors")
        kinds: list[type[Exception]] = [ValueError]
        found = vars(errors).values()
        kinds += [k for k in found if isinstance(k, type) and issubclass(k, Exception)]
        wanted = self.wanted
        place = f"{wanted.model} on {wanted.tensor_parallel} x {wanted.gpu.name}"
        try:
            with _quiet():
                yield
        except tuple(kinds) as error:
            told = str(error).replace(self.folder, wanted.model).partition(": tried")[0]
            if "no KV budget" in told:
                raise UsageError(
                    f"{place} {of_what}: {told}",
                    "more of them with --tp, a smaller model, or in --config a larger "
                    "gpu-memory-utilization or a smaller token budget",
                ) from error
            raise UsageError(
                f"the tables do not know {place}: {told}",
                "measure it: tune on one such GPU, or derive for another; architectures that "
                "they know are those of Llama, Qwen2, Qwen3, Mixtral and others",
            ) from error


def _columns(rows: Sequence[_Batch], duration_s: Floats) -> StepColumns:
    """Return batches and how long each takes as steps."""
    seqs, contexts, prefill, prompts, cached = np.array(rows, np.float64).T
    each = np.divide(prefill, prompts, out=np.zeros_like(prefill), where=prompts > 0)
    pairs = prompts * (each * cached + each * (each + 1) / 2)
    return StepColumns.of_batches(duration_s, seqs, prefill, contexts, pairs, prompts)


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
