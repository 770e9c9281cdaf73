"""Reads and prints amounts of memory the way people write them: `8GiB` in, `40.00 GiB (42,949,672,960 B)` out."""

import re
from fractions import Fraction

from .errors import InputError

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_QUANTITY = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def gib_to_bytes(figure: str | int | float) -> int:
    """Convert a GiB figure as printed in a log to whole bytes: `int(Fraction(figure) * 2**30)`, without floats."""
    return int(Fraction(str(figure)) * GIB)


def parse_bytes(text: str, option: str) -> int:
    """Convert `8GiB`, `23.4 GiB`, `512MiB`, `80GB` (decimal, as vendors label) or a bare byte count to whole bytes.

    Raises:
        InputError: `text` is not a number with one of these units; `option` names the place in the message.
    """
    match = _QUANTITY.match(text)
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise InputError(
            f"{option}: {text!r} is not an amount of memory; give bytes (8589934592) or a figure with a unit"
            " (8GiB, 512MiB; 80GB is 80,000,000,000 bytes)"
        )
    amount = Fraction(match.group(1).replace(",", "").replace("_", "")) * factor
    return int(amount)


def format_gib(num_bytes: int | float) -> str:
    """Format bytes as GiB: `42949672960` -> `40.00 GiB`."""
    return f"{num_bytes / GIB:,.2f} GiB"


def format_bytes(num_bytes: int) -> str:
    """Format bytes exactly: `42949672960` -> `40.00 GiB (42,949,672,960 B)`; MiB, KiB or B for small amounts."""
    size = abs(num_bytes)
    if size >= GIB // 100:
        return f"{format_gib(num_bytes)} ({num_bytes:,} B)"
    if size >= KIB:
        unit, name = (MIB, "MiB") if size >= MIB else (KIB, "KiB")
        return f"{num_bytes / unit:,.2f} {name} ({num_bytes:,} B)"
    return f"{num_bytes:,} B"
