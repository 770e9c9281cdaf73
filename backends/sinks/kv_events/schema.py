"""KV events as vLLM 0.32 publishes them: the msgpack schema and the options of `--kv-events-config`.

A batch is an array, and each event a map tagged by its type. Older servers send each event as an array that begins with
its type; `decode_batch` reads both, mixed in one batch too (field report E03). Like vLLM, a map omits optional fields
that have their default. Hashes are bytes, or unsigned 64-bit integers if a server is configured to send those.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import attrs
import msgspec

from ....core.errors import InputError

BlockHash: TypeAlias = bytes | int
Wire: TypeAlias = Literal["vllm", "strict"]
WIRES: tuple[Wire, ...] = get_args(Wire)
GPU: Final = "GPU"
# Values of `kv_cache_spec_kind` in vLLM 0.32. In the first three a hit is an unbroken run from the first block.
PREFIX_KINDS: Final = ("full_attention", "mla_attention", "sink_full_attention")
SPEC_KINDS: Final = (
    *PREFIX_KINDS,
    *("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention"),
    *("encoder_only_attention", "cross_attention", "unknown"),
)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks entered the prefix cache.

    With `wire="strict"` the hashes are consecutive, `token_ids` are their tokens only and `parent_block_hash` is the
    hash just before the first one. With `wire="vllm"` the tokens are those of the whole range that was looked at, some
    (or all) of whose blocks may have no hash here, and the parent is the one before that range.
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
        """Whether the event has a hash for every block of its tokens."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_size

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether hits of the group are unbroken runs from the first block. Assumed if the event states no kind."""
        return self.kv_cache_spec_kind is None or self.kv_cache_spec_kind in PREFIX_KINDS

    @property
    def on_medium(self) -> str:
        """The memory that holds the blocks, in upper case; the GPU if the event states none."""
        return GPU if self.medium is None or self.medium == GPU else self.medium.upper()

    def tokens_per_block(self) -> list[int] | None:
        """Return the tokens of each block, the last of which may be full in part (field report E08).

        None if the event does not tell: blocks of its range have no hash here, or the size is not stated.
        """
        count, size, given = len(self.block_hashes), self.block_size, len(self.token_ids)
        if not count:
            return []
        if size <= 0 or given > count * size or 0 < given <= (count - 1) * size:
            return None
        return [size] * (count - 1) + [given - (count - 1) * size if given else size]


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """One copy of each of these blocks left the prefix cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    @property
    def on_medium(self) -> str:
        """The memory that held the blocks, in upper case; the GPU if the event states none."""
        return GPU if self.medium is None or self.medium == GPU else self.medium.upper()


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """All blocks left the prefix cache."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@attrs.frozen
class UnknownEvent:
    """An event that cannot be read: of a type that this schema does not have, or with other fields.

    Attributes:
        tag: its type; "(no type)" if it states none.
        reason: where it departs from the schema.
        raw: the event as it was sent.
        may_remove: whether it may remove blocks that it does not name legibly, so that no block is known to be cached
            afterwards: an illegible `BlockRemoved`, or an event without a type. An unknown type is taken to remove
            nothing.
    """

    tag: str
    reason: str
    raw: bytes
    may_remove: bool


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message: the time in seconds, the events in order, and the data-parallel rank that sent it."""

    ts: float
    events: Sequence[KVCacheEvent | UnknownEvent]
    data_parallel_rank: int | None = None


class _KnownBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are all maps of this schema."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch with any events."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None


