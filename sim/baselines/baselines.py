"""Memory wasted by allocators that do not page, and by one that does, under a queue that is never empty.

The method is that of PagedAttention (SOSP'23, Fig. 2 and 13): requests are served first come, first served with
iteration-level batching, as many at a time as the allocator can place. In each iteration every running request gains
one token. Arrival times are not used: as long as requests remain, one waits. Every slot of the KV memory is, in each
iteration, exactly one of

* token states: it holds the keys and values of a token of a running request;
* reservation: asked for by a running request, which will fill it before it ends;
* internal fragmentation: asked for by a running request, which will never fill it;
* external fragmentation: everything else, which is the allocator's own rounding (a buddy allocator's powers of two),
  holes and blocks that no waiting request got, and the null block of a paged pool.

The four shares add up to the whole memory. They are averaged over the iterations in which a request waits.
"""

from array import array
from collections.abc import Iterable
from typing import Any

import attrs

from ...core.errors import DoesNotFitError, InputError
from .placement import GrowingPlacement, PagedPlacement, Placement, oracle_placement, pow2_placement, static_placement
from .saturated_run import Fragmentation, SaturatedRun


@attrs.frozen
class GrowthReport:
    """What growing by copying costs. `copied_bytes` is None where the bytes of a token are not given."""

    num_copies: int
    copied_tokens: int
    copied_bytes: int | None
    fragmentation: Fragmentation

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "num_copies": self.num_copies,
            "copied_tokens": self.copied_tokens,
            "copied_bytes": self.copied_bytes,
            "fragmentation": {
                "mean": self.fragmentation.mean,
                "max": self.fragmentation.max,
                "samples": [list(sample) for sample in self.fragmentation.samples],
            },
        }


@attrs.frozen
class AllocatorUsage:
    """How one allocator used the memory. The four shares are percent of all slots and add up to 100.

    They and `mean_batch` are averages over `iterations` iterations: those in which a request waited, or the whole run
    where none ever did (`queue_saturated` is False: the memory was larger than the work). `refused` requests could
    never fit (`refused_too_long`: longer than max_model_len) and `empty` ones had no token at all; both used nothing.
    """

    name: str
    token_pct: float
    reservation_pct: float
    internal_pct: float
    external_pct: float
    mean_batch: float
    max_batch: int
    preemptions: int
    max_preemptions_per_request: int
    finished: int
    refused: int
    refused_too_long: int
    empty: int
    iterations: int
    queue_saturated: bool
    growth: GrowthReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        out = attrs.asdict(self, recurse=False)
        out["growth"] = self.growth.as_dict() if self.growth else None
        return out


def compare_allocators(
    requests: Iterable[tuple[int, int]],
    *,
    num_slots: int,
    max_model_len: int,
    block_size: int,
    max_num_seqs: int | None = None,
    watermark: float = 0.01,
    kv_bytes_per_token: int | None = None,
) -> list[AllocatorUsage]:
    """Serve the same requests with `static`, `pow2`, `oracle`, `growing` and `paged` memory, in this order.

    Args:
        requests: (input_length, output_length) in tokens, in the order of the queue; kept as two arrays of numbers.
        num_slots: token slots of the KV memory.
        max_model_len: tokens of the longest request allowed; longer ones are refused, and `static` reserves this much.
        block_size: tokens a block of `paged`.
        max_num_seqs: requests that run at a time at most; None leaves that to the memory.
        watermark: share of the blocks that `paged` keeps free when it admits (the value of the paper's vLLM).
        kv_bytes_per_token: bytes of the keys and values of a token in all layers, for `growing`'s copied bytes.

    Raises InputError for no requests, sizes below 1, a watermark outside [0, 1) or negative lengths, and
    DoesNotFitError where no allocator can serve a single request.
    """
    setup = _Setup(num_slots, max_model_len, block_size, max_num_seqs, watermark, kv_bytes_per_token)
    inputs, outputs = _lengths(requests)
    placements: list[Placement] = [
        static_placement(num_slots, max_model_len),
        pow2_placement(num_slots, max_model_len),
        oracle_placement(num_slots),
        GrowingPlacement(num_slots, max_model_len),
        PagedPlacement(num_slots, block_size, watermark),
    ]
    usages = [_usage(zip(inputs, outputs, strict=True), placement, setup) for placement in placements]
    if not any(usage.finished for usage in usages):
        shortest = min(map(sum, zip(inputs, outputs, strict=True)))
        raise DoesNotFitError(
            f"none of {len(inputs):,} requests fits: the shortest has {shortest:,} tokens, the memory {num_slots:,} "
            f"token slots, and max_model_len is {max_model_len:,}. Give more memory or a larger max_model_len"
        )
    return usages


