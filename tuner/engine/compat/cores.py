"""On a CPU: the cores that vLLM's server would give the model, and no others.

A server runs the model in a process whose OpenMP threads are bound to certain cores, and keeps
at least one for its scheduler. An engine within this process would by default take a thread for
every core, which is another machine than the one that is deployed on, and one that spins while
it waits: other work on any core then stops all threads of a step.

Source: OMPProcessManager in vLLM's vllm/utils/ompmultiprocessing.py; versions without it bind
    their threads in the worker, here as in a server.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

_ALLOWED: Final = frozenset(os.sched_getaffinity(0))
"""What the process may use: asked before it is bound, for a second start chooses from all."""


def bind_as_served(vllm_config: Any) -> None:
    """Bind this process to the cores of a served engine's only worker.

    Whoever set VLLM_CPU_OMP_THREADS_BIND is obeyed as by a server; several workers are
    processes of their own, which vLLM binds itself.

    Raises: RuntimeError, ValueError or AssertionError with vLLM's own words.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu() or vllm_config.parallel_config.world_size > 1:
        return
    try:
        manager_of = importlib.import_module("vllm.utils.ompmultiprocessing").OMPProcessManager
    except ModuleNotFoundError:
        return
    os.sched_setaffinity(0, _ALLOWED)
    cores = manager_of(vllm_config).cpu_lists
    if not cores:  # told not to bind
        return
    # Threads that OpenMP starts from here on inherit the cores, so they come first.
    os.sched_setaffinity(0, cores[0])
    torch = importlib.import_module("torch")
    if torch.get_num_threads() != len(cores[0]):
        torch.set_num_threads(len(cores[0]))
