"""How vLLM spells a configuration: keys, switches, numbers, and the words of its command line.

Values in, words out. What the user wrote is read in config; that vLLM itself agrees is shown
by the tests, which put the same values through vLLM's own parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

MAX_NUM_SEQS: Final = "max-num-seqs"
MAX_NUM_BATCHED_TOKENS: Final = "max-num-batched-tokens"


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

_HUMAN_INTEGER = re.compile(r"(\d+)(?:(\.\d+)?([kmgt])|([KMGT]))?")


def hyphenated(key: str) -> str:
    """Return the key as vLLM spells it: hyphens up to the first dot, as its parser does.

    >>> hyphenated("max_num_seqs"), hyphenated("kv_transfer_config.kv_role")
    ('max-num-seqs', 'kv-transfer-config.kv_role')
    """
    head, dot, tail = key.partition(".")
    return head.replace("_", "-") + dot + tail


def to_argv(values: Mapping[str, object]) -> list[str]:
    """Return the words that vLLM's own config loading would put on its command line.

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
