"""Which batches run as a graph, and which graphs an engine of other limits would have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from support.profile_parts import SHAPE
from tuner.engine.compat.serve import installed_vllm
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts, Graphs
from tuner.errors import UsageError

NOW = replace(SHAPE, vllm_version="0.32.0")


def test_a_batch_runs_in_the_next_larger_graph_that_takes_its_kind() -> None:
    both, alone = Graphs((2, 8)), Graphs((2, 8), has_mixed=False)
    assert [both.padded(n, has_prompt=True) for n in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, None]
    assert alone.padded(3, has_prompt=False) == 8
    assert alone.padded(3, has_prompt=True) is None
    assert Graphs().padded(1, has_prompt=False) is None


@pytest.mark.parametrize("sizes", [(4, 2), (0, 2), (2, 2)])
def test_sizes_that_do_not_ascend_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="captured_sizes must ascend from 1"):
        replace(SHAPE, captured_sizes=sizes)


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["balanced", "interactivity"])
@pytest.mark.parametrize("is_gpt_oss", [False, True], ids=["", "gpt-oss"])
def test_sizes_are_those_that_the_vllm_at_hand_chooses(mode: str, *, is_gpt_oss: bool) -> None:
    from vllm.config.vllm import CUDAGraphMode, VllmConfig
    from vllm.model_executor.models.config import GptOssForCausalLMConfig

    rng = np.random.default_rng(0)
    shape = replace(SHAPE, vllm_version=installed_vllm()[1], model_sets_graphs=is_gpt_oss)
    for number in range(400):
        drafted = 0 if is_gpt_oss or number < 200 else int(rng.integers(1, 17))
        drafts = Drafts("eagle", drafted) if drafted else None
        shape = replace(shape, drafts=drafts)
        seqs = int(2 ** rng.uniform(0, 11))
        tokens = seqs + int(2 ** rng.uniform(0, 14)) - 1
        compilation = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            max_cudagraph_capture_size=None,
            cudagraph_capture_sizes=None,
            post_init_cudagraph_sizes=lambda: None,
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
            performance_mode=mode,
            structured_outputs_config=SimpleNamespace(reasoning_parser=""),
            speculative_config=None,
            num_speculative_tokens=drafted,
            uniform_decode_query_len=1 + drafted,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        if is_gpt_oss:
            GptOssForCausalLMConfig.verify_and_update_config(config)
        VllmConfig._set_cudagraph_sizes(config)
        limits = EngineLimits(seqs, tokens)
        found = shape.chosen_sizes(limits, is_fine=mode == "interactivity")
        assert list(found) == compilation.cudagraph_capture_sizes, (limits, drafted)


@pytest.mark.parametrize(
    ("version", "device", "seqs", "last"),
    [
        ("0.20.2", "NVIDIA H200", 9, (16,)),
        ("0.32.0", "NVIDIA H200", 9, (9, 16)),
        ("0.32.0", "NVIDIA H200", 1024, (496, 512)),
        ("0.32.0", "NVIDIA B200", 1024, (1008, 1024)),
        ("0.27.1", "NVIDIA B200", 1024, (496, 512)),
        ("0.32.0", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 1024, (496, 512)),
    ],
)
def test_releases_and_devices_differ_in_what_they_capture(
    version: str, device: str, seqs: int, last: tuple[int, ...]
) -> None:
    shape = replace(SHAPE, vllm_version=version, device=device)
    assert shape.chosen_sizes(EngineLimits(seqs, 8192))[-len(last) :] == last


def test_sizes_that_vllm_chose_follow_the_limits_and_others_stay() -> None:
    race, small = EngineLimits(256, 8192), EngineLimits(8, 2048)
    chosen = replace(NOW, captured_sizes=NOW.chosen_sizes(race))
    assert chosen.graphs_at(race, [race]) == chosen.graphs
    assert chosen.graphs_at(small, [small, race]).sizes == (1, 2, 4, 8, 16)
    fine = replace(NOW, captured_sizes=NOW.chosen_sizes(race, is_fine=True))
    assert fine.graphs_at(small, [race]).sizes == tuple(range(1, 17))
    model = replace(NOW, model_sets_graphs=True)
    set_by_it = replace(model, captured_sizes=model.chosen_sizes(small))
    assert set_by_it.graphs_at(EngineLimits(8, 512), [small]).sizes[-1] == 512
    assert set_by_it.graphs_at(race, [small]).sizes[-1] == 1024
    own = replace(NOW, captured_sizes=(1, 7, 300), captures_mixed=False)
    assert own.graphs_at(small, [race]) == Graphs((1, 7, 300), has_mixed=False)
    assert own.graphs_at(EngineLimits(8, 64), [race]).sizes == (1, 7)
    none = replace(NOW, captured_sizes=())
    assert none.graphs_at(small, [race]).sizes == ()
