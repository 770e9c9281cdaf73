"""Looking up a prefix: which cached blocks a request could adopt. Changes nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from ..cache_kinds import CacheKind, FullAttention
from ..events import Key, named_tuple
from ..pool.block_pool import BlockPool
from ..types import Request


class PrefixMatch(NamedTuple):
    """What a lookup found, and the state it saw. `allocate` refuses it once a block of it has changed its content.

    Attributes:
        request_id: the request that looked.
        num_hit_tokens: tokens whose keys and values need not be computed again.
        blocks: for each group, the blocks by logical index; 0 where the group skips.
        keys: for each group, the keys of those blocks at the time of the lookup.
        boundary: the longest hit that some group alone could have served, if longer than the common one, else 0
            (rule 14): worth keeping for the next request under sparse retention.
        sequence: the number of the commit that would have come next.
    """

    request_id: str
    num_hit_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[Key, ...], ...]
    boundary: int
    sequence: int

    def stale_block(self, pool: BlockPool) -> int | None:
        """A block of this match that no longer carries the key it was found under, or None."""
        for group, (blocks, keys) in enumerate(zip(self.blocks, self.keys, strict=True)):
            for block, key in zip(blocks, keys, strict=True):
                # One key names different content in different groups.
                if block and (pool.key_of(block) != key or pool.group_of(block) != group):
                    return block
        return None


class PrefixMatcher:
    """Finds the longest common hit of all groups (rules 10 to 14 of golden/ops).

    Groups of equal kinds are looked up together and must all hit. Full attention comes first, because it can only
    shrink a hit from the right; the other kinds follow, each within the current length, until nothing shrinks.
    """

    def __init__(
        self,
        groups: Sequence[CacheKind],
        hash_block_size: int,
        scheduler_block_size: int,
        use_eagle: bool,
    ) -> None:
        self._num_groups = len(groups)
        self._alignment = scheduler_block_size
        self._hash_block_size = hash_block_size
        self._use_eagle = use_eagle
        members: dict[CacheKind, list[int]] = {}
        for group, kind in enumerate(groups):
            members.setdefault(kind, []).append(group)
        self._kinds = sorted(members.items(), key=lambda item: not isinstance(item[0], FullAttention))
        has_full = any(isinstance(kind, FullAttention) for kind in members)
        # With one group its own hit is the common one, and no boundary lies beyond it.
        self._single = groups[0] if len(groups) == 1 else None
        self._one_pass = len(members) == 1 or (len(members) == 2 and has_full)

    def block_keys(self, request: Request, kind: CacheKind, start: int, stop: int) -> Sequence[Key]:
        """Keys of the group's blocks `start <= i < stop`: the chain value at each block's own end (rule 9)."""
        if request.keys is None:
            return ()
        per_block = kind.block_size // self._hash_block_size
        if per_block == 1:
            return request.keys.keys(start, stop)
        return request.keys.keys(start * per_block, stop * per_block)[per_block - 1 :: per_block]

    def match(self, request: Request, pool: BlockPool, sequence: int) -> PrefixMatch:
        """The longest hit of at most `num_tokens - 1` tokens, so that at least one token is computed (rule 10)."""
        max_length = request.num_prompt_tokens + request.num_output_tokens - 1
        if self._single is not None:
            return self._match_one_group(self._single, request, pool, sequence, max_length)
        length = max_length
        longest = 0
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        # Under EAGLE a hit is found with one more block behind it, which `find_hit` then gives back; without that room
        # a second pass would shrink the hit again and again. That block may be the last one of the request.
        known = request.num_tokens if self._use_eagle else max_length
        keys_of = [self.block_keys(request, kind, 0, known // kind.block_size) for kind, _ in self._kinds]
        while True:
            start_length = length
            for (kind, group_ids), keys in zip(self._kinds, keys_of, strict=True):
                block_size = kind.block_size
                room = length + block_size if self._use_eagle else length
                indexes = [pool.index(group) for group in group_ids]
                hits = kind.find_hit(keys[: room // block_size], indexes, self._alignment, self._use_eagle)
                for group, hit in zip(group_ids, hits, strict=True):
                    found[group] = hit
                hit_length = len(hits[0]) * block_size
                longest = max(longest, hit_length)
                length = min(length, hit_length)
            if self._one_pass or length == start_length:
                break
        blocks: list[tuple[int, ...]] = [()] * self._num_groups
        keys_found: list[tuple[Key, ...]] = [()] * self._num_groups
        for (kind, group_ids), keys in zip(self._kinds, keys_of, strict=True):
            count = length // kind.block_size
            for group in group_ids:
                blocks[group] = tuple(found[group][:count])
                keys_found[group] = tuple(keys[:count])
        boundary = longest if longest > length else 0
        return PrefixMatch(request.request_id, length, tuple(blocks), tuple(keys_found), boundary, sequence)

    def _match_one_group(
        self, kind: CacheKind, request: Request, pool: BlockPool, sequence: int, max_length: int
    ) -> PrefixMatch:
        size = kind.block_size
        source = request.keys
        if size != self._hash_block_size or source is None:
            keys = self.block_keys(request, kind, 0, max_length // size)
        else:
            keys = source.keys(0, max_length // size)
        (blocks,) = kind.find_hit(keys, (pool.index(0),), self._alignment, self._use_eagle)
        count = len(blocks)
        values = (request.request_id, count * size, (tuple(blocks),), (tuple(keys[:count]),), 0, sequence)
        return named_tuple(PrefixMatch, values)
