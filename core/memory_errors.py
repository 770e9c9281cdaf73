"""The one shape of a memory refusal: what was needed, what was there, the shortfall, and the largest value that
works.
"""

from collections.abc import Mapping
from enum import StrEnum

from .errors import DoesNotFitError
from .quantities import format_bytes


class MemoryCondition(StrEnum):
    """Why memory was refused. The names are those of the recorded runs in golden/memory.jsonl where they have one."""

    FREE_BELOW_REQUESTED = "free_below_requested"
    EXTERNAL_EXCEEDS_BUDGET = "external_exceeds_budget"
    FREE_GREW_DURING_PROFILING = "free_grew_during_profiling"
    FRONTEND_RESERVATION_LEAVES_NOTHING = "frontend_reservation_leaves_nothing"
    NO_AVAILABLE_MEMORY = "no_available_memory"
    REQUEST_DOES_NOT_FIT = "request_does_not_fit"
    EXPLICIT_BYTES_EXCEED_FREE = "explicit_bytes_exceed_free"
    OVERRIDE_EXCEEDS_FREE = "override_exceeds_free"
    WEIGHTS_EXCEED_DEVICE = "weights_exceed_device"


class MemoryShortfallError(DoesNotFitError):
    """It does not fit. `largest` maps an option to the largest value of it that works (empty: no value of any works).

    Attributes:
        condition: why.
        needed_bytes, available_bytes: both sides of the comparison that failed.
        shortfall_bytes: their difference, never negative.
        largest: option name -> largest value that works.
    """

    def __init__(
        self,
        condition: MemoryCondition,
        what: str,
        *,
        needed_bytes: int,
        available_bytes: int,
        largest: Mapping[str, int | float],
        remedy: str,
    ) -> None:
        """`what` opens the message, `remedy` ends it; the figures stand between them."""
        self.condition = condition
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.shortfall_bytes = max(needed_bytes - available_bytes, 0)
        self.largest = dict(largest)
        super().__init__(
            f"{what}: needed {format_bytes(needed_bytes)}, available {format_bytes(available_bytes)},"
            f" short by {format_bytes(self.shortfall_bytes)}. {remedy}"
        )
