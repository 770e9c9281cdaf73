"""Copies whole blocks in the caches of all layers (copy on write), byte for byte. The twin of the Triton kernel."""

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from .checks import MAX_LISTED, check_vector, describe
from .errors import KernelInputError
from .launch import MAX_GRID
from .reshape_and_cache import WORDS


@attrs.frozen
class Region:
    """Evenly spaced runs of bytes, one run per block."""

    tensor: int  # index of the tensor that it belongs to
    pointer: int  # address of block 0's run
    block_stride_bytes: int  # from one block's run to the next one's
    num_bytes: int  # length of a run


@attrs.frozen(eq=False)
class BlockRegions:
    """Where the bytes of each block are, in all layers: made once for caches that keep their addresses.

    Attributes:
        tensors: the caches, kept alive.
        num_blocks: blocks of every cache.
        regions: a block is one run of bytes in each. A block that is not dense (heads outside blocks) has several.
        longest_run_bytes: length of the longest run of all regions.
        word_bytes: the widest word (up to 16) that divides all pointers, strides and lengths.
        descriptors: int64 `[num_regions, 3]` on the device: pointer, block stride and length, both in bytes.
    """

    tensors: tuple[Tensor, ...]
    num_blocks: int
    regions: tuple[Region, ...]
    longest_run_bytes: int
    word_bytes: int
    descriptors: Tensor

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> "BlockRegions":
        """Describe caches whose first dimension is the block, in any layout and of any dtypes.

        Pass each piece of memory once: a tensor that layers share would be copied twice.

        Raises:
            KernelInputError: no caches, different block counts or devices, elements that overlap, memory given twice.
        """
        if not caches:
            raise KernelInputError("copy_blocks needs the cache of at least one layer")
        num_blocks, device = caches[0].shape[0], caches[0].device
        for index, cache in enumerate(caches):
            if cache.dim() < 2 or cache.shape[0] != num_blocks or cache.device != device:
                raise KernelInputError(
                    f"cache {index} must have {num_blocks} blocks in its first dimension, on {device}: "
                    f"{describe(cache)}"
                )
        regions = tuple(region for index, cache in enumerate(caches) for region in _regions_of(index, cache))
        given: dict[int, int] = {}
        for region in regions:
            if given.setdefault(region.pointer, region.tensor) != region.tensor:
                raise KernelInputError(
                    f"caches {given[region.pointer]} and {region.tensor} share an address: pass shared memory once"
                )
        if len(regions) > MAX_GRID:
            raise KernelInputError(
                f"{len(caches)} caches have {len(regions)} dense runs of bytes per block, and one launch takes "
                f"{MAX_GRID}; pass whole blocks (keys and values together) where they are dense"
            )
        word_bytes = math.gcd(16, *(n for r in regions for n in (r.pointer, r.block_stride_bytes, r.num_bytes)))
        described = [(r.pointer, r.block_stride_bytes, r.num_bytes) for r in regions]
        descriptors = torch.tensor(described, dtype=torch.int64, device=device)
        longest_run_bytes = max(region.num_bytes for region in regions)
        return cls(tuple(caches), num_blocks, regions, longest_run_bytes, word_bytes, descriptors)


def _regions_of(index: int, cache: Tensor) -> list[Region]:
    """Return the dense runs of one cache: inner dimensions are merged while they are dense, the others enumerated."""
    item = cache.element_size()
    dims = sorted((stride, size) for stride, size in zip(cache.stride()[1:], cache.shape[1:], strict=True) if size > 1)
    run, outer, span = 1, [(0, 1)], 1
    for stride, size in dims:
        if stride < span:
            raise KernelInputError(f"cache {index} holds two elements in one place: {describe(cache)}")
        span += stride * (size - 1)
        if stride == run and len(outer) == 1:
            run *= size
        else:
            outer.append((stride, size))
    offsets = [0]
    for stride, size in outer[1:]:
        offsets = [offset + i * stride for i in range(size) for offset in offsets]
    block_stride = cache.stride(0)
    if cache.shape[0] > 1 and block_stride < run:
        raise KernelInputError(f"blocks of cache {index} overlap: {describe(cache)}")
    return [Region(index, cache.data_ptr() + offset * item, block_stride * item, run * item) for offset in offsets]


def check_copy(caches: BlockRegions, sources: Tensor, targets: Tensor, checked: bool) -> None:
    """Check one call; in checked mode also every block id, which waits for the device."""
    device = caches.descriptors.device
    check_vector(sources, torch.int64, "sources", device)
    check_vector(targets, torch.int64, "targets", device)
    if len(sources) != len(targets):
        raise KernelInputError(f"{len(sources)} sources and {len(targets)} targets: give one of each per copy")
    if not checked:
        return
    pairs = [(s, t) for s, t in zip(sources.tolist(), targets.tolist(), strict=True) if s >= 0 and t >= 0]
    wrong = [pair for pair in pairs if max(pair) >= caches.num_blocks]
    if wrong:
        raise KernelInputError(
            f"(source, target) {wrong[:MAX_LISTED]} are outside a cache of {caches.num_blocks} blocks"
        )
    written = [target for _, target in pairs]
    clashes = sorted({t for t in written if written.count(t) > 1} | (set(written) & {s for s, _ in pairs}))
    if clashes:
        raise KernelInputError(
            f"blocks {clashes[:MAX_LISTED]} are the target of one copy and the source or target of another: all copies "
            "of a call run at once, so their order is not defined"
        )


def copy(caches: BlockRegions, sources: Tensor, targets: Tensor) -> None:
    """See `Kernels.copy_blocks`."""
    is_copied = (sources >= 0) & (targets >= 0) & (sources < caches.num_blocks) & (targets < caches.num_blocks)
    sources, targets = sources[is_copied], targets[is_copied]
    for cache in caches.tensors:
        words = cache.view(WORDS[cache.element_size()])
        words[targets] = words[sources]
