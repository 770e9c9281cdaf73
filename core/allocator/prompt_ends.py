"""Keys for the ends of prompts that lie inside a block, and for states whose key was evicted by id (rule 23)."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cache_kinds import FullAttention
from ..events import BlocksCached, BlocksUncached, Key
from ..ledger.state import LedgerState
from ..types import Request
from .config import AllocatorConfig
from .prefix_cache import BatchKeys, last_state_of_prompt
from .taking import PrivateBlock

# The end of a prompt in one group: (group, logical index, key, key of the block before).
PromptEnd: TypeAlias = tuple[int, int, Key, Key | None]

_NEVER = np.iinfo(np.int64).max


class PromptEnds:
    """Decides which block gets the key of the last hash block of a prompt, where no complete block does.

    vLLM gives these keys in groups of full attention whose blocks are larger than the tokens of a key. Where all groups
    end their hits on whole blocks no lookup reads such a key, but a block that has one is reused later (rule 3). Once
    the block is complete, its own key takes the place of this one.

    The same step of vLLM gives the last state of a prompt its key again after it was evicted by id.

    Attributes:
        are_due: whether any row of this pool can have such an end: most pools never ask.
    """

    def __init__(self, config: AllocatorConfig, state: LedgerState) -> None:
        self._config = config
        self._state = state
        self._groups = config.groups
        self._unit = config.scheduler_block_size
        self._hash_block_size = config.hash_block_size
        self._use_eagle = config.use_eagle
        self._has_one_group = len(config.groups) == 1
        self._kept_inside = [
            group
            for group, kind in enumerate(config.groups)
            if not self._has_one_group and isinstance(kind, FullAttention) and kind.block_size > config.hash_block_size
        ]
        # For each group, by row: the known tokens from which on the end of its prompt may be due.
        self._due: dict[int, NDArray[np.int64]] = {}
        self.are_due = False
        if config.enable_caching and (config.use_eagle or config.num_lookahead_tokens):
            self._watch(self._kept_inside)  # otherwise a block has its own key before, unless that is evicted

    def _watch(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._due.setdefault(group, np.full(self._config.max_num_reqs, _NEVER, dtype=np.int64))
        self.are_due = bool(self._due)

    def expect(self, row: int, request: Request) -> None:
        """Note from which known token on the end of a new row's prompt gets a key."""
        for group, due in self._due.items():
            end, size = self._end(request, group), self._groups[group].block_size
            comes = self._groups[group].holds_tokens and (end % size or self._comes_later(request))
            due[row] = self._known_for(end, size) if comes else _NEVER

    def expect_again(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Note that keys were evicted by id: what these rows still hold of their ends gets a key in a later step."""
        states = [group for group, kind in enumerate(self._groups) if not kind.holds_tokens]
        self._watch([*self._kept_inside, *states])
        if not self.are_due:
            return
        for row, request in requests:
            self.expect(row, request)
            for group in states:
                self._due[group][row] = self._end(request, group)

    def due(self, rows: NDArray[np.int64], known_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the places in a batch where the end of a prompt may be due."""
        places = np.zeros(len(rows), dtype=np.bool_)
        for due in self._due.values():
            places |= known_tokens >= due[rows]
        return places

    def of_row(self, row: int | None, request: Request | None, known: int) -> list[PromptEnd]:
        """Ask the key source for what `register` needs, for a request whose `known` tokens have slots.

        Like all keys, they are asked for before a command's first event: if the source fails, nothing has changed.
        """
        asked: list[PromptEnd] = []
        if request is None or request.keys is None or row in self._state.outdated:
            return asked
        for group, due in self._due.items():
            if row is not None and known < due[row]:
                continue
            size, end = self._groups[group].block_size, self._end(request, group)
            index = (end - 1) // size
            if self._groups[group].holds_tokens:
                is_due = end % size > 0 and known >= self._known_for(end, size)
            else:
                counted = known if self._use_eagle or self._has_one_group else known // self._unit * self._unit
                is_due = row is not None and end == counted and not end % size
            keys = self._chain(request, end) if is_due and end else ()
            if keys:  # a source may withhold keys: those blocks are never found
                (before,) = self._chain(request, index * size) or (None,)
                asked.append((group, index, keys[0], before))
        return asked

    def register(self, row: int, prompt_end: PromptEnd, request: Request) -> BlocksCached | None:
        """Give a block the key of the end of a prompt, unless it has a key or is gone."""
        group, index, key, before = prompt_end
        if not self._comes_later(request):
            self._due[group][row] = _NEVER
        block = self._state.tables[group].block(row, index)
        if not block or self._state.pool.key_of(block) is not None:
            return None
        at = (index,)
        return BlocksCached(group, (row,), at, at, (1,), at, (block,), (key,), (before,))

    def outgrown(self, group: int, rows: Sequence[int], batch_keys: BatchKeys) -> BlocksUncached | None:
        """Decide which blocks lose the key of a prompt's end, because the keys in `batch_keys` cover more of them."""
        blocks: list[int] = []
        table, pool = self._state.tables[group], self._state.pool
        for row, offset, keys in zip(rows, *batch_keys, strict=True):
            start = max(self._state.considered[group][row], offset)
            held = table.blocks(row, start, offset + len(keys))
            new_keys = zip(held, keys[start - offset :], strict=True)
            blocks += [block for block, key in new_keys if pool.key_of(block) not in (None, key)]
        return BlocksUncached(tuple(blocks), pool.keys_of(blocks), (group,) * len(blocks)) if blocks else None

    def keeps(self, private: PrivateBlock, request: Request | None, first: int) -> bool:
        """Whether a block that its only holder writes into from `first` on has no key but one for what lies before."""
        group, row, index, copies = private
        if copies or request is None or request.keys is None or self._end(request, group) > first:
            return False
        key = self._state.pool.key_of(self._state.tables[group].block(row, index))
        return key in self._chain(request, self._end(request, group))

    def _chain(self, request: Request, end: int) -> Sequence[Key]:
        """Return the key that covers the tokens up to `end`, if there is one."""
        at = end // self._hash_block_size
        return tuple(request.keys.keys(at - 1, at)) if at and request.keys is not None else ()

    def _end(self, request: Request, group: int) -> int:
        """Return the last end of a key's tokens that a lookup of the same prompt reads.

        EAGLE reads all of a prompt and gives a block back, so that a state is kept at the end before.
        """
        size, ahead, prompt = self._hash_block_size, self._config.num_lookahead_tokens, request.num_prompt_tokens
        if not self._groups[group].holds_tokens:
            return last_state_of_prompt(self._config, prompt)
        end = max(request.num_tokens - ahead, 0) if self._comes_later(request) else prompt - (not self._use_eagle)
        return end // size * size

    def _comes_later(self, request: Request) -> bool:
        """Whether keys look ahead so far that the last one of the prompt does not exist yet: an earlier one counts."""
        return self._config.num_lookahead_tokens > 1 + request.num_output_tokens

    def _known_for(self, end: int, block_size: int) -> int:
        """Return how many known tokens a key that ends at `end` needs: EAGLE counts one block that is not aligned."""
        unit = self._unit
        if self._use_eagle and unit <= end <= end // unit * unit + block_size:
            return end
        return -(-end // unit) * unit
