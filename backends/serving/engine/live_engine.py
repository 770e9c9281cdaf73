"""A live engine: core's allocator, scheduler and engine loop on the real clock, with real tokens.

    engine = LiveEngine(runner, allocator=allocator_config, scheduler=SchedulerConfig(max_num_seqs=8))
    request = engine.submit(prompt_token_ids, SamplingSettings(max_tokens=100, temperature=0))
    for delta in request:
        print(delta.token_id)
    engine.shutdown()

One thread drives the loop. Every other method may be called from any thread.
"""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ....core.allocator.allocator import KVCacheAllocator
from ....core.allocator.config import AllocatorConfig
from ....core.errors import InputError, MisuseError
from ....core.keys.block_hash import BlockHasher, block_hasher
from ....core.keys.extra_keys import ExtraKeys
from ....core.keys.token_keys import TokenKeySource
from ....core.scheduler.config import SchedulerConfig, SchedulerStats
from ....core.scheduler.engine import EngineObserver
from ....core.scheduler.scheduler import Scheduler
from ....core.types import EventSink, Request
from ..model.runner import ModelRunner
from ..sampling.detokenizer import Tokenizer
from ..sampling.sampling import seed_of_request
from ..sampling.settings import SamplingSettings, TokenRules
from .driver import EngineDriver, Inbox
from .generation import Generation
from .request import NANOSECONDS, LiveRequest
from .request_checks import RequestChecks, RequestLengths

if TYPE_CHECKING:
    from .recording import LiveRecording


@attrs.frozen(kw_only=True)
class EngineStats:
    """The figures of an engine now.

    Attributes:
        num_running: requests that hold blocks.
        num_queued: requests that wait for their first step.
        num_unended: requests that were submitted and have not ended.
        num_steps: steps computed so far.
        kv_cache_usage: fraction of the usable blocks that requests hold.
        scheduler: counters since the engine's start.
    """

    num_running: int
    num_queued: int
    num_unended: int
    num_steps: int
    kv_cache_usage: float
    scheduler: SchedulerStats


