"""Views a rank's buffer as the caches of its layers, typed and with the real strides, for kernels to read and write.

A plan's `KVCacheConfig` says where the pages of a layer lie in the rank's one buffer. The attention kernel chooses the
layout inside a page: its `CacheArrangement`. Nothing here copies; a stride that a dtype cannot express is an error.
"""

import enum
import math
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch

from ...core.errors import InputError
from ...core.planner.cache_dtype import BITS_PER_ELEMENT, canonical_dtype
from ...core.planner.layout import KVCacheConfig, KVCacheTensor, layer_shape_bytes, layout_strides_bytes
from ...core.planner.specs import AttentionSpec, CompressedStateSpec, KVCacheSpec, MambaLikeSpec, MLASpec, OpaqueSpec


class CacheArrangement(enum.Enum):
    """The arrangement of an attention layer's keys and values; a latent or a state has one vector and needs none.

    PACKED: K and V of a token side by side, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, in the physical
    order of the plan's layout. FLASH: all keys, then all values, `[2, num_blocks, block_size, num_kv_heads,
    head_size]`. INTERLEAVED: keys, then values of each block, `[num_blocks, 2, ...]`. NHD and HND say whether tokens or
    heads are the outer axis inside a block. CLASSIC: keys `[num_blocks, num_kv_heads, head_size / x, block_size, x]`
    with 16 bytes a vector of x, values `[num_blocks, num_kv_heads, head_size, block_size]`.
    """

    PACKED = "packed"
    FLASH_NHD = "flash_nhd"
    FLASH_HND = "flash_hnd"
    INTERLEAVED_NHD = "interleaved_nhd"
    INTERLEAVED_HND = "interleaved_hnd"
    CLASSIC = "classic"

    @property
    def splits_layer(self) -> bool:
        """Whether all keys of a layer lie before all its values, so that a block is two runs of bytes."""
        return self in (CacheArrangement.FLASH_NHD, CacheArrangement.FLASH_HND, CacheArrangement.CLASSIC)

    @property
    def is_heads_first(self) -> bool:
        """Whether heads are the outer axis inside a block (HND)."""
        return self in (CacheArrangement.FLASH_HND, CacheArrangement.INTERLEAVED_HND)


