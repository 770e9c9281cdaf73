"""Formats figures for people (shares, memory, counts, durations), finds one in a document, and checks fields of one."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from ..core.errors import InputError, Validator

# A JSON document or a part of one, as `to_dict` returns, `--json` prints, and sim/report draws.
Document: TypeAlias = dict[str, Any]

GIB = 1 << 30
TIB = GIB << 10
MINUTE_S = 60
HOUR_S = 3_600


def gib(num_bytes: float) -> str:
    """`1073741824` -> `1.00 GiB`."""
    return f"{num_bytes / GIB:,.2f} GiB"


def memory(num_bytes: int) -> str:
    """`67108864000` -> `62.5 GiB`; one decimal, for narrow columns."""
    return f"{num_bytes / TIB:,.1f} TiB" if num_bytes >= 1_000 * GIB else f"{num_bytes / GIB:,.1f} GiB"


def percent(share: float, digits: int = 2) -> str:
    """`0.25` -> `25.00 %`."""
    return f"{share * 100:.{digits}f} %"


def millions(count: int) -> str:
    """`144793823` -> `144.8 M`."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:,.1f} G"
    return f"{count / 1e6:,.1f} M" if count >= 1_000_000 else f"{count:,}"


def duration(seconds: float) -> str:
    """`90.0` -> `1.5 min`."""
    if seconds >= HOUR_S:
        return f"{seconds / HOUR_S:,.1f} h"
    return f"{seconds / MINUTE_S:,.1f} min" if seconds >= MINUTE_S else f"{seconds:,.1f} s"


def seconds(value: float | None) -> str:
    """`0.0123` -> `12.3 ms`; `None` -> `-` (no sample)."""
    if value is None:
        return "-"
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def shown(value: Any) -> str:
    """Format a value of a JSON document for people."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(item)}" for key, item in value.items())
    return str(value)


def at_path(document: Document, path: str) -> Any:
    """`replay.ttft_s.p99` -> that figure of a document; list items by index."""
    value: Any = document
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def figure_at(document: Document, path: str) -> Any:
    """`at_path` for a path that a person typed. Raises InputError if the document has no such figure."""
    try:
        return at_path(document, path)
    except (KeyError, IndexError, ValueError, TypeError):
        raise InputError(f"the result has no figure {path!r}; it has {', '.join(document)}") from None


# Validators of attrs fields that hold a number. Errors name the field, its value and what it must be.


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
