"""The kernels in plain torch, on any device: the CPU path, and the reference for the Triton kernels."""

from .concat_and_cache_mla import write_latents
from .copy_blocks import copy
from .gather_cache import gather
from .kernel_set import Kernels
from .paged_attention import attend
from .reshape_and_cache import write_pair
from .slot_mapping import map_slots


class TorchKernels(Kernels):
    """`Kernels` in plain torch, without triton. On a GPU its calls wait for the device, so no graph captures them."""

    _map_slots = staticmethod(map_slots)
    _write = staticmethod(write_pair)
    _write_latents = staticmethod(write_latents)
    _copy = staticmethod(copy)
    _gather = staticmethod(gather)
    _attend = staticmethod(attend)
