"""A deployment: a model, the devices and the engine's options, and the memory that each pipeline stage needs.

There are no silent defaults: a value that is not given is derived from the model, or it is an error.
"""

import itertools
from collections.abc import Mapping

import attrs

from ..errors import InputError, non_negative, positive
from ..memory.budget import BudgetSemantics
from ..memory.ledger import LedgerRow, RowRole, given_row
from ..models.drafts import Drafts
from ..models.geometry import ModelGeometry, cache_notes, served_cache_dtype
from ..models.layer_cache import CompressedCache, LayerCaches, state_aligned_block_size
from ..models.weights import QuantizationScheme, scheme_from_config
from ..planner.layout import KVCacheLayout
from ..planner.parallel import layers_per_stage, tensor_parallel_layers
from ..planner.specs import KVCacheSpec, StateCacheMode
from .estimates import EstimateConstants, activation_row, encoder_row, graph_row, non_torch_row, weights_row

STATE_BLOCK_ALIGNMENT = 16  # tokens; attention kernels address blocks in multiples of it
DEFAULT_BLOCK_SIZE = 16
PACKED_BLOCK_SIZE = 256  # DeepSeek V4, whose windows have smaller blocks of their own


@attrs.frozen(kw_only=True)
class GivenMemory:
    """Rows that the user knows, in bytes per GPU; None: estimated (or measured, if there is a profile)."""

    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    workspace_bytes: int | None = None
    encoder_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None


