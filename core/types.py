"""What crosses the seams: requests, batches, steps, and the protocols that the parts offer each other."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .events import Commit, Key

# Sums and extremes of short columns, without the Python layer of ndarray's methods.


def sum_of(column: NDArray[Any]) -> int:
    """The sum of a column of integers; 0 for an empty one."""
    return int(np.add.reduce(column))


def smallest(column: NDArray[Any]) -> int:
    """The smallest entry of a column of integers that is not empty."""
    return column.item(column.argmin())


def largest(column: NDArray[Any]) -> int:
    """The largest entry of a column of integers that is not empty."""
    return column.item(column.argmax())


class KeySource(Protocol):
    """Where a request's block keys come from: a content hash over its tokens, or the ids of a trace."""

    def keys(self, start: int, stop: int) -> Sequence[Key]:
        """The keys of the complete hash blocks `start <= i < stop`; block i ends at token `(i + 1) * hash_block_size`.

        May return fewer (or none) for a request that must not be cached; the blocks behind the last key then stay
        without one.
        """
        ...


@attrs.define(eq=False)
class Request:
    """One request, from submission to its end. The scheduler owns it; the allocator reads it.

    `num_output_tokens` counts the tokens known so far; `max_tokens` bounds them. `keys` is None where nothing may be
    shared. `cache_boundary` is the last one that a lookup reported (`PrefixMatch.boundary`); sparse retention keeps
    the window before it. `num_cached_tokens` is what the first admission found in the cache (None before it), and
    `num_preemptions` how often the request has lost its blocks; both start anew when it is submitted.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int = 1
    keys: KeySource | None = None
    priority: int = 0
    arrival: float = 0.0
    num_output_tokens: int = 0
    cache_boundary: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0

    def __attrs_post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.max_tokens < 1:
            raise InputError(
                f"request {self.request_id}: {self.num_prompt_tokens} prompt tokens and max_tokens {self.max_tokens}; "
                "both must be at least 1"
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return self.num_prompt_tokens + self.num_output_tokens


@attrs.frozen(eq=False)
class TokenBatch:
    """The tokens of one engine step, by row of the block tables, in batch order.

    `rows`, `first_positions` and `counts` are int64 `[num_reqs]`; request i computes positions
    `first_positions[i] .. first_positions[i] + counts[i] - 1`.
    """

    rows: NDArray[np.int64]
    first_positions: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum_of(self.counts)

    def query_start_loc(self) -> NDArray[np.int64]:
        """Where each request's tokens start in the flat batch, and its end: int64 `[num_reqs + 1]`."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.counts)])

    def positions(self) -> NDArray[np.int64]:
        """The position of every token in its request: int64 `[num_tokens]`."""
        starts = self.query_start_loc()[:-1]
        return np.arange(self.num_tokens, dtype=np.int64) + np.repeat(self.first_positions - starts, self.counts)

    def row_of_token(self) -> NDArray[np.int64]:
        """The row of every token: int64 `[num_tokens]`."""
        return np.repeat(self.rows, self.counts)


