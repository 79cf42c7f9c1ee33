"""What vLLM's scheduler needs to know of an engine, and nothing else.

Read off a running engine and kept in a profile; from it the shadow engine builds the same
scheduler and KV-cache manager on a machine that has neither the model nor the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

# The kinds of KV cache whose blocks the simulator keeps account of. Of others (sliding windows,
# state-space layers, several groups at once) vLLM's own scheduler is asked.
SUPPORTED_KV = ("full_attention",)

KvGroup = Mapping[str, bool | int | str | None]
"""A group of a model's KV cache: vLLM's class of it as `kind`, and its plain fields."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine without its model: identity, KV-cache geometry and scheduler options.

    `scheduler` holds the plain options of vLLM's SchedulerConfig under vLLM's names, the two
    tuned limits excepted. `captured_sizes` are the batch sizes in tokens for which graphs were
    captured, ascending, empty where there are none. `kv_kind` is "full_attention", or what
    else the model's KV cache is made of, whose groups then are in `kv_groups`.

    Units: tokens, blocks of block_size tokens.
    """

    model: str
    device: str
    dtype: str
    vllm_version: str
    parallelism: Mapping[str, int]
    vocab_size: int
    max_model_len: int
    block_size: int
    kv_kind: str
    prefix_caching: bool
    asynchronous: bool
    captured_sizes: tuple[int, ...]
    scheduler: Mapping[str, bool | int | float | str | None]
    kv_groups: tuple[KvGroup, ...] = ()

    @property
    def has_priorities(self) -> bool:
        """Whether requests of a smaller priority are served first."""
        return self.scheduler.get("policy") == "priority"


def padded_tokens(tokens: int, captured_sizes: tuple[int, ...]) -> int:
    """Return the tokens that a batch computes once padded to a captured graph.

    A batch above the largest graph runs unpadded.

    Source: VllmConfig.pad_for_cudagraph in vLLM's vllm/config/vllm.py.

    >>> padded_tokens(5, (1, 2, 4, 8)), padded_tokens(9, (1, 2, 4, 8)), padded_tokens(3, ())
    (8, 9, 3)
    """
    at = bisect_left(captured_sizes, tokens)
    return captured_sizes[at] if at < len(captured_sizes) else tokens
