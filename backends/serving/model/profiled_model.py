"""What a profiler runs before there is a pool: the largest step of a model, and captures of its decode steps.

Both run over the smallest pool, with the attention of a served step; block tables that no event has filled name the
null block everywhere, and nothing that is computed here is read.
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

# The null block and the one that a pool cannot do without.
_SMALLEST_POOL_BLOCKS = 2
# Penalizing, truncating and drawing takes the most memory that sampling can.
_SAMPLED = SamplingSettings(max_tokens=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, logprobs=1)


@attrs.frozen(kw_only=True, eq=False)
class ProfiledModel:
    """A model to be profiled.

    Attributes:
        model: a transformers causal language model.
        geometry: what its layers store.
        limits: how large a step can be.
        max_model_len: tokens of the longest request; None: no limit.
        block_size: tokens of a block.
        kv_cache_dtype: of the cache.
        device: where the model is.
    """

    model: Any
    geometry: ModelGeometry
    limits: StepLimits
    max_model_len: int | None
    block_size: int
    kv_cache_dtype: str
    device: str | torch.device

    def largest_step(self) -> ProfilingStep:
        """The step that takes the most memory, and sampling from it."""
        return ProfilingStep(model=self._run, sampler=_sample)

    def _run(self, tokens_per_request: tuple[int, ...]) -> torch.Tensor:
        counts = np.array(tokens_per_request, dtype=np.int64)
        if self.max_model_len is not None:  # a few requests may not fill the largest step that is allowed
            counts = np.minimum(counts, self.max_model_len)
        rows = np.arange(len(counts), dtype=np.int64)
        batch = TokenBatch(rows, np.zeros_like(rows), counts)
        with self.on_smallest_pool(int(counts.max())) as runner:
            return runner.run(np.zeros(batch.num_tokens, dtype=np.int64), batch, rows)

    @contextmanager
    def on_smallest_pool(self, max_model_len: int) -> Iterator[ModelRunner]:
        """The model on a pool of its own for the time of a block."""
        config = kv_cache_config(
            self.geometry,
            num_blocks=_SMALLEST_POOL_BLOCKS,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        backend = CudaBackend(
            device=self.device,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            model_dtype=self.model.dtype,
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
    """The captures of a model's decode steps as `MemoryProfiler.estimate_graphs` asks for them."""

    def __init__(self, profiled: ProfiledModel, sizes: Sequence[int], capturer: GraphCapturer) -> None:
        """Nothing is captured yet.

        Args:
            profiled: the model.
            sizes: requests of the steps that will be captured.
            capturer: captures.
        """
        self._profiled = profiled
        self._sizes = tuple(sizes)
        self._capturer = capturer
        self._runner: ModelRunner | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def captures(self) -> GraphCaptures:
        """To be made inside `smallest_pool`."""
        return GraphCaptures(mode="decode", sizes=self._sizes, capture=self._capture)

    @contextmanager
    def smallest_pool(self) -> Iterator[None]:
        """The pool that they are captured over; the graphs are dropped with it."""
        with self._profiled.on_smallest_pool(self._profiled.block_size) as self._runner:
            try:
                yield
            finally:
                self._runner = self._graphs = None

    def _capture(self, size: int) -> DecodeGraphs:
        if self._runner is None:
            raise MisuseError("graphs are sampled over the smallest pool; enter `smallest_pool` first")
        if self._graphs is None:  # with the first graph, so that its sample counts the buffers that all share
            self._graphs = self._runner.empty_graphs(max(self._sizes), self._capturer)
        self._graphs.capture(size)
        return self._graphs


def _sample(logits: torch.Tensor) -> None:
    """With every token seen before in every row."""
    num_rows, vocab_size = logits.shape
    adjuster = LogitAdjuster(_SAMPLED, np.arange(vocab_size), TokenRules.of(_SAMPLED))
    choose_tokens(logits, [NextToken(_SAMPLED, 0.5, adjuster.next(0))] * num_rows).wait()
