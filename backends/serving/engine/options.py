"""The options of a live engine, checked before a model is loaded."""

import attrs

from ....core.errors import InputError
from ....core.scheduler.config import SchedulerConfig
from ..model.decode_graphs import checked_capture_sizes, decode_capture_sizes


@attrs.frozen(kw_only=True)
class EngineOptions:
    """The options that an engine is sized for.

    Attributes:
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: tokens of the longest request; None: the model's own limit; -1: the longest that fits.
        block_size: tokens per block.
        kv_cache_dtype: dtype of the cache; `auto` is the model's.
        kv_cache_memory_bytes: size of the pool.
        num_gpu_blocks_override: number of blocks; excludes `kv_cache_memory_bytes`.
        gpu_memory_utilization: fraction of a GPU's total memory, if neither of them is given; 0.92 unless given.
        enforce_eager: capture no decode step in a CUDA graph.
        cudagraph_capture_sizes: numbers of requests of the captured decode steps; None: `decode_capture_sizes`. On a
            CPU nothing is captured.
        attention_packages: let FlashAttention and FlashInfer compute attention if they are installed and suitable; on
            a GPU.
        enable_prefix_caching: keep the blocks of finished requests in the prefix cache.
        enable_chunked_prefill: allow a prompt to be computed over several steps.
        policy: scheduling policy, "fcfs" or "priority".
        watermark_blocks: free blocks that an admission must leave.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: 1; a live engine runs on one device.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    attention_packages: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    watermark_blocks: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    def __attrs_post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) != 1:
                raise InputError(
                    f"{name} is {getattr(self, name)}; a live engine runs on one device: set it to 1, or simulate the "
                    "larger one (kvledger plan, kvledger replay)"
                )
        if self.enforce_eager and self.cudagraph_capture_sizes is not None:
            raise InputError(
                f"cudagraph_capture_sizes {list(self.cudagraph_capture_sizes)} has no effect with enforce_eager; leave "
                "one of them out"
            )
        # These check the other options, before a model is loaded.
        _ = self.scheduler, self.capture_sizes

    @property
    def is_pinned(self) -> bool:
        """Whether the pool's size was given."""
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None

    @property
    def max_model_len_is_open(self) -> bool:
        """Whether the model, or what fits, decides how long a request may be."""
        return self.max_model_len in (None, -1)

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Numbers of requests of the decode steps that a GPU captures, ascending.

        Raises:
            InputError: a size that no decode step can have.
        """
        if self.enforce_eager:
            return ()
        if self.cudagraph_capture_sizes is None:
            return decode_capture_sizes(self.max_num_seqs)
        return checked_capture_sizes(self.cudagraph_capture_sizes, self.max_num_seqs)

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler config."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.policy,
        )
