"""A backend that prints what the allocator decides: one short class on the seam that simulator and GPU share.

Run it with `python examples/printing_backend.py`.
"""

from kvledger.core import AllocatorConfig, Backend, Commit, FullAttention, ScheduledStep, SchedulerConfig, StepResult
from kvledger.sim import open_workload, replay


class PrintingBackend(Backend):
    """Prints every event, and takes a millisecond per step."""

    def apply(self, commit: Commit) -> None:
        for event in commit.events:
            print(commit.sequence, type(event).__name__)

    def submit(self, step: ScheduledStep) -> None:
        self.step = step

    def collect(self) -> StepResult:
        return StepResult((0.001,) * self.step.num_steps)


if __name__ == "__main__":
    trace = open_workload("conversation", limit=2)
    report = replay(
        trace,
        allocator=AllocatorConfig(num_blocks=2000, groups=[FullAttention(512)], max_model_len=1 << 20),
        scheduler=SchedulerConfig(),
        trace_block_size=trace.info.trace_block_size,
        backend=PrintingBackend(),
    )
    print(f"{report.requests['finished']} requests in {report.steps} steps")
