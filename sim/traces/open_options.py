"""The options with which a trace is opened, checked by themselves and against the format that they are for."""

import math
from collections.abc import Sequence
from pathlib import Path

import attrs

from ...core.errors import InputError
from .timestamp_units import UNITS_PER_SECOND
from .tokenizer import HOW_TO_NAME_ONE, Tokenizer, open_tokenizer
from .trace_format import TraceFormat
from .window import check_window

ON_BAD_ROW = ("refuse", "skip")


@attrs.frozen
class OpenOptions:
    """What `open_trace` was given; None stands for an option that was not. Raises `InputError` for one out of range."""

    timestamp_unit: str | None
    trace_block_size: int | None
    tokenizer: str | None
    request_rate: float | None
    seed: int | None
    on_bad_row: str
    skip_first: int
    limit: int | None
    rate_scale: float

    def __attrs_post_init__(self) -> None:
        if self.on_bad_row not in ON_BAD_ROW:
            raise InputError(f"--on-bad-row is {self.on_bad_row!r}; it must be one of {', '.join(ON_BAD_ROW)}")
        if self.trace_block_size is not None and self.trace_block_size < 1:
            raise InputError(f"--trace-block-size is {self.trace_block_size}; it must be 1 token or more")
        if self.timestamp_unit is not None and self.timestamp_unit not in UNITS_PER_SECOND:
            raise InputError(f"--timestamp-unit is {self.timestamp_unit!r}; it is one of {', '.join(UNITS_PER_SECOND)}")
        if self.request_rate is not None and not (math.isfinite(self.request_rate) and self.request_rate > 0):
            raise InputError(f"--request-rate is {self.request_rate}; it must be a number of arrivals a second above 0")
        check_window(self.skip_first, self.limit, self.rate_scale)

    def check_against(self, trace_format: TraceFormat, path: Path) -> None:
        """Refuse what has no effect on this format, and what is missing for it."""
        title = trace_format.title
        if self.trace_block_size is not None and not trace_format.block_size_is_settable:
            raise InputError(
                f"{path}: --trace-block-size {self.trace_block_size} was given, but {title} carries no hash ids for it "
                "to apply to; leave the option out"
            )
        if self.timestamp_unit is not None and not trace_format.unit_is_settable:
            raise InputError(
                f"{path}: --timestamp-unit {self.timestamp_unit} has no effect: times of {title} are "
                f"{trace_format.timestamp_unit}; leave the option out"
            )
        if self.tokenizer is None and trace_format.needs_tokenizer:
            raise InputError(f"{path}: {title} holds text and no token counts; {HOW_TO_NAME_ONE}")
        if self.tokenizer is not None and trace_format.text_block_size is None:
            raise InputError(
                f"{path}: --tokenizer {self.tokenizer} has no effect: {title} carries token counts; leave it out"
            )
        if self.request_rate is not None and trace_format.arrivals_unless_given is None:
            raise InputError(
                f"{path}: --request-rate {self.request_rate:g} has no effect: {title} records arrivals; use "
                "--rate-scale to make them faster or slower"
            )
        if self.seed is not None and self.request_rate is None:
            raise InputError(
                f"--seed {self.seed} has no effect on a trace file"
                + (" without --request-rate" if trace_format.arrivals_unless_given else "")
                + "; leave it out"
            )

    def open_tokenizer(self) -> Tokenizer | None:
        """The tokenizer named, or None."""
        return None if self.tokenizer is None else open_tokenizer(self.tokenizer)

    def units_per_second(self, trace_format: TraceFormat) -> int:
        """How many units of the rows' timestamps a second has."""
        if self.timestamp_unit is None or trace_format.converts_units:
            return trace_format.units_per_second
        return UNITS_PER_SECOND[self.timestamp_unit]

    def block_size(self, trace_format: TraceFormat, first_lines: Sequence[bytes]) -> tuple[int | None, str | None]:
        """Tokens that one hash id stands for, and who says so."""
        if self.trace_block_size is not None:
            return self.trace_block_size, "given"
        if trace_format.trace_block_size is not None:
            return trace_format.trace_block_size, f"{trace_format.title}'s own"
        stated = trace_format.block_size_in(first_lines)
        if stated is not None:
            return stated, "stated in the file"
        if trace_format.text_block_size is not None and self.tokenizer is not None:
            return trace_format.text_block_size, "chosen for text"
        return None, None

    def arrivals(self, trace_format: TraceFormat) -> str | None:
        """What a reader must know of arrivals that the file does not record."""
        if trace_format.arrivals_unless_given is None or self.request_rate is None:
            return trace_format.arrivals_unless_given
        return (
            f"the file records no arrivals: {self.request_rate:g} a second come by a Poisson process, seed "
            f"{self.seed or 0}"
        )
