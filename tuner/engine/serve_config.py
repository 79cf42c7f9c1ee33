"""The user's configuration, in the form that `vllm serve --config` takes.

Reads files, `--engine-arg` and tuning profiles in the user's order, refusing duplicate keys;
spells keys and values as vLLM's parser does; finds the two limits among them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Final

from tuner.errors import UsageError
from tuner.files import parse_yaml
from tuner.redact import redacted

_log = logging.getLogger(__name__)

MAX_NUM_SEQS: Final = "max-num-seqs"
MAX_NUM_BATCHED_TOKENS: Final = "max-num-batched-tokens"
SPECULATIVE_CONFIG: Final = "speculative-config"
LIVE_LIMIT_KEYS: Final = ("max-num-active-seqs", "max-num-scheduled-tokens")
"""Keys of vLLM 0.32 and later that cap admission and step budget below the two limits.

Source: SchedulerConfig in vLLM's vllm/config/scheduler.py.
"""


INTEGER_KEYS: Final = frozenset(
    {
        MAX_NUM_SEQS,
        MAX_NUM_BATCHED_TOKENS,
        "block-size",
        "data-parallel-size",
        "long-prefill-token-threshold",
        "max-lora-rank",
        "max-loras",
        "max-model-len",
        "max-num-active-seqs",
        "max-num-scheduled-tokens",
        "pipeline-parallel-size",
        "port",
        "seed",
        "tensor-parallel-size",
    }
)
"""Keys whose value vLLM reads with int(), so that 32.0 would stop its start.

Source: vLLM's make_arg_parser; ours is the choice of the keys people tune by hand.
"""

FLAGS_WITHOUT_NO: Final = frozenset(
    {
        "aggregate-engine-logging",
        "data-parallel-multi-port-external-lb",
        "disable-log-stats",
        "grpc",
        "headless",
    }
)
"""Flags that vLLM can only switch on: no `--no-...` exists, so `false` says nothing.

Source: the store_true actions of vLLM 0.32.0's make_arg_parser.
"""

ON_OR_CHOSEN: Final = frozenset(
    {
        "async-scheduling",
        "cohere-is-reasoning-model",
        "dcp-q-replicate",
        "disable-cascade-attn",
        "disable-hybrid-kv-cache-manager",
        "disable-nccl-for-dp-synchronization",
        "enable-batch-sharded-sampling",
        "enable-chunked-prefill",
        "enable-flash-late-interaction",
        "enable-flashinfer-autotune",
        "enable-log-deltas",
        "enable-lora",
        "enable-prefix-caching",
        "mm-device-do-normalize",
        "scheduler-reserve-full-isl",
        "swa-bounded-replay",
        "use-tqdm-on-load",
    }
)
"""Switches that are on by default, or that vLLM chooses, so that false is not the same.

Source: the switches of vLLM 0.32.0's make_arg_parser whose default is not False.
"""

_READ: Final = (
    INTEGER_KEYS
    | FLAGS_WITHOUT_NO
    | ON_OR_CHOSEN
    | {
        "compilation-config",
        "cudagraph-capture-sizes",
        "dbo-prefill-token-threshold",
        "dtype",
        "enable-expert-parallel",
        "enforce-eager",
        "gpu-memory-utilization",
        "hf-overrides",
        "kv-cache-dtype",
        "kv-cache-memory-bytes",
        "load-format",
        "max-cudagraph-capture-size",
        "model",
        "num-gpu-blocks-override",
        "quantization",
        "scheduling-policy",
        "served-model-name",
        SPECULATIVE_CONFIG,
        "tokenizer",
    }
)
"""Keys of which a slip must not pass for a key that nobody here reads.

Ours; no other key of vLLM 0.32.0's make_arg_parser is as near to one of these as `_NEAR`.
"""
_NEAR: Final = 0.88

NO_CONFIGURATIONS: Final = {
    "apiVersion": "a Kubernetes manifest",
    "kind": "a Kubernetes manifest",
    "services": "a Docker Compose file",
    "servingEngineSpec": "a values file of the vLLM Production Stack",
    "kv_starts": "a profile of this tool",
    "objective": "a preset for --tuning",
}
"""What a file is of which a key at the top is none of vLLM's."""

_HUMAN_INTEGER = re.compile(r"(\d+)(?:(\.\d+)?([kmgt])|([KMGT]))?")


def hyphenated(key: str) -> str:
    """Return the key as vLLM spells it: hyphens up to the first dot, as its parser does.

    >>> hyphenated("max_num_seqs"), hyphenated("kv_transfer_config.kv_role")
    ('max-num-seqs', 'kv-transfer-config.kv_role')
    """
    head, dot, tail = key.partition(".")
    return head.replace("_", "-") + dot + tail


