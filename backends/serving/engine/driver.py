"""Drives core's engine loop on the real clock, in one thread, and takes orders from other threads between steps."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ....core.errors import InputError, MisuseError
from ....core.scheduler.engine import EngineObserver, Wait, engine_loop
from ....core.scheduler.scheduler import Scheduler, StepOutcome
from ....core.types import Backend, ScheduledStep, StepResult
from ..errors import EngineFailedError, EngineStoppedError, QueueFullError
from .generation import Generation, Output, StepSampler

if TYPE_CHECKING:
    from .recording import LiveRecording

# New requests that continue one prompt, or the id of a request to abort.
Order: TypeAlias = tuple[Generation, ...] | str


class Inbox:
    """Orders from other threads in their order, and the limit on requests that wait for their first step.

    Methods may be called from any thread; those under "engine thread" from that thread only.

    Attributes:
        num_queued: requests that wait for their first step.
    """

    def __init__(self, max_queued_requests: int) -> None:
        """`max_queued_requests`: requests that may wait for their first step at the same time."""
        if max_queued_requests < 1:
            raise InputError(f"max_queued_requests is {max_queued_requests}; it must be at least 1")
        self.max_queued_requests = max_queued_requests
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._unended: set[str] = set()
        self.num_queued = 0
        self._refusal: Exception | None = None

    @property
    def num_unended(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._unended)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Add requests that continue one prompt, all or none.

        Raises:
            QueueFullError: too many requests wait already.
            InputError: more requests than may ever wait, or a request with one of these ids has not ended yet.
            EngineStoppedError, EngineFailedError: the engine takes no more requests.
        """
        request_ids = [generation.request.request_id for generation in generations]
        if len(generations) > self.max_queued_requests:
            raise InputError(
                f"{len(generations)} outputs of one prompt are more than the {self.max_queued_requests} requests that "
                "may wait at once (max_queued_requests); ask for fewer"
            )
        with self._changed:
            self.raise_refusal()
            for place, request_id in enumerate(request_ids):
                if request_id in self._unended or request_id in request_ids[:place]:
                    raise InputError(f"a request {request_id!r} is still being served; give each one its own id")
            if self.num_queued + len(generations) > self.max_queued_requests:
                raise QueueFullError(
                    f"{self.num_queued} requests wait for their first step, and with {len(generations)} more they are "
                    f"more than max_queued_requests {self.max_queued_requests} allows; try again later"
                )
            self.num_queued += len(generations)
            self._unended.update(request_ids)
            self._orders.append(tuple(generations))
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Ask the engine to abort a request; nothing happens if it has ended."""
        with self._changed:
            if request_id in self._unended:
                self._orders.append(request_id)
                self._changed.notify_all()

    def cancel_all(self) -> None:
        """Ask the engine to abort every request."""
        with self._changed:
            self._orders.extend(sorted(self._unended))
            self._changed.notify_all()

    def close(self, refusal: Exception | None = None) -> None:
        """Take no more requests. Later submissions raise the first refusal."""
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal or EngineStoppedError(
                    "the engine has been shut down; it takes no more requests"
                )
            self._changed.notify_all()

    def raise_refusal(self) -> None:
        """Raise the refusal if the inbox is closed."""
        if self._refusal is not None:
            raise self._refusal

    def wait_until_all_ended(self, timeout_s: float | None) -> bool:
        """Wait until every submitted request has ended; return False if the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unended, timeout_s)

    # -- engine thread -----------------------------------------------------------------------------------------------

    def take(self) -> list[Order]:
        """Return the orders that have gathered, and remove them."""
        if not self._orders:  # the common case between two steps needs no lock
            return []
        with self._changed:
            orders = list(self._orders)
            self._orders.clear()
            return orders

    def wait_for_orders(self) -> bool:
        """Wait until there is an order; return False if none can come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders or (self._refusal is not None and not self._unended))
            return bool(self._orders)

    def started(self) -> None:
        """Count a request as no longer queued: its first step begins."""
        with self._changed:
            self.num_queued -= 1

    def ended(self, request_id: str, had_started: bool) -> None:
        """Count a request as ended."""
        with self._changed:
            self._unended.discard(request_id)
            if not had_started:
                self.num_queued -= 1
            self._changed.notify_all()


class EngineDriver:
    """Drives `engine_loop` with one step in flight. Orders are executed between two steps only.

    Attributes:
        num_steps: steps computed so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        inbox: Inbox,
        now_ns: Callable[[], int],
        recorder: "LiveRecording | None" = None,
        observers: Iterable[EngineObserver] = (),
        on_ended: Callable[[Generation], None] | None = None,
    ) -> None:
        """Start the loop; nothing is computed yet.

        `now_ns` is the clock. `observers` are called after the scheduler has accounted for a step, `on_ended` for each
        request that has ended.
        """
        self.num_steps = 0
        self._scheduler = scheduler
        self._backend = backend
        self._inbox = inbox
        self._now_ns = now_ns
        self._recorder = recorder
        self._on_ended = on_ended
        self._generations: dict[str, Generation] = {}
        self.sampler = StepSampler(self._generation_in, now_ns, scheduler.config.max_num_seqs)
        self._loop = engine_loop(scheduler, [self._deliver_all, *observers, self._between_steps])
        self._move: ScheduledStep | Wait = next(self._loop)

    def advance(self) -> bool:
        """Make one move: execute orders, or compute a step. Return False if there was nothing to do.

        On any error every request ends with the error, its blocks are freed, and the error is raised.
        """
        try:
            move = self._move
            if isinstance(move, Wait):
                if not self._take_orders():
                    return False
                self._move = self._loop.send(None)
                return True
            self._note_first_steps(move)
            self._backend.submit(move)
            result = self._backend.collect()
            self.num_steps += 1
            if self._recorder is not None:
                self._recorder.computed(move, result)
            self._move = self._loop.send(result)
        except Exception as error:
            self._fail(error)
            raise
        return True

    def _generation_in(self, row: int) -> Generation:
        return self._generations[self._scheduler.request_in(row).request_id]

    # -- between steps -----------------------------------------------------------------------------------------------

    def _take_orders(self) -> bool:
        """Execute the orders that have gathered; return False if there were none."""
        orders = self._inbox.take()
        for order in orders:
            if isinstance(order, str):
                self._abort(order)
            else:
                self._lead(list(order))
        return bool(orders)

    def _between_steps(self, _step: ScheduledStep, _result: StepResult, _outcome: StepOutcome) -> None:
        self._take_orders()

    def _lead(self, generations: list[Generation]) -> None:
        """Let the first request compute the prompt for all of them."""
        lead, *samples = generations
        for sample in samples:
            self._generations[sample.request.request_id] = sample
            sample.lead = lead
        lead.samples = samples
        self._submit(lead)

    def _submit(self, generation: Generation) -> None:
        """Let a request compute its prompt."""
        request = generation.request
        self._generations[request.request_id] = generation
        generation.lead = None
        if self._recorder is not None:
            self._recorder.arrived(generation)
        self._scheduler.submit(request)

    def _abort(self, request_id: str) -> None:
        generation = self._generations.get(request_id)
        if generation is None:
            return  # it has ended since
        if generation.lead is not None:
            generation.lead.samples.remove(generation)
            self._submit(generation)
        if self._recorder is not None:
            self._recorder.ending(generation, "abort")
        self._scheduler.abort(request_id)
        self._end(generation, "abort")
        if generation.samples:
            self._lead(generation.samples)

    # -- around a step -----------------------------------------------------------------------------------------------

    def _note_first_steps(self, step: ScheduledStep) -> None:
        now_ns = self._now_ns()
        for row in step.batch.rows.tolist():
            lead = self._generation_in(row)
            for generation in (lead, *lead.samples):
                if not generation.has_started:
                    generation.has_started = True
                    generation.live.started_ns = now_ns
                    self._inbox.started()

    def _deliver_all(self, _step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Deliver a step's tokens to their readers, after the scheduler has freed the blocks of finished requests."""
        outputs: list[Output] = result.outputs
        if len(outputs) != len(outcome.sampled):
            raise MisuseError(
                f"the runner produced {len(outputs)} tokens where the scheduler counted {len(outcome.sampled)}"
            )
        for output in outputs:
            self._deliver(output)
            output.generation.samples = []
            for sample in output.samples:
                self._fork(output.generation, sample)
                self._deliver(sample)

    def _fork(self, lead: Generation, sample: Output) -> None:
        """Let a sample continue as its own request after its first token."""
        generation, has_ended = sample.generation, sample.delta.finish_reason is not None
        generation.lead = None
        generation.keys.take_over(lead.keys)
        generation.request.num_output_tokens = 1
        if self._recorder is not None:
            self._recorder.arrived(generation, sample_of=lead.request.request_id, has_ended=has_ended)
        self._scheduler.fork(lead.request.request_id, generation.request, has_ended)

    def _deliver(self, output: Output) -> None:
        output.generation.live.deliver(output.delta)
        reason = output.delta.finish_reason
        if reason is not None:
            if self._recorder is not None:
                self._recorder.ending(output.generation, reason)
            self._end(output.generation, reason)

    # -- the end of a request ----------------------------------------------------------------------------------------

    def _end(self, generation: Generation, reason: str, error: Exception | None = None) -> None:
        request_id = generation.request.request_id
        del self._generations[request_id]
        self._inbox.ended(request_id, generation.has_started)
        generation.live.end(reason, self._now_ns(), error)
        if self._on_ended is not None:
            self._on_ended(generation)

    def _fail(self, cause: Exception) -> None:
        """End every request after an error and free all blocks; nothing is computed any more."""
        error = EngineFailedError(f"the engine failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._inbox.close(error)
        self._loop.close()
        self._move = Wait()
        # A rerun finds the failed step by the first end that has an error, so samples come last.
        for generation in sorted(self._generations.values(), key=lambda each: each.lead is not None):
            if generation.lead is not None:
                _try(partial(self._submit, generation), cause)
            if self._recorder is not None:
                _try(partial(self._recorder.ending, generation, "error"), cause)
            _try(partial(self._scheduler.abort, generation.request.request_id), cause)
            _try(partial(self._end, generation, "error", error), cause)
        for order in self._inbox.take():
            for generation in () if isinstance(order, str) else order:
                self._generations[generation.request.request_id] = generation
                _try(partial(self._end, generation, "error", error), cause)


def _try(action: Callable[[], object], cause: Exception) -> None:
    """Do one part of ending every request; if a sink or callback fails too, add a note to `cause` and continue."""
    try:
        action()
    except Exception as another:
        cause.add_note(f"and while everything was ended: {type(another).__name__}: {another}")
