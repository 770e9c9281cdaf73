"""The prefix cache: which cached blocks a request can adopt, and which of its complete blocks become findable."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cache_kinds import CacheKind, FullAttention
from ..errors import MisuseError
from ..events import BlocksCached, Key, quickly_made
from ..ledger.state import LedgerState
from ..types import Request
from .config import DENSE, AllocatorConfig

# The blocks of a hit: for each group, by logical index; 0 where the group skips.
Hits: TypeAlias = tuple[tuple[int, ...], ...]
# For each row of a batch, a logical index and the keys of the blocks from there on: of the blocks to register, and of
# the one before them, if there is one. No keys: the row has nothing to register.
BatchKeys: TypeAlias = tuple[Sequence[int], Sequence[Sequence[Key]]]
# The same for one row in one group: (group, logical index, keys).
RowKeys: TypeAlias = tuple[int, int, Sequence[Key]]

_NOTHING_DUE: NDArray[np.intp] = np.empty(0, dtype=np.intp)


@quickly_made
class PrefixMatch(NamedTuple):
    """The result of a lookup, with the state that it saw. `allocate` refuses it once one of its blocks was reused.

    Attributes:
        request_id: the request that looked.
        num_hit_tokens: tokens whose keys and values need not be computed again.
        blocks: for each group, the blocks by logical index; 0 where the group skips.
        keys: for each group, the keys of those blocks at the time of the lookup.
        boundary: the longest hit that some group alone could have served, if longer than the common one, else 0
            (rule 14). Under sparse retention it is worth keeping for the next request.
        sequence: the number of the next commit at the time of the lookup.
    """

    request_id: str
    num_hit_tokens: int
    blocks: Hits
    keys: tuple[tuple[Key, ...], ...]
    boundary: int
    sequence: int

    def checked_blocks(self, request: Request, row: int | None, state: LedgerState) -> Hits | None:
        """Return the blocks to adopt, or None if there are none.

        Raises:
            MisuseError: the match belongs to another request or is stale, or the request holds blocks already.
        """
        if self.request_id != request.request_id:
            raise MisuseError(f"a match of {self.request_id!r} was passed for {request.request_id!r}")
        if not self.num_hit_tokens:
            return None
        if row is not None:
            raise MisuseError(
                f"request {request.request_id!r} holds blocks already; a prefix is adopted once, with the first blocks"
            )
        if self.sequence != state.next_sequence:
            pool = state.pool
            for group, (blocks, keys) in enumerate(zip(self.blocks, self.keys, strict=True)):
                for block, key in zip(blocks, keys, strict=True):
                    # One key names different content in different groups.
                    if block and (pool.key_of(block) != key or pool.group_of(block) != group):
                        raise MisuseError(
                            f"stale match for {request.request_id!r}: block {block} no longer has the key it was found "
                            f"by (commit {self.sequence}); call match_prefix again"
                        )
        return self.blocks


class PrefixCache:
    """Finds the longest common hit of all groups (rules 10 to 14 of golden/ops), and decides what becomes findable.

    Lookup: groups of equal kinds are looked up together and must all hit. Full attention comes first, because it can
    only shrink a hit from the right; the other kinds follow, each within the current length, until nothing shrinks.
    Under EAGLE a kind finds its hit with one more block behind it, once for each length that is tried.

    Registration (rule 21): complete blocks register as soon as they are allocated, before they are computed. The
    `keys_of...` methods ask the key source and so run before a command's first event: if the source fails, nothing has
    changed. The `register...` methods then decide what `BlocksCached` says.

    Attributes:
        match: `match(request)` finds the longest hit of at most `num_tokens - 1` tokens, so that one token is left to
            compute (rule 10).
        states_of_step: group and key of each state that was registered since the scheduler began the step.
    """

    def __init__(self, config: AllocatorConfig, state: LedgerState) -> None:
        self._config = config
        self._state = state
        self._pool = state.pool
        self._groups = config.groups
        self._unit = config.scheduler_block_size
        self._hash_block_size = config.hash_block_size
        self._use_eagle = config.use_eagle
        members: dict[CacheKind, list[int]] = {}
        for group, kind in enumerate(config.groups):
            members.setdefault(kind, []).append(group)
        self._kinds = sorted(members.items(), key=lambda item: not isinstance(item[0], FullAttention))
        has_full = any(isinstance(kind, FullAttention) for kind in members)
        self._first_index = (state.pool.index(0),)
        self.states_of_step: set[tuple[int, Key]] = set()
        # With one group its own hit is the common one, and no boundary lies beyond it.
        self.match = self._match_one_group if len(config.groups) == 1 else self._match_groups
        self._one_pass = len(members) == 2 and has_full
        # Under EAGLE a group also registers the block behind the last boundary: a lookup finds it and gives it back.
        self._blocks_behind = int(config.use_eagle and len(config.groups) > 1)
        # Arithmetic between two NumPy arrays takes half as long as between an array and a Python number.
        self._unit_array: NDArray[np.int64] = np.array(config.scheduler_block_size, dtype=np.int64)
        self._zero: NDArray[np.int64] = np.array(0, dtype=np.int64)
        # Where every complete block gets a key and none can become unreachable, whole ranges register at once.
        self._whole = [kind.needs_whole_prefix and config.orphans == "keep" for kind in config.groups]

    # -- lookup ------------------------------------------------------------------------------------------------------

    def block_keys(self, request: Request, kind: CacheKind, start: int, stop: int) -> Sequence[Key]:
        """Return the keys of a group's blocks `start <= i < stop`: the chain value at each block's own end (rule 9)."""
        source = request.keys
        if source is None:
            return ()
        if kind.block_size == self._hash_block_size:
            return source.keys(start, stop)
        per_block = kind.block_size // self._hash_block_size
        return source.keys(start * per_block, stop * per_block)[per_block - 1 :: per_block]

    def _match_groups(self, request: Request) -> PrefixMatch:
        max_length = request.num_prompt_tokens + request.num_output_tokens - 1
        length = max_length
        longest = 0
        found: list[list[int]] = [[] for _ in self._groups]
        # Under EAGLE the block behind the hit may be the last one of the request.
        known = request.num_tokens if self._use_eagle else max_length
        keys_of = [self.block_keys(request, kind, 0, known // kind.block_size) for kind, _ in self._kinds]
        dropped: set[CacheKind] = set()  # the kinds that have given a block back at the current length
        while True:
            start_length = length
            for (kind, group_ids), keys in zip(self._kinds, keys_of, strict=True):
                size = kind.block_size
                if isinstance(kind, FullAttention) and start_length < max_length:
                    length = min(length, len(found[group_ids[0]]) * size)  # its run was found by the first pass
                    continue
                drops = self._use_eagle and kind not in dropped
                room = length + size if drops and kind.holds_tokens else length
                indexes = [self._pool.index(group) for group in group_ids]
                hits = kind.find_hit(keys[: room // size], indexes, self._unit, drops)
                for group, hit in zip(group_ids, hits, strict=True):
                    found[group] = hit
                hit_length = len(hits[0]) * size
                if drops:
                    dropped.add(kind)
                elif hit_length < length:
                    dropped.clear()
                length = hit_length
                longest = max(longest, length)
            if self._one_pass or length >= start_length:
                break
        blocks: list[tuple[int, ...]] = [()] * len(self._groups)
        keys_found: list[tuple[Key, ...]] = [()] * len(self._groups)
        for (kind, group_ids), keys in zip(self._kinds, keys_of, strict=True):
            count = length // kind.block_size
            for group in group_ids:
                blocks[group] = tuple(found[group][:count])
                keys_found[group] = tuple(keys[:count])
        boundary = longest if longest > length else 0
        sequence = self._state.next_sequence
        return PrefixMatch(request.request_id, length, tuple(blocks), tuple(keys_found), boundary, sequence)

    def _match_one_group(self, request: Request) -> PrefixMatch:
        max_length = request.num_prompt_tokens + request.num_output_tokens - 1
        kind = self._groups[0]
        size = kind.block_size
        source = request.keys
        if source is not None and size == self._hash_block_size:  # the usual case, for which a call is spared
            keys = source.keys(0, max_length // size)
        else:
            keys = self.block_keys(request, kind, 0, max_length // size)
        (blocks,) = kind.find_hit(keys, self._first_index, self._unit, self._use_eagle)
        count = len(blocks)
        sequence = self._state.next_sequence
        values = request.request_id, count * size, (tuple(blocks),), (tuple(keys[:count]),), 0, sequence
        return PrefixMatch._make(values)

    def num_dropped_tokens(self, request: Request, match: PrefixMatch) -> int:
        """Count the tokens right behind a hit whose blocks full attention, or else the first kind, finds too."""
        if not self._use_eagle:
            return 0
        kind, group_ids = self._kinds[0]
        end = match.num_hit_tokens + self._unit
        if end >= request.num_tokens:
            return 0
        keys = self.block_keys(request, kind, match.num_hit_tokens // kind.block_size, end // kind.block_size)
        is_found = len(keys) > 0 and all(self._pool.find(key, group) for key in keys for group in group_ids)
        return self._unit if is_found else 0

    # -- keys of the blocks to register ------------------------------------------------------------------------------

    def due(
        self,
        rows: NDArray[np.int64],
        known_tokens: NDArray[np.int64],
        first_positions: NDArray[np.int64] | None = None,
        also: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.intp]:
        """Find the places in a batch where a group has a complete block that registration has not considered.

        Blocks behind `first_positions`, where given, count as not considered: a rollback is about to overwrite them.
        The places `also` are added.
        """
        unit = self._unit
        behind = also
        for kind, considered in zip(self._groups, self._state.num_considered, strict=True):
            done = np.maximum(considered[rows], self._zero)
            if first_positions is not None:
                done = np.minimum(done, first_positions // kind.block_size)
            complete = known_tokens // self._unit_array
            if unit != kind.block_size:
                complete *= unit // kind.block_size
                if self._blocks_behind:
                    complete = np.where(complete, np.minimum(complete + 1, known_tokens // kind.block_size), 0)
            behind = complete > done if behind is None else behind | (complete > done)
        if behind is None:
            return _NOTHING_DUE
        if self._state.outdated:
            behind &= ~np.isin(rows, list(self._state.outdated))
        return behind.nonzero()[0]

    def _num_complete(self, num_tokens: int, block_size: int) -> int:
        """Count the blocks of a group that `num_tokens` known tokens make findable: those that some hit can need."""
        aligned = num_tokens // self._unit * self._unit
        if self._blocks_behind and aligned:
            return min(aligned // block_size + 1, num_tokens // block_size)
        return aligned // block_size

    def keys_of_row(self, request: Request, row: int | None, hits: Hits | None, total: int, end: int) -> list[RowKeys]:
        """Ask for the keys that `register_row` needs, for a request whose tokens `total <= p < end` get slots now."""
        unit = self._unit
        known = request.num_prompt_tokens + request.num_output_tokens
        sure = end if end < known else known
        source = request.keys
        asked: list[RowKeys] = []
        if self._state.outdated and row in self._state.outdated:
            return asked
        for group, kind in enumerate(self._groups):
            size = kind.block_size
            start = 0
            if hits is not None:
                start = len(hits[group])
            elif row is not None:
                start = max(self._state.considered[group][row], 0)
                if start * size > total:
                    start = total // size
            stop = sure // size if size == unit else self._num_complete(sure, size)
            if stop > start:
                first = start - 1 if start else 0
                if source is not None and size == self._hash_block_size:  # the usual case, for which a call is spared
                    keys = source.keys(first, stop)
                else:
                    keys = self.block_keys(request, kind, first, stop)
                if keys:
                    asked.append((group, first, keys))
        return asked

    def keys_of_batch(
        self,
        rows: Sequence[int],
        first_positions: Sequence[int],
        known_tokens: Sequence[int],
        requests: Sequence[Request | None],
    ) -> list[BatchKeys]:
        """Ask for the keys that `register_batch` needs, for rows that are `due` and continue at `first_positions`."""
        unit = self._unit
        asked: list[BatchKeys] = []
        for group, kind in enumerate(self._groups):
            size, considered = kind.block_size, self._state.considered[group]
            offsets: list[int] = []
            keys: list[Sequence[Key]] = []
            for row, position, known in zip(rows, first_positions, known_tokens, strict=True):
                request = requests[row]
                start = considered[row]
                if start * size > position:
                    start = position // size
                first = start - 1 if start > 0 else 0
                stop = known // size if size == unit else self._num_complete(known, size)
                due = request is not None and stop > start and stop > 0
                offsets.append(first)
                keys.append(self.block_keys(request, kind, first, stop) if due and request is not None else ())
            asked.append((offsets, keys))
        return asked

    # -- what becomes findable ---------------------------------------------------------------------------------------

    def register_row(self, row: int, row_keys: RowKeys, request: Request, num_held: int) -> BlocksCached | None:
        """Decide what becomes findable of one row in one group.

        The row's blocks from logical index `num_held` on were just taken, so none of them has a key.
        """
        group, offset, keys = row_keys
        if self._whole[group]:
            start = self._state.considered[group][row]
            if start < 0:
                start = 0
            stop = offset + len(keys)  # a source may withhold keys: those blocks are never found
            if stop <= start:
                return None
            held = self._state.tables[group].rows[row]
            if start >= num_held or not self._pool.keys_of(held[start:num_held]):
                parent = None
                if start:
                    parent, keys = keys[start - 1 - offset], keys[start - offset :]
                return BlocksCached.of_row(group, row, start, stop, tuple(held[start:stop]), tuple(keys), parent)
        return self._register_each(group, (row,), ((offset,), (keys,)), {row: request})

    def register_batch(
        self, group: int, rows: Sequence[int], batch_keys: BatchKeys, requests: Sequence[Request | None]
    ) -> BlocksCached | None:
        """Decide what becomes findable of several rows in one group; `requests` is indexed by row."""
        if self._whole[group]:
            event = self._register_one_block_each(group, rows, *batch_keys)
            if event is not None:
                return event
        return self._register_each(group, rows, batch_keys, requests)

    def _register_one_block_each(
        self, group: int, rows: Sequence[int], offsets: Sequence[int], keys_of_each: Sequence[Sequence[Key]]
    ) -> BlocksCached | None:
        """Register for a decode step in which each row has filled one block that no other request registered.

        Returns None where that is not so.
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
        if self._pool.keys_of(blocks) or 0 in blocks or len(set(blocks)) < len(blocks):
            return None
        indices, stops, ones = tuple(starts), tuple([start + 1 for start in starts]), (1,) * len(starts)
        return BlocksCached(
            group, tuple(rows), indices, stops, ones, indices, tuple(blocks), tuple(keys), tuple(parents)
        )

    def _register_each(
        self,
        group: int,
        rows: Sequence[int],
        batch_keys: BatchKeys,
        requests: Sequence[Request | None] | Mapping[int, Request],
    ) -> BlocksCached | None:
        """Register row by row: the general case."""
        whole = self._whole[group]
        shared = len(rows) > 1
        table = self._state.tables[group]
        considered = self._state.considered[group]
        columns: tuple[list[int], ...] = ([], [], [], [])
        out_rows, starts, stops, counts = columns
        indices: list[int] = []
        blocks: list[int] = []
        keys: list[Key] = []
        parents: list[Key | None] = []
        seen: set[int] = set()
        for row, offset, range_keys in zip(rows, *batch_keys, strict=True):
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
            if whole and seen.isdisjoint(held) and not self._pool.keys_of(held):
                live: Sequence[int] = range(start, stop)
                blocks += held
                keys += range_keys[start - offset :]
            else:
                unreachable = self._is_unreachable_behind(group, parent) and parent not in keys
                chosen = () if unreachable else self._retained(group, row, start, stop, request)
                live = [i for i in chosen if held[i - start] and not self._is_registered(held[i - start], seen)]
                blocks += [held[i - start] for i in live]
                keys += [range_keys[i - offset] for i in live]
                if not self._groups[group].holds_tokens:
                    self.states_of_step.update([(group, range_keys[i - offset]) for i in live])
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
        of_rows = tuple(out_rows), tuple(starts), tuple(stops), tuple(counts)
        return BlocksCached(group, *of_rows, tuple(indices), tuple(blocks), tuple(keys), tuple(parents))

    def _num_registered(self, held: Sequence[int], seen: set[int]) -> int:
        """Count the blocks at the start that the other side of a fork registered.

        The blocks behind them have these as parents, not the block that the row itself registered last.
        """
        count = 0
        for block in held:
            if not block or not self._is_registered(block, seen):
                break
            count += 1
        return count

    def _is_registered(self, block: int, seen: set[int]) -> bool:
        """Whether another request has registered the block, before or in this command."""
        return block in seen or self._pool.key_of(block) is not None

    def _is_unreachable_behind(self, group: int, parent: Key | None) -> bool:
        """Whether no lookup could reach the block behind `parent`, because `parent` was evicted by id while held."""
        return (
            self._config.orphans == "drop"
            and parent is not None
            and self._groups[group].needs_whole_prefix
            and self._pool.find(parent, group) is None
        )

    def _retained(self, group: int, row: int, start: int, stop: int, request: Request) -> Sequence[int]:
        """Choose the logical indices in `start <= index < stop` that retention gives a key."""
        interval, kind, unit = self._config.retention_interval, self._groups[group], self._unit
        if kind.needs_whole_prefix:
            return range(start, stop)
        chosen: Iterable[int] = ()
        if interval is DENSE:
            chosen = kind.retained_between(start, stop, unit if kind.holds_tokens else 1, self._use_eagle)
        elif interval:
            chosen = kind.retained_between(start, stop, interval, self._use_eagle)
        if interval is not DENSE:
            ends = self._boundaries(request)
            if not kind.holds_tokens:
                ends |= self._last_provable_state(request)
            chosen = sorted({*chosen, *kind.retained(start, stop, ends, self._use_eagle)})
        if not kind.holds_tokens:
            passed_over = self._index_passed_over(group, row, request)
            return [index for index in chosen if index != passed_over]
        return list(chosen)

    def _boundaries(self, request: Request) -> set[int]:
        """Return the tokens at which later requests can continue behind this one's prompt.

        The same prompt again leaves its last token to compute, and a longer one does not. Under EAGLE both continue a
        block earlier. The third boundary is the one that a lookup of this request has reported (rule 14).
        """
        unit, prompt = self._unit, request.num_prompt_tokens
        if self._use_eagle:
            ends = {max((length // unit - 1) * unit, 0) for length in (prompt - 1, prompt)}
        else:
            ends = {(prompt - 1) // unit * unit}
        if request.cache_boundary:
            ends.add(request.cache_boundary // unit * unit)
        return ends

    def _last_provable_state(self, request: Request) -> set[int]:
        """Return the tokens of the last state that a key of the prompt proves, if a hit can end there.

        It lies before the last boundary where keys look ahead by several tokens, and under EAGLE where the scheduler's
        block is larger than the tokens of a key, behind it.
        """
        end = last_state_of_prompt(self._config, request.num_prompt_tokens)
        return {end} if end % self._unit == 0 else set()

    def _index_passed_over(self, group: int, row: int, request: Request) -> int:
        """Return the block in which this command's chunk begins, if it ends behind it: no state was left at its end.

        -1 if there is none. A decode step, with its drafts, leaves the state of each of its tokens.
        """
        size, placed = self._groups[group].block_size, self._state.placed[row]
        index = placed // size
        passes = placed % size and request.num_tokens - placed > 1 and self._state.tables[group].count(row) > index + 1
        return index if passes else -1


def last_state_of_prompt(config: AllocatorConfig, num_prompt_tokens: int) -> int:
    """Return the tokens of the last state that a key of a prompt proves: its last token is computed again.

    EAGLE reads all of a prompt and gives a block back.
    """
    size, use_eagle = config.hash_block_size, config.use_eagle
    read = num_prompt_tokens if use_eagle else num_prompt_tokens - max(1, config.num_lookahead_tokens)
    return max(read // size - use_eagle, 0) * size
