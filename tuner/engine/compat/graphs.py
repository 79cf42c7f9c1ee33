"""CUDA graphs on a running engine: which of them a setting would have on an engine of its own.

vLLM captures graphs for sizes that follow the limits of the start, the largest of
min(2 * max_num_seqs, 512), so an engine that was started at the ceiling has graphs for steps
that the same limits alone would run without. They are hidden where vLLM looks up which graph
holds a step; the graphs themselves stay.

Source: vllm/config/vllm.py, VllmConfig._set_cudagraph_sizes; the V1 runner looks into
    vllm/v1/cudagraph_dispatcher.py, the V2 runner into vllm/v1/worker/gpu/cudagraph_utils.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

from tuner.engine.limits import EngineLimits

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a configuration itself says of the sizes to capture; None where it is vLLM's."""

    sizes: Sizes | None
    most: int | None

    @classmethod
    def of(cls, engine_args: Any) -> Self:
        """Read it off arguments that vLLM has not resolved yet."""
        compilation = getattr(engine_args, "compilation_config", None)

        def said(name: str) -> Any:
            own = getattr(engine_args, name, None)
            return getattr(compilation, name, None) if own is None else own

        sizes, most = said("cudagraph_capture_sizes"), said("max_cudagraph_capture_size")
        return cls(None if sizes is None else tuple(sizes), most)


