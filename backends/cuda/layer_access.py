"""Writes and reads the cache of one layer: chooses the kernel that its arrangement needs, and its scales."""

from collections.abc import Iterable, Sequence
from typing import TypedDict

import attrs
import numpy as np
import torch

from ...core.errors import InputError
from ...core.planner.specs import AttentionSpec, MLASpec
from ...core.types import TokenBatch
from ...kernels.kernel_set import Kernels
from ...kernels.scales import kv_scale
from .attention_packages import AttentionCall, AttentionChoices, AttentionPackage
from .layout import CacheArrangement, LayerCache
from .staging import BatchInputs, on_device

QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2)
# One for each way in which Triton specialises an integer argument: 1, a multiple of 16, any other.
WARM_UP_TOKENS = (1, 16, 17)


@attrs.frozen
class KVScales:
    """Scales of one layer's quantised cache: stored = saturate(value / scale), read = stored * scale.

    Attributes:
        k_scale: scale of the keys, or of a latent; None: 1.0, with a warning.
        v_scale: scale of the values; unused for a latent.
    """

    k_scale: float | None = None
    v_scale: float | None = None


class _TokensToRead(TypedDict):
    """Arguments that all gather kernels share."""

    block_table: torch.Tensor
    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    first_positions: torch.Tensor
    num_tokens: int
    block_size: int
    dtype: torch.dtype
    checked: bool


