"""Graphs that a setting would not have on an engine of its own are hidden from its steps.

vLLM's own code says which graph a step runs in, of both model runners: that of an engine which
was started with the setting is the oracle for one that was started at the ceiling and lowered.
No graph is captured for it, which takes a GPU.
"""

from __future__ import annotations

from copy import deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tuner.engine.compat import graphs, serve
from tuner.engine.demo import demo_engine_args
from tuner.engine.limits import EngineLimits

pytestmark = pytest.mark.engine

CEILING = EngineLimits(256, 8192)
ON_STRIDE = [(8, 512), (32, 2048), (200, 8192), (1, 64), (64, 128), (256, 8192)]
OFF_STRIDE = [(12, 2048), (6, 8192), (256, 300)]


def drafting(tokens: int) -> dict[str, object]:
    """Return the options of an engine whose sequences draft so many tokens a step."""
    drafts = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 3}
    return {"speculative-config": drafts} if tokens else {}


def config_at(limits: EngineLimits, **more: object) -> tuple[Any, graphs.Asked]:
    """Return vLLM's configuration as on CUDA, where graphs are captured."""
    serve.prepare_environment()
    values = {
        **demo_engine_args(),
        "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        **more,
    }
    arguments = serve.parse_serve_values(values)
    asked = graphs.Asked.of(arguments)
    config = serve.resolve_config(arguments)
    from vllm.config import CUDAGraphMode

    config.model_config.enforce_eager = False
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = asked.sizes and list(asked.sizes)
    compilation.max_cudagraph_capture_size = asked.most
    config._set_cudagraph_sizes()
    return config, asked


class FirstRunner:
    """Where the V1 runner looks up the graph of a step, in a worker that is a process."""

    def __init__(self, config: Any, drafts: int = 0) -> None:
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        config, self._query_tokens = deepcopy(config), 1 + drafts
        compilation = config.compilation_config
        adjust = compilation.adjust_cudagraph_sizes_for_spec_decode
        adjust(1 + drafts, *[1] * (len(signature(adjust).parameters) - 1))
        with patch.object(type(compilation), "is_attention_compiled_piecewise", lambda _: True):
            self.cudagraph_dispatcher = CudagraphDispatcher(config)
        mode = compilation.cudagraph_mode
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1 + drafts)

    def graph(self, tokens: int, seqs: int) -> tuple[str, int]:
        """Return the kind and the size of a step's graph."""
        is_decode = tokens == seqs * self._query_tokens
        mode, found = self.cudagraph_dispatcher.dispatch(tokens, uniform_decode=is_decode)
        return mode.name, found.num_tokens


class SecondRunner:
    """Where the V2 runner looks up the graph of a step, as if all of them were captured."""

    def __init__(self, config: Any, drafts: int = 0) -> None:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        self._query_tokens = 1 + drafts
        manager: Any = object.__new__(CudaGraphManager)
        manager.vllm_config, manager.compilation_config = config, config.compilation_config
        manager.max_num_reqs = config.scheduler_config.max_num_seqs
        manager.cudagraph_mode = config.compilation_config.cudagraph_mode
        manager.decode_query_len, manager.varlen_decode = 1 + drafts, False
        manager.ubatch_runner, manager.lora_capture_cases = None, [0]
        manager._lora_dispatch_map, manager._max_lora_case = {}, 0
        manager._candidates, manager._capture_descs, manager._graphs_captured = {}, {}, True
        manager._init_candidates()
        self.cudagraph_manager = manager

    def graph(self, tokens: int, seqs: int) -> tuple[str, int]:
        """Return the kind and the size of a step's graph."""
        alike = self._query_tokens if tokens == seqs * self._query_tokens else None
        found = self.cudagraph_manager.dispatch(seqs, tokens, alike, 0)
        return found.cg_mode.name, found.num_tokens


