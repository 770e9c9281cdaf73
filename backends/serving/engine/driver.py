"""The engine loop of core on the real clock, one move at a time, in one thread and with one step in flight."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from ....core.errors import MisuseError
from ....core.scheduler.engine import EngineObserver, Wait, engine_loop
from ....core.scheduler.scheduler import Scheduler, StepOutcome
from ....core.types import Backend, ScheduledStep, StepResult
from ..errors import EngineFailedError
from .generation import Generation
from .inbox import Inbox, Submission
from .step_sampler import Output, StepSampler


class EngineRecorder(Protocol):
    """Who writes down what commits do not say, so that the run can be run again (`LiveRecording`)."""

    def arrived(self, generation: Generation) -> None:
        """A request is handed to the scheduler."""
        ...

    def forked(self, generation: Generation, lead: Generation, has_ended: bool) -> None:
        """A sample is handed to the scheduler with its first token, which may be its last one."""
        ...

    def ending(self, generation: Generation, reason: str) -> None:
        """A request has ended by itself, or is about to be aborted."""
        ...

    def computed(self, step: ScheduledStep, result: StepResult) -> None:
        """A step was computed; the scheduler has not accounted for it yet."""
        ...


class EngineDriver:
    """Drives `core.engine.engine_loop`. What others ask is done between two steps, never while one is in flight.

    Attributes:
        num_steps: steps computed so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        inbox: Inbox,
        now_ns: Callable[[], int],
        recorder: EngineRecorder | None = None,
        observers: Iterable[EngineObserver] = (),
        on_ended: Callable[[Generation], None] | None = None,
    ) -> None:
        """Nothing is computed yet.

        Args:
            scheduler: decides the steps.
            backend: computes them; its runner takes its tokens from `sampler`.
            inbox: what others ask.
            now_ns: the clock, in nanoseconds.
            recorder: writes down what commits do not say.
            observers: called after each step is accounted for.
            on_ended: called for each request that has ended.
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
        self._loop = engine_loop(scheduler, [self._hand_out, *observers, self._between_steps])
        self._move: ScheduledStep | Wait = next(self._loop)

    @property
    def is_idle(self) -> bool:
        """Whether nothing can be computed until something is asked."""
        return isinstance(self._move, Wait)

    def advance(self) -> bool:
        """Make one move: take in what was asked, or compute a step. False: there was nothing to do.

        Whatever goes wrong in it ends every request with the error, frees what they held, and is raised.
        """
        try:
            return self._advance()
        except Exception as error:
            self._fail(error)
            raise

    def _advance(self) -> bool:
        move = self._move
        if isinstance(move, Wait):
            if not self._take_in():
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
        return True

    def _generation_in(self, row: int) -> Generation:
        return self._generations[self._scheduler.request_in(row).request_id]

    # -- between steps -----------------------------------------------------------------------------------------------

    def _take_in(self) -> bool:
        """Do what was asked meanwhile; False if nothing was."""
        orders = self._inbox.take()
        for order in orders:
            if isinstance(order, Submission):
                self._lead(list(order.generations))
            else:
                self._abort(order.request_id)
        return bool(orders)

    def _between_steps(self, _step: ScheduledStep, _result: StepResult, _outcome: StepOutcome) -> None:
        self._take_in()

    def _lead(self, generations: list[Generation]) -> None:
        """The first one computes the prompt of all."""
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

    def _hand_out(self, _step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Tokens to their readers, after the scheduler has freed what finished requests held."""
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
        """A sample goes on by itself behind its first token."""
        generation, has_ended = sample.generation, sample.delta.finish_reason is not None
        generation.lead = None
        generation.keys.take_over(lead.keys)
        generation.request.num_output_tokens = 1
        if self._recorder is not None:
            self._recorder.forked(generation, lead, has_ended)
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
        """End everything after an error: nothing is computed any more, and nothing stays held."""
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
            for generation in order.generations if isinstance(order, Submission) else ():
                self._generations[generation.request.request_id] = generation
                _try(partial(self._end, generation, "error", error), cause)


def _try(what: Callable[[], object], cause: Exception) -> None:
    """One part of ending everything; a sink or a listener that fails as well must not keep others waiting."""
    try:
        what()
    except Exception as another:
        cause.add_note(f"and while everything was ended: {type(another).__name__}: {another}")
