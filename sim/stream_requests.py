"""Requests as a stream of KV events shows them: each begins behind the longest prefix that it found."""

from collections.abc import Callable
from typing import Any

import attrs

from ..backends.sinks.kv_events import BlockHash, BlockStored
from ..backends.sinks.shadow_pool import ShadowPool


@attrs.define
class _Sequence:
    """A request that may still go on.

    Attributes:
        began: the time of its first store.
        last: the time of its latest one.
        chain: every block so far, found or stored.
        block_size: tokens a block.
    """

    began: float
    last: float
    chain: list[BlockHash]
    block_size: int


@attrs.frozen
class SeenRequest:
    """A request that has ended, as far as one can tell.

    Attributes:
        arrival_s: when its first block was stored.
        chain: the hashes of its blocks, those that it found first.
        block_size: tokens a block.
    """

    arrival_s: float
    chain: tuple[BlockHash, ...]
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of whole blocks; prompt and output are not told apart."""
        return len(self.chain) * self.block_size


class StreamRequests:
    """Tells requests apart in a stream of stored blocks.

    Blocks stored right behind the last block of a sequence go on with it (a chunk of its prompt, or its output), if
    they come within `continuation_s`; every other store begins a request, whose hit is what stands before it.

    Attributes:
        block_size: tokens a block.
        num_requests: requests begun.
        num_hit_blocks: blocks that they found.
        num_stored_blocks: blocks that they stored.
    """

    def __init__(
        self, pool: ShadowPool, continuation_s: float, ended: Callable[[SeenRequest], None] | None = None
    ) -> None:
        """`pool` is asked for prefixes before an event is applied to it; `ended` is given each request at its end."""
        self._pool = pool
        self._continuation_s = continuation_s
        self.ended = ended
        self._by_tip: dict[BlockHash, _Sequence] = {}
        self._group: int | None = None
        self.block_size = 0
        self.num_requests = 0
        self.num_hit_blocks = 0
        self.num_stored_blocks = 0

    @property
    def hit_rate(self) -> float | None:
        """Blocks found over blocks found or stored; None before the first request."""
        blocks = self.num_hit_blocks + self.num_stored_blocks
        return self.num_hit_blocks / blocks if blocks else None

    def group_of(self, event: BlockStored, kind: str) -> int | None:
        """The group by which requests are told apart: the first one of this kind (or of no kind stated) that stores."""
        if self._group is None and event.kv_cache_spec_kind in (None, kind):
            self._group = event.group_idx or 0
        return self._group

    def stored(self, event: BlockStored, ts: float) -> None:
        """Take in one store of the group, before the pool does."""
        hashes, parent = event.block_hashes, event.parent_block_hash
        self.num_stored_blocks += len(hashes)
        self.block_size = event.block_size
        sequence = self._by_tip.pop(parent, None) if parent is not None else None
        if sequence is not None and ts - sequence.last > self._continuation_s:
            self._end(sequence)
            sequence = None
        if sequence is None:
            prefix = self._prefix(parent)
            self.num_requests += 1
            self.num_hit_blocks += len(prefix)
            sequence = _Sequence(ts, ts, prefix, event.block_size)
        sequence.chain += hashes
        sequence.last = ts
        replaced = self._by_tip.pop(hashes[-1], None)
        if replaced is not None:
            self._end(replaced)
        self._by_tip[hashes[-1]] = sequence
        self._end_old(ts)

    def forget(self) -> None:
        """The stream was cut: what was going on has ended."""
        for sequence in self._by_tip.values():
            self._end(sequence)
        self._by_tip.clear()

    def _prefix(self, parent: BlockHash | None) -> list[BlockHash]:
        chain: list[BlockHash] = []
        at = parent
        while at is not None and len(chain) < len(self._pool.blocks):
            block = self._pool.blocks.get((self._group or 0, at))
            if block is None:
                break
            chain.append(at)
            at = block.parent
        return chain[::-1]

    def _end_old(self, now: float) -> None:
        """Sequences stand in the order of their latest store, so the old ones are at the front."""
        while self._by_tip:
            tip, sequence = next(iter(self._by_tip.items()))
            if now - sequence.last <= self._continuation_s:
                return
            del self._by_tip[tip]
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        if self.ended is not None:
            self.ended(SeenRequest(sequence.began, tuple(sequence.chain), sequence.block_size))


class HashNumbers:
    """Numbers hashes in first-seen order: the `hash_ids` of a trace."""

    def __init__(self) -> None:
        self._numbers: dict[BlockHash, int] = {}

    def row(self, request: SeenRequest, start_s: float) -> dict[str, Any]:
        """The row of a Mooncake trace whose block size is the stream's; output cannot be told from prompt."""
        return {
            "timestamp": (request.arrival_s - start_s) * 1e3,
            "input_length": request.num_tokens,
            "output_length": 1,
            "hash_ids": [self._numbers.setdefault(each, len(self._numbers)) for each in request.chain],
        }
