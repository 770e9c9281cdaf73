"""Sampling: what sharing saves when one prompt of a scenario's traffic has many continuations."""

from collections.abc import Callable

import attrs

from ...core.errors import InputError
from ..engine.sampling import BeamSearch, DraftTree, ParallelSampling, SamplingReport, run_sampling
from ..figures import Document
from .options import ENGINE, option, options, whole_numbers
from .results import trace_as_dict
from .scenario import Scenario
from .traffic import open_traffic

DEFAULT_BLOCK_SIZE = 16
DEFAULT_REPLACED = 0.1
# Every request is decoded token by token in several branches, so a part of them is enough for a first look.
DEFAULT_LIMIT = 100


@options
class SamplingOptions:
    """One kind of sampling: parallel samples, beams, or a tree of drafts."""

    n: int | None = option(None, ENGINE, "Parallel samples of each prompt.", "--n", metavar="N")
    beam_width: int | None = option(None, ENGINE, "Beams of each prompt.", metavar="N")
    beam_replaced: float | None = option(
        None, ENGINE, f"Chance that a beam is replaced by a copy of another in a step; {DEFAULT_REPLACED} unless given."
    )
    draft_tree: str | None = option(
        None, ENGINE, "Tree of drafts: children at each depth, such as 3,2,1.", metavar="N,..."
    )
    draft_acceptance_rate: float | None = option(
        None, ENGINE, "Chance that a depth of the tree is accepted; with --draft-tree."
    )

    def kind(self) -> ParallelSampling | BeamSearch | DraftTree:
        """The kind that is given. Raises InputError: none or several are, or something does not belong to it."""
        given = {"--n": self.n, "--beam-width": self.beam_width, "--draft-tree": self.draft_tree}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise InputError(
                f"give exactly one of --n, --beam-width and --draft-tree; {' and '.join(chosen) or 'none'} was given"
            )
        if self.beam_replaced is not None and self.beam_width is None:
            raise InputError(f"--beam-replaced {self.beam_replaced} has no effect without --beam-width")
        if (self.draft_acceptance_rate is not None) != (self.draft_tree is not None):
            raise InputError("--draft-tree and --draft-acceptance-rate go together; neither has a default")
        if self.n is not None:
            return ParallelSampling(self.n)
        if self.beam_width is not None:
            return BeamSearch(self.beam_width, DEFAULT_REPLACED if self.beam_replaced is None else self.beam_replaced)
        branching = whole_numbers(self.draft_tree or "", "--draft-tree", "children at each depth", "3,2,1")
        return DraftTree(tuple(branching), self.draft_acceptance_rate or 0.0)


@attrs.frozen(kw_only=True)
class SamplingResult:
    """What sharing saved, with what was run."""

    report: SamplingReport
    trace: Document
    kind: Document
    block_size: int
    seed: int

    def to_dict(self) -> Document:
        """The document of `kvledger sampling --json`."""
        return {
            "trace": self.trace,
            "sampling": self.kind,
            "block_size": self.block_size,
            "seed": self.seed,
            **self.report.as_dict(),
        }


def sample_scenario(
    scenario: Scenario, asked: SamplingOptions, *, on_progress: Callable[[int], None] = lambda count: None
) -> SamplingResult:
    """Run each request alone with its samples, beams or drafts.

    Raises InputError: an option is missing or wrong, or the trace is.
    """
    kind, seed = asked.kind(), scenario.seed or 0
    block_size = DEFAULT_BLOCK_SIZE if scenario.block_size is None else scenario.block_size
    # The seed has an effect on what is drawn here, whatever the trace.
    source = open_traffic(scenario.evolve(seed=None) if scenario.trace else scenario)
    report = run_sampling(source, kind, block_size=block_size, seed=seed, on_progress=on_progress)
    return SamplingResult(
        report=report, trace=trace_as_dict(source.info), kind=kind.as_dict(), block_size=block_size, seed=seed
    )
