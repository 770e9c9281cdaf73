"""A transformers `Cache` that stores keys and values in the pool.

    with LedgerCache(model, backend, allocator) as cache:
        model.generate(input_ids, past_key_values=cache)    # `cache=cache` from transformers 5.24 on

Every sequence of the batch is one request of the allocator: growing appends, cropping truncates, beams fork and copy
on write. The model keeps its own attention and reads gathered keys and values; to read the pool without a gather, use
`register_paged_attention` and `ModelRunner`.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ....core.allocator.allocator import KVCacheAllocator
from ....core.errors import DoesNotFitError, InputError, MisuseError
from ....core.types import Request, TokenBatch
from ...cuda.backend import CudaBackend
from .served_model import ServedLayer, served_layers, transformers_geometry


class LedgerCache(Cache):
    """Keys and values of one batch of sequences of equal length (padding included), kept in a backend's pool.

    Behaves like `DynamicCache` for the same model: attention gets the same values, shape and strides. Blocks are not
    shared with other requests (padding makes positions specific to the batch). `reset`, or the end of a `with` block,
    frees them.
    """

    layers: "list[LedgerLayer]"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, model: Any, backend: CudaBackend, allocator: KVCacheAllocator, name: str = "generate") -> None:
        """Make an empty cache.

        Args:
            model: the transformers model that will use it.
            backend: initialized with the model's plan (`kv_cache_config`), and a sink of the allocator.
            allocator: decides where tokens are stored.
            name: prefix of the ids of the cache's requests; distinct among the caches of an allocator.

        Raises:
            InputError: the model cannot be served from a pool, or its layers are not in the plan.
        """
        served = served_layers(transformers_geometry(model))
        missing = [layer.name for layer in served if layer.name not in backend.layers]
        if missing:
            raise InputError(
                f"the backend has no cache for {', '.join(missing)}; initialize it with kv_cache_config of this model"
            )
        super().__init__(layers=[LedgerLayer(self, layer) for layer in served])
        self.backend = backend
        self.allocator = allocator
        self.num_tokens = 0
        self._name = name
        self._ordinals = itertools.count()
        self._requests: list[Request] = []
        self._batch: TokenBatch | None = None
        self._records_past = False

    def __enter__(self) -> "LedgerCache":
        """Return the cache itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free all blocks."""
        self.reset()

    @property
    def rows(self) -> list[int]:
        """The row of each sequence in the block tables, in batch order."""
        return [self.allocator.row_of(request.request_id) for request in self._requests]

    # -- in a forward pass -------------------------------------------------------------------------------------------

    def grow(self, num_sequences: int, num_new_tokens: int) -> None:
        """Allocate slots for the next tokens of every sequence; the first layer of a forward pass calls it.

        Raises:
            DoesNotFitError: too few free blocks or rows, or a sequence longer than `max_model_len`; the cache is
                unchanged.
            InputError: another batch size than before, or more tokens than the backend takes in one step.
        """
        self._check_growth(num_sequences, num_new_tokens)
        if self._requests:
            rows = np.array(self.rows, dtype=np.int64)
            if not self._records_past:
                self.allocator.release_out_of_window_among(rows)
            if not self.allocator.append(rows, num_new_tokens):
                raise self._no_blocks(num_sequences, num_new_tokens)
        else:
            self._allocate(num_sequences, num_new_tokens)
        first_positions = np.full(num_sequences, self.num_tokens, dtype=np.int64)
        counts = np.full(num_sequences, num_new_tokens, dtype=np.int64)
        self._batch = TokenBatch(np.array(self.rows, dtype=np.int64), first_positions, counts)
        self.num_tokens += num_new_tokens

    def _check_growth(self, num_sequences: int, num_new_tokens: int) -> None:
        if self._requests and num_sequences != len(self._requests):
            raise InputError(
                f"a batch of {num_sequences} sequences for a cache of {len(self._requests)}; reset the cache for a new "
                "batch"
            )
        num_tokens, limit = self.num_tokens + num_new_tokens, self.allocator.config.max_model_len
        if num_tokens > limit:
            raise DoesNotFitError(
                f"{num_tokens:,} tokens a sequence, padding included; the allocator's max_model_len is {limit:,}"
            )
        budget = self.backend.slots.shape[1]
        if num_sequences * num_new_tokens > budget:
            raise InputError(
                f"{num_sequences} sequences x {num_new_tokens:,} tokens in one step; the backend's "
                f"max_num_batched_tokens is {budget:,}: raise it, or prefill in chunks (prefill_chunk_size "
                f"{budget // num_sequences:,})"
            )

    def _allocate(self, num_sequences: int, num_new_tokens: int) -> None:
        num_free_rows = len(self.allocator.state.free_rows)
        if num_sequences > num_free_rows:
            raise DoesNotFitError(f"a batch of {num_sequences} sequences; {num_free_rows} rows (max_num_reqs) are free")
        requests = [self._new_request(num_new_tokens) for _ in range(num_sequences)]
        for place, request in enumerate(requests):
            try:
                is_held = self.allocator.allocate(request, num_new_tokens) is not None
            except DoesNotFitError:
                self._free(requests[:place])
                raise
            if not is_held:
                self._free(requests[:place])
                raise self._no_blocks(num_sequences, num_new_tokens)
        self._requests = requests

    def _no_blocks(self, num_sequences: int, num_new_tokens: int) -> DoesNotFitError:
        return DoesNotFitError(
            f"{num_sequences} sequences of {self.num_tokens:,} tokens need blocks for {num_new_tokens:,} more each; "
            f"{self.allocator.num_free_blocks:,} of {self.allocator.config.num_blocks - 1:,} blocks are free: end "
            "other requests, or give the pool more blocks"
        )

    def store(self, layer: ServedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write `[num_sequences, num_kv_heads, num_new_tokens, head_size]` of one layer to the slots of this step."""
        if self._batch is None:
            raise MisuseError(f"layer {layer.name} stores tokens that have no slots; call grow first")
        self.backend.slot_mapping(self._batch)
        rows = [states.transpose(1, 2).flatten(0, 1) for states in (key, value)]
        self.backend.write_kv(layer.name, rows[0], rows[1])

    def read(self, layer: ServedLayer, first: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Read positions `first` to `stop - 1` of keys and values, `[num_sequences, num_kv_heads, length, size]`."""
        rows = self.rows
        keys, values = self.backend.gather(
            layer.name, rows, [stop - first] * len(rows), [first] * len(rows), dtype=dtype
        )
        return _as_batch(keys, len(rows)), _as_batch(values, len(rows))

    # -- between forward passes --------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence (rejected drafts).

        Raises:
            InputError: a positive number, or more tokens than there are.
            MisuseError: blocks of a window that would be needed again have been freed; call `activate_past_recording`
                before the forward pass.
        """
        tokens_to_remove = int(tokens_to_remove)  # before transformers 5.24 a tensor, which += would change in place
        num_kept = self.num_tokens + tokens_to_remove
        if tokens_to_remove > 0 or num_kept < 0:
            raise InputError(
                f"crop({tokens_to_remove}) of {self.num_tokens} tokens; give minus the number of tokens to remove, "
                f"-{self.num_tokens} to 0"
            )
        for request in self._requests:
            self.allocator.truncate(request.request_id, num_kept)
            if self._records_past:
                self.allocator.release_out_of_window(request.request_id)
        self.num_tokens = num_kept
        self._batch = None
        for layer in self.layers:
            layer.num_tokens = num_kept

    def activate_past_recording(self) -> None:
        """Keep tokens that leave a window until the next `crop`, which may need them again."""
        self._records_past = True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence i continue from sequence `beam_idx[i]`, which is forked if several continue from it."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, side by side."""
        self._select([place for place in range(len(self._requests)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        self._select(torch.arange(len(self._requests))[indices.cpu()].tolist())

    def _select(self, parents: Sequence[int]) -> None:
        if not self._requests:
            return
        unwanted = [request for place, request in enumerate(self._requests) if place not in set(parents)]
        num_forks = len(parents) - len(set(parents))
        num_rows = len(self.allocator.state.free_rows) + len(unwanted)
        if num_forks > num_rows:
            raise DoesNotFitError(f"{num_forks} sequences to fork; {num_rows} rows (max_num_reqs) are free")
        self._free(unwanted)
        seen: Counter[int] = Counter()
        selected: list[Request] = []
        for place in parents:
            parent = self._requests[place]
            # The first child keeps the parent's row, so that a batch needs no more rows than it has sequences.
            if seen[place]:
                child = self._new_request(parent.num_prompt_tokens)
                self.allocator.fork(parent.request_id, child)
                selected.append(child)
            else:
                selected.append(parent)
            seen[place] += 1
        self._requests = selected
        self._batch = None

    def reset(self) -> None:
        """Free every block; the cache is empty and can be used again."""
        self._free(self._requests)
        self._requests = []
        self._batch = None
        self._records_past = False
        self.num_tokens = 0
        for layer in self.layers:
            layer.reset()

    def _free(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.allocator.free(request.request_id)

    def _new_request(self, num_tokens: int) -> Request:
        return Request(f"{self._name}/{next(self._ordinals)}", num_prompt_tokens=num_tokens)


def _as_batch(tokens: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Reshape tokens `[num_sequences * length, heads, size]` for attention: dense `[num_sequences, heads, ...]`."""
    return tokens.unflatten(0, (num_sequences, -1)).transpose(1, 2).contiguous()


class LedgerLayer(CacheLayerMixin):
    """One layer of a `LedgerCache`, which transformers uses during a forward pass."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LedgerCache, layer: ServedLayer) -> None:
        # The base class would set keys and values, which are read from the pool here.
        self._cache = cache
        self._layer = layer
        self._dtype: torch.dtype | None = None
        self.num_tokens = 0
        self.is_initialized = False
        self.is_sliding = layer.window is not None

    @property
    def keys(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Cached keys `[num_sequences, num_kv_heads, num_tokens, head_size]`; in a window the last `window - 1`."""
        return self._cached(0)

    @property
    def values(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Cached values, shaped like `keys`."""
        return self._cached(1)

    def _cached(self, which: int) -> torch.Tensor | None:
        if self._dtype is None:
            return None
        return self._cache.read(self._layer, self._first_attended(self.num_tokens), self.num_tokens, self._dtype)[which]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note the dtype that the model computes in."""
        self._dtype = key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a step's keys and values; return all that its tokens attend to, from the first token's window on."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_sequences, num_new_tokens = key_states.shape[0], key_states.shape[2]
        before = self.num_tokens
        if before == self._cache.num_tokens:  # the first layer of the forward pass
            self._cache.grow(num_sequences, num_new_tokens)
        self._cache.store(self._layer, key_states, value_states)
        self.num_tokens = before + num_new_tokens
        return self._cache.read(self._layer, self._first_attended(before), self.num_tokens, key_states.dtype)

    def _first_attended(self, num_tokens: int) -> int:
        """Return the first position that the token after the first `num_tokens` attends to."""
        return 0 if self._layer.window is None else max(num_tokens - self._layer.window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `query_length` tokens attend to, and the position of the first key."""
        first = self._first_attended(self.num_tokens)
        return self.num_tokens + query_length - first, first

    def get_seq_length(self) -> int:
        """Return the tokens of a sequence so far, including those out of the window."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """Return the window, or -1 if there is none."""
        return -1 if self._layer.window is None else self._layer.window

    def reset(self) -> None:
        """Reset the length; the cache frees the blocks."""
        self.num_tokens = 0
        self.is_initialized = False
        self._dtype = None

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `MisuseError`: all layers share one block table."""
        raise self._whole_cache_only("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Raise `MisuseError`: all layers share one block table."""
        raise self._whole_cache_only("reorder_cache")

    def _whole_cache_only(self, method: str) -> MisuseError:
        return MisuseError(f"{method} of one layer: the layers share block tables; call {method} of the cache")