def _at_least_one(_setup: object, field: "attrs.Attribute[Any]", value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{field.name} is {value}: it must be at least 1")


def _is_share(_setup: object, field: "attrs.Attribute[Any]", value: float) -> None:
    if not 0 <= value < 1:
        raise InputError(f"{field.name} is {value}: it must be a share of the blocks, at least 0 and below 1")


@attrs.frozen
class _Setup:
    num_slots: int = attrs.field(validator=_at_least_one)
    max_model_len: int = attrs.field(validator=_at_least_one)
    block_size: int = attrs.field(validator=_at_least_one)
    max_num_seqs: int | None = attrs.field(validator=_at_least_one)
    watermark: float = attrs.field(validator=_is_share)
    kv_bytes_per_token: int | None = attrs.field(validator=_at_least_one)


def _lengths(requests: Iterable[tuple[int, int]]) -> tuple["array[int]", "array[int]"]:
    inputs, outputs = array("q"), array("q")
    for index, (input_length, output_length) in enumerate(requests):
        if input_length < 0 or output_length < 0:
            raise InputError(f"request {index} has the lengths ({input_length}, {output_length}): none may be negative")
        inputs.append(input_length)
        outputs.append(output_length)
    if not inputs:
        raise InputError("there are no requests to compare allocators with")
    return inputs, outputs


def _usage(requests: Iterable[tuple[int, int]], placement: Placement, setup: _Setup) -> AllocatorUsage:
    run = SaturatedRun(requests, placement, setup.max_model_len, setup.max_num_seqs)
    run.run()
    queue_saturated = run.saturated.iterations > 0
    shares = run.saturated if queue_saturated else run.whole
    percent_per_slot = 100 / (setup.num_slots * shares.iterations) if shares.iterations else 0.0
    used = shares.token_slots, shares.reservation_slots, shares.internal_slots
    unused = setup.num_slots * shares.iterations - sum(used)
    return AllocatorUsage(
        name=placement.name,
        token_pct=used[0] * percent_per_slot,
        reservation_pct=used[1] * percent_per_slot,
        internal_pct=used[2] * percent_per_slot,
        external_pct=unused * percent_per_slot if shares.iterations else 100.0,
        mean_batch=shares.running / shares.iterations if shares.iterations else 0.0,
        max_batch=run.max_batch,
        preemptions=run.preemptions,
        max_preemptions_per_request=run.max_preemptions_per_request,
        finished=run.finished,
        refused=run.refused,
        refused_too_long=run.refused_too_long,
        empty=run.empty,
        iterations=shares.iterations,
        queue_saturated=queue_saturated,
        growth=_growth_report(placement, run.fragmentation, setup.kv_bytes_per_token),
    )


def _growth_report(
    placement: Placement, fragmentation: Fragmentation, kv_bytes_per_token: int | None
) -> GrowthReport | None:
    if not isinstance(placement, GrowingPlacement):
        return None
    tokens = placement.copied_tokens
    num_bytes = None if kv_bytes_per_token is None else tokens * kv_bytes_per_token
    return GrowthReport(placement.num_copies, tokens, num_bytes, fragmentation)
