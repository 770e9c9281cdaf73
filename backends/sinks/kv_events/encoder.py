"""Encodes the commits of an allocator, and those of its tiers, as the KV events that vLLM would publish."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ....core import events
from ....core.cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from ....core.errors import InputError, MisuseError
from ....core.events import POOL, Commit, Key, TierCommit, TiersCreated, as_ints
from ....core.keys.block_hash import key_low64
from ..log.keys import encode_key
from .content import ContentRegistry, RequestContent
from .schema import GPU, WIRES, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent, Wire

# vLLM's name for each kind of group; it has no name of its own for compressed states.
KIND_NAMES: Final[Mapping[type, str]] = {
    FullAttention: "full_attention",
    CompressedState: "mla_attention",
    SlidingWindow: "sliding_window",
    ChunkedLocal: "chunked_local_attention",
    SequenceState: "mamba",
}
# The same where the model has latent attention, whose groups live like those of full attention.
LATENT_KIND_NAMES: Final[Mapping[type, str]] = {**KIND_NAMES, FullAttention: "mla_attention"}
# The names that vLLM's offloading gives the tiers.
MEDIA: Final[Mapping[str, str]] = {"host": "CPU", "ssd": "STORAGE"}


def block_hash(key: Key) -> BlockHash:
    """Return a key in its wire form: bytes unchanged, integers as unsigned 64 bits, others as a SHA-256 hash.

    Negative integers (a trace's partial blocks) take the upper half of the unsigned range, which no positive key that
    stays an integer uses.
    """
    if isinstance(key, bytes):
        return key
    if isinstance(key, int) and -(1 << 63) <= key < 1 << 63:
        return key if key >= 0 else key + (1 << 64)
    return hashlib.sha256(encode_key(key)).digest()


def block_hash_low64(key: Key) -> int:
    """Return the last 64 bits of a key's wire form, as servers configured for 64-bit hashes send it."""
    hashed = block_hash(key)
    return hashed if isinstance(hashed, int) else key_low64(hashed)


class KVEventEncoder:
    """Encodes each commit of one allocator as the events that vLLM would publish.

    `wire="vllm"` matches vLLM event for event (golden/events): one `BlockStored` for each group and request that was
    looked at, perhaps without hashes, and one `BlockRemoved` for each block. `wire="strict"` does what field report E01
    asks for: consecutive hashes with their own tokens and the hash just before them, no event if nothing was stored,
    and the removed blocks of a group in one event. Both describe the same set of blocks.
    """

    def __init__(
        self,
        contents: ContentRegistry,
        wire: Wire = "vllm",
        as_hash: Callable[[Key], BlockHash] = block_hash,
        medium: str = GPU,
        kind_names: Mapping[type, str] = KIND_NAMES,
    ) -> None:
        """Start before the first commit.

        Args:
            contents: tokens and keys of the requests.
            wire: "vllm" or "strict".
            as_hash: turns a key into its wire form: `block_hash` or `block_hash_low64`.
            medium: the memory that holds the blocks.
            kind_names: `kv_cache_spec_kind` by kind of group; others are "unknown". `LATENT_KIND_NAMES` for a model
                with latent attention.
        """
        if wire not in WIRES:
            raise InputError(f"wire is {wire!r}; it must be one of {', '.join(WIRES)}")
        self._contents = contents
        self._wire = wire
        self._as_hash = as_hash
        self._medium = medium
        self._kind_names = kind_names
        self._groups: tuple[CacheKind, ...] = ()
        self._hash_block_size = 0
        self._request_in: dict[int, str] = {}

    def encode(self, commit: Commit) -> list[KVCacheEvent]:
        """Return the events of one commit, in order; often none."""
        out: list[KVCacheEvent] = []
        for event in commit.events:
            match event:
                case events.BlocksCached():
                    self._stored(event, out)
                case events.BlocksAllocated() if event.lost_keys:
                    self._removed(event.lost_keys, event.lost_groups, out)
                case events.BlockCopied() if event.lost_key is not None:
                    self._removed((event.lost_key,), (event.lost_group,), out)
                case events.BlocksUncached():
                    self._removed(event.keys, as_ints(event.groups), out)
                case events.CacheReset():
                    out.append(AllBlocksCleared())
                case events.RowsAssigned():
                    self._request_in.update(zip(as_ints(event.rows), event.requests, strict=True))
                case events.RowsReleased():
                    for row in as_ints(event.rows):
                        self._request_in.pop(row, None)
                case events.PoolCreated():
                    self._groups, self._hash_block_size = event.groups, event.hash_block_size
                case _:
                    pass
        return out

    def _removed(self, keys: Sequence[Key | None], groups: Sequence[int], out: list[KVCacheEvent]) -> None:
        pairs = zip(keys, groups or (0,) * len(keys), strict=True)
        lost = [(self._as_hash(key), group) for key, group in pairs if key is not None]
        if self._wire == "vllm":
            out += [BlockRemoved([hashed], self._medium, group) for hashed, group in lost]
            return
        by_group: dict[int, list[BlockHash]] = {}
        for hashed, group in lost:
            by_group.setdefault(group, []).append(hashed)
        out += [BlockRemoved(hashes, self._medium, group) for group, hashes in by_group.items()]

    def _stored(self, event: events.BlocksCached, out: list[KVCacheEvent]) -> None:
        indices = as_ints(event.indices)
        begin = 0
        ranges = zip(
            as_ints(event.rows), as_ints(event.starts), as_ints(event.stops), as_ints(event.counts), strict=True
        )
        for place, (row, start, stop, count) in enumerate(ranges):
            keys, own = event.keys[begin : begin + count], indices[begin : begin + count]
            begin += count
            content = self._content_in(row)
            if start == stop and keys:
                out.append(self._prompt_end(content, event.group, start, keys[0]))
            elif self._wire == "vllm":
                parent = event.parents[place]
                hashed_parent = None if parent is None else self._as_hash(parent)
                out.append(self._event(content, event.group, own, keys, hashed_parent, (start, stop)))
            else:
                self._stored_runs(content, event.group, own, keys, out)

    def _prompt_end(self, content: RequestContent, group: int, index: int, key: Key) -> BlockStored:
        """Encode the end of a prompt inside a block (rule 23): one block of the size that keys have."""
        size = self._hash_block_size
        per_block = self._groups[group].block_size // size
        chain = list(content.keys.keys(index * per_block, (index + 1) * per_block))
        at = index * per_block + chain.index(key)
        before = content.keys.keys(at - 1, at) if at else ()
        parent = self._as_hash(before[0]) if before else None
        return self._event(content, group, (at,), (key,), parent, (at, at + 1), size)

    def _stored_runs(
        self, content: RequestContent, group: int, indices: Sequence[int], keys: Sequence[Key], out: list[KVCacheEvent]
    ) -> None:
        """Add one event for each run of consecutive blocks; its parent is the block just before, registered or not."""
        begin = 0
        for end in range(1, len(indices) + 1):
            if end < len(indices) and indices[end] == indices[end - 1] + 1:
                continue
            first = indices[begin]
            parent = self._as_hash(self._key_of_block(content, group, first - 1)) if first else None
            run = indices[begin:end]
            out.append(self._event(content, group, run, keys[begin:end], parent, (first, run[-1] + 1)))
            begin = end

    def _key_of_block(self, content: RequestContent, group: int, index: int) -> Key:
        """Return the hash chain's value at the end of a block, whether or not the block is still cached."""
        at = (index + 1) * self._groups[group].block_size // self._hash_block_size - 1
        (key,) = content.keys.keys(at, at + 1)
        return key

    def _event(
        self,
        content: RequestContent,
        group: int,
        indices: Sequence[int],
        keys: Sequence[Key],
        parent: BlockHash | None,
        blocks: tuple[int, int],
        block_size: int = 0,
    ) -> BlockStored:
        kind = self._groups[group]
        size = block_size or kind.block_size
        # As many extra keys as hashes, or None if there are no hashes.
        extra_keys: list[Any] | None = None
        if indices:
            first, of_range = indices[0], None
            if content.extra_keys is not None:
                of_range = content.extra_keys(first, indices[-1] + 1, size)
            extra_keys = [None if of_range is None else of_range[index - first] for index in indices]
        return BlockStored(
            block_hashes=[self._as_hash(key) for key in keys],
            parent_block_hash=parent,
            token_ids=list(content.tokens.token_ids(blocks[0] * size, blocks[1] * size)),
            block_size=size,
            lora_id=content.lora_id,
            medium=self._medium,
            lora_name=content.lora_name,
            extra_keys=extra_keys,
            group_idx=group,
            kv_cache_spec_kind=self._kind_names.get(type(kind), "unknown"),
            kv_cache_spec_sliding_window=kind.window if isinstance(kind, SlidingWindow) else None,
        )

    def _content_in(self, row: int) -> RequestContent:
        request_id = self._request_in.get(row)
        if request_id is None:
            raise MisuseError(f"row {row} caches blocks but no request holds it: the encoder missed a RowsAssigned")
        return self._contents.content_of(request_id)


class TierEventEncoder:
    """Encodes the commits of one engine's tiers: `BlockStored` and `BlockRemoved` with the tier as `medium`.

    A server with offloading publishes these beside its GPU's events. As in vLLM's offloading connector, stored blocks
    have neither tokens nor a parent: the GPU's event of the same hashes has them. `KVEventEncoder` encodes what the
    pool itself gains or loses.
    """

    def __init__(
        self, as_hash: Callable[[Key], BlockHash] = block_hash, media: Mapping[str, str] = MEDIA, group_idx: int = 0
    ) -> None:
        """Start before the first commit.

        Args:
            as_hash: turns a key into its wire form: `block_hash` or `block_hash_low64`.
            media: the medium of each tier by its name; a tier that is not named here is its own medium.
            group_idx: the group whose blocks the tiers keep.
        """
        self._as_hash = as_hash
        self._names = media
        self._group = group_idx
        self._created: TiersCreated | None = None

    def encode(self, commit: TierCommit) -> list[KVCacheEvent]:
        """Return the events of one commit in the order of the moves; each move's removal comes before its storing."""
        out: list[KVCacheEvent] = []
        for event in commit.events:
            if isinstance(event, TiersCreated):
                self._created = event
                continue
            hashes = [self._as_hash(key) for key in event.keys]
            if event.from_tier != POOL:
                out.append(BlockRemoved(hashes, self._medium(event.from_tier), self._group))
            if event.to_tier is not None and event.to_tier != POOL:
                medium, size = self._medium(event.to_tier), self._tiers().block_size
                out.append(BlockStored(hashes, None, [], size, medium=medium, group_idx=self._group))
        return out

    def _medium(self, tier: int) -> str:
        name = self._tiers().names[tier - 1]
        return self._names.get(name, name)

    def _tiers(self) -> TiersCreated:
        if self._created is None:
            raise MisuseError("blocks moved between tiers that no TiersCreated has named: the encoder came too late")
        return self._created
