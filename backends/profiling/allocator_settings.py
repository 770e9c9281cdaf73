"""Edits the settings string of torch's caching allocator, so that large freed blocks are not split while it matters.

Loading weights and a profiling run allocate large blocks, free them, and leave small tensors behind. A small tensor
that was split off a large freed block pins all of it: the block cannot be released, and the next reading counts it as
used. With `max_split_size_mb` at the smallest value that torch allows, only small blocks are split.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import InputError
from .device import DeviceAccess

SMALLEST_MAX_SPLIT_SIZE_MB = 20  # torch refuses anything below
_OPTION = "max_split_size_mb"


def split_settings(settings: str) -> list[str]:
    """Split a settings string into its `name:value` entries; a comma within brackets does not separate.

    Raises:
        InputError: brackets that do not match.
    """
    entries, depth, start = [], 0, 0
    for index, char in enumerate(settings):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise InputError(f"allocator settings {settings!r}: brackets do not match at character {index + 1}")
        if char == "," and depth == 0:
            entries.append(settings[start:index])
            start = index + 1
    if depth:
        raise InputError(f"allocator settings {settings!r}: a bracket is not closed")
    entries.append(settings[start:])
    return [entry.strip() for entry in entries if entry.strip()]


def with_max_split_size(settings: str, max_split_size_mb: int) -> str:
    """Return the settings with this `max_split_size_mb`; every other entry keeps its value and its place.

    Raises:
        InputError: below 20, which torch refuses.
    """
    if max_split_size_mb < SMALLEST_MAX_SPLIT_SIZE_MB:
        raise InputError(
            f"{_OPTION} {max_split_size_mb}: the smallest value that torch takes is {SMALLEST_MAX_SPLIT_SIZE_MB}"
        )
    others = [entry for entry in split_settings(settings) if entry.partition(":")[0].strip() != _OPTION]
    return ",".join([*others, f"{_OPTION}:{max_split_size_mb}"])


@contextmanager
def scoped_max_split_size(device: DeviceAccess, max_split_size_mb: int = SMALLEST_MAX_SPLIT_SIZE_MB) -> Iterator[None]:
    """Set `max_split_size_mb` inside a `with` block; afterwards the former settings are restored, whatever happens."""
    settings = device.allocator_settings()
    device.set_allocator_settings(with_max_split_size(settings, max_split_size_mb))
    try:
        yield
    finally:
        device.set_allocator_settings(settings)
