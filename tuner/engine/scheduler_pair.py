"""Two schedulers of one shape, with the prefix cache and without, of which one is in use.

Where no two prompts begin alike nothing is ever found in the cache, and the scheduler without
one decides the same with far less to book: until it preempts a request, which would find what
it had computed itself.
"""

from __future__ import annotations

from dataclasses import replace

from tuner.engine.compat.scheduler import SchedulerCore
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import PrefixCacheNeeded
from tuner.engine.shape import EngineShape


class SchedulerPair:
    """Makes each scheduler when it is first wanted, and keeps it."""

    def __init__(self, shape: EngineShape, ceiling: EngineLimits, num_blocks: int) -> None:
        self._shape, self._ceiling, self._num_blocks = shape, ceiling, num_blocks
        self._made: dict[bool, SchedulerCore] = {}

    def core(self, *, sharing: bool) -> SchedulerCore:
        """Return the scheduler for prompts that begin alike, or for such that never do."""
        caches = self._shape.prefix_caching and sharing
        if caches not in self._made:
            shape = replace(self._shape, prefix_caching=caches)
            self._made[caches] = SchedulerCore(shape, self._ceiling, self._num_blocks)
        return self._made[caches]

    def check(self, core: SchedulerCore, *, preempts: bool) -> None:
        """Refuse to go on where the cache that is missing would matter.

        Raises: PrefixCacheNeeded; then the scheduler is made anew, for it is still busy.
        """
        if preempts and self._shape.prefix_caching and not core.caches:
            del self._made[False]
            raise PrefixCacheNeeded("a request was preempted that the prefix cache would help")
