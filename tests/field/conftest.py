"""What the allocator's field reports share: a ledger of a given number of usable blocks, driven by token lists."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kvledger.core import AllocatorConfig, CacheKind, EventLog, FullAttention, KVCacheAllocator, PrefixMatch, Request
from kvledger.core.block_hash import block_hasher
from kvledger.core.extra_keys import ExtraKeys
from kvledger.core.token_key_source import TokenKeySource


class DrivenLedger:
    """An allocator with a log, and requests made from tokens."""

    def __init__(
        self, num_usable_blocks: int, block_size: int = 16, groups: Sequence[CacheKind] = (), **config: Any
    ) -> None:
        self.log = EventLog()
        settings = {
            "groups": groups or [FullAttention(block_size)],
            "max_model_len": 1 << 16,
            "max_num_reqs": 64,
        } | config
        self.allocator = KVCacheAllocator(AllocatorConfig(num_blocks=num_usable_blocks + 1, **settings), [self.log])
        self.pool = self.allocator.pool

    def request(self, request_id: str, tokens: Sequence[int], extra_keys: ExtraKeys | None = None) -> Request:
        size = self.allocator.config.hash_block_size
        keys = TokenKeySource(list(tokens), block_hasher(), size, extra_keys or ExtraKeys())
        return Request(request_id, len(tokens), max_tokens=1 << 16, keys=keys)

    def admit(self, request: Request) -> PrefixMatch:
        """Look up and allocate the whole prompt."""
        match = self.allocator.match_prefix(request)
        taken = self.allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match)
        assert taken is not None
        return match

    def serve(self, request_id: str, tokens: Sequence[int], extra_keys: ExtraKeys | None = None) -> int:
        """Admit a request and finish it. Returns the tokens that hit."""
        hit = self.admit(self.request(request_id, tokens, extra_keys)).num_hit_tokens
        self.allocator.free(request_id)
        return hit

    def table(self, request_id: str) -> list[int]:
        return self.allocator.block_ids(request_id)[0]

    def snapshot(self) -> dict[str, Any]:
        """Everything: the state, and how long the log is."""
        return {"state": self.allocator.state.snapshot(), "commits": len(self.log)}


@pytest.fixture
def ledger_of() -> Callable[..., DrivenLedger]:
    return DrivenLedger
