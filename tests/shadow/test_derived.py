"""A profile of a GPU that is not at hand: from published tables, and marked as such."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.paths import ROOT
from tuner.cli.commands import tune as command
from tuner.engine.limits import EngineLimits
from tuner.errors import Caveat, UsageError
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.shadow.derived import GPUS, SEEN_HOST, Wanted, derive, gpu_of
from tuner.shadow.predictor import Predictor
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


@pytest.mark.slow
def test_a_step_takes_what_the_tables_say_and_a_larger_gpu_less() -> None:
    h200, l40s = (derive(Wanted(gpu_of(name), LLAMA)).profile for name in ("h200_sxm", "l40s"))
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
    profile = derive(wanted).profile
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
    tmp_path: Path, changed: dict[str, object], gpu: str, parallel: int, words: str
) -> None:
    usual = derive(Wanted(gpu_of("h200"), a_config(tmp_path)))
    assert usual.warnings == ()
    # The tables' library reads a folder once.
    found = derive(Wanted(gpu_of(gpu), a_config(tmp_path / "other", **changed), parallel))
    assert any(words in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
    ],
)
def test_what_the_shadow_cannot_keep_account_of_is_refused(
    tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        derive(Wanted(gpu_of("h200"), a_config(tmp_path, **changed)))


def test_what_is_not_known_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nearest that is known is h200_sxm"):
        gpu_of("h20")
    with pytest.raises(UsageError, match="Qwen/Qwen3-32B"):
        derive(Wanted(gpu_of("h200"), "Qwen/Qwen3-33B"))
    with pytest.raises(UsageError, match="the tables of a100_sxm lack a measurement"):
        derive(Wanted(gpu_of("a100"), a_config(tmp_path)))
    with pytest.raises(UsageError, match="no KV budget"):
        derive(Wanted(gpu_of("l40s"), "Qwen/Qwen3-32B"))
    assert [gpu_of(gpu.name) for gpu in GPUS] == list(GPUS)


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
