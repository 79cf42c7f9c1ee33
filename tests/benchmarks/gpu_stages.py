"""What each stage of the GPU campaign does on the card, and what it keeps of that."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import shadow_truth
import truth_figures
from shadow_truth import Scenario

from support.drafting import drafting
from tuner.engine.demo import DEMO_MODEL_DIR, bundled, demo_engine_args
from tuner.engine.shape import EngineShape
from tuner.replay.metrics import Measurement
from tuner.replay.plan import ReplayPlan
from tuner.run.directory import STEPS_FILE
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile, bundled_profiles, read_profile

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    *("torch", "vllm", "transformers", "numba", "scipy", "optuna"),
    *("msgspec", "ruamel.yaml", "prometheus_client", "prometheus_api_client", "sqlalchemy"),
    "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd",
    *("rich", "click", "cloup", "filelock", "jinja2", "plotext", "aiohttp", "threadpoolctl"),
    "pynvml",
)
"""What the tool imports on such a machine, and SciPy for the figures; pynvml, which is of
nvidia-ml-py, may be missing."""
ACCEPTED = (0.8, 0.5, 0.3)
"""How often the first draft is accepted, the first two, all: of the order of EAGLE-3's."""
LEFT_S = 20.0
"""What a slice keeps for the table and the end: ours."""


@dataclass(frozen=True)
class Size:
    """What is measured: shapes of models, traffic for them, settings and starts.

    `values` are common to all engines, `current` is where `tune` begins, `starts` those whose
    KV blocks are told by the first two. `runs` of each setting are replayed in the first stage
    of truth, which takes the profile that the race has learnt where there is one, and one in
    the others, which calibrate with `budgets_s`.

    Units: seconds.
    """

    shapes: dict[str, str]
    values: dict[str, object]
    conv: tuple[str, float, float]
    code: tuple[str, float, float]
    mooncake: tuple[str, float, float]
    settings: tuple[str, ...]
    current: str
    starts: tuple[str, str, str]
    tight_bytes: int
    runs: int
    budgets_s: tuple[float, float]
    race_s: float
    requests: int


def large(traces: Path) -> Size:
    """Return what an 80 GB card is looked at with; lengths are as recorded."""
    shapes = {"qwen": "qwen2.5-7b", "llama": "llama-3.1-8b", "gemma": "gemma-3-4b"}
    folder = ROOT / "examples"
    return Size(
        shapes={name: str(folder / f"{model}-shape") for name, model in shapes.items()},
        values={
            "load-format": "dummy",
            "skip-tokenizer-init": True,
            "max-model-len": 16384,
            "gpu-memory-utilization": 0.85,
        },
        conv=(_trace(traces, "azure_2023_conv"), 12.0, 2.5),
        code=(_trace(traces, "azure_2023_code"), 8.0, 3.0),
        mooncake=(_trace(traces, "mooncake_conversation"), 8.0, 1.0),
        settings=("256/8192", "32/2048", "64/1024", "16/4096", "128/2048", "192/512"),
        current="16/2048",
        starts=("256/16384", "8/2048", "64/8192"),
        tight_bytes=3 << 29,
        runs=1,
        budgets_s=(200.0, 100.0),
        race_s=330.0,
        requests=300,
    )


def _trace(traces: Path, name: str) -> str:
    """Return the file of a trace, whatever its format."""
    return str(next(iter(sorted(traces.glob(f"{name}.open.*"))), traces / f"{name}.open.csv"))


def small(_traces: Path) -> Size:
    """Return what the test of this script is content with: seconds on a CPU."""
    translation = str(bundled("traces") / "translation.jsonl")
    return Size(
        shapes=dict.fromkeys(("qwen", "llama", "gemma"), str(DEMO_MODEL_DIR)),
        values={**demo_engine_args(), "max-model-len": 4096},
        conv=(translation, 1.0, 0.4),
        code=(translation, 1.5, 0.4),
        mooncake=(translation, 1.5, 0.4),
        settings=("8/1024", "4/512"),
        current="4/1024",
        starts=("8/1024", "4/512", "8/512"),
        tight_bytes=shadow_truth.DEMO_BLOCK_BYTES * 40,
        runs=1,
        budgets_s=(40.0, 40.0),
        race_s=60.0,
        requests=20,
    )


