"""What the log of a live run says of its engine, written and read back. Needs no torch."""

import zlib
from collections.abc import Iterable
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ....core.allocator.config import AllocatorConfig
from ....core.events import PoolCreated
from ....core.scheduler.config import SchedulerConfig

COMMAND: Final = "serve"

# Rules of an allocator that decisions depend on and the pool's first commit does not say.
_RULES: Final = (
    "retention_interval",
    "max_in_flight_tokens",
    "watermark_blocks",
    "use_eagle",
    "release",
    "orphans",
)


def live_header(allocator: AllocatorConfig, scheduler: SchedulerConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The header of a live run's log.

    Args:
        allocator: as the engine is given it.
        scheduler: as the engine is given it.
        facts: what else is to be known of the run, as plain JSON values.
    """
    return {
        "command": COMMAND,
        "allocator": {name: getattr(allocator, name) for name in _RULES},
        "scheduler": attrs.asdict(scheduler),
        "facts": facts,
    }


def recorded_configs(header: dict[str, Any], created: PoolCreated) -> tuple[AllocatorConfig, SchedulerConfig]:
    """The configurations of the engine whose log has this header and this first event."""
    allocator = AllocatorConfig(
        num_blocks=created.num_blocks,
        groups=created.groups,
        max_model_len=created.max_model_len,
        max_num_reqs=created.max_num_reqs,
        enable_caching=created.enable_caching,
        hash_block_size=created.hash_block_size,
        scheduler_block_size=created.scheduler_block_size,
        eviction=created.eviction,
        key_algorithm=created.key_algorithm,
        **header["allocator"],
    )
    return allocator, SchedulerConfig(**header["scheduler"])


def slots_crc32(slots_of_groups: Iterable[NDArray[np.int64]]) -> int:
    """A checksum over the slots of a step's tokens: int64 `[num_tokens]` of each group, one after the other."""
    checksum = 0
    for slots in slots_of_groups:
        checksum = zlib.crc32(np.ascontiguousarray(slots, dtype="<i8").tobytes(), checksum)
    return checksum
