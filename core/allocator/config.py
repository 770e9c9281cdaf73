"""The configuration of an allocator, checked once."""

import math

import attrs

from ..cache_kinds import CacheKind, FullAttention
from ..errors import InputError, at_least, non_negative, one_of, positive

# The retention under which every complete block gets a key.
DENSE = None


@attrs.frozen
class AllocatorConfig:
    """Pool size, groups and rules of a `KVCacheAllocator`.

    Attributes:
        num_blocks: blocks of the pool, the null block included.
        groups: one cache kind per group of layers; all groups share the pool.
        max_model_len: tokens of the longest request; no row holds more.
        max_num_reqs: rows of the block tables: requests that hold blocks at the same time.
        enable_caching: whether complete blocks are registered and found (prefix caching).
        retention_interval: which blocks of windowed groups get a key. None: all (dense). 0: only the window before a
            request's replay boundaries (vLLM's engine default). N: those, and the window before every multiple of N
            tokens. It has no effect on full attention; with any other kind it must be given.
        max_in_flight_tokens: the most tokens that one request may have scheduled at once; bounds what windowed
            groups hold. 0: `max_model_len`.
        watermark_blocks: blocks that an admission must leave free.
        use_eagle: whether the last block of a hit is recomputed for EAGLE drafts (vLLM 0.32).
        num_lookahead_tokens: tokens behind a block that its key covers too (vLLM 0.33 with EAGLE or MTP: 1, or one for
            each module of a predictor); no block of a hit is recomputed then. The key sources of the requests make such
            keys; here it is only recorded for them.
        hash_block_size: tokens per key of a chain; 0: the greatest common divisor of the block sizes.
        scheduler_block_size: hits and registrations are multiples of it; 0: the least common multiple.
        eviction: the name of the eviction order.
        key_algorithm: how the keys are made, as recorded in the log ("sha256", "trace ids").
        release: the order in which a request of several groups frees its blocks: "immediate" (group 0 first, each
            group as a release of its own) or "deferred" (one release of the reversed concatenation).
        orphans: whether `evict` keeps the keys of later blocks that no lookup can reach any more: "keep" (vLLM) or
            "drop".
    """

    num_blocks: int = attrs.field(validator=at_least(2))
    groups: tuple[CacheKind, ...] = attrs.field(converter=tuple[CacheKind, ...])
    max_model_len: int = attrs.field(validator=positive)
    max_num_reqs: int = attrs.field(default=256, validator=positive)
    enable_caching: bool = True
    retention_interval: int | None = attrs.field(default=-1)
    max_in_flight_tokens: int = attrs.field(default=0, validator=non_negative)
    watermark_blocks: int = attrs.field(default=0, validator=non_negative)
    use_eagle: bool = False
    num_lookahead_tokens: int = attrs.field(default=0, validator=non_negative)
    hash_block_size: int = attrs.field(default=0, validator=non_negative)
    scheduler_block_size: int = attrs.field(default=0, validator=non_negative)
    eviction: str = "lru"
    key_algorithm: str = "given"
    release: str = attrs.field(default="immediate", validator=one_of("immediate", "deferred"))
    orphans: str = attrs.field(default="keep", validator=one_of("keep", "drop"))

    def __attrs_post_init__(self) -> None:
        if not self.groups:
            raise InputError("an allocator needs at least one group; for full attention: groups=[FullAttention(16)]")
        sizes = [kind.block_size for kind in self.groups]
        derived = {
            "hash_block_size": self.hash_block_size or math.gcd(*sizes),
            "scheduler_block_size": self.scheduler_block_size or math.lcm(*sizes),
            "max_in_flight_tokens": self.max_in_flight_tokens or self.max_model_len,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if any(size % self.hash_block_size for size in sizes):
            raise InputError(f"hash_block_size {self.hash_block_size} must divide every group's block size {sizes}")
        if any(self.scheduler_block_size % size for size in sizes):
            raise InputError(
                f"scheduler_block_size {self.scheduler_block_size} must be a multiple of every block size {sizes}"
            )
        if self.use_eagle and self.num_lookahead_tokens:
            raise InputError(
                f"use_eagle and num_lookahead_tokens {self.num_lookahead_tokens} exclude each other: keys that look "
                "ahead prove what the dropped block would"
            )
        if self.retention_interval == -1:
            windowed = [kind for kind in self.groups if not isinstance(kind, FullAttention)]
            if windowed and self.enable_caching:
                raise InputError(
                    f"retention_interval must be given for {windowed[0]}: None registers every block, 0 only the "
                    "window before a replay boundary (what vLLM's engine does), N also before every multiple of N"
                )
            object.__setattr__(self, "retention_interval", DENSE)
        elif self.retention_interval is not None and (
            self.retention_interval < 0 or self.retention_interval % self.scheduler_block_size
        ):
            raise InputError(
                f"retention_interval {self.retention_interval} must be None, 0 or a multiple of the scheduler block "
                f"size {self.scheduler_block_size}"
            )