@attrs.frozen(eq=False)
class LayerPlace:
    """Where the layers of one tensor lie in the rank's buffer: offsets and strides in bytes, in kernel blocks."""

    raw: torch.Tensor
    config: KVCacheConfig
    tensor: KVCacheTensor
    spec: KVCacheSpec
    arrangement: CacheArrangement
    kernel_block_size: int
    splits: int

    @property
    def num_blocks(self) -> int:
        """Kernel blocks of the pool."""
        return self.config.num_blocks * self.splits

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one kernel block of a layer to the next."""
        return self._exact(self.tensor.block_stride_bytes, self.splits, "block stride")

    def offset_bytes(self, index: int) -> int:
        """Byte at which layer `index` of the tensor starts.

        If the block is the outermost axis, a kernel block holds its part of every layer, so layers move closer together
        by the factor by which blocks get smaller.
        """
        start_bytes = self.tensor.offset_bytes + index * self.tensor.layer_stride_bytes
        if self.config.layout.is_block_outermost:
            return self._exact(start_bytes, self.splits, "offset")
        return start_bytes

    def byte_strides(self) -> tuple[int, int, int, int, int]:
        """Strides of `[L, B, H, N, C]` in bytes."""
        layer_stride = self.tensor.layer_stride_bytes
        if self.config.layout.is_block_outermost:
            layer_stride = self._exact(layer_stride, self.splits, "layer stride")
        return layout_strides_bytes(
            self.spec,
            self.config.num_blocks,
            len(self.tensor.layers),
            self.config.layout,
            None if self.kernel_block_size == self.spec.block_size else self.kernel_block_size,
            (layer_stride, self.block_stride_bytes, None, None, None),
        )

    def strided(
        self, shape: Sequence[int], strides_bytes: Sequence[int], offset_bytes: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """View part of the buffer in a dtype.

        Raises:
            InputError: the dtype cannot express a stride, or the view leaves the buffer.
        """
        itemsize = dtype.itemsize
        where = f"layers {', '.join(self.tensor.layers)} ({self.arrangement.value}, layout {self.config.layout.name})"
        if offset_bytes % itemsize or any(stride % itemsize for stride in strides_bytes):
            raise InputError(
                f"{where}: offset {offset_bytes:,} and strides {tuple(strides_bytes)} bytes are no whole numbers of "
                f"{dtype} ({itemsize} bytes); pad pages so that each array begins at a multiple of {itemsize} bytes"
            )
        end_bytes = offset_bytes + itemsize
        end_bytes += sum((size - 1) * stride for size, stride in zip(shape, strides_bytes, strict=True))
        if offset_bytes < 0 or end_bytes > self.raw.numel():
            raise InputError(
                f"{where}: the cache ends at byte {end_bytes:,} of a buffer of {self.raw.numel():,}; the tensor's "
                f"strides and offset do not belong to {self.config.num_blocks} blocks"
            )
        whole = self.raw[: self.raw.numel() // itemsize * itemsize].view(dtype)
        strides = [stride // itemsize for stride in strides_bytes]
        return whole.as_strided(list(shape), strides, whole.storage_offset() + offset_bytes // itemsize)

    def _exact(self, num_bytes: int, divisor: int, what: str) -> int:
        if num_bytes % divisor:
            raise InputError(
                f"layers {', '.join(self.tensor.layers)}: a {what} of {num_bytes:,} bytes does not split into "
                f"{divisor} kernel blocks of {self.kernel_block_size} tokens; use a kernel block size of "
                f"{self.spec.block_size}"
            )
        return num_bytes // divisor


def torch_dtype(name: str) -> torch.dtype:
    """Look up a KV-cache dtype: `bf16` -> `torch.bfloat16`; two 4-bit elements share a `torch.uint8`.

    Raises:
        InputError: the name is not a KV-cache dtype.
    """
    canonical = canonical_dtype(name)
    if BITS_PER_ELEMENT[canonical] == 4:
        return torch.uint8
    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }[canonical]


# The `x` of a classic key cache `[num_blocks, num_heads, head_size / x, block_size, x]`, in bytes.
CLASSIC_VECTOR_BYTES = 16


@attrs.frozen(eq=False)
class LayerCache:
    """The cache of one layer: views of the rank's buffer, which all layers share."""

    name: str
    group: int  # the block-table group whose tables address it
    spec: KVCacheSpec  # describes the contents
    arrangement: CacheArrangement  # of keys and values; PACKED for a cache of one vector
    kernel_block_size: int  # tokens of a block as kernels see it
    num_blocks_per_kv_block: int  # kernel blocks in one block of the block table
    # The cache as a model runner binds it, in the logical order of its arrangement: `[2, num_blocks, ...]` (flash:
    # tokens before heads, whatever lies outside), `[num_blocks, 2, ...]` (interleaved), `[num_blocks, num_kv_heads,
    # block_size, head_size + head_size_v]` (packed), `[2, num_blocks, elements of a block]` (classic), `[num_blocks,
    # block_size, latent]` (MLA), int8 `[num_blocks, page_size_bytes]` (a state).
    view: torch.Tensor
    # Keys, logically `[num_blocks, block_size, num_kv_heads, head_size]`; classic keys `[num_blocks, num_kv_heads,
    # head_size / x, block_size, x]`; the latent `[num_blocks, block_size, latent]`; None for a state.
    key: torch.Tensor | None
    # Values, logically `[num_blocks, block_size, num_kv_heads, head_size_v]`; classic values `[num_blocks,
    # num_kv_heads, head_size, block_size]`; None for a latent or a state.
    value: torch.Tensor | None
    states: tuple[torch.Tensor, ...]  # the arrays of a state, each `[num_blocks, *shape]`; empty for everything else
    # int8 views, block first, that together hold the layer's pages; a copy of a block copies these.
    pages: tuple[torch.Tensor, ...]

    @property
    def is_latent(self) -> bool:
        """Whether one vector per token serves all heads (MLA)."""
        return self.key is not None and self.value is None