class StepLoad(NamedTuple):
    """The sums over one engine step that a latency model needs. A token at position p attends to p + 1 tokens.

    Attributes:
        num_prefill_tokens: tokens of requests with more than one token still to be computed.
        num_decode_tokens: tokens of requests that go on producing output, one each and its drafts.
        prefill_context_tokens: over prefill tokens, the sum of the tokens that they attend to.
        decode_context_tokens: over decode tokens, the same.
        num_sampled: requests that produce an output token in this step.
        num_swapped_blocks: blocks copied between device and host memory before the step, in both directions.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    prefill_context_tokens: int
    decode_context_tokens: int
    num_sampled: int
    num_swapped_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.num_prefill_tokens + self.num_decode_tokens

    def one_token_later(self) -> "StepLoad":
        """The load of the same decode-only step once every request in it has grown by a token."""
        context = self.decode_context_tokens + self.num_decode_tokens
        return StepLoad(0, self.num_decode_tokens, 0, context, self.num_sampled)


class ScheduledStep(NamedTuple):
    """What is computed next: one engine step, or a macro-step of several identical decode steps.

    Attributes:
        batch: every token; in a macro-step of n steps each request has n of them.
        load: the sums over the first of the steps.
        num_steps: how many engine steps this stands for.
        num_draft_tokens: int64 `[num_reqs]`, how many of each request's tokens are drafts; None: none of any.
        blocks_taken_at: for each step after the first, how many blocks are first used in it (the allocator takes
            them all at once, in the order in which single steps would have).
    """

    batch: TokenBatch
    load: StepLoad
    num_steps: int = 1
    num_draft_tokens: NDArray[np.int64] | None = None
    blocks_taken_at: tuple[int, ...] = ()


class StepResult(NamedTuple):
    """What a backend reports of a step: how long it took and what it produced.

    Attributes:
        nanoseconds: the duration of each engine step, `num_steps` of them. Whole nanoseconds, so that simulated
            time adds up exactly.
        outputs: what was produced; None where tokens are only counted (simulation).
        num_accepted_tokens: int64 `[num_reqs]`, how many drafts of each request were accepted; None: none were there.
        stopped: rows whose request ends with this step's token although `max_tokens` would allow more.
    """

    nanoseconds: tuple[int, ...]
    outputs: Any = None
    num_accepted_tokens: NDArray[np.int64] | None = None
    stopped: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The duration of the whole step in seconds."""
        return sum(self.nanoseconds) / 1e9


class EventSink(Protocol):
    """Anything that listens to commits: a backend, a log, a publisher, metrics. Called once for each, in order."""

    def apply(self, commit: Commit) -> None:
        """Take note of one commit. Raising stops the engine; the commit itself stands."""
        ...


class LatencyModel(Protocol):
    """How long an engine step takes.

    A model that looks at neither of the load's sums over contexts may say so by an attribute `ignores_context = True`:
    the steps of a run of decodes then take the same time, and are not asked for one by one.
    """

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that one engine step takes on the modelled device; more than 0."""
        ...

    def assumptions(self) -> dict[str, Any]:
        """Every coefficient with its unit and source, for the report."""
        ...


class DraftModel(Protocol):
    """How many drafts of speculative decoding turn out right."""

    def accepted(self, num_draft_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """For the drafts of one step, int64 `[num_reqs]`: how many of each request's are accepted, 0 to all."""
        ...

    def assumptions(self) -> dict[str, Any]:
        """What it rests on, for the report."""
        ...


class ExternalTokens(Protocol):
    """Keys and values that are kept outside the pool (host memory, disk, another engine) and can be copied in."""

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        """How many tokens behind a hit of `num_hit_tokens` can be copied in; at least one token stays to compute.

        Asked right before the request's allocation is tried; changes nothing.
        """
        ...


class RemoteTokens(Protocol):
    """Keys and values that another engine has computed. They are copied in while the request waits, its blocks held."""

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        """How many tokens behind a hit of `num_hit_tokens` the other engine holds; at least one stays to compute.

        Asked right before the request's allocation is tried; changes nothing.
        """
        ...

    def admitted(self, request: Request, num_tokens: int) -> None:
        """A new request holds blocks for so many of them: copy. At the end, and not before this call has returned, tell
        the scheduler that they were `received`. 0: the engine itself found all of them, and the request runs.
        """
        ...


class Backend(EventSink, Protocol):
    """Follows the allocator's events in simulated or real memory and computes the steps of an engine.

    Subclass it for the default of `repeats_before`: a backend that only prints events needs the other three methods.
    """

    def submit(self, step: ScheduledStep) -> None:
        """Start the step's work; never waits for a device."""
        ...

    def collect(self) -> StepResult:
        """Return the result of the submitted step: `step.num_steps` durations, and what it produced."""
        ...

    def repeats_before(self, step: ScheduledStep, limit: int, horizon_ns: float) -> int:
        """Return how often a decode step may be repeated, at most `limit` times; the repetitions become one macro-step.

        A backend that computes one step at a time returns 0, the default.

        Args:
            step: a decode-only step.
            limit: the most repetitions wanted.
            horizon_ns: nanoseconds from the start of `step` to the next thing that may happen to its engine. Every
                repetition must start before it.
        """
        return 0
