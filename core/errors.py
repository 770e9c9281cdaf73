"""The errors that users can meet, and validators of attrs fields that raise them.

Each message says what was given, where, what was expected, and what to do.
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeAlias

import attrs


class KVLedgerError(Exception):
    """Base of all errors raised on purpose by kvledger."""


class InputError(KVLedgerError, ValueError):
    """The user's input is wrong (a value, a file, a line). The command line exits with 2."""


class DoesNotFitError(KVLedgerError):
    """The input is valid and the answer is no: it does not fit. The command line exits with 1."""


class MisuseError(KVLedgerError, RuntimeError):
    """A caller of the library broke a rule (double free, stale match, unknown id). Nothing has changed."""


class CorruptLedgerError(KVLedgerError):
    """Events contradict each other: a log cannot be replayed, or a state breaks an invariant."""


Validator: TypeAlias = "Callable[[object, attrs.Attribute[Any], Any], None]"


def at_least(lowest: int) -> Validator:
    """Make an attrs validator: the field is a whole number of at least `lowest`."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
            raise _wrong(instance, attribute, value, f"a whole number of at least {lowest}")

    return check


def one_of(*choices: str) -> Validator:
    """Make an attrs validator: the field is one of `choices`."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value not in choices:
            raise _wrong(instance, attribute, value, f"one of {', '.join(map(repr, choices))}")

    return check


def _wrong(instance: object, attribute: "attrs.Attribute[Any]", value: object, expected: str) -> InputError:
    return InputError(f"{attribute.name} is {value!r}; it must be {expected} ({type(instance).__name__})")


positive = at_least(1)
non_negative = at_least(0)
