"""vLLM's engine core in this process: starting it, stepping it, changing its limits.

Also reads what each of its batches holds, in the protocol's words, and binds the process to
the cores that a served engine's worker would have.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NamedTuple

from tuner.engine.compat import graphs
from tuner.engine.compat.serve import (
    device_name,
    first_line,
    has_own_kv_store,
    sampling,
    vllm_version,
)
from tuner.engine.compat.shape import captured_sizes, drafts_of, read_shape
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch, Emitted, EngineInfo, Step, spread_tokens
from tuner.engine.shape import SLOTS_BY_STEP, Drafts, EngineShape, is_since, left_for_tokens
from tuner.engine.steps import NO_WAIT_S
from tuner.errors import EngineError

_ALLOWED: Final = frozenset(os.sched_getaffinity(0))
"""The cores the process may use, read before it is bound: a second start chooses from all."""


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


class Core:
    """vLLM's engine core in this process, driven as the server's core process drives it.

    The core's `step_fn` is called directly: in a server, output objects, detokenising and
    counters belong to another process and would be charged to the step here.
    """

    def __init__(self, engine_args: Any, *, is_greedy: bool = False) -> None:
        """Start the engine. Raises: EngineError with vLLM's own words."""
        from vllm import SamplingParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.llm_engine import LLMEngine

        self._sampling_params = SamplingParams
        self._request_type = EngineCoreRequest
        self._asked = graphs.Asked.of(engine_args)
        try:
            config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
            bind_as_served(config)
            self._engine: Any = LLMEngine.from_vllm_config(
                config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                disable_log_stats=engine_args.disable_log_stats,
            )
        except (RuntimeError, ValueError, MemoryError, OSError, AssertionError) as failed:
            raise EngineError(f"the engine did not start: {first_line(failed)}") from failed
        self._core: Any = self._engine.engine_core.engine_core
        model = self._core.vllm_config.model_config
        self._sampling, self._sampling_text = sampling(model, is_greedy=is_greedy)
        self._scheduler: Any = self._core.scheduler
        self._numbers, self._id_of = count(), dict[int, str]()
        self._limit_names = limit_names(self._scheduler)
        self._pending: deque[_Sent] = deque()
        self._turn_began_s = 0.0
        self._launched_at_s: float | None = None
        self._waited_s = math.inf
        self._hook()
        self._captured = captured_sizes(config)
        self._has_own_graphs = self._show_graphs(self._ceiling)

    def _hook(self) -> None:
        """Look at each batch as it leaves for the model, and cost it next to nothing."""
        executor = self._core.model_executor
        execute, sample = executor.execute_model, executor.sample_tokens
        scheduler, pending = self._scheduler, self._pending
        manager, update = scheduler.kv_cache_manager, scheduler.update_from_output

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            running, waiting = scheduler.get_request_counts()
            pending.append(_Sent(scheduler_output, running, waiting, manager.usage))
            return self._launched(execute(scheduler_output, *args, **kwargs))

        def watched_sample(*args: Any, **kwargs: Any) -> Any:
            return self._launched(sample(*args, **kwargs))

        def watched_update(*args: Any, **kwargs: Any) -> Any:
            if self._launched_at_s is not None and len(pending) > 1:
                self._waited_s = time.perf_counter() - self._launched_at_s
            return update(*args, **kwargs)

        executor.execute_model, executor.sample_tokens = watched, watched_sample
        scheduler.update_from_output = watched_update

    def _launched(self, result: Any) -> Any:
        """Note how long launching the newest batch took the host."""
        self._launched_at_s = time.perf_counter()
        self._pending[-1].launch_s = self._launched_at_s - self._turn_began_s
        return result

    @property
    def _drafts(self) -> Drafts | None:
        return drafts_of(self._core.vllm_config.speculative_config, vllm_version())

    @property
    def _draft_slots(self) -> int:
        return 0 if self._drafts is None else self._drafts.slots

    @property
    def _ceiling(self) -> EngineLimits:
        started = self._core.vllm_config.scheduler_config
        return EngineLimits(int(started.max_num_seqs), int(started.max_num_batched_tokens))

    def _show_graphs(self, limits: EngineLimits) -> bool:
        """Hide the graphs that an engine of these limits would not have captured.

        False where graphs were captured and this vLLM does not let them be hidden.
        """
        if not self._captured:
            return True
        config = self._core.vllm_config
        try:
            shown = graphs.Shown.at(config, limits, self._asked)
        except AttributeError:
            return False
        return all(self._core.model_executor.collective_rpc(graphs.show, args=(shown,)))

    def info(self) -> EngineInfo:
        """Describe the running engine."""
        config = self._core.vllm_config
        drafts = self._drafts
        return EngineInfo(
            kind="live",
            device=device_name(),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            vllm_version=vllm_version(),
            vocab_size=int(config.model_config.get_vocab_size()),
            max_model_len=int(config.model_config.max_model_len),
            block_size=int(config.cache_config.block_size),
            num_blocks=int(config.cache_config.num_gpu_blocks),
            ceiling=self._ceiling,
            can_change_limits=self._limit_names is not None,
            asynchronous=getattr(self._core, "batch_queue", None) is not None,
            captured_sizes=self._captured,
            has_own_graphs=self._has_own_graphs,
            sampling=self._sampling_text,
            has_priorities=config.scheduler_config.policy == "priority",
            draft_tokens=0 if drafts is None else drafts.tokens,
            draft_slots=self._draft_slots,
        )

    def shape(self) -> EngineShape:
        """Return what the scheduler knows of the engine. Raises: ShadowError."""
        config, kv_cache = self._core.vllm_config, self._scheduler.kv_cache_config
        shape = read_shape(config, kv_cache, device_name(), vllm_version())
        if config.cache_config.num_gpu_blocks_override is not None:
            return shape
        largest = max(self._core.model_executor.collective_rpc(largest_batch_bytes))
        token_bytes = largest // self._ceiling.max_num_batched_tokens
        return replace(shape, token_bytes=token_bytes)

    def set_limits(self, limits: EngineLimits) -> None:
        """Change the limits of the running scheduler; the caller sees to it that it is idle.

        Where it can be done only the graphs of such an engine are used from then on.
        """
        if self._limit_names is None:
            raise EngineError(
                "this engine cannot change its limits: restart it with the new ones"
            )
        change_limits(self._scheduler, self._limit_names, limits, self._draft_slots)
        if self._has_own_graphs:
            self._show_graphs(limits)

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks, here and in the engine's own store; False if vLLM could not."""
        has_store = has_own_kv_store(self._core.vllm_config)
        return bool(self._engine.reset_prefix_cache(reset_connector=has_store))

    def request(
        self, row: int, prompt_token_ids: list[int], output_tokens: int, priority: int = 0
    ) -> Any:
        """Return a request of exactly output_tokens tokens, its blocks hashed.

        What the core's input thread does in a server, beside the core's loop. No two have the
        same id, as on no server: of one that ended, a model with state-space layers may still
        know where its state was.

        Source: vllm/v1/worker/mamba_utils.py, cleanup_mamba_state_idx, which a step that
        computes nothing passes over.
        """
        self._id_of[row] = f"{row}{_SEPARATOR}{next(self._numbers)}"
        request = self._request_type(
            request_id=self._id_of[row],
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=self._sampling_params(
                max_tokens=output_tokens, ignore_eos=True, detokenize=False, **self._sampling
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
        )
        return self._core.preprocess_add_request(request)

    def add(self, request: Any) -> None:
        """Queue a request that was made of late or long ago: it arrives now."""
        prepared, wave = request
        prepared.arrival_time = time.time()
        self._core.add_request(prepared, wave)

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, running or queued; rows that it never had change nothing."""
        self._core.abort_requests([self._id_of[row] for row in rows if row in self._id_of])

    def has_work(self) -> bool:
        """Whether a further turn has something to do."""
        return bool(self._scheduler.has_requests()) or bool(
            getattr(self._core, "batch_queue", None)
        )

    def turn(self) -> Turn:
        """Run one turn of the core's loop."""
        self._turn_began_s = started_s = time.perf_counter()
        self._launched_at_s, self._waited_s = None, math.inf
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if not executed and self._waits(outputs):
            time.sleep(_WAIT_S)
        ended_s = time.perf_counter()
        done = self._pending.popleft() if outputs is not None and self._pending else None
        if done is not None:
            done.is_late = self._waited_s < NO_WAIT_S
        return Turn(started_s, ended_s, outputs or {}, done, bool(self._pending))

    def _waits(self, outputs: Mapping[int, Any] | None) -> bool:
        """Whether a turn that scheduled and brought out nothing left requests that wait.

        For blocks of the KV cache from elsewhere, which threads of this process may bring.
        """
        brought = any(client.outputs for client in (outputs or {}).values())
        return not brought and bool(self._scheduler.has_unfinished_requests())

    def is_computing(self) -> bool:
        """Whether the oldest batch on its way is still being computed; if unknown, yes.

        While a pipeline fills up nothing is asked: vLLM 0.20 would stop filling it as soon as
        the oldest batch is known to be done.

        Source: vllm/v1/engine/core.py, EngineCore.step_with_batch_queue: the oldest batch is
        the last of the queue, and its first part the future of its output.
        """
        queue: Any = getattr(self._core, "batch_queue", None)
        if not queue:
            return False
        if len(queue) + 1 < getattr(self._core, "batch_queue_size", 0):
            return True
        return not _is_there(queue[-1][0], self._core.model_executor)

    def shutdown(self) -> None:
        """Let vLLM's client end the engine, which would do it again when it is collected."""
        self._engine.engine_core.shutdown()


_SEPARATOR: Final = "."
"""Stands in the id of a request between its row and its number on the engine."""

_WAIT_S: Final = 0.001
"""How long a server's core sleeps where nothing can be scheduled and requests wait.

Source: vllm/v1/engine/core.py, EngineCoreProc._process_engine_step.
"""


@dataclass(slots=True)
class _Sent:
    """A batch that left for the model, and the scheduler's state as it did.

    `launch_s` is the time from the turn's beginning until it was launched, `is_late` whether it
    was done before the host had launched the next one.
    """

    scheduled: Any
    running: int
    waiting: int
    usage: float
    launch_s: float = 0.0
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the core's loop: when, on `time.perf_counter`, and what came of it.

    `outputs` are the core's own, by client; `is_on_its_way` tells whether the turn
    left a batch that is still to be read.
    """

    started_s: float
    ended_s: float
    outputs: Mapping[int, Any]
    done: _Sent | None
    is_on_its_way: bool

    def emitted(self) -> list[Emitted]:
        """Return the tokens that came out of it."""
        return [
            Emitted(
                int(out.request_id.partition(_SEPARATOR)[0]),
                len(out.new_token_ids),
                out.finish_reason is not None,
                out.new_token_ids,
            )
            for client in self.outputs.values()
            for out in client.outputs
        ]


# What a model runner's output waits for: runner V1 and V2.
_COPY_EVENTS: Final = ("async_copy_ready_event", "copy_event")


def _is_there(future: Any, executor: Any) -> bool:
    """Whether a batch's output could be had without waiting.

    A future of this process's own worker is done only once it was waited for; what it waits for
    is the event of the copy to the host.

    Source: vllm/v1/executor/uniproc_executor.py, AsyncOutputFuture.
    """
    if future.done():
        return True
    if hasattr(future, "futures_queue"):
        return _have_answered(future, executor)
    output = getattr(future, "async_output", None)
    events = (getattr(output, name, None) for name in _COPY_EVENTS)
    event = next((event for event in events if event is not None), None)
    query = getattr(event, "query", None)
    return query is not None and bool(query())


def _have_answered(future: Any, executor: Any) -> bool:
    """Whether workers that are processes have answered a future; no if that cannot be seen.

    Such a future too is done only once it was waited for. Answers that lie there are taken in
    the order of what was asked, each into its own future, as waiting for this one would.

    Source: vllm/v1/executor/multiproc_executor.py, FutureWrapper.result and collective_rpc.
    """
    try:
        queues = executor.response_mqs
        if not any(getattr(executor, name, None) for name in _AGGREGATORS):
            queues = (queues[executor.output_rank],)
        while not future.done() and all(_has_message(queue) for queue in queues):
            future.futures_queue.pop()._wait_for_response()  # noqa: SLF001 - as result() does
    except AttributeError:
        return False
    return bool(future.done())


# With one of these every worker answers, else the one whose output counts.
_AGGREGATORS: Final = ("kv_output_aggregator", "ec_output_aggregator")


def _has_message(queue: Any) -> bool:
    """Whether a queue of shared memory holds something for its reader.

    Source: vllm/distributed/device_communicators/shm_broadcast.py, MessageQueue.acquire_read.
    """
    reader = int(queue.local_reader_rank)
    if reader < 0:  # of another machine
        return False
    with queue.buffer.get_metadata(queue.current_idx) as flags:
        return bool(flags[0]) and not flags[reader + 1]


def largest_batch_bytes(worker: Any) -> int:
    """Return what a worker left free for its largest batch; 0 where it did not measure that.

    Runs in the worker's process. What the graphs were thought to take is not of a batch.

    Source: vllm/v1/worker/gpu_worker.py, Worker.determine_available_memory, 0.20 to 0.32.
    """
    left = getattr(worker, "peak_activation_memory", 0)
    return max(0, int(left) - int(getattr(worker, "cudagraph_memory_estimate", 0)))


def limit_names(scheduler: Any) -> tuple[str, str] | None:
    """Find the attributes that hold the cap and the budget, read at each `schedule()`.

    0.31 and later separate admission (`max_num_active_reqs`) from the runner's slots; before,
    `max_num_running_reqs` is both and may be lowered while nothing runs.

    None where one is missing.
    """
    budget = "max_num_scheduled_tokens"
    for cap in ("max_num_active_reqs", "max_num_running_reqs"):
        if hasattr(scheduler, cap) and hasattr(scheduler, budget):
            return cap, budget
    return None


def change_limits(
    scheduler: Any, names: tuple[str, str], limits: EngineLimits, slots: int
) -> None:
    """Give an idle scheduler the limits of an engine that was started with them.

    Where each request takes slots of the budget to draft, newer versions count them in each
    step, against the batch of their own configuration, older ones once and for all.

    Source: vllm/v1/core/sched/scheduler.py, schedule; vllm/config/vllm.py, VllmConfig.
    Raises: EngineError where drafts leave nothing of the budget.
    """
    cap, budget = names
    by_step = is_since(vllm_version(), SLOTS_BY_STEP)
    tokens = left_for_tokens(limits, slots, by_step=by_step)
    setattr(scheduler, cap, limits.max_num_seqs)
    setattr(scheduler, budget, tokens)
    if slots and by_step:
        # Of its own, as the model runner's stays that of the start.
        own = copy(scheduler.scheduler_config)
        own.max_num_batched_tokens = tokens
        scheduler.scheduler_config = own


class BatchReader:
    """Reads what scheduled batches compute, each once and in their order.

    It knows who was preempted before: the V2 runner is told of them as of new requests, by a
    list of tokens that grows on as answers come.

    Source: vllm/v1/core/sched/scheduler.py, schedule; output.py, SchedulerOutput.
    """

    def __init__(self) -> None:
        self._preempted: set[str] = set()

    def read(self, scheduler_output: Any) -> Batch | None:
        """Return what a batch computes; None for a turn that only tidies up.

        A request decodes when it has answered before and one step's tokens are scheduled; all
        else is prefill, recomputation after a preemption too.
        """
        self._preempted -= set(getattr(scheduler_output, "finished_req_ids", None) or ())
        resumed = frozenset(self._preempted)
        preempted = scheduler_output.preempted_req_ids or ()
        self._preempted |= set(preempted)
        if not scheduler_output.num_scheduled_tokens:
            return None
        rows = list(_rows(scheduler_output, resumed))
        decodes = [row for row in rows if row.is_decode]
        prefills = [row for row in rows if not row.is_decode]
        contexts = [row.before + row.tokens for row in decodes]
        return Batch(
            decode_seqs=len(decodes),
            prefill_tokens=sum(row.tokens for row in prefills),
            prefill_seqs=len(prefills),
            decode_context_tokens=sum(contexts),
            prefill_context_tokens=sum(row.attended for row in prefills),
            preempted=len(preempted),
            cached_tokens=sum(row.found for row in rows),
            decode_spread_tokens=spread_tokens(contexts),
            draft_tokens=sum(row.tokens for row in decodes) - len(decodes),
        )


class _Row(NamedTuple):
    """A request in a batch: the tokens scheduled of it, those before, those found cached."""

    tokens: int
    before: int
    is_decode: bool
    found: int = 0

    @property
    def attended(self) -> int:
        """To how many tokens those that are computed attend, all together."""
        return self.tokens * self.before + self.tokens * (self.tokens + 1) // 2


def _rows(scheduler_output: Any, resumed: Collection[str]) -> Iterator[_Row]:
    """Yield the requests of a batch; of who was resumed nothing that it finds is a hit."""
    scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens

    def row(name: str, before: int, answered: int, found: int = 0) -> _Row:
        tokens = scheduled.get(name, 0)
        decodes = answered > 0 and tokens <= 1 + len(drafts.get(name, ()))
        return _Row(tokens, before, decodes, found)

    for new in scheduler_output.scheduled_new_reqs:
        name, before = new.req_id, new.num_computed_tokens
        if name in resumed:
            known = getattr(new, "prefill_token_ids", None) or ()
            yield row(name, before, len(known) - len(new.prompt_token_ids or ()))
        else:
            yield row(name, before, 0, before)
    old = scheduler_output.scheduled_cached_reqs
    for each in zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True):
        yield row(*each)


def step_of(turn: Turn, between_s: float, batches: BatchReader) -> Step:
    """Return one turn of the core as a step of the protocol, `between_s` before it included.

    A turn that completed nothing and left a batch on its way has launched it.
    """
    took_s, done = turn.ended_s - turn.started_s + between_s, turn.done
    if done is None:
        return Step(took_s, turn.emitted(), None, 0, 0, 0.0, is_late=turn.is_on_its_way)
    return Step(
        took_s,
        turn.emitted(),
        batches.read(done.scheduled),
        done.running,
        done.waiting,
        done.usage,
        done.launch_s,
        done.is_late,
    )