def steps_of(limits: EngineLimits, drafts: int) -> list[tuple[int, int]]:
    """Return tokens and sequences of steps that the limits allow, some beyond every graph."""
    most = min(700, limits.max_num_batched_tokens)
    alone = [((1 + drafts) * n, n) for n in range(1, limits.max_num_seqs + 1)]
    mixed = [(n, min(-(-n // 2), limits.max_num_seqs)) for n in range(2, most + 1)]
    return [step for step in alone if step[0] <= most] + mixed


class Lowered:
    """A runner that was started at the ceiling, to be lowered, and one of its own."""

    def __init__(self, runner: Any, drafts: int) -> None:
        self._config, self._asked = config_at(CEILING, **drafting(drafts))
        self._make, self.drafts = runner, drafts
        self._runner = runner(self._config, drafts)

    def at(self, limits: EngineLimits) -> Any:
        """Return it lowered."""
        shown = graphs.Shown.at(self._config, limits, self._asked)
        assert graphs.show(SimpleNamespace(model_runner=self._runner), shown)
        return self._runner

    def own(self, limits: EngineLimits) -> Any:
        """Return the runner of an engine that is started with the limits."""
        return self._make(config_at(limits, **drafting(self.drafts))[0], self.drafts)


@pytest.fixture(
    scope="module",
    params=[(runner, n) for runner in (FirstRunner, SecondRunner) for n in (0, 1, 2, 4)],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def lowered(request: pytest.FixtureRequest) -> Lowered:
    """Return a runner that was started at the ceiling, whose sequences may draft."""
    return Lowered(*request.param)


@pytest.mark.parametrize("pair", ON_STRIDE)
def test_a_lowered_engine_runs_each_step_in_the_graph_that_its_own_would(
    lowered: Lowered, pair: tuple[int, int]
) -> None:
    limits = EngineLimits(*pair)
    runner, own = lowered.at(limits), lowered.own(limits)
    steps = steps_of(limits, lowered.drafts)
    assert [runner.graph(*s) for s in steps] == [own.graph(*s) for s in steps]


@pytest.mark.parametrize("pair", OFF_STRIDE)
def test_a_size_that_the_ceiling_has_no_graph_of_is_padded_to_the_next(
    lowered: Lowered, pair: tuple[int, int]
) -> None:
    limits = EngineLimits(*pair)
    runner, own = lowered.at(limits), lowered.own(limits)
    for step in steps_of(limits, lowered.drafts):
        (kind, size), (own_kind, own_size) = runner.graph(*step), own.graph(*step)
        assert kind == own_kind, step
        assert own_size <= size < own_size + 16, step


def test_all_graphs_are_back_once_the_limits_are_the_ceiling_again(lowered: Lowered) -> None:
    runner, steps = lowered.at(CEILING), steps_of(CEILING, lowered.drafts)
    before, own = [runner.graph(*s) for s in steps], lowered.own(CEILING)
    assert before == [own.graph(*s) for s in steps]
    lowered.at(EngineLimits(8, 512))
    assert runner.graph(100, 50)[0] == "NONE"
    lowered.at(CEILING)
    assert [runner.graph(*s) for s in steps] == before


def test_sizes_that_the_configuration_names_are_those_of_every_setting() -> None:
    config, asked = config_at(CEILING, **{"cudagraph-capture-sizes": [1, 8, 64]})
    assert asked.sizes == (1, 8, 64)
    assert graphs.own_sizes(config, EngineLimits(4, 2048), asked) == (1, 8, 64)
    assert graphs.own_sizes(config, EngineLimits(4, 32), asked) == (1, 8)
    config, asked = config_at(CEILING, **{"max-cudagraph-capture-size": 48})
    assert graphs.own_sizes(config, EngineLimits(4, 2048), asked)[-1] == 48


def test_a_runner_that_looks_elsewhere_is_said_to() -> None:
    assert not graphs.show(SimpleNamespace(model_runner=object()), graphs.Shown((1, 2), 2))
