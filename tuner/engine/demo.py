"""What the tool brings along: the demo model, and the sample traces and profiles.

Answers where these lie, in a checkout as in an installed wheel, and how vLLM is started on the
demo model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tuner.errors import UsageError

_PACKAGE_DIR: Final = Path(__file__).resolve().parents[1]

DEMO_MODEL_DIR: Final = _PACKAGE_DIR / "demo_model"
"""A Qwen2-shaped model of 6 layers without weights, and a tokenizer made by us."""


def demo_engine_args() -> dict[str, object]:
    """Return the `vllm serve --config` values that start vLLM on the demo model.

    Random weights need no download. Eager mode, because on a CPU the compiler would take
    longer than the sweep, and compiled code is not what the demo is about.

    >>> demo_engine_args()["load-format"]
    'dummy'
    """
    return {
        "model": str(DEMO_MODEL_DIR),
        "load-format": "dummy",
        "enforce-eager": True,
        "kv-cache-memory-bytes": 1 << 30,
    }


def is_demo_model(model: object) -> bool:
    """Return whether a configuration's model is the demo model, wherever it was installed.

    >>> is_demo_model("tuner/demo_model"), is_demo_model("Qwen/Qwen2.5-7B")
    (True, False)
    """
    return Path(str(model)).parts[-2:] == DEMO_MODEL_DIR.parts[-2:]


def bundled(name: str) -> Path:
    """Return the folder of the sample traces ("traces") or of the profiles ("profiles").

    In a wheel they lie inside the package; in a checkout, where people look for them, at its
    top level.

    Raises: UsageError if there is no such folder.

    >>> bundled("traces").name
    'traces'
    """
    for place in (_PACKAGE_DIR / "_data" / name, _PACKAGE_DIR.parent / name):
        if place.is_dir():
            return place
    raise UsageError(
        f"nothing is bundled under the name {name!r}: expected profiles or traces",
        hint="reinstall the package, or pass a path of your own",
    )