class LiveEngine:
    """Serves requests until it is shut down.

    Attributes:
        allocator: its allocator, read-only.
        scheduler: its scheduler, read-only.
        lengths: the longest requests that it can hold.
        tokenizer: turns outputs into text; None: there is none.
        failure: the error that it failed with, or None.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        allocator: AllocatorConfig,
        scheduler: SchedulerConfig,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        hasher: BlockHasher | None = None,
        sinks: Iterable[EventSink] = (),
        observers: Iterable[EngineObserver] = (),
        recording: "LiveRecording | None" = None,
        max_queued_requests: int = 1024,
        seed: int = 0,
        on_request_ended: Callable[[LiveRequest], None] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        start: bool = True,
    ) -> None:
        """Create the pool and start serving.

        Args:
            runner: the model; its backend is initialized and has no pool yet.
            allocator: pool and groups of the plan that the backend was initialized with. Its `key_algorithm` becomes
                the hasher's name.
            scheduler: limits and policies.
            tokenizer: turns outputs into text, which stop texts need.
            eos_token_ids: the model's tokens that end an output.
            hasher: hashes tokens to block keys; SHA-256 unless given.
            sinks: further sinks for every commit (metrics, KV events).
            observers: called in the engine's thread after each step.
            recording: records the run; closed when the engine has stopped.
            max_queued_requests: requests that may wait for their first step (back-pressure).
            seed: sampling seed for requests without one.
            on_request_ended: called in the engine's thread for each request that has ended.
            clock_ns: the real clock, in nanoseconds.
            start: whether a thread drives the engine; if False, each call of `advance` makes one move.

        Raises:
            InputError: settings that a live engine cannot serve with, or that contradict each other.
        """
        _check_settings(runner, allocator, scheduler)
        self.tokenizer = tokenizer
        self.failure: Exception | None = None
        self._runner = runner
        self._backend = runner.backend
        self._hasher = block_hasher() if hasher is None else hasher
        self._checks = RequestChecks(
            vocab_size=runner.vocab_size,
            # A token without a logit never ends an output.
            eos_token_ids=frozenset(each for each in eos_token_ids if 0 <= each < runner.vocab_size),
            has_tokenizer=tokenizer is not None,
            policy=scheduler.policy,
        )
        self._recording = recording
        self._seed = seed
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()
        self._ordinals = itertools.count()  # `next` on it is atomic, so every thread gets its own numbers
        recorded = () if recording is None else (recording,)
        config = attrs.evolve(allocator, key_algorithm=self._hasher.name)
        self.allocator = KVCacheAllocator(config, sinks=[self._backend, *recorded, *sinks])
        self.scheduler = Scheduler(scheduler.for_content(), self.allocator)
        self.lengths = RequestLengths(self.scheduler)
        self._inbox = Inbox(max_queued_requests)
        ended = None if on_request_ended is None else lambda generation: on_request_ended(generation.live)
        self._driver = EngineDriver(self.scheduler, self._backend, self._inbox, clock_ns, recording, observers, ended)
        runner.tokens = self._driver.sampler
        self._backend.runner = runner
        if recording is not None:
            recording.begin(self.scheduler, self._backend)
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._serve, name="kvledger-engine", daemon=True)
            self._thread.start()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int] | NDArray[np.integer[Any]],
        settings: SamplingSettings,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> LiveRequest:
        """Queue a request.

        Args:
            prompt_token_ids: at least one token.
            settings: how its output is sampled and where it ends; a missing seed is derived from the engine's.
            priority: with the policy "priority" the lowest value goes first; with any other it must be 0.
            cache_salt: only requests with the same salt share cached blocks (tenant isolation); None: those without.
            request_id: an id that no unended request has; generated unless given.

        Raises:
            InputError: a prompt or settings that this engine cannot serve, or an id that is taken.
            DoesNotFitError: the pool can never hold prompt and `max_tokens`.
            QueueFullError: too many requests wait already.
            EngineStoppedError, EngineFailedError: the engine takes no more requests.
        """
        (live,) = self.submit_samples(
            prompt_token_ids,
            [settings],
            priority=priority,
            cache_salt=cache_salt,
            request_ids=None if request_id is None else [request_id],
        )
        return live

    def submit_samples(
        self,
        prompt_token_ids: Sequence[int] | NDArray[np.integer[Any]],
        settings: Sequence[SamplingSettings],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[LiveRequest]:
        """Queue several outputs of one prompt, all or none: the API's `n`.

        The prompt is computed once. Then the outputs share its blocks by a fork, and diverge by copy on write; each is
        a separate request with its own figures and end.

        `settings` and `request_ids` have one entry for each output; the other arguments and the errors are those of
        `submit`.

        Raises:
            InputError: also if there are no settings, more outputs than may wait at once, or another number of ids.
        """
        self._inbox.raise_refusal()
        tokens = self._checks.prompt(prompt_token_ids)
        rules = self._checks.samples(settings, priority)
        if request_ids is not None and len(request_ids) != len(settings):
            raise InputError(f"{len(request_ids)} request_ids for {len(settings)} outputs; give one for each")
        now_ns = self._clock_ns()
        names = [None] * len(settings) if request_ids is None else request_ids
        generations = [
            self._generation(tokens, each, its_rules, name, priority, cache_salt, now_ns)
            for each, its_rules, name in zip(settings, rules, names, strict=True)
        ]
        self._inbox.submit(generations)
        return [generation.live for generation in generations]

    def _generation(
        self,
        tokens: NDArray[np.int64],
        settings: SamplingSettings,
        rules: TokenRules,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        now_ns: int,
    ) -> Generation:
        ordinal = next(self._ordinals)
        keys = TokenKeySource(tokens, self._hasher, self.allocator.config.hash_block_size, ExtraKeys(cache_salt))
        request = Request(
            request_id=f"request-{ordinal}" if request_id is None else request_id,
            num_prompt_tokens=len(tokens),
            max_tokens=settings.max_tokens,
            keys=keys,
            priority=priority,
            arrival=(now_ns - self._began_ns) / NANOSECONDS,
        )
        self.lengths.check(request)
        live = LiveRequest(request, settings, now_ns, self._inbox.cancel)
        seed = seed_of_request(self._seed, ordinal) if settings.seed is None else settings.seed
        return Generation(request, live, keys, tokens, seed, rules, self.tokenizer)

    def cancel(self, request_id: str) -> None:
        """End a request after the step in flight; nothing happens if it has ended or never existed."""
        self._inbox.cancel(request_id)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.allocator.config.max_model_len

    @property
    def stats(self) -> EngineStats:
        """The engine's figures now."""
        pool = self.allocator.pool
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_queued=self._inbox.num_queued,
            num_unended=self._inbox.num_unended,
            num_steps=self._driver.num_steps,
            kv_cache_usage=pool.num_held_blocks / pool.num_usable_blocks,
            scheduler=attrs.evolve(self.scheduler.stats),
        )

    # -- the thread --------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Without an engine thread: execute orders, or compute a step; return False if there was nothing to do.

        Raises:
            MisuseError: a thread drives this engine.
        """
        if self._thread is not None:
            raise MisuseError("a thread drives this engine; make it with start=False to call advance")
        try:
            return self._driver.advance()
        except Exception as error:
            self.failure = error
            raise

    def _serve(self) -> None:
        """Run the engine's thread."""
        if self._backend.device.type == "cuda":  # each thread has its own current device
            import torch

            torch.cuda.set_device(self._backend.device)
        try:
            while self._driver.advance() or self._inbox.wait_for_orders():
                pass
        except Exception as error:
            self.failure = error

    def shutdown(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests, end the unended ones, and free everything. A second call is harmless.

        Args:
            drain: let requests finish; False: abort them after the step in flight.
            timeout_s: when to abort unfinished requests, and how long to wait for the step in flight then; None: no
                limit.

        Raises:
            TimeoutError: a step is still in flight after that; call it again to wait longer.
            MisuseError: called from the engine's own thread.
            LogWriteError: the recording could not be completed; everything else is done.
        """
        if self._thread is threading.current_thread():
            raise MisuseError("the engine cannot shut itself down from its own thread, where its callbacks run")
        self._inbox.close()
        if self._thread is None:
            if not drain:
                self._inbox.cancel_all()
            while self.failure is None and self.advance():
                pass
        else:
            if not drain or not self._inbox.wait_until_all_ended(timeout_s):
                self._inbox.cancel_all()
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"the step in flight has not ended within {timeout_s} s; call shutdown again to wait"
                )
        with self._ending:
            self._runner.tokens = None
            self._backend.runner = None
            if self._recording is not None:
                self._recording.end()

    def __enter__(self) -> "LiveEngine":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.shutdown(drain=error is None)


def _check_settings(runner: ModelRunner, allocator: AllocatorConfig, scheduler: SchedulerConfig) -> None:
    if scheduler.num_speculative_tokens:
        raise InputError(
            f"num_speculative_tokens is {scheduler.num_speculative_tokens}, and a live engine has no draft model; set 0"
        )
    if scheduler.preemption_mode != "recompute":
        raise InputError(
            f"preemption_mode is {scheduler.preemption_mode!r}, and a live engine copies no blocks to host memory; set "
            "'recompute'"
        )
    runner.length_limit.check(allocator.max_model_len, "max_model_len")