@attrs.frozen(kw_only=True)
class Deployment:
    """One engine; each data-parallel rank is a separate engine.

    Attributes:
        geometry: the model.
        total_bytes: memory of each device.
        free_bytes: free memory of each device before the engine starts.
        utilization: vLLM's `gpu_memory_utilization`.
        semantics: the amount that utilization is a fraction of.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size, decode_context_parallel_size: ranks.
        max_model_len: longest request; None: the model's own limit; -1: the longest that fits.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        max_concurrent_batches: steps in flight (pipeline stages, or 2 with asynchronous scheduling).
        kv_cache_dtype: dtype of the cache; `auto` is the model's.
        cuda_capability: ten times the compute capability of the devices (90: Hopper), which decides the layout of an
            8-bit cache of sparse latents; 0: no CUDA; None: not known.
        dtype: dtype of unquantised weights and activations; None: the model's.
        quantization: quantisation of the weights; None: as in the config.
        ignore_config_quantization: whether to count the weights unquantised whatever the config says.
        block_size: tokens per block; None: 16, or more if the model's caches need it.
        drafts: how drafts are made and what that stores; None: no drafts.
        state_cache_mode: when state layers take snapshots; None: vLLM's rule, or no such layers.
        layout: physical order of the cache's axes.
        disable_hybrid_kv_cache_manager: size windowed layers like full ones; None: as vLLM does for the architecture.
        enable_prefix_caching: decides at which granularity prefixes are hashed.
        enforce_eager: capture no CUDA graphs.
        reserve_graph_memory: set graph memory aside when the pool is sized.
        kv_cache_memory_bytes: pinned size of the pool per GPU.
        num_gpu_blocks_override: number of blocks in the pool.
        max_total_tokens: most tokens that the pool holds.
        externally_held_bytes: weights that another process holds for the engine on each device.
        frontend_reservation_bytes: bytes taken off the pool for multimodal inputs.
        given: rows that the user knows.
        measured: rows of a profile or of a start-up log, instead of estimates.
        strict_startup: require that utilization * total is free even under an override.
        validate: check pinned bytes against free memory.
        constants: constants of the estimates.
    """

    geometry: ModelGeometry
    total_bytes: int = attrs.field(validator=positive)
    free_bytes: int = attrs.field(validator=non_negative)
    utilization: float
    semantics: BudgetSemantics = BudgetSemantics.OF_TOTAL
    tensor_parallel_size: int = attrs.field(default=1, validator=positive)
    pipeline_parallel_size: int = attrs.field(default=1, validator=positive)
    data_parallel_size: int = attrs.field(default=1, validator=positive)
    decode_context_parallel_size: int = attrs.field(default=1, validator=positive)
    max_model_len: int | None = None
    max_num_seqs: int = attrs.field(validator=positive)
    max_num_batched_tokens: int = attrs.field(validator=positive)
    max_concurrent_batches: int = attrs.field(default=1, validator=positive)
    kv_cache_dtype: str = "auto"
    cuda_capability: int | None = None
    dtype: str | None = None
    quantization: QuantizationScheme | None = None
    ignore_config_quantization: bool = False
    block_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    drafts: Drafts | None = None
    state_cache_mode: StateCacheMode | None = None
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    disable_hybrid_kv_cache_manager: bool | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    reserve_graph_memory: bool = True
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    max_total_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    externally_held_bytes: int = attrs.field(default=0, validator=non_negative)
    frontend_reservation_bytes: int = attrs.field(default=0, validator=non_negative)
    given: GivenMemory = attrs.field(factory=GivenMemory)
    measured: tuple[LedgerRow, ...] | None = None
    strict_startup: bool = False
    validate: bool = True
    constants: EstimateConstants = attrs.field(factory=EstimateConstants)

    @property
    def num_gpus(self) -> int:
        """Number of devices of all data-parallel engines."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def auto_fits(self) -> bool:
        """Whether `max_model_len` is the longest that fits."""
        return self.max_model_len == -1

    @property
    def wanted_max_model_len(self) -> int:
        """The longest request asked for; the model's own limit if none is given or under auto-fit.

        Raises:
            InputError: not given, and the config has no limit; or below 1.
        """
        if self.max_model_len is not None and self.max_model_len != -1:
            if self.max_model_len < 1:
                raise InputError(
                    f"max_model_len is {self.max_model_len}; give at least 1, or -1 for the longest that fits"
                )
            return self.max_model_len
        limit = self.geometry.default_max_model_len
        if limit is None:
            raise InputError(f"{self.geometry.name}: the config has no longest sequence; give max_model_len")
        return limit

    @property
    def weight_dtype(self) -> str:
        """Dtype of unquantised weights and of activations.

        Raises:
            InputError: not given, and the config names none.
        """
        dtype = self.dtype or self.geometry.dtype
        if dtype is None:
            raise InputError(f"{self.geometry.name}: the config names no dtype; give a dtype")
        return dtype

    @property
    def cache_dtype(self) -> str:
        """`kv_cache_dtype` with the layout that a server takes.

        `auto` becomes what the checkpoint's quantization asks for, else `dtype` if that is given.
        """
        dtype = served_cache_dtype(self.geometry, self.kv_cache_dtype, self.cuda_capability)
        return self.dtype if dtype == "auto" and self.dtype is not None else dtype

    @property
    def cache_notes(self) -> tuple[str, ...]:
        """Sentences about the layout of the cache, for the reader of a plan."""
        return cache_notes(self.geometry, self.kv_cache_dtype, self.cache_dtype)

    @property
    def hybrid_manager_is_off(self) -> bool:
        """Whether windowed layers are sized like full ones."""
        if self.disable_hybrid_kv_cache_manager is not None:
            return self.disable_hybrid_kv_cache_manager
        return not self.geometry.reader.hybrid_manager

    @property
    def scheme(self) -> QuantizationScheme | None:
        """Quantisation of the weights: the given one, else the checkpoint's own."""
        if self.quantization is not None or self.ignore_config_quantization:
            return self.quantization
        if self.geometry.quantization_config is None:
            return None
        return scheme_from_config(self.geometry.quantization_config, self.geometry.name)

    @property
    def layers(self) -> LayerCaches:
        """What every layer stores, a drafter's layers behind the model's own."""
        return self.geometry.layers if self.drafts is None else self.drafts.layers_with(self.geometry)

    def resolved_block_size(self) -> tuple[int, str]:
        """Tokens per block, and the reason.

        A model with states needs an attention page as large as a state; compressed states need whole states in a block.
        """
        storage = self.geometry.cache_format(self.cache_dtype)
        wanted = self.block_size or DEFAULT_BLOCK_SIZE
        aligned = state_aligned_block_size(self.layers, storage, STATE_BLOCK_ALIGNMENT, self.tensor_parallel_size)
        if aligned is not None and aligned > wanted:
            return aligned, f"a state is one page, so a block of {aligned} tokens is the smallest that holds one"
        if self.block_size is None and self.geometry.has_records:
            return PACKED_BLOCK_SIZE, "the server's blocks of compressed states"
        caches = [cache for layer in self.layers for cache in layer]
        per_state = max((cache.tokens_per_state for cache in caches if isinstance(cache, CompressedCache)), default=1)
        if self.block_size is None and wanted % per_state:
            return per_state, f"one state covers up to {per_state} tokens"
        return wanted, "as given" if self.block_size is not None else "the engine's default"

    def layer_specs(self) -> Mapping[str, KVCacheSpec]:
        """The part of each layer's cache that one rank stores, by name.

        Raises:
            InputError: KV heads or states that the ranks can neither split nor replicate evenly.
        """
        block_size, _ = self.resolved_block_size()
        specs = self.geometry.layer_specs(block_size, self.cache_dtype, self.layers)
        return tensor_parallel_layers(specs, self.tensor_parallel_size)

    def stage_layers(self) -> tuple[range, ...]:
        """Layers of each pipeline stage."""
        sizes = layers_per_stage(self.geometry.num_hidden_layers, self.pipeline_parallel_size)
        ends = [0, *itertools.accumulate(sizes)]
        return tuple(range(start, stop) for start, stop in itertools.pairwise(ends))

    def non_kv_rows(self, layers: range) -> tuple[LedgerRow, ...]:
        """Everything but the pool on one GPU of the stage of `layers`: measured, given, or estimated.

        Raises:
            InputError: the weights are not given and cannot be counted.
        """
        if self.measured is not None:
            return self.measured
        given, constants, resident = self.given, self.constants, RowRole.RESIDENT
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        rows = [
            _given(given.weights_bytes, "weights", resident) or self._weights_row(layers),
            self._draft_weights_row(layers),
            _given(given.non_torch_bytes, "non-torch", resident) or non_torch_row(ranks, constants),
            _given(given.workspace_bytes, "sampler and workspace", resident),
        ]
        if not layers.start:  # encoders run on the first stage
            encoder = encoder_row(self.geometry.left_out, constants)
            rows.append(_given(given.encoder_bytes, "encoder", resident) or encoder)
        activation = _given(given.activation_bytes, "peak activation", RowRole.TRANSIENT)
        rows.append(activation or self._activation_row(layers))
        if self.reserve_graph_memory:
            rows.append(self._graph_row(layers))
        return tuple(row for row in rows if row is not None)

    def unreserved_graph_row(self, layers: range) -> LedgerRow | None:
        """Graph memory that is not set aside and comes out of the memory beyond the budget; None if it is set aside."""
        return None if self.reserve_graph_memory or self.measured is not None else self._graph_row(layers)

    def _graph_row(self, layers: range) -> LedgerRow | None:
        given = _given(self.given.graph_bytes, "CUDA graphs", RowRole.GRAPHS)
        if given is not None or self.enforce_eager:
            return given
        return graph_row(len(layers), self.max_num_seqs, self.constants)

    def _weights_row(self, layers: range) -> LedgerRow:
        return weights_row(
            self.geometry.weights.on_stage(layers.start, len(layers)),
            dtype=self.weight_dtype,
            scheme=self.scheme,
            tensor_parallel_size=self.tensor_parallel_size,
            constants=self.constants,
        )

    def _draft_weights_row(self, layers: range) -> LedgerRow | None:
        """Weights of the drafter, which is on the last stage; given weights count them already."""
        is_last = layers.stop == self.geometry.num_hidden_layers
        if self.drafts is None or not is_last or self.given.weights_bytes is not None:
            return None
        groups = self.drafts.weights(self.geometry)
        if not groups:
            return None
        row = weights_row(
            groups,
            dtype=self.weight_dtype,
            scheme=self.scheme,
            tensor_parallel_size=self.tensor_parallel_size,
            constants=self.constants,
        )
        return attrs.evolve(row, name="draft weights")

    def _activation_row(self, layers: range) -> LedgerRow:
        return activation_row(
            self.geometry,
            layers,
            dtype=self.weight_dtype,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            tensor_parallel_size=self.tensor_parallel_size,
            constants=self.constants,
        )


def _given(num_bytes: int | None, name: str, role: RowRole) -> LedgerRow | None:
    return None if num_bytes is None else given_row(name, num_bytes, role)