def to_argv(values: Mapping[str, object]) -> list[str]:
    """Return the words that these values are on vLLM's command line, a false as `--no-KEY`.

    Source: vLLM vllm/utils/argparse_utils.py, FlexibleArgumentParser.load_config_file.

    >>> to_argv({"model": "m", "enforce-eager": True, "enable-prefix-caching": False})
    ['--model', 'm', '--enforce-eager', '--no-enable-prefix-caching']
    """
    words: list[str] = []
    for key, value in values.items():
        match value:
            case True:
                words.append(f"--{key}")
            case False:
                words.extend(f"--{no}" for no in [negated(key)] if no is not None)
            case list():
                words.extend([f"--{key}", *map(str, value)] if value else [])
            case dict():
                words.extend([f"--{key}", json.dumps(value)])
            case _:
                words.extend([f"--{key}", str(value)])
    return words


def negated(key: str) -> str | None:
    """Return the flag that says false for this key, or None where vLLM has none.

    >>> negated("enable-prefix-caching"), negated("headless"), negated("no-enforce-eager")
    ('no-enable-prefix-caching', None, None)
    """
    return None if key in FLAGS_WITHOUT_NO or key.startswith("no-") else f"no-{key}"


def twin(key: str) -> str:
    """Return the other name of a switch: no-KEY for KEY, KEY for no-KEY."""
    return key.removeprefix("no-") if key.startswith("no-") else f"no-{key}"


