"""How a Triton kernel is launched: how wide its accesses are, how many warps it gets, how little Python it costs."""

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
    """How many elements one memory access may span in all tensors: the largest power of two, up to 16 bytes, that
    divides every address, every stride but the last, and the last size.

    Tensors of one element size, dense in the last dimension. Addresses are looked at, because a kernel that is told of
    an alignment that is not there reads the wrong bytes.
    """
    item = tensors[0].element_size()
    common = MAX_ACCESS_BYTES
    for tensor in tensors:
        strides = tensor.stride()[:-1]
        common = math.gcd(common, tensor.data_ptr(), tensor.shape[-1] * item, *(stride * item for stride in strides))
    return max(common // item, 1)


def num_warps_for(num_elements: int, narrower_item_bytes: int, warp_size: int = WARP_SIZE) -> int:
    """Warps for a tile, so that every thread moves 16 bytes of the narrower side at once.

    More warps than that halve the width: at 16 warps a tile of 1,024 bfloat16 is moved 4 bytes at a time.
    """
    per_warp = warp_size * (MAX_ACCESS_BYTES // narrower_item_bytes)
    return min(max(num_elements // per_warp, 1), MAX_WARPS)


def num_lanes_for(num_items: int, items_per_lane: int) -> int:
    """Lanes that share some work in turns: as many as it fills, within what a grid allows."""
    return min(max(-(-num_items // items_per_lane), 1), MAX_GRID)


@attrs.define(eq=False)
class Launch:
    """One kernel with everything that does not change from call to call.

    The first call goes through Triton's own launcher, which specialises and compiles; later ones reuse its compiled
    handle and skip the specialisation. That is sound because kernels here specialise on nothing but dtypes, constants
    and the alignment of rows and caches, which are all in the cache's key: integers are 64-bit and not specialised,
    other pointers not on their alignment. (NVIDIA's compiler learns the alignment from hints in the kernels; AMD's
    from that of the pointers alone.)

    Attributes:
        kernel: the `triton.jit` function.
        strides: the integer arguments, which follow the pointers.
        constants: the constexpr arguments by name, in the kernel's order.
        num_warps: see `num_warps_for`.
        num_stages: software pipelining of loops; None is Triton's default.
        max_registers: of a thread, on NVIDIA's GPUs; None leaves it to the assembler, which may spill a few registers
            to fit one more program on a multiprocessor.
        compiled: the handle, after the first call; None forever in the interpreter.
    """

    kernel: Any
    strides: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int | None = None
    max_registers: int | None = None
    compiled: Any = None

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
    """Launches by what they depend on: dtypes, shapes, strides, alignments."""

    def __init__(self) -> None:
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
        """The launch of this key, made (and its arguments checked) the first time."""
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = make()
        return launch


def rows_key(*tensors: Tensor) -> tuple[Any, ...]:
    """What a launch depends on in its inputs; how many there are (the first dimension) is left out."""
    return tuple(
        (tensor.dtype, tensor.shape[1:], tensor.stride(), tensor.data_ptr() % MAX_ACCESS_BYTES, tensor.device)
        for tensor in tensors
    )


def memory_key(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a launch depends on in caches, tables and scales: everything but where they are."""
    return tuple(
        None
        if tensor is None
        else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % MAX_ACCESS_BYTES, tensor.device)
        for tensor in tensors
    )
