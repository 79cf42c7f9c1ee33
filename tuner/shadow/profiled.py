"""The engine that a profile was measured on, as a configuration meets it.

Answers whether a profile may speak for the engine that is asked about, and with which limits
that one runs now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuner.engine.compat import serve
from tuner.engine.demo import DEMO_MODEL_DIR, is_demo_model
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, hyphenated
from tuner.engine.serve_config import limits as limits_of
from tuner.errors import Caveat, ShadowError
from tuner.redact import REDACTED, redacted
from tuner.shadow.calibration import StatedError
from tuner.shadow.derived.models import (
    ABOUT_GPT_OSS,
    ABOUT_QUANTISED,
    layers_of,
    quantisation_of,
)
from tuner.shadow.profiles import Profile, check_fits

# Keys of a configuration that change nothing of what a profile says: the two tuned limits,
# and what belongs to the server in front of the engine.
_FREE_KEYS = frozenset(
    {
        *(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, "max-num-active-seqs"),
        *("max-num-scheduled-tokens", "host", "port", "uds", "api-key", "served-model-name"),
        *("root-path", "uvicorn-log-level", "disable-log-requests", "allowed-origins"),
        *("allowed-methods", "allowed-headers", "allow-credentials", "chat-template"),
        *("enable-auto-tool-choice", "tool-call-parser", "reasoning-parser", "middleware"),
        *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "hf-token", "download-dir"),
    }
)


@dataclass(frozen=True, slots=True)
class ProfiledEngine:
    """The engine that a profile was measured on.

    `is_forced` lets a profile of another vLLM, device or configuration pass.
    """

    profile: Profile
    is_forced: bool = False

    def facts(self, values: Mapping[str, object]) -> EngineFacts:
        """Return what the profile knows. Raises: ShadowError with what differs from here."""
        shape = self.profile.shape
        if not self.is_forced:
            self._check_here(values)
        caveats = set(StatedError.of(self.profile).caveats)
        if shape.asynchronous:
            caveats.add(Caveat.SHORT_ANSWERS)
        return EngineFacts(
            current_limits=self.current_limits(values),
            max_model_len=shape.max_model_len,
            chunks_prefill=bool(shape.scheduler.get("enable_chunked_prefill", True)),
            vllm_version=shape.vllm_version,
            device=shape.device,
            caveats=frozenset(caveats),
        )

    def _check_here(self, values: Mapping[str, object]) -> None:
        """Refuse a profile of another configuration, or of another vLLM or device than here.

        Without vLLM there is no engine here that the profile could be taken for.
        """
        _, version = serve.installed_vllm()
        device = serve.installed_accelerator() if version else None
        self.check(values, version or None, device)

    def check(
        self, values: Mapping[str, object], vllm_version: str | None, device: str | None
    ) -> None:
        """Refuse a profile that was made elsewhere; what is None is not compared.

        Raises: ShadowError with what differs.
        """
        differing = check_fits(
            self.profile, vllm_version=vllm_version, device=device, model=None
        )
        differing += self.unlike(values)
        if differing:
            make = "make a profile here with a live run"
            if self.profile.origin:
                make = "make one for it: tune profile derive --gpu GPU --config FILE"
            raise ShadowError(
                "; ".join(differing), f"{make}, or pass --force-profile and doubt it"
            )

    def unlike(self, values: Mapping[str, object]) -> list[str]:
        """Return where a configuration departs from the profile's, a sentence each."""
        here, stored = _telling(values), _telling(self.profile.serve_values)
        if "model" not in here:
            # A few keys and no whole configuration: what is not named is the profile's.
            stored = {key: value for key, value in stored.items() if key in here}
        differing = [
            f"the profile was made with {key}: {stored.get(key, 'not set')}, "
            f"here it is {here.get(key, 'not set')}"
            for key in sorted(here.keys() | stored.keys())
            if not self._is_alike(key, str(stored.get(key)), str(here.get(key)))
        ]
        return [*differing, *self._unlike_weights(here)]

    def _unlike_weights(self, values: Mapping[str, object]) -> Iterator[str]:
        """Yield how the weights in a folder here depart from those of the tables.

        A folder may have the name of a model whose weights have other bits.
        """
        model = str(values.get("model", ""))
        here = quantisation_of(model) if self.profile.origin else None
        is_quantised = not {ABOUT_QUANTISED, ABOUT_GPT_OSS}.isdisjoint(self.profile.doubts)
        if here is not None and bool(here) is not is_quantised:
            there = "quantised weights" if is_quantised else "weights that are not quantised"
            is_what = f"quantised ({here})" if here else "not"
            yield f"the profile was made with {there}, those in {model} are {is_what}"

    def _is_alike(self, key: str, stored: str, here: str) -> bool:
        """Whether a profile says the same of both; tables know layers, not what they learnt."""
        is_of_layers = key == "model" and bool(self.profile.origin)
        return stored == here or (is_of_layers and layers_of(stored) == layers_of(here))

    def current_limits(self, values: Mapping[str, object]) -> EngineLimits:
        """Return the limits of the configuration, those of the profile where it names none.

        Raises: UsageError for one that is no number.
        """
        (seqs, tokens), known = limits_of(values), self.profile.current_limits
        return EngineLimits(seqs or known.max_num_seqs, tokens or known.max_num_batched_tokens)


def _telling(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that decide what a profile says; secrets never do."""
    shown = {hyphenated(key): value for key, value in redacted(values).items()}
    if is_demo_model(shown.get("model")):
        # Wherever the package lies.
        shown["model"] = DEMO_MODEL_DIR.name
    return {k: v for k, v in shown.items() if k not in _FREE_KEYS and v != REDACTED}
