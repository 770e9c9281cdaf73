"""What the tests of the sinks share: seeded histories that use every command, every event and every type of key."""

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request
from kvledger.core.cache_kinds import CacheKind, ChunkedLocal, SlidingWindow
from kvledger.core.errors import DoesNotFitError, MisuseError
from kvledger.core.events import Key
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.token_keys import TokenKeySource
from kvledger.core.types import EventSink

POOLS: dict[str, Sequence[CacheKind]] = {
    "full": [FullAttention(4)],
    "hybrid": [FullAttention(8), SlidingWindow(4, 12), ChunkedLocal(4, 16)],
}
KEYS: dict[str, Callable[[bytes], Key]] = {
    "bytes": lambda digest: digest,
    "int": lambda digest: int.from_bytes(digest[:9], "big", signed=True),
    "str": lambda digest: digest[:8].decode("latin-1") + "Ω",
    "tuple": lambda digest: tuple(digest[:6]),
}


@attrs.define
class TypedKeys:
    """A chain of content hashes in the guise of another type."""

    source: TokenKeySource
    as_key: Callable[[bytes], Key]

    def keys(self, start: int, stop: int) -> list[Key]:
        return [self.as_key(digest) for digest in self.source.keys(start, min(stop, self.source.num_blocks))]


class RandomHistory:
    """An allocator driven by a seed: one call of `step` is one command."""

    def __init__(self, seed: int, pool: str, keys: str, sinks: Iterable[EventSink], num_blocks: int = 48) -> None:
        self._random = random.Random(seed)
        self.log = EventLog()
        self.allocator = KVCacheAllocator(
            AllocatorConfig(
                num_blocks=num_blocks,
                groups=POOLS[pool],
                max_model_len=160,
                max_num_reqs=6,
                retention_interval=None,
                key_algorithm=keys,
            ),
            sinks=[self.log, *sinks],
        )
        self._as_key = KEYS[keys]
        self._requests: dict[str, Request] = {}
        self._num_made = 0

    def run(self, num_commands: int) -> "RandomHistory":
        for _ in range(num_commands):
            self.step()
        return self

    def step(self) -> None:
        commands = [self._admit] * 4 + [self._decode] * 4 + [self._free] * 2 + [self._truncate, self._fork, self._evict]
        with contextlib.suppress(MisuseError, DoesNotFitError):  # refused: nothing has changed, nothing is logged
            self._random.choice([*commands, self._reset])()

    def _new_request(self, tokens: Sequence[int]) -> Request:
        self._num_made += 1
        size = self.allocator.config.hash_block_size
        keys = TypedKeys(TokenKeySource(tokens, block_hasher(), size), self._as_key)
        return Request(f"r{self._num_made}", len(tokens), max_tokens=200, keys=keys)

    def _admit(self) -> None:
        prefix = self._random.choice([0, 1, 2])
        tokens = [prefix * 1000 + i for i in range(self._random.randrange(1, 60))]
        request = self._new_request(tokens + [self._random.randrange(10**6) for _ in range(self._random.randrange(20))])
        match = self.allocator.match_prefix(request)
        new = request.num_tokens - match.num_hit_tokens
        if self.allocator.allocate(request, new, match) is not None:
            self._requests[request.request_id] = request

    def _decode(self) -> None:
        if not self._requests:
            return
        rows = np.array([self.allocator.row_of(each) for each in self._requests])
        for request in self._requests.values():
            request.keys.source.append([self._random.randrange(10**6)])
            request.num_output_tokens += 1
        self.allocator.release_out_of_window_among(rows)
        if not self.allocator.append(rows):
            self._free()

    def _free(self) -> None:
        if self._requests:
            request_id = self._random.choice(list(self._requests))
            del self._requests[request_id]
            self._random.choice([self.allocator.free, self.allocator.preempt, self.allocator.abort])(request_id)

    def _truncate(self) -> None:
        if self._requests:
            request = self._random.choice(list(self._requests.values()))
            keep = self.allocator.num_placed_tokens(request.request_id) - self._random.randrange(1, 9)
            if keep > 0:
                self._keep(request, keep)

    def _keep(self, request: Request, num_tokens: int) -> None:
        self.allocator.truncate(request.request_id, num_tokens)
        request.keys.source.truncate(num_tokens)
        request.num_prompt_tokens, request.num_output_tokens = num_tokens, 0

    def _fork(self) -> None:
        if self._requests:
            parent = self._random.choice(list(self._requests.values()))
            placed = self.allocator.num_placed_tokens(parent.request_id)
            child = self._new_request([7 for _ in range(placed)])
            child.keys.source = TokenKeySource(
                parent.keys.source._tokens[:placed].tolist(), block_hasher(), self.allocator.config.hash_block_size
            )
            self.allocator.fork(parent.request_id, child)
            self._requests[child.request_id] = child

    def _evict(self) -> None:
        self.allocator.evict([self._random.randrange(1, self.allocator.config.num_blocks) for _ in range(3)])

    def _reset(self) -> None:
        if self._random.random() < 0.2:
            for request_id in list(self._requests):
                self.allocator.free(request_id)
            self._requests.clear()
        self.allocator.reset_prefix_cache()


def make_history(
    seed: int = 0, num_commands: int = 200, pool: str = "full", keys: str = "bytes", sinks: Iterable[Any] = ()
) -> RandomHistory:
    return RandomHistory(seed, pool, keys, sinks).run(num_commands)


@pytest.fixture(scope="session")
def history_of() -> Callable[..., RandomHistory]:
    return make_history
