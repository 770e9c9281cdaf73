"""An engineer who follows one command through core opens few files."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import kvledger.core
import pytest
from kvledger.core import (
    AllocatorConfig,
    FullAttention,
    KVCacheAllocator,
    Request,
    Scheduler,
    SchedulerConfig,
    TokenKeySource,
    block_hasher,
)

CORE = Path(kvledger.core.__path__[0])
BLOCK_SIZE = 16


class Ids:
    """Keys as a trace has them: one id per block."""

    def __init__(self, num_blocks: int) -> None:
        self.ids = range(1, num_blocks + 1)

    def keys(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(self.ids[start:stop])


def hashed(num_tokens: int) -> TokenKeySource:
    return TokenKeySource(range(num_tokens), block_hasher("sha256"), BLOCK_SIZE)


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


def match_and_allocate(keys_of: Callable[[int], object], num_blocks: int) -> Callable[[], object]:
    """A lookup that hits six blocks, and the allocation of three more."""
    config = AllocatorConfig(
        num_blocks=num_blocks, groups=[FullAttention(BLOCK_SIZE)], max_model_len=512, max_num_reqs=4
    )
    allocator = KVCacheAllocator(config)
    first = Request("first", 100, keys=keys_of(100))
    assert allocator.allocate(first, 100)
    second = Request("second", 150, keys=keys_of(150))

    def command() -> None:
        match = allocator.match_prefix(second)
        assert match.num_hit_tokens == 96
        assert allocator.allocate(second, 150 - 96, match) is not None

    return command


def ids(num_tokens: int) -> Ids:
    return Ids(num_tokens // BLOCK_SIZE)


COMMANDS = [
    pytest.param(lambda: match_and_allocate(ids, num_blocks=64), 9, id="match and allocate"),
    pytest.param(lambda: match_and_allocate(ids, num_blocks=12), 9, id="match and allocate, few blocks free"),
    pytest.param(lambda: match_and_allocate(hashed, num_blocks=64), 11, id="match and allocate, tokens hashed"),
]


@pytest.mark.parametrize(("prepare", "most"), COMMANDS)
def test_a_command_opens_few_files(prepare: Callable[[], Callable[[], object]], most: int) -> None:
    files = files_opened(prepare())
    assert len(files) <= most, sorted(files)
