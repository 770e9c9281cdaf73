"""Step times as a straight line, and the time to swap blocks on top of another model's step."""

from typing import ClassVar

import attrs

from ...core.errors import InputError
from ...core.types import LatencyModel, ScheduledStep, StepLoad, scheduled_seconds
from ..figures import above_zero, not_negative
from .models import LatencyInputs, latency_models


@latency_models.register("linear")
@attrs.frozen
class LinearLatency:
    """`base_s + prefill_token_s * prefill tokens + decode_seq_s * decoding sequences` seconds a step.

    The default coefficients are those of NVIDIA Dynamo's timed replay of the conversation trace (5 ms, 25 us, 20 us):
    plausible for a 70B-class model on several GPUs, but calibrated to no server.
    """

    ignores_context: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("base_ms", "us_per_prefill_token", "us_per_decoding_sequence")

    base_s: float = attrs.field(default=5e-3, validator=not_negative)
    prefill_token_s: float = attrs.field(default=25e-6, validator=not_negative)
    decode_seq_s: float = attrs.field(default=20e-6, validator=not_negative)

    def __attrs_post_init__(self) -> None:
        if not self.base_s + self.decode_seq_s:
            raise InputError("a step must take time: give base_s or decode_seq_s a value above 0")

    @classmethod
    def from_inputs(cls, inputs: LatencyInputs) -> "LinearLatency":
        """The default coefficients, except those that are given."""
        given = {
            "base_s": (inputs.base_ms, 1e3),
            "prefill_token_s": (inputs.us_per_prefill_token, 1e6),
            "decode_seq_s": (inputs.us_per_decoding_sequence, 1e6),
        }
        return cls(**{name: value / units for name, (value, units) in given.items() if value is not None})

    def step_seconds(self, load: StepLoad) -> float:
        return self.base_s + self.prefill_token_s * load.num_prefill_tokens + self.decode_seq_s * load.num_decode_tokens

    def assumptions(self) -> dict[str, object]:
        stock = self == LinearLatency()
        return {
            "latency_model": "linear: base + per prefill token + per decoding sequence",
            "base_ms": self.base_s * 1e3,
            "us_per_prefill_token": self.prefill_token_s * 1e6,
            "us_per_decoding_sequence": self.decode_seq_s * 1e6,
            "coefficients_source": "those of Dynamo's timed replay; calibrated to no server" if stock else "given",
        }


@attrs.frozen
class SwapLatency:
    """Adds the copies of swapped blocks to another model's step: blocks * bytes per block / bandwidth of the link.

    Copies do not overlap with the step. `bytes_per_block` counts one GPU; each GPU has its own link.
    """

    inner: LatencyModel
    bytes_per_block: float = attrs.field(validator=above_zero)
    link_bytes_per_s: float = attrs.field(validator=above_zero)

    def step_seconds(self, load: StepLoad) -> float:
        return self.inner.step_seconds(load) + self._copies_s(load)

    def scheduled_seconds(self, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> float:
        return scheduled_seconds(self.inner, step, num_steps_later, load) + self._copies_s(load)

    def _copies_s(self, load: StepLoad) -> float:
        return load.num_swapped_blocks * self.bytes_per_block / self.link_bytes_per_s

    def assumptions(self) -> dict[str, object]:
        return {
            **self.inner.assumptions(),
            "swap_bytes_per_block_per_gpu": self.bytes_per_block,
            "swap_link_gb_s_per_gpu": self.link_bytes_per_s / 1e9,
        }
