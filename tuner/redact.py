"""Which texts and values are secrets, and what may be shown instead.

The emitted file is the one place where a secret may stand. Every text that leaves memory for
another place, a screen, a log or the run directory, goes through `redacted_text`, and every
configuration through `redacted`, which also goes by the names of its keys. Deciding by name and
by form errs on the side of hiding.
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
    {"apikey", "authorization", "cookie", "passphrase", "passwd", "password", "pgpassword"}
    | {"secret", "secrets"}
)
_SECRET_LAST = frozenset(
    {"auth", "credential", "credentials", "key", "keys", "pass", "pat", "pgpass", "pwd", "sas"}
    | {"sig", "signature", "token"}
)
_TOKENS_OF = frozenset({"access", "api", "auth", "bearer", "hf", "hub"})
"""Whose tokens are secrets: those of a prompt or a batch are counted everywhere."""
_NOT_SECRET = frozenset({"allow-credentials"})
_CAMEL_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# Each runs over a text once: texts come from strangers, and none may take long.
_AFTER_SCHEME = re.compile(r"://[^\s'\"<>]*")
_LOGIN_ALONE = re.compile(
    r"(?<![^\s'\"=(])[\w.-]{1,64}:[^\s/@'\"<>]{1,256}(?=@(?!sha256:)[\w.-])"
)
# What curl and its like log in with; a number for each is who a container runs as.
LOGIN_OPTIONS: Final = frozenset({"-u", "--user", "--proxy-user"})
"""Options before a login as `NAME:PASSWORD`. Source: curl, `curl --help auth`."""
_LOGIN_BEHIND = re.compile(
    rf"(?<![\w-])(?:{'|'.join(sorted(LOGIN_OPTIONS))})(?:=|['\"]?,?[ \t]{{1,3}})['\"]?"
    r"(?P<login>[^\s'\",<]{3,320})"
)
_NAMED = re.compile(
    r"(?P<mark>[?&]|\b)(?P<name>[\w.-]{1,64})="
    r"|(?P<quote>['\"])(?P<quoted>[\w.-]{1,64})(?P=quote):\s?"
)
_VALUE = re.compile(
    r"\[[^\]\n]*\]?|\"[^\"\n]*\"?|'[^'\n]*'?|[^\s,;&'\"()\[\]{}<$…][^\s,;&'\")\]}]*"
)
_HEADER = re.compile(
    r"\b(?:(?:proxy-)?authorization|(?:set-)?cookie|x-(?:[\w-]{0,64}-)?(?:auth|key|token))"
    r"[\w-]{0,64}:\s{0,3}(?P<value>[^\s,'\"<][^\r\n,'\"]*)",
    re.IGNORECASE,
)
_BY_FORM = re.compile(
    r"(?<=\bBearer )[^\s,'\"<]+|(?<=\bBasic )[A-Za-z0-9+/=]{8,}"
    r"|\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{16,}|\bgh[opsu]_[A-Za-z0-9]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
)
"""Tokens that say by their form what they are: HTTP's schemes, the hub's, OpenAI's, GitHub's,
and JSON web tokens."""
_NO_SECRET_VALUES = frozenset({"", "none", "null", "true", "false"})


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
    if words[-1] == "tokens":
        return len(words) == 2 and words[0] in _TOKENS_OF
    named = name in SECRET_KEYS or words[-1] in _SECRET_LAST
    return named or not _SECRET_ANYWHERE.isdisjoint(words)


def is_login(word: str) -> bool:
    """Whether a word behind one of the `LOGIN_OPTIONS` is a name and its password.

    >>> is_login("me:pass"), is_login("1000:1000"), is_login("me:$PASS")
    (True, False, False)
    """
    name, _, password = word.partition(":")
    is_id = name.isdigit() and password.isdigit()
    return bool(name and password) and not is_id and not password.startswith(("$", "<", "//"))


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
    return _redacted_value_text(value) if isinstance(value, str) else value


def _redacted_value_text(text: str) -> str:
    """Return a text value without secrets, also those that its JSON holds by name."""
    if text.lstrip()[:1] in {"{", "["}:
        try:
            loaded: object = json.loads(text)
        except (ValueError, RecursionError):
            loaded = None
        shown = _redacted_value("", loaded)
        if shown != loaded:
            return json.dumps(shown)
    return redacted_text(text)


def redacted_text(text: str) -> str:
    """Return a text without logins, tokens, and what stands behind a secret's name.

    >>> redacted_text("GET https://me:p@ss/w@hub.co/m?token=abc&page=2 failed")
    'GET https://<redacted>@hub.co/m?token=<redacted>&page=2 failed'
    >>> redacted_text("api_key='sk', max_num_batched_tokens=512, Authorization: Bearer abc")
    'api_key=<redacted>, max_num_batched_tokens=512, Authorization: <redacted>'
    """
    text = _AFTER_SCHEME.sub(_without_login, text)
    text = _LOGIN_ALONE.sub(REDACTED, _LOGIN_BEHIND.sub(_without_password, text))
    text = _HEADER.sub(_without_value, _without_named(text))
    return _BY_FORM.sub(REDACTED, text)


def redacted_content(content: object) -> object:
    """Return what a JSON document holds, with each of its texts as it may be shown."""
    if isinstance(content, str):
        return redacted_text(content)
    if isinstance(content, dict):
        return {name: redacted_content(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [redacted_content(value) for value in content]
    return content


def _without_login(found: re.Match[str]) -> str:
    """Return a URL's rest without all before its last @, as passwords hold any character."""
    _, at, rest = found.group().rpartition("@")
    return f"://{REDACTED}@{rest}" if at else found.group()


def _without_password(found: re.Match[str]) -> str:
    if not is_login(found["login"]):
        return found.group()
    password = found["login"].partition(":")[2]
    return found.group()[: -len(password)] + REDACTED


def _without_named(text: str) -> str:
    """Return a text without the values of what names itself a secret."""
    parts, upto = [], 0
    for found in _NAMED.finditer(text):
        name = found["name"] or found["quoted"]
        # A bare `key=` stands in many a text that holds no secret.
        is_bare = name.lower() in {"key", "keys"} and found["mark"] == ""
        if found.end() < upto or is_bare or not is_secret(name):
            continue
        value = _VALUE.match(text, found.end())
        if value and value.group().strip("'\"[]").lower() not in _NO_SECRET_VALUES:
            parts += [text[upto : value.start()], REDACTED]
            upto = value.end()
    return "".join([*parts, text[upto:]])


def _without_value(found: re.Match[str]) -> str:
    return found.group()[: found.start("value") - found.start()] + REDACTED