def changed(values: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration with some keys set anew, whatever the spelling they had there.

    >>> changed(
    ...     {"no-enable-prefix-caching": True, "model": "m"}, {"enable-prefix-caching": True}
    ... )
    {'model': 'm', 'enable-prefix-caching': True}
    """
    gone = {twin(key) for key in changes}
    spelled = {hyphenated(key): value for key, value in values.items()}
    return {key: value for key, value in spelled.items() if key not in gone} | dict(changes)


def as_deployed(values: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration as production may have it: its drafts are verified.

    vLLM's synthetic rejection sampling accepts drafts at a given rate whatever they are. That
    shows what speculation would bring at the rate, with answers that are not the model's.

    Source: SpeculativeConfig in vLLM's vllm/config/speculative.py.

    >>> drafts = {"method": "ngram", "rejection_sample_method": "synthetic"}
    >>> as_deployed({"model": "m", "speculative-config": drafts})
    {'model': 'm', 'speculative-config': {'method': 'ngram'}}
    """
    found: dict[str, object] = {}
    for key, value in values.items():
        head, dot, name = key.partition(".")
        if hyphenated(head) != SPECULATIVE_CONFIG:
            found[key] = value
        elif dot:
            if not _is_given_acceptance(name, value):
                found[key] = value
        else:
            found[key] = _verified(value)
    return found


def _verified(drafts: object) -> object:
    """Return a speculative configuration, a mapping or its JSON, that verifies its drafts."""
    if isinstance(drafts, str):
        try:
            read = json.loads(drafts)
        except ValueError:
            return drafts  # vLLM refuses it with its own words
        kept = _verified(read)
        return drafts if kept == read else json.dumps(kept)
    if not isinstance(drafts, Mapping):
        return drafts
    return {k: v for k, v in drafts.items() if not _is_given_acceptance(str(k), v)}


def _is_given_acceptance(name: str, value: object) -> bool:
    name = name.replace("-", "_")
    return name.startswith("synthetic_acceptance") or (
        name == "rejection_sample_method" and value == "synthetic"
    )


def human_integer(text: str) -> int | None:
    """Return the whole number that vLLM reads from a text, or None if it reads none.

    Source: vLLM vllm/utils/argparse_utils.py, human_readable_int.

    >>> human_integer("32"), human_integer("8k"), human_integer("8K"), human_integer("32.0")
    (32, 8000, 8192, None)
    """
    match = _HUMAN_INTEGER.fullmatch(text.strip())
    if match is None:
        return None
    whole, fraction, decimal, binary = match.groups()
    if decimal:
        thousands: int = 1000 ** ("kmgt".index(decimal) + 1)
        return int(float(whole + (fraction or "")) * thousands)
    units: int = 1024 ** ("KMGT".index(binary) + 1 if binary else 0)
    return int(whole) * units


def false_says_nothing(key: str) -> str:
    """Return the sentence on a false in a file, where the default is something else."""
    return (
        f"`{key}: false` says nothing to `vllm serve --config`, which takes the default; "
        f"where false is meant, write `no-{key}: true`"
    )


@cache
def _warn_of_false(path: Path, key: str) -> None:
    """Say once that a false in a file has no effect."""
    _log.warning("%s: %s", path, false_says_nothing(key))


def read_config(path: Path) -> dict[str, object]:
    """Return what a `vllm serve --config` file says, keys hyphenated, in the user's order.

    A false says nothing there: the server takes its default, and so does what is measured.

    vLLM would read some mistakes as something else (a null as the text None, the second of two
    equal keys) and die of others in mid-start (32.0 for an integer); here all are refused, and
    so is a manifest that a server is deployed with.

    Raises: UsageError, naming the file and the key.
    Source: vLLM vllm/utils/argparse_utils.py, FlexibleArgumentParser.load_config_file.
    """
    loaded = _load(path)
    if not isinstance(loaded, dict):
        got = "nothing" if loaded is None else f"a {type(loaded).__name__}"
        raise UsageError(
            f"{path} must hold keys and values, as in `max-num-seqs: 32`, got {got}",
            hint="see `vllm serve --help` for the keys; each becomes --key",
        )
    for key, what in NO_CONFIGURATIONS.items():
        if key in loaded:
            raise UsageError(
                f"{path} is {what}, as it has {key}, and no configuration of "
                "`vllm serve --config`",
                hint="write what the server is started with as keys and values, "
                "`--max-num-seqs 32` as `max-num-seqs: 32`",
            )
    values: dict[str, object] = {}
    for name, value in loaded.items():
        if not isinstance(name, str):
            raise UsageError(
                f"{path}: a key must be text, got {name!r}", hint="put the key in quotes"
            )
        key = hyphenated(name)
        if key in values or twin(key) in values:
            raise UsageError(
                f"{path}: {name} stands there twice, under two spellings",
                hint="keep one of the two",
            )
        _check_value(str(path), key, value)
        values[key] = value
    for key, value in values.items():
        if value is False and key in ON_OR_CHOSEN:
            _warn_of_false(path, key)
    return {key: value for key, value in values.items() if value is not False}


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuning profile: what to optimise for a kind of traffic, as the options spell it."""

    objective: str | None
    slos: tuple[str, ...]
    max_num_seqs: str


def read_tuning(path: Path) -> Tuning:
    """Return a tuning profile, a YAML file with objective, slo and max-num-seqs.

    Raises: UsageError if a key is unknown or a value has another form.
    """
    loaded = _load(path)
    known = {"objective", "slo", "max-num-seqs"}
    if not isinstance(loaded, dict) or not set(loaded) <= known:
        got = sorted(set(map(str, loaded)) - known) if isinstance(loaded, dict) else loaded
        raise UsageError(
            f"{path} must hold {', '.join(sorted(known))} and nothing else, got {got!r}",
            hint="profiles/interactive.yaml is an example",
        )
    objective, slos = loaded.get("objective"), loaded.get("slo", [])
    if not isinstance(objective, str | None) or objective not in {
        None,
        "balanced",
        "throughput",
        "latency",
        "goodput",
    }:
        raise UsageError(
            f"{path}: objective must be balanced, throughput, latency or goodput, "
            f"got {objective!r}"
        )
    if not isinstance(slos, list) or not all(isinstance(slo, str) for slo in slos):
        raise UsageError(f"{path}: slo must be a list such as [ttft_p99=500ms], got {slos!r}")
    return Tuning(objective, tuple(slos), str(loaded.get("max-num-seqs", "")))


def parse_engine_args(
    arguments: Iterable[str], option: str = "--engine-arg"
) -> dict[str, object]:
    """Return `key=value` arguments of an option as configuration values.

    true, false, numbers, lists and mappings are read as YAML reads JSON; anything else is text
    as it stands, so that `revision=0123` is no octal number and `on` no truth value.

    Raises: UsageError if an argument has another form, or a key comes twice.

    >>> parse_engine_args(["max_model_len=4096", "enforce-eager=true"])
    {'max-model-len': 4096, 'enforce-eager': True}
    """
    values: dict[str, object] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        key = hyphenated(name.strip().removeprefix("--"))
        if not equals or not re.fullmatch(r"[A-Za-z][\w.+-]*", key):
            raise UsageError(
                f"{option} must be key=value, got {shown_argument(argument)!r}",
                hint="for example block-size=32",
            )
        if key in values or twin(key) in values:
            raise UsageError(f"{option} {key} is given twice", hint="give each key one value")
        value = _argument_value(option, key, text.strip())
        _check_value(option, key, value)
        values[key] = value
    return values


def shown_argument(argument: str) -> str:
    """Return a `key=value` argument as a message may show it."""
    key, equals, value = argument.partition("=")
    shown = redacted({key: value})[key] if equals else key
    return f"{key}{equals}{shown if equals else ''}"


def limits(values: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Return the two limits that the values set: max_num_seqs and max_num_batched_tokens.

    What caps an engine below those that it starts with goes before them.

    Raises: UsageError if one is no whole number of at least 1.

    >>> limits({"max-num-seqs": 64, "max-num-batched-tokens": "8K"})
    (64, 8192)
    >>> limits({"max-num-seqs": 64, "max-num-active-seqs": 4})
    (4, None)
    """
    spelled = {hyphenated(key): value for key, value in values.items()}
    seqs, tokens = (_limit(spelled, key) for key in LIVE_LIMIT_KEYS)
    return (
        seqs or _limit(spelled, MAX_NUM_SEQS),
        tokens or _limit(spelled, MAX_NUM_BATCHED_TOKENS),
    )


def check_length(values: Mapping[str, object]) -> None:
    """Refuse a length of requests that vLLM chooses anew at each start.

    Started at other limits than the server, an engine would take other requests than it does.

    Raises: UsageError.
    Source: vLLM vllm/utils/argparse_utils.py, human_readable_int_or_auto, and
        vllm/v1/core/kv_cache_utils.py, _auto_fit_max_model_len.
    """
    spelled = {hyphenated(key): value for key, value in values.items()}
    length = str(spelled.get("max-model-len", "")).strip().lower()
    if length in {"auto", "-1"}:
        raise UsageError(
            f"max-model-len: {length} lets vLLM fit it to the KV cache at each start, so that "
            "an engine of other limits takes other requests",
            "write the number that the server has now, max_model_len in its /v1/models; "
            "a number holds for all limits, so keep it in what you deploy",
        )


def _load(path: Path) -> object:
    """Return what stands in the YAML file."""
    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(
            f"{path} must end in .yaml or .yml, got {path.suffix or 'no extension'}",
            hint="vLLM itself refuses a configuration under another name",
        )
    try:
        loaded: object = parse_yaml(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint="check its path") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not YAML: {error}",
            hint="one `key: value` per line, in the form that vllm serve --config takes",
        ) from None
    return loaded


