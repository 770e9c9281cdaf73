"""The steps of a benchmark at fixed concurrency stand for every latency model: its means are weighted sums of them."""

import numpy as np
import pytest
from kvledger.core.errors import DoesNotFitError
from kvledger.core.types import LatencyModel, ScheduledStep, StepLoad, scheduled_seconds
from kvledger.sim.engine.engine import RunListener
from kvledger.sim.measured.schedules import BLOCK_SIZE, BenchmarkQuestion, blocks_of, run_benchmark, schedule_of


class ByContext:
    """Steps that take longer with prompts and with longer contexts, unlike those that made the schedule."""

    def step_seconds(self, load: StepLoad) -> float:
        tokens_s = 3e-5 * load.num_prefill_tokens + 1e-4 * load.num_decode_tokens
        return 0.011 + tokens_s + 2e-8 * (load.decode_context_tokens + load.prefill_context_tokens)

    def assumptions(self) -> dict[str, object]:
        return {}


class ByChunks(ByContext):
    """Steps that take as long as the chunks of their prompts, one by one."""

    def scheduled_seconds(self, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> float:
        chunks = step.batch.counts[step.batch.counts > 1] if load.num_prefill_tokens else np.zeros(0)
        return 0.002 + 1e-4 * load.num_decode_tokens + float(np.sum(chunks**1.5)) * 1e-6


def question(concurrency: int, **changed: int | None) -> BenchmarkQuestion:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks": None}
    return BenchmarkQuestion(**{"concurrency": concurrency, "input_len": 300, "output_len": 60, **limits, **changed})  # pyright: ignore[reportArgumentType]


def means_of_weights(asked: BenchmarkQuestion, latency: LatencyModel) -> tuple[float, float]:
    schedule = schedule_of(asked)
    seconds = np.array(
        [
            step.num_steps * sum(scheduled_seconds(latency, step, 0, load) for load in loads) / 2
            for step, *loads in zip(schedule.steps, schedule.first, schedule.last, strict=True)
        ]
    )
    return float(seconds @ schedule.in_ttft), float(seconds @ schedule.in_tpot)


def means_of_a_replay(asked: BenchmarkQuestion, latency: LatencyModel) -> tuple[float, float]:
    records = run_benchmark(asked, latency, RunListener())
    assert len(records) == 10 * asked.concurrency
    ttft = np.mean([record.ttft_s for record in records])
    tpot = np.mean([(record.e2e_s - record.ttft_s) / (record.num_output_tokens - 1) for record in records])
    return float(ttft), float(tpot)


FEW_BLOCKS = 4 * blocks_of(360) + 2  # a fourth of what 16 users fill
CASES = {
    "one user": question(1),
    "four users": question(4),
    "sixteen users": question(16),
    "a small pool": question(16, num_blocks=FEW_BLOCKS),
    "few places": question(16, max_num_seqs=5),
    "long prompts in chunks": question(4, input_len=1_500),
}


@pytest.mark.parametrize("latency", [ByContext(), ByChunks()], ids=["contexts", "chunks"])
@pytest.mark.parametrize("name", CASES)
def test_weighted_steps_are_the_means_of_a_replay(name: str, latency: LatencyModel) -> None:
    asked = CASES[name]
    assert means_of_weights(asked, latency) == pytest.approx(means_of_a_replay(asked, latency), rel=1e-3)


def test_a_small_pool_makes_another_schedule() -> None:
    wide, small = (schedule_of(CASES[name]) for name in ("sixteen users", "a small pool"))
    assert sum(step.num_steps for step in small.steps) > 1.5 * sum(step.num_steps for step in wide.steps)


def test_a_pool_that_cannot_hold_a_request_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match="10 of 10 requests of up to 360 tokens do not fit into 3 blocks of 64"):
        schedule_of(question(1, num_blocks=3))


def test_blocks_of_a_request_hold_one_more_token() -> None:
    assert [blocks_of(count) for count in (0, BLOCK_SIZE - 1, BLOCK_SIZE)] == [1, 1, 2]
