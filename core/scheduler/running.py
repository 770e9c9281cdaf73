"""Running requests: what each computes in the next step, and which one is preempted when blocks run out."""

import numpy as np
from numpy.typing import NDArray

from ..allocator.allocator import KVCacheAllocator
from ..errors import MisuseError
from ..types import Request, TokenBatch
from .chunks import StateChunks
from .config import SchedulerConfig
from .preemption import PreemptedRequests
from .queues import WaitingQueue


class RunningRequests:
    """The requests that hold blocks and compute: how far each has come, and what it computes in the next step.

    Attributes:
        known: by row, int64 `[num_rows]`: tokens known (prompt and outputs).
        remaining: by row, int64 `[num_rows]`: output tokens still to come.
        computed: by row, int64 `[num_rows]`: tokens computed, those of the step in flight included and rejected drafts
            taken back.
        all_decode: True if every request certainly lacks only its newest token; if False, the columns tell.
        preempted_in_step: whether the last decided step preempted a request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: KVCacheAllocator,
        waiting: WaitingQueue,
        preempted: PreemptedRequests,
        chunks: StateChunks,
    ) -> None:
        self._config = config
        self._chunks = chunks
        self._allocator = allocator
        self._waiting = waiting
        self._preempted = preempted
        num_rows = allocator.config.max_num_reqs
        self._rows: NDArray[np.int64] = np.empty(num_rows, dtype=np.int64)
        self._count = 0
        self._request_in: list[Request | None] = [None] * num_rows
        self._one_each: NDArray[np.int64] = np.ones(num_rows, dtype=np.int64)
        self._one_each.flags.writeable = False
        self.known: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.remaining: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.computed: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.all_decode = False
        self.preempted_in_step = False

    def __len__(self) -> int:
        """Number of running requests."""
        return self._count

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the requests in order of admission: int64 `[num_running]`, a view until one enters or leaves."""
        return self._rows[: self._count]

    def holds(self, row: int) -> bool:
        """Whether a running request holds the row."""
        return self._request_in[row] is not None

    def request_in(self, row: int) -> Request:
        """Return the request in a row.

        Raises:
            MisuseError: no running request holds it.
        """
        request = self._request_in[row]
        if request is None:
            raise MisuseError(f"row {row} holds no running request")
        return request

    def enter(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """Add a request that runs from now on, behind all others."""
        self._rows[self._count] = row
        self._count += 1
        self._request_in[row] = request
        self.known[row] = request.num_tokens
        self.remaining[row] = request.max_tokens - request.num_output_tokens
        self.computed[row] = num_computed_tokens
        self.all_decode = False

    def leave(self, rows: list[int]) -> None:
        """Remove requests that end or lose their blocks; skip rows that hold none."""
        leaving = np.zeros(len(self._rows), dtype=np.bool_)
        leaving[rows] = True
        running = self.rows
        kept = running[~leaving[running]]
        self._count = len(kept)
        self._rows[: len(kept)] = kept
        for row in rows:
            self._request_in[row] = None

    def note_outputs(self, row: int) -> Request:
        """Write the known outputs into the request of a row that is about to leave; return the request."""
        request = self.request_in(row)
        request.num_output_tokens = self.known.item(row) - request.num_prompt_tokens
        return request

    def decide(self) -> TokenBatch:
        """Allocate blocks for what running requests compute next; the batch is empty if none of them can continue."""
        self.preempted_in_step = False
        rows = self.rows.copy()
        firsts = self.computed[rows]
        # A step of decodes always keeps the token budget: max_num_seqs never exceeds max_num_batched_tokens.
        all_decode = self.all_decode and not self._config.num_speculative_tokens
        if all_decode:
            counts = self._one_each[: len(rows)]
        else:
            counts = self._within_budget(rows, firsts, self._wanted(rows, firsts))
            if np.count_nonzero(counts) < len(counts):
                due = counts > 0
                rows, firsts, counts = rows[due], firsts[due], counts[due]
        batch = TokenBatch(rows, firsts, counts)
        if not len(rows):
            return batch
        self._allocator.release_out_of_window_among(rows, firsts)
        if not self._preempted.protected and self._append(batch, 0, all_decode):
            return batch
        return self._under_pressure(batch)

    def _wanted(self, rows: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each request would compute, with the drafts of those that decode, up to the model's length."""
        missing = self.known[rows] - firsts
        if not self._config.num_speculative_tokens:
            return missing
        room = self._allocator.config.max_model_len - firsts - missing
        return missing + np.where(missing == 1, np.clip(room, 0, self._config.num_speculative_tokens), 0)

    def _within_budget(
        self, rows: NDArray[np.int64], firsts: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Tokens of each request, in order, until the budget is spent."""
        limit = self._config.long_prefill_token_threshold
        if limit:
            wanted = np.minimum(wanted, limit)
        budget = self._config.max_num_batched_tokens
        if self._chunks.block_size and np.count_nonzero(wanted > 1):
            return self._chunks_within(budget, rows, firsts, wanted)
        up_to_here = wanted.cumsum()
        if not len(wanted) or up_to_here.item(-1) <= budget:
            return wanted
        return np.minimum(wanted, np.maximum(budget + wanted - up_to_here, 0))

    def _chunks_within(
        self, budget: int, rows: NDArray[np.int64], firsts: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Do `_within_budget` where chunks end at states: what a chunk gives up is left to those behind it."""
        counts = wanted.copy()
        for place, (row, first) in enumerate(zip(rows.tolist(), firsts.tolist(), strict=True)):
            request = self.request_in(row)
            count = min(counts.item(place), budget)
            known = self.known.item(row)
            counts[place] = self._chunks.count(first, count, request.num_prompt_tokens, known, request.cache_boundary)
            budget -= counts.item(place)
        return counts

    def _append(self, batch: TokenBatch, reserved_blocks: int, all_decode: bool = False) -> bool:
        if not self._config.num_speculative_tokens:
            return self._allocator.append(
                batch.rows, 1 if all_decode else batch.counts, reserved_blocks=reserved_blocks
            )
        missing = self.known[batch.rows] - batch.first_positions
        return self._allocator.append(
            batch.rows,
            batch.counts,
            num_draft_tokens=np.maximum(batch.counts - missing, 0),
            num_lookahead_tokens=self._config.num_lookahead_tokens,
            reserved_blocks=reserved_blocks,
            first_positions=batch.first_positions,
        )

    def _under_pressure(self, batch: TokenBatch) -> TokenBatch:
        """Serve requests while blocks last, and preempt one for each request that finds none.

        Protected requests go first: the blocks that they need were free when they were admitted and are kept for them.
        The others are served in the reverse order of preemption, so that no request is preempted after this step has
        served it: its newest blocks are cached already, and a lookup would find content that was never computed.
        """
        rows = batch.rows.tolist()
        place_of = {row: place for place, row in enumerate(rows)}
        guaranteed = [place for row, place in place_of.items() if row in self._preempted.protected]
        order = self._preemption_order()
        pending = [place_of[row] for row in order if row in place_of]
        scheduled = self._append_places(batch, guaranteed, 0)
        reserved = self._preempted.blocks_reserved()
        while pending:
            served = self._append_places(batch, pending, reserved)
            scheduled += served
            pending = pending[len(served) :]
            if not pending:
                break
            needy = rows[pending[0]]
            free = self._allocator.num_free_blocks
            victim = order.pop()
            self._preempt(victim)
            pending = [place for place in pending if rows[place] != victim]
            if victim != needy and self._allocator.num_free_blocks == free:
                # The victim's blocks are all shared, so a second preemption would free nothing either.
                pending.remove(place_of[needy])
        scheduled.sort()
        return _part(batch, scheduled)

    def _preemption_order(self) -> list[int]:
        """Unprotected running rows in the policy's order: the last one is preempted first."""
        rows = [row for row in self.rows.tolist() if row not in self._preempted.protected]
        if self._config.policy == "priority":
            requests = {row: self.request_in(row) for row in rows}
            rows.sort(key=lambda row: (requests[row].priority, requests[row].arrival))
        elif self._config.preemption_victim == "least-computed":
            rows.sort(key=self._allocator.state.placed.__getitem__, reverse=True)
        return rows

    def _append_places(self, batch: TokenBatch, places: list[int], reserved_blocks: int) -> list[int]:
        """Allocate for as many of these batch places, in order, as the free blocks allow; return those served."""
        if not places:
            return []
        part = _part(batch, places)
        missing = self.known[part.rows] - part.first_positions
        fits = self._allocator.num_appendable(
            part.rows,
            part.counts,
            num_draft_tokens=np.maximum(part.counts - missing, 0),
            num_lookahead_tokens=self._config.num_lookahead_tokens,
            reserved_blocks=reserved_blocks,
            first_positions=part.first_positions,
        )
        if fits and not self._append(_part(batch, places[:fits]), reserved_blocks):
            raise MisuseError(f"append refused {fits} requests that num_appendable had counted as fitting")
        return places[:fits]

    def _preempt(self, row: int) -> None:
        request = self.note_outputs(row)
        self._preempted.add(request, row, self.computed.item(row))
        self._allocator.preempt(request.request_id)
        self.leave([row])
        self._waiting.add_preempted(request)
        self.preempted_in_step = True


def _part(batch: TokenBatch, places: list[int]) -> TokenBatch:
    """Select requests of a batch, in the order of `places`."""
    index = np.array(places, dtype=np.intp)
    return TokenBatch(batch.rows[index], batch.first_positions[index], batch.counts[index])
