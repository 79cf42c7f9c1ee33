"""What production recorded of its steps becomes the very batches that it ran."""

from __future__ import annotations

import gzip
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from support.recorded_parts import (
    LIMITS,
    METHOD,
    TRACE,
    a_config,
    a_recording,
    a_server,
    found_idle,
    left_early,
    recorded,
    served,
)
from support.run_parts import a_profile
from support.traffic import steady
from tuner.cli.commands import tune as command
from tuner.engine.compat.scheduler import with_layers
from tuner.engine.compat.shape import recorded_layers, recorded_shape
from tuner.engine.limits import EngineLimits
from tuner.engine.steps import StepColumns
from tuner.errors import ShadowError, TooFewSamplesError, UsageError
from tuner.recorder import steps as writing
from tuner.recorder.rows import Row, row_line
from tuner.recorder.settings import FILE
from tuner.recorder.steps import COLUMNS, steps_line, steps_path
from tuner.replay.plan import ReplayPlan
from tuner.replay.server.process import RECORD_FILE
from tuner.shadow import recorded as reading
from tuner.shadow.learnt import learn_profile
from tuner.shadow.predictor import Predictor
from tuner.shadow.rebuilt import rebuild, rebuild_all
from tuner.shadow.recorded import (
    RecordedRequests,
    RecordedSteps,
    _unpacked,
    read_steps,
    steps_beside,
)
from tuner.shadow.step_model import NO_HOST


def read(folder: Path, steps: list[bytes], rows: list[bytes]) -> tuple[Any, RecordedRequests]:
    """Return what is read of the lines once they lie in files."""
    (folder / "prod.steps").write_bytes(b"".join(steps))
    (folder / "prod.jsonl").write_bytes(b"".join(rows))
    paths = steps_beside([folder / "prod.jsonl"])
    return read_steps(paths), RecordedRequests.read([folder / "prod.jsonl"])


Lines = tuple[StepColumns, list[bytes], list[bytes]]
Whole = tuple[list[RecordedSteps], RecordedRequests]


@pytest.fixture(scope="module")
def lines() -> Lines:
    """Return the true steps of the usual engine, and the lines that record them."""
    return recorded(served())


