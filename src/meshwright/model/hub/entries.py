"""Typed reads of a config.json: what is missing, of the wrong type or not supported is said in one line."""

import math
from collections.abc import Mapping

from meshwright.spec.errors import HubError

_REQUIRED = object()


class Entries:
    """The keys of one config. `absent` is what a reader assumes for a key that is not there."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, what: str) -> HubError:
        """The error to raise about this file."""
        return HubError(f"{self.where}: {what}")

    def raw(self, key: str, absent: object = _REQUIRED) -> object:
        """The value as JSON gave it."""
        value = self.values.get(key, absent)
        if value is _REQUIRED:
            raise self.fail(f"{key} is missing")
        return value

    def maybe_integer(self, key: str, absent: object = None) -> int | None:
        """A whole number of 0 or more; None for null."""
        value = self.raw(key, absent)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fail(f"{key}={value!r} must be a whole number of 0 or more")
        return value

    def integer(self, key: str, absent: object = _REQUIRED) -> int:
        """A whole number of 0 or more."""
        value = self.maybe_integer(key, absent)
        if value is None:
            raise self.fail(f"{key}=null must be a whole number")
        return value

    def number(self, key: str, absent: object = _REQUIRED) -> float:
        """A finite number of 0 or more."""
        value = self.raw(key, absent)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise self.fail(f"{key}={value!r} must be a finite number of 0 or more")
        return float(value)

    def flag(self, key: str, absent: object = _REQUIRED) -> bool:
        """True or false; null counts as false."""
        value = self.raw(key, absent)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(f"{key}={value!r} must be true or false")
        return value

    def text(self, key: str, absent: object = _REQUIRED) -> str:
        """A string."""
        value = self.raw(key, absent)
        if not isinstance(value, str):
            raise self.fail(f"{key}={value!r} must be a string")
        return value

    def inner(self, key: str) -> "Entries | None":
        """A nested object; None where it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.fail(f"{key}={value!r} must be an object")
        return Entries(value, f"{self.where}, {key}")

    def allow(self, key: str, supported: tuple[object, ...]) -> None:
        """Refuse a key whose value is none of those supported; absent is fine."""
        value = self.values.get(key, supported[0])
        if value not in supported:
            allowed = ", ".join(repr(option) for option in supported if option is not None) or "to leave it out"
            raise self.fail(f"{key}={value!r} is not supported (supported: {allowed})")
