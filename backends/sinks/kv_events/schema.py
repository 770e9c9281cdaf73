"""KV events as vLLM 0.32 publishes them: the msgpack schema and the options of `--kv-events-config`.

A batch is an array, and each event a map tagged by its type. Like vLLM, it omits optional fields that have their
default. Hashes are bytes, or unsigned 64-bit integers if a server is configured to send those.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import attrs
import msgspec

from ....core.errors import InputError

BlockHash: TypeAlias = bytes | int
Wire: TypeAlias = Literal["vllm", "strict"]
WIRES: tuple[Wire, ...] = get_args(Wire)


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


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """One copy of each of these blocks left the prefix cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """All blocks left the prefix cache."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message: the time in seconds, the events in order, and the data-parallel rank that sent it."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def decode_batch(payload: bytes) -> KVEventBatch:
    """Decode the payload of a message.

    Raises:
        InputError: it is no batch; says where it departs from the schema.
    """
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise InputError(f"{len(payload)} bytes are no batch of KV events: {error}") from None


def encode_batch(batch: KVEventBatch) -> bytes:
    """Encode a batch as the payload of a message."""
    return msgspec.msgpack.encode(batch)


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
