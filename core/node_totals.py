"""Figures of a whole node beside those of one rank: what multiplies with parallelism and what does not."""

from collections.abc import Sequence

import attrs

from .errors import InputError
from .planning import KVCachePlan


@attrs.frozen(kw_only=True)
class NodeTotals:
    """All engines of a deployment together.

    Attributes:
        num_engines: data-parallel ranks; each is an engine of its own, with blocks and block tables of its own.
        num_ranks: devices of all engines.
        kv_cache_bytes: bytes of all buffers.
        kv_cache_tokens: tokens that all engines hold.
        max_concurrency: requests of the longest length over all engines.
        notes: what multiplies and what does not.
    """

    num_engines: int
    num_ranks: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    max_concurrency: float
    notes: tuple[str, ...]


def node_totals(engines: Sequence[KVCachePlan]) -> NodeTotals:
    """Totals over the engines of a deployment.

    Raises:
        InputError: no engine was given.
    """
    if not engines:
        raise InputError("node totals need the plan of at least one engine")
    return NodeTotals(
        num_engines=len(engines),
        num_ranks=sum(len(engine.ranks) for engine in engines),
        kv_cache_bytes=sum(rank.bytes_used for engine in engines for rank in engine.ranks),
        kv_cache_tokens=sum(engine.kv_cache_size_tokens for engine in engines),
        max_concurrency=sum(engine.max_concurrency for engine in engines),
        notes=(
            "tensor and pipeline parallelism multiply bytes but not tokens: all ranks of an engine hold parts of the "
            "same tokens",
            "data parallelism multiplies both bytes and tokens: every engine holds tokens of its own, and a prefix "
            "cached by one is not seen by another",
        ),
    )
