"""Typed reads of a config.json. A missing, wrong or unsupported value gives an error of one line."""

import math
from collections.abc import Mapping

from meshwright.spec.errors import HubError

_REQUIRED = object()


class Entries:
    """Entries of one config. `absent` is the value that a reader assumes for a missing key."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, what: str) -> HubError:
        """Return the error to raise about this file."""
        return HubError(f"{self.where}: {what}")

    def raw(self, key: str, absent: object = _REQUIRED) -> object:
        """Return the value as JSON gave it."""
        value = self.values.get(key, absent)
        if value is _REQUIRED:
            raise self.fail(f"{key} is missing")
        return value

    def maybe_integer(self, key: str, absent: object = None) -> int | None:
        """Return a whole number of 0 or more, or None for null."""
        number = self.raw(key, absent)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if number is None:
            return None
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise self.fail(f"{key}={number!r} must be a whole number of 0 or more")
        return number

    def integer(self, key: str, absent: object = _REQUIRED) -> int:
        """Return a whole number of 0 or more."""
        value = self.maybe_integer(key, absent)
        if value is None:
            raise self.fail(f"{key}=null must be a whole number")
        return value

    def number(self, key: str, absent: object = _REQUIRED) -> float:
        """Return a finite number of 0 or more."""
        value = self.raw(key, absent)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise self.fail(f"{key}={value!r} must be a finite number of 0 or more")
        return float(value)

    def flag(self, key: str, absent: object = _REQUIRED) -> bool:
        """Return true or false. null counts as false."""
        value = self.raw(key, absent)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(f"{key}={value!r} must be true or false")
        return value

    def text(self, key: str, absent: object = _REQUIRED) -> str:
        """Return a string."""
        value = self.raw(key, absent)
        if not isinstance(value, str):
            raise self.fail(f"{key}={value!r} must be a string")
        return value

    def inner(self, key: str) -> "Entries | None":
        """Return a nested object, or None if it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.fail(f"{key}={value!r} must be an object")
        return Entries(value, f"{self.where}, {key}")

    def allow(self, key: str, supported: tuple[object, ...]) -> None:
        """Raise HubError if the value of a key is not supported. An absent key is allowed."""
        value = self.values.get(key, supported[0])
        if value not in supported:
            allowed = ", ".join(repr(option) for option in supported if option is not None) or "to leave it out"
            raise self.fail(f"{key}={value!r} is not supported (supported: {allowed})")
