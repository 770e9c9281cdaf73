"""The kernels in plain torch, on any device: the CPU path, and the reference for the Triton kernels."""

from .concat_and_cache_mla import concat_and_cache_mla
from .copy_blocks import copy_blocks
from .gather_cache import gather_cache, gather_cache_classic, gather_mla_cache
from .paged_attention import paged_attention
from .reshape_and_cache import reshape_and_cache, reshape_and_cache_classic
from .slot_mapping import compute_slot_mapping


class TorchKernels:
    """`Kernels` in plain torch, without triton. On a GPU its calls wait for the device, so no graph captures them."""

    compute_slot_mapping = staticmethod(compute_slot_mapping)
    reshape_and_cache = staticmethod(reshape_and_cache)
    reshape_and_cache_classic = staticmethod(reshape_and_cache_classic)
    concat_and_cache_mla = staticmethod(concat_and_cache_mla)
    copy_blocks = staticmethod(copy_blocks)
    gather_cache = staticmethod(gather_cache)
    gather_cache_classic = staticmethod(gather_cache_classic)
    gather_mla_cache = staticmethod(gather_mla_cache)
    paged_attention = staticmethod(paged_attention)