def layer_caches(
    raw: torch.Tensor,
    config: KVCacheConfig,
    arrangement: CacheArrangement = CacheArrangement.PACKED,
    kernel_block_sizes: Sequence[int | None] | None = None,
) -> list[LayerCache]:
    """View the buffer as the cache of every layer, group by group in the order of the plan's tensors.

    Args:
        raw: int8 `[config.size_bytes]`, contiguous; all views alias it.
        config: the plan of this rank.
        arrangement: how attention layers arrange keys and values.
        kernel_block_sizes: for each group, tokens of a block as its kernels see it; None: as the block table does.

    Raises:
        InputError: the buffer has another size or dtype than planned, or the plan's layout cannot hold the arrangement.
    """
    if raw.dtype != torch.int8 or raw.dim() != 1 or not raw.is_contiguous() or raw.numel() != config.size_bytes:
        raise InputError(
            f"the raw buffer is {raw.dtype} {list(raw.shape)}; the plan needs contiguous torch.int8 "
            f"[{config.size_bytes}]"
        )
    sizes = [None] * len(config.groups) if kernel_block_sizes is None else list(kernel_block_sizes)
    if len(sizes) != len(config.groups):
        raise InputError(f"{len(sizes)} kernel block sizes for {len(config.groups)} groups; give one per group")
    _check_arrangement(config, arrangement)
    caches: list[LayerCache] = []
    for number, group in enumerate(config.groups):
        for tensor in config.tensors:
            if not tensor.layers or tensor.layers[0] not in group.layer_names:
                continue
            spec = group.layer_specs[group.layer_names.index(tensor.layers[0])]
            if isinstance(spec, AttentionSpec | MLASpec | CompressedStateSpec) and _has_no_typed_view(spec):
                raise InputError(
                    f"layers {', '.join(tensor.layers)}: {spec.dtype} with scales stored beside the elements has no "
                    "typed view; use a dtype with one scale a layer (fp8_e4m3, fp8_e5m2)"
                )
            kernel_block_size = sizes[number] or spec.block_size
            layer_shape_bytes(spec, config.num_blocks, kernel_block_size)
            if isinstance(spec, MambaLikeSpec) and kernel_block_size != spec.block_size:
                raise InputError(
                    f"layers {', '.join(tensor.layers)}: a state is whole, so its kernel block size is its block size "
                    f"{spec.block_size}, not {kernel_block_size}"
                )
            used = arrangement if isinstance(spec, AttentionSpec) else CacheArrangement.PACKED
            splits = spec.block_size // kernel_block_size
            place = LayerPlace(raw, config, tensor, spec, used, kernel_block_size, splits)
            place.byte_strides()  # refuses padded pages that kernels would split
            caches += [_layer_cache(place, index, number) for index in range(len(tensor.layers))]
    return caches


def bind_layers(
    caches: Sequence[LayerCache], layer_names: Sequence[str], shared_layers: dict[str, str] | None = None
) -> tuple[list[LayerCache], dict[str, LayerCache]]:
    """Return the caches in the order of the model's layers, and by layer name.

    Args:
        caches: from `layer_caches`.
        layer_names: every layer of the model that reads or writes a cache, in the model's order.
        shared_layers: layer -> the layer whose cache it reads (cross-layer sharing); both are then bound to one cache.

    Raises:
        InputError: a layer without a cache, or a cache that no layer is bound to.
    """
    by_owner = {cache.name: cache for cache in caches}
    owners = {name: (shared_layers or {}).get(name, name) for name in layer_names}
    missing = [name for name, owner in owners.items() if owner not in by_owner]
    unused = sorted(set(by_owner) - set(owners.values()))
    if missing or unused:
        raise InputError(
            f"layers without a cache: {', '.join(missing) or 'none'}; caches without a layer: "
            f"{', '.join(unused) or 'none'}; the plan holds {', '.join(by_owner)}"
        )
    by_name = {name: by_owner[owner] for name, owner in owners.items()}
    return [by_name[name] for name in layer_names], by_name


def _has_no_typed_view(spec: AttentionSpec | MLASpec | CompressedStateSpec) -> bool:
    """Whether something else lies beside the elements: scales, or keys and values in one packed slot."""
    return spec.scales is not None or (isinstance(spec, AttentionSpec) and spec.packed is not None)


