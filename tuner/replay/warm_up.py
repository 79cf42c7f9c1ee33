"""Warming an engine up: every batch size that a run may use is computed before it is measured.

What runs for the first time pays for compilation, allocation and the choice of kernels. Sizes
grow, so that what a time bound leaves out is what lies above.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Engine, EngineInfo
from tuner.traffic.prompts import TokenPrompt

# Ours: a start takes longer than this on any model that is worth the wait.
BUDGET_S = 15.0
# Ours: a second batch of a size takes as long as a third, so two of each; prompts of 2,048
# tokens where several make up a batch, so that attention over one long prompt does not eat the
# time; sequences that decode ask two, so that computing these takes none.
TIMES = 2
MAX_PROMPT_TOKENS = 2048
SHORT_PROMPT_TOKENS = 2
MIN_CHUNK_TOKENS = 128
# Sequences that decode beside a prompt: ours, a few show the kernels of mixed batches.
BESIDE = 8
# Turns beyond those that the prompts need until a size must have come: ours, a few for
# asynchronous scheduling; who is not there by then has been preempted.
SPARE_TURNS = 8
SEED = 7


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was warmed up: batches of up to so many sequences, of so many tokens, and mixed.

    `mixed` are the tokens of batches in which some decode beside a prompt.
    """

    took_s: float
    seqs: int
    tokens: int
    mixed: int

    def missed(self, ceiling: EngineLimits) -> str:
        """Say what of the ceiling was left out, or nothing.

        >>> WarmUp(15.0, 64, 2048, 2048).missed(EngineLimits(128, 2048))
        'not warmed up in 15.0 s: batches of more than 64 sequences (of 128); their first \
steps may take longer'
        """
        left = [
            f"batches of more than {done} {what} (of {most})"
            for done, most, what in (
                (self.seqs, ceiling.max_num_seqs, "sequences"),
                (self.tokens, ceiling.max_num_batched_tokens, "tokens"),
                (self.mixed, ceiling.max_num_batched_tokens, "tokens, decodes beside prompts"),
            )
            if done < most
        ]
        if not left:
            return ""
        what = " and ".join(left)
        return (
            f"not warmed up in {self.took_s:.1f} s: {what}; their first steps may take longer"
        )


def warm_up(engine: Engine, budget_s: float = BUDGET_S) -> WarmUp:
    """Compute batches of growing size, up to the ceiling, and return how far that came.

    A half of budget_s is for sequences that decode, a quarter for prompts, and the rest for
    both at once; no further size is begun once it is spent. The engine is idle afterwards.

    Raises: EngineError when the engine fails.
    """
    began_s = time.perf_counter()
    warming = _Warming(engine)
    seqs = warming.decode(began_s + budget_s / 2)
    tokens = warming.prefill(began_s + 0.75 * budget_s)
    mixed = warming.mix(began_s + budget_s)
    return WarmUp(time.perf_counter() - began_s, seqs, tokens, mixed)


