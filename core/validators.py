"""Checks of attrs fields that name the class, the field and the value, as `InputError`."""

from collections.abc import Callable
from typing import Any

import attrs

from .errors import InputError


def positive(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """An attrs validator: the field is a whole number of at least 1."""
    _at_least(1, instance, attribute, value)


def non_negative(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """An attrs validator: the field is a whole number of at least 0."""
    _at_least(0, instance, attribute, value)


def one_of(*choices: str) -> "Callable[[object, attrs.Attribute[Any], Any], None]":
    """An attrs validator: the field is one of `choices`."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise InputError(f"{type(instance).__name__}.{attribute.name} is {value!r}; it must be one of {known}")

    return check


def _at_least(lowest: int, instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        expected = f"a whole number of at least {lowest}"
        raise InputError(f"{type(instance).__name__}.{attribute.name} is {value!r}; it must be {expected}")
