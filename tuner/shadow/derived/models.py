"""What a model's own configuration says of its steps and of its KV cache."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tuner.errors import UsageError

LIBRARY: Final = "aiconfigurator-core"
INSTALL: Final = "pip install 'max-num-seqs-tuner[predict]'"
CONFIG, QUANTISED = "config.json", "hf_quant_config.json"
# What a configuration has where layers do not all attend to everything that came before, by
# what to call that: names that model families give it.
_OTHER_ATTENTION: Final[Mapping[str, str]] = {
    "kv_lora_rank": "latent attention (MLA)",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "hybrid_layer_pattern": "layers of several kinds",
    "hybrid_override_pattern": "layers of several kinds",
    "layers_block_type": "layers of several kinds",
    "mamba_num_heads": "state-space layers",
    "ssm_state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
}
# The one window that the tables hold for an architecture, of which they take every other layer
# to look back and the rest to see everything.
_WINDOWS: Final[Mapping[str, int]] = {"GptOssForCausalLM": 128}
_LOOKS_BACK, _SEES_ALL = "sliding_attention", "full_attention"
# A weight of four bits and its share of the scale of 32, and what sizes are padded to.
_MXFP4_BYTES, _PADDED_TO = 17 / 32, 256
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_DTYPES: Final = frozenset({"bfloat16", "float16"})
# What names of models end with that were trained further on the same layers, and two names of
# the same layers: as their publishers have them.
_TRAINED_FURTHER = ("-instruct", "-chat", "-it", "-base", "-hf")
_SAME_LAYERS = {"llama-3.3-70b": "llama-3.1-70b"}
# Kinds of rotary positions where max_position_embeddings says how far they reach once scaled.
_LONG_ROPE: Final = ("su", "longrope")
_SCALED: Final = (*_LONG_ROPE, *("llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"))
ABOUT_QUANTISED: Final = (
    "quantised weights: between the sizes that the tables hold, batches of 130 to 2,000 tokens "
    "come out up to 1.9 times too long"
)
"""The doubt of profiles that are derived for quantised weights, but for those of gpt-oss."""
ABOUT_GPT_OSS: Final = (
    "gpt-oss: on H100 and H200 eight of ten published points have a time per output token 11 % "
    "shorter to 5 % longer and a first token 1.4 to 1.9 times as late; on B200, where experts "
    "and KV cache were of eight bits, up to half the time; of other cards nothing is published"
)
"""The doubt of profiles that are derived for gpt-oss, whose weights are quantised, too."""


def library(name: str) -> Any:  # noqa: ANN401 - untyped, and not there everywhere
    """Return a module of the library that holds the tables. Raises: UsageError without it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("aiconfigurator_core"):
            raise
        raise UsageError(f"{LIBRARY} is not installed", INSTALL) from None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration, that of its text part where it has several.

    `is_quantised` says whether its weights are of fewer bits than it computes with; `files` are
    what the tables' library reads of it, by the names that it reads. `known_as` is the model
    that comes with the tables, empty for one in a folder.
    """

    model: str
    content: Mapping[str, Any]
    files: Mapping[str, Path]
    known_as: str = ""

    @classmethod
    def of(cls, model: str) -> ModelConfig:
        """Return that of a folder, or of a model that comes with the tables, by its name.

        A name of the same layers will do: Llama-3.1-8B-Instruct for Meta-Llama-3.1-8B.

        Raises: UsageError.
        """
        folder, named = Path(model), ""
        files = {CONFIG: folder / CONFIG, QUANTISED: folder / QUANTISED}
        if not files[CONFIG].is_file():
            known = _known_models()
            alike = (name for name in known if layers_of(name) == layers_of(model))
            named = model if model in known else next(alike, "")
            if not named:
                near = ", ".join(difflib.get_close_matches(model, known, 3, 0.3)) or "none"
                raise UsageError(
                    f"--model {model}: neither a folder with a {CONFIG} nor a model that the "
                    f"tables know; the nearest of these: {near}",
                    f"name a folder that holds the model's {CONFIG}",
                )
            path = known[named]
            name = path.name.removesuffix(CONFIG)
            files = {CONFIG: path, QUANTISED: path.with_name(name + QUANTISED)}
        content = _read(files[CONFIG])
        files = {name: path for name, path in files.items() if path.is_file()}
        return cls(model, content, files, named)

    def integer(self, key: str, otherwise: int) -> int:
        """Return a whole number of it. Raises: UsageError if something else stands there."""
        value = self.content.get(key)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(
                f"{self.files[CONFIG]}: {key} is {value!r}, expected a whole number",
                "take the file as the model's publisher has it",
            )
        return value

    @property
    def longest(self) -> int:
        """How many tokens a request may have. Raises: UsageError.

        Source: vLLM config/model.py, _get_and_verify_max_len, 0.32.
        """
        return int(self.integer("max_position_embeddings", 8192) * self._stretch)

    @property
    def usual_length(self) -> int:
        """How many tokens a request may have where nobody names it. Raises: UsageError.

        Source: as of `longest`.
        """
        if any(_kind_of(rope) in _LONG_ROPE for rope in self._ropes):
            return self.integer("original_max_position_embeddings", self.longest)
        return self.longest

    @property
    def _stretch(self) -> float:
        """By how much its rotary positions reach further than it says. Raises: UsageError.

        A Gemma 3 says what they reach.
        """
        if "gemma3" in str(self.content.get("model_type")):
            return 1.0
        factors = [
            rope["factor"]
            for rope in self._ropes
            if rope.get("factor") is not None and _kind_of(rope) not in _SCALED
        ]
        # Where kinds of layers have each its own, all are scaled alike.
        factor = factors[-1] if factors else 1
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
            raise UsageError(
                f"{self.files[CONFIG]}: a factor of rotary positions is {factor!r}, expected a "
                "number above 0",
                "take the file as the model's publisher has it",
            )
        return float(factor)

    @property
    def _ropes(self) -> list[dict[str, Any]]:
        """What is said of rotary positions, once for each kind of layers that differ in it."""
        said = self.content.get("rope_parameters") or self.content.get("rope_scaling")
        inner = [each for each in _mapping(said).values() if isinstance(each, dict)]
        return inner or [_mapping(said)]

    @property
    def has_experts(self) -> bool:
        """Whether only some of its weights work on each token. Raises: UsageError."""
        return any(self.integer(name, 0) > 1 for name in _EXPERTS)

    @property
    def is_quantised(self) -> bool:
        """Whether its weights have fewer bits than what is computed with."""
        return bool(self._quantisation)

    @property
    def quantised_by(self) -> str:
        """What its weights were quantised by, as its files call it."""
        found = self._quantisation
        return str(found.get("quant_method") or found.get("quant_algo") or "otherwise")

    @property
    def _quantisation(self) -> Mapping[str, Any]:
        """How its weights are quantised, by ModelOpt's file first; empty where they are not."""
        own = _mapping(self.content.get("quantization_config"))
        more = _read(self.files[QUANTISED]) if QUANTISED in self.files else {}
        inner, its = (_mapping(each.get("quantization")) for each in (own, more))
        return {**own, **inner, **its}

    @property
    def loaded_bytes(self) -> int | None:
        """What weights of gpt-oss take of the memory once loaded; None of another model.

        Their experts are padded for the kernels: vLLM 0.10 to 0.19 loaded 65.97 and 13.72 GiB,
        this is 65.8 and 13.7.

        Raises: UsageError.
        """
        if not self.window:
            return None
        layers, hidden, experts, inner, heads, kv_heads, size, words = (
            self.integer(name, 0)
            for name in (
                *("num_hidden_layers", "hidden_size", "num_local_experts"),
                *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
                *("head_dim", "vocab_size"),
            )
        )
        wide, tall = (-(-n // _PADDED_TO) * _PADDED_TO for n in (inner, hidden))
        expert = (2 * wide * hidden + tall * wide) * _MXFP4_BYTES
        attention = 2 * 2 * hidden * size * (heads + kv_heads)
        return int(layers * (experts * expert + attention)) + 2 * 2 * words * hidden

    @property
    def kv_dtype(self) -> str:
        """What vLLM keeps its keys and values in by itself, by the tables' name.

        Eight bits where the weights were stored with scales for them, and no weights of eight
        bits alone ask for that.

        Source: vLLM utils/torch_utils.py, get_kv_cache_quant_algo_string, and
            model_executor/layers/attention/attention.py, Attention, 0.32.
        """
        found = self._quantisation
        if found.get("quant_method") == "fp8":
            return "bfloat16"
        kept = found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme")
        bits = kept.get("num_bits") if isinstance(kept, dict) else kept
        return "fp8" if "8" in str(bits) else "bfloat16"

    def check_weights(self) -> None:
        """Refuse weights of which the tables say nothing that holds. Raises: UsageError."""
        found = self._quantisation
        if "compression_config" in self.content and not found:
            raise UsageError(
                f"{self.model} has its quantisation in compression_config, where the tables do "
                "not look for it",
                f"call it quantization_config in its {CONFIG}, as vLLM takes it",
            )
        groups = _mapping(found.get("config_groups")).values()
        weights = [_mapping(_mapping(group).get("weights")) for group in groups]
        in_blocks = found.get("weight_block_size") or any(
            each.get("strategy") == "block" or each.get("block_structure") for each in weights
        )
        if in_blocks:
            raise UsageError(
                f"{self.model} has weights that are quantised in blocks, and the tables hold "
                "what launching their kernels one by one takes: small batches come out up to "
                "seven times too long",
                "derive for one of fp8 by tensor or by channel, or of bfloat16, or measure: "
                "tune on one such GPU",
            )

    @property
    def dtype(self) -> str:
        """What it computes with, as vLLM takes it: floats of 32 bits are not, but by demand."""
        named = str(self.content.get("torch_dtype") or self.content.get("dtype"))
        return named if named in _DTYPES else "bfloat16"

    @property
    def window(self) -> int:
        """What every other layer sees of what came before, 0 where that is not in the tables.

        Units: tokens. Raises: UsageError.
        """
        layers = list(self.content.get("layer_types") or ())
        half = self.integer("num_hidden_layers", 0) // 2
        window = _WINDOWS.get(self.architecture, 0)
        is_as_known = (
            sorted(layers) == sorted([_LOOKS_BACK, _SEES_ALL] * half)
            and self.integer("sliding_window", 0) == window
            and self.quantised_by == "mxfp4"
        )
        return window if half and is_as_known else 0

    @property
    def architecture(self) -> str:
        """What the model is called that its weights belong to, empty where it is not said."""
        named = self.content.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    def check_attention(self, max_model_len: int) -> None:
        """Refuse attention that the tables do not know. Raises: UsageError."""
        if self.window:
            return
        kinds = set(self.content.get("layer_types") or ()) - {_SEES_ALL}
        found = f"layers of {', '.join(sorted(kinds))}" if kinds else ""
        for key, what in _OTHER_ATTENTION.items():
            found = found or (what if self.content.get(key) else "")
        slides = self.content.get("use_sliding_window", True)
        windows = [self.integer("sliding_window", 0) * bool(slides)]
        windows.append(self.integer("attention_chunk_size", 0))
        window = min((w for w in windows if w), default=max_model_len)
        if not found and window < max_model_len:
            found = f"layers that attend to {window} tokens"
        if found:
            raise UsageError(
                f"{self.model} has {found}, and the tables know full attention, and sliding "
                "windows of gpt-oss in MXFP4 alone",
                "measure it: tune on one such GPU",
            )

    def doubts(self) -> Iterator[str]:
        """Yield why a prediction of it is further off than usual. Raises: UsageError."""
        if self.known_as not in ("", self.model):
            yield f"by its name it has the layers of {self.known_as}, which are taken"
        if self.window:
            yield ABOUT_GPT_OSS
            return
        if self.has_experts:
            yield (
                "a mixture of experts: published points are 5 to 12 % off, first tokens more"
            )
        heads = self.integer("num_attention_heads", 0)
        # Where layers differ each says so itself.
        otherwise = 0 if self.content.get("block_configs") else heads
        if heads and heads == self.integer("num_key_value_heads", otherwise):
            yield "every head has keys of its own: published points are 8 to 33 % faster"
        if self.is_quantised:
            yield ABOUT_QUANTISED

    @contextmanager
    def folder(self) -> Iterator[str]:
        """Hold a folder as the tables' library reads models, which needs no network."""
        with TemporaryDirectory(prefix="tune-model-") as name:
            for file, path in self.files.items():
                (Path(name) / file).write_bytes(path.read_bytes())
            yield name


def layers_of(model: str) -> str:
    """Return the same for all models of a name that differ in what they were trained on alone.

    >>> layers_of("meta-llama/Llama-3.1-8B-Instruct"), layers_of("/models/Meta-Llama-3.1-8B")
    ('llama-3.1-8b', 'llama-3.1-8b')
    >>> layers_of("nvidia/Llama-3.1-70B-Instruct-FP8")
    'llama-3.1-70b-instruct-fp8'
    """
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    for end in _TRAINED_FURTHER:
        name = name.removesuffix(end)
    return _SAME_LAYERS.get(name, name)


def quantisation_of(model: str) -> str | None:
    """Return how weights in a folder are quantised, "" where not, None for no such folder.

    Raises: UsageError if the configuration there cannot be read.
    """
    if not model or not (Path(model) / CONFIG).is_file():
        return None
    config = ModelConfig.of(model)
    if not config.is_quantised:
        return "in compression_config" if "compression_config" in config.content else ""
    return config.quantised_by


def _kind_of(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no keys and values, as a model's {CONFIG} does")
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else found


def _known_models() -> dict[str, Path]:
    """Return the configurations that come with the tables, by model."""
    package = Path(library("aiconfigurator_core").__file__ or "").parent / "model_configs"
    return {
        path.name.removesuffix(f"_{CONFIG}").replace("--", "/"): path
        for path in package.glob(f"*_{CONFIG}")
        if not path.name.endswith(f"_{QUANTISED}")
    }
