"""Derive the profiles of `profiles/gpu`: seven models on six GPUs, at vLLM's own limits.

    python tests/support/make_gpu_profiles.py profiles/gpu

Each on as few GPUs as hold the model, its longest request and enough KV cache beside it; none
where the tables do not know the model on the GPU. It takes a minute.
"""

# ruff: noqa: T201 - it says what it writes

from __future__ import annotations

import sys
from pathlib import Path

from tuner.errors import UsageError
from tuner.shadow.derived.derive import derive
from tuner.shadow.derived.gpus import gpu_of
from tuner.shadow.derived.wanted import Wanted
from tuner.shadow.profiles import Profile, write_profile

MODELS = (
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-32B",
    "meta-llama/Meta-Llama-3.1-70B",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
)
GPUS = ("h100_sxm", "h200_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server", "a100_sxm")
# Blocks of 16 tokens that a start should have: ours, sixty requests of a thousand tokens.
ENOUGH = 4000


def smallest(model: str, gpu: str) -> tuple[int, Profile] | str:
    """Return on how many of a GPU a model is served, and the profile of that; else why not."""
    why = f"{model} has no room on eight {gpu}"
    for count in (1, 2, 4, 8):
        try:
            found = derive(Wanted(gpu_of(gpu), model, count))
        except UsageError as error:
            why = str(error)
            continue
        if found.kv_starts[0].num_blocks >= ENOUGH:
            return count, found
    return why


def main(folder: Path) -> None:
    """Write them all."""
    folder.mkdir(exist_ok=True)
    for model in MODELS:
        for gpu in GPUS:
            made = smallest(model, gpu)
            if isinstance(made, str):
                print(f"none of {model} on {gpu}: {made}")
                continue
            count, found = made
            name = model.rpartition("/")[2].lower()
            path = folder / f"{name}.{count}x{gpu}.yaml"
            write_profile(path, found)
            print(path, *found.doubts, sep="; ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
