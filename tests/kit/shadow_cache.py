"""A KV cache in plain NumPy: the same bytes as the real one, found by reshaping whole buffers and nothing else.

Where device code computes strides, this reshapes contiguous memory into its axes and transposes them, so that the two
agree only if both are right.
"""

import math
from typing import TypeAlias

import numpy as np
from kvledger.core.planner.layout import KVCacheConfig, KVCacheTensor
from kvledger.core.planner.specs import AttentionSpec, KVCacheSpec
from numpy.typing import NDArray

Elements: TypeAlias = NDArray[np.generic]

# Bytes of the innermost vector of a classic key cache.
_CLASSIC_VECTOR_BYTES = 16


class ShadowCache:
    """The buffer of one rank.

    Attributes:
        buffer: uint8 `[config.size_bytes]`.
        elements: layer -> its parts (keys and values, or one latent), each a view of `buffer` with the axes
            `[num_blocks, block_size, ...]`; what is behind them is a head's vector in whatever axes it lies in memory.
        group_of: layer -> the number of its group.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        arrangement: str,
        splits: int = 1,
        element: type[np.generic] = np.uint16,
        seed: int = 0,
        buffer: NDArray[np.uint8] | None = None,
    ) -> None:
        """Seeded noise for content, so that a byte that changes is seen wherever it is; or a buffer that is there.

        Args:
            config: the plan.
            arrangement: "packed", "flash_nhd", "flash_hnd", "interleaved_nhd", "interleaved_hnd" or "classic".
            splits: kernel blocks that each block of the block table is split into.
            element: a NumPy type of the elements' width.
            seed: of the noise.
            buffer: uint8 `[config.size_bytes]` to look at instead.
        """
        noise = np.random.default_rng(seed)
        self.buffer = noise.integers(0, 256, config.size_bytes, dtype=np.uint8) if buffer is None else buffer
        self.elements: dict[str, tuple[Elements, ...]] = {}
        self.group_of: dict[str, int] = {}
        self._config = config
        self._arrangement = arrangement
        self._element = np.dtype(element)
        for number, group in enumerate(config.groups):
            for tensor in config.tensors:
                for index, name in enumerate(tensor.layers):
                    if name in group.layer_names:
                        spec = group.layer_specs[group.layer_names.index(name)]
                        self.group_of[name] = number
                        self.elements[name] = self._parts(tensor, index, spec, spec.block_size // splits)

    def write(self, layer: str, slots: NDArray[np.int64], parts: tuple[Elements, ...]) -> None:
        """Put one vector a token into its slot; a slot of -1 has none. `parts[i]` is `[num_tokens, heads, size]`."""
        kept = slots >= 0
        for cache, values in zip(self.elements[layer], parts, strict=True):
            blocks, offsets = np.divmod(slots[kept], cache.shape[1])
            cache[blocks, offsets] = values[kept].reshape(-1, *cache.shape[2:])

    def read(self, layer: str, slots: NDArray[np.int64]) -> tuple[Elements, ...]:
        """The vectors at these slots, one `[num_tokens, elements]` a part."""
        found: list[Elements] = []
        for cache in self.elements[layer]:
            blocks, offsets = np.divmod(slots, cache.shape[1])
            found.append(cache[blocks, offsets].reshape(len(slots), math.prod(cache.shape[2:])))
        return tuple(found)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block of the block table in every layer of its group."""
        for layer, parts in self.elements.items():
            if self.group_of[layer] == group:
                for cache in parts:
                    per_block = len(cache) // self._config.num_blocks
                    for part in range(per_block):
                        cache[target * per_block + part] = cache[source * per_block + part]

    # -- views, all by reshaping -------------------------------------------------------------------------------------

    def _parts(self, tensor: KVCacheTensor, index: int, spec: KVCacheSpec, tokens: int) -> tuple[Elements, ...]:
        if not isinstance(spec, AttentionSpec):
            return (self._cells(tensor, index, spec, tokens)[:, :, 0],)
        heads, size = spec.num_kv_heads, spec.head_size
        blocks = self._config.num_blocks * spec.block_size // tokens
        if self._arrangement == "packed":
            cells = self._cells(tensor, index, spec, tokens)
            return cells[..., :size], cells[..., size:]
        if self._arrangement.startswith("interleaved"):
            both = self._pages(tensor, index, spec, tokens).view(self._element).reshape(blocks, 2, -1)
            halves = (both[:, 0], both[:, 1])
        else:
            layer = self._pages(tensor, index, spec, tokens).reshape(-1).view(self._element)
            assert np.shares_memory(layer, self.buffer)
            halves = tuple(layer.reshape(2, blocks, -1))
        if self._arrangement == "classic":
            vector = _CLASSIC_VECTOR_BYTES // self._element.itemsize
            key = halves[0].reshape(blocks, heads, size // vector, tokens, vector).transpose(0, 3, 1, 2, 4)
            return key, halves[1].reshape(blocks, heads, size, tokens).transpose(0, 3, 1, 2)
        if self._arrangement.endswith("hnd"):
            return tuple([half.reshape(blocks, heads, tokens, size).transpose(0, 2, 1, 3) for half in halves])
        return tuple([half.reshape(blocks, tokens, heads, size) for half in halves])

    def _pages(self, tensor: KVCacheTensor, index: int, spec: KVCacheSpec, tokens: int) -> NDArray[np.uint8]:
        """`[kernel blocks, bytes of a kernel block in this layer]`, where a page is one run; padding left out."""
        parts = spec.block_size // tokens
        blocks, page_bytes = self._config.num_blocks, spec.page_size_bytes
        if self._config.layout.is_block_outermost:
            pages = self.buffer.reshape(blocks * parts, -1)
            start = (tensor.offset_bytes + index * page_bytes) // parts
            pages = pages[:, start : start + page_bytes // parts]
        else:
            start = tensor.offset_bytes + index * blocks * page_bytes
            pages = self.buffer[start : start + blocks * page_bytes].reshape(blocks * parts, -1)
        return pages[:, : spec.unpadded_page_size_bytes // parts]

    def _cells(self, tensor: KVCacheTensor, index: int, spec: KVCacheSpec, tokens: int) -> Elements:
        """`[kernel blocks, states, heads, elements of a cell]` of one layer, in the plan's physical order of axes."""
        order = self._config.layout.name
        parts, layers = spec.block_size // tokens, len(tensor.layers)
        sizes = {
            "L": layers,
            "B": self._config.num_blocks * parts,
            "H": spec.num_head_slots,
            "N": spec.states_per_block(tokens),
            "C": spec.state_content_bytes,
        }
        if order.startswith("L") and self._config.layout.is_block_compact:
            rows = [self._pages(tensor, number, spec, tokens) for number in range(layers)]
            cells = rows[index].reshape([sizes[axis] for axis in order[1:]])
            order = order[1:]
        elif order.startswith("L"):
            num_bytes = layers * self._config.num_blocks * spec.page_size_bytes
            whole = self.buffer[tensor.offset_bytes : tensor.offset_bytes + num_bytes]
            cells = whole.reshape([sizes[axis] for axis in order])
        elif order.startswith("BL"):
            cells = self._pages(tensor, index, spec, tokens).reshape([sizes[axis] for axis in order if axis != "L"])
            order = order.replace("L", "")
        else:
            blocks = self.buffer.reshape(sizes["B"], -1)
            start = tensor.offset_bytes // parts
            num_bytes = layers * spec.page_size_bytes // parts
            cells = blocks[:, start : start + num_bytes].reshape([sizes[axis] for axis in order])
        if "L" in order:
            cells = np.moveaxis(cells, order.index("L"), 0)[index]
            order = order.replace("L", "")
        assert np.shares_memory(cells, self.buffer)
        return cells.transpose([order.index(axis) for axis in "BNHC"]).view(self._element)