@dataclass(frozen=True)
class Campaign:
    """One call: how large, on which traces, where results lie, and until when.

    Units: ends_s on the monotonic clock.
    """

    size: Size
    traces: Path
    out: Path
    ends_s: float
    is_small: bool = False

    def values(self, shape: str, **more: object) -> dict[str, object]:
        """Return a configuration of one of the shapes."""
        own = {key.replace("_", "-"): value for key, value in more.items()}
        return {**self.size.values, "model": self.size.shapes[shape], **own}

    def scenario(
        self,
        name: str,
        shape: str,
        traffic: tuple[str, float, float],
        settings: int = 6,
        **more: object,
    ) -> Scenario:
        """Return what one stage of truth measures, at so many of the settings."""
        trace, window_s, load = traffic
        return Scenario(
            name=name,
            trace=trace,
            window_s=window_s,
            load=load,
            clip=4000 if self.is_small else 16000,
            values=self.values(shape, **more),
            settings=self.size.settings[:settings],
            current=self.size.current,
        )

    def drafting(self, shape: str, traffic: tuple[str, float, float]) -> Scenario:
        """Return what is measured of a model whose drafts are accepted at known rates.

        By vLLM itself on a GPU; a CPU's sampler is told to.
        """
        head = self.out.resolve() / "eagle"
        drafts = drafting(Path(self.size.shapes[shape]), head, len(ACCEPTED))
        if not self.is_small:
            drafts["rejection_sample_method"] = "synthetic"
            drafts["synthetic_acceptance_rates"] = list(ACCEPTED)
        made = self.scenario(f"{shape}, drafts", shape, traffic, 4, speculative_config=drafts)
        return replace(made, accepted=ACCEPTED if self.is_small else ())

    def kept(self, stage: str) -> dict[str, Any] | None:
        """Return what a stage left, None if it did not run."""
        path = self.out / f"{stage}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def result(self, stage: str) -> dict[str, Any]:
        """Return the figures of a stage, none where it has none."""
        kept = self.kept(stage) or {}
        found: dict[str, Any] = kept.get("result") or {}
        return found

    def profile_path(self, stage: str) -> Path:
        """Return where a stage of truth leaves the profile that it learnt."""
        return self.out / f"{stage}.profile.yaml"


# The stages.


