"""Which models a file of the user's serves, as far as it names them as a hub does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from tuner.emit.recommendation import Recommendation
from tuner.engine.serve_config import MAX_NUM_SEQS

_HUB: Final = re.compile(r"(?:hf://)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
# Of a command's text: what follows `vllm serve` or --model.
_IN_LINE: Final = re.compile(
    r"(?:\bvllm\s+serve|(?<!\S)--model(?:[-_]id)?)(?:\s+|=)['\"]?([^\s'\"\\]+)"
)
# Keys, in lower case, that hold a model in vLLM's own file, charts and objects.
_KEYS: Final = frozenset({"model", "modelurl", "modeluri", "storageuri", "uri"})


def other_model(documents: list[Any], rec: Recommendation) -> list[str]:
    """Return that the documents serve other models than the one that was tuned, if so.

    Nothing is said where they name none as `ORGANISATION/NAME`, or the tuned one is a folder.
    """
    tuned = _HUB.fullmatch(str(rec.values.get("model", "")))
    named = {found["name"] for text in _models(documents) if (found := _HUB.fullmatch(text))}
    if tuned is None or not named or tuned["name"].lower() in map(str.lower, named):
        return []
    names = " and ".join(sorted(named))
    return [
        f"it serves {names}, and what was tuned is {tuned['name']}: limits are of one model; "
        f"if both names are its own, --model {min(named)} says so"
    ]


def _models(node: Any) -> Iterator[str]:  # noqa: ANN401 - any YAML
    """Yield each text of a document that stands where a model is named."""
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(value, str) and str(key).lower() in _KEYS:
                yield value
            else:
                yield from _models(value)
    elif isinstance(node, list):
        # An image whose entrypoint is `vllm serve` takes the model as its first word.
        takes = any(str(word).startswith(f"--{MAX_NUM_SEQS}") for word in node)
        before = ["serve" if takes else "", *map(str, node)]
        for word, previous in zip(node, before, strict=False):
            if previous in {"--model", "--model_id", "serve"} and not str(word).startswith("-"):
                yield str(word)
            else:
                yield from _models(word)
    elif isinstance(node, str):
        yield from _IN_LINE.findall(node)
