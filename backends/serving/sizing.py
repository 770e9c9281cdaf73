"""From a model to an engine's memory: profile or count, plan, allocate, warm up; with the ledger and the known lines.

    sized = size_engine(lambda: load_model(path, device="cpu"), EngineOptions(kv_cache_memory_bytes=1 << 29, ...))
    print(*sized.lines(), sep=os.linesep)
    engine = LiveEngine(sized.runner, allocator=sized.allocator, scheduler=sized.scheduler)

On a GPU the largest step is run and measured, and the pool gets what `gpu_memory_utilization` leaves, unless its size
is given. On a CPU nobody knows what share of the host is meant, so the size must be given.
"""

from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs
import torch

from ...core.allocator_config import AllocatorConfig
from ...core.allocator_groups import allocator_groups
from ...core.deployment import Deployment
from ...core.deployment_plan import DeploymentPlan, plan_deployment
from ...core.errors import InputError
from ...core.memory_estimates import EstimateConstants, StepShape, activation_row
from ...core.memory_ledger import LedgerRow, RowRole, RowSource
from ...core.model_geometry import ModelGeometry
from ...core.quantities import format_bytes
from ...core.scheduler_config import SchedulerConfig
from ...core.startup_log import log_lines
from ..cuda_backend import CudaBackend
from ..cuda_device import DeviceAccess, open_cuda_device
from ..device_probe import DeviceProbe
from ..host_memory import HostDevice
from ..memory_profiler import MemoryProfiler, Reconciliation
from ..profiling_step import StepLimits
from ..torch_device import torch_device
from .model_runner import ModelRunner
from .profiled_step import largest_step
from .served_model import transformers_geometry

# vLLM's default of `--gpu-memory-utilization`.
DEFAULT_UTILIZATION: Final = 0.9
# vLLM's engine keeps, of windowed groups, only the window before a request's replay boundaries.
_ENGINE_RETENTION: Final = 0


class HasModel(Protocol):
    """What loading returns: at least the transformers model."""

    @property
    def model(self) -> Any:
        """A causal language model on its device."""
        ...


Loaded = TypeVar("Loaded", bound=HasModel)


@attrs.frozen(kw_only=True)
class EngineOptions:
    """What an engine is sized for.

    Attributes:
        max_num_seqs: requests of one step.
        max_num_batched_tokens: tokens of one step.
        max_model_len: longest request; None: what the model was made for; -1: the longest that fits.
        block_size: tokens of a block.
        kv_cache_dtype: dtype of the cache; `auto` is the model's.
        kv_cache_memory_bytes: the pool's size.
        num_gpu_blocks_override: blocks of the pool; it and the size above exclude each other.
        gpu_memory_utilization: fraction of a GPU's total memory, where neither of them is given; 0.9 unless given.
        enable_prefix_caching: finished requests' blocks stay findable.
        enable_chunked_prefill: prompts may be computed over several steps.
        policy: "fcfs" or "priority".
        watermark_blocks: blocks that an admission leaves free.
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
        _ = self.scheduler  # limits that contradict each other are refused here, before a model is loaded

    @property
    def is_pinned(self) -> bool:
        """Whether the pool's size was given."""
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler's part."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.policy,
        )


@attrs.frozen(kw_only=True, eq=False)
class SizedEngine(Generic[Loaded]):
    """Everything that `LiveEngine` needs, and the account of the memory.

    Attributes:
        options: what it was sized for.
        loaded: what loading returned.
        runner: the model on its pool.
        allocator, scheduler: the engine's configurations.
        plan: the ledger and the pool.
        reconciliation: what start-up took against what was expected; None where nothing was profiled.
    """

    options: EngineOptions
    loaded: Loaded
    runner: ModelRunner
    allocator: AllocatorConfig
    scheduler: SchedulerConfig
    plan: DeploymentPlan
    reconciliation: Reconciliation | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures."""
        measured = () if self.reconciliation is None else self.reconciliation.warnings
        return (*[each for each in self.plan.warnings if self._is_news(each)], *measured)

    def _is_news(self, warning: str) -> bool:
        """That a utilization is ignored is none to somebody who gave none."""
        return self.options.gpu_memory_utilization is not None or "--gpu-memory-utilization" not in warning

    def lines(self) -> tuple[str, ...]:
        """The lines that people grep a server's start-up log for, the ledger, and the warnings."""
        rows = self.plan.rows(self.plan.stages[0])
        width = max(len(row.name) for row in rows)
        ledger = [f"  {row.name:<{width}}  {format_bytes(row.num_bytes)}  {row.source}" for row in rows]
        return (*log_lines(self.plan), "Memory ledger:", *ledger, *[f"Warning: {each}" for each in self.warnings])


def size_engine(
    load: Callable[[], Loaded],
    options: EngineOptions,
    *,
    device: str | torch.device,
    device_access: DeviceAccess | None = None,
) -> SizedEngine[Loaded]:
    """Load the model, size the pool, allocate it and take the model over.

    Args:
        load: loads the model onto the device.
        options: what it is sized for.
        device: "cpu", "cuda" or "cuda:1".
        device_access: where a profile reads memory; that of `device` unless given. With it a CPU is profiled too.

    Raises:
        InputError: options that do not go together, or a model that cannot be served.
        DoesNotFitError: the pool, or one request of the longest length, does not fit; says the largest that does.
    """
    place = torch_device(device)
    if place.type == "cpu" and device_access is None:
        return _size_by_count(load, options, place)
    access = open_cuda_device(place.index or 0) if device_access is None else device_access
    return _size_by_profile(load, options, place, access)


