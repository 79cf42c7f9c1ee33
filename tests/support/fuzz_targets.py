"""What is fuzzed: every reader of a file or an answer that others may have written.

A target is a reader, and samples of what it reads: the repository's own, the smallest of each
format of traces, and public traces where they lie beside the checkout. Whatever a sample is
made into, a reader returns or raises an error of ours, in a second and half a gigabyte.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from support.fuzz_seeds import LENGTHS, SEEDS
from support.paths import ROOT, SHARED_TRACES
from support.prometheus_fake import FakePrometheus, Handler, answered, listening, send
from support.prometheus_past import PastEngine
from support.watch_parts import EIGHT, FOUR
from tuner.drift.watch.state import RolloutRecord, StateDir, WatchState
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation
from tuner.emit.registry import emit, merge_into
from tuner.emit.sources import read_source
from tuner.emit.target import Names
from tuner.engine.serve_config import read_config, read_tuning, to_argv
from tuner.errors import TunerError
from tuner.redact import redacted
from tuner.replay.slo import Slo
from tuner.report.run_files import read_run
from tuner.run.directory import RESULT_FILE, RUN_FILE, TIMELINES_FILE, TRIALS_FILE, RunDir
from tuner.run.journal import _read_trials
from tuner.run.stored import read_record
from tuner.shadow.profiles import read_profile
from tuner.shadow.recorded import RecordedRequests, read_steps
from tuner.traffic.describe import describe
from tuner.traffic.formats import ReadOptions, read_trace
from tuner.traffic.prometheus import Scraped, trace_from_prometheus
from tuner.traffic.prometheus.live import live_between
from tuner.traffic.sketch import read_sketch

SKIPPING: Final = ReadOptions(skip_invalid=True, max_invalid_ratio=1.0)
MAX_MESSAGE: Final = 2000
"""Ours: an error is a sentence, whatever it quotes."""

ROWS: Final = 25
SMALL_BYTES: Final = 16_384
"""Of a long sample: what lies further down is read as what lies above."""


@dataclass(frozen=True, slots=True)
class Target:
    """A reader, the name of the file that it reads, what lies beside that, and samples."""

    file: str
    read: Callable[[Path], object]
    samples: tuple[bytes, ...]
    beside: Mapping[str, bytes]

    @classmethod
    def of(
        cls, file: str, read: Callable[[Path], object], *samples: bytes, **beside: bytes
    ) -> Target:
        """Return one; files beside it go by their names with `_` for `.` and `-`."""
        return cls(file, read, samples, beside)


class FaultError(Exception):
    """A reader did what none may."""


def tried(target: Target, path: Path) -> str:
    """Return what came of an input: "read", or the class of the error. Raises: FaultError."""
    try:
        target.read(path)
    except TunerError as error:
        if len(error.message) > MAX_MESSAGE:
            raise FaultError(f"a message of {len(error.message)} characters") from error
        if not error.message or "Traceback" in error.message:
            raise FaultError(f"no message for people: {error.message!r}") from error
        return type(error).__name__
    return "read"


def read_as(name: str | None, options: ReadOptions | None, path: Path) -> None:
    """Read a trace and describe it, as `tune trace inspect` does."""
    trace = read_trace(path, name, options)
    if not len(trace):
        raise FaultError("a trace without requests")
    describe(trace)


def cut(data: bytes) -> bytes:
    """Return a sample's beginning, with all kinds of what it holds."""
    lines = data.splitlines(keepends=True)[:ROWS]
    try:
        return _small(json.loads(data))
    except ValueError:
        pass
    try:
        return b"".join(_small(json.loads(line)) + b"\n" for line in lines)
    except ValueError:
        return b"".join(lines)


def _small(tree: Any) -> bytes:
    whole = json.dumps(_pruned(tree, 8)).encode()
    return whole if len(whole) < SMALL_BYTES else json.dumps(_pruned(tree, 2)).encode()


