"""Iteration-level batching under a queue that is never empty, and how much of the memory each state of a slot takes."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

import attrs

from .placement import GrowingPlacement, Placement, Sequence

MAX_SAMPLES = 256


@attrs.define
class MemoryShares:
    """Sums over iterations: slots by state, and running requests."""

    iterations: int = 0
    token_slots: int = 0
    reservation_slots: int = 0
    internal_slots: int = 0
    running: int = 0


@attrs.define
class Fragmentation:
    """1 - largest hole / free slots, over the iterations of a run: mean, maximum, and at most MAX_SAMPLES samples."""

    max: float = 0.0
    samples: list[tuple[int, float]] = attrs.field(factory=list)  # (iteration, value), evenly spaced
    _weighted: float = 0.0
    _iterations: int = 0
    _stride: int = 1

    def add(self, value: float, iteration: int, num_iterations: int) -> None:
        """The value holds for `num_iterations` iterations from `iteration` on."""
        self.max = max(self.max, value)
        self._weighted += value * num_iterations
        self._iterations += num_iterations
        while self._next_sample < iteration + num_iterations:
            self.samples.append((self._next_sample, value))
            if len(self.samples) > MAX_SAMPLES:
                self._stride *= 2
                self.samples = self.samples[::2]

    @property
    def mean(self) -> float:
        """The mean over iterations."""
        return self._weighted / self._iterations if self._iterations else 0.0

    @property
    def _next_sample(self) -> int:
        return self.samples[-1][0] + self._stride if self.samples else 0


class SaturatedRun:
    """Iteration-level batching over one placement. The clock jumps from change to change; sums between are exact."""

    def __init__(
        self, requests: Iterable[tuple[int, int]], placement: Placement, max_model_len: int, max_num_seqs: int | None
    ) -> None:
        self._placement = placement
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._arriving: Iterator[tuple[int, int]] = iter(requests)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # by admission, so the last one is the last admitted
        self._changes: list[tuple[int, int]] = []  # heap of (iteration, order): a sequence ends or outgrows its place
        self._clock = 0
        self._num_admitted = 0
        self._may_admit = True
        # Sums over the running sequences: tokens in the iteration of the clock, slots asked for, those to be filled.
        self._tokens = self._capacity = self._to_be_filled = 0
        self.saturated, self.whole = MemoryShares(), MemoryShares()
        self.fragmentation = Fragmentation()
        self.max_batch = self.preemptions = self.max_preemptions_per_request = 0
        self.finished = self.refused = self.refused_too_long = self.empty = 0

    def run(self) -> None:
        """Serve every request."""
        while self._head() is not None or self._running:
            preempted = self._apply_changes()
            # As in vLLM, an iteration that preempts admits nobody: the victim waits at the head.
            if self._may_admit and not preempted:
                self._admit_from_queue()
            self._advance()

    def _head(self) -> Sequence | None:
        """The first waiting request that can be served at all."""
        while not self._waiting:
            lengths = next(self._arriving, None)
            if lengths is None:
                return None
            sequence = self._accepted(*lengths)
            if sequence is not None:
                self._waiting.append(sequence)
        return self._waiting[0]

    def _accepted(self, input_length: int, output_length: int) -> Sequence | None:
        if input_length + output_length == 0:
            self.empty += 1
            return None
        # A prompt without output takes one iteration; its last token counts as the one that the iteration adds.
        sequence = Sequence(input_length, output_length) if output_length else Sequence(input_length - 1, 1)
        is_too_long = sequence.total_tokens > self._max_model_len
        if is_too_long or not self._placement.can_ever_hold(sequence):
            self.refused += 1
            self.refused_too_long += is_too_long
            return None
        return sequence

    def _apply_changes(self) -> bool:
        """End the sequences that are done and grow those that are full; True where somebody was preempted for it."""
        full: list[Sequence] = []
        while self._changes and self._changes[0][0] <= self._clock:
            sequence = self._running.get(heapq.heappop(self._changes)[1])
            if sequence is None:  # preempted since
                continue
            if self._clock == sequence.started + sequence.output_tokens:
                self._remove(sequence)
                self.finished += 1
            else:
                full.append(sequence)
        num_before = self.preemptions
        for sequence in full:
            if sequence.order in self._running:
                self._grow(sequence)
        return self.preemptions > num_before

    def _grow(self, sequence: Sequence) -> None:
        """Make room for one more token, preempting the last admitted for as long as there is none."""
        self._count(sequence, -1)
        while not self._placement.grow(sequence, sequence.tokens_at(self._clock)):
            victim = self._running[next(reversed(self._running))]
            if victim is sequence:
                self._count(sequence, 1)
                self._preempt(sequence)
                return
            self._preempt(victim)
        self._count(sequence, 1)
        self._note_next_change(sequence)

    def _preempt(self, victim: Sequence) -> None:
        """By recompute: it returns to the head of the queue with the tokens that it has so far."""
        self._remove(victim)
        done = self._clock - victim.started
        again = Sequence(victim.start_tokens + done, victim.output_tokens - done, victim.preemptions + 1)
        self._waiting.appendleft(again)
        self.preemptions += 1
        self.max_preemptions_per_request = max(self.max_preemptions_per_request, again.preemptions)

    def _admit_from_queue(self) -> None:
        while self._max_num_seqs is None or len(self._running) < self._max_num_seqs:
            sequence = self._head()
            if sequence is None or not self._placement.admit(sequence, is_alone=not self._running):
                break
            self._waiting.popleft()
            sequence.order, sequence.started = self._num_admitted, self._clock
            self._num_admitted += 1
            self._running[sequence.order] = sequence
            self._count(sequence, 1)
            self._note_next_change(sequence)
        self._may_admit = False
        self.max_batch = max(self.max_batch, len(self._running))

    def _remove(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        self._placement.release(sequence)
        del self._running[sequence.order]
        self._may_admit = True

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._tokens += sign * sequence.tokens_at(self._clock)
        self._capacity += sign * sequence.capacity
        self._to_be_filled += sign * min(sequence.capacity, sequence.total_tokens)

    def _note_next_change(self, sequence: Sequence) -> None:
        fills = min(sequence.capacity, sequence.total_tokens)
        heapq.heappush(self._changes, (sequence.started + fills - sequence.start_tokens, sequence.order))

    def _advance(self) -> None:
        """Account for the iterations up to the next change, and move the clock there."""
        if not self._running and self._head() is None:
            return
        # Where admission is still open (after a preemption), it is tried again in the very next iteration.
        until = self._clock + 1 if self._may_admit or not self._changes else max(self._changes[0][0], self._clock + 1)
        num_iterations, num_running = until - self._clock, len(self._running)
        grown = num_running * num_iterations * (num_iterations - 1) // 2
        for shares in (self.whole, self.saturated) if self._head() is not None else (self.whole,):
            shares.iterations += num_iterations
            shares.running += num_running * num_iterations
            shares.token_slots += self._tokens * num_iterations + grown
            shares.reservation_slots += (self._to_be_filled - self._tokens) * num_iterations - grown
            shares.internal_slots += (self._capacity - self._to_be_filled) * num_iterations
        if isinstance(self._placement, GrowingPlacement):
            self.fragmentation.add(self._placement.heap.fragmentation, self._clock, num_iterations)
        self._tokens += num_running * num_iterations
        self._clock = until
