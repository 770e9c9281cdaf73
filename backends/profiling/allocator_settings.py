"""The settings string of torch's caching allocator, and a scope in which freed blocks are not split.

Loading weights and a profiling run allocate large blocks, free them, and leave small tensors behind. A small tensor
that was split off a large freed block pins the whole of it: the block cannot be given back, and the reading afterwards
counts it as use. With `max_split_size_mb` at the least value that torch allows, only small blocks are ever split.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ...core.errors import InputError

SMALLEST_MAX_SPLIT_SIZE_MB = 20  # torch refuses anything below
_OPTION = "max_split_size_mb"


class HasAllocatorSettings(Protocol):
    """A device whose allocator can be told its settings as one string (`name:value,name:[a:1,b:2]`)."""

    def allocator_settings(self) -> str:
        """The settings in force, as they were last set."""
        ...

    def set_allocator_settings(self, settings: str) -> None:
        """Put settings in force. torch takes `max_split_size_mb` for unlimited wherever the string leaves it out."""
        ...


def split_settings(settings: str) -> list[str]:
    """The `name:value` entries of a settings string; a comma within brackets does not separate.

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
    """The same settings with this `max_split_size_mb`; every other entry stays as it was, in its order.

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
def scoped_max_split_size(
    device: HasAllocatorSettings, max_split_size_mb: int = SMALLEST_MAX_SPLIT_SIZE_MB
) -> Iterator[None]:
    """Set `max_split_size_mb` for the time of the block; the settings as they stood come back whatever happens."""
    settings = device.allocator_settings()
    device.set_allocator_settings(with_max_split_size(settings, max_split_size_mb))
    try:
        yield
    finally:
        device.set_allocator_settings(settings)
