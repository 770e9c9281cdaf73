"""Draft tokens and branches: how many drafts are accepted, and what sharing saves if one prompt has many continuations.

`run_sampling` runs each request alone through the allocator, with its own forks and copies: prefill, fork, then token
by token until its last one, in the branches of its sampling method. The figures are those of PagedAttention
(SOSP'23, section 6.3): blocks saved by sharing divided by the blocks that the branches would hold without it, both
summed over all decode steps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.errors import InputError
from ...core.events import BlockCopied, BlocksShared, Commit, FreeReason
from ...core.types import Request
from ..random_draws import Draws
from ..traces.trace import TraceRequest

MOST_BRANCHES = 256


class DraftAcceptance:
    """Accepts each draft with probability `rate` if the draft before it was accepted; the first rejection ends the run.

    The expected number of accepted drafts out of K is `rate + rate^2 + ... + rate^K` (Leviathan et al., 2023).
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        if not 0 <= rate <= 1:
            raise InputError(f"the acceptance rate of drafts is a probability within 0 and 1, not {rate}")
        self._rate = rate
        self._seed = seed
        self._random = np.random.Generator(np.random.PCG64(seed))

    def accepted(self, num_draft_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Accepted drafts of each request: int64 `[num_reqs]`; the same for the same seed and earlier calls."""
        width = int(num_draft_tokens.max(initial=0))
        right = self._random.random((len(num_draft_tokens), width)) < self._rate
        right &= np.arange(width) < num_draft_tokens[:, None]
        return np.cumprod(right, axis=1, dtype=np.int64).sum(axis=1)

    def assumptions(self) -> dict[str, object]:
        return {"draft_acceptance_rate": self._rate, "draft_seed": self._seed}


# Changes of branches between two decode steps. A branch is known by its place, a number: the places of branches that
# are freed first, and (parent, child) places, where the child is new or takes the place of a branch that ended.
Forks = tuple[Sequence[int], Sequence[tuple[int, int]]]

# How a request is decoded by several branches at a time. `num_branches` counts the most branches, the first included;
# `steps` yields the forks before each of the `output_length` steps, each of which adds a token to every branch.


def _check_width(name: str, value: int) -> None:
    if not 2 <= value <= MOST_BRANCHES:
        raise InputError(f"{name} is {value}; it must be from 2 to {MOST_BRANCHES}")


@attrs.frozen
class ParallelSampling:
    """`n` samples of one prompt (the API's `n`), which fork once."""

    n: int

    def __attrs_post_init__(self) -> None:
        _check_width("--n", self.n)

    @property
    def num_branches(self) -> int:
        return self.n

    def steps(self, output_length: int, draws: Draws) -> Iterator[Forks]:
        """One fork of every sample after the prefill."""
        yield (), [(0, child) for child in range(1, self.n)]
        for _ in range(output_length - 1):
            yield (), ()

    def as_dict(self) -> dict[str, object]:
        return {"kind": "parallel sampling", "n": self.n}


@attrs.frozen
class BeamSearch:
    """`beam_width` candidates; in each step, copies of better beams replace some of them.

    `replaced` is the probability that a copy of another beam, drawn uniformly, replaces a beam in a step. The real
    frequency depends on model and prompt and is not known here: `replaced` is an assumption, and the report states it.
    """

    beam_width: int
    replaced: float = 0.1

    def __attrs_post_init__(self) -> None:
        _check_width("--beam-width", self.beam_width)
        if not 0 <= self.replaced <= 1:
            raise InputError(f"--beam-replaced is {self.replaced}; a chance is from 0 to 1")

    @property
    def num_branches(self) -> int:
        return self.beam_width

    def steps(self, output_length: int, draws: Draws) -> Iterator[Forks]:
        """A fork of every beam after the prefill, then replacements."""
        yield (), [(0, child) for child in range(1, self.beam_width)]
        for _ in range(output_length - 1):
            ends = [place for place in range(self.beam_width) if draws.happens(self.replaced)]
            kept = [place for place in range(self.beam_width) if place not in ends]
            if not kept:  # the best beam always stays
                kept, ends = [ends[0]], ends[1:]
            yield ends, [(kept[int(draws.uniform() * len(kept))], place) for place in ends]

    def as_dict(self) -> dict[str, object]:
        return {"kind": "beam search", "beam_width": self.beam_width, "replaced_per_step": self.replaced}


@attrs.frozen
class DraftTree:
    """Speculative decoding with a tree of drafts: `branching` children at each depth, every path a branch.

    A step verifies all paths at once; the accepted part of the best path stays, plus one token. Each depth is accepted
    with probability `acceptance` if the depth before it was.
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
    def num_branches(self) -> int:
        return prod(self.branching)  # paths from the root to a leaf

    def accepted(self, draws: Draws) -> int:
        """Drafts of the best path that are accepted in one step, 0 to the depth of the tree."""
        count = 0
        while count < len(self.branching) and draws.happens(self.acceptance):
            count += 1
        return count

    def as_dict(self) -> dict[str, object]:
        return {"kind": "draft tree", "branching": list(self.branching), "acceptance": self.acceptance}


@attrs.define
class SamplingReport:
    """Totals over all requests."""

    num_requests: int = 0
    num_steps: int = 0  # decode steps of all requests
    num_forks: int = 0  # branches that began as a fork
    num_copied_blocks: int = 0  # blocks copied because a branch wrote into a shared block
    held_block_steps: int = 0  # blocks held, summed over steps
    unshared_block_steps: int = 0  # blocks that the branches would hold without sharing, summed over steps
    max_held_blocks: int = 0  # the most blocks that one request held
    sum_of_savings: float = 0.0  # sum of each request's own saving
    num_output_tokens: int = 0  # tokens of the results: samples, beams, or the one answer that drafts speed up
    num_branch_tokens: int = 0  # tokens that got a slot in any branch

    @property
    def saving(self) -> float:
        """The share of blocks that sharing saves."""
        return 1 - self.held_block_steps / self.unshared_block_steps if self.unshared_block_steps else 0.0

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        steps = max(self.num_steps, 1)
        return {
            **attrs.asdict(self, filter=lambda field, _: field.name != "sum_of_savings"),
            "memory_saving": self.saving,
            "mean_memory_saving_per_request": self.sum_of_savings / max(self.num_requests, 1),
            "copied_blocks_per_step": self.num_copied_blocks / steps,
            "output_tokens_per_step": self.num_output_tokens / steps,
        }


def run_sampling(
    requests: Iterable[TraceRequest],
    sampling: ParallelSampling | BeamSearch | DraftTree,
    *,
    block_size: int = 16,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> SamplingReport:
    """Run every request alone through a real allocator, with its forks and copies on write.

    Only the lengths of requests are used: prompts of different requests share nothing here. `on_progress` is called
    with the number of finished requests. Raises `InputError` for a block size below 1 token.
    """
    if block_size < 1:
        raise InputError(f"--block-size is {block_size}; it must be 1 token or more")
    report, draws = SamplingReport(), Draws(seed)
    for count, request in enumerate(requests, 1):
        held, unshared = report.held_block_steps, report.unshared_block_steps
        _OneRequest(request, sampling, block_size, report).run(draws)
        report.num_requests = count
        report.sum_of_savings += 1 - (report.held_block_steps - held) / (report.unshared_block_steps - unshared)
        if on_progress is not None:
            on_progress(count)
    return report


class _OneRequest:
    """The branches of one request, by place; a fork may take the place of a branch that ended."""

    def __init__(
        self,
        request: TraceRequest,
        sampling: ParallelSampling | BeamSearch | DraftTree,
        block_size: int,
        report: SamplingReport,
    ) -> None:
        self._prompt = request.input_length
        self._output = max(request.output_length, 1)
        self._sampling = sampling
        self._report = report
        depth = len(sampling.branching) if isinstance(sampling, DraftTree) else 0
        longest = self._prompt + self._output + depth + 1
        num_branches = sampling.num_branches + 1
        config = AllocatorConfig(
            num_blocks=num_branches * (longest // block_size + 2) + 1,
            groups=[FullAttention(block_size)],
            max_model_len=longest,
            max_num_reqs=num_branches,
            enable_caching=False,
        )
        self._allocator = KVCacheAllocator(config, sinks=[self])
        self._branches: dict[int, str] = {}
        self._num_named = 0

    def apply(self, commit: Commit) -> None:
        """Count the allocator's copies and forks."""
        for event in commit.events:
            if type(event) is BlockCopied:
                self._report.num_copied_blocks += 1
            elif type(event) is BlocksShared:
                self._report.num_forks += 1

    def run(self, draws: Draws) -> None:
        """Prefill, then run every step."""
        first = self._new_request()
        self._allocator.allocate(first, self._prompt)
        self._branches[0] = first.request_id
        if isinstance(self._sampling, DraftTree):
            self._verify_trees(self._sampling, draws)
        else:
            for ends, forks in self._sampling.steps(self._output, draws):
                for place in ends:
                    self._allocator.free(self._branches.pop(place), FreeReason.ABORTED)
                self._branches.update([(place, self._forked(self._branches[parent])) for parent, place in forks])
                self._append()
                self._account()
            self._report.num_output_tokens += self._output * len(self._branches)

    def _verify_trees(self, tree: DraftTree, draws: Draws) -> None:
        """Until the answer is complete: grow the tree depth by depth, then keep the accepted part of one path."""
        produced = 0
        while produced < self._output:
            self._append()
            for children in tree.branching:
                parents = list(self._branches.values())
                for parent in parents:
                    for _ in range(children - 1):
                        self._branches[len(self._branches)] = self._forked(parent)
                self._append()
            self._account()
            accepted = min(tree.accepted(draws), self._output - produced - 1)
            winner = int(draws.uniform() * len(self._branches)) if accepted else 0
            kept = self._branches[winner]
            for place, name in self._branches.items():
                if place != winner:
                    self._allocator.free(name, FreeReason.ABORTED)
            self._branches = {0: kept}
            produced += accepted + 1
            self._allocator.truncate(kept, self._prompt + produced)
        self._report.num_output_tokens += self._output

    def _append(self) -> None:
        """Append the next token to every branch."""
        self._allocator.append(self._rows())
        self._report.num_branch_tokens += len(self._branches)

    def _account(self) -> None:
        """Count the blocks that the branches hold after a step, with and without sharing."""
        report = self._report
        held = self._allocator.pool.num_held_blocks
        unshared = sum(self._allocator.state.tables[0].count(row) for row in self._rows().tolist())
        report.num_steps += 1
        report.held_block_steps += held
        report.unshared_block_steps += unshared
        report.max_held_blocks = max(report.max_held_blocks, held)

    def _rows(self) -> NDArray[np.int64]:
        return np.array([self._allocator.row_of(name) for name in self._branches.values()], dtype=np.int64)

    def _forked(self, parent: str) -> str:
        child = self._new_request()
        self._allocator.fork(parent, child)
        return child.request_id

    def _new_request(self) -> Request:
        self._num_named += 1
        return Request(f"{self._num_named}", self._prompt, self._output)
