"""Keeps real memory: follows the allocator's events in device tensors and tells kernels where each token belongs.

    backend = CudaBackend(device="cuda", max_num_batched_tokens=8192)
    backend.initialize(plan)                                # the raw buffer, and a typed view of it for every layer
    allocator = KVCacheAllocator(config, sinks=[backend])   # block tables follow its commits from here on
    backend.submit(step)                                    # tables and slots on the device; the model runs
    backend.write_kv("layers.0", key, value)                # what each layer of the model calls
    result = backend.collect()

With device="cpu" the same runs in host memory, by plain torch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError, MisuseError
from ...core.events import Commit, PoolCreated
from ...core.planner.layout import KVCacheConfig
from ...core.types import ScheduledStep, StepResult, TokenBatch
from ...kernels.kernel_set import Kernels
from ..context_rank import ContextRank
from .attention_packages import AttentionPackage, FlashInferTables, flashinfer_tables
from .layer_access import KVScales, LayerAccess
from .layout import CacheArrangement, LayerCache, bind_layers, layer_caches
from .staging import BatchInputs
from .step_runner import FinishStep, StepOutputs, StepRunner, StepTimer
from .tables import DeviceTables, check_pool
from .torch_device import default_kernels, torch_device


class CudaBackend:
    """Keeps the KV cache of one rank in a device's memory, on a GPU or on the CPU.

    It shares no state and no code with the allocator or with `SimBackend`: it knows only what the commits say. No part
    of a step waits for the device, and every buffer that a step reads on the device keeps its address, so a decode step
    can be captured in a CUDA graph (`map_slots`, `write_kv` and the model between them) and replayed after each
    `prepare`. All work goes to the current stream.

    Attributes:
        device: where the memory is.
        kernels: the kernels that write and read it.
        context: which rank of decode context parallelism this is.
        runner: the model that `submit` launches; may be set later.
    """

    def __init__(
        self,
        *,
        device: str | torch.device,
        max_num_batched_tokens: int,
        kernels: Kernels | None = None,
        arrangement: CacheArrangement = CacheArrangement.PACKED,
        kernel_block_sizes: Sequence[int | None] | None = None,
        model_dtype: torch.dtype | None = None,
        kv_scales: Mapping[str, KVScales] | None = None,
        context: ContextRank | None = None,
        runner: StepRunner | None = None,
        checked: bool = False,
        attention_packages: Sequence[AttentionPackage] = (),
    ) -> None:
        """Choose the device and how it is used; nothing is allocated before `initialize`.

        Args:
            device: "cpu", "cuda" or "cuda:1".
            max_num_batched_tokens: tokens of the largest step, padding included.
            kernels: by default `TritonKernels` on a GPU and `TorchKernels` on a CPU.
            arrangement: how attention layers arrange keys and values in memory.
            kernel_block_sizes: for each group, tokens of a block as its attention kernel sees it; None: as the block
                table does.
            model_dtype: dtype of the keys and values that the model computes; needed where the cache is quantised.
            kv_scales: layer -> its scales, for quantised caches; a layer without them uses 1.0, with a warning.
            context: which rank of decode context parallelism this is.
            runner: the model.
            checked: verify slots, rows and block ids on the device before each use; waits for it, so not for serving.
            attention_packages: packages whose kernels `attend` prefers where they fit (`installed_packages()`); by
                default it uses its own kernel.

        Raises:
            InputError: the device does not exist, or the token budget is not positive.
        """
        if max_num_batched_tokens < 1:
            raise InputError(f"max_num_batched_tokens is {max_num_batched_tokens}; a step has at least 1 token")
        self.device = torch_device(device)
        self.kernels = default_kernels(self.device) if kernels is None else kernels
        self.context = ContextRank() if context is None else context
        self.runner = runner
        self._max_num_batched_tokens = max_num_batched_tokens
        self._arrangement = arrangement
        self._kernel_block_sizes = kernel_block_sizes
        scales = dict(kv_scales or {})
        self._access = LayerAccess(self.kernels, self.device, model_dtype, scales, checked, attention_packages)
        self._checked = checked
        self._config: KVCacheConfig | None = None
        self._raw: torch.Tensor | None = None
        self._caches: list[LayerCache] = []
        self._layers: dict[str, LayerCache] = {}
        self._known_tables: DeviceTables | None = None
        self._is_pool_created = False
        self._next_sequence = 0
        self._prepared_batch: TokenBatch | None = None
        self._mapped_batch: TokenBatch | None = None
        self._in_flight: tuple[FinishStep, StepTimer] | None = None

    # -- memory ------------------------------------------------------------------------------------------------------

    def initialize(self, config: KVCacheConfig) -> None:
        """Allocate the rank's one buffer, zeroed, and view it as the cache of every layer.

        Where `needs_zeroing` says so (states, groups of different precision), blocks are cleared when they are taken.

        Raises:
            InputError: the arrangement does not fit the plan's layout or specs, or a kernel block size does not divide.
                The backend has no memory then, as before.
            MisuseError: it was initialized before.
        """
        if self._config is not None:
            raise MisuseError("this backend has its memory already; make another one for another plan")
        raw = torch.zeros(config.size_bytes, dtype=torch.int8, device=self.device)
        caches = layer_caches(raw, config, self._arrangement, self._kernel_block_sizes)
        self._access.add(caches)
        self._raw, self._caches, self._config = raw, caches, config
        self._layers = {cache.name: cache for cache in caches}

    @property
    def raw(self) -> torch.Tensor:
        """The buffer: int8 `[size_bytes]`.

        Raises:
            MisuseError: it is not allocated yet.
        """
        if self._raw is None:
            raise MisuseError("the backend has no memory yet; call initialize first")
        return self._raw

    @property
    def layers(self) -> Mapping[str, LayerCache]:
        """Layer name -> its cache."""
        return self._layers

    def bind(
        self, layer_names: Sequence[str], shared_layers: dict[str, str] | None = None
    ) -> tuple[list[LayerCache], dict[str, LayerCache]]:
        """Return the caches in the order of the model's layers, and by name; see `bind_layers`.

        From here on, layers that share another one's cache can be written and read under their own names.
        """
        in_order, self._layers = bind_layers(self._caches, layer_names, shared_layers)
        return in_order, self._layers

    def _layer(self, name: str) -> LayerCache:
        cache = self._layers.get(name)
        if cache is None:
            raise InputError(f"no layer {name!r} on this rank; it has {', '.join(self._layers) or 'none'}")
        return cache

    # -- following the events ----------------------------------------------------------------------------------------

    def apply(self, commit: Commit) -> None:
        """Follow one commit on the host; the device is brought up to date before the next step.

        Raises:
            MisuseError: a commit is missing or comes twice, or there is no memory yet.
            InputError: the pool is not the one that was planned.
        """
        if commit.sequence != self._next_sequence:
            raise MisuseError(
                f"commit {commit.sequence} came where {self._next_sequence} is next; commits come in order"
            )
        is_first = self._known_tables is None
        for event in commit.events:
            if not isinstance(event, PoolCreated):
                self._tables.apply(event)
                continue
            if self._is_pool_created:
                raise MisuseError("a second pool was created; a backend serves one")
            self._make_tables(event)
            self._is_pool_created = True
        self._next_sequence += 1
        if is_first:
            self._warm_up_on_gpu()

    def create_tables(self, pool: AllocatorConfig) -> None:
        """Make the tables, slots and batch buffers that the pool of this allocator will use, before it is created.

        A step can be captured over them from here on. Without this call the pool's creation makes them.

        Args:
            pool: the configuration that the allocator will be made with.

        Raises:
            MisuseError: there is no memory yet, or there are tables already.
            InputError: the pool is not the one that was planned.
        """
        if self._known_tables is not None:
            raise MisuseError("this backend has its tables already; a backend serves one pool")
        self._make_tables(pool)
        self._warm_up_on_gpu()

    def _make_tables(self, pool: PoolCreated | AllocatorConfig) -> None:
        config, tables = self._config, self._known_tables
        if config is None:
            raise MisuseError("the backend has no memory for a pool yet; call initialize first")
        check_pool(pool, config, self.context)
        if tables is not None:
            tables.check_serves(pool)
            return
        self._known_tables = DeviceTables(
            pool,
            config,
            self._caches,
            device=self.device,
            context=self.context,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )

    @property
    def _tables(self) -> DeviceTables:
        if self._known_tables is None:
            raise MisuseError("no pool yet: give the backend to the allocator as a sink")
        return self._known_tables

    # -- slots -------------------------------------------------------------------------------------------------------

    @property
    def block_tables(self) -> list[torch.Tensor]:
        """int32 `[max_num_reqs, width]` per group, on the device: as of the last `prepare`."""
        return self._tables.tables

    @property
    def num_blocks_per_row(self) -> list[NDArray[np.int32]]:
        """int32 `[max_num_reqs]` per group, on the host: as of the last commit."""
        return self._tables.num_blocks_per_row

    @property
    def inputs(self) -> BatchInputs:
        """The last prepared batch on the device, padded to `max_num_reqs`."""
        return self._tables.staging.inputs

    @property
    def num_transfers(self) -> int:
        """Transfers of tables and batches to the device so far: one a step."""
        return self._tables.staging.num_transfers

    @property
    def num_transfer_bytes(self) -> int:
        """Bytes of these transfers together."""
        return self._tables.staging.num_bytes

    def prepare(self, batch: TokenBatch) -> None:
        """Send the changed table entries and the batch to the device in one transfer, and start the block copies.

        Do not capture it in a graph: what it sends differs from step to step.

        Raises:
            InputError: the batch has more tokens or requests than there are buffers for.
        """
        tables = self._tables
        if batch.num_tokens > self._max_num_batched_tokens or len(batch.rows) > tables.max_num_reqs:
            raise InputError(
                f"a batch of {batch.num_tokens} tokens of {len(batch.rows)} requests; the buffers hold "
                f"max_num_batched_tokens {self._max_num_batched_tokens} and max_num_reqs {tables.max_num_reqs}"
            )
        tables.upload(batch, self.kernels)
        self._prepared_batch, self._mapped_batch = batch, None

    def map_slots(self, num_reqs: int | None = None) -> None:
        """Compute the slots of the prepared batch for all groups in one launch; -1 behind the last token.

        A graph captures this for `num_reqs` requests (by default all rows) and replays it for any batch of no more.
        """
        tables, inputs = self._tables, self.inputs
        end = len(inputs.rows) if num_reqs is None else num_reqs
        self.kernels.compute_slot_mapping(
            tables=tables.slot_tables,
            rows=inputs.rows[:end],
            query_start_loc=inputs.query_start_loc[: end + 1],
            first_positions=inputs.first_positions[:end],
            slot_mapping=tables.slots,
            checked=self._checked,
        )

    @property
    def slots(self) -> torch.Tensor:
        """The slots computed last: int64 `[num_groups, max_num_batched_tokens]` on the device, at a fixed address."""
        return self._tables.slots

    def slot_mapping(self, batch: TokenBatch, group: int = 0, num_padded_tokens: int = 0) -> torch.Tensor:
        """The slot of every token, on the device.

        Args:
            batch: the tokens; every position must have been placed by an event before.
            group: which group's tables.
            num_padded_tokens: length of the result if longer than the batch; the tail is -1 (no slot).

        Returns:
            int64 `[max(num_tokens, num_padded_tokens)]`, a view of `slots`: the next batch overwrites it.

        Raises:
            InputError: a batch longer than its padding, or longer than the buffers.
        """
        num_tokens = batch.num_tokens
        if num_tokens > num_padded_tokens > 0:
            raise InputError(f"a batch of {num_tokens} tokens cannot be padded to {num_padded_tokens}")
        if num_padded_tokens > self._max_num_batched_tokens:
            raise InputError(
                f"{num_padded_tokens} padded tokens; the buffers hold max_num_batched_tokens "
                f"{self._max_num_batched_tokens}"
            )
        if batch is not self._mapped_batch or self._tables.has_changes:
            self._map(batch)
        return self.slots[group, : max(num_tokens, num_padded_tokens)]

    def _map(self, batch: TokenBatch) -> None:
        self.prepare(batch)
        self.map_slots(len(batch.rows))
        self._mapped_batch = batch

    def flashinfer_tables(self, batch: TokenBatch, group: int = 0) -> FlashInferTables:
        """A prepared batch's block tables as FlashInfer takes them, in pages of the group's kernel block size.

        Raises:
            InputError: the group has no layer on this rank.
        """
        cache = next((cache for cache in self._caches if cache.group == group), None)
        if cache is None:
            raise InputError(f"group {group} has no layer on this rank, so nothing reads its tables here")
        context = self.context if self._tables.holds_tokens[group] else ContextRank()
        rows = self.inputs.rows[: len(batch.rows)]
        return flashinfer_tables(
            self.block_tables[group], rows, batch, cache.kernel_block_size, cache.num_blocks_per_kv_block, context
        )

    # -- keys and values ---------------------------------------------------------------------------------------------

    def write_kv(self, layer: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store a layer's keys and values for the batch whose slots were computed last.

        Args:
            layer: its name.
            key: `[num_tokens, num_kv_heads, head_size]`; padding may follow the batch's tokens. For a latent cache
                the compressed latent, `[num_tokens, kv_lora_rank]`.
            value: the same of the values; for a latent cache the rotary key, `[num_tokens, qk_rope_head_dim]`.

        Raises:
            InputError: no such layer, or one that has neither keys and values nor a latent.
            KernelInputError: shapes, strides or dtypes that do not fit the layer's cache.
        """
        cache = self._layer(layer)
        self._access.write(cache, key, value, self.slots[cache.group, : len(key)])

    def gather(
        self,
        layer: str,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        first_positions: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Read keys and values back through the block tables, request after request.

        Args:
            layer: its name.
            rows: rows of the block tables.
            num_tokens: tokens to read from each row.
            first_positions: where each row starts to be read; 0 by default.
            dtype: dtype that a quantised cache is read as; the model's dtype by default.

        Returns:
            Keys and values, each dense `[sum(num_tokens), num_kv_heads, head_size]`; for a latent cache one tensor
            `[sum(num_tokens), kv_lora_rank + qk_rope_head_dim]`.

        Raises:
            InputError: no such layer, or one that has neither keys and values nor a latent.
            MisuseError: this rank of decode context parallelism holds only some of the tokens.
        """
        cache, tables = self._layer(layer), self._tables
        if self.context.size > 1 and tables.holds_tokens[cache.group]:
            raise MisuseError(
                "a rank of decode context parallelism holds only some tokens of a request; it gathers none"
            )
        if tables.has_changes:
            tables.upload(None, self.kernels)
        firsts = [0] * len(rows) if first_positions is None else first_positions
        size = tables.block_sizes[cache.group]
        return self._access.read(cache, tables.tables[cache.group], size, rows, num_tokens, firsts, dtype)

    def attend(
        self,
        layer: str,
        query: torch.Tensor,
        *,
        scale: float,
        num_reqs: int,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of the prepared batch's tokens over the cache, their own keys (just written) included.

        Args:
            layer: its name.
            query: `[num_tokens, num_q_heads, head_size]` of the batch, padding allowed behind it.
            scale: of the scores.
            num_reqs: requests of the batch, or of the graph that is captured.
            window: tokens that a query sees, itself among them; None: all.
            softcap: scores become softcap * tanh(score / softcap).

        Returns:
            `[num_tokens, num_q_heads, head_size_v]`.

        Raises:
            InputError: no such layer, or a cache that paged attention cannot read.
            MisuseError: this rank of decode context parallelism holds only some of the tokens.
        """
        cache, tables = self._layer(layer), self._tables
        if self.context.size > 1:
            raise MisuseError(
                "attention over a part of the tokens must be merged over the ranks; use a kernel that does"
            )
        size, table, batch = tables.block_sizes[cache.group], tables.tables[cache.group], self._prepared_batch
        return self._access.attend(cache, table, size, self.inputs, query, num_reqs, scale, window, softcap, batch)

    @property
    def attention_choices(self) -> Mapping[str, str]:
        """Layer -> what computed its attention last: a package's name, or "own kernel" and why no package did."""
        return self._access.attention.by_layer

    def _warm_up_on_gpu(self) -> None:
        if self.device.type == "cuda":  # on a CPU nothing is compiled
            self.warm_up()

    def warm_up(self) -> None:
        """Run every kernel once in each size class that it is compiled for; nothing that requests see changes.

        On a GPU it is called once the pool exists, before the first request.
        """
        tables = self._tables
        nothing = np.zeros(0, dtype=np.int64)
        tables.upload(TokenBatch(nothing, nothing, nothing), self.kernels)
        for num_reqs in sorted({1, min(16, len(self.inputs.rows)), len(self.inputs.rows)}):
            self.map_slots(num_reqs)
        skipped = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        for regions in tables.regions:
            if regions is not None:
                self.kernels.copy_blocks(caches=regions, sources=skipped, targets=skipped)
        for cache in self._access.one_of_each(self._caches):
            self._access.warm_up(cache, tables.tables[cache.group], tables.block_sizes[cache.group], tables.slots)

    # -- steps -------------------------------------------------------------------------------------------------------

    def repeats_before(self, step: ScheduledStep, limit: int, horizon_ns: float) -> int:
        """Return 0: a device computes one step at a time, so no macro-step is made of several; see `Backend`."""
        return 0

    def submit(self, step: ScheduledStep) -> None:
        """Put the step's tables and slots on the device and launch the model; never waits for the device.

        Raises:
            InputError: a macro-step, or a batch that is larger than the buffers.
            MisuseError: a step is in flight already.
        """
        if step.num_steps != 1:
            raise InputError(f"a macro-step of {step.num_steps} steps; a live engine computes one step at a time")
        if self._in_flight is not None:
            raise MisuseError("a step is in flight; collect it before submitting the next")
        timer = StepTimer(self.device)
        timer.start()
        self._map(step.batch)
        finish = StepOutputs if self.runner is None else self.runner.launch(step)
        timer.stop()
        self._in_flight = (finish, timer)

    def collect(self) -> StepResult:
        """Wait for the submitted step; return what the model produced and how long the device took.

        Raises:
            MisuseError: no step was submitted.
        """
        if self._in_flight is None:
            raise MisuseError("collect without a submitted step")
        (finish, timer), self._in_flight = self._in_flight, None
        produced = finish()
        return StepResult((timer.nanoseconds(),), produced.outputs, produced.num_accepted_tokens, produced.stopped)
