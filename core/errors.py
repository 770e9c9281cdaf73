"""Every error that a user can meet. Each message says what was given, where, what was expected, and what to do."""

from collections.abc import Callable
from typing import Any

import attrs


class KVLedgerError(Exception):
    """Base of all errors raised on purpose by kvledger."""


class InputError(KVLedgerError, ValueError):
    """What the user gave is wrong (a value, a file, a line). The command line exits with 2."""


class DoesNotFitError(KVLedgerError):
    """The question was understood and the answer is no: it does not fit. The command line exits with 1."""


class MisuseError(KVLedgerError, RuntimeError):
    """A caller of the library broke a rule (double free, stale match, unknown id). Nothing has changed."""


class CorruptLedgerError(KVLedgerError):
    """Events that do not add up: a log that cannot be replayed, or a state that breaks an invariant."""


# Checks of attrs fields that name the class, the field and the value, as `InputError`.


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
