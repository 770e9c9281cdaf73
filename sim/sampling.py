"""One prompt, many continuations: parallel samples, beams, and trees of drafts, as the allocator sees them.

All of them share the prompt's blocks by a fork after the prefill and part by copy on write when they diverge inside a
block. What differs is who lives on.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import attrs

from ..core.errors import InputError
from .random_draws import Draws

MOST_BRANCHES = 256


@attrs.frozen
class Forks:
    """What happens between two decode steps, in branches numbered by their place: `forks` are (parent, child) in
    order, where the child takes the place of a branch that ended or is new; `ends` are places freed before.
    """

    ends: tuple[int, ...] = ()
    forks: tuple[tuple[int, int], ...] = ()


class Sampling(Protocol):
    """How a request is decoded by several branches at a time."""

    @property
    def num_branches(self) -> int:
        """The most branches at a time, the first one included."""
        ...

    def steps(self, output_length: int, draws: Draws) -> Iterator[Forks]:
        """What happens before each of the `output_length` steps; each then adds a token to every branch."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Its parameters, for the report."""
        ...


def _width(name: str):
    def check(_: object, __: object, value: int) -> None:
        if not 2 <= value <= MOST_BRANCHES:
            raise InputError(f"{name} is {value}; it must be from 2 to {MOST_BRANCHES}")

    return check


@attrs.frozen
class ParallelSampling:
    """`n` samples of one prompt (the API's `n`), which fork once and never meet again."""

    n: int = attrs.field(validator=_width("--n"))

    @property
    def num_branches(self) -> int:
        """All samples."""
        return self.n

    def steps(self, output_length: int, draws: Draws) -> Iterator[Forks]:
        """One fork of everybody after the prefill."""
        yield Forks(forks=tuple((0, child) for child in range(1, self.n)))
        for _ in range(output_length - 1):
            yield Forks()

    def as_dict(self) -> dict[str, Any]:
        """Its parameters."""
        return {"kind": "parallel sampling", "n": self.n}


@attrs.frozen
class BeamSearch:
    """`beam_width` candidates, of which in each step some are given up for copies of better ones.

    `replaced` is the chance that a beam is replaced in a step by a copy of another, drawn uniformly. How often models
    do that depends on model and prompt and is not known here: it is an assumption, and stated.
    """

    beam_width: int = attrs.field(validator=_width("--beam-width"))
    replaced: float = 0.1

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.replaced <= 1:
            raise InputError(f"--beam-replaced is {self.replaced}; a chance is from 0 to 1")

    @property
    def num_branches(self) -> int:
        """All beams."""
        return self.beam_width

    def steps(self, output_length: int, draws: Draws) -> Iterator[Forks]:
        """A fork of everybody after the prefill, then replacements."""
        width = self.beam_width
        yield Forks(forks=tuple((0, child) for child in range(1, width)))
        for _ in range(output_length - 1):
            yield self._replacements(draws)

    def _replacements(self, draws: Draws) -> Forks:
        ends = tuple(place for place in range(self.beam_width) if draws.happens(self.replaced))
        kept = [place for place in range(self.beam_width) if place not in ends]
        if not kept:  # somebody is the best
            kept, ends = [ends[0]], ends[1:]
        return Forks(ends, tuple((kept[int(draws.uniform() * len(kept))], place) for place in ends))

    def as_dict(self) -> dict[str, Any]:
        """Its parameters."""
        return {"kind": "beam search", "beam_width": self.beam_width, "replaced_per_step": self.replaced}


@attrs.frozen
class DraftTree:
    """Speculative decoding with a tree of drafts: `branching` children at each depth, every path a branch.

    A step verifies all paths at once; the accepted part of the best one stays, and a token comes on top. Each depth is
    accepted with the chance `acceptance`, given the one before.
    """

    branching: tuple[int, ...]
    acceptance: float

    def __attrs_post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise InputError(f"--draft-tree is {self.branching}; give children per depth, such as 3,2,1")
        if self.num_branches > MOST_BRANCHES:
            raise InputError(f"--draft-tree {self.branching} has {self.num_branches} paths; at most {MOST_BRANCHES}")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"--draft-acceptance-rate is {self.acceptance}; a chance is from 0 to 1")

    @property
    def depth(self) -> int:
        """Drafts on a path."""
        return len(self.branching)

    @property
    def num_branches(self) -> int:
        """Paths from the root to a leaf."""
        paths = 1
        for children in self.branching:
            paths *= children
        return paths

    def accepted(self, draws: Draws) -> int:
        """Drafts of the best path that are accepted in one step, 0 to `depth`."""
        count = 0
        while count < self.depth and draws.happens(self.acceptance):
            count += 1
        return count

    def as_dict(self) -> dict[str, Any]:
        """Its parameters."""
        return {"kind": "draft tree", "branching": list(self.branching), "acceptance": self.acceptance}