class LayerAccess:
    """Calls the kernels that write and read a layer's cache."""

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        model_dtype: torch.dtype | None,
        kv_scales: dict[str, KVScales],
        checked: bool,
        attention_packages: Sequence[AttentionPackage] = (),
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._model_dtype = model_dtype
        self._given_scales = kv_scales
        self._checked = checked
        self.attention = AttentionChoices(attention_packages)
        self._scales: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def add(self, caches: Sequence[LayerCache]) -> None:
        """Prepare the scales of these layers.

        Raises:
            InputError: scales for a layer that is missing or not quantised, or a quantised cache without `model_dtype`.
        """
        quantized = [cache.name for cache in caches if cache.key is not None and cache.key.dtype in QUANTIZED]
        unknown = sorted(set(self._given_scales) - set(quantized))
        if unknown:
            raise InputError(f"scales for {', '.join(unknown)}; quantised layers are {', '.join(quantized) or 'none'}")
        if quantized and self._model_dtype is None:
            raise InputError(
                f"layers {', '.join(quantized)} are quantised; give model_dtype, the dtype of the keys and values that "
                "the model computes"
            )
        for name in quantized:
            given = self._given_scales.get(name, KVScales())
            is_latent = any(cache.is_latent for cache in caches if cache.name == name)
            k_scale = kv_scale(given.k_scale, name=f"k_scale of layer {name}", device=self._device)
            v_scale = None
            if not is_latent:
                v_scale = kv_scale(given.v_scale, name=f"v_scale of layer {name}", device=self._device)
            self._scales[name] = (k_scale, v_scale)

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys and values, or a latent and its rotary key, at these slots."""
        k_scale, v_scale = self._scales_for(cache, key.dtype)
        if cache.value is None:
            self._kernels.concat_and_cache_mla(
                kv_c=key,
                k_pe=value,
                cache=self._latent(cache),
                slot_mapping=slots,
                scale=k_scale,
                checked=self._checked,
            )
            return
        key_cache, value_cache = self._pair(cache)
        is_classic = cache.arrangement is CacheArrangement.CLASSIC
        store = self._kernels.reshape_and_cache_classic if is_classic else self._kernels.reshape_and_cache
        store(
            key=key,
            value=value,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=slots,
            k_scale=k_scale,
            v_scale=v_scale,
            checked=self._checked,
        )

    def read(
        self,
        cache: LayerCache,
        table: torch.Tensor,
        block_size: int,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        first_positions: Sequence[int],
        dtype: torch.dtype | None,
    ) -> tuple[torch.Tensor, ...]:
        """Read keys and values, or latents, of these tokens."""
        starts = np.cumsum([0, *num_tokens]).astype(np.int32)
        tokens: _TokensToRead = {
            "block_table": table,
            "rows": on_device(np.array(rows, dtype=np.int32), self._device),
            "cu_seqlens": on_device(starts, self._device),
            "first_positions": on_device(np.array(first_positions, dtype=np.int64), self._device),
            "num_tokens": int(starts[-1]),
            "block_size": block_size,
            "dtype": self._dtype_of(cache) if dtype is None else dtype,
            "checked": self._checked,
        }
        k_scale, v_scale = self._scales_for(cache, tokens["dtype"])
        if cache.value is None:
            return (self._kernels.gather_mla_cache(cache=self._latent(cache), scale=k_scale, **tokens),)
        key_cache, value_cache = self._pair(cache)
        is_classic = cache.arrangement is CacheArrangement.CLASSIC
        gather = self._kernels.gather_cache_classic if is_classic else self._kernels.gather_cache
        return gather(key_cache=key_cache, value_cache=value_cache, k_scale=k_scale, v_scale=v_scale, **tokens)

    def attend(
        self,
        cache: LayerCache,
        table: torch.Tensor,
        block_size: int,
        inputs: BatchInputs,
        query: torch.Tensor,
        num_reqs: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        batch: TokenBatch | None,
    ) -> torch.Tensor:
        """Compute paged attention of a batch, by a package if one fits and the batch is known on the host.

        Raises:
            InputError: a cache that paged attention cannot read.
        """
        if cache.arrangement is CacheArrangement.CLASSIC or cache.value is None:
            raise InputError(
                f"layer {cache.name}: paged attention reads keys and values side by side, not a "
                f"{'latent' if cache.is_latent else cache.arrangement.value} cache"
            )
        key_cache, value_cache = self._pair(cache)
        rows, starts = inputs.rows[:num_reqs], inputs.query_start_loc[: num_reqs + 1]
        seq_lens = inputs.seq_lens[:num_reqs]
        if batch is not None:
            tables = (table, block_size, rows, starts, seq_lens)
            call = AttentionCall(batch, query, key_cache, value_cache, *tables, scale, window, softcap)
            package = self.attention.choose(cache.name, call)
            if package is not None:
                return package.attend(call)
        k_scale, v_scale = self._scales_for(cache, query.dtype)
        return self._kernels.paged_attention(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=table,
            rows=rows,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=scale,
            block_size=block_size,
            window=window,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
            checked=self._checked,
        )

    def one_of_each(self, caches: Iterable[LayerCache]) -> list[LayerCache]:
        """Return one layer of each kind that kernels are compiled for."""
        kinds: dict[tuple[object, ...], LayerCache] = {}
        for cache in caches:
            if isinstance(cache.spec, AttentionSpec | MLASpec):
                kinds.setdefault((cache.group, cache.arrangement, cache.spec, cache.view.stride()), cache)
        return list(kinds.values())

    def warm_up(self, cache: LayerCache, table: torch.Tensor, block_size: int, slots: torch.Tensor) -> None:
        """Store tokens without a slot and read one token of the null block."""
        dtype = self._dtype_of(cache)
        for num_tokens in WARM_UP_TOKENS:
            if num_tokens > slots.shape[1]:
                continue
            if cache.value is None:
                size = self._latent(cache).shape[2]  # in two parts: the model's own split is not in the plan
                halves = (size - size // 2, size // 2)
                parts = [torch.zeros((num_tokens, half), dtype=dtype, device=self._device) for half in halves]
            else:
                assert isinstance(cache.spec, AttentionSpec)
                heads, sizes = cache.spec.num_kv_heads, (cache.spec.head_size, cache.spec.head_size_v)
                parts = [torch.zeros((num_tokens, heads, size), dtype=dtype, device=self._device) for size in sizes]
            self.write(cache, parts[0], parts[1], slots[cache.group, :num_tokens])
        self.read(cache, table, block_size, [0], [1], [0], None)

    # -- a layer's properties ------------------------------------------------------------------------------------------

    def _dtype_of(self, cache: LayerCache) -> torch.dtype:
        """The dtype that the model computes in this layer."""
        assert cache.key is not None
        if cache.key.dtype in QUANTIZED:
            assert self._model_dtype is not None
            return self._model_dtype
        return cache.key.dtype

    def _scales_for(self, cache: LayerCache, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The layer's scales if values are converted between this dtype and the cache's."""
        if cache.key is None or dtype == cache.key.dtype:
            return None, None
        return self._scales.get(cache.name, (None, None))

    def _pair(self, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        if cache.key is None or cache.value is None:
            raise InputError(f"layer {cache.name} is a {cache.spec.kind} cache; it has no keys and values")
        return cache.key, cache.value

    def _latent(self, cache: LayerCache) -> torch.Tensor:
        if cache.key is None or not isinstance(cache.spec, MLASpec):
            raise InputError(
                f"layer {cache.name} is a {cache.spec.kind} cache, which the model writes itself through its view"
            )
        return cache.key
