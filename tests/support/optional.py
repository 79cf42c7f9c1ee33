"""A value that may be None, in a test that needs it."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return a value that has to be there."""
    assert value is not None
    return value
