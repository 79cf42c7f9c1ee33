"""vLLM's own scheduler and KV-cache manager, without model, device or server.

Built from an EngineShape alone: the bundled demo model stands in for the real one, of which
the scheduler knows nothing but lengths and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, Final

from tuner.engine.compat.core import change_limits, limit_names
from tuner.engine.compat.serve import parse_serve_values, quiet, resolve_config
from tuner.engine.compat.shape import plain_group
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Emitted, Prompt
from tuner.engine.shape import (
    DRAFT_MODEL,
    DRAFTS_IN,
    FULL_ATTENTION,
    HEADS,
    MTP,
    RETENTION,
    Drafts,
    EngineShape,
    KvGroup,
)
from tuner.errors import EngineError, ShadowError

# A token that no prompt holds; which one it is makes no difference to the schedule.
_TOKEN = 0


_MODE: Final = "mamba_cache_mode"
"""The field of a group of state-space layers, and the option, by which states are kept."""

_STAND_IN: Mapping[str, object] = {**demo_engine_args(), "skip-tokenizer-init": True}


def stand_in_config(shape: EngineShape, ceiling: EngineLimits) -> Any:
    """Return a vLLM configuration whose scheduler behaves as the shape's.

    Raises: UsageError or ShadowError when this vLLM has no such option.
    """
    if shape.kv_kind != FULL_ATTENTION and not shape.kv_groups:
        raise ShadowError(
            f"the shadow cannot keep account of a KV cache of {shape.kv_kind}",
            "use --method live",
        )
    length = shape.max_model_len
    values: Mapping[str, object] = {
        **_STAND_IN,
        "max-model-len": length,
        "hf-overrides": f'{{"max_position_embeddings": {length}}}',
        "max-num-seqs": ceiling.max_num_seqs,
        "max-num-batched-tokens": ceiling.max_num_batched_tokens,
        "enable-prefix-caching": shape.prefix_caching,
        **({} if shape.drafts is None else {"speculative-config": _drafting(shape.drafts)}),
    }
    with quiet():  # of a stand-in there is nothing to tell
        config = resolve_config(parse_serve_values(values))
    scheduler = config.scheduler_config
    for name, value in shape.scheduler.items():
        if not hasattr(scheduler, name):
            raise ShadowError(
                f"the profile's scheduler option {name} is unknown to this vLLM",
                f"it was made with vLLM {shape.vllm_version}; make a new one",
            )
        setattr(scheduler, name, value)
    scheduler.async_scheduling = shape.asynchronous
    if shape.drafts is not None:
        _go_by(config.speculative_config, shape.drafts)
    config.cache_config.enable_prefix_caching = shape.prefix_caching
    config.cache_config.block_size = shape.block_size
    modes = {group[_MODE] for group in shape.kv_groups if _MODE in group}
    if modes:
        # By which a scheduler lets parts of prompts end where a state is kept.
        setattr(config.cache_config, _MODE, modes.pop())
    return config


def _drafting(drafts: Drafts) -> Mapping[str, object]:
    """Return a speculative configuration that needs no model beside the stand-in."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafts.tokens,
        "prompt_lookup_max": 2,
    }


def _go_by(drafting: Any, drafts: Drafts) -> None:
    """Have a speculative configuration answer what the scheduler asks as another method's.

    Of what drafts nothing is asked but which kind it is, and how it drafts all at once.
    """
    if not drafts.is_eagle and drafts.method != DRAFT_MODEL:
        return
    drafting.method = "eagle" if drafts.method in HEADS else drafts.method
    drafting.parallel_drafting = drafts.slots > (drafts.method == DRAFT_MODEL)
    model = SimpleNamespace(sample_from_anchor=not drafts.fills_in, architectures=())
    drafting.draft_model_config = SimpleNamespace(hf_config=model, architectures=())


