"""From the options of `kvledger sampling` to one kind of sampling."""

from ...core.errors import InputError
from ..engine.sampling import BeamSearch, DraftTree, ParallelSampling

DEFAULT_REPLACED = 0.1


def read_sampling(
    n: int | None,
    beam_width: int | None,
    beam_replaced: float | None,
    draft_tree: str | None,
    draft_acceptance_rate: float | None,
) -> ParallelSampling | BeamSearch | DraftTree:
    """Exactly one kind, with what belongs to it. Raises `InputError` for anything else."""
    given = {"--n": n, "--beam-width": beam_width, "--draft-tree": draft_tree}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise InputError(
            f"give exactly one of --n, --beam-width and --draft-tree; {' and '.join(chosen) or 'none'} was given"
        )
    if beam_replaced is not None and beam_width is None:
        raise InputError(f"--beam-replaced {beam_replaced} has no effect without --beam-width")
    if (draft_acceptance_rate is not None) != (draft_tree is not None):
        raise InputError("--draft-tree and --draft-acceptance-rate go together; neither has a default")
    if n is not None:
        return ParallelSampling(n)
    if beam_width is not None:
        return BeamSearch(beam_width, DEFAULT_REPLACED if beam_replaced is None else beam_replaced)
    return DraftTree(_branching(draft_tree or ""), draft_acceptance_rate or 0.0)


def _branching(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(piece) for piece in text.split(","))
    except ValueError:
        raise InputError(f"--draft-tree is {text!r}; give children at each depth, such as 3,2,1") from None