def doctor(_campaign: Campaign) -> dict[str, Any]:
    """Say what is missing, and what card it is."""
    missing = [name for name in NEEDED if not _is_there(name)]
    command = [sys.executable, "-m", "tuner.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    query = "name,driver_version,memory.total,clocks.sm,power.limit,temperature.gpu"
    card = ""
    with suppress(OSError):
        said = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        card = subprocess.run(said, capture_output=True, text=True, check=False).stdout.strip()
    return {"missing": missing, "card": card, "status": done.returncode, "said": done.stdout}


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def starts(campaign: Campaign) -> dict[str, Any]:
    """Start at three limits: what it takes, and whether starts tell the blocks of others.

    Two of them those of the third, and the first alone, by what its largest batch took, those
    of the second.
    """
    from tuner.engine.live import LiveSource
    from tuner.replay.process import EngineProcess

    found: list[dict[str, Any]] = []
    shapes: list[EngineShape] = []
    carrier = read_profile(bundled_profiles()["demo"])
    values = campaign.values("qwen")
    with EngineProcess(LiveSource(), campaign.out / "starts.log") as host:
        for limits in map(truth_figures.limits_of, campaign.size.starts):
            began_s = time.monotonic()
            started = host.start(values, limits)
            info, shape = started.info, started.shape or carrier.shape
            shapes.append(shape)
            found.append(
                {
                    "limits": str(limits),
                    "token_bytes": shape.token_bytes,
                    "block_bytes": shape.block_bytes,
                    "start_s": started.start_s,
                    "warm_up_s": started.warm_up_s,
                    "process_s": time.monotonic() - began_s,
                    "num_blocks": info.num_blocks,
                    "block_size": info.block_size,
                    "captured": [len(info.captured_sizes), max(info.captured_sizes, default=0)],
                    "has_own_graphs": info.has_own_graphs,
                    "asynchronous": info.asynchronous,
                    "no_shadow": started.no_shadow,
                    "notes": list(started.notes),
                }
            )
    known = [
        KvStart(truth_figures.limits_of(one["limits"]), one["num_blocks"]) for one in found
    ]
    carrier = replace(carrier, shape=shapes[0])
    second, third = (
        replace(carrier, kv_starts=tuple(known[:n])).num_blocks_at(known[n].limits)
        for n in (1, 2)
    )
    return {
        "device": info.device,
        "vllm": info.vllm_version,
        "starts": found,
        "second_off": second / known[1].num_blocks - 1,
        "third_off": third / known[2].num_blocks - 1,
    }


def truth(stage: str, make: Callable[[Campaign], Scenario]) -> Callable[[Campaign], Any]:
    """Return the stage that holds a shadow to live replays of every setting."""

    def run(campaign: Campaign) -> dict[str, Any]:
        is_first = stage == TRUTH[0]
        runs = campaign.size.runs if is_first else 1
        budget_s = campaign.size.budgets_s[0 if is_first else 1]
        scenario = make(campaign)
        # What was measured stays there, should the stage be ended before it has a result.
        folder = campaign.out / f"{stage}.unfinished"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        raced = campaign.profile_path("race")
        learnt = folder / scenario.name.replace(" ", "_") / "profile.yaml"
        if is_first and raced.exists():
            learnt = raced
        until_s = campaign.ends_s - LEFT_S
        found = shadow_truth.run(scenario, runs, folder, budget_s, until_s, learnt)
        campaign.profile_path(stage).write_bytes(learnt.read_bytes())
        for part, steps in (
            ("live", folder / STEPS_FILE),
            ("blocks", learnt.parent / STEPS_FILE),
        ):
            if steps.exists():
                to = campaign.out / f"{stage}.{part}.{STEPS_FILE}"
                to.write_bytes(steps.read_bytes())
        shutil.rmtree(folder)
        found["trace_path"] = scenario.trace
        found["figures"] = truth_figures.summary([found])
        return found

    return run


def scenarios() -> dict[str, Callable[[Campaign], Scenario]]:
    return {
        "truth-qwen": lambda c: c.scenario("qwen, conv", "qwen", c.size.conv),
        "truth-kv": lambda c: c.scenario(
            "qwen, conv, KV tight",
            "qwen",
            c.size.conv,
            kv_cache_memory_bytes=c.size.tight_bytes,
        ),
        "truth-llama": lambda c: c.scenario("llama, code", "llama", c.size.code),
        "truth-drafts": lambda c: c.drafting("llama", c.size.conv),
        "truth-windows": lambda c: c.scenario("gemma, conv", "gemma", c.size.conv),
        "truth-eager": lambda c: c.scenario(
            "qwen, conv, eager", "qwen", c.size.conv, 4, enforce_eager=True
        ),
        "truth-sync": lambda c: c.scenario(
            "qwen, conv, synchronous", "qwen", c.size.conv, 4, async_scheduling=False
        ),
        "truth-mooncake": lambda c: c.scenario("llama, mooncake", "llama", c.size.mooncake),
    }


TRUTH = tuple(scenarios())


def race(campaign: Campaign) -> dict[str, Any]:
    """Run the command itself: it calibrates, races and starts cold engines."""
    size, folder = campaign.size, campaign.out / "race"
    trace, window_s, load = size.conv
    current = truth_figures.limits_of(size.current)
    values = campaign.values(
        "qwen",
        max_num_seqs=current.max_num_seqs,
        max_num_batched_tokens=current.max_num_batched_tokens,
    )
    ladder = sorted({truth_figures.limits_of(one).max_num_seqs for one in size.settings})
    command = [
        *(sys.executable, "-m", "tuner.cli", "--trace", trace, "--load", f"{load:g}"),
        *("--window", f"peak:{window_s:g}s", "--budget", f"{size.race_s:g}s"),
        *("--max-num-seqs", ",".join(map(str, ladder)), "--too-long", "clip"),
        *(
            word
            for key, value in values.items()
            for word in ("--engine-arg", _pair(key, value))
        ),
        *("--run-dir", str(folder), "-o", str(campaign.out / "best.yaml")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result, learnt = folder / "result.json", folder / "profile.yaml"
    if learnt.exists():
        campaign.profile_path("race").write_bytes(learnt.read_bytes())
    if not result.exists():
        raise RuntimeError(f"tune ended with {done.returncode}: {done.stderr[-2000:]}")
    (folder / "report.html").unlink(missing_ok=True)
    found = json.loads(result.read_text())
    kept = ("recommendation", "confirmed_cold", "evidence", "limited_by", "caveats", "load")
    made = found["provenance"]
    return {
        "status": done.returncode,
        **{name: found[name] for name in kept},
        **{name: made[name] for name in ("engine", "cold_engines", "stages_s", "wall_s")},
        "gpu": [(trial["measurement"] or {}).get("gpu") for trial in found["trials"]][-4:],
        "said": done.stderr[-6000:],
    }


def _pair(key: str, value: object) -> str:
    return f"{key}={json.dumps(value) if isinstance(value, bool) else value}"


def overhead(campaign: Campaign) -> dict[str, Any]:
    """Replay against vLLM's own `LLM.generate`, each in a process of its own."""
    import replay_overhead

    given = {} if campaign.is_small else campaign.values("qwen")
    rates = replay_overhead.rates_of(1, campaign.size.requests, given, in_process=False)
    return {**rates, "ratio": rates["ours"][0] / rates["vllm"][0]}


def sweep(campaign: Campaign) -> dict[str, Any]:
    """Measure one point of `vllm bench sweep serve`, which starts a server for each."""
    import sweep_cost

    scenario = campaign.scenario("point", "qwen", campaign.size.conv)
    trace = shadow_truth.traffic(scenario)
    limits = truth_figures.limits_of(campaign.size.settings[0])
    point = (limits.max_num_seqs, limits.max_num_batched_tokens)
    given = None if campaign.is_small else campaign.values("qwen")
    return sweep_cost.theirs(scenario.window_s, 1, given, trace, [point])


def derived(campaign: Campaign) -> dict[str, Any]:
    """Hold profiles derived of published tables to what was measured here; no GPU needed."""
    found: dict[str, Any] = {}
    for stage in TRUTH:
        result = campaign.result(stage)
        if result:
            found[stage] = derived_against(result, campaign.profile_path(stage))
    return found


def derived_against(result: dict[str, Any], learnt: Path) -> dict[str, Any]:
    """Return how far off the derived profile of a stage's engine is, by metric.

    Told are errors beside those of the profile that was learnt there, and how far the errors of
    settings scatter about what they have in common, in logarithms.
    """
    profile, why = derived_profile(result)
    if profile is None:
        return {"skipped": why}
    scenario = {key: value for key, value in result["scenario"].items() if key != "trace"}
    scenario["settings"] = tuple(scenario["settings"])
    window = shadow_truth.traffic(Scenario(trace=result["trace_path"], **scenario))
    # What the tables say of KV blocks is held to the starts elsewhere.
    seen = (KvStart(profile.current_limits, result["num_blocks"]),)
    starts_ = read_profile(learnt).kv_starts if learnt.exists() else seen
    predictor = Predictor(replace(profile, kv_starts=starts_))
    shown = {}
    for name in result["predicted"]:
        limits = truth_figures.limits_of(name)
        predicted = predictor.measure([window], limits, ReplayPlan())
        if isinstance(predicted, Measurement):
            shown[name] = predicted.as_json()
    changed = {**result, "shadow": shown, "own_speed": {}, "predicted": list(shown)}
    errors = truth_figures.errors(changed)
    own = truth_figures.errors(result)
    return {
        "origin": profile.origin,
        **{
            metric: {
                "derived": median(of.off),
                "learnt": median(own[metric].off),
                "derived apart": of.apart,
                "learnt apart": own[metric].apart,
            }
            for metric, of in errors.items()
            if of.off and own[metric].off
        },
    }


# What the stages serve otherwise than by default, as published tables can be asked.
_PREDICTED = {"enforce-eager", "async-scheduling"}


def derived_profile(result: Mapping[str, Any]) -> tuple[Profile | None, str]:
    """Return the profile of published tables for a stage's engine, or why there is none."""
    from tuner.errors import UsageError
    from tuner.shadow.derived.derive import derive
    from tuner.shadow.derived.gpus import GPUS
    from tuner.shadow.derived.wanted import Wanted

    device, values = result["device"], result["scenario"]["values"]
    gpu = next((one for one in GPUS if one.device == device), None)
    if gpu is None:
        return None, f"no tables of {device}"
    model = str(values["model"])
    try:
        # The KV cache is that of the stage's own start, whatever its size was set by.
        served = {key: values[key] for key in _PREDICTED & values.keys()}
        longest = int(values["max-model-len"])
        wanted = Wanted(gpu, model, max_model_len=longest, serve_values=served)
        return derive(wanted), ""
    except UsageError as error:
        name = Path(model).name.removesuffix("-shape")
        ready = bundled_profiles().get(f"meta-{name}.1x{gpu.name}")
        if ready is None:
            return None, error.message
        return read_profile(ready), ""
