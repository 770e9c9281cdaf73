"""Counts the blocks that a request needs, and refuses a request that the pool can never serve."""

from collections.abc import Sequence

from ..cache_kinds import NULL_BLOCK
from ..errors import DoesNotFitError
from ..ledger.state import LedgerState
from ..types import Request
from .config import AllocatorConfig
from .prefix_cache import Hits, PrefixMatch


class Admission:
    """Counts blocks for `allocate`: rules 16 and 18 of golden/ops, and field report D01."""

    def __init__(self, config: AllocatorConfig, state: LedgerState) -> None:
        self._config = config
        self._state = state
        self._caps = [
            kind.admission_cap_blocks(config.max_in_flight_tokens, config.max_model_len) for kind in config.groups
        ]

    def blocks_needed(self, row: int | None, hits: Hits | None, wanted: Sequence[int], total: int, known: int) -> int:
        """Count the blocks that must be free for a request to have `wanted` blocks of each group.

        Unreferenced hit blocks count too (rule 18). `known` is where the known tokens of the step end.
        """
        return sum([self._needed_of(group, row, hits, count, total, known) for group, count in enumerate(wanted)])

    def _needed_of(self, group: int, row: int | None, hits: Hits | None, wanted: int, total: int, known: int) -> int:
        table = self._state.tables[group]
        held = 0 if row is None else table.count(row)
        # Of a group of states, the step takes no block for the entries before the one where its known tokens end.
        first = (known - 1) // table.block_size if table.keeps_states else 0
        if row is not None and self._state.considered[group][row] >= 0:
            return max(wanted - max(held, first), 0)
        kind = self._config.groups[group]
        skipped = kind.num_skipped_tokens(total) // kind.block_size
        if hits is None:
            return max(wanted - max(skipped, held, first), 0)
        adopted_free = self._state.pool.num_free_among(hits[group][skipped:] if skipped else hits[group])
        return max(wanted - max(skipped, len(hits[group]) + held, first), 0) + adopted_free

    def blocks_needed_for_all(self, request: Request, match: PrefixMatch | None) -> int:
        """Count the blocks to be free for all known tokens of a request; windowed groups are capped (rule 16)."""
        row = self._state.row_of.get(request.request_id)
        hits = match.blocks if match else None
        total = (match.num_hit_tokens if match else 0) + (0 if row is None else self._state.placed[row])
        num_tokens = min(request.num_tokens, self._config.max_model_len)
        need = 0
        for group, kind in enumerate(self._config.groups):
            wanted = -(-num_tokens // kind.block_size)
            if kind.holds_tokens:
                wanted = self._capped(group, wanted)
            need += self._needed_of(group, row, hits, wanted, total, num_tokens)
        return need

    def blocks_held_at_most(self, num_tokens: int) -> int:
        """Count the blocks that a request of this length holds at once, over all groups, when it shares none."""
        return sum(
            [self._capped(group, -(-num_tokens // kind.block_size)) for group, kind in enumerate(self._config.groups)]
        )

    def check_fits(self, num_tokens: int, what: str) -> None:
        """Raise `DoesNotFitError` if `num_tokens` tokens can never be held at once."""
        usable = self._state.pool.num_usable_blocks
        if num_tokens > self._config.max_model_len:
            raise DoesNotFitError(
                f"{what} of {num_tokens:,} tokens is longer than max_model_len {self._config.max_model_len:,}"
            )
        need = self.blocks_held_at_most(num_tokens)
        if need > usable:
            raise DoesNotFitError(
                f"{what} of {num_tokens:,} tokens needs {need:,} blocks, but the pool has {usable:,} usable ones "
                f"({self._state.pool.num_blocks:,} less the null block), {need - usable:,} too few; the longest "
                f"request that fits has {self.max_fitting_tokens():,} tokens"
            )

    def check_can_ever_hold(self, request: Request, row: int | None, needed: int) -> None:
        """Raise `DoesNotFitError` if the blocks that a request holds and needs exceed the whole pool."""
        usable = self._state.pool.num_usable_blocks
        held = 0
        if row is not None:
            held = sum([table.count(row) - table.rows[row].count(NULL_BLOCK) for table in self._state.tables])
        if held + needed > usable:
            raise DoesNotFitError(
                f"request {request.request_id!r} needs {held + needed:,} blocks at once, but the pool has "
                f"{usable:,} usable ones; the longest request that fits has {self.max_fitting_tokens():,} tokens"
            )

    def max_fitting_tokens(self) -> int:
        """Find the longest request that an empty pool serves, by bisection (the blocks held grow with the length)."""
        usable = self._state.pool.num_usable_blocks
        low, high = 0, self._config.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_held_at_most(middle) <= usable:
                low = middle
            else:
                high = middle - 1
        return low

    def _capped(self, group: int, num_blocks: int) -> int:
        cap = self._caps[group]
        return num_blocks if cap is None else min(num_blocks, cap)
