"""The types that the rooms exchange: requests, batches and steps, and the protocols that users can implement."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .events import Commit, Key

# Sums and extremes of short columns, without the Python code inside the methods of ndarray.


def sum_of(column: NDArray[Any]) -> int:
    """Return the sum of a column of integers; 0 for an empty one."""
    return int(np.add.reduce(column))


def smallest(column: NDArray[Any]) -> int:
    """Return the smallest entry of a non-empty column of integers."""
    return column.item(column.argmin())


def largest(column: NDArray[Any]) -> int:
    """Return the largest entry of a non-empty column of integers."""
    return column.item(column.argmax())


class KeySource(Protocol):
    """Gives the keys (block hashes) of a request: hashes of its tokens, or the ids of a trace."""

    def keys(self, start: int, stop: int) -> Sequence[Key]:
        """Return the keys of the complete hash blocks `start <= i < stop`; block i ends at token
        `(i + 1) * hash_block_size`.

        May return fewer (or none) for a request that must not be cached; blocks behind the last key then get none.
        """
        ...


@attrs.define(eq=False)
class Request:
    """One request, from submission to its end. The scheduler owns it; the allocator reads it.

    `num_output_tokens` counts the outputs known so far; `max_tokens` bounds them. `keys` is None if the request must
    not share blocks. `cache_boundary` is the last boundary that a lookup reported (`PrefixMatch.boundary`); sparse
    retention keeps the window before it. `num_cached_tokens` counts the tokens that the first admission found in the
    cache (None before it), and `num_preemptions` how often the request was preempted; submission resets both.
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
        """Count the tokens of the whole batch."""
        return sum_of(self.counts)

    def query_start_loc(self) -> NDArray[np.int64]:
        """Return where each request's tokens start in the flat batch, and the batch's end: int64 `[num_reqs + 1]`."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.counts)])

    def positions(self) -> NDArray[np.int64]:
        """Return the position of every token in its request: int64 `[num_tokens]`."""
        starts = self.query_start_loc()[:-1]
        return np.arange(self.num_tokens, dtype=np.int64) + np.repeat(self.first_positions - starts, self.counts)


class StepLoad(NamedTuple):
    """Sums over one engine step, for latency models. A token at position p attends to p + 1 tokens.

    Attributes:
        num_prefill_tokens: tokens of requests with more than one token left to compute.
        num_decode_tokens: tokens of decoding requests: one for each, and its drafts.
        prefill_context_tokens: the sum of the tokens that each prefill token attends to.
        decode_context_tokens: the same sum over decode tokens.
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
        """Count the tokens of the whole step."""
        return self.num_prefill_tokens + self.num_decode_tokens

    def one_token_later(self) -> "StepLoad":
        """Return the load of the same decode-only step after every request in it has grown by one token."""
        context = self.decode_context_tokens + self.num_decode_tokens
        return StepLoad(0, self.num_decode_tokens, 0, context, self.num_sampled)


class ScheduledStep(NamedTuple):
    """The work to compute next: one engine step, or a macro-step of several identical decode steps.

    Attributes:
        batch: every token; in a macro-step of n steps each request has n of them.
        load: the sums over the first of the steps.
        num_steps: the number of engine steps in this macro-step.
        num_draft_tokens: int64 `[num_reqs]`, how many of each request's tokens are drafts; None: no drafts at all.
        blocks_taken_at: for each step after the first, how many blocks it is the first to use (the allocator takes
            them all at once, in the order in which single steps would have).
        num_proposed_tokens: int64 `[num_reqs]`, how many drafts a drafter proposed; the others fill up the tokens of a
            request that has just been admitted, and are never right. None: no drafts at all.
    """

    batch: TokenBatch
    load: StepLoad
    num_steps: int = 1
    num_draft_tokens: NDArray[np.int64] | None = None
    blocks_taken_at: tuple[int, ...] = ()
    num_proposed_tokens: NDArray[np.int64] | None = None


class StepResult(NamedTuple):
    """A backend's report on a step: how long it took and what it produced.

    Attributes:
        nanoseconds: the duration of each of the `num_steps` engine steps. Whole nanoseconds, so that simulated time
            adds up exactly.
        outputs: the produced tokens; None where tokens are only counted (simulation).
        num_accepted_tokens: int64 `[num_reqs]`, how many drafts of each request were accepted; None: no drafts.
        stopped: rows whose request ends with this step's token although `max_tokens` allows more.
    """

    nanoseconds: tuple[int, ...]
    outputs: Any = None
    num_accepted_tokens: NDArray[np.int64] | None = None
    stopped: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the duration of the whole step in seconds."""
        return sum(self.nanoseconds) / 1e9


class EventSink(Protocol):
    """Receives every commit once, in order: a backend, a log, a publisher, metrics."""

    def apply(self, commit: Commit) -> None:
        """Receive one commit. Raising stops the engine but does not undo the commit."""
        ...


class LatencyModel(Protocol):
    """Says how long an engine step takes.

    A model that reads neither of the load's two context sums may declare `ignores_context = True`: the steps of a run
    of decodes then take the same time, and the engine asks for it once. A model for which the sums are not enough (the
    chunks of several prompts) may have a method `scheduled_seconds(step, num_steps_later, load)`, which is asked
    instead: `load` is that of the step, or of the step of a macro-step that comes `num_steps_later`.
    """

    def step_seconds(self, load: StepLoad) -> float:
        """Return the seconds that one engine step takes on the modelled device; more than 0."""
        ...

    def assumptions(self) -> dict[str, Any]:
        """Return every coefficient with its unit and source, for the report."""
        ...


def scheduled_seconds(latency: LatencyModel, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> float:
    """Return the seconds of a scheduled step, by `scheduled_seconds` of a model that has it, else by its load."""
    timed = getattr(latency, "scheduled_seconds", None)
    return latency.step_seconds(load) if timed is None else timed(step, num_steps_later, load)


class DraftModel(Protocol):
    """Says how many draft tokens of speculative decoding are accepted."""

    def accepted(self, num_draft_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many drafts of each request in one step are accepted, 0 to all: int64 `[num_reqs]`, in and out."""
        ...

    def assumptions(self) -> dict[str, Any]:
        """Return the model's parameters with their sources, for the report."""
        ...


class ExternalTokens(Protocol):
    """Keys and values outside the pool (host memory, disk, another engine) that can be copied in."""

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        """Return how many tokens behind a hit of `num_hit_tokens` can be copied in; at least one is left to compute.

        The scheduler asks right before it allocates for the request. Changes nothing.
        """
        ...


class RemoteTokens(ExternalTokens, Protocol):
    """Keys and values that another engine has computed. They are copied in while the request waits with its blocks."""

    def admitted(self, request: Request, num_tokens: int) -> None:
        """Start to copy: a new request holds blocks for `num_tokens` remote tokens.

        Call the scheduler's `received` when the copy has ended, and not before this call has returned. With 0 tokens
        there is nothing to copy (the engine itself found all of them), and the request runs.
        """
        ...


class Backend(EventSink, Protocol):
    """Follows the allocator's events in simulated or real memory and computes the steps of an engine.

    Subclass it for the default of `repeats_before`: a backend that only prints events needs the other three methods.
    """

    def submit(self, step: ScheduledStep) -> None:
        """Start the step's work; never wait for a device."""
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
