"""Our allocator with keys that name a block's content alone, whatever stands before it, as the ids of a trace may.

One block then serves several places of one request, which is right as far as the ids go: a slot's content is its token.
"""

from collections.abc import Sequence
from typing import Any

import kvledger.core
from kvledger.testing import LedgerAdapter, PrefixKeys, Scenario, Trial, ledger_supports, supporting
from kvledger.testing.content_model import ContentModel, Contents


class ContentKeys(PrefixKeys):
    """A block's key is its own tokens."""

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        size = self.hash_block_size
        return [key[-size:] for key in super().keys(start, stop)]


class TokenContents(Contents):
    """A token's content is the token."""

    def of(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)


class ContentLedger(LedgerAdapter):
    """Its keys have no parents that could be right or wrong."""

    def rebuild(self) -> tuple[Any, Any]:
        live, rebuilt = super().rebuild()
        return live, rebuilt | {"wrong parents": []}

    def _request(self, request_id: str, tokens: Sequence[int]) -> Any:
        if request_id not in self._requests:
            keys = ContentKeys(tokens, self.allocator.config.hash_block_size)
            self._requests[request_id] = kvledger.core.Request(request_id, len(tokens), max_tokens=1 << 30, keys=keys)
        return super()._request(request_id, tokens)


# Every block is as large as what a key names, and no key follows on another one: there are no orphans.
SUPPORTS = ledger_supports(
    block_sizes=(4,), options=ledger_supports().options - {"drop_orphans"}, waived=("no_orphans",)
)


@supporting(SUPPORTS)
def make_content_ledger(scenario: Scenario) -> ContentLedger:
    """Our allocator, for prompts whose blocks are named by their content alone."""
    return ContentLedger(scenario)


def content_trial(scenario: Scenario) -> Trial:
    """A trial of it."""
    trial = Trial(make_content_ledger, scenario)
    trial.model = ContentModel(scenario, TokenContents())
    return trial
