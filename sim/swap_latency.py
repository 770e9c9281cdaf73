"""What swapping costs: the time to copy blocks between device and host memory, on top of a step."""

from typing import Any

import attrs

from ..core.errors import InputError
from ..core.types import LatencyModel, StepLoad


def _positive(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 < value < float("inf"):
        raise InputError(f"{attribute.name} must be above 0, not {value}")


@attrs.frozen
class SwapLatency:
    """Another model's step, after the copies that it waits for: blocks x bytes a block / bandwidth of the link.

    Copies do not overlap with the step. `bytes_per_block` is what one GPU copies; each GPU has a link of its own.
    """

    inner: LatencyModel
    bytes_per_block: float = attrs.field(validator=_positive)
    link_bytes_per_s: float = attrs.field(validator=_positive)

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds of the step and of the copies before it."""
        return self.inner.step_seconds(load) + load.num_swapped_blocks * self.bytes_per_block / self.link_bytes_per_s

    def assumptions(self) -> dict[str, Any]:
        """Those of the inner model, and the link."""
        return {
            **self.inner.assumptions(),
            "swap_bytes_per_block_per_gpu": self.bytes_per_block,
            "swap_link_gb_s_per_gpu": self.link_bytes_per_s / 1e9,
        }
