"""For what a profile is derived: model, GPU, and how it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import check_length, human_integer, hyphenated, limits, twin
from tuner.engine.shape import RETENTION
from tuner.errors import UsageError
from tuner.shadow.derived.gpus import Gpu

BLOCK_SIZE: Final = 16
MEMORY_SHARE: Final = 0.92
"""Source: vLLM config/cache.py, CacheConfig.gpu_memory_utilization, 0.32."""
SCHEDULER: Final[Mapping[str, bool | int | float | str]] = {
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "policy": "fcfs",
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
}
"""vLLM's own options where a configuration says nothing. Source: config/scheduler.py."""

NAMED_SCHEDULER: Final[Mapping[str, bool | int | float | str]] = {
    "long_prefill_token_threshold_adaptive": False,
    "prefill_schedule_interval": 1,
}
"""Options that not every release has, so that a profile has them where they are named alone."""

# Keys that must not say more than this: the tables are asked about nothing else, and the
# simulator keeps no other schedule.
_ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "data-parallel-size": (1,),
    "pipeline-parallel-size": (1,),
    "decode-context-parallel-size": (1,),
    "prefill-context-parallel-size": (1,),
    "max-num-partial-prefills": (1,),
    "max-long-partial-prefills": (1,),
    "kv-cache-dtype": ("auto", "bfloat16", "float16"),
    "dtype": ("auto", "bfloat16", "float16", "half"),
    "optimization-level": (2, 3, "2", "3"),
    "performance-mode": ("balanced",),
    "model-impl": ("auto", "vllm"),
    **dict.fromkeys(
        (
            *("speculative-config", "compilation-config", "cudagraph-capture-sizes"),
            *("max-cudagraph-capture-size", "cpu-offload-gb"),
            *("kv-cache-memory-bytes", "kv-transfer-config", "kv-offloading-size"),
            *("spec-method", "spec-model", "spec-tokens", "offload-group-size"),
            *("hf-overrides", "hf-config-path", "quantization-config"),
            *("scheduler-cls", "max-num-queued-reqs", "max-num-queued-tokens"),
        ),
        (None,),
    ),
    **dict.fromkeys(
        ("enable-expert-parallel", "enable-lora", "enable-dbo", "disable-sliding-window"),
        (False,),
    ),
}


@dataclass(frozen=True, slots=True)
class Served:
    """What a served configuration says that a prediction takes into account.

    `num_blocks` are the KV-cache blocks where it sets them, and `kv_dtype` what keys and values
    are kept in, by the tables' name.
    """

    limits: tuple[int | None, int | None] = (None, None)
    tensor_parallel: int = 1
    max_model_len: int | None = None
    memory_share: float = MEMORY_SHARE
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_dtype: str | None = None
    prefix_caching: bool = True
    retention: int = 0
    has_hybrid_cache: bool = True
    asynchronous: bool = True
    is_eager: bool = False
    scheduler: Mapping[str, bool | int | float | str] = field(default_factory=lambda: SCHEDULER)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Return what a configuration says.

        Raises: UsageError for a value that vLLM would not take, and for what is not predicted.
        """
        said = _Values({hyphenated(key): value for key, value in values.items()})
        said.check()
        scheduler = {
            name: said.like(hyphenated(_KEYS.get(name, name)), default)
            for name, default in {**SCHEDULER, **NAMED_SCHEDULER}.items()
            if name in SCHEDULER or said.names(hyphenated(name))
        }
        return cls(
            limits=limits(values),
            tensor_parallel=said.integer("tensor-parallel-size", 1) or 1,
            max_model_len=said.integer("max-model-len"),
            memory_share=said.share("gpu-memory-utilization", MEMORY_SHARE),
            block_size=said.integer("block-size", BLOCK_SIZE) or BLOCK_SIZE,
            num_blocks=said.integer("num-gpu-blocks-override"),
            kv_dtype=said.kv_dtype,
            prefix_caching=said.switch("enable-prefix-caching", default=True),
            retention=said.integer(hyphenated(RETENTION), 0, least=0) or 0,
            has_hybrid_cache=not said.switch("disable-hybrid-kv-cache-manager", default=False),
            asynchronous=said.switch("async-scheduling", default=True),
            is_eager=said.switch("enforce-eager", default=False),
            scheduler=scheduler,
        )


_KEYS: Final[Mapping[str, str]] = {"policy": "scheduling-policy"}
"""Options of the scheduler whose key is another one."""


@dataclass(frozen=True, slots=True)
class _Values:
    """A configuration's keys, hyphenated, of which each is read as what it has to be."""

    values: Mapping[str, object]

    def check(self) -> None:
        """Refuse what is not predicted. Raises: UsageError."""
        check_length(self.values)
        for key, allowed in _ONLY.items():
            value = self.values.get(key)
            is_switch = allowed == (False,)
            if value is None or (self.switch(key, default=False) if is_switch else value) in (
                allowed
            ):
                continue
            raise UsageError(
                f"{key}: {value} changes what a step takes, the KV cache or the schedule, "
                "which the tables or the simulator do not know",
                "leave it out and judge what is predicted as without it, or measure: tune on "
                "one such GPU, or tune profile fit in production",
            )

    @property
    def kv_dtype(self) -> str | None:
        """What keys and values are kept in where it is named, 16 bits wide as `check` wants."""
        return "bfloat16" if self.values.get("kv-cache-dtype") not in (None, "auto") else None

    def names(self, key: str) -> bool:
        """Whether the configuration says anything of an option, also by its other name."""
        return key in self.values or twin(key) in self.values

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return a whole number of at least so much. Raises: UsageError."""
        value = self.values.get(key)
        if value is None:
            return default
        found = None if isinstance(value, bool) else human_integer(str(value))
        if found is None or found < least:
            raise UsageError(f"{key}: {value} is no whole number of at least {least}")
        return found

    def share(self, key: str, default: float) -> float:
        """Return a share of the memory. Raises: UsageError."""
        value = self.values.get(key, default)
        try:
            found = float(str(value))
        except ValueError:
            found = 0.0
        if not 0 < found <= 1:
            raise UsageError(f"{key}: {value} is no share, expected more than 0, at most 1")
        return found

    def switch(self, key: str, *, default: bool) -> bool:
        """Return what a switch says, also by its other name. Raises: UsageError."""
        for name, is_other in ((key, False), (f"no-{key}", True)):
            value = self.values.get(name)
            if value is None:
                continue
            if str(value).lower() not in ("true", "false"):
                raise UsageError(f"{name}: {value} is neither true nor false")
            return (str(value).lower() == "true") is not is_other
        return default

    def like(self, key: str, default: bool | float | str) -> bool | int | float | str:  # noqa: FBT001 - an option's own value
        """Return an option of the kind that its default is of. Raises: UsageError."""
        if isinstance(default, bool):
            return self.switch(key, default=default)
        value = self.values.get(key, default)
        try:
            return type(default)(str(value))
        except ValueError:
            raise UsageError(f"{key}: {value} is no number") from None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a profile is derived for; what the configuration says is in `serve_values`.

    `limits`, `max_model_len` and `memory_share` are those of vLLM, or of the model, where
    nothing is said.

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

    @property
    def served(self) -> Served:
        """What else the configuration says. Raises: UsageError."""
        return Served.of(self.serve_values)

    @property
    def at(self) -> EngineLimits:
        """The limits, vLLM's own on the GPU where none were named."""
        return self.limits or self.gpu.limits(self.vllm_version)