def _pruned(tree: Any, count: int = 4) -> Any:
    """Return a tree whose lists of records are as short as asked."""
    if isinstance(tree, list):
        are_records = any(isinstance(one, dict | list) for one in tree)
        return [_pruned(one, count) for one in (tree[:count] if are_records else tree)]
    if isinstance(tree, dict):
        return {key: _pruned(value, count) for key, value in islice(tree.items(), 40)}
    return tree


# --- traces ---


def traces() -> Iterator[tuple[str, Target]]:
    """Yield each format's readers: by its content, by its name, and with wrong rows skipped."""
    for name, seed in SEEDS.items():
        label = name or "native"
        beside = {"chunk-0-dataset.json": LENGTHS} if name == "servegen" else {}
        file = "chunk-0-trace.csv" if name == "servegen" else "trace"
        for how, given, options in (
            ("detected", None, None),
            ("named", name, None),
            ("skipping", name, SKIPPING),
        ):
            read = partial(read_as, given, options)
            yield f"trace/{label}/{how}", Target(file, read, (seed,), beside)
    for path in sorted((ROOT / "traces").glob("*.jsonl")):
        yield (
            f"trace/{path.stem}",
            Target("trace.jsonl", partial(read_as, None, None), (cut(path.read_bytes()),), {}),
        )


def public_traces() -> Iterator[tuple[str, Target]]:
    """Yield the samples of public traces, where they lie beside the checkout."""
    if not SHARED_TRACES.is_dir():
        return
    for path in sorted(SHARED_TRACES.rglob("*")):
        where = str(path.relative_to(SHARED_TRACES))
        if not path.is_file() or path.suffix not in {".csv", ".json", ".jsonl"}:
            continue
        if where == "MANIFEST.json" or path.name.endswith("-dataset.json"):
            continue
        beside = {}
        if path.name.endswith("-trace.csv"):
            dataset = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
            beside = {
                dataset.name: json.dumps(_pruned(json.loads(dataset.read_bytes()))).encode()
            }
        read = partial(read_as, None, SKIPPING if "synthetic" in where else None)
        yield f"public/{where}", Target(path.name, read, (cut(path.read_bytes()),), beside)


# --- what a recorder writes ---


def _steps(window: int | None = None, drafting: object = None) -> bytes:
    from tuner.recorder.steps import steps_header, steps_line

    numbers = array("q")
    for number in range(40):
        numbers.extend((10**15 + 20_000 * number, 4, 0, 0, 20_000, 19_000, 0, 16))
    config = {
        "model_config": {
            "dtype": "torch.float16",
            "architecture": "LlamaForCausalLM",
            "max_model_len": 4096,
            "model": "m",
            "vocab_size": 99,
            "is_hybrid": False,
            "layers": [],
            "has_uneven_layers": False,
            "kv_shared_layers": 0,
            "kv_heads": [],
            "sliding_window": window,
        },
        "parallel_config": dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1
        ),
        "cache_config": {"block_size": 16, "enable_prefix_caching": True},
        "compilation_config": {"cudagraph_capture_sizes": [1, 2], "cudagraph_mode": "FULL"},
        "scheduler_config": {"policy": "fcfs", "async_scheduling": False},
        "scheduler_classes": ["a", "a"],
        "speculative_config": drafting,
        **dict.fromkeys(("lora_config", "kv_transfer_config"), False),
    }
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    server = {
        "vllm": "0.32.0",
        "model": "m",
        "limits": limits,
        "num_blocks": 9,
        "config": config,
    }
    return steps_header("recorder 1", server) + steps_line(numbers, (160, 90)) * 2


ROW: Final = (
    b'{"arrived_at_s": 1763726400.0, "input_length": 9, "output_length": 3, "status": "stop", '
    b'"e2e_s": 0.5, "ttft_s": 0.1, "prefill_s": 0.1, "decode_s": 0.4, "cached_tokens": 0}\n'
)


