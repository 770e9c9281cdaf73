"""Backends on the CPU over small plans, with an allocator and a simulation beside them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from kvledger.backends import CudaBackend, SimBackend  # noqa: E402
from kvledger.core import (  # noqa: E402
    AllocatorConfig,
    FullAttention,
    KVCacheAllocator,
    TokenBatch,
)
from kvledger.core.planner.layout import (  # noqa: E402
    KVCacheConfig,
    KVCacheGroup,
    KVCacheLayout,
    lay_out,
)
from kvledger.core.planner.specs import FullAttentionSpec, KVCacheSpec  # noqa: E402

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="bf16")
NUM_BLOCKS = 60


def plan(*specs: KVCacheSpec, num_blocks: int = NUM_BLOCKS, layout=KVCacheLayout.LBNHC) -> KVCacheConfig:
    """A group for each spec, with the layers `a` and `b`, `c` and `d`, ..."""
    names = iter("abcdefgh")
    groups = []
    for spec in specs or (FULL,):
        layers = (next(names), next(names))
        groups.append(KVCacheGroup(layers, (spec, spec), spec))
    return lay_out(groups, num_blocks, layout)


def backend_for(config: KVCacheConfig, **settings) -> CudaBackend:
    backend = CudaBackend(**({"device": "cpu", "max_num_batched_tokens": 64} | settings))
    backend.initialize(config)
    return backend


def serve(backend: CudaBackend, kinds=None, **changes) -> tuple[KVCacheAllocator, SimBackend]:
    """An allocator with the backend and a simulation behind it."""
    sim = SimBackend()
    settings = {"num_blocks": NUM_BLOCKS, "max_model_len": 120, "max_num_reqs": 6, "retention_interval": 0}
    return KVCacheAllocator(
        AllocatorConfig(groups=kinds or [FullAttention(4)], **(settings | changes)), sinks=[backend, sim]
    ), sim


def batch(*requests: tuple[int, int, int]) -> TokenBatch:
    columns = np.array(requests, dtype=np.int64).reshape(-1, 3)
    return TokenBatch(columns[:, 0], columns[:, 1], columns[:, 2])


def numbers(num_tokens: int, heads: int = 2, size: int = 16, seed: int = 0, dtype=torch.bfloat16):
    return torch.randn(num_tokens, heads, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
