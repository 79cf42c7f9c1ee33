"""The only file that touches vLLM, and with it vLLM's private names.

Features are looked up, never inferred from a version number. Written for vLLM 0.20 to 0.33:
tried on 0.32.0, read in the sources of 0.20.2 and 0.33.0. Whatever is missing in another
version is missing here, in one place, with a message that names it.
"""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.engine.protocol import Batch, Emitted, EngineInfo, EngineLimits, Step
from tuner.errors import EngineError, UsageError
from tuner.spelling import to_argv

# Where `make_arg_parser` of `vllm serve` lives: 0.33, 0.32, and 0.20 in this order.
_SERVE_PARSER_MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
_ARGPARSE_MODULES = ("vllm.utils.argparse_utils", "vllm.utils")


def prepare_environment() -> None:
    """Set what must stand before vLLM is imported.

    Without multiprocessing the engine core runs in this process, which is what lets its limits
    change and its steps be timed. Nothing is reported to vLLM's usage collection.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _first_module(names: Sequence[str], attribute: str) -> Any:
    """Return the attribute from the first module that has it."""
    for name in names:
        try:
            found = getattr(importlib.import_module(name), attribute, None)
        except ModuleNotFoundError as gone:
            if gone.name is None or not name.startswith(gone.name):
                raise
            continue
        if found is not None:
            return found
    raise EngineError(
        f"this vLLM ({vllm_version()}) has no {attribute} in any of {', '.join(names)}",
        "install a vLLM between 0.20 and 0.33",
    )


def vllm_version() -> str:
    """Return the version of the vLLM that is imported."""
    _import_vllm()
    return str(importlib.import_module("vllm").__version__)


def _import_vllm() -> None:
    """Import vLLM or say what is missing."""
    prepare_environment()
    try:
        importlib.import_module("vllm")
    except ModuleNotFoundError as missing:
        if missing.name == "vllm":
            raise UsageError(
                "vLLM is not installed in this environment",
                "pip install 'max-num-seqs-tuner[gpu]' (or [cpu]); `tune doctor` tells more",
            ) from missing
        raise UsageError(
            f"vLLM cannot be imported: {missing}", "run `tune doctor`"
        ) from missing
    except (ImportError, RuntimeError) as broken:
        raise UsageError(
            f"vLLM cannot be imported: {broken}",
            "run `tune doctor`; a torchvision of another build is the usual cause",
        ) from broken


def parse_serve_values(values: Mapping[str, object]) -> Any:
    """Turn a `vllm serve` configuration into vLLM's EngineArgs through vLLM's own parser.

    Keys that only the API server knows (port, api-key, …) are accepted and have no effect on
    the engine.

    Raises: UsageError naming the key or value that vLLM refuses.
    """
    _import_vllm()
    base: Any = _first_module(_ARGPARSE_MODULES, "FlexibleArgumentParser")
    make_parser: Any = _first_module(_SERVE_PARSER_MODULES, "make_arg_parser")

    class Parser(base):  # type: ignore[misc]  # the base class is vLLM's and untyped here
        """vLLM's parser, but raising where it would print and exit."""

        def error(self, message: str) -> None:
            raise UsageError(
                f"vLLM refuses the configuration: {message}",
                "compare the key with `vllm serve --help=all`",
            )

    from vllm.engine.arg_utils import EngineArgs

    arguments = make_parser(Parser(prog="vllm serve")).parse_args(to_argv(values))
    return EngineArgs.from_cli_args(arguments)


def resolve_config(engine_args: Any) -> Any:
    """Let vLLM resolve the arguments as its API server would, without starting anything.

    Raises: UsageError with vLLM's own words when it refuses them.
    """
    from vllm.usage.usage_lib import UsageContext

    try:
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, OSError, NotImplementedError) as refused:
        raise UsageError(
            f"vLLM refuses the model or its options: {_first_line(refused)}",
            "check --model, --config and --engine-arg; the engine's log has all of it",
        ) from refused


