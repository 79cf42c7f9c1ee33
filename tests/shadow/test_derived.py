"""A profile of a GPU that is not at hand: from published tables, and marked as such."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from support.optional import not_none
from support.paths import ROOT
from tuner.cli.commands import tune as command
from tuner.engine.compat.scheduler import with_layers
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch
from tuner.engine.shape import FULL_ATTENTION, KvGroup, KvLayout
from tuner.errors import Caveat, UsageError
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.shadow.calibration import StatedError
from tuner.shadow.derived.derive import PREPARING_S, SEEN_HOST, derive
from tuner.shadow.derived.gpus import GPUS, gpu_of
from tuner.shadow.derived.models import ABOUT_GPT_OSS, ModelConfig
from tuner.shadow.derived.wanted import Wanted
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.traffic.formats import read_trace

pytest.importorskip("aiconfigurator_core", reason="pip install 'max-num-seqs-tuner[predict]'")

LLAMA = "meta-llama/Meta-Llama-3.1-8B"


def a_config(folder: Path, **changed: object) -> str:
    """Return a folder with the configuration of a small Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changed))
    return str(folder)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Return the profile of that model on an H200, served by default."""
    return derive(Wanted(gpu_of("h200"), a_config(tmp_path_factory.mktemp("usual"))))


@pytest.mark.slow
def test_a_step_takes_what_the_tables_say_and_a_larger_gpu_less() -> None:
    h200, l40s = (derive(Wanted(gpu_of(name), LLAMA)) for name in ("h200_sxm", "l40s"))
    assert h200.fit.step_mape_ratio < 0.03
    assert h200.fit.heldout_steps_ratio < 0.02
    trace = read_trace(ROOT / "traces" / "chat.jsonl")
    limits = EngineLimits(64, 2048)
    fast, slow = (
        measure([Predictor(p).replay(trace, limits, ReplayPlan())]) for p in (h200, l40s)
    )
    # 4.8 TB/s against 0.86, and twice the arithmetic at least.
    assert 3 < (slow.latency("tpot_s", "p50") or 0) / (fast.latency("tpot_s", "p50") or 1) < 8
    assert h200.num_blocks_at(limits) > 3 * l40s.num_blocks_at(limits)
    assert h200.num_blocks_at(EngineLimits(64, 32768)) < h200.num_blocks_at(limits)


def test_what_is_known_of_a_model_folder_is_used(tmp_path: Path) -> None:
    wanted = Wanted(
        gpu_of("H100"), a_config(tmp_path), limits=EngineLimits(32, 4096), max_model_len=2048
    )
    profile = derive(wanted)
    assert profile.shape.max_model_len == 2048
    assert profile.shape.device == "NVIDIA H100 80GB HBM3"
    assert profile.current_limits == EngineLimits(32, 4096)
    assert profile.serve_values == {"model": str(tmp_path)}
    # Launching goes by the layers, of which there are 16 here, but for a single graph.
    host = profile.step_model.host
    seen = (SEEN_HOST.full_s, SEEN_HOST.mixed_s * 16 / 28, SEEN_HOST.eager_s * 16 / 28)
    assert (host.full_s, host.mixed_s, host.eager_s) == pytest.approx(seen)
    assert host.spread == SEEN_HOST.spread


@pytest.mark.parametrize(
    ("changed", "gpu", "parallel", "words"),
    [
        ({"num_key_value_heads": 32}, "h200", 1, "keys of its own"),
        pytest.param({}, "l40s", 2, "over PCIe", marks=pytest.mark.slow),
        pytest.param(
            {"num_attention_heads": 16},
            "a100",
            1,
            "measured in vLLM 0.14.0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_further_off_than_usual_is_warned_of(
    tmp_path: Path,
    usual: Profile,
    changed: dict[str, object],
    gpu: str,
    parallel: int,
    words: str,
) -> None:
    assert usual.doubts == ()
    found = derive(Wanted(gpu_of(gpu), a_config(tmp_path, **changed), parallel))
    assert any(words in warning for warning in found.doubts)
    # And wherever the profile is used, which may be by somebody else.
    write_profile(tmp_path / "p.yaml", found)
    assert words in StatedError.of(read_profile(tmp_path / "p.yaml")).texts[Caveat.DERIVED]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"sliding_window": 1024}, "attend to 1024 tokens"),
        ({"hybrid_override_pattern": "M-M*"}, "layers of several kinds"),
        ({"sparse_attention_config": {"sparse_topk_blocks": 16}}, "sparse attention"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantised in blocks",
        ),
        ({"compression_config": {"format": "float-quantized"}}, "in compression_config"),
        ({"vocab_size": "lots"}, "vocab_size is 'lots'"),
    ],
)
def test_what_the_shadow_cannot_keep_account_of_is_refused(
    tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        derive(Wanted(gpu_of("h200"), a_config(tmp_path, **changed)))


def test_gpt_oss_has_windows_graphs_of_its_own_and_room_beside_padded_experts() -> None:
    """Its KV cache is in the groups that vLLM makes of its layers."""
    small, large = (
        derive(Wanted(gpu_of("h200"), f"openai/gpt-oss-{size}b", limits=EngineLimits(8, 2048)))
        for size in (20, 120)
    )
    layout = KvLayout(looks_back=(True, False), window=128, retention=0)
    for found in (small, large):
        assert found.shape.kv_layout == layout
        assert found.shape.captured_sizes[-1] == 1024
        assert found.doubts == (ABOUT_GPT_OSS,)
    # 0.92 of 141 GB without 66 and 14 GiB of weights and 4 of the engine's own.
    block_bytes = 16 * 2 * 8 * 64 * 2
    gib = [
        found.kv_starts[0].num_blocks * layers / 2 * block_bytes / 2**30
        for found, layers in ((small, 24), (large, 36))
    ]
    assert gib == pytest.approx([111, 59], abs=4)
    trace, limits = read_trace(ROOT / "traces" / "chat.jsonl"), EngineLimits(64, 2048)
    for found in (small, large):
        replayed = Predictor(found).replay(trace, limits, ReplayPlan())
        assert measure([replayed]).requests_per_s > 0


@pytest.mark.slow
def test_published_points_are_met_within_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gpt-oss on four H200: 80 % of the times per output token within 20 %."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    script = importlib.import_module("published")
    key = "openai/gpt-oss-120b", "h200_sxm", 4
    profile, rows = script.derived(*key), script.published()[key]
    off = [script.point(profile, row)["tpot_ms"] / row["tpot_ms"] - 1 for row in rows]
    assert len(off) == 15
    assert np.quantile(np.abs(off), 0.8) < not_none(profile.metric_error_ratio) == 0.2


@pytest.mark.engine
def test_the_groups_of_gpt_oss_are_those_that_vllm_makes_of_its_layers() -> None:
    found = derive(Wanted(gpu_of("h200"), "openai/gpt-oss-20b")).shape
    plain = replace(found, kv_kind=FULL_ATTENTION, kv_groups=())
    full: KvGroup = {"kind": "FullAttentionSpec", "block_size": plain.block_size}
    window: KvGroup = {**full, "kind": "SlidingWindowSpec", "sliding_window": 128}
    made = with_layers(plain, [window, full] * 12, 0)
    assert (made.kv_kind, made.kv_layout) == (found.kv_kind, found.kv_layout)


@pytest.mark.parametrize(
    ("changed", "served", "words"),
    [
        ({"sliding_window": 256}, {}, "has layers of sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 24}, {}, "has layers of sliding_attention"),
        ({"quantization_config": None}, {}, "windows of gpt-oss in MXFP4 alone"),
        ({}, {"disable-hybrid-kv-cache-manager": True}, "keeps what lies behind a window"),
    ],
)
def test_windows_that_the_tables_do_not_have_are_refused(
    tmp_path: Path, changed: dict[str, object], served: dict[str, object], words: str
) -> None:
    known = ModelConfig.of("openai/gpt-oss-20b")
    (tmp_path / "config.json").write_text(json.dumps({**known.content, **changed}))
    with pytest.raises(UsageError, match=words):
        derive(Wanted(gpu_of("h200"), str(tmp_path), serve_values=served))


def test_weights_that_leave_no_room_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no KV budget: the weights take 65\.8 GiB"):
        derive(Wanted(gpu_of("h200"), "openai/gpt-oss-120b", memory_share=0.49))


@pytest.mark.parametrize(
    ("quantised", "served", "is_halved"),
    [
        ({"quant_method": "fp8"}, {}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8"}, {}, True),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8"},
            {"kv-cache-dtype": "bfloat16"},
            False,
        ),
    ],
)
def test_keys_and_values_have_the_bits_that_vllm_gives_them_whatever_weights_have(
    tmp_path: Path,
    usual: Profile,
    quantised: dict[str, str],
    served: dict[str, object],
    *,
    is_halved: bool,
) -> None:
    """Weights of eight bits alone leave them at sixteen."""
    config = a_config(tmp_path, quantization_config={"activation_scheme": "static"} | quantised)
    found = derive(Wanted(gpu_of("h200"), config, serve_values=served))
    at = EngineLimits(64, 2048)
    times = found.num_blocks_at(at) / usual.num_blocks_at(at)
    assert times == pytest.approx(2.0 if is_halved else 1.0, rel=0.05)


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    config = a_config(tmp_path, sliding_window=1024, use_sliding_window=False)
    assert derive(Wanted(gpu_of("h200"), config)).doubts == ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("quantization", "fp8", "quantization: fp8"),
        ("kv-cache-dtype", "fp8", "kv-cache-dtype: fp8 changes"),
        ("data-parallel-size", 2, "data-parallel-size: 2 changes"),
        ("speculative-config", {"method": "ngram"}, "speculative-config: .* changes"),
        ("enable-lora", True, "enable-lora: True changes"),
        ("gpu-memory-utilization", "lots", "lots is no share"),
        ("tensor-parallel-size", "auto", "auto is no whole number"),
        ("enforce-eager", "maybe", "maybe is neither true nor false"),
        ("max-model-len", "auto", "max-model-len: auto lets vLLM fit it"),
        ("max-model-len", 1_000_000, "more than the 8192 of the model"),
        ("scheduler-cls", "my.Scheduler", r"scheduler-cls: my\.Scheduler changes .* schedule"),
        ("max-num-queued-reqs", 5, "max-num-queued-reqs: 5 changes"),
        ("max_num_partial_prefills", 4, "max-num-partial-prefills: 4 changes"),
        ("spec-method", "ngram", "spec-method: ngram changes"),
        ("performance-mode", "throughput", "performance-mode: throughput changes"),
        ("optimization-level", 0, "optimization-level: 0 changes"),
        ("hf-overrides", {"max_position_embeddings": 99}, "hf-overrides: .* changes"),
    ],
)
def test_what_is_served_as_the_tables_do_not_know_is_refused(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    config = tmp_path / "served.yaml"
    config.write_text(json.dumps({"model": a_config(tmp_path / "m"), key: value}))
    line = ["profile", "derive", "--gpu", "h200", "--config", str(config)]
    done = CliRunner().invoke(command, [*line, "-o", str(tmp_path / "p.yaml")])
    assert isinstance(done.exception, UsageError)
    assert re.search(words, str(done.exception))


def test_what_is_served_otherwise_than_by_default_is_in_the_profile(tmp_path: Path) -> None:
    served = {
        "enforce-eager": True,
        "no-enable-prefix-caching": True,
        "async-scheduling": False,
        "block-size": 32,
        "num-gpu-blocks-override": 5000,
        "scheduling-policy": "priority",
        "long-prefill-token-threshold": 512,
        "long-prefill-token-threshold-adaptive": True,
        "prefill-schedule-interval": "4",
        "served-model-name": "mine",
    }
    profile = derive(Wanted(gpu_of("h200"), a_config(tmp_path), serve_values=served))
    shape = profile.shape
    assert (shape.captured_sizes, shape.prefix_caching, shape.asynchronous) == (
        (),
        False,
        False,
    )
    assert (shape.block_size, shape.has_priorities) == (32, True)
    scheduler = {
        "long_prefill_token_threshold": 512,
        "long_prefill_token_threshold_adaptive": True,
        "prefill_schedule_interval": 4,
    }
    assert shape.scheduler == {**shape.scheduler, **scheduler}
    assert profile.num_blocks_at(EngineLimits(8, 2048)) == 5000


def test_a_batch_that_is_waited_for_is_prepared_and_launched_first(tmp_path: Path) -> None:
    """As on the H200 where that was measured; without graphs the host is the slower one."""
    decodes = Batch(8, 0, 0, 8000, 0, 0, 0)
    took_s = {}
    for is_eager in (False, True):
        for is_asynchronous in (False, True):
            served = {"enforce-eager": is_eager, "async-scheduling": is_asynchronous}
            config = a_config(tmp_path)
            profile = derive(Wanted(gpu_of("h200"), config, serve_values=served))
            took_s[is_eager, is_asynchronous] = profile.step_model.step_s(decodes)
    added_s = took_s[False, False] - took_s[False, True]
    assert added_s == pytest.approx(PREPARING_S, rel=0.2)
    launch_s = SEEN_HOST.eager_s * 16 / 28
    assert took_s[True, True] < launch_s < took_s[True, False]
    assert took_s[True, False] == pytest.approx(launch_s + PREPARING_S, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "release", "named", "limits"),
    [
        ("h200", "0.32.0", (), (1024, 8192)),
        ("b200", "0.27.0", (), (1024, 8192)),
        ("b200", "0.28.0", (), (1024, 16384)),
        ("l40s", "0.32.0", (), (256, 2048)),
        ("h200", "0.32.0", (None, 512), (512, 512)),
        ("b200", "0.32.0", (64, None), (64, 16384)),
    ],
)
def test_limits_that_nobody_names_are_those_of_vllm(
    gpu: str, release: str, named: tuple[int | None, ...], limits: tuple[int, int]
) -> None:
    assert gpu_of(gpu).limits(release, *named) == EngineLimits(*limits)


def test_what_vllm_would_not_start_is_refused_and_told_what_it_would() -> None:
    """A request of 131,072 tokens, of which the KV cache holds 91,536."""
    model, gpu = "meta-llama/Meta-Llama-3.1-70B", gpu_of("b200")
    with pytest.raises(UsageError, match="holds 91,536 tokens") as caught:
        derive(Wanted(gpu, model))
    assert "max-model-len: 91136" in caught.value.hint
    assert derive(Wanted(gpu, model, max_model_len=91136)).shape.max_model_len == 91136


@pytest.mark.slow
def test_no_more_memory_is_asked_for_than_the_limits_take() -> None:
    """Four times the token budget would leave none for the KV cache."""
    fits = EngineLimits(256, 16384)
    model = "Qwen/Qwen3-32B-FP8-Static-PerTensor"
    wanted = Wanted(gpu_of("l40s"), model, 1, fits, max_model_len=16384)
    profile = derive(wanted)
    assert profile.num_blocks_at(fits) == profile.kv_starts[0].num_blocks > 1024


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"])
def test_experts_are_spread_over_gpus_as_all_else_and_without_a_network(model: str) -> None:
    one, two = (derive(Wanted(gpu_of("h200"), model, count)) for count in (1, 2))
    assert any("mixture of experts" in warning for warning in two.doubts)
    at = EngineLimits(64, 8192)
    assert two.num_blocks_at(at) > 2 * one.num_blocks_at(at)


def test_a_model_that_was_trained_further_has_the_layers_of_the_one_that_is_known() -> None:
    """And a profile of either is one of both; of what was measured that is not taken so."""
    known, named = "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"
    base, found = (derive(Wanted(gpu_of("h200"), model)) for model in (known, named))
    assert found.step_model == base.step_model
    assert found.doubts == (f"by its name it has the layers of {known}, which are taken",)
    assert ProfiledEngine(base).unlike({"model": named}) == []
    assert ProfiledEngine(base).unlike({"model": f"{named}-FP8"})
    measured = replace(base, origin="")
    assert "made with model" in ProfiledEngine(measured).unlike({"model": named})[0]


def test_weights_of_other_bits_are_told_from_those_of_the_same_name(tmp_path: Path) -> None:
    ready = ProfiledEngine(read_profile(Path("meta-llama-3.1-8b.1xh100_sxm")))
    folder = tmp_path / "Llama-3.1-8B-Instruct"
    assert ready.unlike({"model": a_config(folder)}) == []
    awq = {"quant_method": "awq", "bits": 4}
    (told,) = ready.unlike({"model": a_config(folder, quantization_config=awq)})
    assert re.search(rf"not quantised, those in {folder} are quantised \(awq\)", told)
    (folder / "config.json").unlink()
    (tmp_path / "other").mkdir()
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    config = a_config(tmp_path / "other" / folder.name, quantization_config=fp8)
    made = ProfiledEngine(derive(Wanted(gpu_of("h200"), config)))
    assert made.unlike({"model": config}) == []
    assert "quantised weights" in made.unlike({"model": a_config(folder)})[0]


@pytest.mark.parametrize(
    ("rope", "longest", "usual"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 32768, 32768),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 16384, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192, 8192),
        ({"rope_scaling": {"type": "linear", "factor": None}}, 8192, 8192),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
            8192,
            4096,
        ),
    ],
)
def test_a_request_may_be_as_long_as_in_vllm(
    tmp_path: Path, rope: dict[str, object], longest: int, usual: int
) -> None:
    config = ModelConfig.of(a_config(tmp_path, **rope))
    assert (config.longest, config.usual_length) == (longest, usual)


@pytest.mark.parametrize("factor", ["4", 0, True])
def test_a_factor_that_is_none_is_refused(tmp_path: Path, factor: object) -> None:
    rope = {"rope_type": "linear", "factor": factor}
    with pytest.raises(UsageError, match="factor of rotary positions"):
        _ = ModelConfig.of(a_config(tmp_path, rope_scaling=rope)).longest


def test_what_is_not_known_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nearest that is known is h200_sxm"):
        gpu_of("h20")
    with pytest.raises(UsageError, match="Qwen/Qwen3-32B"):
        derive(Wanted(gpu_of("h200"), "Qwen/Qwen3-33B"))
    with pytest.raises(UsageError, match=r"do not know .* on 1 x a100_sxm: .* data missing"):
        derive(Wanted(gpu_of("a100"), a_config(tmp_path)))
    with pytest.raises(UsageError, match="no KV budget"):
        derive(Wanted(gpu_of("l40s"), "Qwen/Qwen3-32B"))
    assert [gpu_of(gpu.name) for gpu in GPUS] == list(GPUS)
    assert [gpu_of(gpu.device) for gpu in GPUS] == list(GPUS)


@pytest.mark.parametrize("typed", ["banana", "0.32", "v0.32.0", "0.32.0rc1", "0.33.1+cu128"])
def test_a_version_that_is_none_is_refused(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is a version gets as far as the tables.
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    words = ["profile", "derive", "--gpu", "h200", "--model", a_config(tmp_path)]
    done = CliRunner().invoke(
        command, [*words, "--vllm", typed, "-o", str(tmp_path / "p.yaml")]
    )
    is_none = typed in {"banana", "v0.32.0"}
    assert isinstance(done.exception, UsageError)
    assert (f"--vllm {typed} is no version of vLLM" in str(done.exception)) is is_none


def test_without_the_tables_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(UsageError, match="aiconfigurator-core is not installed") as caught:
        derive(Wanted(gpu_of("h200"), LLAMA))
    assert "max-num-seqs-tuner[predict]" in (caught.value.hint or "")


@pytest.mark.slow
def test_a_run_from_a_derived_profile_says_so_everywhere(tmp_path: Path) -> None:
    profile, best = tmp_path / "h200.yaml", tmp_path / "best.yaml"
    runner = CliRunner()
    words = ["profile", "derive", "--gpu", "h200", "--model", LLAMA, "-o", str(profile)]
    done = runner.invoke(command, words)
    assert done.exit_code == 0, done.output
    assert "not measured" in done.stdout
    assert "Apache-2.0" in profile.read_text().splitlines()[1]
    trace = str(ROOT / "traces" / "chat.jsonl")
    words = ["--method", "shadow", "--profile", str(profile), "--trace", trace, "-o", str(best)]
    done = runner.invoke(command, [*words, "--run-dir", str(tmp_path / "run"), "--load", "3"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"derived", "shadow_only"} <= {caveat["id"] for caveat in result["caveats"]}
    assert Caveat.DERIVED.text in best.read_text().replace("\n# ", " ")
