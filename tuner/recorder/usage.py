"""The token counts that a response carries, found in its last bytes.

Needed only where the engine's own counts are out of reach. Whole bodies and streams of events
both end with `usage`, so neither is kept or parsed as a whole. Within JSON text a quotation
mark is escaped, so what looks like the key is the key.
"""

from __future__ import annotations

import json
import re
from typing import Final

from tuner.recorder.messages import Usage

TAIL_BYTES: Final = 1 << 16
"""Ours: behind `usage` vLLM sends what else was asked for, such as the prompt's token ids."""

_USAGE: Final = b'"usage":'
_FINISH: Final = re.compile(rb'"(?:finish_reason|stop_reason)":\s*"([a-z_]{1,40})"')
_DECODER: Final = json.JSONDecoder()


def read_usage(tail: bytes) -> Usage | None:
    """Return the last usage in the end of a response, None where there is none.

    OpenAI's completions and chat spell it prompt_tokens and completion_tokens, responses and
    Anthropic's messages input_tokens and output_tokens.

    >>> read_usage(b'{"usage":{"prompt_tokens":3,"completion_tokens":5}}').output_length
    5
    >>> read_usage(b'{"usage":{"prompt_tokens":3,"total_tokens":3}}') is None
    True
    """
    at = tail.rfind(_USAGE)
    if at < 0:
        return None
    text = tail[at + len(_USAGE) :].decode("utf-8", "replace").lstrip()
    try:
        found, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    prompt = _tokens(found, "prompt_tokens", "input_tokens")
    output = _tokens(found, "completion_tokens", "output_tokens")
    if prompt is None or output is None:
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = _tokens(details, "cached_tokens") if isinstance(details, dict) else None
    reasons = _FINISH.findall(tail)
    return Usage(prompt, output, cached, reasons[-1].decode() if reasons else "unknown")


def _tokens(text: dict[str, object], *names: str) -> int | None:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
