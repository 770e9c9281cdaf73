"""Validators of attrs fields that hold numbers. Errors name the field, its value and what it must be."""

import math
from collections.abc import Callable
from typing import Any

import attrs

from ..core.errors import InputError, Validator


def must_be(expected: str, is_allowed: Callable[[Any], bool]) -> Validator:
    """Make a validator; its error says that the field must be `expected`."""

    def check(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not is_allowed(value):
            raise InputError(f"{attribute.name} is {value}; it must be {expected}")

    return check


at_least_one = must_be("at least 1", lambda value: value >= 1)
above_zero = must_be("above 0", lambda value: 0 < value < math.inf)
not_negative = must_be("a number, 0 or more", lambda value: 0 <= value < math.inf)
share = must_be("above 0 and at most 1", lambda value: 0 < value <= 1)
chance = must_be("a chance, 0 to 1", lambda value: 0 <= value <= 1)
