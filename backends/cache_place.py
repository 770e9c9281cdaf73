"""Where the layers of one tensor lie in the rank's buffer: offsets and strides in bytes, and typed views of them."""

from collections.abc import Sequence

import attrs
import torch

from ..core.errors import InputError
from ..core.kv_cache_config import KVCacheConfig, KVCacheTensor
from ..core.kv_cache_layout import layout_strides_bytes
from ..core.kv_cache_spec import KVCacheSpec
from .cache_arrangement import CacheArrangement


@attrs.frozen(eq=False)
class LayerPlace:
    """Where the layers of one tensor lie, in kernel blocks, and the buffer that they lie in."""

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
        """Where layer `index` of the tensor starts.

        Where the block is the outermost axis, a kernel block holds its part of every layer, so layers move closer
        together by as much as blocks get smaller.
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
        """A typed view of the buffer.

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
