"""A profile speaks for the engine that it was made of, and for no other unless told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.run_parts import a_profile
from tuner.engine.compat import serve
from tuner.engine.limits import EngineLimits
from tuner.errors import ShadowError, UsageError
from tuner.redact import REDACTED
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile

SERVED: dict[str, object] = {"model": "toy", "dtype": "float16", "max-num-seqs": 16}


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Return a profile that fits this machine: its vLLM and its device stand in for ours."""
    monkeypatch.setattr(serve, "installed_vllm", lambda: ("vllm", "0.0"))
    monkeypatch.setattr(serve, "installed_accelerator", lambda: "toy")
    return a_profile(serve_values=SERVED)


def test_the_facts_are_those_of_the_profile(profile: Profile) -> None:
    facts = ProfiledEngine(profile).facts(SERVED)
    assert facts.current_limits == EngineLimits(16, 2048)
    assert facts.max_model_len == profile.shape.max_model_len
    assert facts.chunks_prefill
    assert (facts.vllm_version, facts.device) == ("0.0", "toy")
    whole = replace(profile.shape, scheduler={"enable_chunked_prefill": False})
    assert not ProfiledEngine(replace(profile, shape=whole)).facts(SERVED).chunks_prefill


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"vllm_version": "0.1"}, "made with vLLM 0.1, here is 0.0"),
        ({"device": "NVIDIA H200"}, "made with the device NVIDIA H200, here is toy"),
    ],
)
def test_a_profile_of_another_vllm_or_device_is_refused_unless_forced(
    profile: Profile, changed: dict[str, Any], shown: str
) -> None:
    elsewhere = replace(profile, shape=replace(profile.shape, **changed))
    with pytest.raises(ShadowError, match=shown) as caught:
        ProfiledEngine(elsewhere).facts(SERVED)
    assert caught.value.exit_code == 2
    assert "--force-profile" in caught.value.hint
    forced = ProfiledEngine(elsewhere, is_forced=True).facts(SERVED)
    assert forced.current_limits == EngineLimits(16, 2048)


def test_without_an_accelerator_the_device_is_not_compared(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "installed_accelerator", lambda: None)
    elsewhere = replace(profile, shape=replace(profile.shape, device="NVIDIA H200"))
    assert ProfiledEngine(elsewhere).facts(SERVED).device == "NVIDIA H200"


def test_without_vllm_the_profile_alone_counts_and_the_configuration_must_fit(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "installed_vllm", lambda: ("", ""))
    elsewhere = replace(profile.shape, vllm_version="0.1", device="NVIDIA H200")
    source = ProfiledEngine(replace(profile, shape=elsewhere))
    facts = source.facts(SERVED | {"max_num_seqs": 4})
    assert (facts.vllm_version, facts.device) == ("0.1", "NVIDIA H200")
    assert facts.current_limits == EngineLimits(4, 2048)
    with pytest.raises(ShadowError, match="made with dtype: float16, here it is bfloat16"):
        source.facts(SERVED | {"dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"dtype": "bfloat16"}, "made with dtype: float16, here it is bfloat16"),
        ({"model": "other"}, "made with model: toy, here it is other"),
        ({"kv_cache_dtype": "fp8"}, "made with kv-cache-dtype: not set, here it is fp8"),
    ],
)
def test_another_configuration_is_refused_unless_forced(
    profile: Profile, values: dict[str, object], shown: str
) -> None:
    with pytest.raises(ShadowError, match=shown):
        ProfiledEngine(profile).facts(SERVED | values)
    ProfiledEngine(profile, is_forced=True).facts(SERVED | values)


def test_another_configuration_is_derived_for_where_the_profile_was(profile: Profile) -> None:
    derived = replace(profile, origin="derived from tables")
    for known, advice in ((profile, "a live run"), (derived, "tune profile derive")):
        with pytest.raises(ShadowError) as caught:
            ProfiledEngine(known).facts(SERVED | {"dtype": "bfloat16"})
        assert advice in caught.value.hint


def test_all_differences_are_told_at_once(profile: Profile) -> None:
    elsewhere = replace(profile, shape=replace(profile.shape, vllm_version="0.1"))
    with pytest.raises(ShadowError) as caught:
        ProfiledEngine(elsewhere).facts(SERVED | {"dtype": "bfloat16", "seed": 3})
    for word in ("vLLM 0.1", "dtype", "seed"):
        assert word in caught.value.message


def test_what_is_tuned_and_what_belongs_to_the_server_may_differ(profile: Profile) -> None:
    free: dict[str, object] = {"port": 9, "api_key": "sk-secret", "max-num-batched-tokens": 512}
    facts = ProfiledEngine(profile).facts(SERVED | free | {"max_num_seqs": 4})
    assert facts.current_limits == EngineLimits(4, 512)


def test_spelling_makes_no_difference(profile: Profile) -> None:
    kept = replace(profile, serve_values={"model": "toy", "kv_cache_dtype": "fp8"})
    assert ProfiledEngine(kept).unlike({"kv-cache-dtype": "fp8", "model": "toy"}) == []


def test_limits_that_nobody_names_are_those_of_the_profile(profile: Profile) -> None:
    known = replace(profile, current_limits=EngineLimits(48, 4096))
    assert ProfiledEngine(known).facts({}).current_limits == EngineLimits(48, 4096)
    some = ProfiledEngine(known).facts({"max-num-seqs": "24"})
    assert some.current_limits == EngineLimits(24, 4096)


def test_a_limit_may_be_written_as_vllm_reads_it(profile: Profile) -> None:
    values = {**SERVED, "max-num-batched-tokens": "8k"}
    assert ProfiledEngine(profile).current_limits(values) == EngineLimits(16, 8000)


def test_a_limit_that_is_no_number_is_refused(profile: Profile) -> None:
    with pytest.raises(UsageError, match="must be a whole number"):
        ProfiledEngine(profile).facts({"max-num-seqs": "many"})


def test_a_secret_is_neither_compared_nor_told(profile: Profile) -> None:
    kept = replace(profile, serve_values={"model": "toy", "my-token": REDACTED})
    unlike = ProfiledEngine(kept).unlike({"model": "toy", "my-token": "sk-secret"})
    assert "sk-secret" not in " ".join(unlike)
    assert unlike == []
