"""Curve of a scenario: the prefix-cache hit rate of its traffic at every capacity."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from ...core.errors import InputError
from ..cache.capacity_curve import CapacityCurve, capacity_curve
from ..figures import Document
from ..traces import Trace
from .options import ENGINE, OUTPUT, option, options, whole_numbers
from .results import Table
from .scenario import Scenario
from .traffic import counted, open_traffic

if TYPE_CHECKING:
    from ...core.models.geometry import ModelGeometry

# LRU beside a simpler policy, a cleverer one and the best possible; where blocks are cut smaller, LRU alone.
DEFAULT_POLICIES = "lru,fifo,s3fifo,optimum"
_MANY_TOKENS = 1 << 20


@options
class CurveOptions:
    """What a curve shows."""

    capacities: str | None = option(
        None,
        OUTPUT,
        "Cache sizes in blocks, such as 1000,5000,10000. Unless given: a 1-2-5 series.",
        metavar="BLOCKS,...",
    )
    policy: str | None = option(
        None,
        ENGINE,
        f"Eviction policies to compare: any of {{curve policies}}; the first one leads in --json. Unless given: "
        f"{DEFAULT_POLICIES}.",
        metavar="POLICY,...",
    )

    @property
    def sizes(self) -> list[int] | None:
        """The given cache sizes in blocks. Raises InputError for anything that is not a whole number."""
        text = self.capacities
        return None if text is None else whole_numbers(text, "--capacities", "blocks", "1000,5000")


_ADVICE = "leave --model out, and turn blocks into memory with kvledger plan"


@attrs.frozen(kw_only=True)
class CurveResult:
    """A capacity curve; `bytes_per_block` counts all GPUs of a model and is None without one."""

    curve: CapacityCurve
    bytes_per_block: int | None
    model_warnings: tuple[str, ...] = ()  # fields of its config that may decide what is stored and are not understood

    def to_dict(self) -> Document:
        """The document of `kvledger curve --json`."""
        warnings = {"model_warnings": list(self.model_warnings)} if self.model_warnings else {}
        return {**self.curve.as_dict(self.bytes_per_block), **warnings}

    def to_frame(self) -> Any:
        """A data frame with a row for each policy and capacity: blocks, tokens, bytes and hit rates."""
        points = [
            {"policy": policy, **self.curve.point_as_dict(point, self.bytes_per_block)}
            for policy, found in self.curve.policies.items()
            for point in found
        ]
        return Table.of_rows(points).to_frame()

    def __repr__(self) -> str:
        """The ceiling in one line."""
        ceiling = self.curve.block_hit_rate(self.curve.infinite)
        return f"<CurveResult: {', '.join(self.curve.policies)}; at most {ceiling:.2%} of blocks hit>"


def curve_of_scenario(
    scenario: Scenario,
    asked: CurveOptions | None = None,
    *,
    trace: Trace | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    on_point: Callable[[str, int], None] = lambda policy, num_blocks: None,
) -> CurveResult:
    """The curve of a scenario's traffic, or of `trace`; its model gives sizes in bytes.

    `on_progress` is called with the number of requests read, `on_point` with policy and capacity of each ended replay.

    Raises InputError: an option is wrong, or the trace is.
    """
    asked = asked or CurveOptions()
    source = open_traffic(scenario) if trace is None else trace
    if scenario.model is None and scenario.kv_cache_dtype != "auto":
        raise InputError(f"--kv-cache-dtype {scenario.kv_cache_dtype} has no effect without --model")
    policies = asked.policy or _default_policies(source, scenario.block_size)
    curve = capacity_curve(
        counted(source, on_progress),
        capacities=asked.sizes,
        policies=[name.strip() for name in policies.split(",")],
        block_size=scenario.block_size,
        on_point=on_point,
    )
    if scenario.model is None:
        return CurveResult(curve=curve, bytes_per_block=None)
    geometry, per_token = bytes_per_token(scenario.model, scenario.kv_cache_dtype, _ADVICE)
    return CurveResult(curve=curve, bytes_per_block=per_token * curve.block_size, model_warnings=geometry.warnings)


def bytes_per_token(model: str, kv_cache_dtype: str, advice: str) -> "tuple[ModelGeometry, int]":
    """A model, and the bytes of one token's keys and values over all its layers and GPUs.

    Raises InputError: not every token of the model takes the same bytes; the message ends with the advice.
    """
    from ...core.models.geometry import load_geometry, served_cache_dtype  # most curves need no model

    geometry = load_geometry(model)
    kv_cache_dtype = served_cache_dtype(geometry, kv_cache_dtype)
    per_token = geometry.sequence_bytes(1, kv_cache_dtype).total
    if geometry.sequence_bytes(_MANY_TOKENS, kv_cache_dtype).total != _MANY_TOKENS * per_token:
        raise InputError(
            f"--model {model}: some layers keep a window or a state, so its memory is not a number of token slots; "
            f"{advice}"
        )
    return geometry, per_token


def bytes_per_block(model: str, kv_cache_dtype: str, block_size: int) -> int:
    """Bytes of one block of a model's keys and values. Raises InputError as `bytes_per_token` does."""
    return bytes_per_token(model, kv_cache_dtype, _ADVICE)[1] * block_size


def _default_policies(source: Trace, block_size: int | None) -> str:
    own = source.info.trace_block_size
    is_cut_smaller = own is not None and block_size is not None and block_size < own
    return "lru" if is_cut_smaller else DEFAULT_POLICIES