class _Warming:
    """One warm-up: an engine at its ceiling, and the rows that were used up."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._info = engine, engine.info
        self._rng = np.random.default_rng(SEED)
        self._row = 0

    def decode(self, until_s: float) -> int:
        """Let more and more sequences decode together; return how many did in the end."""
        first, done, length = self._row, 0, self._info.max_model_len
        prompt = max(1, min(SHORT_PROMPT_TOKENS, length // 2))
        budget = self._info.ceiling.max_num_batched_tokens
        for size in decode_sizes(self._info):
            new = size - (self._row - first)
            for _ in range(new):
                self._add(prompt, max(1, length - prompt))
            turns = TIMES + SPARE_TURNS + -(-new * prompt // budget)
            if not self._sees(size, turns, TIMES):
                break
            done = size
            if time.perf_counter() > until_s:
                break
        self._engine.abort(range(first, self._row))
        self._finish()
        return done

    def _sees(self, size: int, turns: int, times: int, *, is_mixed: bool = False) -> bool:
        """Step until batches of a size came so often; False if they do not come.

        Of so many sequences that only decode, or of so many tokens, some of them decoded.
        """
        seen = 0
        for _ in range(turns):
            if not self._engine.has_work():
                return False
            batch = self._engine.step().batch
            if batch is not None and batch.decode_seqs:
                alone = batch.is_decode_only and batch.decode_seqs == size
                seen += batch.tokens == size if is_mixed else alone
            if seen == times:
                return True
        return False

    def prefill(self, until_s: float) -> int:
        """Compute prompts of more and more tokens together; return how many in the end."""
        done, ceiling = 0, self._info.ceiling
        sizes = prefill_sizes(self._info)
        for size in sizes:
            if time.perf_counter() > until_s:
                break
            self._add_prompts(size, ceiling.max_num_seqs)
            self._finish()
            done = ceiling.max_num_batched_tokens if size == sizes[-1] else size
        return done

    def mix(self, until_s: float) -> int:
        """Compute a prompt beside sequences that decode, of twice as many tokens each time.

        Return of how many in the end.
        """
        ceiling, length = self._info.ceiling, self._info.max_model_len
        beside = min(BESIDE, ceiling.max_num_seqs // 2)
        sizes = mixed_sizes(self._info, beside)
        if not sizes:
            return ceiling.max_num_batched_tokens
        done, first = 0, self._row
        for _ in range(beside):
            self._add(1, max(1, length - 1))
        is_decoding = self._sees(beside, TIMES + SPARE_TURNS, TIMES)
        for size in sizes:
            if time.perf_counter() > until_s or not is_decoding:
                break
            self._add_prompts(size - beside, ceiling.max_num_seqs - beside)
            if not self._sees(size, SPARE_TURNS, 1, is_mixed=True):
                break
            done = ceiling.max_num_batched_tokens if size == sizes[-1] else size
        self._engine.abort(range(first, self._row))
        self._finish()
        return done

    def _add_prompts(self, tokens: int, most: int) -> None:
        """Add so many tokens of prompts, in no more than so many of them."""
        each = max(min(MAX_PROMPT_TOKENS, self._info.max_model_len // 2), -(-tokens // most))
        for length in [each] * (tokens // each) + ([tokens % each] if tokens % each else []):
            self._add(length, 1)

    def _add(self, tokens: int, output_tokens: int) -> None:
        ids = self._rng.integers(0, self._info.vocab_size, size=tokens).tolist()
        self._engine.add(self._row, TokenPrompt(ids), output_tokens)
        self._row += 1

    def _finish(self) -> None:
        while self._engine.has_work():
            self._engine.step()


def decode_sizes(info: EngineInfo) -> list[int]:
    """Return numbers of sequences to decode: powers of two, captured sizes, the cap."""
    return _up_to(info.ceiling.max_num_seqs, info.captured_sizes, 1)


def prefill_sizes(info: EngineInfo) -> list[int]:
    """Return tokens of prompts to compute at once: as above, up to the token budget.

    What is more than all sequences together, or the KV cache, can hold is not tried: no run
    computes it either.
    """
    most = info.ceiling.max_num_seqs * max(1, info.max_model_len - 1)
    cached = max(1, (info.num_blocks - 1) * info.block_size)
    return _up_to(
        min(info.ceiling.max_num_batched_tokens, most, cached),
        (size for size in info.captured_sizes if size > info.ceiling.max_num_seqs),
        MIN_CHUNK_TOKENS,
    )


def mixed_sizes(info: EngineInfo, beside: int) -> list[int]:
    """Return tokens of batches in which so many sequences decode beside prompts."""
    if not beside:
        return []
    return [size for size in prefill_sizes(info) if size.bit_count() == 1 and size > 2 * beside]


def _up_to(most: int, captured: Iterable[int], least: int) -> list[int]:
    powers = (1 << k for k in range(most.bit_length()))
    sizes = {most, *(size for size in powers if size >= least), *captured}
    return sorted(size for size in sizes if size <= most)