def recordings() -> Iterator[tuple[str, Target]]:
    """Yield what `tune profile fit` reads."""
    heads = {"method": "mtp", "num_speculative_tokens": 3, "use_multi_module_mtp": False}
    heads |= {"sample_from_anchor": True}
    files = (_steps(), _steps(64), _steps(drafting=heads))
    yield (
        "recorded/steps",
        Target.of("prod.steps", lambda path: read_steps([path]), *files),
    )
    head = b'{"trace_header": {"version": 1, "recorded_by": "recorder 1", "clock": "wall"}}\n'
    read = RecordedRequests.read
    yield (
        "recorded/requests",
        Target.of("prod.jsonl", lambda path: read([path]), head + 4 * ROW),
    )


# --- configurations, profiles, manifests ---


def _config(path: Path) -> None:
    values = read_config(path)
    redacted(values)
    to_argv(values)


def _merged(chosen: Format, path: Path) -> None:
    rec = Recommendation(
        values={"model": "m"}, limits=EIGHT, comments=(), facts={}, started_at=None, lost=()
    )
    merge_into(path, chosen, rec, Names())


def texts() -> Iterator[tuple[str, Target]]:
    """Yield what people write in YAML."""
    demo, profiles = ROOT / "examples" / "demo", ROOT / "profiles"
    current = [ROOT / "examples" / "current.yaml", demo / "current.yaml", demo / "best.yaml"]
    configs = tuple(path.read_bytes() for path in current)
    yield "yaml/config", Target("current.yaml", _config, configs, {})
    tunings = tuple((profiles / f"{n}.yaml").read_bytes() for n in ("batch", "interactive"))
    yield "yaml/tuning", Target("tuning.yaml", read_tuning, tunings, {})
    learnt = tuple(
        path.read_bytes()
        for path in (profiles / "demo.profile.yaml", next((profiles / "gpu").glob("*.yaml")))
    )
    yield "yaml/profile", Target("profile.yaml", read_profile, learnt, {})
    for chosen, name in (
        (Format.VLLM, "current.yaml"),
        (Format.DOCKER_COMPOSE, "compose.yaml"),
        (Format.KUBERNETES, "current-deployment.yaml"),
        (Format.PRODUCTION_STACK, "production-stack-values.yaml"),
        (Format.VLLM_RUNTIME, "current-vllmruntime.yaml"),
        (Format.KSERVE, "inferenceservice.yaml"),
        (Format.KSERVE_LLM, "llminferenceservice.yaml"),
        (Format.LLM_D, "llm-d-values.yaml"),
        (Format.AIBRIX, "aibrix.yaml"),
    ):
        sample = (demo / name).read_bytes()
        yield f"merge/{chosen}", Target("file.yaml", partial(_merged, chosen), (sample,), {})


# --- what runs and watches leave ---


def _pruned_result() -> bytes:
    """Return a result with few trials, of which none is referred to by what is left out."""
    whole = json.loads((ROOT / "examples/demo/run" / RESULT_FILE).read_bytes())
    whole["trials"] = whole["trials"][:3]
    for key, value in whole.items():
        if isinstance(value, list):
            whole[key] = value[:4]
    return json.dumps(whole).encode()


def _emitted(path: Path) -> None:
    rec = read_source(path.parent)
    emit(Format.VLLM, rec)
    emit(Format.KUBERNETES, rec)


def _trials(path: Path) -> None:
    run_dir = RunDir.__new__(RunDir)
    run_dir.path = path.parent
    _read_trials(run_dir, (Slo.parse("e2e_p50=9s"),))


def _state(path: Path) -> None:
    with StateDir(path.parent) as kept:
        kept.load()


