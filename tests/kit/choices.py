"""What a history is made of, drawn by whoever chooses: Hypothesis, or a seeded random generator."""

import math
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvledger.testing.commands import TokenRuns
from kvledger.testing.protocol import Supports
from kvledger.testing.scenario import GroupShape, Scenario

# Weighted towards small blocks, where short histories cross many edges.
BLOCK_SIZES = (4, 4, 4, 4, 5, 8, 8, 16, 32, 64)
_LARGEST_ALIGNMENT = 64

Item = TypeVar("Item")


class Chooser(Protocol):
    """Whoever makes the choices. All of them are integers, so that one interface serves them all."""

    def integer(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        ...


class RandomChooser:
    """Choices of a seeded generator: the same seed gives the same history on every machine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self._random.randint(low, high)


def pick(chooser: Chooser, items: Sequence[Item]) -> Item:
    """One of several."""
    return items[chooser.integer(0, len(items) - 1)]


def chance(chooser: Chooser, one_in: int) -> bool:
    """True once in `one_in` times; the unlikely answer is the larger choice, so that shrinking prefers the likely."""
    return chooser.integer(1, one_in) == one_in


def near_blocks(chooser: Chooser, block_size: int, most: int) -> int:
    """A length at, just below or just above a whole number of blocks."""
    return max(1, chooser.integer(0, most) * block_size + pick(chooser, (0, 1, -1, 2)))


def choose_prompt(chooser: Chooser, scenario: Scenario) -> TokenRuns:
    """Token runs of a prompt: a prefix of zeros that many prompts share, and a tail that few do."""
    size = max([group.block_size for group in scenario.groups])
    room = scenario.max_model_len
    head = min(near_blocks(chooser, size, 4), room)
    if head == room or chance(chooser, 2):
        return ((0, head),)
    return ((0, head), (chooser.integer(1, 2), min(near_blocks(chooser, size, 2), room - head)))


def choose_group(chooser: Chooser, supports: Supports) -> GroupShape:
    """One group that the manager is made for."""
    kind = pick(chooser, sorted(supports.kinds))
    block_size = pick(chooser, supports.block_sizes or BLOCK_SIZES)
    if kind in ("sliding", "chunked"):
        return GroupShape(kind, block_size, near_blocks(chooser, block_size, 3))
    if kind == "compressed":
        return GroupShape(kind, block_size, pick(chooser, [n for n in range(1, block_size + 1) if not block_size % n]))
    return GroupShape(kind, block_size)


def choose_groups(chooser: Chooser, supports: Supports) -> tuple[GroupShape, ...]:
    """A group set. Half of them are one group of full attention, where every rule is exact."""
    if "full" in supports.kinds and not chance(chooser, 2):
        return (GroupShape("full", pick(chooser, supports.block_sizes or BLOCK_SIZES)),)
    groups = [choose_group(chooser, supports)]
    for _ in range(chooser.integer(0, supports.max_groups - 1)):
        another = choose_group(chooser, supports)
        if math.lcm(*[group.block_size for group in (*groups, another)]) <= _LARGEST_ALIGNMENT:
            groups.append(another)
    return tuple(groups)


def choose_scenario(chooser: Chooser, supports: Supports, eviction: str | None = None) -> Scenario:
    """A pool that a few requests fill, and the rules that the manager supports."""
    groups = choose_groups(chooser, supports)
    alignment = math.lcm(*[group.block_size for group in groups])
    size = max([group.block_size for group in groups])
    per_unit = sum([size // group.block_size for group in groups])

    def on(option: str, one_in: int) -> bool:
        return option in supports.options and chance(chooser, one_in)

    retention = pick(chooser, (0, 1, 2)) * alignment * 2 if on("retention", 2) else None
    return Scenario(
        num_blocks=1 + chooser.integer(1, 9) * per_unit + chooser.integer(0, 2),
        groups=groups,
        max_model_len=pick(chooser, (10, 6, 14)) * size + chooser.integer(-1, 1),
        max_num_reqs=3 if chance(chooser, 4) else 8,
        enable_caching=not on("no_caching", 6),
        use_eagle=on("eagle", 3),
        retention_interval=retention,
        watermark_blocks=chooser.integer(1, 2) if on("watermark", 3) else 0,
        release="deferred" if on("deferred", 3) else "immediate",
        orphans="drop" if on("drop_orphans", 2) else "keep",
        eviction=eviction or pick(chooser, supports.evictions),
    )