def _size_by_count(load: Callable[[], Loaded], options: EngineOptions, device: torch.device) -> SizedEngine[Loaded]:
    """On a CPU: weights as large as their tensors, activations by their formula, and a pool of the size given."""
    if not options.is_pinned:
        raise InputError(
            "on a CPU the pool's size must be given: kv_cache_memory_bytes (512MiB, say) or num_gpu_blocks_override"
        )
    if options.gpu_memory_utilization is not None:
        raise InputError(
            f"gpu_memory_utilization {options.gpu_memory_utilization:g} has no effect on a CPU; leave it out"
        )
    before = DeviceProbe(HostDevice()).read()
    loaded = load()
    geometry = transformers_geometry(loaded.model)
    rows = (_weights_row(loaded.model), _activations_row(geometry, options, loaded.model.dtype))
    plan = _planned(options, geometry, before.total_bytes, before.free_bytes, rows, utilization=1.0)
    backend = _backend(options, loaded.model, device)
    _allocate(backend, plan)
    return _sized(loaded, backend, options, plan, None)


def _size_by_profile(
    load: Callable[[], Loaded], options: EngineOptions, device: torch.device, access: DeviceAccess
) -> SizedEngine[Loaded]:
    """By what the device says before loading, after it, and at the peak of the largest step."""
    limits = StepLimits(max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs)
    profiler = MemoryProfiler(access, limits)
    profiler.take_baseline()
    loaded = profiler.load_weights(load)
    geometry = transformers_geometry(loaded.model)
    step = largest_step(
        loaded.model,
        geometry,
        limits,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        device=device,
    )
    measured = profiler.profile(step)
    before = measured.profile.before
    utilization = options.gpu_memory_utilization
    plan = _planned(
        options,
        geometry,
        before.total_bytes,
        before.free_bytes,
        measured.rows,
        DEFAULT_UTILIZATION if utilization is None else utilization,
    )
    backend = _backend(options, loaded.model, device)
    planned_bytes = plan.pool.configs()[0].size_bytes
    profiler.allocate_pool(lambda: _allocate(backend, plan), planned_bytes=planned_bytes)
    return _sized(loaded, backend, options, plan, profiler.reconcile())


def _planned(
    options: EngineOptions,
    geometry: ModelGeometry,
    total_bytes: int,
    free_bytes: int,
    rows: tuple[LedgerRow, ...],
    utilization: float,
) -> DeploymentPlan:
    """The plan of one device whose non-KV rows are known.

    Raises:
        InputError: a request could be longer than the model was made for.
        DoesNotFitError: it does not fit.
    """
    made_for = geometry.max_position_embeddings
    if options.max_model_len is not None and made_for is not None and options.max_model_len > made_for:
        raise InputError(f"max_model_len is {options.max_model_len:,}, and the model was made for at most {made_for:,}")
    plan = plan_deployment(
        Deployment(
            geometry=geometry,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            utilization=utilization,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
            enforce_eager=True,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            num_gpu_blocks_override=options.num_gpu_blocks_override,
            measured=rows,
        )
    )
    if plan.refusal is not None:
        raise plan.refusal
    return plan


def _backend(options: EngineOptions, model: Any, device: torch.device) -> CudaBackend:
    return CudaBackend(device=device, max_num_batched_tokens=options.max_num_batched_tokens, model_dtype=model.dtype)


def _allocate(backend: CudaBackend, plan: DeploymentPlan) -> torch.Tensor:
    backend.initialize(plan.pool.configs()[0])
    # A host maps zeros when they are first touched: better now than in the middle of a request.
    return backend.raw.zero_()


def _sized(
    loaded: Loaded,
    backend: CudaBackend,
    options: EngineOptions,
    plan: DeploymentPlan,
    reconciliation: Reconciliation | None,
) -> SizedEngine[Loaded]:
    pool = plan.pool
    allocator = AllocatorConfig(
        num_blocks=plan.num_blocks,
        groups=allocator_groups(pool.configs()[0]),
        max_model_len=pool.max_model_len,
        max_num_reqs=options.max_num_seqs,
        enable_caching=options.enable_prefix_caching,
        retention_interval=_ENGINE_RETENTION,
        max_in_flight_tokens=options.max_num_batched_tokens,
        watermark_blocks=options.watermark_blocks,
        hash_block_size=pool.hash_block_size,
        scheduler_block_size=pool.scheduler_block_size,
    )
    return SizedEngine(
        options=options,
        loaded=loaded,
        runner=ModelRunner(loaded.model, backend),
        allocator=allocator,
        scheduler=options.scheduler,
        plan=plan,
        reconciliation=reconciliation,
    )


def _weights_row(model: Any) -> LedgerRow:
    """Tied weights are one tensor and count once."""
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    num_bytes = sum(each.numel() * each.element_size() for each in tensors.values())
    return LedgerRow(
        name="weights",
        num_bytes=num_bytes,
        source=RowSource.MEASURED,
        role=RowRole.RESIDENT,
        formula=f"bytes of the model's {len(tensors)} tensors",
    )


def _activations_row(geometry: ModelGeometry, options: EngineOptions, dtype: torch.dtype) -> LedgerRow:
    return activation_row(
        geometry.weights.layers,
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        shape=StepShape(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            enforce_eager=True,
        ),
        holds_head=True,
        constants=EstimateConstants(),
    )