@dataclass(frozen=True, slots=True)
class Shown:
    """What decides which graphs a setting may use: sizes in tokens, ascending, and its cap.

    The sizes are those that vLLM takes for the setting. Where sequences draft, a runner rounds
    them up to multiples of what one decodes in a step.
    """

    sizes: Sizes
    max_num_seqs: int

    @classmethod
    def at(cls, config: Any, limits: EngineLimits, asked: Asked) -> Self:
        """Return what holds for an engine that is started with the limits.

        Raises: AttributeError where this vLLM chooses sizes in another way.
        """
        return cls(own_sizes(config, limits, asked), limits.max_num_seqs)

    def of_captured(
        self, captured: Iterable[int], query_tokens: int, *, is_of_decodes: bool = False
    ) -> frozenset[int]:
        """Return which of a runner's graphs stand in for those of an engine of its own.

        `captured` are the sizes of graphs of a kind. A size that is none of them has the next
        larger one in its place. Sizes were rounded up where all are multiples of
        `query_tokens`, and are left out where that is beyond the largest.

        >>> sorted(Shown((1, 2, 4, 8, 16), 2).of_captured((3, 6, 9, 18, 24), 3))
        [3, 6, 9]
        """
        at_ceiling = sorted(set(captured))
        unit = 1 if any(size % query_tokens for size in at_ceiling) else query_tokens
        most = max(self.sizes, default=0)
        if is_of_decodes:
            most = min(most, self.max_num_seqs * query_tokens)
        own = (-(-size // unit) * unit for size in self.sizes)
        return _stand_ins([size for size in own if size <= most], at_ceiling)


def own_sizes(config: Any, limits: EngineLimits, asked: Asked) -> Sizes:
    """Return the sizes that vLLM captures on an engine started with the limits."""
    own = copy(config)
    own.scheduler_config = copy(config.scheduler_config)
    own.scheduler_config.max_num_seqs = limits.max_num_seqs
    own.scheduler_config.max_num_batched_tokens = limits.max_num_batched_tokens
    own.compilation_config = copy(config.compilation_config)
    own.compilation_config.cudagraph_capture_sizes = (
        None if asked.sizes is None else list(asked.sizes)
    )
    own.compilation_config.max_cudagraph_capture_size = asked.most
    own._set_cudagraph_sizes()  # noqa: SLF001 - vLLM's own rule, under this name since 0.11
    return tuple(sorted(own.compilation_config.cudagraph_capture_sizes or ()))


def _stand_ins(sizes: Sequence[int], captured: Sequence[int]) -> frozenset[int]:
    """Return the smallest captured size that holds each, where there is one.

    >>> sorted(_stand_ins([1, 2, 4, 8, 12], (1, 2, 4, 8, 16, 24)))
    [1, 2, 4, 8, 16]
    """
    places = [bisect_left(captured, size) for size in sizes]
    return frozenset(captured[at] for at in places if at < len(captured))


def show(worker: Any, shown: Shown) -> bool:
    """Hide all other graphs of a worker's model runner; tell whether it could be done.

    Runs in the worker's process.
    """
    runner: Any = worker.model_runner
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None and hasattr(dispatcher, "cudagraph_keys"):
        return _show_to_dispatcher(dispatcher, shown)
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is not None and hasattr(manager, "_candidates"):
        manager._candidates = candidates(_kept(manager, "_candidates"), shown)  # noqa: SLF001
        return True
    return False


def _kept(owner: Any, name: str) -> Any:
    """Return what an attribute held before the first graph was hidden."""
    kept = f"_tune_{name}"
    if not hasattr(owner, kept):
        setattr(owner, kept, getattr(owner, name))
    return getattr(owner, kept)


def _show_to_dispatcher(dispatcher: Any, shown: Shown) -> bool:
    """Leave the V1 runner the keys of the graphs that are shown, and padding to these.

    Each worker knows its sizes alone: with drafts it has rounded them, on a copy of its own.
    """
    every: Mapping[Any, set[Any]] = _kept(dispatcher, "cudagraph_keys")
    captured = {key.num_tokens for keys in every.values() for key in keys}
    query_tokens = int(getattr(dispatcher, "uniform_decode_query_len", 1))
    allowed = shown.of_captured(captured, query_tokens)
    of_decodes = shown.of_captured(captured, query_tokens, is_of_decodes=True)
    dispatcher.cudagraph_keys = {
        mode: {k for k in keys if k.num_tokens in (of_decodes if k.uniform else allowed)}
        for mode, keys in every.items()
    }
    if hasattr(dispatcher, "_bs_to_padded_graph_size"):
        padded, sizes = _kept(dispatcher, "_bs_to_padded_graph_size"), sorted(allowed)
        # Beyond the largest a step keeps its own size, of which there is no key.
        places = [bisect_left(sizes, tokens) for tokens in range(len(padded))]
        dispatcher._bs_to_padded_graph_size = [  # noqa: SLF001 - as named in vLLM
            sizes[at] if at < len(sizes) else tokens for tokens, at in enumerate(places)
        ]
        dispatcher._bs_to_padded_graph_size[0] = 0  # noqa: SLF001 - as above
    return True


def candidates(every: Any, shown: Shown) -> Any:
    """Return the V2 runner's graphs by a step's tokens with those that are shown alone.

    `every` lists the graphs that may hold a step, in the order they are tried: by its tokens,
    or since 0.2x by its tokens and adapters. In the place of a hidden graph comes the next
    larger one of its kind.
    """
    is_list = isinstance(every, list)
    by_key: dict[Any, list[Any]] = dict(enumerate(every)) if is_list else dict(every)
    allowed = _of_kinds({graph for graphs in by_key.values() for graph in graphs}, shown)
    nearest: dict[Any, Any] = {}
    found: dict[Any, list[Any]] = {}
    for key in sorted(by_key, key=_tokens_of, reverse=True):
        chosen = []
        for graph in by_key[key]:
            kind = _kind(graph)
            if graph.num_tokens in allowed[kind]:
                nearest[kind] = graph
            if kind in nearest:
                chosen.append(nearest[kind])
        found[key] = list(dict.fromkeys(chosen))
    return [found[i] for i in range(len(every))] if is_list else found


def _kind(graph: Any) -> Any:
    return replace(graph, num_tokens=0, num_reqs=None)


def _of_kinds(every: Iterable[Any], shown: Shown) -> dict[Any, frozenset[int]]:
    """Return the sizes that are shown of each kind of the V2 runner's graphs.

    Those of steps that only decode count the tokens of their equally long queries, or bound
    them: their sizes are rounded up, which in vLLM 0.20 all sizes are.
    """
    sizes: dict[Any, set[int]] = {}
    for graph in every:
        sizes.setdefault(_kind(graph), set()).add(graph.num_tokens)
    decoded = {
        kind: getattr(kind, "uniform_token_count", None) or getattr(kind, "max_query_len", None)
        for kind in sizes
    }
    longest = max((tokens for tokens in decoded.values() if tokens), default=1)
    return {
        kind: shown.of_captured(
            sizes[kind], tokens or longest, is_of_decodes=tokens is not None
        )
        for kind, tokens in decoded.items()
    }


def _tokens_of(key: Any) -> int:
    return int(key[0] if isinstance(key, tuple) else key)
