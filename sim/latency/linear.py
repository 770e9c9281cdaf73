"""How long an engine step takes, as a straight line. Other models: roofline.py (physics), latency_table.py (measured).

Any object with `step_seconds(load)` and `assumptions()` is a latency model (`core.types.LatencyModel`):

    class Constant:
        ignores_context = True

        def step_seconds(self, load: StepLoad) -> float:
            return 0.010

        def assumptions(self) -> dict[str, Any]:
            return {"latency_model": "10 ms a step, whatever it computes (a guess)"}
"""

from typing import Any, ClassVar

import attrs

from ...core.errors import InputError
from ...core.types import LatencyModel, StepLoad


def _not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} must be a number of seconds, 0 or more, not {value}")


@attrs.frozen
class LinearLatency:
    """`base_s + prefill_token_s * prefill tokens + decode_seq_s * decoding sequences` seconds a step.

    The default coefficients are those under which NVIDIA Dynamo's replay was timed on the conversation trace (5 ms,
    25 us, 20 us): plausible for a 70B-class model on several GPUs, calibrated to none.
    """

    ignores_context: ClassVar[bool] = True

    base_s: float = attrs.field(default=5e-3, validator=_not_negative)
    prefill_token_s: float = attrs.field(default=25e-6, validator=_not_negative)
    decode_seq_s: float = attrs.field(default=20e-6, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        if not self.base_s + self.decode_seq_s:
            raise InputError("a step must take time: give base_s or decode_seq_s a value above 0")

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that the step takes."""
        return self.base_s + self.prefill_token_s * load.num_prefill_tokens + self.decode_seq_s * load.num_decode_tokens

    def assumptions(self) -> dict[str, Any]:
        """The three coefficients, and whose they are."""
        stock = self == LinearLatency()
        return {
            "latency_model": "linear: base + per prefill token + per decoding sequence",
            "base_ms": self.base_s * 1e3,
            "us_per_prefill_token": self.prefill_token_s * 1e6,
            "us_per_decoding_sequence": self.decode_seq_s * 1e6,
            "coefficients_source": "those of Dynamo's timed replay; calibrated to no server" if stock else "given",
        }


# What swapping costs: the time to copy blocks between device and host memory, on top of a step.


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