_KNOWN: Final = msgspec.msgpack.Decoder(_KnownBatch)
_ANY: Final = msgspec.msgpack.Decoder(_AnyBatch)
_MAP: Final = msgspec.msgpack.Decoder(KVCacheEvent)
_BY_TAG: Final[dict[str, type[KVCacheEvent]]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def decode_batch(payload: bytes) -> KVEventBatch:
    """Decode the payload of a message. Each event is a map or an array; one that cannot be read is an `UnknownEvent`.

    Raises:
        InputError: it is no batch; says where it departs from the schema.
    """
    try:
        known = _KNOWN.decode(payload)
        return KVEventBatch(known.ts, known.events, known.data_parallel_rank)
    except msgspec.DecodeError:
        pass
    try:
        batch = _ANY.decode(payload)
    except msgspec.DecodeError as error:
        raise InputError(f"{len(payload)} bytes are no batch of KV events: {error}") from None
    rank = batch.data_parallel_rank
    return KVEventBatch(batch.ts, [_read(bytes(raw)) for raw in batch.events], rank if isinstance(rank, int) else None)


def _read(raw: bytes) -> KVCacheEvent | UnknownEvent:
    try:
        return _MAP.decode(raw)
    except msgspec.DecodeError as error:
        reason = str(error)
    tag: object = None
    try:
        content: Any = msgspec.msgpack.decode(raw)
        if isinstance(content, dict):
            tag = cast("dict[Any, Any]", content).get("type")
        elif isinstance(content, list) and content:
            tag, *values = cast("list[Any]", content)
            if isinstance(tag, str) and tag in _BY_TAG:
                kind = _BY_TAG[tag]
                return msgspec.convert({"type": tag, **dict(zip(kind.__struct_fields__, values, strict=False))}, kind)
            reason = f"unknown type {tag!r}"
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        reason = str(error)
    named = isinstance(tag, str | int)
    may_remove = not named or tag in ("BlockRemoved", "AllBlocksCleared")
    return UnknownEvent(str(tag) if named else "(no type)", reason, raw, may_remove)


def encode_batch(batch: KVEventBatch) -> bytes:
    """Encode a batch as the payload of a message; events that could not be read are sent on as they came."""
    events = [msgspec.Raw(each.raw) if isinstance(each, UnknownEvent) else each for each in batch.events]
    return msgspec.msgpack.encode(KVEventBatch(batch.ts, cast("list[KVCacheEvent]", events), batch.data_parallel_rank))


def _is_a(kind: type, words: str) -> Callable[[object, "attrs.Attribute[Any]", object], None]:
    def check(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, kind):
            raise InputError(f"{attribute.name} must be {words}, not {value!r}")

    return check


_is_text, _is_flag = _is_a(str, "a text"), _is_a(bool, "true or false")


def _at_least_one(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{attribute.name} must be at least 1, not {value}")


@attrs.frozen
class KVEventsConfig:
    """Where and how KV events are published, under the names of vLLM's `--kv-events-config`.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: "zmq", or "null" to publish nothing; None: "zmq" if enabled.
        endpoint: where subscribers connect; bound if it names no single host ("tcp://*:5557", "ipc://...").
        replay_endpoint: where subscribers ask for missed batches; None: nowhere.
        buffer_steps: batches kept for replay.
        hwm: messages kept for a slow subscriber.
        max_queue_size: batches that may wait to be sent before `publish` waits too.
        topic: first frame of every message.
        describes_itself: whether the replay endpoint also sends the whole state as events on request (ours: vLLM's does
            not), for readers too late for a replay. Keeps the token ids of every block.
    """

    enable_kv_cache_events: bool = attrs.field(default=True, validator=_is_flag)
    publisher: str | None = None
    endpoint: str = attrs.field(default="tcp://*:5557", validator=_is_text)
    replay_endpoint: str | None = attrs.field(default=None, validator=attrs.validators.optional(_is_text))
    buffer_steps: int = attrs.field(default=10_000, validator=_at_least_one)
    hwm: int = attrs.field(default=100_000, validator=_at_least_one)
    max_queue_size: int = attrs.field(default=100_000, validator=_at_least_one)
    topic: str = attrs.field(default="", validator=_is_text)
    describes_itself: bool = attrs.field(default=False, validator=_is_flag)

    def __attrs_post_init__(self) -> None:
        if self.publisher not in (None, "null", "zmq"):
            raise InputError(f"publisher must be null or zmq, not {self.publisher!r}")

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, text: str) -> "KVEventsConfig":
        """Parse the JSON object that `--kv-events-config` takes.

        Raises:
            InputError: no JSON object, or an unknown option.
        """
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise InputError(f"--kv-events-config is no JSON: {error}") from None
        names = {field.name for field in attrs.fields(cls)}
        if not isinstance(given, dict):
            raise InputError(f"--kv-events-config is {text}; it must be a JSON object")
        unknown = sorted(set(given) - names)
        if unknown:
            raise InputError(f"--kv-events-config has no {unknown[0]!r}; it has {', '.join(sorted(names))}")
        return cls(**given)
