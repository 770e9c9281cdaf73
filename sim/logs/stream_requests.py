"""Separates the requests in a stream of stored blocks, which marks neither their beginning nor their end."""

from collections.abc import Callable, Sequence

import attrs

from ...backends.sinks.kv_events.schema import GPU, BlockHash, BlockStored
from ...backends.sinks.kv_events.shadow_pool import ShadowPool
from ..figures import Document


@attrs.define
class SeenRequest:
    """A request: the times of its first and latest store, and its blocks, hits first.

    Attributes:
        arrival_s: time of its first event.
        last_s: time of its latest event.
        chain: hashes of its blocks.
        tokens: tokens of each block; None if the stream does not tell.
        session_id: the session that its first event states, if any.
        num_stored: blocks that it stored.
        tail: token ids of its last block, if that is shorter than the block before it.
    """

    arrival_s: float
    last_s: float
    chain: list[BlockHash] = attrs.Factory(list)
    tokens: list[int | None] = attrs.Factory(list)
    session_id: str | None = None
    num_stored: int = 0
    tail: list[int] = attrs.Factory(list)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of its blocks, of prompt and output together; None if the stream does not tell."""
        known = [each for each in self.tokens if each is not None]
        return sum(known) if len(known) == len(self.tokens) else None

    def add(self, event: BlockStored, hashes: Sequence[BlockHash], sizes: Sequence[int | None]) -> None:
        """Add blocks that an event stores, the last ones of it."""
        self.chain += hashes
        self.tokens += sizes
        self.num_stored += len(hashes)
        before, last = ([None, *self.tokens])[-2:]
        is_shorter = before is not None and last is not None and last < before
        self.tail = event.token_ids[-last:] if is_shorter and last else []

    def is_tail_of(self, event: BlockStored) -> bool:
        """Return whether the first block of an event holds the tokens of the last block here, and more of them."""
        begins = self.chain[-2:-1] == [event.parent_block_hash] and event.token_ids[: len(self.tail)] == self.tail
        return bool(self.tail) and begins and len(event.token_ids) > len(self.tail)

    def row(self, numbers: dict[BlockHash, int], start_s: float) -> Document:
        """The row of a Mooncake trace with the stream's block size; output counts as prompt.

        Block hashes are numbered in the order of their first use.
        """
        return {
            "timestamp": (self.arrival_s - start_s) * 1e3,
            "input_length": self.num_tokens,
            "output_length": 1,
            "hash_ids": [numbers.setdefault(each, len(numbers)) for each in self.chain],
        }


class StreamRequests:
    """Separates the requests in a stream of stored blocks.

    Blocks stored right after the last block of a request continue it (a chunk of its prompt, or its output), if they
    come within `continuation_s`. Any other store begins a request, whose prefix hit is the chain before it. If the
    server reports reuse, blocks that are told again begin a request that hit them; a waiting request whose lookup is
    told several times is still one. A block that is stored in part and later again with more tokens is replaced, not
    followed by a second request.

    Only the GPU's events separate requests, and only those of one group: the first whose hits need every block before
    them. A copy to another medium is no request (field report E05).
    """

    def __init__(self, pool: ShadowPool, continuation_s: float) -> None:
        """`pool` gives prefixes before an event is applied to it; `ended` is called with each ended request."""
        self._pool = pool
        self._continuation_s = continuation_s
        self.ended: Callable[[SeenRequest], None] = lambda request: None
        self._by_tip: dict[BlockHash, SeenRequest] = {}
        self._tip_after: dict[BlockHash, BlockHash] = {}  # the block before a tip that is full in part -> the tip
        self._group: int | None = None
        self.num_requests = 0
        self.num_hit_blocks = 0
        self.num_stored_blocks = 0
        self.num_hit_tokens = 0
        self.num_stored_tokens = 0

    def counts(self, event: BlockStored) -> bool:
        """Return whether an event of the GPU belongs to the group that separates requests."""
        if self._group is None and event.needs_whole_prefix:
            self._group = event.group_idx or 0
        is_of_group = bool(event.block_hashes) and self._group == (event.group_idx or 0)
        return is_of_group and not self._pool.is_end_of_prompt(event)

    @property
    def has_group(self) -> bool:
        """Whether a group that separates requests has stored blocks."""
        return self._group is not None

    def stored(self, event: BlockStored, ts: float, gained: Sequence[BlockHash]) -> None:
        """Apply one store of the group, before the pool does; `gained` has the blocks that are stored by it."""
        hashes, parent = event.block_hashes, event.parent_block_hash
        sizes: Sequence[int | None] = event.tokens_per_block() or [None] * len(hashes)
        sequence = self._continued(event, ts)
        replaced = self._by_tip.pop(hashes[-1], None)
        if not gained and replaced is not None and self._is_told_again(replaced, event, ts):
            sequence, replaced = replaced, None
        else:
            if sequence is None:
                sequence = SeenRequest(ts, ts, session_id=event.session_id)
                self.num_requests += 1
                self._hit(sequence, *self._prefix(parent))
            num_hits = len(hashes) - len(gained)
            self._hit(sequence, hashes[:num_hits], sizes[:num_hits])
            sequence.add(event, hashes[num_hits:], sizes[num_hits:])
            self.num_stored_blocks += len(gained)
            self.num_stored_tokens += sum(each or 0 for each in sizes[num_hits:])
        sequence.last_s = ts
        if replaced is not None:
            self._end(replaced)
        self._by_tip[hashes[-1]] = sequence
        if sequence.tail:
            self._tip_after[sequence.chain[-2]] = hashes[-1]
        self._end_old(ts)

    def forget(self) -> None:
        """End all current requests, because the stream was interrupted."""
        for sequence in self._by_tip.values():
            self.ended(sequence)
        self._by_tip.clear()
        self._tip_after.clear()

    def _continued(self, event: BlockStored, ts: float) -> SeenRequest | None:
        """Take the request that an event continues, if there is one, without a last block that the event replaces."""
        parent = event.parent_block_hash
        if parent is None:
            return None
        tip = self._tip_after.get(parent)
        replaces = tip is not None and self._by_tip[tip].is_tail_of(event)
        sequence = self._by_tip.pop(tip if replaces and tip is not None else parent, None)
        if sequence is None:
            return None
        if ts - sequence.last_s > self._continuation_s:
            self._end(sequence)
            return None
        self._forget_tail(sequence)
        if replaces:
            sequence.chain.pop()
            sequence.tokens.pop()
            sequence.num_stored -= 1
            self.num_stored_blocks -= 1
            self.num_stored_tokens -= len(sequence.tail)
        return sequence

    def _hit(self, sequence: SeenRequest, hashes: Sequence[BlockHash], sizes: Sequence[int | None]) -> None:
        sequence.chain += hashes
        sequence.tokens += sizes
        self.num_hit_blocks += len(hashes)
        self.num_hit_tokens += sum(each or 0 for each in sizes)

    def _is_told_again(self, sequence: SeenRequest, event: BlockStored, ts: float) -> bool:
        """Return whether an event repeats the lookup of a request that waits: it has stored nothing since."""
        is_fresh = ts - sequence.last_s <= self._continuation_s and sequence.session_id == event.session_id
        return is_fresh and not sequence.num_stored and sequence.chain == event.block_hashes

    def _prefix(self, parent: BlockHash | None) -> tuple[list[BlockHash], list[int | None]]:
        """Return the GPU's blocks that lead to `parent`, and the tokens of each."""
        chain: list[BlockHash] = []
        sizes: list[int | None] = []
        at = parent
        while at is not None and len(chain) < len(self._pool.blocks):
            block = self._pool.blocks.get((self._group or 0, at))
            if block is None or GPU not in block.copies:
                break
            chain.append(at)
            sizes.append(block.num_tokens)
            at = block.parent
        return chain[::-1], sizes[::-1]

    def _end_old(self, now: float) -> None:
        """End old requests; they are ordered by their latest store, so the old ones come first."""
        while self._by_tip:
            tip, sequence = next(iter(self._by_tip.items()))
            if now - sequence.last_s <= self._continuation_s:
                return
            del self._by_tip[tip]
            self._end(sequence)

    def _end(self, sequence: SeenRequest) -> None:
        self._forget_tail(sequence)
        self.ended(sequence)

    def _forget_tail(self, sequence: SeenRequest) -> None:
        if sequence.tail and self._tip_after.get(sequence.chain[-2]) == sequence.chain[-1]:
            del self._tip_after[sequence.chain[-2]]
