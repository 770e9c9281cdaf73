"""Which complete blocks become findable: rule 21 of golden/ops."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..events import BlocksCached, Key, ShortColumns, named_tuple
from ..ledger.state import LedgerState
from ..types import Request
from .config import DENSE, AllocatorConfig
from .prefix_match import PrefixMatcher

_NONE: NDArray[np.intp] = np.empty(0, dtype=np.intp)
# For each row of a batch, a logical index and the keys of the blocks from there on: of those that are due, and of the
# one before them, if there is one. No keys: nothing is due.
AskedKeys: TypeAlias = tuple[Sequence[int], Sequence[Sequence[Key]]]
# The same of one row in one group: (group, logical index, keys).
AskedRun: TypeAlias = tuple[int, int, Sequence[Key]]


class Registrar:
    """Decides what `BlocksCached` says. Blocks register as soon as they are allocated, before they are computed."""

    def __init__(self, config: AllocatorConfig, state: LedgerState, matcher: PrefixMatcher) -> None:
        self._config = config
        self._unit = config.scheduler_block_size
        # Between arrays NumPy's arithmetic takes half as long as between an array and a Python number.
        self._unit_array: NDArray[np.int64] = np.array(config.scheduler_block_size, dtype=np.int64)
        self._zero: NDArray[np.int64] = np.array(0, dtype=np.int64)
        self._state = state
        self._matcher = matcher
        self._column_of = ShortColumns()
        # Where every complete block is worth a key and none can be out of reach, whole ranges register at once.
        self._whole = [kind.needs_whole_prefix and config.orphans == "keep" for kind in config.groups]

    def due(
        self,
        rows: NDArray[np.int64],
        known_tokens: NDArray[np.int64],
        first_positions: NDArray[np.int64] | None = None,
    ) -> NDArray[np.intp]:
        """Places in the batch where some group has a complete block that registration has not considered.

        Blocks behind `first_positions`, where those are given, count as not considered: they are about to be.
        """
        unit = self._unit
        behind: NDArray[np.bool_] | None = None
        for kind, considered in zip(self._config.groups, self._state.num_considered, strict=True):
            done = np.maximum(considered[rows], self._zero)
            if first_positions is not None:
                done = np.minimum(done, first_positions // kind.block_size)
            complete = known_tokens // self._unit_array
            if unit != kind.block_size:
                complete *= unit // kind.block_size
            behind = complete > done if behind is None else behind | (complete > done)
        return _NONE if behind is None else behind.nonzero()[0]

    def ask_for_runs(
        self, request: Request, row: int | None, hits: Sequence[Sequence[int]] | None, total: int, end: int
    ) -> list[AskedRun]:
        """The keys that `decide_run` will need, of each group where something is due, for a request that goes on to
        `end`.

        A source that fails, fails here, before any event.
        """
        unit = self._unit
        known = request.num_prompt_tokens + request.num_output_tokens
        sure = (end if end < known else known) // unit * unit
        asked: list[AskedRun] = []
        for group, kind in enumerate(self._config.groups):
            size = kind.block_size
            start = 0
            if hits is not None:
                start = len(hits[group])
            elif row is not None:
                start = max(self._state.considered[group][row], 0)
                if start * size > total:
                    start = total // size
            stop = sure // size
            if stop > start:
                first = start - 1 if start else 0
                keys = self._matcher.block_keys(request, kind, first, stop)
                if keys:
                    asked.append((group, first, keys))
        return asked

    def ask_for_keys_of_batch(
        self,
        rows: Sequence[int],
        first_positions: Sequence[int],
        known_tokens: Sequence[int],
        requests: Sequence[Request | None],
    ) -> list[AskedKeys]:
        """`ask_for_runs` for rows that are `due` and go on at `first_positions`."""
        block_keys = self._matcher.block_keys
        unit = self._unit
        asked: list[AskedKeys] = []
        for group, kind in enumerate(self._config.groups):
            size, considered = kind.block_size, self._state.considered[group]
            offsets: list[int] = []
            keys: list[Sequence[Key]] = []
            for row, position, known in zip(rows, first_positions, known_tokens, strict=True):
                request = requests[row]
                start = considered[row]
                if start * size > position:
                    start = position // size
                first = start - 1 if start > 0 else 0
                stop = known // unit * unit // size
                due = request is not None and stop > start and stop > 0
                offsets.append(first)
                keys.append(block_keys(request, kind, first, stop) if due and request is not None else ())
            asked.append((offsets, keys))
        return asked

    def decide_run(self, rows: tuple[int], run: AskedRun, request: Request, num_held: int) -> BlocksCached | None:
        """What becomes findable of one row in one group, whose keys were asked for.

        The row's blocks behind the first `num_held` were just taken, so that none of them has a key.
        """
        group, offset, keys = run
        row = rows[0]
        if self._whole[group]:
            start = self._state.considered[group][row]
            if start < 0:
                start = 0
            stop = offset + len(keys)  # a source may withhold keys: those blocks are never found
            if stop <= start:
                return None
            held = self._state.tables[group].rows[row]
            if start >= num_held or not self._state.pool.keys_of(held[start:num_held]):
                parent = None
                if start:
                    parent, keys = keys[start - 1 - offset], keys[start - offset :]
                column_of = self._column_of
                columns = (
                    group,
                    rows,
                    column_of[start],
                    column_of[stop],
                    column_of[stop - start],
                    tuple(range(start, stop)),
                    tuple(held[start:stop]),
                    tuple(keys),
                    (parent,),
                )
                return named_tuple(BlocksCached, columns)
        return self._decide_each(group, rows, ((offset,), (keys,)), {row: request})

    def decide(
        self,
        group: int,
        rows: Sequence[int],
        asked: AskedKeys,
        requests: Sequence[Request | None],
    ) -> BlocksCached | None:
        """What becomes findable in one group, for rows whose keys were `asked` for.

        `requests` is by row: whose tokens they are.
        """
        if self._whole[group]:
            event = self._one_block_each(group, rows, *asked)
            if event is not None:
                return event
        return self._decide_each(group, rows, asked, requests)

    def _decide_each(
        self,
        group: int,
        rows: Sequence[int],
        asked: AskedKeys,
        requests: Sequence[Request | None] | Mapping[int, Request],
    ) -> BlocksCached | None:
        """What `decide` says, row by row: the general case."""
        whole = self._whole[group]
        shared = len(rows) > 1
        table = self._state.tables[group]
        considered = self._state.considered[group]
        columns: tuple[list[int], ...] = ([], [], [], [])
        out_rows, starts, stops, counts = columns
        indices: list[int] = []
        blocks: list[int] = []
        seen: set[int] = set()
        keys: list[Key] = []
        parents: list[Key | None] = []
        for row, offset, range_keys in zip(rows, *asked, strict=True):
            request = requests[row]
            start = max(considered[row], 0)
            stop = offset + len(range_keys)  # a source may withhold keys: those blocks are never found
            if stop <= start or request is None:
                continue
            held = table.blocks(row, start, stop)
            first_new = self._num_registered(held, seen)
            if first_new:
                start, held = start + first_new, held[first_new:]
            parent = range_keys[start - 1 - offset] if start else None
            # Behind a block that was evicted by id, the other side of a fork may have registered further ones.
            if whole and seen.isdisjoint(held) and not self._state.pool.keys_of(held):
                live: Sequence[int] = range(start, stop)
                blocks += held
                keys += range_keys[start - offset :]
            else:
                stranded = self._strands(group, parent) and parent not in keys
                chosen = () if stranded else self._retained(group, start, stop, request)
                live = [i for i in chosen if held[i - start] and not self._is_registered(held[i - start], seen)]
                blocks += [held[i - start] for i in live]
                keys += [range_keys[i - offset] for i in live]
            if shared:
                seen.update(held)
            parents.append(parent)
            out_rows.append(row)
            starts.append(start)
            stops.append(stop)
            counts.append(len(live))
            indices += live
        if not out_rows:
            return None
        return BlocksCached(
            group,
            tuple(out_rows),
            tuple(starts),
            tuple(stops),
            tuple(counts),
            tuple(indices),
            tuple(blocks),
            tuple(keys),
            tuple(parents),
        )

    def _one_block_each(
        self, group: int, rows: Sequence[int], offsets: Sequence[int], keys_of_each: Sequence[Sequence[Key]]
    ) -> BlocksCached | None:
        """What `decide` says of a decode step, where every row has filled one block that nobody else registered.

        None where that is not so.
        """
        considered = self._state.considered[group]
        starts: list[int] = []
        keys: list[Key] = []
        parents: list[Key | None] = []
        for row, offset, range_keys in zip(rows, offsets, keys_of_each, strict=True):
            start = considered[row]
            if start > 0 and start == offset + 1 and len(range_keys) == 2:
                parents.append(range_keys[0])
            elif start <= 0 and len(range_keys) == 1:
                start = 0
                parents.append(None)
            else:
                return None
            starts.append(start)
            keys.append(range_keys[-1])
        blocks = self._state.tables[group].block_of_each(rows, starts)
        if self._state.pool.keys_of(blocks) or 0 in blocks or len(set(blocks)) < len(blocks):
            return None
        indices = tuple(starts)
        stops = tuple([start + 1 for start in starts])
        ones = (1,) * len(starts)
        return BlocksCached(
            group, tuple(rows), indices, stops, ones, indices, tuple(blocks), tuple(keys), tuple(parents)
        )

    def _num_registered(self, held: Sequence[int], seen: set[int]) -> int:
        """How many blocks at the start were registered by the other side of a fork: those behind them follow on these,
        not on what the row itself registered last.
        """
        count = 0
        for block in held:
            if not block or not self._is_registered(block, seen):
                break
            count += 1
        return count

    def _is_registered(self, block: int, seen: set[int]) -> bool:
        """By another request, before or in this command."""
        return block in seen or self._state.pool.key_of(block) is not None

    def _strands(self, group: int, parent: Key | None) -> bool:
        """Whether no lookup could reach the block behind `parent`, which was evicted by id while it was held."""
        return (
            self._config.orphans == "drop"
            and parent is not None
            and self._config.groups[group].needs_whole_prefix
            and self._state.pool.find(parent, group) is None
        )

    def _retained(self, group: int, start: int, stop: int, request: Request) -> Sequence[int]:
        interval = self._config.retention_interval
        if interval is DENSE:
            return range(start, stop)
        kind = self._config.groups[group]
        if kind.needs_whole_prefix:
            return range(start, stop)
        unit = self._unit
        ends = {(request.num_prompt_tokens - 1) // unit * unit, request.cache_boundary // unit * unit}
        if interval:
            first = start * kind.block_size // interval * interval
            ends.update(range(first, (stop + 1) * kind.block_size + interval + 1, interval))
        return list(kind.retained(start, stop, ends, self._config.use_eagle))
