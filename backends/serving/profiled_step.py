"""The largest step of a model, run before there is a pool: every token lands in the null block, so none is needed."""

from typing import Any

import numpy as np
import torch

from ...core.allocator_groups import allocator_groups
from ...core.events import Commit, PoolCreated
from ...core.model_geometry import ModelGeometry
from ...core.types import TokenBatch
from ..cuda_backend import CudaBackend
from ..profiling_step import ProfilingStep, StepLimits
from .model_runner import ModelRunner
from .sampling import SamplingSettings, choose_tokens
from .served_model import kv_cache_config

# The null block and the one that a pool cannot do without.
_SMALLEST_POOL_BLOCKS = 2
# Truncating and drawing takes the most memory that sampling can.
_SAMPLED = SamplingSettings(max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, logprobs=1)


def largest_step(
    model: Any,
    geometry: ModelGeometry,
    limits: StepLimits,
    *,
    block_size: int,
    kv_cache_dtype: str,
    device: str | torch.device,
) -> ProfilingStep:
    """The step that a profiler runs, on the smallest pool and with the attention of a served step.

    Block tables that no event has filled name the null block everywhere, and nothing that is computed here is read.

    Args:
        model: a transformers causal language model.
        geometry: what its layers store.
        limits: how large a step can be.
        block_size: tokens of a block.
        kv_cache_dtype: of the cache.
        device: where the model is.
    """

    def run(tokens_per_request: tuple[int, ...]) -> torch.Tensor:
        config = kv_cache_config(
            geometry, num_blocks=_SMALLEST_POOL_BLOCKS, block_size=block_size, kv_cache_dtype=kv_cache_dtype
        )
        backend = CudaBackend(
            device=device, max_num_batched_tokens=limits.max_num_batched_tokens, model_dtype=model.dtype
        )
        backend.initialize(config)
        backend.apply(Commit(0, (_pool(backend, config, max(tokens_per_request), len(tokens_per_request)),)))
        runner = ModelRunner(model, backend)
        try:
            counts = np.array(tokens_per_request, dtype=np.int64)
            rows = np.arange(len(counts), dtype=np.int64)
            batch = TokenBatch(rows, np.zeros_like(rows), counts)
            return runner.run(np.zeros(batch.num_tokens, dtype=np.int64), batch, rows)
        finally:
            runner.release_model()

    def sample(logits: torch.Tensor) -> None:
        count = len(logits)
        choose_tokens(logits, [_SAMPLED] * count, [0.5] * count).wait()

    return ProfilingStep(model=run, sampler=sample)


def _pool(backend: CudaBackend, config: Any, longest: int, num_reqs: int) -> PoolCreated:
    groups = allocator_groups(config)
    return PoolCreated(
        num_blocks=config.num_blocks,
        groups=groups,
        max_num_reqs=num_reqs,
        max_model_len=longest,
        enable_caching=False,
        hash_block_size=groups[0].block_size,
        scheduler_block_size=groups[0].block_size,
        eviction="lru",
        key_algorithm="none",
    )
