"""The GPUs of which there are measurements, by the tables' names and by vLLM's."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.shape import is_since
from tuner.errors import UsageError

NODE_GPUS: Final = 8
"""How many of a kind a machine has; more talk over a network that the tables leave out."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with tables: its name there, whose vLLM they were measured in, and vLLM's name.

    `is_pcie` says whether several talk over PCIe, at another speed than the tables' ones.
    `seqs` and `tokens` are vLLM's own limits on it, `is_large` whether it has the 160 GiB of
    memory from which on the budget is twice that since 0.28.

    Source: vLLM engine/arg_utils.py, EngineArgs.get_batch_defaults.
    """

    name: str
    tables: str
    device: str
    is_pcie: bool = False
    seqs: int = 1024
    tokens: int = 8192
    is_large: bool = False

    def limits(
        self, vllm_version: str, seqs: int | None = None, tokens: int | None = None
    ) -> EngineLimits:
        """Return the limits that a vLLM has on it where none, or one of them, is named.

        Source: vLLM engine/arg_utils.py,
            EngineArgs._set_default_max_num_seqs_and_batched_tokens_args.
        Raises: UsageError for two that do not go together.
        """
        times = 2 if self.is_large and is_since(vllm_version, 28) else 1
        tokens = tokens or times * self.tokens
        return EngineLimits(seqs or min(self.seqs, tokens), tokens)


GPUS: Final = (
    Gpu("h100_sxm", "0.24.0", "NVIDIA H100 80GB HBM3"),
    Gpu("h200_sxm", "0.24.0", "NVIDIA H200"),
    Gpu("b200_sxm", "0.24.0", "NVIDIA B200", is_large=True),
    Gpu("b300_sxm", "0.24.0", "NVIDIA B300 SXM6 AC", is_large=True),
    Gpu("gb200", "0.24.0", "NVIDIA GB200", is_large=True),
    Gpu("gb300", "0.24.0", "NVIDIA GB300", is_large=True),
    Gpu("l40s", "0.24.0", "NVIDIA L40S", is_pcie=True, seqs=256, tokens=2048),
    Gpu(
        "rtx_pro_6000_server",
        "0.24.0",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        is_pcie=True,
    ),
    Gpu("a100_sxm", "0.14.0", "NVIDIA A100-SXM4-80GB", seqs=256, tokens=2048),
)


def gpu_of(name: str) -> Gpu:
    """Return the GPU of that name, the tables' or vLLM's.

    Raises: UsageError, with the nearest that is known.
    """
    wanted = name.strip().lower().replace("-", "_")
    known = {gpu.name: gpu for gpu in GPUS}
    by_device = {gpu.device.lower().replace("-", "_"): gpu for gpu in GPUS}
    if wanted in by_device:
        return by_device[wanted]
    for candidate in (wanted, f"{wanted}_sxm", f"{wanted}_server"):
        if candidate in known:
            return known[candidate]
    near = difflib.get_close_matches(wanted, known, 1, 0.0)
    raise UsageError(
        f"--gpu {name}: no measured tables of it; the nearest that is known is {near[0]}",
        f"one of {', '.join(known)}; of another, measure: tune on one, or tune profile fit",
    )
