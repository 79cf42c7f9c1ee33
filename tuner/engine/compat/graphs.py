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
from collections.abc import Mapping, Sequence
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
    """The graphs that a setting may use: their sizes in tokens, ascending.

    Those of steps that only decode are captured apart, up to `most_decodes` tokens.
    """

    sizes: Sizes
    most_decodes: int

    @classmethod
    def at(cls, config: Any, limits: EngineLimits, asked: Asked, captured: Sizes) -> Self:
        """Return those that stand in for the graphs of an engine started with the limits.

        A size that was not captured at the ceiling has the next larger one in its place.

        Raises: AttributeError where this vLLM chooses sizes in another way.
        """
        own = own_sizes(config, limits, asked)
        drafts = int(getattr(config.speculative_config, "num_speculative_tokens", 0) or 0)
        most = limits.max_num_seqs * (1 + drafts)
        return cls(
            _stand_ins(own, captured),
            max(_stand_ins([size for size in own if size <= most], captured), default=0),
        )

    def allows(self, graph: Any) -> bool:
        """Whether a step may use a graph, by vLLM's description of it.

        V1 calls a graph of equally long queries uniform, V2 counts their tokens.
        """
        is_of_decodes = (
            getattr(graph, "uniform", False)
            or getattr(graph, "uniform_token_count", None) is not None
            or getattr(graph, "max_query_len", None) is not None
        )
        is_small = not is_of_decodes or graph.num_tokens <= self.most_decodes
        return graph.num_tokens in self.sizes and is_small


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


def _stand_ins(sizes: Sequence[int], captured: Sizes) -> Sizes:
    """Return the smallest captured size that holds each, where there is one.

    >>> _stand_ins([1, 2, 4, 8, 12], (1, 2, 4, 8, 16, 24))
    (1, 2, 4, 8, 16)
    """
    places = [bisect_left(captured, size) for size in sizes]
    return tuple(sorted({captured[at] for at in places if at < len(captured)}))


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
    """Leave the V1 runner the keys of the graphs that are shown, and padding to these."""
    every: Mapping[Any, set[Any]] = _kept(dispatcher, "cudagraph_keys")
    dispatcher.cudagraph_keys = {
        mode: {key for key in keys if shown.allows(key)} for mode, keys in every.items()
    }
    if hasattr(dispatcher, "_bs_to_padded_graph_size"):
        padded = _kept(dispatcher, "_bs_to_padded_graph_size")
        # Beyond the largest a step keeps its own size, of which there is no key.
        places = [bisect_left(shown.sizes, tokens) for tokens in range(len(padded))]
        dispatcher._bs_to_padded_graph_size = [  # noqa: SLF001 - as named in vLLM
            shown.sizes[at] if at < len(shown.sizes) else tokens
            for tokens, at in enumerate(places)
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
    nearest: dict[Any, Any] = {}
    found: dict[Any, list[Any]] = {}
    for key in sorted(by_key, key=_tokens_of, reverse=True):
        chosen = []
        for graph in by_key[key]:
            kind = replace(graph, num_tokens=0, num_reqs=None)
            if shown.allows(graph):
                nearest[kind] = graph
            if kind in nearest:
                chosen.append(nearest[kind])
        found[key] = list(dict.fromkeys(chosen))
    return [found[i] for i in range(len(every))] if is_list else found


def _tokens_of(key: Any) -> int:
    return int(key[0] if isinstance(key, tuple) else key)
