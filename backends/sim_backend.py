"""Simulates memory and time: NumPy block tables and slots rebuilt from the events alone, and the time of each step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import events
from ..core.errors import InputError, MisuseError
from ..core.events import Commit, FreeReason, as_ints
from ..core.types import (
    DraftModel,
    LatencyModel,
    ScheduledStep,
    StepLoad,
    StepResult,
    TokenBatch,
    largest,
    scheduled_seconds,
)
from .context_rank import ContextRank

PADDING_SLOT = -1
# NumPy can only repeat into new memory, so a long batch is written in pieces of 16 KiB, with few calls.
_TOKENS_PER_PIECE = 2048


class SimBackend:
    """Keeps the block tables that the events describe and says how long a step takes.

    It shares no state and no code with the allocator: it knows only what the commits say, so comparing its slots with
    those in device memory proves something.

    Attributes:
        block_tables: int32 `[max_num_reqs, max_num_blocks_per_req]` per group.
        num_blocks_per_row: int32 `[max_num_reqs]` per group.
    """

    def __init__(
        self, latency: LatencyModel | None = None, drafts: DraftModel | None = None, context: ContextRank | None = None
    ) -> None:
        """Mirror tables; with a latency model also time steps, and with a draft model also verify drafts.

        Under decode context parallelism `context` says which rank this is. It holds every `size`-th stripe of tokens,
        so a request needs 1 / size of the blocks, and of the table entries, that it needs without it.
        """
        self._context = ContextRank() if context is None else context
        self.latency = latency
        self.drafts = drafts
        self.block_tables: list[NDArray[np.int32]] = []
        self.num_blocks_per_row: list[NDArray[np.int32]] = []
        self._mappers: list[SlotMapper] = []
        self._submitted: ScheduledStep | None = None
        # Durations that `repeats_before` computed, and the load that they belong to: the macro-step has the same load.
        self._foreseen: tuple[int, ...] = ()
        self._foreseen_load: StepLoad | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.PoolCreated: self._pool_created,
            events.PrefixAdopted: self._prefix_adopted,
            events.BlocksAllocated: self._blocks_allocated,
            events.BlocksShared: self._blocks_shared,
            events.BlockCopied: self._block_copied,
            events.BlocksFreed: self._blocks_freed,
        }

    def apply(self, commit: Commit) -> None:
        """Mirror one commit; events that move no block (keys, tokens, rows) do not change the tables."""
        handlers = self._handlers
        for event in commit.events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)

    def slot_mapping(self, batch: TokenBatch, group: int = 0, num_padded_tokens: int = 0) -> NDArray[np.int64]:
        """Return the slot of every token: `table[row, position // block_size] * block_size + position % block_size`.

        Under decode context parallelism a block's tokens are split over the ranks in stripes; a slot counts this rank's
        tokens of each block only, and is -1 for a token that another rank holds.

        Args:
            batch: the tokens; an earlier event must have placed every position.
            group: the group whose tables are used.
            num_padded_tokens: length of the result if longer than the batch; the tail is -1 (no slot).

        Returns:
            int64 `[max(num_tokens, num_padded_tokens)]`, a read-only view of the group's buffer; the group's next batch
            overwrites it.

        Raises:
            InputError: more tokens than the padded length, or a row or a position beyond the tables.
        """
        return self._mappers[group].slots_of(batch, num_padded_tokens)

    def submit(self, step: ScheduledStep) -> None:
        """Keep the step that `collect` times."""
        self._submitted = step

    def collect(self) -> StepResult:
        """Return how long the submitted step takes by the latency model, and how many drafts are accepted.

        Raises:
            MisuseError: no step was submitted, there is no latency model, or no draft model for a step with drafts.
            InputError: the latency model says that a step takes no time.
        """
        step, self._submitted = self._submitted, None
        if step is None:
            raise MisuseError("collect without a submitted step")
        if step.load is self._foreseen_load:
            return StepResult(self._foreseen[: step.num_steps])
        durations = self._durations(step, step.num_steps)
        if step.num_proposed_tokens is None:
            return StepResult(durations)
        if self.drafts is None:
            raise MisuseError("a step with drafts needs a draft model to say how many are accepted")
        return StepResult(durations, num_accepted_tokens=self.drafts.accepted(step.num_proposed_tokens))

    def repeats_before(self, step: ScheduledStep, limit: int, horizon_ns: float) -> int:
        """See `Backend`: the repetitions of a decode step, at most `limit`, that start before the horizon."""
        self._foreseen = self._durations(step, limit + 1, horizon_ns)
        self._foreseen_load = step.load
        return len(self._foreseen) - 1

    def _durations(self, step: ScheduledStep, num_steps: int, horizon_ns: float = math.inf) -> tuple[int, ...]:
        """Nanoseconds of each engine step, up to the first one that reaches the horizon."""
        load = step.load
        elapsed = self._nanoseconds(step, 0, load)
        if num_steps == 1 or elapsed >= horizon_ns:
            return (elapsed,)
        if getattr(self.latency, "ignores_context", False):
            each = self._nanoseconds(step, 1, load.one_token_later())
            in_time = num_steps - 1
            if horizon_ns - elapsed < in_time * each:
                in_time = int(-((elapsed - horizon_ns) // each))  # the quotient, rounded up
            return (elapsed, *[each] * in_time)
        durations = [elapsed]
        while len(durations) < num_steps and elapsed < horizon_ns:
            load = load.one_token_later()
            durations.append(self._nanoseconds(step, len(durations), load))
            elapsed += durations[-1]
        return tuple(durations)

    def _nanoseconds(self, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> int:
        latency = self.latency
        if latency is None:
            raise MisuseError("this SimBackend mirrors tables only; give it a latency model to time steps")
        nanoseconds = round(scheduled_seconds(latency, step, num_steps_later, load) * 1e9)
        if nanoseconds < 1:
            raise InputError(f"the latency model says that a step takes {nanoseconds} ns ({load}); it must take time")
        return nanoseconds

    # -- one handler per event ---------------------------------------------------------------------------------------

    def _pool_created(self, event: events.PoolCreated) -> None:
        for kind in event.groups:
            width = -(-event.max_model_len // kind.block_size)
            if kind.holds_tokens:
                self._context.check_divides(kind.block_size)
            table = np.zeros((event.max_num_reqs, width), dtype=np.int32)
            self.block_tables.append(table)
            context = self._context if kind.holds_tokens else ContextRank()
            self._mappers.append(SlotMapper(table, kind.block_size, context))
            self.num_blocks_per_row.append(np.zeros(event.max_num_reqs, dtype=np.int32))

    def _append(self, group: int, row: int, blocks: Sequence[int]) -> None:
        counts = self.num_blocks_per_row[group]
        start = counts.item(row)
        counts[row] = end = start + len(blocks)
        self.block_tables[group][row, start:end] = blocks

    def _prefix_adopted(self, event: events.PrefixAdopted) -> None:
        self._append(event.group, event.row, as_ints(event.blocks))

    def _blocks_allocated(self, event: events.BlocksAllocated) -> None:
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

    def _blocks_shared(self, event: events.BlocksShared) -> None:
        self._append(event.group, event.child_row, as_ints(event.blocks))

    def _block_copied(self, event: events.BlockCopied) -> None:
        self.block_tables[event.group][event.row, event.index] = event.target

    def _blocks_freed(self, event: events.BlocksFreed) -> None:
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


class SlotMapper:
    """Maps the tokens of one group to slots.

    Arrays as long as a batch are kept from call to call; the next batch overwrites them.
    """

    def __init__(self, table: NDArray[np.int32], block_size: int, context: ContextRank) -> None:
        """Map through `table`, int32 `[max_num_reqs, max_num_blocks_per_req]`, with its contents at each call.

        `context` is rank 0 of 1 for a group whose blocks are not split over the ranks.
        """
        self._table = table
        self._flat_table = table.reshape(-1)
        self._block_size = block_size
        # Arrays are faster operands than Python ints.
        self._size: NDArray[np.int64] = np.array(block_size, dtype=np.int64)
        self._last_offset: NDArray[np.int64] = np.array(block_size - 1, dtype=np.int64)
        self._width: NDArray[np.int64] = np.array(table.shape[1], dtype=np.int64)
        self._num_ranks = context.size
        self._local_offsets = _local_offsets(block_size, context)
        self._grow(0)

    def slots_of(self, batch: TokenBatch, num_padded_tokens: int) -> NDArray[np.int64]:
        """See `SimBackend.slot_mapping`."""
        num_tokens, num_reqs = batch.num_tokens, len(batch.rows)
        if num_tokens > num_padded_tokens > 0:
            raise InputError(f"a batch of {num_tokens} tokens cannot be padded to {num_padded_tokens}")
        length = max(num_tokens, num_padded_tokens)
        # Every run holds a token, except the run of a request without tokens whose position is inside a block.
        if length + num_reqs > len(self._slots):
            self._grow(2 * (length + num_reqs))
        slots = self._slots[:num_tokens]
        if num_tokens == num_reqs == np.count_nonzero(batch.counts):
            self._map_single_tokens(batch, slots)
        else:
            self._map_runs(batch, slots)
        if self._num_ranks > 1:
            self._keep_local(slots)
        if length > num_tokens:
            self._slots[num_tokens:length] = PADDING_SLOT
        return self._read_only_slots[:length]

    def _grow(self, length: int) -> None:
        self._slots: NDArray[np.int64] = np.empty(length, dtype=np.int64)
        self._read_only_slots = self._slots.view()
        self._read_only_slots.flags.writeable = False
        self._numbers: NDArray[np.int64] = np.arange(length, dtype=np.int64)
        self._offsets: NDArray[np.int64] = self._numbers % self._size
        self._index: NDArray[np.int64] = np.empty(length, dtype=np.int64)
        self._places: NDArray[np.int64] = np.empty(length + 1, dtype=np.int64)
        self._blocks: NDArray[np.int32] = np.empty(length, dtype=np.int32)

    def _map_single_tokens(self, batch: TokenBatch, slots: NDArray[np.int64]) -> None:
        """Map a batch in which every request has one token."""
        rows, positions = batch.rows, batch.first_positions
        block_index = np.floor_divide(positions, self._size, out=self._index[: len(rows)])
        if len(rows) and (largest(rows) >= len(self._table) or largest(block_index) >= self._table.shape[1]):
            raise self._out_of_table(batch)
        index = np.multiply(rows, self._width, out=slots)
        index += block_index
        # Every index is valid; with "clip" NumPy needs no buffer beside `out`, as "raise" does.
        slots[...] = self._flat_table.take(index, out=self._blocks[: len(rows)], mode="clip")
        slots -= block_index
        slots *= self._size
        slots += positions

    def _map_runs(self, batch: TokenBatch, slots: NDArray[np.int64]) -> None:
        """Map a batch run by run: the tokens of one request in one block have consecutive slots.

        A batch of n tokens has about n / block_size runs; only `_fill_whole_blocks` and `_fill_runs` touch every token.
        """
        firsts = batch.first_positions
        end_index = firsts + batch.counts
        end_index += self._last_offset
        end_index //= self._size
        if largest(end_index) > self._table.shape[1]:
            raise self._out_of_table(batch)
        num_runs = end_index - firsts // self._size
        run_ends = np.add.accumulate(num_runs)
        # Run r of the batch is in block r + ahead of its request.
        ahead = np.subtract(end_index, run_ends, out=end_index)
        # Without the dtype NumPy before 2 makes int32 slots from int32 blocks, whatever integer type the size has.
        first_slots = np.multiply(self._blocks_of_runs(batch, ahead, num_runs), self._size, dtype=np.int64)
        if len(first_slots) * self._block_size == len(slots):
            self._fill_whole_blocks(first_slots, slots)
        else:
            self._fill_parts_of_blocks(batch, ahead, num_runs, run_ends - num_runs, first_slots, slots)

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
            raise self._out_of_table(batch) from None

    def _fill_whole_blocks(self, first_slots: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        slots.reshape(len(first_slots), self._block_size)[...] = first_slots[:, np.newaxis]
        slots += self._offsets[: len(slots)]

    def _fill_parts_of_blocks(
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
        # First where each run would start in the batch if it were a whole block, then where it does start.
        places = np.multiply(self._numbers[:total], self._size, out=self._places[:total])
        places += ahead.repeat(num_runs)
        distances = np.subtract(first_slots, places, out=first_slots)
        self._places[run_starts] = starts
        self._places[total] = len(slots)
        self._fill_runs(distances, slots)

    def _fill_runs(self, distances: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write the slots of runs that start at `_places` in the batch; slot = place + distance."""
        num_runs, places = len(distances), self._places
        lengths = np.subtract(places[1 : num_runs + 1], places[:num_runs], out=self._index[:num_runs])
        step = max(1, _TOKENS_PER_PIECE // self._block_size)
        stops = [*places[step:num_runs:step].tolist(), len(slots)]
        start = 0
        for run, stop in zip(range(0, num_runs, step), stops, strict=True):
            piece = distances[run : run + step]
            if step > 1:
                piece = piece.repeat(lengths[run : run + step])
            np.add(piece, self._numbers[start:stop], out=slots[start:stop])
            start = stop
            del piece  # two pieces at once would take twice the memory

    def _keep_local(self, slots: NDArray[np.int64]) -> None:
        """Turn slots of all ranks into slots of this rank, and -1 for tokens that another rank holds."""
        offsets = np.remainder(slots, self._size, out=self._index[: len(slots)])
        slots -= offsets
        slots //= self._num_ranks
        slots += self._local_offsets.take(offsets, out=self._places[: len(slots)], mode="clip")
        np.maximum(slots, PADDING_SLOT, out=slots)

    def _out_of_table(self, batch: TokenBatch) -> InputError:
        """The error for a batch with a row or a position beyond the table."""
        num_rows, width = self._table.shape
        if largest(batch.rows) >= num_rows:
            return InputError(f"no row {largest(batch.rows)}: the block tables have rows 0 to {num_rows - 1}")
        last_position = largest(batch.first_positions + batch.counts) - 1
        return InputError(
            f"position {last_position} lies beyond a block table of {width} blocks of {self._block_size} tokens"
        )


def _local_offsets(block_size: int, context: ContextRank) -> NDArray[np.int64]:
    """The offset of each token of a block in the rank's part of it; far below 0 for a token of another rank."""
    offsets = np.arange(block_size, dtype=np.int64)
    stripe, ranks = context.interleave_tokens, context.size
    places = offsets // (stripe * ranks) * stripe + offsets % stripe
    return np.where(offsets // stripe % ranks == context.rank, places, np.iinfo(np.int64).min)
