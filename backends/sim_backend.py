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
from ..core.types import DraftModel, LatencyModel, ScheduledStep, StepLoad, StepResult, TokenBatch
from .context_rank import ContextRank
from .sim_slots import GroupSlots


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