def config_limits(vllm_config: Any) -> EngineLimits:
    """Return the limits that vLLM itself would start with."""
    scheduler = vllm_config.scheduler_config
    seqs = getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs
    budget = (
        getattr(scheduler, "max_num_scheduled_tokens", None) or scheduler.max_num_batched_tokens
    )
    return EngineLimits(int(seqs), int(budget))


def config_max_model_len(vllm_config: Any) -> int:
    """Return the longest sequence that the model takes, in tokens."""
    return int(vllm_config.model_config.max_model_len)


def config_chunks_prefill(vllm_config: Any) -> bool:
    """Whether prompts may be computed in chunks; without it the budget bounds prompts."""
    return bool(vllm_config.scheduler_config.enable_chunked_prefill)


def _first_line(error: BaseException) -> str:
    """Return the telling line of an error that may span many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if not line.startswith(("1 validation error", "For further"))
    ]
    line = (telling or lines or [type(error).__name__])[0]
    return line.partition(" [type=")[0].removeprefix("Value error, ")


def device_name() -> str:
    """Return the name of the device that vLLM computes on."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return f"CPU ({os.cpu_count()} cores, {platform.machine()})"


class Core:
    """vLLM's engine core in this process, driven as the server's core process drives it.

    The core's `step_fn` is called directly: in a server, output objects, detokenising and
    counters belong to another process and would be charged to the step here.
    """

    def __init__(self, engine_args: Any) -> None:
        """Start the engine. Raises: EngineError with vLLM's own words."""
        from vllm import SamplingParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.llm_engine import LLMEngine

        self._sampling_params = SamplingParams
        self._request_type = EngineCoreRequest
        try:
            self._engine: Any = LLMEngine.from_engine_args(
                engine_args, usage_context=UsageContext.OPENAI_API_SERVER
            )
        except (RuntimeError, ValueError, MemoryError, OSError, AssertionError) as failed:
            raise EngineError(f"the engine did not start: {_first_line(failed)}") from failed
        self._core: Any = self._engine.engine_core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._cap_name, self._budget_name = _limit_names(self._scheduler)
        self._pending: deque[tuple[Any, int, int, float]] = deque()
        self._idle_turns = 0
        self._hook()

    def _hook(self) -> None:
        """Look at each batch as it leaves for the model, and cost it next to nothing."""
        executor = self._core.model_executor
        execute = executor.execute_model
        scheduler, pending = self._scheduler, self._pending
        manager = scheduler.kv_cache_manager

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            running, waiting = scheduler.get_request_counts()
            pending.append((scheduler_output, running, waiting, manager.usage))
            return execute(scheduler_output, *args, **kwargs)

        executor.execute_model = watched

    @property
    def can_change_limits(self) -> bool:
        """Whether this vLLM shows its limits to us."""
        return self._cap_name is not None and self._budget_name is not None

    def info(self) -> EngineInfo:
        """Describe the running engine."""
        config = self._core.vllm_config
        return EngineInfo(
            kind="live",
            model=str(config.model_config.model),
            device=device_name(),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            vllm_version=vllm_version(),
            vocab_size=int(config.model_config.get_vocab_size()),
            max_model_len=int(config.model_config.max_model_len),
            block_size=int(self._scheduler.block_size),
            num_blocks=int(config.cache_config.num_gpu_blocks),
            ceiling=EngineLimits(
                int(config.scheduler_config.max_num_seqs),
                int(config.scheduler_config.max_num_batched_tokens),
            ),
            can_change_limits=self.can_change_limits,
            asynchronous=getattr(self._core, "batch_queue", None) is not None,
        )

    def set_limits(self, limits: EngineLimits) -> None:
        """Change the limits of the running scheduler; the caller sees to it that it is idle."""
        if self._cap_name is None or self._budget_name is None:
            raise EngineError("this vLLM hides its scheduler limits, restart it instead")
        setattr(self._scheduler, self._cap_name, limits.max_num_seqs)
        setattr(self._scheduler, self._budget_name, limits.max_num_batched_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False if vLLM could not."""
        return bool(self._engine.reset_prefix_cache())

    def add(self, row: int, prompt_token_ids: list[int], output_tokens: int) -> None:
        """Queue a request of exactly output_tokens tokens, as the core's input thread does."""
        request = self._request_type(
            request_id=str(row),
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=self._sampling_params(
                max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        prepared, wave = self._core.preprocess_add_request(request)
        self._core.add_request(prepared, wave)

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, running or queued."""
        self._core.abort_requests([str(row) for row in rows])

    def has_work(self) -> bool:
        """Whether a further turn has something to do."""
        return bool(self._scheduler.has_requests()) or bool(
            getattr(self._core, "batch_queue", None)
        )

    def turn(self) -> tuple[float, list[Emitted], tuple[Any, int, int, float] | None]:
        """Run one turn of the core's loop: its seconds, tokens out and completed batch."""
        started_s = time.perf_counter()
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        took_s = time.perf_counter() - started_s
        emitted = [
            Emitted(int(out.request_id), len(out.new_token_ids), out.finish_reason is not None)
            for client in (outputs or {}).values()
            for out in client.outputs
        ]
        done = self._pending.popleft() if outputs is not None and self._pending else None
        return took_s, emitted, done

    def batches_in_flight(self) -> bool:
        """Whether the device still computes after the turn returned."""
        return bool(self._pending)

    def shutdown(self) -> None:
        """Give back what the engine holds."""
        self._core.shutdown()


def _limit_names(scheduler: Any) -> tuple[str | None, str | None]:
    """Find the attributes that hold the cap and the budget, read at each `schedule()`.

    0.32 and later separate admission (`max_num_active_reqs`) from the runner's slots; before,
    `max_num_running_reqs` is both and may be lowered while nothing runs.
    """
    cap = next(
        (n for n in ("max_num_active_reqs", "max_num_running_reqs") if hasattr(scheduler, n)),
        None,
    )
    budget = (
        "max_num_scheduled_tokens" if hasattr(scheduler, "max_num_scheduled_tokens") else None
    )
    return cap, budget


def read_batch(scheduler_output: Any) -> Batch | None:
    """Tell what a scheduled batch computes; None for a turn that only tidies up.

    A request decodes when it has answered before and one step's tokens are scheduled; all
    else is prefill, recomputation after a preemption too.

    Source: vllm/v1/core/sched/output.py, SchedulerOutput.
    """
    scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    if not scheduled:
        return None
    decodes = prefill = prefill_seqs = decode_context = prefill_context = cached = 0
    for new in scheduler_output.scheduled_new_reqs:
        tokens, before = scheduled[new.req_id], new.num_computed_tokens
        prefill += tokens
        prefill_seqs += 1
        prefill_context += tokens * before + tokens * (tokens + 1) // 2
        cached += before
    old = scheduler_output.scheduled_cached_reqs
    drafts = scheduler_output.scheduled_spec_decode_tokens
    rows = zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True)
    for req_id, before, answered in rows:
        tokens = scheduled.get(req_id, 0)
        if answered > 0 and tokens <= 1 + len(drafts.get(req_id, ())):
            decodes += 1
            decode_context += before + tokens
        else:
            prefill += tokens
            prefill_seqs += 1
            prefill_context += tokens * before + tokens * (tokens + 1) // 2
    return Batch(
        decode_seqs=decodes,
        prefill_tokens=prefill,
        prefill_seqs=prefill_seqs,
        decode_context_tokens=decode_context,
        prefill_context_tokens=prefill_context,
        preempted=len(scheduler_output.preempted_req_ids or ()),
        cached_tokens=cached,
    )


def step_of(
    took_s: float, emitted: list[Emitted], done: tuple[Any, int, int, float] | None
) -> Step:
    """Put one turn of the core into the protocol's words."""
    if done is None:
        return Step(took_s, emitted, None, 0, 0, 0.0)
    scheduler_output, running, waiting, usage = done
    return Step(took_s, emitted, read_batch(scheduler_output), running, waiting, usage)
