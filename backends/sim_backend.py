"""Simulated memory: block tables and slot mappings in NumPy, rebuilt from the events alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InputError, MisuseError
from ..core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    Commit,
    FreeReason,
    PoolCreated,
    PrefixAdopted,
    as_ints,
)
from ..core.types import DraftModel, LatencyModel, ScheduledStep, StepLoad, StepResult, TokenBatch, largest
from .context_rank import ContextRank

# Slots of a batch from block tables in NumPy: one group's, into buffers that are kept.

PADDING_SLOT = -1
# NumPy can only repeat into new memory, so a long batch is written in pieces: 16 KiB at a time, and few calls.
_TOKENS_A_PIECE = 2048


class GroupSlots:
    """Slots of one group's tokens. What is as long as a batch is kept, and the next batch overwrites it."""

    def __init__(self, table: NDArray[np.int32], block_size: int, context: ContextRank) -> None:
        """Read `table`, int32 `[max_num_reqs, max_num_blocks_per_req]`, as it stands at each call.

        `context` is rank 0 of 1 for a group whose blocks are not dealt out.
        """
        self._table = table
        self._flat_table = table.reshape(-1)
        self._block_size = block_size
        # Arrays are faster operands than Python ints.
        self._size: NDArray[np.int64] = np.array(block_size, dtype=np.int64)
        self._last_offset: NDArray[np.int64] = np.array(block_size - 1, dtype=np.int64)
        self._width: NDArray[np.int64] = np.array(table.shape[1], dtype=np.int64)
        self._num_ranks = context.size
        self._share = _share_of_a_block(block_size, context)
        self._make_room(0)

    def of(self, batch: TokenBatch, num_padded_tokens: int) -> NDArray[np.int64]:
        """As `SimBackend.slot_mapping`."""
        num_tokens, num_reqs = batch.num_tokens, len(batch.rows)
        if num_tokens > num_padded_tokens > 0:
            raise InputError(f"a batch of {num_tokens} tokens cannot be padded to {num_padded_tokens}")
        length = max(num_tokens, num_padded_tokens)
        # Every run holds a token, but for that of a request without tokens whose position is inside a block.
        if length + num_reqs > len(self._slots):
            self._make_room(2 * (length + num_reqs))
        slots = self._slots[:num_tokens]
        if num_tokens == num_reqs == np.count_nonzero(batch.counts):
            self._one_by_one(batch, slots)
        else:
            self._run_by_run(batch, slots)
        if self._num_ranks > 1:
            self._keep_share(slots)
        if length > num_tokens:
            self._slots[num_tokens:length] = PADDING_SLOT
        return self._read_only_slots[:length]

    def _make_room(self, length: int) -> None:
        self._slots: NDArray[np.int64] = np.empty(length, dtype=np.int64)
        self._read_only_slots = self._slots.view()
        self._read_only_slots.flags.writeable = False
        self._numbers: NDArray[np.int64] = np.arange(length, dtype=np.int64)
        self._offsets: NDArray[np.int64] = self._numbers % self._size
        self._index: NDArray[np.int64] = np.empty(length, dtype=np.int64)
        self._places: NDArray[np.int64] = np.empty(length + 1, dtype=np.int64)
        self._blocks: NDArray[np.int32] = np.empty(length, dtype=np.int32)

    def _one_by_one(self, batch: TokenBatch, slots: NDArray[np.int64]) -> None:
        rows, positions = batch.rows, batch.first_positions
        block_index = np.floor_divide(positions, self._size, out=self._index[: len(rows)])
        if len(rows) and (largest(rows) >= len(self._table) or largest(block_index) >= self._table.shape[1]):
            raise self._not_there(batch)
        index = np.multiply(rows, self._width, out=slots)
        index += block_index
        # Every one is there; "clip" spares NumPy the buffer that "raise" needs beside `out`.
        slots[...] = self._flat_table.take(index, out=self._blocks[: len(rows)], mode="clip")
        slots -= block_index
        slots *= self._size
        slots += positions

    def _run_by_run(self, batch: TokenBatch, slots: NDArray[np.int64]) -> None:
        """Slots run on inside a block: along such a run they stand equally far from the tokens' places in the batch.

        A batch of n tokens has about n / block_size runs, and only `_whole_blocks` and `_spread` touch every token.
        """
        firsts = batch.first_positions
        end_index = firsts + batch.counts
        end_index += self._last_offset
        end_index //= self._size
        if largest(end_index) > self._table.shape[1]:
            raise self._not_there(batch)
        num_runs = end_index - firsts // self._size
        run_ends = np.add.accumulate(num_runs)
        # Run r of a request holds its block number r + ahead.
        ahead = np.subtract(end_index, run_ends, out=end_index)
        # Of int32 blocks and a size NumPy before 2 would make int32 slots, whichever kind of integer the size is.
        first_slots = np.multiply(self._blocks_of_runs(batch, ahead, num_runs), self._size, dtype=np.int64)
        if len(first_slots) * self._block_size == len(slots):
            self._whole_blocks(first_slots, slots)
        else:
            self._parts_of_blocks(batch, ahead, num_runs, run_ends - num_runs, first_slots, slots)

    def _blocks_of_runs(
        self, batch: TokenBatch, ahead: NDArray[np.int64], num_runs: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        begins = batch.rows * self._width
        begins += ahead
        index = begins.repeat(num_runs)
        index += self._numbers[: len(index)]
        try:
            return self._flat_table[index]
        except IndexError:
            raise self._not_there(batch) from None

    def _whole_blocks(self, first_slots: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        slots.reshape(len(first_slots), self._block_size)[...] = first_slots[:, np.newaxis]
        slots += self._offsets[: len(slots)]

    def _parts_of_blocks(
        self,
        batch: TokenBatch,
        ahead: NDArray[np.int64],
        num_runs: NDArray[np.int64],
        run_starts: NDArray[np.int64],
        first_slots: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> None:
        starts = np.add.accumulate(batch.counts)
        starts -= batch.counts
        ahead *= self._size
        ahead += starts
        ahead -= batch.first_positions
        total = len(first_slots)
        # Where the runs would start in the batch if all were whole blocks, and then where they do.
        places = np.multiply(self._numbers[:total], self._size, out=self._places[:total])
        places += ahead.repeat(num_runs)
        distances = np.subtract(first_slots, places, out=first_slots)
        self._places[run_starts] = starts
        self._places[total] = len(slots)
        self._spread(distances, slots)

    def _spread(self, distances: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write the slots of runs that stand at `_places` of the batch, each so far from its slots."""
        num_runs, places = len(distances), self._places
        lengths = np.subtract(places[1 : num_runs + 1], places[:num_runs], out=self._index[:num_runs])
        step = max(1, _TOKENS_A_PIECE // self._block_size)
        stops = [*places[step:num_runs:step].tolist(), len(slots)]
        start = 0
        for run, stop in zip(range(0, num_runs, step), stops, strict=True):
            piece = distances[run : run + step]
            if step > 1:
                piece = piece.repeat(lengths[run : run + step])
            np.add(piece, self._numbers[start:stop], out=slots[start:stop])
            start = stop
            # Two pieces at once would be twice the memory.
            del piece

    def _keep_share(self, slots: NDArray[np.int64]) -> None:
        """Under decode context parallelism -1 for tokens that another rank holds."""
        offsets = np.remainder(slots, self._size, out=self._index[: len(slots)])
        slots -= offsets
        slots //= self._num_ranks
        slots += self._share.take(offsets, out=self._places[: len(slots)], mode="clip")
        np.maximum(slots, PADDING_SLOT, out=slots)

    def _not_there(self, batch: TokenBatch) -> InputError:
        """Of a batch with a row or a position beyond the table."""
        num_rows, width = self._table.shape
        if largest(batch.rows) >= num_rows:
            return InputError(f"no row {largest(batch.rows)}: the block tables have rows 0 to {num_rows - 1}")
        last_position = largest(batch.first_positions + batch.counts) - 1
        return InputError(
            f"position {last_position} lies beyond a block table of {width} blocks of {self._block_size} tokens"
        )


def _share_of_a_block(block_size: int, context: ContextRank) -> NDArray[np.int64]:
    """Where a rank keeps each token of a block in its share of it; far below 0 for what another rank keeps."""
    offsets = np.arange(block_size, dtype=np.int64)
    stripe, ranks = context.interleave_tokens, context.size
    places = offsets // (stripe * ranks) * stripe + offsets % stripe
    return np.where(offsets // stripe % ranks == context.rank, places, np.iinfo(np.int64).min)


class SimBackend:
    """Keeps the block tables that the events describe and says how long a step takes.

    It shares no state and no code with the allocator: what it knows, it read in the commits. That is what makes its
    slots a witness in the comparison with device memory.

    Attributes:
        block_tables: one int32 `[max_num_reqs, max_num_blocks_per_req]` a group.
        num_blocks_per_row: one int32 `[max_num_reqs]` a group.
    """

    def __init__(
        self,
        latency: LatencyModel | None = None,
        drafts: DraftModel | None = None,
        context: ContextRank | None = None,
    ) -> None:
        """Mirror tables; with a latency model also time steps, and with a draft model also verify drafts.

        Under decode context parallelism `context` says which rank this is: it holds every `size`-th stripe of tokens,
        so the blocks of a request, and its table, are 1 / size as many as one rank alone would need.
        """
        self._context = ContextRank() if context is None else context
        self.latency = latency
        self.drafts = drafts
        self.block_tables: list[NDArray[np.int32]] = []
        self.num_blocks_per_row: list[NDArray[np.int32]] = []
        self._slots: list[GroupSlots] = []
        self._submitted: ScheduledStep | None = None
        # Durations worked out by `repeats_before`, and the load they are of, which a macro-step shares.
        self._foreseen: tuple[int, ...] = ()
        self._foreseen_load: StepLoad | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            PoolCreated: self._pool_created,
            PrefixAdopted: self._prefix_adopted,
            BlocksAllocated: self._blocks_allocated,
            BlocksShared: self._blocks_shared,
            BlockCopied: self._block_copied,
            BlocksFreed: self._blocks_freed,
        }

    def apply(self, commit: Commit) -> None:
        """Mirror one commit; events that move no block (keys, tokens, rows) leave the tables as they are."""
        handlers = self._handlers
        for event in commit.events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)

    def slot_mapping(self, batch: TokenBatch, group: int = 0, num_padded_tokens: int = 0) -> NDArray[np.int64]:
        """The slot of every token: `table[row, position // block_size] * block_size + position % block_size`.

        Under decode context parallelism a block's tokens are dealt to the ranks in stripes; a slot counts this rank's
        share of the blocks, and is -1 for a token that another rank holds.

        Args:
            batch: the tokens; every position must have been placed by an event before.
            group: which group's tables.
            num_padded_tokens: length of the result if longer than the batch; the tail is -1 (no slot).

        Returns:
            int64 `[max(num_tokens, num_padded_tokens)]`, a read-only view of a buffer of the group's: its next batch
            overwrites it.

        Raises:
            InputError: more tokens than the padded length, or a row or a position beyond the tables.
        """
        return self._slots[group].of(batch, num_padded_tokens)

    def submit(self, step: ScheduledStep) -> None:
        """Take the step that `collect` will time."""
        self._submitted = step

    def collect(self) -> StepResult:
        """How long the submitted step takes, by the latency model."""
        step, self._submitted = self._submitted, None
        if step is None:
            raise MisuseError("collect without a submitted step")
        if step.load is self._foreseen_load:
            return StepResult(self._foreseen[: step.num_steps])
        durations = self._durations(step.load, step.num_steps)
        if step.num_draft_tokens is None:
            return StepResult(durations)
        if self.drafts is None:
            raise MisuseError("a step with drafts needs a draft model to say how many are accepted")
        return StepResult(durations, num_accepted_tokens=self.drafts.accepted(step.num_draft_tokens))

    def repeats_before(self, step: ScheduledStep, limit: int, horizon_ns: float) -> int:
        """How often a decode step can be repeated (at most `limit` times) with every repetition starting in time.

        Args:
            step: a decode-only step.
            limit: the most repetitions wanted.
            horizon_ns: nanoseconds from the start of `step` to the next thing that may happen.
        """
        self._foreseen = self._durations(step.load, limit + 1, horizon_ns)
        self._foreseen_load = step.load
        return len(self._foreseen) - 1

    def _durations(self, load: StepLoad, num_steps: int, horizon_ns: float = math.inf) -> tuple[int, ...]:
        """Nanoseconds of each engine step, ended early by the first one that reaches the horizon."""
        elapsed = self._nanoseconds(load)
        if num_steps == 1 or elapsed >= horizon_ns:
            return (elapsed,)
        if getattr(self.latency, "ignores_context", False):
            each = self._nanoseconds(load.one_token_later())
            in_time = num_steps - 1
            if horizon_ns - elapsed < in_time * each:
                in_time = int(-((elapsed - horizon_ns) // each))  # the quotient, rounded up
            return (elapsed, *[each] * in_time)
        durations = [elapsed]
        while len(durations) < num_steps and elapsed < horizon_ns:
            load = load.one_token_later()
            durations.append(self._nanoseconds(load))
            elapsed += durations[-1]
        return tuple(durations)

    def _nanoseconds(self, load: StepLoad) -> int:
        if self.latency is None:
            raise MisuseError("this SimBackend mirrors tables only; give it a latency model to time steps")
        nanoseconds = round(self.latency.step_seconds(load) * 1e9)
        if nanoseconds < 1:
            raise InputError(f"the latency model says that a step takes {nanoseconds} ns ({load}); it must take time")
        return nanoseconds

    # -- one handler an event ----------------------------------------------------------------------------------------

    def _pool_created(self, event: PoolCreated) -> None:
        for kind in event.groups:
            width = -(-event.max_model_len // kind.block_size)
            stripes = self._context.size * self._context.interleave_tokens
            if self._context.size > 1 and kind.holds_tokens and kind.block_size % stripes:
                raise InputError(
                    f"blocks of {kind.block_size} tokens do not divide into stripes of "
                    f"{self._context.interleave_tokens} on {self._context.size} ranks; use a multiple of {stripes}"
                )
            table = np.zeros((event.max_num_reqs, width), dtype=np.int32)
            self.block_tables.append(table)
            context = self._context if kind.holds_tokens else ContextRank()
            self._slots.append(GroupSlots(table, kind.block_size, context))
            self.num_blocks_per_row.append(np.zeros(event.max_num_reqs, dtype=np.int32))

    def _append(self, group: int, row: int, blocks: Sequence[int]) -> None:
        counts = self.num_blocks_per_row[group]
        start = counts.item(row)
        counts[row] = end = start + len(blocks)
        self.block_tables[group][row, start:end] = blocks

    def _prefix_adopted(self, event: PrefixAdopted) -> None:
        self._append(event.group, event.row, as_ints(event.blocks))

    def _blocks_allocated(self, event: BlocksAllocated) -> None:
        group, rows, blocks = event.group, as_ints(event.rows), as_ints(event.blocks)
        if len(rows) == 1:
            self._append(group, rows[0], blocks)
            return
        if len(rows) == len(blocks):
            index = np.array(rows, dtype=np.intp)
            counts = self.num_blocks_per_row[group]
            self.block_tables[group][index, counts[index]] = blocks
            counts[index] += 1
            return
        start = 0
        for row, count in zip(rows, as_ints(event.counts), strict=True):
            self._append(group, row, blocks[start : start + count])
            start += count

    def _blocks_shared(self, event: BlocksShared) -> None:
        self._append(event.group, event.child_row, as_ints(event.blocks))

    def _block_copied(self, event: BlockCopied) -> None:
        self.block_tables[event.group][event.row, event.index] = event.target

    def _blocks_freed(self, event: BlocksFreed) -> None:
        start = 0
        for group, row, count in zip(as_ints(event.groups), as_ints(event.rows), as_ints(event.counts), strict=True):
            table, counts = self.block_tables[group], self.num_blocks_per_row[group]
            if event.reason is FreeReason.OUT_OF_WINDOW:
                table[row, list(as_ints(event.indices)[start : start + count])] = 0
            else:
                keep = 0
                if event.reason is FreeReason.TRUNCATED:
                    keep = min(as_ints(event.indices)[start : start + count])
                table[row, keep : counts.item(row)] = 0
                counts[row] = keep
            start += count
