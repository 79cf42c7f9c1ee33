"""Bring an engine to its working temperature before anything is measured.

The first batch of a size pays for allocation, kernel selection and caches that production has
long paid. The rounds cover decode batches and prefill chunks up to the engine's ceiling, the
smallest first and both kinds in turns, so that a spent budget leaves out the largest only.
"""

from __future__ import annotations

import time

import numpy as np

from tuner.engine.protocol import Engine, EngineInfo
from tuner.traffic.prompts import TokenPrompt

# Ours: one batch of each size, since a second one takes as long as a third; 64 sequences,
# beyond which a larger batch meets nothing new; prompts of 2,048 tokens at most, so that
# attention over one long prompt does not eat the budget.
MOST_SEQS = 64
MOST_PROMPT_TOKENS = 2048
SHORT_PROMPT_TOKENS = 24
LEAST_CHUNK_TOKENS = 128
DECODE_TOKENS = 8
SEED = 7


def _shapes(info: EngineInfo) -> list[tuple[int, int]]:
    """Return sequences and prompt tokens of each, least tokens in all first."""
    most_seqs = min(info.ceiling.max_num_seqs, MOST_SEQS)
    sizes = [1 << k for k in range(most_seqs.bit_length())]
    shapes = [(seqs, SHORT_PROMPT_TOKENS) for seqs in sizes]
    prompt = min(MOST_PROMPT_TOKENS, info.max_model_len // 2)
    chunk = LEAST_CHUNK_TOKENS
    while chunk <= info.ceiling.max_num_batched_tokens:
        shapes.append((max(1, chunk // prompt), min(chunk, prompt)))
        chunk *= 2
    return sorted(shapes, key=lambda shape: shape[0] * shape[1])


def warm_up(engine: Engine, budget_s: float = 15.0) -> float:
    """Run synthetic batches of growing size and return the seconds it took.

    Stops growing once budget_s is spent; the engine is idle afterwards.

    Raises: EngineError when the engine fails.
    """
    started_s = time.perf_counter()
    info = engine.info
    rng = np.random.default_rng(SEED)
    row = 0
    for seqs, prompt_tokens in _shapes(info):
        for _ in range(min(seqs, info.ceiling.max_num_seqs)):
            tokens = rng.integers(0, info.vocab_size, size=max(1, prompt_tokens)).tolist()
            engine.add(row, TokenPrompt(tokens), DECODE_TOKENS)
            row += 1
        while engine.has_work():
            engine.step()
        if time.perf_counter() - started_s > budget_s:
            break
    return time.perf_counter() - started_s