def _argument_value(option: str, key: str, text: str) -> object:
    """Return the value of one key of an option."""
    if text[:1] in {"[", "{", '"', "'"}:
        try:
            loaded: object = parse_yaml(text)
        except ValueError as error:
            raise UsageError(
                f"{option} {key}: the value is no JSON: {error}",
                hint=f"quote the whole argument for the shell: '{key}={{\"a\": 1}}'",
            ) from None
        return loaded
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if text in {"", "null", "~"}:
        return None
    if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", text):
        number: object = json.loads(text)
        return number
    return text


def _check_value(place: str, key: str, value: object) -> None:
    """Refuse what vLLM would take for something else, or would not know."""
    _check_spelling(place, key)
    if value is None or (isinstance(value, list) and None in value):
        raise UsageError(
            f"{place}: {key} must have a value, got null",
            hint=f"leave {key} out to get vLLM's default",
        )
    if key in INTEGER_KEYS and isinstance(value, float):
        hint = f"write {key}: {int(value)}" if value.is_integer() else "write a whole number"
        raise UsageError(f"{place}: {key} must be a whole number, got {value}", hint=hint)
    if isinstance(value, dict | list):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{place}: {key} cannot be written as JSON: {error}",
                hint="use text, numbers, true, false, lists and mappings; quote dates",
            ) from None


def _check_spelling(place: str, key: str) -> None:
    """Refuse a slip of a key, or one cut short: without vLLM nobody else reads it."""
    name = key.removeprefix("no-").partition(".")[0]
    # What goes on behind a key is another one, which a newer vLLM may have.
    if name in _READ or any(name.startswith(f"{whole}-") for whole in _READ):
        return
    near = [whole for whole in sorted(_READ) if whole.startswith(name)]
    if len(near) != 1:
        near = get_close_matches(name, sorted(_READ), n=1, cutoff=_NEAR)
    for whole in near:
        raise UsageError(
            f"{place}: {key} is no whole key of `vllm serve`", hint=f"did you mean {whole}?"
        )


def _limit(values: Mapping[str, object], key: str) -> int | None:
    """Return one limit; text counts where vLLM itself would read it as a number."""
    value = values.get(key)
    if value is None:
        return None
    number = human_integer(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(
            f"{key} must be a whole number of at least 1, got {value!r}",
            hint=f"write it as in `{key}: 32`",
        )
    return number
