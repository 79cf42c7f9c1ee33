"""Which values of a configuration are secrets, and what may be shown instead.

The emitted file is the one place where a secret may stand; logs, messages and the run directory
get `redacted` values. Deciding by name errs on the side of hiding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

SECRET_KEYS: Final = frozenset({"api-key", "hf-token"})
"""Keys of vLLM's own that carry a secret; is_secret finds more by the words of a name."""

REDACTED: Final = "<redacted>"

_SECRET_ANYWHERE = frozenset(
    {"apikey", "authorization", "passphrase", "passwd", "password", "secret", "secrets"}
)
_SECRET_LAST = frozenset({"credential", "credentials", "key", "keys", "token"})
_NOT_SECRET = frozenset({"allow-credentials"})
_CAMEL_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(key: str) -> bool:
    """Return whether a key names something that must not be shown.

    By its words: a token, key or credential comes last in the name (`hf-token`, but neither
    `tokenizer` nor `max-num-batched-tokens`), a password or secret stands anywhere in it.

    >>> is_secret("hf_token"), is_secret("awsSecretId"), is_secret("max-num-batched-tokens")
    (True, True, False)
    """
    words = [word.lower() for word in re.split(r"[-_.\s]+", _CAMEL_HUMP.sub("-", key)) if word]
    name = "-".join(words)
    if not words or name in _NOT_SECRET:
        return False
    named = name in SECRET_KEYS or words[-1] in _SECRET_LAST
    return named or not _SECRET_ANYWHERE.isdisjoint(words)


def redacted(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values as a log or the run directory may hold them.

    Secrets inside mappings, in JSON texts and in the login part of a URL go too. A secret's
    true or false stays: it says that there is one, not which.
    """
    return {key: _redacted_value(key, value) for key, value in values.items()}


def has_secrets(values: Mapping[str, object]) -> bool:
    """Return whether the values hold something that must not be shown."""
    return redacted(values) != dict(values)


def _redacted_value(key: str, value: object) -> object:
    """Return one value as it may be shown."""
    if isinstance(value, bool) or value is None:
        return value
    if is_secret(key):
        return REDACTED
    if isinstance(value, dict):
        return {name: _redacted_value(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted_value("", inner) for inner in value]
    return _redacted_text(value) if isinstance(value, str) else value


def _redacted_text(text: str) -> str:
    """Return a text without the logins of its URLs, nor the secrets of its JSON."""
    if text.lstrip()[:1] in {"{", "["}:
        try:
            loaded: object = json.loads(text)
        except ValueError:
            loaded = None
        shown = _redacted_value("", loaded)
        if shown != loaded:
            return json.dumps(shown)
    return _LOGIN_IN_URL.sub(REDACTED, text)