def _check_arrangement(config: KVCacheConfig, arrangement: CacheArrangement) -> None:
    """Refuse a layout that the arrangement cannot use: keys apart from values need whole layers, others whole pages."""
    specs = [spec for group in config.groups for spec in group.layer_specs]
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if not attention or arrangement is CacheArrangement.PACKED:
        return
    layout = config.layout
    if any(spec.head_size != spec.head_size_v for spec in attention):
        raise InputError(
            f"arrangement {arrangement.value} stores keys and values of one size, and a layer has head sizes "
            f"{attention[0].head_size} and {attention[0].head_size_v}; use arrangement packed"
        )
    if not layout.is_block_compact:
        raise InputError(
            f"arrangement {arrangement.value} needs whole pages, and layout {layout.name} splits them; use one of "
            "LBNHC, LBHNC, BLNHC, BLHNC"
        )
    if not arrangement.splits_layer:
        return
    if not layout.is_layer_outermost:
        raise InputError(
            f"arrangement {arrangement.value} needs each layer in one piece; use layout LBNHC or LBHNC instead of "
            f"{layout.name}"
        )
    if any(spec.page_size_padded not in (None, spec.unpadded_page_size_bytes) for spec in specs):
        raise InputError(f"arrangement {arrangement.value} has no room for padded pages; use an interleaved one")
    # Groups overlay each other block by block, so a block must be the same bytes in all of them.
    if len(config.groups) > 1 and len(attention) < len(specs):
        raise InputError(
            f"arrangement {arrangement.value} puts a block's keys and values in two places, which groups of latents or "
            "states overlay with one; use an interleaved or packed one"
        )


def _layer_cache(place: LayerPlace, index: int, group: int) -> LayerCache:
    spec, arrangement = place.spec, place.arrangement
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] = ()
    if isinstance(spec, MambaLikeSpec):
        states = _states(place, index, spec)
        view = _page_bytes(place, index)
    elif isinstance(spec, AttentionSpec):
        views = {CacheArrangement.PACKED: _packed, CacheArrangement.CLASSIC: _classic}.get(arrangement, _two_part)
        view, key, value = views(place, index, spec)
    elif isinstance(spec, MLASpec | CompressedStateSpec | OpaqueSpec):
        view = key = _latent(place, index, spec)
    else:
        raise InputError(f"layer {place.tensor.layers[index]}: a {spec.kind} cache has no typed view")
    name, splits = place.tensor.layers[index], (place.kernel_block_size, place.splits)
    return LayerCache(name, group, spec, arrangement, *splits, view, key, value, states, _pages(place, index))


