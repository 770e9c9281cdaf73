"""Measure the memory wasted by four allocators that do not page and by one that does, while requests always wait.

The method is that of PagedAttention (SOSP'23, Fig. 2 and 13): requests are served first come, first served with
iteration-level batching, as many at a time as the allocator can place. In each iteration every running request gains
one token. Arrival times are not used: as long as requests remain, one waits. In each iteration, every slot of the KV
memory is exactly one of

* token states: it holds the keys and values of a token of a running request;
* reservation: a running request reserved it and will fill it before it ends;
* internal fragmentation: a running request reserved it and will never fill it;
* external fragmentation: everything else: the allocator's rounding (a buddy allocator's powers of two), holes and
  blocks that no waiting request got, and the null block of a paged pool.

The four shares add up to the whole memory. They are averaged over the iterations in which a request waits.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Iterator

import attrs

from ...core.errors import DoesNotFitError, InputError
from .placement import GrowingPlacement, PagedPlacement, Placement, Sequence, reserved_placements

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
    """Fragmentation (1 - largest hole / free slots) over a run: mean, maximum, and at most MAX_SAMPLES samples."""

    max: float = 0.0
    samples: list[tuple[int, float]] = attrs.field(factory=list)  # (iteration, value), evenly spaced
    _weighted: float = 0.0
    _iterations: int = 0
    _stride: int = 1

    def add(self, value: float, iteration: int, num_iterations: int) -> None:
        """Add a value that applies to `num_iterations` iterations from `iteration` on."""
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
    """Iteration-level batching on one placement. The clock jumps from change to change; sums in between are exact."""

    def __init__(
        self, requests: Iterable[tuple[int, int]], placement: Placement, max_model_len: int, max_num_seqs: int | None
    ) -> None:
        self._placement = placement
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._arriving: Iterator[tuple[int, int]] = iter(requests)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._changes: list[tuple[int, int]] = []  # heap of (iteration, order): a sequence ends or outgrows its place
        self._clock = 0
        self._num_admitted = 0
        self._may_admit = True
        # Sums over the running sequences: tokens in the current iteration, reserved slots, slots that will be filled.
        self._tokens = self._capacity = self._to_be_filled = 0
        self.saturated, self.whole = MemoryShares(), MemoryShares()
        self.fragmentation = Fragmentation()
        self.max_batch = self.preemptions = self.max_preemptions_per_request = 0
        self.finished = self.refused = self.refused_too_long = self.empty = 0

    def run(self) -> None:
        """Serve every request."""
        while self._head() is not None or self._running:
            preempted = self._apply_changes()
            # As in vLLM, an iteration that preempts admits no request: the victim waits at the head.
            if self._may_admit and not preempted:
                self._admit_from_queue()
            self._advance()

    def _head(self) -> Sequence | None:
        """The first waiting request that can ever be served."""
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
        # A prompt without output takes one iteration; its last token counts as the token that the iteration adds.
        sequence = Sequence(input_length, output_length) if output_length else Sequence(input_length - 1, 1)
        is_too_long = sequence.total_tokens > self._max_model_len
        if is_too_long or not self._placement.can_ever_hold(sequence):
            self.refused += 1
            self.refused_too_long += is_too_long
            return None
        return sequence

    def _apply_changes(self) -> bool:
        """End the finished sequences and grow the full ones; return True if that preempted a sequence."""
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
        """Make room for one more token; preempt the last admitted sequences until there is room."""
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
        """Preempt by recompute: the sequence returns to the head of the queue with the tokens that it has."""
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
        # While admission is open (after a preemption), it is tried again in the next iteration.
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


@attrs.frozen
class GrowthReport:
    """The cost of growing by copying. `copied_bytes` is None if the bytes of a token are not given."""

    num_copies: int
    copied_tokens: int
    copied_bytes: int | None
    fragmentation: Fragmentation


@attrs.frozen
class AllocatorUsage:
    """How one allocator used the memory. The four shares are percent of all slots and add up to 100.

    The shares and `mean_batch` are averages over the iterations in which a request waited, or over the whole run if
    none ever did (`queue_saturated` is False: the memory was larger than the work).
    """

    name: str
    token_pct: float
    reservation_pct: float
    internal_pct: float
    external_pct: float
    mean_batch: float
    max_batch: int
    preemptions: int
    max_preemptions_per_request: int
    finished: int
    refused: int  # requests that could never fit; they used no memory
    refused_too_long: int  # those longer than max_model_len
    empty: int  # requests without a token
    iterations: int
    queue_saturated: bool
    growth: GrowthReport | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        out = attrs.asdict(self, recurse=False)
        if self.growth:
            holes = self.growth.fragmentation
            fragmentation = {"mean": holes.mean, "max": holes.max, "samples": [list(each) for each in holes.samples]}
            out["growth"] = {**attrs.asdict(self.growth, recurse=False), "fragmentation": fragmentation}
        return out


def compare_allocators(
    requests: Iterable[tuple[int, int]],
    *,
    num_slots: int,
    max_model_len: int,
    block_size: int,
    max_num_seqs: int | None = None,
    watermark: float = 0.01,
    kv_bytes_per_token: int | None = None,
) -> list[AllocatorUsage]:
    """Serve the same requests with `static`, `pow2`, `oracle`, `growing` and `paged` memory, in this order.

    Args:
        requests: (input_length, output_length) in tokens, in queue order; kept as two arrays of numbers.
        num_slots: token slots of the KV memory.
        max_model_len: tokens of the longest request allowed; longer ones are refused, and `static` reserves this much.
        block_size: tokens per block of `paged`.
        max_num_seqs: requests that run at the same time at most; None: limited by memory only.
        watermark: share of the blocks that `paged` keeps free when it admits (default: the value of the paper's vLLM).
        kv_bytes_per_token: bytes of a token's keys and values in all layers, for the bytes that `growing` copies.

    Raises InputError for no requests, sizes below 1, a watermark outside [0, 1) or negative lengths, and
    DoesNotFitError if no allocator can serve a single request.
    """
    sizes = {"num_slots": num_slots, "max_model_len": max_model_len, "block_size": block_size}
    limits = {"max_num_seqs": max_num_seqs, "kv_bytes_per_token": kv_bytes_per_token}
    for name, value in {**sizes, **limits}.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}: it must be at least 1")
    if not 0 <= watermark < 1:
        raise InputError(f"watermark is {watermark}: it must be a share of the blocks, at least 0 and below 1")
    inputs, outputs = _lengths(requests)
    usages: list[AllocatorUsage] = []
    for placement in (
        *reserved_placements(num_slots, max_model_len),
        GrowingPlacement(num_slots, max_model_len),
        PagedPlacement(num_slots, block_size, watermark),
    ):
        run = SaturatedRun(zip(inputs, outputs, strict=True), placement, max_model_len, max_num_seqs)
        run.run()
        usages.append(_usage(run, placement, num_slots, kv_bytes_per_token))
    if not any(usage.finished for usage in usages):
        shortest = min(map(sum, zip(inputs, outputs, strict=True)))
        raise DoesNotFitError(
            f"none of {len(inputs):,} requests fits: the shortest has {shortest:,} tokens, the memory {num_slots:,} "
            f"token slots, and max_model_len is {max_model_len:,}. Give more memory or a larger max_model_len"
        )
    return usages


def _lengths(requests: Iterable[tuple[int, int]]) -> tuple["array[int]", "array[int]"]:
    inputs, outputs = array("q"), array("q")
    for index, (input_length, output_length) in enumerate(requests):
        if input_length < 0 or output_length < 0:
            raise InputError(f"request {index} has the lengths ({input_length}, {output_length}): none may be negative")
        inputs.append(input_length)
        outputs.append(output_length)
    if not inputs:
        raise InputError("there are no requests to compare allocators with")
    return inputs, outputs


def _usage(run: SaturatedRun, placement: Placement, num_slots: int, kv_bytes_per_token: int | None) -> AllocatorUsage:
    queue_saturated = run.saturated.iterations > 0
    shares = run.saturated if queue_saturated else run.whole
    percent_per_slot = 100 / (num_slots * shares.iterations) if shares.iterations else 0.0
    used = shares.token_slots, shares.reservation_slots, shares.internal_slots
    unused = num_slots * shares.iterations - sum(used)
    growth = None
    if isinstance(placement, GrowingPlacement):
        num_bytes = None if kv_bytes_per_token is None else placement.copied_tokens * kv_bytes_per_token
        growth = GrowthReport(placement.num_copies, placement.copied_tokens, num_bytes, run.fragmentation)
    return AllocatorUsage(
        name=placement.name,
        token_pct=used[0] * percent_per_slot,
        reservation_pct=used[1] * percent_per_slot,
        internal_pct=used[2] * percent_per_slot,
        external_pct=unused * percent_per_slot if shares.iterations else 100.0,
        mean_batch=shares.running / shares.iterations if shares.iterations else 0.0,
        max_batch=run.max_batch,
        preemptions=run.preemptions,
        max_preemptions_per_request=run.max_preemptions_per_request,
        finished=run.finished,
        refused=run.refused,
        refused_too_long=run.refused_too_long,
        empty=run.empty,
        iterations=shares.iterations,
        queue_saturated=queue_saturated,
        growth=growth,
    )
