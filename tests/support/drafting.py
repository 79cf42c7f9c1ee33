"""A real engine whose drafts are accepted at given rates, whatever they are.

vLLM does so by itself (rejection_sample_method synthetic), but on a GPU alone; here the sampler
of its CPU backend does.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.paths import TESTS
from tuner.engine.demo import DEMO_MODEL_DIR, demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveEngine, LiveSource

KERNEL = "_rejection_greedy_sample_kernel_impl"


def drafting_values(folder: Path, tokens: int) -> dict[str, Any]:
    """Return the configuration of the demo model with a head that drafts so many tokens."""
    drafts = drafting(DEMO_MODEL_DIR, folder / "eagle", tokens)
    return {**demo_engine_args(), "speculative-config": drafts}


def drafting(model: Path, head: Path, tokens: int) -> dict[str, Any]:
    """Return how a model drafts so many tokens by a head, whose shape is written down."""
    layers = {"num_hidden_layers": 1, "tie_word_embeddings": False, "model_type": "llama"}
    config = json.loads((model / "config.json").read_text())
    head.mkdir(exist_ok=True, parents=True)
    (head / "config.json").write_text(
        json.dumps({**config, **layers, "architectures": ["EagleLlamaForCausalLM"]})
    )
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": tokens}


@dataclass(frozen=True, slots=True)
class DraftingSource(LiveSource):
    """Starts engines that accept drafts at rates: the first, the first two and so on."""

    rates: tuple[float, ...] = ()

    def start(self, values: Mapping[str, object], ceiling: EngineLimits) -> LiveEngine:
        """Start vLLM with such a sampler."""
        kernels = importlib.import_module("vllm.utils.cpu_triton_utils")
        setattr(kernels, KERNEL, _accepting(self.rates))
        return LiveSource(is_greedy=True).start(values, ceiling)


RATES = "TEST_ACCEPTED_DRAFTS"
PLUGIN = """[vllm.general_plugins]
accepts_drafts = support.drafting:accept_as_told
"""


def accepting_environment(folder: Path, rates: Sequence[float]) -> dict[str, str]:
    """Return the environment of a server that accepts drafts at rates: by a plugin."""
    found = folder / "accepts_drafts-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: accepts-drafts\nVersion: 0\n")
    (found / "entry_points.txt").write_text(PLUGIN)
    paths = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), RATES: json.dumps(list(rates))}


def accept_as_told() -> None:
    """Have this process's sampler accept drafts at the rates of its environment."""
    kernels = importlib.import_module("vllm.utils.cpu_triton_utils")
    setattr(kernels, KERNEL, _accepting(json.loads(os.environ[RATES])))


def _accepting(rates: Sequence[float]) -> Any:
    import torch

    drawn = torch.Generator().manual_seed(0)

    def sample(
        output_token_ids: Any,
        cu_num_draft_tokens: Any,
        draft_token_ids: Any,
        target_argmax: Any,
        bonus_token_ids: Any,
        *_: object,
        **__: object,
    ) -> None:
        """Take so many drafts of each request, and then a token of the model's own."""
        ends = cu_num_draft_tokens.tolist()
        uniform = torch.rand(len(ends), generator=drawn).tolist()
        begin = 0
        for row, (end, u) in enumerate(zip(ends, uniform, strict=True)):
            taken = min(sum(u < rate for rate in rates), end - begin)
            output_token_ids[row, :taken] = draft_token_ids[begin : begin + taken]
            own = target_argmax[begin + taken] if taken < end - begin else bonus_token_ids[row]
            output_token_ids[row, taken] = own
            begin = end

    return sample
