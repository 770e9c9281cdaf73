"""What running requests compute in the next step, and who gives way when the blocks do not last for all of them."""

import numpy as np
from numpy.typing import NDArray

from ..allocator.allocator import KVCacheAllocator
from ..allocator.checks import Rows
from ..errors import MisuseError
from ..types import Request, TokenBatch
from .config import SchedulerConfig
from .preemption import PreemptedRequests
from .queues import WaitingQueue

# Requests that run: which rows they hold, in the order of their admission, and how far each has come.


class RunningRequests:
    """Who holds blocks and computes.

    Attributes:
        known: by row, int64 `[num_rows]`: tokens known (prompt and outputs).
        remaining: by row, int64 `[num_rows]`: outputs still to come.
        computed: by row, int64 `[num_rows]`: tokens computed, those of the step in flight included and rejected drafts
            taken back.
        all_decode: that every one lacks only its newest token is certain; where it is not, ask the columns.
    """

    def __init__(self, num_rows: int) -> None:
        self._rows: NDArray[np.int64] = np.empty(num_rows, dtype=np.int64)
        self._count = 0
        self._request_in: list[Request | None] = [None] * num_rows
        self.known: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.remaining: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.computed: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.all_decode = False

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    @property
    def rows(self) -> NDArray[np.int64]:
        """Their rows in the order of their admission: int64 `[num_running]`, a view until one enters or leaves."""
        return self._rows[: self._count]

    def holds(self, row: int) -> bool:
        """Whether a running request holds the row."""
        return self._request_in[row] is not None

    def request_in(self, row: int) -> Request:
        """The request in a row.

        Raises:
            MisuseError: no running request holds it.
        """
        request = self._request_in[row]
        if request is None:
            raise MisuseError(f"row {row} holds no running request")
        return request

    def enter(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """A request runs from here on, behind all others."""
        self._rows[self._count] = row
        self._count += 1
        self._request_in[row] = request
        self.known[row] = request.num_tokens
        self.remaining[row] = request.max_tokens - request.num_output_tokens
        self.computed[row] = num_computed_tokens
        self.all_decode = False

    def leave(self, rows: list[int]) -> None:
        """Requests end or lose their blocks; rows that hold none are passed over."""
        leaving = np.zeros(len(self._rows), dtype=np.bool_)
        leaving[rows] = True
        running = self.rows
        kept = running[~leaving[running]]
        self._count = len(kept)
        self._rows[: len(kept)] = kept
        for row in rows:
            self._request_in[row] = None

    def note_outputs(self, row: int) -> Request:
        """Write the outputs known so far on the request in a row, which is about to leave."""
        request = self.request_in(row)
        request.num_output_tokens = self.known.item(row) - request.num_prompt_tokens
        return request


class RunningSchedule:
    """Running requests in the order of their admission, as far as tokens and blocks go.

    Attributes:
        preempted_in_step: whether the step that was decided last took blocks from a request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: KVCacheAllocator,
        running: RunningRequests,
        waiting: WaitingQueue,
        preempted: PreemptedRequests,
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._running = running
        self._waiting = waiting
        self._preempted = preempted
        self._one_each: NDArray[np.int64] = np.ones(allocator.config.max_num_reqs, dtype=np.int64)
        self._one_each.flags.writeable = False
        self.preempted_in_step = False

    def decide(self) -> TokenBatch:
        """Allocate for what running requests compute in the next step; an empty batch where none of them can go on."""
        running = self._running
        self.preempted_in_step = False
        rows = running.rows.copy()
        firsts = running.computed[rows]
        # A limit that every step of decodes keeps: max_num_seqs tokens always fit max_num_batched_tokens.
        all_decode = running.all_decode and not self._config.num_speculative_tokens
        if all_decode:
            counts = self._one_each[: len(rows)]
        else:
            counts = self._within_budget(self._wanted(rows, firsts))
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

    def _wanted(self, rows: Rows, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each would compute, drafts of those that decode included, as far as the model's length allows."""
        missing = self._running.known[rows] - firsts
        if not self._config.num_speculative_tokens:
            return missing
        room = self._allocator.config.max_model_len - firsts - missing
        return missing + np.where(missing == 1, np.clip(room, 0, self._config.num_speculative_tokens), 0)

    def _within_budget(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens for each, in order, until the budget is spent."""
        limit = self._config.long_prefill_token_threshold
        if limit:
            wanted = np.minimum(wanted, limit)
        budget = self._config.max_num_batched_tokens
        up_to_here = wanted.cumsum()
        if not len(wanted) or up_to_here.item(-1) <= budget:
            return wanted
        return np.minimum(wanted, np.maximum(budget + wanted - up_to_here, 0))

    def _append(self, batch: TokenBatch, reserved_blocks: int, all_decode: bool = False) -> bool:
        lookahead = self._config.num_speculative_tokens
        if not lookahead:
            return self._allocator.append(
                batch.rows, 1 if all_decode else batch.counts, reserved_blocks=reserved_blocks
            )
        missing = self._running.known[batch.rows] - batch.first_positions
        return self._allocator.append(
            batch.rows,
            batch.counts,
            num_draft_tokens=np.maximum(batch.counts - missing, 0),
            num_lookahead_tokens=lookahead,
            reserved_blocks=reserved_blocks,
            first_positions=batch.first_positions,
        )

    # -- when blocks run out -----------------------------------------------------------------------------------------

    def _under_pressure(self, batch: TokenBatch) -> TokenBatch:
        """Serve requests while blocks last, and preempt for the one that finds none.

        Protected requests go first: the blocks they need were free when they were admitted and are kept for them.
        The others go in the reverse order of their sacrifice, so that nobody is preempted who was served in this
        step: its newest blocks are findable already, and would be found without ever having been computed.
        """
        rows = batch.rows.tolist()
        place_of = {row: place for place, row in enumerate(rows)}
        guaranteed = [place for row, place in place_of.items() if row in self._preempted.protected]
        order = self._last_is_preempted_first()
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
                # The victim's blocks are all shared: sacrificing a second request would be in vain as well.
                pending.remove(place_of[needy])
        scheduled.sort()
        return _part(batch, scheduled)

    def _last_is_preempted_first(self) -> list[int]:
        """Unprotected running rows, by the policy's order of sacrifice: the last one gives way first."""
        rows = [row for row in self._running.rows.tolist() if row not in self._preempted.protected]
        if self._config.policy == "priority":
            rows.sort(key=self._urgency)
        elif self._config.preemption_victim == "least-computed":
            rows.sort(key=self._allocator.state.placed.__getitem__, reverse=True)
        return rows

    def _urgency(self, row: int) -> tuple[int, float]:
        request = self._running.request_in(row)
        return request.priority, request.arrival

    def _append_places(self, batch: TokenBatch, places: list[int], reserved_blocks: int) -> list[int]:
        """Allocate for as many of these places in the batch, in order, as the free blocks allow."""
        if not places:
            return []
        part = _part(batch, places)
        fits = self._allocator.num_appendable(
            part.rows,
            part.counts,
            num_lookahead_tokens=self._config.num_speculative_tokens,
            reserved_blocks=reserved_blocks,
            first_positions=part.first_positions,
        )
        if fits and not self._append(_part(batch, places[:fits]), reserved_blocks):
            raise MisuseError(f"append refused {fits} requests that num_appendable had counted as fitting")
        return places[:fits]

    def _preempt(self, row: int) -> None:
        request = self._running.note_outputs(row)
        self._preempted.add(request, row, self._running.computed.item(row))
        self._allocator.preempt(request.request_id)
        self._running.leave([row])
        self._waiting.add_preempted(request)
        self.preempted_in_step = True


def _part(batch: TokenBatch, places: list[int]) -> TokenBatch:
    """Some requests of a batch, in the order of `places`."""
    index = np.array(places, dtype=np.intp)
    return TokenBatch(batch.rows[index], batch.first_positions[index], batch.counts[index])