# The view of an attention layer's cache, its keys and its values.
_Views: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _packed(place: LayerPlace, index: int, spec: AttentionSpec) -> _Views:
    dtype = torch_dtype(spec.dtype)
    _, block, head, token, _ = place.byte_strides()
    # Elements of a cell: bytes, if two 4-bit elements share one.
    shape = (place.num_blocks, spec.num_kv_heads, place.kernel_block_size, spec.state_content_bytes // dtype.itemsize)
    view = place.strided(shape, (block, head, token, dtype.itemsize), place.offset_bytes(index), dtype)
    tokens_first = view.transpose(1, 2)
    num_key_elements = shape[-1] * spec.head_size // (spec.head_size + spec.head_size_v)
    value = tokens_first[..., num_key_elements:] if spec.head_size_v else None
    return view, tokens_first[..., :num_key_elements], value


def _two_part(place: LayerPlace, index: int, spec: AttentionSpec) -> _Views:
    """View a flash or interleaved cache: K and V apart, each `[num_blocks, block_size, num_kv_heads, head_size]`."""
    dtype = torch_dtype(spec.dtype)
    cell_bytes = spec.state_content_bytes // 2
    heads, tokens, blocks = spec.num_kv_heads, place.kernel_block_size, place.num_blocks
    part_bytes = heads * tokens * cell_bytes
    if place.arrangement.splits_layer:
        block_stride, part_stride = part_bytes, blocks * part_bytes
    else:
        block_stride, part_stride = place.block_stride_bytes, part_bytes
    if place.arrangement.is_heads_first:
        token_stride, head_stride = cell_bytes, tokens * cell_bytes
    else:
        token_stride, head_stride = heads * cell_bytes, cell_bytes
    shape = (2, blocks, tokens, heads, cell_bytes // dtype.itemsize)
    strides = (part_stride, block_stride, token_stride, head_stride, dtype.itemsize)
    parts = place.strided(shape, strides, place.offset_bytes(index), dtype)
    key, value = parts.unbind(0)
    return (parts if place.arrangement.splits_layer else parts.transpose(0, 1)), key, value


def _classic(place: LayerPlace, index: int, spec: AttentionSpec) -> _Views:
    dtype = torch_dtype(spec.dtype)
    vector = CLASSIC_VECTOR_BYTES // dtype.itemsize
    heads, tokens, blocks, head_size = spec.num_kv_heads, place.kernel_block_size, place.num_blocks, spec.head_size
    if head_size % vector:
        raise InputError(
            f"layers {', '.join(place.tensor.layers)}: a classic key cache of {spec.dtype} holds vectors of {vector} "
            f"elements, and head size {head_size} is not a multiple of {vector}"
        )
    block_elements = heads * tokens * head_size
    itemsize = dtype.itemsize
    view = place.strided(
        (2, blocks, block_elements),
        (blocks * block_elements * itemsize, block_elements * itemsize, itemsize),
        place.offset_bytes(index),
        dtype,
    )
    key, value = view.unbind(0)
    return (
        view,
        key.view(blocks, heads, head_size // vector, tokens, vector),
        value.view(blocks, heads, head_size, tokens),
    )


def _latent(place: LayerPlace, index: int, spec: MLASpec | CompressedStateSpec | OpaqueSpec) -> torch.Tensor:
    """View a latent: `[num_blocks, states per block, elements of a state]`; bytes for an opaque format."""
    dtype = torch.uint8 if isinstance(spec, OpaqueSpec) else torch_dtype(spec.dtype)
    _, block, _, state, _ = place.byte_strides()
    shape = (
        place.num_blocks,
        spec.states_per_block(place.kernel_block_size),
        spec.state_content_bytes // dtype.itemsize,
    )
    return place.strided(shape, (block, state, dtype.itemsize), place.offset_bytes(index), dtype)


def _states(place: LayerPlace, index: int, spec: MambaLikeSpec) -> tuple[torch.Tensor, ...]:
    """View each array of a state, one after the other in the page: `[num_blocks, *shape]`."""
    offset_bytes = place.offset_bytes(index)
    views: list[torch.Tensor] = []
    for array in spec.states:
        dtype = torch_dtype(array.dtype)
        inner = [math.prod(array.shape[axis + 1 :]) * dtype.itemsize for axis in range(len(array.shape))]
        shape, strides = (place.num_blocks, *array.shape), (place.tensor.block_stride_bytes, *inner)
        views.append(place.strided(shape, strides, offset_bytes, dtype))
        offset_bytes += array.num_bytes
    return tuple(views)


def _page_bytes(place: LayerPlace, index: int) -> torch.Tensor:
    """View pages that are one run of bytes: int8 `[num_blocks, page_size_bytes]`, in blocks of the block table."""
    start_bytes = place.tensor.offset_bytes + index * place.tensor.layer_stride_bytes
    shape = (place.config.num_blocks, place.spec.page_size_bytes)
    return place.strided(shape, (place.tensor.block_stride_bytes, 1), start_bytes, torch.int8)


def _pages(place: LayerPlace, index: int) -> tuple[torch.Tensor, ...]:
    """View the layer's pages, padding included, as int8 with the block first.

    The blocks are those of the block table, not the kernel's: a copy on write copies those.
    """
    num_blocks, layout = place.config.num_blocks, place.config.layout
    if place.arrangement.splits_layer:
        start_bytes, half_bytes = place.offset_bytes(index), place.spec.page_size_bytes // 2
        starts = (start_bytes, start_bytes + num_blocks * half_bytes)
        return tuple(place.strided((num_blocks, half_bytes), (half_bytes, 1), at, torch.int8) for at in starts)
    if layout.is_block_compact and not (layout.is_block_outermost and place.splits > 1):
        return (_page_bytes(place, index),)
    return (_split_page_bytes(place, index),)


def _split_page_bytes(place: LayerPlace, index: int) -> torch.Tensor:
    """View pages of several runs of bytes: int8 `[num_blocks, kernel blocks of a block, heads, run_bytes]`."""
    _, block, head, token, _ = place.byte_strides()
    if place.config.layout.is_block_compact:
        heads, head, run_bytes = 1, 0, place.spec.page_size_bytes // place.splits
    else:
        heads, run_bytes = place.spec.num_head_slots, place.spec.states_per_block(place.kernel_block_size) * token
    shape = (place.config.num_blocks, place.splits, heads, run_bytes)
    return place.strided(shape, (place.splits * block, block, head, 1), place.offset_bytes(index), torch.int8)
