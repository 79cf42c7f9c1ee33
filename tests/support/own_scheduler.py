"""A scheduler class that is not vLLM's, to be named in a configuration."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class OwnScheduler(Scheduler):  # type: ignore[misc]  # vLLM is untyped in the type check
    """Schedules as vLLM does, but nobody can know that."""
