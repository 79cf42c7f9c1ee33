"""A gate in front of an engine: how many it lets in, how many wait, and who is turned away.

Under overload every request that is let in makes all others later, until none meets its SLO.
A gate bounds who is in the engine, keeps a short queue before it, first come first served, and
turns away whoever finds the queue full or has waited for too long.

`GateLimits` is what a replay, live or simulated, is planned with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What a gate lets in.

    At most `max_in_flight` requests are in the engine, waiting there or running; `max_queued`
    more wait before it, each for `queue_timeout_s` at most, None for as long as it takes. An
    answer ends after `max_output_tokens`, None for where it ends by itself.

    Units: requests, seconds, tokens.
    Raises: ValueError for a gate that is none, or one that would refuse everything.
    """

    max_in_flight: int
    max_queued: int = 0
    queue_timeout_s: float | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what lets nobody in."""
        least = {"max_in_flight": 1, "max_queued": 0, "max_output_tokens": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value is not None and value < fewest:
                raise ValueError(f"{name} must be at least {fewest}, got {value}")
        wait_s = self.queue_timeout_s
        if wait_s is not None and not 0 < wait_s < math.inf:
            raise ValueError(f"queue_timeout_s must be above 0 s, got {wait_s}")
