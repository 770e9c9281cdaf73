"""KV events as vLLM 0.32 publishes them: the msgpack schema. A batch is an array, each event a map tagged by its type.

Optional fields that have their default are left out, as vLLM leaves them out. Hashes are bytes, or unsigned 64-bit
integers where a server is configured to send those.
"""

from typing import Any, Literal, TypeAlias, get_args

import msgspec

from ...core.errors import InputError

BlockHash: TypeAlias = bytes | int
Wire: TypeAlias = Literal["vllm", "strict"]
WIRES: tuple[Wire, ...] = get_args(Wire)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks became findable.

    In `wire="strict"` the hashes are consecutive, `token_ids` are theirs alone and `parent_block_hash` is the hash
    just before the first one. In `wire="vllm"` the tokens are those of the whole range that was looked at, of which
    some blocks (or all) may have no hash here, and the parent is the one before that range.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    @property
    def is_dense(self) -> bool:
        """Whether every block of the tokens has its hash here."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_size


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """One copy of each of these blocks can no longer be found."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No block can be found any more."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries: the time in seconds, the events in order, and which data-parallel rank sent it."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class BatchDecoder:
    """Payloads into batches."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def decode(self, payload: bytes) -> KVEventBatch:
        """The batch in a payload.

        Raises:
            InputError: it is none; says where it departs from the schema.
        """
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise InputError(f"{len(payload)} bytes are no batch of KV events: {error}") from None


def encode_batch(batch: KVEventBatch) -> bytes:
    """The payload of a batch."""
    return msgspec.msgpack.encode(batch)