def run_files() -> Iterator[tuple[str, Target]]:
    """Yield what a run directory and a watch's state hold."""
    demo = ROOT / "examples" / "demo" / "run"
    result, run = _pruned_result(), (demo / RUN_FILE).read_bytes()
    timelines = json.dumps(_pruned(json.loads((demo / TIMELINES_FILE).read_bytes()))).encode()
    compared = json.dumps(_pruned(json.loads((demo / "compare.json").read_bytes()))).encode()
    parent: Callable[[Path], object] = lambda path: read_run(path.parent)  # noqa: E731
    beside = {RESULT_FILE: result, RUN_FILE: run}
    yield "run/run.json", Target(RUN_FILE, lambda path: read_record(path.parent), (run,), {})
    yield "run/result.json", Target(RESULT_FILE, parent, (result,), {RUN_FILE: run})
    yield "run/emitted", Target(RESULT_FILE, _emitted, (result,), {RUN_FILE: run})
    yield "run/timelines.json", Target(TIMELINES_FILE, parent, (timelines,), beside)
    yield "run/compare.json", Target("compare.json", parent, (compared,), beside)
    trials = b"".join(json.dumps(one).encode() + b"\n" for one in json.loads(result)["trials"])
    yield "run/trials.jsonl", Target(TRIALS_FILE, _trials, (trials,), {})
    sketch = (demo / "traffic.json").read_bytes()
    yield "run/traffic.json", Target("traffic.json", read_sketch, (sketch,), {})
    rollout = RolloutRecord(
        FOUR, EIGHT, "model: m\n", "model: m\n", has_secrets=False, why="w", decided_s=1.0
    )
    state = msgspec.json.encode(WatchState(profile_sha256="a", current=FOUR, handover=rollout))
    yield "watch/state.json", Target("state.json", _state, (state,), {})


# --- a Prometheus ---

START_S: Final = 1_763_726_400


@cache
def past() -> FakePrometheus:
    """Return a Prometheus that knows a quarter of an hour of two engines."""
    rng = np.random.default_rng(0)
    engines = [
        PastEngine(
            arrived_s=np.sort(rng.uniform(START_S, START_S + 900, 300)),
            prompt=rng.integers(1, 4000, 300),
            output=rng.integers(1, 500, 300),
            scrapes_s=np.arange(START_S, START_S + 901, 15.0, dtype=np.float64),
            instance=f"{name}:8000",
        )
        for name in "ab"
    ]
    return FakePrometheus.of(*engines)


@cache
def _answers() -> bytes:
    """Return what it answers to all that a trace and a guard ask of it, by query."""
    found: dict[str, Any] = {}

    def respond(handler: Handler, asked: dict[str, str]) -> None:
        body = answered(past(), asked)
        found[asked["query"]] = json.loads(body)
        send(handler, body)

    with listening(respond) as url:
        _ask(url)
    return json.dumps(found).encode()


def _ask(url: str) -> None:
    end_s = START_S + 900
    trace_from_prometheus(Scraped(url), since_s=900, step_s=30, until_s=end_s)
    live_between(Scraped(url), START_S, end_s, 30)


def _asked_of(path: Path) -> None:
    """Ask a Prometheus whose answers are those in a file, or are that file."""
    whole = path.read_bytes()
    try:
        answers = json.loads(whole)
    except ValueError:
        answers = None

    def respond(handler: Handler, asked: dict[str, str]) -> None:
        is_known = isinstance(answers, dict) and asked.get("query") in answers
        send(handler, json.dumps(answers[asked["query"]]).encode() if is_known else whole)

    with listening(respond) as url:
        _ask(url)


def prometheus() -> Iterator[tuple[str, Target]]:
    """Yield a Prometheus of which one answer is another."""
    yield (
        "prometheus/answers",
        Target.of("answers.json", _asked_of, _answers()),
    )


def targets() -> dict[str, Target]:
    """Return all of them by name."""
    parts = (traces, public_traces, recordings, texts, run_files, prometheus)
    return dict(one for part in parts for one in part())
