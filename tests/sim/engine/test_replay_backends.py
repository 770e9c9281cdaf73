"""`replay` runs on any backend: one that prints events, and real memory that a latency model times."""

import io
from contextlib import redirect_stdout

import pytest
from kvledger.core import AllocatorConfig, Backend, FullAttention, InputError, SchedulerConfig, StepResult
from kvledger.sim import LinearLatency, replay
from kvledger.sim.traces import TraceRequest

SETTINGS = {
    "allocator": AllocatorConfig(num_blocks=200, groups=[FullAttention(16)], max_model_len=2048, max_num_reqs=8),
    "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
}


class PrintingBackend(Backend):
    """Prints the name of each event; every step takes a millisecond."""

    def apply(self, commit):
        for event in commit.events:
            print(commit.sequence, type(event).__name__)

    def submit(self, step):
        self.step = step

    def collect(self):
        return StepResult((1_000_000,) * self.step.num_steps)


def requests() -> list[TraceRequest]:
    """Twelve requests, two in a second, the longest prompts of several chunks."""
    return [TraceRequest(number / 2, 40 + 47 * number, 30, None, number + 1) for number in range(12)]


def test_a_backend_that_prints_events_works_at_once() -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        report = replay(requests(), backend=PrintingBackend(), trace_block_size=None, **SETTINGS)
    lines = printed.getvalue().splitlines()
    assert lines[0] == "0 PoolCreated"
    assert {"BlocksAllocated", "TokensPlaced", "BlocksFreed"} <= {line.split()[1] for line in lines}
    assert report.requests["finished"] == 12
    assert report.assumptions["backend"] == "PrintingBackend"
    assert report.latencies["itl_s"]["p50"] == pytest.approx(0.001, rel=0.02)


def test_replay_takes_a_latency_model_or_a_backend() -> None:
    for given in ({}, {"latency": LinearLatency(), "backend": PrintingBackend()}):
        with pytest.raises(InputError, match="a latency model for simulated memory, or a backend"):
            replay([], trace_block_size=None, **given, **SETTINGS)


@pytest.mark.torch
def test_real_memory_under_a_latency_model_gives_the_report_of_simulated_memory() -> None:
    pytest.importorskip("torch", reason="real memory needs torch")
    from kvledger.backends import CudaBackend
    from kvledger.core.planner.layout import KVCacheGroup, KVCacheLayout, lay_out
    from kvledger.core.planner.specs import FullAttentionSpec

    latency = LinearLatency()

    class TimedMemory(Backend):
        def __init__(self):
            self.device = CudaBackend(device="cpu", max_num_batched_tokens=256)
            spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bf16")
            self.device.initialize(lay_out([KVCacheGroup(("a",), (spec,), spec)], 200, KVCacheLayout.LBNHC))
            self.apply = self.device.apply

        def submit(self, step):
            self.load = step.load
            self.device.submit(step)

        def collect(self):
            self.device.collect()
            return StepResult((round(latency.step_seconds(self.load) * 1e9),))

    memory = TimedMemory()
    settings = {"trace_block_size": None, "macro_steps": False, **SETTINGS}
    simulated = replay(requests(), latency=latency, **settings).to_json()
    real = replay(requests(), backend=memory, **settings).to_json()
    assert memory.device.num_transfers > 100
    for report in (simulated, real):
        del report["timing"]
        report["assumptions"] = {
            name: value
            for name, value in report["assumptions"].items()
            if name not in {"backend", *latency.assumptions()}
        }
    assert real == simulated
