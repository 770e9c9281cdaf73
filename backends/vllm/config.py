"""Maps vLLM's cache groups and options to an `AllocatorConfig`, and refuses by name what our allocator does not do."""

from typing import Any

from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import CacheKind, ChunkedLocal, FullAttention, SequenceState, SlidingWindow
from ...core.errors import InputError
from ...core.pool.eviction_order import eviction_order_names
from .names import specs, utils

# The option of `--additional-config` that names the eviction policy.
EVICTION = "kvledger_eviction"
# Who refuses what, and how an engine starts without it.
MANAGER, RECORDER = "kvledger's manager", "kvledger's recorder"
_WAYS_OUT = {
    MANAGER: "leave out --scheduler-cls to serve with vLLM's own",
    RECORDER: "unset KVLEDGER_RECORD to serve without",
}


def refused_options(vllm_config: Any) -> list[str]:
    """List the options of a vLLM engine that neither our manager nor the recorder supports; empty if there are none."""
    refused: list[str] = []
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if vllm_config.kv_transfer_config is not None:
        refused.append("a KV connector (--kv-transfer-config): its blocks hold content from outside the pool")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        refused.append("context parallelism (--decode-context-parallel-size, --prefill-context-parallel-size)")
    if vllm_config.model_config.is_encoder_decoder:
        refused.append("encoder-decoder models: cross-attention blocks")
    if speculative is not None and vllm_config.num_prefill_lookahead_tokens > 1:
        refused.append("predictors of several modules (MTP with num_speculative_tokens > 1 of one module each)")
    return refused


def refused_groups(
    kv_cache_config: Any, hash_block_size: int, enable_caching: bool, use_eagle: bool, kv_cache_events: bool = False
) -> list[str]:
    """List what the cache groups of a model need and our allocator does not do; empty if there is nothing."""
    groups = kv_cache_config.kv_cache_groups
    refused: list[str] = []
    for number, group in enumerate(groups):
        try:
            kind_of(group.kv_cache_spec, enable_caching)
        except InputError as error:
            refused.append(f"cache group {number}: {error}")
        if group.host_resident:
            refused.append(f"cache group {number}: blocks in host memory (HiSparse)")
    if enable_caching and utils.partial_hash_hits_enabled(groups, hash_block_size):
        refused.append(
            f"prefix hits that end inside a block: hash blocks of {hash_block_size} tokens in larger state blocks; "
            "--block-size gives both one size"
        )
    if enable_caching and (use_eagle or kv_cache_events):
        larger = [each.block_size for each in (group.kv_cache_spec for group in groups) if is_full(each)]
        if any(size != hash_block_size for size in larger):
            refused.append(
                f"EAGLE or KV events where full attention has blocks of {larger} tokens and hash blocks have "
                f"{hash_block_size}: vLLM registers a prompt's last hash block inside such a block"
            )
    flagged = [group.is_eagle_group for group in groups]
    if use_eagle and any(flagged) and not all(flagged):
        refused.append("EAGLE layers in cache groups of their own: the hits of those groups alone lose a block")
    return refused


def refuse(what: str, refused: list[str]) -> None:
    """Raise `InputError` with everything that `what` (manager or recorder) does not do, if there is anything."""
    if refused:
        raise InputError(f"{what} does not support: {'; '.join(refused)}. Change that, or {_WAYS_OUT[what]}")


def is_full(spec: Any) -> bool:
    """Whether a spec is full attention, MLA included."""
    return type(getattr(spec, "first_spec", spec)) in (specs.FullAttentionSpec, specs.MLAAttentionSpec)


def kind_of(spec: Any, enable_caching: bool = True) -> CacheKind:
    """Return the cache kind of a vLLM spec.

    Raises:
        InputError: our allocator has no such kind.
    """
    if isinstance(spec, specs.UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    name, size = type(spec).__name__, spec.block_size
    if isinstance(spec, specs.MambaSpec):
        if spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks:
            raise InputError(f"{name} with blocks for drafts or checkpoints")
        if spec.mamba_cache_mode == "align":
            return SequenceState(size)
        if spec.mamba_cache_mode == "none" or not enable_caching:
            return FullAttention(size)  # one block for the whole request, which it keeps
        raise InputError(f"{name} in the cache mode {spec.mamba_cache_mode!r}; use --mamba-cache-mode align")
    if not spec.prefix_cacheable:
        raise InputError(f"{name} without prefix caching")
    if is_full(spec):
        return FullAttention(size)
    if type(spec) in (specs.SlidingWindowSpec, specs.SlidingWindowMLASpec):
        if spec.extra_retained_tokens:
            raise InputError(f"{name} that keeps {spec.extra_retained_tokens} tokens behind its window")
        return SlidingWindow(size, spec.sliding_window)
    if type(spec) is specs.ChunkedLocalAttentionSpec:
        if spec.attention_chunk_size % size:
            raise InputError(f"{name}: chunks of {spec.attention_chunk_size} tokens, not whole blocks of {size}")
        return ChunkedLocal(size, spec.attention_chunk_size)
    raise InputError(name)


def allocator_config(
    kv_cache_config: Any,
    max_model_len: int,
    scheduler_block_size: int,
    hash_block_size: int,
    max_in_flight_tokens: int | None = None,
    enable_caching: bool = True,
    use_eagle: bool = False,
    watermark: float = 0.0,
    max_num_reqs: int = 256,
    eviction: str = "lru",
    kv_cache_events: bool = False,
    asks: str = MANAGER,
) -> AllocatorConfig:
    """Return the allocator config under which our allocator decides what vLLM's manager with these options decides.

    The arguments but `max_num_reqs` and `eviction` are those of vLLM's `KVCacheManager`.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`: groups, blocks and retention.
        max_model_len: tokens of the longest request.
        scheduler_block_size: hits are multiples of it, in tokens.
        hash_block_size: tokens per block hash.
        max_in_flight_tokens: the most tokens of a request in steps that are not settled; None: `max_model_len`.
        enable_caching: prefix caching.
        use_eagle: whether the last block of a hit is computed again.
        watermark: share of the blocks that an admission leaves free.
        max_num_reqs: most requests that hold blocks at the same time.
        eviction: name of the eviction policy.
        kv_cache_events: whether vLLM publishes KV events.
        asks: who needs it, `MANAGER` or `RECORDER`, for the error.

    Raises:
        InputError: what our allocator does not do, everything in one message.
    """
    needs = refused_groups(kv_cache_config, hash_block_size, enable_caching, use_eagle, kv_cache_events)
    refuse(asks, needs)
    if eviction not in eviction_order_names():
        raise InputError(f"{EVICTION} is {eviction!r}; the eviction policies are {', '.join(eviction_order_names())}")
    return AllocatorConfig(
        num_blocks=kv_cache_config.num_blocks,
        groups=[kind_of(group.kv_cache_spec, enable_caching) for group in kv_cache_config.kv_cache_groups],
        max_model_len=max_model_len,
        max_num_reqs=max_num_reqs,
        enable_caching=enable_caching,
        retention_interval=kv_cache_config.prefix_cache_retention_interval,
        max_in_flight_tokens=max_in_flight_tokens or 0,
        watermark_blocks=int(watermark * kv_cache_config.num_blocks),
        use_eagle=use_eagle,
        hash_block_size=hash_block_size,
        scheduler_block_size=scheduler_block_size,
        eviction=eviction,
        key_algorithm="vllm",
    )