def kv_cache_config(shape: EngineShape, num_blocks: int) -> Any:
    """Return vLLM's layout of a KV cache of so many blocks."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    full: KvGroup = {"kind": "FullAttentionSpec", "block_size": shape.block_size}
    groups = shape.kv_groups or (full,)
    made = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                [f"shadow {number}"], _spec(group), is_eagle_group=bool(group.get(DRAFTS_IN))
            )
            for number, group in enumerate(groups)
        ],
    )
    if groups[0].get(RETENTION) is not None:
        setattr(made, RETENTION, groups[0][RETENTION])
    return made


def _spec(group: KvGroup) -> Any:
    """Return vLLM's description of a KV group. Raises: ShadowError where it knows none such.

    How many bytes a token takes decides nothing: there are so many blocks.
    """
    import torch
    from vllm.v1 import kv_cache_interface

    kind: Any = getattr(kv_cache_interface, str(group["kind"]), None)
    if kind is None:
        raise ShadowError(
            f"this vLLM knows no KV cache of {group['kind']}",
            "predict with the vLLM that the profile was made with, or use --method live",
        )
    no_bytes = {
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float16,
        "shapes": ((8,),),
        "dtypes": (torch.float16,),
    }
    known = {each.name for each in fields(kind) if each.init}
    given = {**no_bytes, **group}
    return kind(**{name: value for name, value in given.items() if name in known})


def with_layers(
    shape: EngineShape, layers: Sequence[KvGroup], retention: int | None
) -> EngineShape:
    """Return the shape with the KV-cache groups that vLLM makes of such layers.

    `retention` is the configured interval at which the prefix cache keeps what some layers need
    no more. Heads are taken to be alike in all layers that do not say theirs, and states to be
    as large as a block.

    Shapes: layers is [layers], each a group of that layer alone.
    Raises: UsageError without vLLM; ShadowError where it knows no such groups.
    """
    config = stand_in_config(shape, EngineLimits(1, shape.block_size))
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    if getattr(config.cache_config, "kv_cache_layout", "") is None:
        # An engine asks its attention for one; blocks of the usual ones are alike in bytes.
        config.cache_config.kv_cache_layout = "LBNHC"
    size = _spec({"kind": "FullAttentionSpec", "block_size": shape.block_size}).page_size_bytes
    named = {
        f"layer {number}": _spec(
            layer if "head_size" in layer else {**layer, "page_size_padded": size}
        )
        for number, layer in enumerate(layers)
    }
    # Of a stand-in that drafts vLLM does not ask by which method.
    has_mtp = shape.drafts is not None and shape.drafts.method == MTP and shape.drops_hit
    last = f"layer {len(layers) - 1}"
    groups = tuple(
        plain_group(
            group.kv_cache_spec, retention, drafts=has_mtp and last in group.layer_names
        )
        for group in get_kv_cache_groups(config, named)
    )
    kinds = [str(group["kind"]) for group in groups]
    if kinds == ["FullAttentionSpec"]:
        return shape
    return replace(shape, kv_kind=" and ".join(kinds), kv_groups=groups)


def scheduler_of(config: Any, kv_cache: Any) -> tuple[Any, int]:
    """Return vLLM's scheduler of a configuration, and the tokens of a block that it hashes."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = kv_cache.num_blocks
    size, hash_size = resolve_kv_cache_block_sizes(kv_cache, config)
    made = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=hash_size,
        log_stats=False,
    )
    return made, hash_size


