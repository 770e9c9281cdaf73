"""A deployment as a planner sees it: a model, the devices, and the engine's options; and the memory each stage needs.

Nothing here has a silent default: what is not given is derived from the model, or it is an error.
"""

from collections.abc import Mapping

import attrs

from ..errors import InputError, non_negative, positive
from ..memory.budget import BudgetSemantics
from ..memory.ledger import LedgerRow, RowRole, given_row
from ..models.geometry import ModelGeometry
from ..models.layer_cache import CompressedCache, state_aligned_block_size
from ..models.weights import QuantizationScheme, scheme_from_config
from ..planner.layout import KVCacheLayout
from ..planner.parallel import layers_per_stage, tensor_parallel_layers
from ..planner.specs import KVCacheSpec, StateCacheMode
from .estimates import EstimateConstants, StepShape, activation_row, encoder_row, graph_row, non_torch_row, weights_row

STATE_BLOCK_ALIGNMENT = 16  # tokens; attention kernels address blocks in multiples of it
DEFAULT_BLOCK_SIZE = 16


@attrs.frozen(kw_only=True)
class GivenMemory:
    """Rows that the user knows, in bytes per GPU; None: estimated (or measured, where there is a profile)."""

    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    workspace_bytes: int | None = None
    encoder_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None


@attrs.frozen(kw_only=True)
class Deployment:
    """One engine (each data-parallel rank is an engine of its own).

    Attributes:
        geometry: the model.
        total_bytes: memory of each device.
        free_bytes: of each device before the engine starts.
        utilization: `--gpu-memory-utilization`.
        semantics: what the utilization is a fraction of.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size, decode_context_parallel_size: ranks.
        max_model_len: longest request; None: what the model was made for. -1: the longest that fits.
        max_num_seqs: requests of one step.
        max_num_batched_tokens: tokens of one step.
        max_concurrent_batches: steps in flight (pipeline stages, or 2 with asynchronous scheduling).
        kv_cache_dtype: dtype of the cache; `auto` is the model's.
        dtype: of unquantised weights and activations; None: the model's.
        quantization: of the weights; None: what the config says.
        ignore_config_quantization: count the weights unquantised whatever the config says.
        block_size: tokens of a block; None: 16, or more where the model's caches need it.
        state_cache_mode: snapshots of state layers; None where the model has none.
        layout: physical order of the cache's axes.
        disable_hybrid_kv_cache_manager: size windowed layers like full ones; None: as vLLM does for the architecture.
        enable_prefix_caching: decides at which granularity prefixes are hashed.
        enforce_eager: no CUDA graphs.
        reserve_graph_memory: graph memory is set aside when the pool is sized.
        kv_cache_memory_bytes: the pool's size per GPU, pinned.
        num_gpu_blocks_override: blocks of the pool.
        max_total_tokens: the pool holds at most this many tokens.
        externally_held_bytes: weights that somebody else holds for the engine on each device.
        frontend_reservation_bytes: taken off the pool for multimodal inputs.
        given: rows that the user knows.
        measured: rows of a profile or of a start-up log, instead of estimates.
        strict_startup: utilization * total must be free even under an override.
        validate: pinned bytes are checked against free memory.
        constants: of the estimates.
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
    dtype: str | None = None
    quantization: QuantizationScheme | None = None
    ignore_config_quantization: bool = False
    block_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
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
        """Devices of all data-parallel engines."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def auto_fits(self) -> bool:
        """Whether the longest request that fits is asked for."""
        return self.max_model_len == -1

    @property
    def wanted_max_model_len(self) -> int:
        """The longest request asked for; under auto-fit, the longest that the model was made for.

        Raises:
            InputError: not given, and the config does not say; or below 1.
        """
        if self.max_model_len is not None and self.max_model_len != -1:
            if self.max_model_len < 1:
                raise InputError(
                    f"--max-model-len {self.max_model_len}: give at least 1, or -1 for the longest that fits"
                )
            return self.max_model_len
        made_for = self.geometry.max_position_embeddings
        if made_for is None:
            raise InputError(f"{self.geometry.name}: the config says no longest sequence; give --max-model-len")
        return made_for

    @property
    def weight_dtype(self) -> str:
        """Dtype of unquantised weights and of activations.

        Raises:
            InputError: not given, and the config does not say.
        """
        dtype = self.dtype or self.geometry.dtype
        if dtype is None:
            raise InputError(f"{self.geometry.name}: the config names no dtype; give --dtype")
        return dtype

    @property
    def cache_dtype(self) -> str:
        """`kv_cache_dtype` with `auto` resolved to the dtype that was given, if one was."""
        return self.dtype if self.kv_cache_dtype == "auto" and self.dtype is not None else self.kv_cache_dtype

    @property
    def hybrid_manager_is_off(self) -> bool:
        """Whether windowed layers are sized like full ones."""
        if self.disable_hybrid_kv_cache_manager is not None:
            return self.disable_hybrid_kv_cache_manager
        return not self.geometry.reader.hybrid_manager

    @property
    def scheme(self) -> QuantizationScheme | None:
        """Quantisation of the weights: as given, else the checkpoint's own."""
        if self.quantization is not None or self.ignore_config_quantization:
            return self.quantization
        if self.geometry.quantization_config is None:
            return None
        return scheme_from_config(self.geometry.quantization_config, self.geometry.name)

    @property
    def step_shape(self) -> StepShape:
        """The largest step."""
        return StepShape(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            enforce_eager=self.enforce_eager,
        )

    def resolved_block_size(self) -> tuple[int, str]:
        """Tokens of a block, and why so many.

        Models with states need an attention page as large as a state; compressed states need whole states in a block.
        """
        storage = self.geometry.cache_format(self.cache_dtype)
        wanted = self.block_size or DEFAULT_BLOCK_SIZE
        aligned = state_aligned_block_size(
            self.geometry.layers, storage, STATE_BLOCK_ALIGNMENT, self.tensor_parallel_size
        )
        if aligned is not None and aligned > wanted:
            return aligned, f"a state is one page, so a block of {aligned} tokens is the smallest that holds one"
        caches = [cache for layer in self.geometry.layers for cache in layer]
        per_state = max((cache.tokens_per_state for cache in caches if isinstance(cache, CompressedCache)), default=1)
        if self.block_size is None and wanted % per_state:
            return per_state, f"one state covers up to {per_state} tokens"
        return wanted, "as given" if self.block_size is not None else "the engine's default"

    def layer_specs(self) -> Mapping[str, KVCacheSpec]:
        """What one rank stores of each layer, by name.

        Raises:
            InputError: KV heads or states that the ranks can neither split nor replicate evenly.
        """
        block_size, _ = self.resolved_block_size()
        return tensor_parallel_layers(
            self.geometry.layer_specs(block_size, self.cache_dtype), self.tensor_parallel_size
        )

    def stage_layers(self) -> tuple[range, ...]:
        """Layers of each pipeline stage."""
        stages: list[range] = []
        start = 0
        for size in layers_per_stage(self.geometry.num_hidden_layers, self.pipeline_parallel_size):
            stages.append(range(start, start + size))
            start += size
        return tuple(stages)

    def non_kv_rows(self, layers: range) -> tuple[LedgerRow, ...]:
        """Everything that one GPU of the stage of `layers` needs beside the pool: measured, given, or estimated.

        Raises:
            InputError: the weights can be neither counted nor are given.
        """
        if self.measured is not None:
            return self.measured
        given = self.given
        rows = [
            _given_or(given.weights_bytes, "weights", RowRole.RESIDENT) or self._weights_row(layers),
            _given_or(given.non_torch_bytes, "non-torch", RowRole.RESIDENT)
            or non_torch_row(self.step_shape, self.constants),
            _given_or(given.workspace_bytes, "sampler and workspace", RowRole.RESIDENT),
            self._encoder_row(layers),
            _given_or(given.activation_bytes, "peak activation", RowRole.TRANSIENT) or self._activation_row(layers),
        ]
        if self.reserve_graph_memory:
            graphs = _given_or(given.graph_bytes, "CUDA graphs", RowRole.GRAPHS)
            rows.append(graphs or graph_row(len(layers), self.step_shape, self.constants))
        return tuple(row for row in rows if row is not None)

    def unreserved_graph_row(self, layers: range) -> LedgerRow | None:
        """Graph memory that no one set aside: it comes out of what utilization leaves unused."""
        if self.reserve_graph_memory or self.measured is not None:
            return None
        given = _given_or(self.given.graph_bytes, "CUDA graphs", RowRole.GRAPHS)
        return given or graph_row(len(layers), self.step_shape, self.constants)

    def _weights_row(self, layers: range) -> LedgerRow:
        return weights_row(
            self.geometry.weights.on_stage(layers.start, len(layers)),
            dtype=self.weight_dtype,
            scheme=self.scheme,
            tensor_parallel_size=self.tensor_parallel_size,
            constants=self.constants,
        )

    def _encoder_row(self, layers: range) -> LedgerRow | None:
        """Encoders run on the first stage."""
        if layers.start:
            return None
        given = _given_or(self.given.encoder_bytes, "encoder", RowRole.RESIDENT)
        return given or encoder_row(self.geometry.left_out, self.constants)

    def _activation_row(self, layers: range) -> LedgerRow:
        return activation_row(
            self.geometry.weights.layers[layers.start : layers.stop],
            hidden_size=self.geometry.hidden_size,
            vocab_size=self.geometry.vocab_size,
            dtype=self.weight_dtype,
            shape=self.step_shape,
            holds_head=layers.stop == self.geometry.num_hidden_layers,
            constants=self.constants,
        )


def _given_or(num_bytes: int | None, name: str, role: RowRole) -> LedgerRow | None:
    return None if num_bytes is None else given_row(name, num_bytes, role)
