"""What crosses the seams: requests, batches, steps, and the protocols that the parts offer each other."""

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .events import Commit, Key


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
    the window before it.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int = 1
    keys: KeySource | None = None
    priority: int = 0
    arrival: float = 0.0
    num_output_tokens: int = 0
    cache_boundary: int = 0

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
        return int(self.counts.sum())

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


@attrs.frozen(eq=False)
class ScheduledStep:
    """What one engine step computes: the batch and the sums that a latency model needs.

    Attributes:
        batch: every token of the step.
        num_prefill_tokens: tokens of requests that do not yet produce output in this step, or produce their first.
        num_decode_tokens: tokens of requests that go on producing output, one each without drafts.
        prefill_context_tokens: over prefill tokens, the sum of the positions they attend to.
        decode_context_tokens: over decode tokens, the same.
        num_sampled: requests that produce an output token in this step.
    """

    batch: TokenBatch
    num_prefill_tokens: int
    num_decode_tokens: int
    prefill_context_tokens: int
    decode_context_tokens: int
    num_sampled: int


@attrs.frozen(eq=False)
class StepResult:
    """What a backend reports of a step: how long it took, in seconds, and what it produced.

    `outputs` is None where tokens are only counted (simulation). `stopped` are rows whose request ends with this
    step's token although `max_tokens` would allow more (a stop token).
    """

    seconds: float
    outputs: Any = None
    stopped: tuple[int, ...] = ()


class EventSink(Protocol):
    """Anything that listens to commits: a backend, a log, a publisher, metrics. Called once for each, in order."""

    def apply(self, commit: Commit) -> None:
        """Take note of one commit. Raising stops the engine; the commit itself stands."""
        ...


class LatencyModel(Protocol):
    """How long an engine step takes."""

    def step_seconds(self, step: ScheduledStep) -> float:
        """Seconds that the step takes on the modelled device; more than 0."""
        ...

    def assumptions(self) -> dict[str, Any]:
        """Every coefficient with its unit and source, for the report."""
        ...


class Backend(EventSink, Protocol):
    """Something that does what the events say, in simulated or in real memory."""

    def slot_mapping(self, batch: TokenBatch, group: int = 0) -> Any:
        """The slot of every token: int64 `[num_tokens]`; -1 where padded."""
        ...

    def submit(self, step: ScheduledStep) -> None:
        """Start the step's work; never waits for a device."""
        ...

    def collect(self) -> StepResult:
        """The result of the step that was submitted last."""
        ...