@pytest.fixture(scope="module")
def whole(lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return what is read of them."""
    return read(tmp_path_factory.mktemp("whole"), *lines[1:])


def test_a_packed_recording_and_a_folder_are_read_and_files_without_a_line_left_out(
    tmp_path: Path, lines: Lines, whole: Whole
) -> None:
    """A server that is killed at once leaves both files empty."""
    _, steps, rows = lines
    plain = whole
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "prod.jsonl.gz").write_bytes(gzip.compress(b"".join(rows)))
    (packed / "prod.steps").write_bytes(b"".join(steps))
    for name in ("prod.1.jsonl", "prod.1.steps"):
        (packed / name).write_bytes(b"")
    for recording in ([packed], [packed / "prod.jsonl.gz", packed / "prod.1.jsonl"]):
        found = read_steps(steps_beside(recording)), RecordedRequests.read(recording)
        assert [len(one) for one in found[0]] == [len(one) for one in plain[0]]
        assert found[1].ends_s.tolist() == plain[1].ends_s.tolist()
    with pytest.raises(UsageError, match="no step was recorded"):
        read_steps([packed / "prod.1.steps"])


@pytest.mark.parametrize("has_details", [True, False])
def test_every_batch_comes_back_with_its_contexts(tmp_path: Path, *, has_details: bool) -> None:
    true, steps, rows = recorded(served(), has_details=has_details)
    (found,), requests = read(tmp_path, steps, rows)
    rebuilt = rebuild(found, requests)
    at = np.searchsorted(found.ended_s, rebuilt.steps.end_s)
    share = len(rebuilt.steps) / len(true)
    # Without details prompts in pieces are unknown, and a step that only prefills has no time.
    assert share > (0.97 if has_details else 0.8)
    for name in ("decode_seqs", "prefill_tokens"):
        assert getattr(rebuilt.steps, name) == pytest.approx(getattr(true, name)[at])
    for name in (
        "decode_context_tokens",
        "decode_spread_tokens",
        "prefill_context_tokens",
    ):
        ours, its = getattr(rebuilt.steps, name), getattr(true, name)[at]
        assert np.mean(np.abs(ours - its) <= 0.02 * its + 1) > 0.95
        assert ours.sum() == pytest.approx(its.sum(), rel=0.01)


def test_requests_that_their_clients_left_are_in_the_batches(tmp_path: Path) -> None:
    trace = steady(300, per_s=6.0, prompt=100, output=60)
    true, steps, (source, *rows) = recorded(served(trace=trace), trace=trace)
    (found,), requests = read(tmp_path, steps, [source, *left_early(rows)])
    rebuilt = rebuild(found, requests)
    assert rebuilt.requests == len(trace)
    assert len(rebuilt.steps) > 0.97 * len(true)
    at = np.searchsorted(found.ended_s, rebuilt.steps.end_s)
    for name in ("decode_context_tokens", "prefill_context_tokens"):
        ours, its = getattr(rebuilt.steps, name), getattr(true, name)[at]
        assert np.mean(np.abs(ours - its) <= 0.02 * its + 1) > 0.95


def test_the_engine_that_served_is_learnt_without_touching_it(whole: Whole) -> None:
    found, requests = whole
    profile, learnt = learn_profile(found, requests, {"model": "toy"})
    assert profile.current_limits == LIMITS
    assert profile.num_blocks_at(LIMITS) == 100_000
    assert learnt.seen.decode_seqs <= 16
    assert profile.uncertainty is not None
    # Foretold at limits that production never had, within 2 % of what such an engine does.
    for limits in (EngineLimits(8, 256), EngineLimits(12, 512)):
        truth = served(limits).timelines
        log = Predictor(profile).replay(TRACE, limits, ReplayPlan())
        took_s, told_s = (
            float(np.median(lines.last_s - lines.due_s)) for lines in (truth, log.timelines)
        )
        assert told_s == pytest.approx(took_s, rel=0.02)


def test_what_an_asynchronous_core_noticed_late_is_told_apart(tmp_path: Path) -> None:
    off = []
    for is_asynchronous in (True, False):
        true, steps, rows = late(is_asynchronous=is_asynchronous)
        found, requests = read(tmp_path, steps, rows)
        model = learn_profile(found, requests, {"model": "toy"})[0].step_model
        prompts = true.prefill_tokens > 0
        off.append(float(model.predict_s(true)[prompts].sum() / true.duration_s[prompts].sum()))
    # The same lines of an engine that launches nothing ahead mean what they say.
    assert off[0] == pytest.approx(1.0, abs=0.05)
    assert off[1] < 0.8


def test_a_step_that_was_not_waited_for_tells_what_launching_the_next_one_took(
    tmp_path: Path,
) -> None:
    for is_asynchronous in (True, False):
        _, steps, rows = late(is_asynchronous=is_asynchronous)
        (found,), requests = read(tmp_path, steps, rows)
        rebuilt = rebuild(found, requests).steps
        told = np.flatnonzero(rebuilt.launch_s)
        assert (told.size > 20) == is_asynchronous
        followed = told[np.isin(told - 1, np.flatnonzero(rebuilt.is_late))]
        assert followed.size == told.size
        assert rebuilt.launch_s[told] == pytest.approx(rebuilt.duration_s[told - 1])
        host = learn_profile([found], requests, {"model": "toy"})[0].step_model.host
        assert (host != NO_HOST) == is_asynchronous


def test_what_found_an_asynchronous_engine_idle_has_no_time(tmp_path: Path) -> None:
    """The core waits for it only once it is launched, which nothing beside it hides."""
    trace = steady(100, per_s=1.0, prompt=400, output=30)
    asynchronous = {**a_config()["scheduler_config"], "async_scheduling": True}
    server = a_server(config=a_config(scheduler_config=asynchronous))
    true, steps, rows = recorded(
        served(trace=trace), server=server, launch_s=0.012, trace=trace
    )
    (found,), requests = read(tmp_path, steps, rows)
    rebuilt = rebuild(found, requests)
    idle = found_idle(true)
    assert 0 < idle.sum() == rebuilt.left_out["without a time"]
    # What is left of such prompts, in a second piece, was launched in time.
    alone = rebuilt.steps.decode_seqs == 0
    assert alone.sum() > 0.9 * idle.sum()
    at = np.searchsorted(found.ended_s, rebuilt.steps.end_s)
    assert rebuilt.steps.duration_s == pytest.approx(true.duration_s[at], abs=3e-6)


def test_without_details_what_may_have_been_late_is_left_out(tmp_path: Path) -> None:
    true, steps, rows = late(is_asynchronous=True, has_details=False)
    (found,), requests = read(tmp_path, steps, rows)
    rebuilt = rebuild(found, requests)
    at = np.searchsorted(found.ended_s, rebuilt.steps.end_s)
    assert len(at) > 0.7 * len(true)
    assert rebuilt.steps.duration_s == pytest.approx(true.duration_s[at], abs=2e-6)


def late(
    *, is_asynchronous: bool, has_details: bool = True
) -> tuple[StepColumns, list[bytes], list[bytes]]:
    """Return steps of which six tenths of a prompt's time were taken for the step before."""
    config = a_config()
    config["scheduler_config"]["async_scheduling"] = is_asynchronous
    server = a_server(config=config)
    return recorded(served(), server=server, late_ratio=0.6, has_details=has_details)


def test_prompts_of_which_each_is_answered_by_one_token_come_back(tmp_path: Path) -> None:
    """Nothing ever decodes, so that no step has an interval; steps are shorter than 15 ms."""
    trace = steady(100, per_s=60.0, prompt=100, output=1)
    true, steps, rows = recorded(served(trace=trace), trace=trace)
    (found,), requests = read(tmp_path, steps, rows)
    rebuilt = rebuild(found, requests)
    assert not rebuilt.left_out
    assert rebuilt.steps.prefill_tokens.tolist() == true.prefill_tokens.tolist()


def test_a_request_that_is_missing_is_stood_for_and_many_leave_steps_out(
    tmp_path: Path, lines: Lines
) -> None:
    true, steps, rows = lines
    (found,), requests = read(tmp_path, steps, [row for n, row in enumerate(rows) if n != 150])
    few = rebuild(found, requests)
    assert len(few.steps) > 0.8 * len(true)
    (found,), requests = read(tmp_path, steps, [*rows[:1], *rows[1::2]])
    half = rebuild(found, requests)
    assert half.left_out["with requests that are not in the recording"] > 0.3 * len(true)


@given(st.lists(st.tuples(*[st.integers(-1, 2**40)] * (len(COLUMNS) - 1)), min_size=1))
def test_lines_hold_what_was_put_in(rows: list[tuple[int, ...]]) -> None:
    numbers = array("q")
    for n, row in enumerate(rows):
        numbers.extend((10**15 + 7 * n, *row))
    found = _unpacked(Path("x"), 1, steps_line(numbers, [7, 3]))
    assert found.table.T.ravel().tolist() == numbers.tolist()
    assert found.drafts == (7, 3)


def test_a_line_that_a_killed_server_left_is_no_harm_and_a_damaged_one_is_named(
    tmp_path: Path, lines: Lines
) -> None:
    _, (head, line), rows = lines
    (found,), _ = read(tmp_path, [head, line, line[: len(line) // 2]], rows)
    assert len(found) > 100
    with pytest.raises(UsageError, match="line 2: damaged"):
        read(tmp_path, [head, line[: len(line) // 2] + b"\n", line], rows)
    with pytest.raises(UsageError, match="no recording of steps"):
        read(tmp_path, rows, rows)
    with pytest.raises(UsageError, match="version must be 3, got 9"):
        read(tmp_path, [head.replace(b'"version":3', b'"version":9'), line], rows)


@pytest.mark.parametrize(
    ("recording", "part", "other"),
    [
        ("prod.jsonl", "prod.1.jsonl", "prod2.jsonl"),
        ("llama-3.1-8b.jsonl", "llama-3.1-8b.2.jsonl", "llama-3.jsonl"),
        ("llama-3.1.jsonl", "llama-3.1.1.jsonl", "llama-3x.jsonl"),
        ("prod.eu", "prod.1.eu", "prod-us.eu"),
    ],
)
def test_steps_are_found_beside_the_recording_that_they_are_of(
    tmp_path: Path, recording: str, part: str, other: str
) -> None:
    paths = [steps_path(tmp_path / name) for name in (recording, part, other)]
    for path in paths:
        path.touch()
    for name in (recording, part):
        assert steps_beside([tmp_path / name]) == sorted(paths[:2])


def test_without_steps_it_is_said_what_to_switch_on(tmp_path: Path) -> None:
    (tmp_path / "prod.jsonl").write_bytes(b"")
    (tmp_path / "other.steps").write_bytes(b"")
    with pytest.raises(UsageError, match="no steps were recorded") as caught:
        steps_beside([tmp_path / "prod.jsonl"])
    assert "TUNE_RECORD_STEPS=1" in (caught.value.hint or "")
    for name in ("prod.steps", "prod.1.steps", "prod.13.steps", "production.steps"):
        (tmp_path / name).write_bytes(b"")
    found = steps_beside([tmp_path / "prod.jsonl", tmp_path / "prod.1.jsonl"])
    assert [path.name for path in found] == ["prod.1.steps", "prod.13.steps", "prod.steps"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"engines": 2}, "2 engines served at once"),
        ({"api_servers": 4}, "4 API servers"),
        ({"config": a_config(lora_config=True)}, "an engine with LoRA"),
        ({"config": a_config(scheduler_classes=["a.B", "c.D"])}, r"of its own \(a\.B\)"),
        ({"config": None}, "does not say what engine"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    _, steps, rows = recorded(served(), server=a_server(**changed))
    found, requests = read(tmp_path, steps, rows)
    with pytest.raises(ShadowError, match=words):
        learn_profile(found, requests, {})


def test_a_recording_of_other_requests_teaches_nothing(whole: Whole) -> None:
    (found,), requests = whole
    late = replace(requests, ends_s=requests.ends_s + 1000)
    with pytest.raises(TooFewSamplesError, match="none of 300 requests"):
        rebuild_all([found], late)
    with pytest.raises(TooFewSamplesError):
        learn_profile([], requests, {})
    other = replace(found, server=msgspec.structs.replace(found.server, shape=other_shape()))
    with pytest.raises(ShadowError, match="of different engines"):
        learn_profile([found, other], requests, {})


def test_a_configuration_that_the_recorded_server_did_not_run_with_is_refused(
    whole: Whole,
) -> None:
    found, requests = whole
    with pytest.raises(UsageError, match=r"max-num-seqs 999, .* ran at 16/256"):
        learn_profile(found, requests, {"model": "toy", "max-num-seqs": 999})
    profile, _ = learn_profile(found, requests, {"max_num_seqs": 16})
    assert profile.serve_values == {"max_num_seqs": 16}


def test_a_recording_without_a_busy_stretch_says_what_to_record(whole: Whole) -> None:
    (found,), requests = whole
    columns = [name for name in RecordedSteps.__dataclass_fields__ if name != "server"]
    quiet = replace(found, **{name: getattr(found, name)[:150] for name in columns})
    with pytest.raises(TooFewSamplesError, match="of 150 recorded steps teach") as caught:
        learn_profile([quiet], requests, {})
    assert "several requests run at once" in (caught.value.hint or "")


def other_shape() -> Any:
    """Return the shape of another engine."""
    return replace(a_profile().shape, device="NVIDIA H200")


def test_steps_of_two_starts_teach_together(whole: Whole) -> None:
    """A server started again with other limits, which are current from then on."""
    (first,), requests = whole
    limits = EngineLimits(8, 256)
    again = replace(first, server=msgspec.structs.replace(first.server, limits=limits))
    profile, learnt = learn_profile([first, again], requests, {})
    assert profile.current_limits == limits
    assert learnt.steps > 1.9 * (len(first) - sum(learnt.left_out.values()) / 2)
    assert isinstance(first, RecordedSteps)


def test_the_start_that_served_last_is_current_whatever_its_files_are_called(
    tmp_path: Path,
) -> None:
    """What a second start writes stands before the first's where names are sorted."""
    first = a_recording(tmp_path, "prod")
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    a_recording(tmp_path, "prod.1", later_s=1000.0, limits=limits)
    found = read_steps(steps_beside([first]))
    assert [steps.server.limits for steps in found] == [LIMITS, EngineLimits(8, 256)]


def test_starts_that_differ_in_what_an_engine_is_are_refused_with_it(tmp_path: Path) -> None:
    """The KV cache of eight bits has twice the blocks, which no budget explains."""
    kept = {"block_size": 16, "enable_prefix_caching": True}
    server = a_server(config=a_config(cache_config={**kept, "cache_dtype": "auto"}))
    _, steps, rows = recorded(served(), server=server)
    (first,), requests = read(tmp_path, steps, rows)
    config = a_config(cache_config={**kept, "cache_dtype": "fp8"})
    other = msgspec.structs.replace(first.server, config=config)
    with pytest.raises(ShadowError, match="cache_dtype auto, and last fp8"):
        learn_profile([first, replace(first, server=other)], requests, {})


def test_caps_below_those_of_the_start_are_what_was_served(tmp_path: Path) -> None:
    config = a_config()
    config["scheduler_config"] |= {"max_num_active_seqs": 4, "max_num_scheduled_tokens": 128}
    _, steps, rows = recorded(served(EngineLimits(4, 128)), server=a_server(config=config))
    found, requests = read(tmp_path, steps, rows)
    profile, _ = learn_profile(found, requests, {})
    assert profile.current_limits == EngineLimits(4, 128)


def test_a_start_that_answered_nothing_leaves_the_others_to_teach(whole: Whole) -> None:
    """A server whose limits were changed, and that was ended before it had answered."""
    (first,), requests = whole
    limits = EngineLimits(8, 256)
    again = replace(
        first,
        server=msgspec.structs.replace(first.server, limits=limits),
        ended_s=first.ended_s + 1000,
    )
    profile, learnt = learn_profile([first, again], requests, {})
    assert profile.current_limits == limits
    alone, from_first = learn_profile([first], requests, {})
    assert learnt.steps == from_first.steps
    assert profile.step_model == alone.step_model


def test_recordings_of_two_engines_are_told_from_two_of_one(tmp_path: Path) -> None:
    one = {
        "prod": a_recording(tmp_path, "prod"),
        "two": a_recording(tmp_path, "two", later_s=20.0),
    }
    words = ["profile", "fit", "-o", str(tmp_path / "fitted.yaml")]
    both = [*words, *(f"--recording={path}" for path in one.values())]
    done = CliRunner().invoke(command, both)
    assert isinstance(done.exception, UsageError)
    assert "two.steps are of several engines" in done.exception.message
    # Also where the steps of one are named alone.
    done = CliRunner().invoke(command, [*both, "--steps", str(tmp_path / "prod.steps")])
    assert "two.jsonl are of several engines" in str(done.exception)
    after = a_recording(tmp_path, "after", later_s=100.0)
    done = CliRunner().invoke(
        command, [*words, f"--recording={one['prod']}", f"--recording={after}"]
    )
    assert done.exit_code == 0, done.output
    assert "learnt from 10,156 steps" in done.stdout  # twice 5,078


def test_parts_of_a_recording_that_are_not_named_are_told(tmp_path: Path) -> None:
    for number, name in enumerate(("prod", "prod.1", "prod2")):
        a_recording(tmp_path, name, later_s=500.0 * number)
    (tmp_path / "prod.2.jsonl").touch()
    words = ["profile", "fit", "-o", str(tmp_path / "fitted.yaml"), "--recording"]
    told = "left out prod.1.jsonl: the recording goes on there"
    done = CliRunner().invoke(command, [*words, str(tmp_path / "prod.jsonl")])
    assert done.exit_code == 0, done.exception
    assert told in done.stderr
    both = [str(tmp_path / "prod.jsonl"), "--recording", str(tmp_path / "prod.1.jsonl")]
    assert "left out prod" not in CliRunner().invoke(command, [*words, *both]).stderr


def test_a_file_whose_only_client_left_does_not_keep_the_others_from_teaching(
    tmp_path: Path,
) -> None:
    prod = a_recording(tmp_path, "prod")
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    few = steady(3, per_s=6.0, prompt=40, output=20)
    again = a_recording(tmp_path, "prod.1", later_s=500.0, trace=few, limits=limits)
    header, row, *_ = again.read_bytes().splitlines(keepends=True)
    left = msgspec.structs.replace(
        msgspec.json.decode(row, type=Row), output_length=0, status="abort"
    )
    again.write_bytes(header + row_line(left))
    done = CliRunner().invoke(
        command,
        ["profile", "fit", "-o", str(tmp_path / "fitted.yaml")]
        + [f"--recording={path}" for path in (prod, again)],
    )
    assert done.exit_code == 0, done.exception
    assert "learnt from 5,078 steps" in done.stdout
    assert "was not replayed on the profile: prod.1.jsonl" in done.stderr


@pytest.mark.parametrize(
    "config", [{}, {**a_config(), "model_config": 3}, a_config(scheduler_classes=1)]
)
def test_a_configuration_that_no_recorder_wrote_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    _, steps, rows = recorded(served(), server=a_server(config=config))
    with pytest.raises(UsageError, match="holds no configuration that a recorder writes"):
        read(tmp_path, steps, rows)


def test_reader_and_recorder_mean_the_same_by_a_file_of_steps() -> None:
    """They are two distributions, of perhaps two releases, and share no code."""
    for name in ("STEPS_VERSION", "SUFFIX", "COLUMNS", "UNKNOWN"):
        assert getattr(reading, name) == getattr(writing, name)
    assert RECORD_FILE == FILE


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"is_hybrid": True}, "state-space layers"),
        ({"has_uneven_layers": True}, "layers of several sizes"),
        ({"has_uneven_layers": True, "kv_heads": [[1, 64]]}, "layers of several sizes"),
        ({"layers": ["linear_attention", "full_attention"]}, "layers of linear_attention"),
        (
            {"architecture": "NemotronHForCausalLM", "layers": ["mamba"], "is_hybrid": True},
            "layers of mamba and state-space layers",
        ),
    ],
)
def test_layers_that_are_not_known_well_enough_have_no_shadow(
    model: dict[str, Any], why: str
) -> None:
    config = a_config()
    config["model_config"] |= model
    with pytest.raises(ShadowError, match=why):
        recorded_shape(config, "toy", "0.32.0")


def test_a_prefix_that_ends_within_a_block_has_no_shadow() -> None:
    config = a_config()
    size = config["cache_config"]["block_size"]
    config["cache_config"]["prefix_match_unit"] = size
    assert recorded_shape(config, "toy", "0.32.0").block_size == size
    config["cache_config"]["prefix_match_unit"] = size // 2
    with pytest.raises(ShadowError, match=f"prefix-match-unit {size // 2}"):
        recorded_shape(config, "toy", "0.32.0")


def test_of_a_recorded_model_that_sets_its_own_graphs_that_is_known() -> None:
    config = a_config()
    assert not recorded_shape(config, "toy", "0.32.0").model_sets_graphs
    config["model_config"]["architecture"] = "GptOssForCausalLM"
    assert recorded_shape(config, "toy", "0.32.0").model_sets_graphs


@pytest.mark.parametrize(
    ("model", "windows"),
    [
        ({"layers": []}, (None,)),
        ({"layers": [], "sliding_window": 64}, (64,)),
        ({"layers": ["full_attention"] * 3, "sliding_window": 64}, (None, None, None)),
        (
            {
                "layers": [*["sliding_attention", "full_attention"] * 2],
                "sliding_window": 64,
                "kv_shared_layers": 1,
            },
            (64, None, 64),
        ),
    ],
)
def test_windows_of_recorded_layers_are_those_that_keep_keys_of_their_own(
    model: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = a_config()
    config["model_config"] |= model
    found = recorded_layers(config)
    assert tuple(layer.get("sliding_window") for layer in found) == windows


@pytest.mark.engine
def test_a_layer_that_drafts_beside_states_is_in_a_group_that_sees_all() -> None:
    """As vLLM lays out a Qwen-Next that drafts by its own layer, one in four not linear."""
    config = a_config()
    layers = [*["linear_attention"] * 3, "full_attention"] * 3
    of_model = {"is_hybrid": True, "layers": layers, "max_model_len": 4096}
    config["model_config"] |= of_model | {"architecture": "Qwen3NextForCausalLM"}
    config["cache_config"] |= {"mamba_cache_mode": "align", "use_replayssm": False}
    config["speculative_config"] = {**METHOD, "method": "mtp", "num_speculative_tokens": 2}
    shape = recorded_shape(config, "toy", "0.32.0")
    layout = with_layers(shape, recorded_layers(config), None).kv_layout
    assert layout is not None
    assert sorted(layout.looks_back) == [False, True, True, True]
    assert (layout.full_drops, layout.back_drops, layout.scratch) == (True, False, 2)


@pytest.mark.parametrize(
    ("mode", "drafts", "size", "more"),
    [("align", None, 16, 0), ("none", None, 4096, 0), ("none", 2, 4096, 2)],
)
def test_recorded_layers_that_keep_states_hold_a_block_as_vllm_lays_them_out(
    mode: str, drafts: int | None, size: int, more: int
) -> None:
    config = a_config()
    layers = ["linear_attention", "full_attention"]
    more_of_model = {"is_hybrid": True, "layers": layers, "max_model_len": 4096}
    config["model_config"] |= more_of_model | {"architecture": "Qwen3NextForCausalLM"}
    config["cache_config"] |= {"mamba_cache_mode": mode, "use_replayssm": False}
    config["speculative_config"] = drafts and {**METHOD, "num_speculative_tokens": drafts}
    state, full = recorded_layers(config)
    assert (state["kind"], full["kind"]) == ("MambaSpec", "FullAttentionSpec")
    assert state["mamba_cache_mode"] == mode
    assert (state["block_size"], state["num_speculative_blocks"]) == (size, more)