class SchedulerCore:
    """vLLM's scheduler, stepped batch by batch, with outputs made up in the model's place.

    `accepted` are the rates at which drafts are: how often the first, the first two and so on.
    """

    def __init__(
        self,
        shape: EngineShape,
        ceiling: EngineLimits,
        num_blocks: int,
        accepted: Sequence[float] = (),
    ) -> None:
        config = stand_in_config(shape, ceiling)  # first: it raises where vLLM is missing
        from vllm import SamplingParams
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
        from vllm.v1.request import Request, RequestStatus

        self._sampling_params, self._request_type = SamplingParams, Request
        self._output_type, self._status = ModelRunnerOutput, RequestStatus
        self._params_of: dict[int, Any] = {}
        self.scheduler, self.block_size = scheduler_of(
            config, kv_cache_config(shape, num_blocks)
        )
        names = limit_names(self.scheduler)
        if names is None:
            raise EngineError("this vLLM cannot change its scheduler limits: it has no shadow")
        self._limit_names = names
        self._slots = shape.draft_slots
        self._pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.caches = shape.prefix_caching
        self.queue_size = 2 if shape.asynchronous else 1
        self.requests: dict[str, Any] = self.scheduler.requests
        self._accepted, self._drafts_type = tuple(accepted), DraftTokenIds
        # An asynchronous scheduler reserves room for drafts by itself.
        self._draft = [_TOKEN] * (0 if shape.asynchronous else shape.draft_tokens)
        self._rounds: dict[str, int] = {}

    def set_limits(self, limits: EngineLimits) -> None:
        """Set the limits of whatever is in the scheduler's sight. Raises: EngineError."""
        change_limits(self.scheduler, self._limit_names, limits, self._slots)

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False if vLLM could not."""
        return bool(self.scheduler.reset_prefix_cache())

    def add(self, row: int, prompt: Prompt, output_tokens: int, arrival: float) -> None:
        """Queue a request that answers with exactly output_tokens tokens."""
        self._rounds.pop(str(row), None)
        params = self._params_of.get(output_tokens)
        if params is None:
            params = self._params_of[output_tokens] = self._sampling_params(
                max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
            )
        request = self._request_type(
            request_id=str(row),
            prompt_token_ids=[_TOKEN] * len(prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival,
            priority=prompt.priority,
            block_hasher=self._hasher(row, prompt) if self.caches else None,
        )
        self.scheduler.add_request(request)

    def _hasher(self, row: int, prompt: Prompt) -> Any:
        """Return the hasher of a request's blocks: the prompt's keys, then its own."""
        size = self.block_size
        # Since 0.33 the hash of a block may be of a token behind it too.
        ahead = int(getattr(self.scheduler, "num_hash_lookahead_tokens", 0))
        keys = prompt.block_keys(size, ahead)

        def hasher(request: Any) -> list[bytes]:
            have, full = len(request.block_hashes), (request.num_tokens - ahead) // size
            if full <= have:
                return []
            begin = max(have, len(keys))
            own = [prompt.answer_key(row, (i + 1) * size) for i in range(begin, full)]
            return keys[have:full] + own

        return hasher

    def abort(self, rows: Sequence[int]) -> None:
        """Drop requests, running or queued, in the order given.

        One by one, because vLLM makes a set of several, whose order changes from process to
        process and with it the order of free blocks.
        """
        for row in rows:
            self.scheduler.finish_requests(str(row), self._status.FINISHED_ABORTED)

    def has_requests(self) -> bool:
        """Whether anything is queued, running or to be tidied up."""
        return bool(self.scheduler.has_requests())

    def counts(self) -> tuple[int, int]:
        """Return how many requests run and how many wait."""
        running, waiting = self.scheduler.get_request_counts()
        return int(running), int(waiting)

    @property
    def usage(self) -> float:
        """The share of the KV cache in use: of all blocks but one, which vLLM keeps."""
        all_blocks = int(self._pool.num_gpu_blocks) - 1
        return 1 - int(self._pool.get_num_free_blocks()) / all_blocks

    def schedule(self) -> Any:
        """Return vLLM's SchedulerOutput for the next batch."""
        return self.scheduler.schedule()

    def sampled(self, scheduler_output: Any) -> Any:
        """Return what the model would have: a token for each request whose prompt is done.

        Asked when the batch is scheduled, as the model runner is.
        """
        requests, ids, tokens = self.requests, list[str](), list[list[int]]()
        admitted = _admitted(scheduler_output) if self._accepted else ()
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests[req_id]
            ids.append(req_id)
            if request.is_prefill_chunk:
                tokens.append([])
                continue
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id, ())
            # Of who is admitted some only pad the batch.
            verified = 0 if req_id in admitted else len(drafts)
            tokens.append([_TOKEN] * (1 + self._accepts(req_id, verified)))
        index = {req_id: i for i, req_id in enumerate(ids)}
        return self._output_type(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)

    def update(self, scheduler_output: Any, output: Any) -> list[Emitted]:
        """Let the scheduler take in a batch's tokens and return what came out."""
        made = self.scheduler.update_from_output(scheduler_output, output)
        if self._draft:
            names = list(scheduler_output.num_scheduled_tokens)
            drafted = self._drafts_type(names, [list(self._draft) for _ in names])
            self.scheduler.update_draft_token_ids(drafted)
        return [
            Emitted(int(out.request_id), len(out.new_token_ids), out.finish_reason is not None)
            for client in made.values()
            for out in client.outputs
        ]

    def _accepts(self, req_id: str, drafts: int) -> int:
        """Return how many of a request's drafts are accepted, the same at all limits.

        Beside its first token there are none, whatever a batch is padded to.
        """
        if not self._accepted:
            return 0
        number = self._rounds.get(req_id, 0)
        self._rounds[req_id] = number + 1
        if number == 0:
            return 0
        drawn = _uniform(int(req_id), number)
        return sum(drawn < rate for rate in self._accepted[:drafts])


def _admitted(scheduler_output: Any) -> set[str]:
    """Return the requests that a step begins with, or goes on with after a preemption."""
    new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    resumed = getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ())
    return new | set(resumed)


def _uniform(row: int, number: int) -> float:
    """Return a number from 0 to 1 that a request's row and the number of its step decide.

    Source: splitmix64, G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014.
    """
    x = (row * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return (x ^ (x >> 31)) / 2**64


_ALL = (1 << 64) - 1
