"""Hypothesis strategies: prompts that share prefixes near block edges, group sets, pools that are almost too small."""

import math

import attrs
from hypothesis import strategies as st
from kvledger.testing.commands import TokenRuns
from kvledger.testing.protocol import Supports
from kvledger.testing.scenario import GroupShape, KindName, Scenario

# Weighted towards small blocks, where short histories cross many edges.
BLOCK_SIZES = (4, 4, 4, 4, 5, 8, 8, 16, 32, 64)
_LARGEST_ALIGNMENT = 64


def _near_blocks(block_size: int, most: int) -> st.SearchStrategy[int]:
    """Lengths at, just below and just above a whole number of blocks."""
    return st.builds(
        lambda blocks, off: max(1, blocks * block_size + off), st.integers(0, most), st.sampled_from((0, 1, -1, 2))
    )


@st.composite
def prompts(draw: st.DrawFn, scenario: Scenario) -> TokenRuns:
    """Token runs of a prompt: a prefix of zeros that many prompts share, and a tail that few do."""
    size = max([group.block_size for group in scenario.groups])
    room = scenario.max_model_len
    head = min(draw(_near_blocks(size, 4)), room)
    runs = [(0, head)]
    if draw(st.booleans()) and head < room:
        runs.append((draw(st.integers(1, 2)), min(draw(_near_blocks(size, 2)), room - head)))
    return tuple(runs)


@st.composite
def group_shapes(draw: st.DrawFn, supports: Supports, block_sizes: tuple[int, ...] = BLOCK_SIZES) -> GroupShape:
    """One group that the manager is made for."""
    kind: KindName = draw(st.sampled_from(sorted(supports.kinds)))
    block_size = draw(st.sampled_from(supports.block_sizes or block_sizes))
    match kind:
        case "sliding" | "chunked":
            return GroupShape(kind, block_size, draw(_near_blocks(block_size, 3)))
        case "compressed":
            divisors = [n for n in range(1, block_size + 1) if block_size % n == 0]
            return GroupShape(kind, block_size, draw(st.sampled_from(divisors)))
        case _:
            return GroupShape(kind, block_size)


@st.composite
def scenarios(draw: st.DrawFn, supports: Supports, eviction: str | None = None) -> Scenario:
    """A pool and the rules that the manager supports, with a pool that a few requests fill."""
    # Half of the histories are those of one group of one kind, where every rule is exact and most faults show.
    several = st.lists(group_shapes(supports), min_size=1, max_size=supports.max_groups)
    groups = draw(
        st.one_of(
            group_shapes(attrs.evolve(supports, kinds=supports.kinds & {"full"} or supports.kinds)).map(
                lambda shape: [shape]
            ),
            several,
        ).filter(lambda shapes: math.lcm(*[shape.block_size for shape in shapes]) <= _LARGEST_ALIGNMENT)
    )
    alignment = math.lcm(*[shape.block_size for shape in groups])
    size = max([shape.block_size for shape in groups])

    def option(name: str, values: st.SearchStrategy[int]) -> int:
        return draw(values) if name in supports.options else 0

    retention = option("retention", st.sampled_from((0, 0, 1, 2)))
    return Scenario(
        num_blocks=1 + draw(st.integers(1, 8)) * sum([size // shape.block_size for shape in groups]),
        groups=tuple(groups),
        max_model_len=draw(st.sampled_from((6, 10, 12))) * size + draw(st.integers(-1, 1)),
        max_num_reqs=draw(st.sampled_from((8, 8, 3))),
        enable_caching="no_caching" not in supports.options or draw(st.integers(0, 5)) > 0,
        use_eagle=bool(option("eagle", st.sampled_from((0, 0, 0, 1)))),
        retention_interval=None if not retention else (retention - 1) * alignment * 2,
        watermark_blocks=option("watermark", st.sampled_from((0, 0, 1, 2))),
        release="deferred" if option("deferred", st.sampled_from((0, 0, 1))) else "immediate",
        orphans="drop" if option("drop_orphans", st.sampled_from((0, 1))) else "keep",
        eviction=eviction or draw(st.sampled_from(supports.evictions)),
    )
