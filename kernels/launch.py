"""Launches Triton kernels with little Python: the width of their memory accesses, their warps, and a launch cache."""

import math
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

MAX_ACCESS_BYTES = 16
MAX_WARPS = 8
WARP_SIZE = 32
# CUDA's limit of a grid's second and third axis.
MAX_GRID = 65_535


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def vector_elements(*tensors: Tensor) -> int:
    """Return how many elements one memory access may span in all tensors: the largest power of two, up to 16 bytes,
    that divides every address, every stride but the last, and the last size.

    The tensors have one element size and a dense last dimension. Addresses count, because a kernel compiled for an
    alignment that its tensors lack reads the wrong bytes.
    """
    item = tensors[0].element_size()
    common = MAX_ACCESS_BYTES
    for tensor in tensors:
        strides = tensor.stride()[:-1]
        common = math.gcd(common, tensor.data_ptr(), tensor.shape[-1] * item, *(stride * item for stride in strides))
    return max(common // item, 1)


def num_warps_for(num_elements: int, narrower_item_bytes: int, warp_size: int = WARP_SIZE) -> int:
    """Return the warps for a tile, so that every thread moves 16 bytes of the narrower side at once.

    More warps than that halve the width: at 16 warps a tile of 1,024 bfloat16 is moved 4 bytes at a time.
    """
    per_warp = warp_size * (MAX_ACCESS_BYTES // narrower_item_bytes)
    return min(max(num_elements // per_warp, 1), MAX_WARPS)


def num_lanes_for(num_items: int, items_per_lane: int) -> int:
    """Return how many lanes share the work in turns: as many as it fills, within the limit of a grid."""
    return min(max(-(-num_items // items_per_lane), 1), MAX_GRID)


def jit_without_alignment_of(*unaligned: str) -> Callable[[Any], Any]:
    """Decorate a kernel with `triton.jit`: its 64-bit integers are not specialised, nor these pointers' alignment."""
    import triton  # the torch twins need this module, and not Triton

    def decorate(kernel: Any) -> Any:
        integers = [name for name, kind in kernel.__annotations__.items() if kind is triton.language.int64]
        return triton.jit(do_not_specialize=integers, do_not_specialize_on_alignment=list(unaligned))(kernel)

    return decorate


@attrs.define(eq=False)
class Launch:
    """One kernel with all arguments that do not change from call to call.

    The first call goes through Triton's own launcher, which specialises and compiles; later calls reuse its compiled
    handle and skip the specialisation. This is sound because these kernels specialise only on dtypes, constants and the
    alignment of rows and caches, and all of these are in the cache's key: integers are 64-bit and not specialised,
    other pointers not specialised on their alignment. (NVIDIA's compiler learns the alignment from hints in the
    kernels, AMD's from the pointers alone.)
    """

    kernel: Any  # the `triton.jit` function
    strides: tuple[int, ...]  # the integer arguments, which follow the pointers
    constants: dict[str, Any]  # the constexpr arguments by name, in the kernel's order
    num_warps: int  # see `num_warps_for`
    num_stages: int | None = None  # software pipelining of loops; None is Triton's default
    # Registers of a thread, on NVIDIA's GPUs; None: the assembler chooses, and may spill a few registers to fit one
    # more program on a multiprocessor.
    max_registers: int | None = None
    compiled: Any = None  # the handle, after the first call; always None in the interpreter

    def __call__(self, grid: tuple[int, int, int], pointers: tuple[Tensor | None, ...], *numbers: float) -> None:
        """Launch on the current stream. `numbers` change from call to call and follow the strides."""
        if self.compiled is not None:
            self.compiled[grid](*pointers, *self.strides, *numbers, *self.constants.values())
            return
        options: dict[str, int] = {"num_warps": self.num_warps}
        if self.num_stages is not None:
            options["num_stages"] = self.num_stages
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        self.compiled = self.kernel[grid](*pointers, *self.strides, *numbers, **self.constants, **options)


class LaunchCache:
    """Keeps launches by the dtypes, shapes, strides and alignments that they depend on."""

    def __init__(self) -> None:
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
        """Return the launch of this key; the first time, make it and check its arguments."""
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = make()
        return launch


def rows_key(*tensors: Tensor) -> tuple[Any, ...]:
    """Return the properties of inputs that a launch depends on: all but the first dimension, their number."""
    return tuple(
        (tensor.dtype, tensor.shape[1:], tensor.stride(), tensor.data_ptr() % MAX_ACCESS_BYTES, tensor.device)
        for tensor in tensors
    )


def memory_key(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the properties of caches, tables and scales that a launch depends on: all but their addresses."""
    return tuple(
        None
        if tensor is None
        else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % MAX_ACCESS_BYTES, tensor.device)
        for tensor in tensors
    )
