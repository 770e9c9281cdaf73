"""The steps of a benchmark at fixed concurrency, and the share of each in the mean TTFT and TPOT.

In a closed loop a request is sent when another one ends, so which requests share a step does not depend on how long
steps take: one run of the engine serves every model and device, and a change of a step's time changes the means by the
step's share.
"""

import functools
import math
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.errors import DoesNotFitError
from ...core.scheduler.config import SchedulerConfig
from ...core.scheduler.scheduler import StepOutcome
from ...core.types import LatencyModel, ScheduledStep, StepLoad, StepResult
from ..engine.engine import NANOSECONDS, RunListener
from ..engine.metrics import RequestRecord
from ..engine.replay import replay
from ..latency.linear import LinearLatency
from ..workloads.benchmark import PROMPTS_PER_USER, BenchmarkParameters, open_benchmark

BLOCK_SIZE = 64
_ROUNDING_S = 1e-6  # times of requests are rounded by less; a step takes longer
Floats = NDArray[np.float64]


@attrs.frozen(kw_only=True)
class BenchmarkQuestion:
    """What a benchmark sends, and the limits of the engine that serves it."""

    concurrency: int
    input_len: int  # the longest prompt
    output_len: int  # the longest output
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None  # blocks of `BLOCK_SIZE` tokens; None: more than the benchmark fills
    shortest: float = 0.8  # of the longest: lengths are drawn uniformly between the two


@attrs.frozen(eq=False)
class Schedule:
    """The steps of one run; decodes that follow each other are one entry.

    Attributes:
        steps: the first of each entry's steps, with the chunks of its prompts.
        first, last: loads of the first and of the last step of each entry.
        in_ttft, in_tpot: for each entry, how often the time of one of its steps counts in the mean TTFT, and in the
            mean TPOT: float64 `[num_entries]`.
    """

    steps: Sequence[ScheduledStep]
    first: Sequence[StepLoad]
    last: Sequence[StepLoad]
    in_ttft: Floats
    in_tpot: Floats


class _Steps(RunListener):
    def __init__(self) -> None:
        self.steps: list[ScheduledStep] = []
        self.ends_ns: list[int] = []

    def observe(self, now_ns: int, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        self.steps.append(step)
        self.ends_ns.append(now_ns)


def blocks_of(num_tokens: int) -> int:
    """Blocks of a request of so many tokens, and of one more."""
    return math.ceil((num_tokens + 1) / BLOCK_SIZE)


def run_benchmark(question: BenchmarkQuestion, latency: LatencyModel, listener: RunListener) -> list[RequestRecord]:
    """Run a benchmark on the simulated engine, with asynchronous scheduling; returns its requests.

    Raises DoesNotFitError: the pool is too small for a request.
    """
    longest = question.input_len + question.output_len
    blocks = question.concurrency * blocks_of(longest) + 2
    mean = (1 + question.shortest) / 2
    parameters = BenchmarkParameters(
        input_len=round(question.input_len * mean),
        output_len=round(question.output_len * mean),
        range_ratio=(1 - question.shortest) / (1 + question.shortest),
        max_concurrency=question.concurrency,
        num_prompts=PROMPTS_PER_USER * question.concurrency,
    )
    records: list[RequestRecord] = []
    replay(
        open_benchmark(parameters),
        allocator=AllocatorConfig(
            num_blocks=blocks if question.num_blocks is None else min(blocks, question.num_blocks),
            groups=[FullAttention(BLOCK_SIZE)],
            max_model_len=longest + BLOCK_SIZE,
            max_num_reqs=question.max_num_seqs,
            enable_caching=False,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=question.max_num_seqs, max_num_batched_tokens=question.max_num_batched_tokens
        ),
        latency=latency,
        trace_block_size=None,
        listeners=[listener],
        on_finished=records.append,
        async_scheduling=True,
    )
    rejected = parameters.num_prompts - len(records)
    if rejected:
        raise DoesNotFitError(
            f"{rejected:,} of {parameters.num_prompts:,} requests of up to {longest:,} tokens do not fit into"
            f" {question.num_blocks} blocks of {BLOCK_SIZE}"
        )
    return records


@functools.lru_cache(maxsize=512)
def schedule_of(question: BenchmarkQuestion) -> Schedule:
    """The steps of `run_benchmark`, which every latency model takes alike.

    Raises DoesNotFitError: the pool is too small for a request.
    """
    steps = _Steps()
    records = run_benchmark(question, LinearLatency(), steps)
    ends = np.array(steps.ends_ns)
    ttft, tpot = np.zeros(len(ends) + 1), np.zeros(len(ends) + 1)
    for record in records:
        # The first entry that ends after the request was sent, and those that end with its first and last token.
        sent_s, rounding = record.arrival_s, _ROUNDING_S
        times = np.array([sent_s + rounding, sent_s + record.ttft_s - rounding, sent_s + record.e2e_s - rounding])
        sent, first, last = np.searchsorted(ends, times * NANOSECONDS)
        ttft[sent] += 1
        ttft[first + 1] -= 1
        if record.num_output_tokens > 1:
            share = 1 / (record.num_output_tokens - 1)
            tpot[first + 1] += share
            tpot[last + 1] -= share
    loads = [step.load for step in steps.steps]
    return Schedule(
        steps=steps.steps,
        first=loads,
        last=[_later(step) for step in steps.steps],
        in_ttft=np.cumsum(ttft)[:-1] / len(records),
        in_tpot=np.cumsum(tpot)[:-1] / len(records),
    )


def _later(step: ScheduledStep) -> StepLoad:
    load, more = step.load, step.num_steps - 1
    if not more:
        return load
    return load._replace(decode_context_tokens=load.decode_context_tokens + more * load.num_decode_tokens)
