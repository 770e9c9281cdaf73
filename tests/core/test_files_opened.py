"""An engineer who follows one command through core opens few files."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import kvledger.core
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request, Scheduler, SchedulerConfig

CORE = Path(kvledger.core.__path__[0])
BLOCK_SIZE = 16


class Ids:
    """Keys as a trace has them: one id per block."""

    def __init__(self, num_blocks: int) -> None:
        self.ids = range(1, num_blocks + 1)

    def keys(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(self.ids[start:stop])


def files_opened(command: Callable[[], object]) -> set[str]:
    """The files of core whose functions run during a command."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            files.add(path.relative_to(CORE).as_posix())

    sys.setprofile(note)
    try:
        command()
    finally:
        sys.setprofile(None)
    return files


def test_one_schedule_with_an_admission_opens_at_most_18_files() -> None:
    allocator = KVCacheAllocator(
        AllocatorConfig(num_blocks=64, groups=[FullAttention(BLOCK_SIZE)], max_model_len=512, max_num_reqs=8)
    )
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512), allocator)
    scheduler.submit(Request("runs", 100, 20, keys=Ids(6)))
    for _ in range(2):
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    new = Request("new", 150, 20, keys=Ids(9))
    scheduler.submit(new)
    files = files_opened(scheduler.schedule)
    assert (scheduler.num_running, new.num_cached_tokens) == (2, 96)
    assert len(files) <= 18, sorted(files)
