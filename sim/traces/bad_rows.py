"""Rows of a trace that cannot be used: what is wrong, in which field, and the checks of single numbers that find it."""

import math
from typing import Any

import attrs

# Far above any model's context (10 million tokens is the longest published), far below what would overflow a counter.
MAX_TOKENS = 100_000_000
# The year 2286 in seconds since 1970; a larger timestamp is in another unit than its format says.
MAX_TIMESTAMP_S = 10_000_000_000
MAX_HASH_ID = 2**63 - 1


@attrs.frozen
class BadRow:
    """One row that cannot be used. `place` is its line (from 1); rows are counted under `reason`, a short fixed key.

    `where` names the place in full (file, line, entry) where the line of the trace's only file does not say it.
    """

    place: int
    field: str | None
    reason: str
    message: str
    where: str | None = None


class RowError(Exception):
    """Raised by the parser of one row; the reader turns it into a `BadRow` that knows its place."""

    def __init__(self, reason: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field

    def at(self, place: int, where: str | None = None) -> BadRow:
        """The same fault, with the line it stands on."""
        return BadRow(place, self.field, self.reason, self.message, where)


def shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}... ({len(text)} characters)"


def finite_number(value: Any, field: str) -> int | float:
    """`value` where it is a number that is finite and not negative; else `RowError`."""
    if type(value) is not int and type(value) is not float:
        raise RowError("not_a_number", f"{shown(value)} is not a number", field)
    if not isinstance(value, int) and not math.isfinite(value):
        raise RowError("not_finite", f"{value} is not a finite number", field)
    if value < 0:
        raise RowError("negative", f"{shown(value)} is negative", field)
    return value


def whole_number(value: Any, field: str, largest: int) -> int:
    """`value` as an int where it is a whole number in [0, largest]; else `RowError`. `512.0` counts as whole."""
    number = finite_number(value, field)
    if number > largest:
        raise RowError("huge", f"{shown(value)} is larger than {largest:,}", field)
    if number != int(number):
        raise RowError("not_whole", f"{shown(value)} is not a whole number", field)
    return int(number)


def num_tokens(value: Any, field: str) -> int:
    """A count of tokens, in [0, MAX_TOKENS]."""
    return whole_number(value, field, MAX_TOKENS)


def timestamp(value: Any, field: str, units_per_second: int) -> int | float:
    """A time since the trace's start or since 1970, in the format's own unit; fractions are allowed."""
    number = finite_number(value, field)
    if number > MAX_TIMESTAMP_S * units_per_second:
        raise RowError(
            "huge",
            f"{shown(value)} is beyond the year 2286 at {units_per_second:,} a second: is it in another unit?",
            field,
        )
    return number


def hash_ids(value: Any, field: str) -> tuple[int, ...]:
    """A list of block ids, each a whole number in [0, 2**63)."""
    if type(value) is not list:
        raise RowError("not_a_list", f"{shown(value)} is not a list of block ids", field)
    are_ints = list(map(type, value)).count(int) == len(value)
    if are_ints and (not value or (min(value) >= 0 and max(value) <= MAX_HASH_ID)):
        return tuple(value)
    return tuple(whole_number(one, f"{field}[{i}]", MAX_HASH_ID) for i, one in enumerate(value))
