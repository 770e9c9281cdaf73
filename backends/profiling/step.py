"""Runs the largest step of a server once, from callables that the user gives, and measures the peak of each part."""

from collections.abc import Callable
from typing import Any

import attrs

from ...core.deployment.estimates import profiling_tokens
from ...core.errors import InputError
from ...core.memory.profile import MemorySnapshot
from .probe import DeviceProbe


@attrs.frozen(kw_only=True)
class StepLimits:
    """Limits of a step's size."""

    max_num_batched_tokens: int  # tokens of one forward pass
    max_num_seqs: int  # requests of one step
    num_speculative_tokens: int = 0  # draft tokens of each request; 0 turns drafts off

    def __attrs_post_init__(self) -> None:
        profiling_tokens(self.max_num_batched_tokens, self.max_num_seqs)
        if self.num_speculative_tokens < 0:
            raise InputError(f"num_speculative_tokens is {self.num_speculative_tokens}; give 0 or more")

    @property
    def tokens_per_request(self) -> tuple[int, ...]:
        """`max_num_batched_tokens` spread over `max_num_seqs` requests; the sum is exact."""
        return profiling_tokens(self.max_num_batched_tokens, self.max_num_seqs)


@attrs.frozen(kw_only=True)
class ProfilingStep:
    """The parts of one largest step, in the order in which they run."""

    # The forward pass, called with the tokens of each request; the parts below get its output.
    model: Callable[[tuple[int, ...]], Any]
    # Runs a multimodal encoder on its largest batch; its output is kept until the step has ended, as a server keeps it.
    # None if the model has no encoder.
    encoder: Callable[[], Any] | None = None
    sampler: Callable[[Any], Any] | None = None  # samples from that output for every request. None for a pooling model.
    # Verifies drafts, called with the model's output and the draft tokens of each request; needed where drafts are
    # used.
    rejection_sampler: Callable[[Any, int], Any] | None = None
    pooler: Callable[[Any], Any] | None = None  # pools that output. None for a generating model.
    is_last_rank: bool = True  # whether this pipeline rank is the one that samples or pools

    def check(self, limits: StepLimits) -> None:
        """Refuse a step that lacks a part or has a part that would not run.

        Raises:
            InputError: neither or both of sampler and pooler, drafts with no rejection sampler or the reverse.
        """
        if not self.is_last_rank:
            given = [name for name in ("sampler", "rejection_sampler", "pooler") if getattr(self, name) is not None]
            if given:
                raise InputError(f"{', '.join(given)}: given for a pipeline rank that is not the last and runs none")
            return
        if (self.sampler is None) == (self.pooler is None):
            found = "neither was" if self.sampler is None else "both were"
            raise InputError(
                f"a step ends in a sampler (generating model) or a pooler (pooling model), and {found} given; give"
                " exactly one, or is_last_rank=False for a pipeline rank that has neither"
            )
        drafts = limits.num_speculative_tokens
        if drafts and self.rejection_sampler is None:
            raise InputError(
                f"{drafts} draft tokens a request are to be verified and no rejection_sampler was given; its memory"
                " would be missing from the peak"
            )
        if not drafts and self.rejection_sampler is not None:
            raise InputError("a rejection_sampler was given and num_speculative_tokens is 0: it would never run")
        if self.pooler is not None and drafts:
            raise InputError(f"a pooling model drafts nothing, and num_speculative_tokens is {drafts}")


@attrs.frozen(kw_only=True)
class PartPeak:
    """The peak of torch's allocated bytes while one part of the step ran, with what earlier parts kept."""

    name: str
    peak_bytes: int


def run_profiling_step(
    step: ProfilingStep, limits: StepLimits, probe: DeviceProbe, read: Callable[[], MemorySnapshot]
) -> tuple[PartPeak, ...]:
    """Run every part of a checked step once and return the peak of each.

    `read` reads the memory without releasing any, so that each part finds the allocator as it would in a server.
    """
    peaks: list[PartPeak] = []

    def run(name: str, part: Callable[[], Any]) -> Any:
        probe.reset_peak()
        output = part()
        peaks.append(PartPeak(name=name, peak_bytes=read().torch_peak_bytes))
        return output

    held = run("encoder", step.encoder) if step.encoder is not None else None
    hidden = run("model", lambda: step.model(limits.tokens_per_request))
    sampler, verify, pooler = step.sampler, step.rejection_sampler, step.pooler
    if sampler is not None:
        run("sampler", lambda: sampler(hidden))
    if verify is not None:
        run("rejection sampler", lambda: verify(hidden, limits.num_speculative_tokens))
    if pooler is not None:
        run("pooler", lambda: pooler(hidden))
    del held
    return tuple(peaks)
