"""Simulated memory: block tables and slot mappings in NumPy, rebuilt from the events alone."""

import math
from collections.abc import Callable
from typing import Any

import attrs
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
from ..core.reductions import largest
from ..core.types import DraftModel, LatencyModel, ScheduledStep, StepLoad, StepResult, TokenBatch

PADDING_SLOT = -1
# With fewer tokens a request than this, working out runs costs more than it saves.
_TOKENS_A_RUN = 4


@attrs.frozen
class ContextRank:
    """One rank of decode context parallelism.

    Attributes:
        rank: which one, from 0.
        size: how many there are.
        interleave_tokens: consecutive tokens that one rank holds before the next one's turn.
    """

    rank: int = 0
    size: int = 1
    interleave_tokens: int = 1

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.interleave_tokens < 1:
            raise InputError(
                f"rank {self.rank} of {self.size} with stripes of {self.interleave_tokens} tokens: ranks are 0 to size "
                "- 1, stripes at least 1"
            )


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
        self._holds_tokens: list[bool] = []
        self.latency = latency
        self.drafts = drafts
        self.block_tables: list[NDArray[np.int32]] = []
        self.num_blocks_per_row: list[NDArray[np.int32]] = []
        self._block_sizes: list[int] = []
        self._numbers: NDArray[np.int64] = np.empty(0, dtype=np.int64)
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
            int64 `[max(num_tokens, num_padded_tokens)]`.

        Raises:
            InputError: more tokens than the padded length, or positions beyond the tables.
        """
        num_tokens = batch.num_tokens
        if num_tokens > num_padded_tokens > 0:
            raise InputError(f"a batch of {num_tokens} tokens cannot be padded to {num_padded_tokens}")
        is_dealt_out = self._context.size > 1 and self._holds_tokens[group]
        has_runs = num_tokens > _TOKENS_A_RUN * len(batch.rows) and np.count_nonzero(batch.counts) == len(batch.counts)
        if is_dealt_out or not has_runs:
            positions = batch.positions()
            size = self._block_sizes[group]
            blocks = self.block_tables[group][batch.row_of_token(), positions // size].astype(np.int64)
            slots = self._slots(group, blocks, positions % size)
        else:
            slots = self._slots_of_runs(group, batch, num_tokens)
        if num_padded_tokens <= num_tokens:
            return slots
        padded = np.full(num_padded_tokens, PADDING_SLOT, dtype=np.int64)
        padded[:num_tokens] = slots
        return padded

    def _slots_of_runs(self, group: int, batch: TokenBatch, num_tokens: int) -> NDArray[np.int64]:
        """Slots run on inside a block: along such a run they stand equally far from the tokens' places in the batch.

        A batch of n tokens has about n / block_size runs, and only the last two lines touch every token.
        """
        size, table = self._block_sizes[group], self.block_tables[group]
        firsts, counts = batch.first_positions, batch.counts
        ends_at = firsts + counts
        first_index = firsts // size
        end_index = (ends_at + (size - 1)) // size
        if largest(end_index) > table.shape[1]:
            raise InputError(
                f"position {largest(ends_at) - 1} lies beyond a block table of {table.shape[1]} blocks of {size} tokens"
            )
        num_runs = end_index - first_index
        ends = np.add.accumulate(num_runs)
        # Run r of a request holds its block number r + ahead.
        ahead = first_index - ends + num_runs
        of_run = self._counting(int(ends[-1]))
        blocks = table.reshape(-1).take(np.repeat(batch.rows * table.shape[1] + ahead, num_runs) + of_run)
        distances = blocks - of_run
        distances *= size
        distances += np.repeat(firsts - np.add.accumulate(counts) + counts - ahead * size, num_runs)
        lengths: NDArray[np.int64] | int = size
        before, behind = firsts - first_index * size, end_index * size - ends_at
        if np.count_nonzero(before) or np.count_nonzero(behind):
            lengths = np.full(len(distances), size, dtype=np.int64)
            lengths[ends - num_runs] -= before
            lengths[ends - 1] -= behind
        slots = np.repeat(distances, lengths)
        slots += self._counting(num_tokens)
        return slots

    def _counting(self, length: int) -> NDArray[np.int64]:
        """0, 1, 2, ...; a view of an array that is kept."""
        if length > len(self._numbers):
            self._numbers = np.arange(2 * length, dtype=np.int64)
        return self._numbers[:length]

    def _slots(self, group: int, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of tokens at `offsets` of their blocks; -1 for tokens that another rank holds."""
        size, ranks = self._block_sizes[group], self._context.size
        if ranks == 1 or not self._holds_tokens[group]:
            return blocks * size + offsets
        stripe = self._context.interleave_tokens
        local = offsets // (stripe * ranks) * stripe + offsets % stripe
        is_here = offsets // stripe % ranks == self._context.rank
        return np.where(is_here, blocks * (size // ranks) + local, PADDING_SLOT)

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
            self._block_sizes.append(kind.block_size)
            self._holds_tokens.append(kind.holds_tokens)
            self.block_tables.append(np.zeros((event.max_num_reqs, width), dtype=np.int32))
            self.num_blocks_per_row.append(np.zeros(event.max_num_reqs, dtype=np.int32))

    def _append(self, group: int, row: int, blocks: tuple[int, ...]) -> None:
        counts = self.num_blocks_per_row[group]
        start = counts.item(row)
        self.block_tables[group][row, start : start + len(blocks)] = blocks
        counts[row] = start + len(blocks)

    def _prefix_adopted(self, event: PrefixAdopted) -> None:
        self._append(event.group, event.row, as_ints(event.blocks))

    def _blocks_allocated(self, event: BlocksAllocated) -> None:
        blocks = as_ints(event.blocks)
        rows = as_ints(event.rows)
        if len(rows) == len(blocks) > 1:
            index = np.array(rows)
            counts = self.num_blocks_per_row[event.group]
            self.block_tables[event.group][index, counts[index]] = blocks
            counts[index] += 1
            return
        start = 0
        for row, count in zip(rows, as_ints(event.counts), strict=True):
            self._append(event.group, row, blocks[start : start + count])
            start += count

    def _blocks_shared(self, event: BlocksShared) -> None:
        self._append(event.group, event.child_row, as_ints(event.blocks))

    def _block_copied(self, event: BlockCopied) -> None:
        self.block_tables[event.group][event.row, event.index] = event.target

    def _blocks_freed(self, event: BlocksFreed) -> None:
        start = 0
        for group, row, count in zip(as_ints(event.groups), as_ints(event.rows), as_ints(event.counts), strict=True):
            table, counts = self.block_tables[group], self.num_blocks_per_row[group]
            indices = list(as_ints(event.indices)[start : start + count])
            if event.reason is FreeReason.OUT_OF_WINDOW:
                table[row, indices] = 0
            else:
                keep = min(indices) if event.reason is FreeReason.TRUNCATED else 0
                table[row, keep : counts.item(row)] = 0
                counts[row] = keep
            start += count
