"""Runs a model for the memory profiler before there is a pool: its largest step, and captures of its decode steps.

Both run on the smallest pool, with the attention of a served step. No event has filled the block tables, so they hold
the null block everywhere; the results are not used.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from ....core.allocator.config import AllocatorConfig
from ....core.errors import MisuseError
from ....core.models.geometry import ModelGeometry
from ....core.planner.groups import allocator_groups
from ....core.types import TokenBatch
from ...cuda.backend import CudaBackend
from ...cuda.graphs import GraphCapturer
from ...profiling.graph_memory import GraphCaptures
from ...profiling.step import ProfilingStep, StepLimits
from ..sampling.logit_adjustments import LogitAdjuster
from ..sampling.sampling import NextToken, choose_tokens
from ..sampling.settings import SamplingSettings, TokenRules
from .decode_graphs import DecodeGraphs
from .runner import ModelRunner
from .served_model import kv_cache_config

# The null block, and one more, which every pool needs.
_SMALLEST_POOL_BLOCKS = 2
# Sampling takes the most memory with penalties, truncation and a draw.
_SAMPLED = SamplingSettings(max_tokens=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, logprobs=1)


@attrs.frozen(kw_only=True, eq=False)
class ProfiledModel:
    """A model to profile."""

    model: Any  # a transformers causal language model
    geometry: ModelGeometry
    limits: StepLimits  # the largest step
    max_model_len: int | None  # tokens of the longest request; None: no limit
    block_size: int  # tokens per block
    kv_cache_dtype: str  # dtype of the cache
    device: str | torch.device

    def largest_step(self) -> ProfilingStep:
        """Return the step that takes the most memory, including sampling."""
        return ProfilingStep(model=self._run, sampler=_sample)

    def _run(self, tokens_per_request: tuple[int, ...]) -> torch.Tensor:
        counts = np.array(tokens_per_request, dtype=np.int64)
        if self.max_model_len is not None:  # a few requests may be too short to fill the largest step
            counts = np.minimum(counts, self.max_model_len)
        rows = np.arange(len(counts), dtype=np.int64)
        batch = TokenBatch(rows, np.zeros_like(rows), counts)
        with self.on_smallest_pool(int(counts.max())) as runner:
            return runner.run(np.zeros(batch.num_tokens, dtype=np.int64), batch, rows)

    @contextmanager
    def on_smallest_pool(self, max_model_len: int) -> Iterator[ModelRunner]:
        """Run a `with` block with the model on its own small pool."""
        config = kv_cache_config(
            self.geometry,
            num_blocks=_SMALLEST_POOL_BLOCKS,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        backend = CudaBackend(
            device=self.device, max_num_batched_tokens=self.limits.max_num_batched_tokens, model_dtype=self.model.dtype
        )
        backend.initialize(config)
        tables = AllocatorConfig(
            num_blocks=config.num_blocks,
            groups=allocator_groups(config),
            max_model_len=max_model_len,
            max_num_reqs=self.limits.max_num_seqs,
            retention_interval=0,
        )
        backend.create_tables(tables)
        runner = ModelRunner(self.model, backend)
        try:
            yield runner
        finally:
            runner.release_model()


class SampledGraphs:
    """Captures a model's decode steps for `MemoryProfiler.estimate_graphs`."""

    def __init__(self, profiled: ProfiledModel, sizes: Sequence[int], capturer: GraphCapturer) -> None:
        """Start with nothing captured; `sizes` are the numbers of requests of the steps that will be."""
        self._profiled = profiled
        self._sizes = tuple(sizes)
        self._capturer = capturer
        self._runner: ModelRunner | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def captures(self) -> GraphCaptures:
        """The captures to make inside `smallest_pool`."""
        return GraphCaptures(mode="decode", sizes=self._sizes, capture=self._capture)

    @contextmanager
    def smallest_pool(self) -> Iterator[None]:
        """Provide the pool for the captures; the graphs are dropped with it."""
        with self._profiled.on_smallest_pool(self._profiled.block_size) as self._runner:
            try:
                yield
            finally:
                self._runner = self._graphs = None

    def _capture(self, size: int) -> DecodeGraphs:
        if self._runner is None:
            raise MisuseError("graphs are sampled over the smallest pool; enter `smallest_pool` first")
        if self._graphs is None:  # with the first graph, whose sample thus includes the shared buffers
            self._graphs = self._runner.empty_graphs(max(self._sizes), self._capturer)
        self._graphs.capture(size)
        return self._graphs


def _sample(logits: torch.Tensor) -> None:
    """Sample with every token seen before in every row."""
    num_rows, vocab_size = logits.shape
    adjuster = LogitAdjuster(_SAMPLED, np.arange(vocab_size), TokenRules.of(_SAMPLED))
    choose_tokens(logits, [NextToken(_SAMPLED, 0.5, adjuster.next(0))] * num_rows).wait()
