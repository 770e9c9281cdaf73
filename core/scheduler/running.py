"""Running requests: what each computes in the next step, and which one is preempted when blocks run out."""

from typing import Any

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
        drafts: by row, int64 `[num_rows]`: drafts ready to be verified: none before a request has produced a token.
        prefill_limit: most tokens of one prompt in this step; 0: no such limit.
        all_decode: True if every request certainly lacks only its newest token; if False, the columns tell.
        promised: by row, int64 `[num_rows]`: how many of the known tokens the step in flight still has to sample.
        in_flight: by row, int64 `[num_rows]`: how many of the computed tokens the step in flight computes.
        overlaps: whether a step is in flight while the next one is decided: asynchronous scheduling.
        preempted: by row, the requests that the last decided step preempted.
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
        self.drafts: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.prefill_limit = 0
        self.all_decode = False
        self.promised: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.in_flight: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.overlaps = False
        self.preempted: dict[int, Request] = {}

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

    def enter(self, request: Request, row: int, num_computed_tokens: int, num_drafts: int = 0) -> None:
        """Add a request that runs from now on, behind all others."""
        self._rows[self._count] = row
        self._count += 1
        self._request_in[row] = request
        self.known[row] = request.num_tokens
        self.remaining[row] = request.max_tokens - request.num_output_tokens
        self.computed[row] = num_computed_tokens
        self.drafts[row] = num_drafts
        self.promised[row] = self.in_flight[row] = 0
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

    def pads_admissions(self, batch: TokenBatch) -> bool:
        """Whether a request that lacks a single token enters with drafts: all of the batch verify drafts."""
        return self._config.num_speculative_tokens > 0 and bool(self.drafts[batch.rows].all())

    def decide(self) -> TokenBatch:
        """Allocate blocks for what running requests compute next; the batch is empty if none of them can continue."""
        self.preempted.clear()
        batch = self._batch_of(self.rows.copy(), self._config.max_num_batched_tokens)
        if not len(batch.rows):
            return batch
        if self._config.protect_preempted or self._config.preemption_victim == "least-computed":
            return self._all_or_preempting(batch)
        num_served = self._append(batch)
        return batch if num_served == len(batch.rows) else self._preempting(batch, num_served)

    def _batch_of(self, rows: NDArray[np.int64], budget: int) -> TokenBatch:
        """Divide a budget of tokens among rows, in order; those that get none are left out."""
        firsts = self.computed[rows]
        # A step of decodes always keeps the token budget: max_num_seqs never exceeds max_num_batched_tokens.
        if self.all_decode and not self._config.num_speculative_tokens:
            return TokenBatch(rows, firsts, self._one_each[: len(rows)])
        counts = self._within_budget(rows, firsts, self._wanted(rows, firsts), budget)
        if np.count_nonzero(counts) < len(counts):
            due = counts > 0
            rows, firsts, counts = rows[due], firsts[due], counts[due]
        return TokenBatch(rows, firsts, counts)

    def _wanted(self, rows: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each request would compute, with the drafts of those that decode, up to the model's length."""
        missing = self.known[rows] - firsts
        if self.overlaps:  # the last token of a request may be in flight
            missing = np.where(self.remaining[rows] > 0, missing, 0)
        if not self._config.num_speculative_tokens:
            return missing
        # The token that the step samples needs a position of its own.
        room = self._allocator.config.max_model_len - 1 - firsts - missing
        return missing + np.clip(room, 0, self.drafts[rows])

    def _within_budget(
        self, rows: NDArray[np.int64], firsts: NDArray[np.int64], wanted: NDArray[np.int64], budget: int
    ) -> NDArray[np.int64]:
        """Tokens of each request, in order, until the budget is spent."""
        if self.prefill_limit:
            wanted = np.minimum(wanted, self.prefill_limit)
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

    def _append(self, batch: TokenBatch, reserved_blocks: int = 0) -> int:
        """Allocate for as many requests, in order, as the free blocks allow; return how many were served."""
        if not self.overlaps and not self._config.num_speculative_tokens:
            return self._allocator.append_in_turn(batch.rows, self._counts(batch), reserved_blocks=reserved_blocks)
        return self._allocator.append_in_turn(
            batch.rows,
            self._counts(batch),
            **self._slots(batch),
            num_processed_tokens=self._processed(batch) if self.overlaps else None,
            reserved_blocks=reserved_blocks,
        )

    def _processed(self, batch: TokenBatch) -> NDArray[np.int64]:
        """Tokens of each request that have been computed for certain: a window may be left behind so far."""
        return batch.first_positions - self.in_flight[batch.rows]

    def _counts(self, batch: TokenBatch) -> int | NDArray[np.int64]:
        return 1 if self.all_decode and not self._config.num_speculative_tokens else batch.counts

    def _slots(self, batch: TokenBatch) -> dict[str, Any]:
        """Return where the tokens of a batch start, and which are drafts or unknown; nothing in the usual case."""
        if self.overlaps:
            return {"num_known_tokens": self.known[batch.rows] - self.promised[batch.rows]}
        if not self._config.num_speculative_tokens:
            return {}
        missing = self.known[batch.rows] - batch.first_positions
        return {
            "num_draft_tokens": np.maximum(batch.counts - missing, 0),
            "num_lookahead_tokens": self._config.num_lookahead_tokens,
            "first_positions": batch.first_positions,
        }

    def _preempting(self, batch: TokenBatch, num_served: int) -> TokenBatch:
        """Serve requests in order of admission, and preempt others until the next one finds its blocks, as vLLM does.

        The victim is the request that was admitted last, or the least urgent one: under "priority" it may have been
        served in this step, and the tokens that it would have computed are left to those behind. Once the request that
        needs blocks is preempted itself, no further one is served.
        """
        served = dict(_items(batch, 0, num_served))
        left: list[int] = self.rows.tolist()
        while num_served < len(batch.rows):
            (needy, (first, count)) = _items(batch, num_served, num_served + 1)[0]
            left = left[left.index(needy) :]
            alone = _part(batch, [num_served])
            while not self._append(alone):
                victim = self._victim()
                self._preempt(victim, served.pop(victim, None))
                if victim == needy:
                    return _batch(served)
                if victim in left:
                    left.remove(victim)
            served[needy] = first, count
            budget = self._config.max_num_batched_tokens - sum([count for _, count in served.values()])
            left = left[1:]
            batch = self._batch_of(np.array(left, dtype=np.int64), budget)
            num_served = self._append(batch) if len(batch.rows) else 0
            served.update(_items(batch, 0, num_served))
        return _batch(served)

    def _victim(self) -> int:
        """The running row that is preempted next: the one admitted last, or the least urgent one."""
        if self._config.policy != "priority":
            return self._rows.item(self._count - 1)
        requests = [self.request_in(row) for row in self.rows.tolist()]
        last = max(range(len(requests)), key=lambda place: (requests[place].priority, requests[place].arrival))
        return self._rows.item(last)

    def _all_or_preempting(self, batch: TokenBatch) -> TokenBatch:
        """Serve all requests if the blocks reach; if not, preempt one for each request that finds none.

        Protected requests go first: the blocks that they need were free when they were admitted and are kept for them.
        The others are served in the reverse order of preemption, so that no request is preempted after this step has
        served it.
        """
        self._allocator.release_out_of_window_among(batch.rows, self._processed(batch))
        protected = self._preempted.protected
        if not protected and self._allocator.append(batch.rows, self._counts(batch), **self._slots(batch)):
            return batch
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
        return places[: self._append(_part(batch, places), reserved_blocks)] if places else []

    def _preempt(self, row: int, served: tuple[int, int] | None = None) -> None:
        """Preempt a request; `served` is what this step would have computed of it: (first position, count)."""
        request = self.note_outputs(row)
        self._preempted.add(request, row, self.computed.item(row))
        if served is not None and self._config.drop_unwritten_keys:
            tables = self._allocator.state.tables
            unwritten = [block for t in tables for block in t.blocks(row)[served[0] // t.block_size :] if block]
            self._allocator.evict(unwritten)
        self._allocator.preempt(request.request_id)
        self.leave([row])
        self._waiting.add_preempted(request)
        self.preempted[row] = request


def _part(batch: TokenBatch, places: list[int]) -> TokenBatch:
    """Select requests of a batch, in the order of `places`."""
    index = np.array(places, dtype=np.intp)
    return TokenBatch(batch.rows[index], batch.first_positions[index], batch.counts[index])


def _items(batch: TokenBatch, start: int, stop: int) -> list[tuple[int, tuple[int, int]]]:
    """List the places `start <= place < stop` of a batch as (row, (first position, count))."""
    columns = [column[start:stop].tolist() for column in (batch.rows, batch.first_positions, batch.counts)]
    return [(row, (first, count)) for row, first, count in zip(*columns, strict=True)]


def _batch(items: dict[int, tuple[int, int]]) -> TokenBatch:
    """Make a batch of what `_items` lists."""
    columns = np.array([(row, *values) for row, values in items.items()], dtype=np.int64).reshape(-1, 3).T
    return TokenBatch(columns[0].copy(), columns[1].copy(), columns[2].copy())
