"""The two scheduler limits that are tuned, as one value that compares and prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tuner.errors import UsageError

MAX_LIMIT = (1 << 31) - 1
"""The largest number of 32 bits."""


@dataclass(frozen=True, slots=True, order=True)
class EngineLimits:
    """The two scheduler limits that are tuned, in vLLM's own words.

    Raises: UsageError if a limit is below 1 or the token budget is below the cap, which vLLM
        refuses too, and for what does not fit into the 32 bits that its kernels count in.

    >>> EngineLimits(8, 2048) < EngineLimits(16, 512)
    True
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        """Refuse what vLLM would refuse."""
        if self.max_num_seqs < 1:
            raise UsageError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}",
                "vLLM refuses such a pair; raise the token budget or lower the cap",
            )

        if self.max_num_batched_tokens > MAX_LIMIT:
            raise UsageError(
                f"max_num_batched_tokens must be at most {MAX_LIMIT:,}, "
                f"got {self.max_num_batched_tokens}",
                "the default of vLLM is between 2,048 and 16,384",
            )

    def within(self, ceiling: Self) -> bool:
        """Return whether an engine started with ceiling can take these limits."""
        return (
            self.max_num_seqs <= ceiling.max_num_seqs
            and self.max_num_batched_tokens <= ceiling.max_num_batched_tokens
        )

    def covering(self, other: EngineLimits) -> EngineLimits:
        """Return the least limits that cover both."""
        return EngineLimits(
            max(self.max_num_seqs, other.max_num_seqs),
            max(self.max_num_batched_tokens, other.max_num_batched_tokens),
        )

    def __str__(self) -> str:
        return f"{self.max_num_seqs}/{self.max_num_batched_tokens}"
