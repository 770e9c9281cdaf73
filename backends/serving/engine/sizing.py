"""Sizes an engine for a model: profile or estimate its memory, plan and allocate the pool, warm up, capture graphs.

    sized = size_engine(lambda: load_model(path, device="cpu"), EngineOptions(kv_cache_memory_bytes=1 << 29, ...))
    print(*sized.lines(), sep=os.linesep)
    engine = LiveEngine(sized.runner, allocator=sized.allocator, scheduler=sized.scheduler)

On a GPU the largest step is run and measured, and the pool gets the rest of `gpu_memory_utilization`, unless its size
is given. On a CPU the size must be given, since no fraction of the host's memory is meant for the pool.
"""

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch

from ....core.allocator.config import AllocatorConfig
from ....core.deployment.deployment import Deployment
from ....core.deployment.estimates import EstimateConstants, activation_row, default_utilization
from ....core.deployment.plan import DeploymentPlan, plan_deployment
from ....core.deployment.startup_log import graph_memory_line, log_lines
from ....core.errors import InputError
from ....core.memory.budget import BudgetSemantics
from ....core.memory.ledger import LedgerRow, RowRole, RowSource
from ....core.memory.profile import MemorySnapshot
from ....core.models.geometry import ModelGeometry
from ....core.planner.groups import allocator_groups
from ....core.quantities import format_bytes
from ....core.scheduler.config import SchedulerConfig
from ...cuda.attention_packages import installed_packages
from ...cuda.backend import CudaBackend
from ...cuda.graphs import CudaGraphs, GraphCapturer
from ...cuda.torch_device import torch_device
from ...profiling.device import DeviceAccess, open_cuda_device
from ...profiling.probe import DeviceProbe, HostDevice
from ...profiling.profiler import MemoryProfiler, Reconciliation
from ...profiling.step import StepLimits
from ..model.loading import LoadedModel
from ..model.profiled_model import ProfiledModel, SampledGraphs
from ..model.runner import ModelRunner
from ..model.served_model import length_limit, transformers_geometry
from .options import EngineOptions

# In windowed groups, vLLM's engine keeps only the window before a request's replay boundaries.
_ENGINE_RETENTION: Final = 0


@attrs.frozen(kw_only=True, eq=False)
class SizedEngine:
    """Everything that `LiveEngine` needs, and an account of the memory.

    Attributes:
        options: the options that it was sized for.
        loaded: the result of loading.
        runner: the model on its pool.
        allocator, scheduler: the engine's configs.
        plan: the memory ledger and the pool.
        reconciliation: measured against expected memory at start-up; None if nothing was profiled.
    """

    options: EngineOptions
    loaded: LoadedModel
    runner: ModelRunner
    allocator: AllocatorConfig
    scheduler: SchedulerConfig
    plan: DeploymentPlan
    reconciliation: Reconciliation | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures."""
        limit, options = self.runner.length_limit, self.options
        shorter = (limit.reason,) if limit.is_longrope and options.max_model_len_is_open else ()
        # A caller who gave no utilization need not know that it is ignored.
        gave_utilization = options.gpu_memory_utilization is not None
        planned = [each for each in self.plan.warnings if gave_utilization or "gpu_memory_utilization" not in each]
        measured = () if self.reconciliation is None else self.reconciliation.warnings
        return (*shorter, *planned, *measured)

    def lines(self) -> tuple[str, ...]:
        """Return the lines that people grep a server's start-up log for, the ledger, and the warnings."""
        rows = self.plan.rows(self.plan.stages[0])
        width = max(len(row.name) for row in rows)
        ledger = [f"  {row.name:<{width}}  {format_bytes(row.num_bytes)}  {row.source}" for row in rows]
        warnings = [f"Warning: {each}" for each in self.warnings]
        return (*log_lines(self.plan), *self._graph_lines(), "Memory ledger:", *ledger, *warnings)

    def _graph_lines(self) -> tuple[str, ...]:
        graphs, account = self.runner.graphs, self.reconciliation
        if graphs is None or account is None:
            return ()
        sizes = graphs.sizes
        return (
            f"Captured {len(sizes)} decode steps in CUDA graphs, of {sizes[0]} to {sizes[-1]} requests",
            graph_memory_line(account.graph_actual_bytes, account.graph_estimate_bytes),
        )


def size_engine(
    load: Callable[[], LoadedModel],
    options: EngineOptions,
    *,
    device: str | torch.device,
    device_access: DeviceAccess | None = None,
    graph_capturer: GraphCapturer | None = None,
) -> SizedEngine:
    """Load the model, size and allocate the pool, make the model's runner, and on a GPU capture its decode steps.

    Args:
        load: loads the model onto the device.
        options: what the engine is sized for.
        device: "cpu", "cuda" or "cuda:1".
        device_access: how a profile reads memory; that of `device` unless given. With it a CPU is profiled too.
        graph_capturer: captures decode steps if memory is profiled; on a GPU `CudaGraphs()` unless given.

    Raises:
        InputError: options that do not go together, or a model that cannot be served.
        DoesNotFitError: the pool, or one request of the longest length, does not fit; says the largest that does.
    """
    place = torch_device(device)
    if place.type == "cpu" and device_access is None:
        return _size_by_count(load, options, place)
    access = open_cuda_device(place.index or 0) if device_access is None else device_access
    if graph_capturer is None and place.type == "cuda":
        graph_capturer = CudaGraphs()
    if graph_capturer is None:
        _refuse_sizes_without_graphs(options)
    return _size_by_profile(load, options, place, access, graph_capturer)


def _refuse_sizes_without_graphs(options: EngineOptions) -> None:
    if options.cudagraph_capture_sizes is not None:
        raise InputError(
            f"cudagraph_capture_sizes {list(options.cudagraph_capture_sizes)} has no effect on a CPU, where nothing is "
            "captured; leave it out"
        )


def _size_by_count(load: Callable[[], LoadedModel], options: EngineOptions, device: torch.device) -> SizedEngine:
    """Size on a CPU: weights as large as their tensors, activations by their formula, and a pool of the given size."""
    if not options.is_pinned:
        raise InputError(
            "on a CPU the pool's size must be given: kv_cache_memory_bytes (512MiB, say) or num_gpu_blocks_override"
        )
    if options.gpu_memory_utilization is not None:
        raise InputError(
            f"gpu_memory_utilization {options.gpu_memory_utilization:g} has no effect on a CPU; leave it out"
        )
    if options.attention_packages:
        raise InputError("attention_packages has no effect on a CPU; leave it out")
    _refuse_sizes_without_graphs(options)
    before = DeviceProbe(HostDevice()).read()
    loaded = load()
    geometry = _geometry(loaded.model, options)
    activations = activation_row(
        geometry,
        range(geometry.num_hidden_layers),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=1,
        constants=EstimateConstants(),
    )
    plan = _planned(
        options,
        geometry,
        before,
        (_weights_row(loaded.model), activations),
        # The pool's size is given, so this decides only the account's available memory: all that is free.
        budget=(BudgetSemantics.OF_FREE, 1.0),
        captures_graphs=False,
    )
    backend = CudaBackend(
        device=device, max_num_batched_tokens=options.max_num_batched_tokens, model_dtype=loaded.model.dtype
    )
    _allocate(backend, plan)
    return _sized(loaded, ModelRunner(loaded.model, backend), options, plan, None)


def _size_by_profile(
    load: Callable[[], LoadedModel],
    options: EngineOptions,
    device: torch.device,
    access: DeviceAccess,
    capturer: GraphCapturer | None,
) -> SizedEngine:
    """Size by the device's memory before loading, after it, at the peak of the largest step, and around graphs."""
    packages = installed_packages() if options.attention_packages else ()
    if options.attention_packages and not packages:
        raise InputError(
            "attention_packages is set, but neither flash_attn nor flashinfer can be imported; install one, or leave "
            "it out: kvledger has its own attention kernel"
        )
    limits = StepLimits(max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs)
    profiler = MemoryProfiler(access, limits)
    profiler.take_baseline()
    loaded = profiler.load_weights(load)
    geometry = _geometry(loaded.model, options)
    profiled = ProfiledModel(
        model=loaded.model,
        geometry=geometry,
        limits=limits,
        max_model_len=geometry.max_position_embeddings if options.max_model_len_is_open else options.max_model_len,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        device=device,
    )
    measured = profiler.profile(profiled.largest_step())
    sizes = options.capture_sizes
    if capturer is not None and sizes:
        sampled = SampledGraphs(profiled, sizes, capturer)
        measured = profiler.estimate_graphs((sampled.captures,), smallest_pool=sampled.smallest_pool)
    utilization = options.gpu_memory_utilization
    plan = _planned(
        options,
        geometry,
        measured.profile.before,
        measured.rows,
        budget=(BudgetSemantics.OF_TOTAL, default_utilization() if utilization is None else utilization),
        captures_graphs=measured.graphs is not None,
    )
    backend = CudaBackend(
        device=device,
        max_num_batched_tokens=options.max_num_batched_tokens,
        model_dtype=loaded.model.dtype,
        attention_packages=packages,
    )
    planned_bytes = plan.pool.configs()[0].size_bytes
    profiler.allocate_pool(lambda: _allocate(backend, plan), planned_bytes=planned_bytes)
    runner = ModelRunner(loaded.model, backend)
    # Steps and graphs read the tables of the future pool, so these are created first, and outside inference mode: the
    # engine's thread writes them.
    with torch.inference_mode(False):
        backend.create_tables(_allocator(options, plan))
    runner.warm_up()
    if capturer is not None and sizes:
        profiler.capture_graphs(lambda: runner.capture(sizes, capturer))
    return _sized(loaded, runner, options, plan, profiler.reconcile())


def _geometry(model: Any, options: EngineOptions) -> ModelGeometry:
    """Return the model's geometry.

    Raises:
        InputError: it cannot be served, or a request could be longer than its `length_limit`.
    """
    geometry = transformers_geometry(model)
    if options.max_model_len is not None:
        length_limit(model, geometry.max_position_embeddings).check(options.max_model_len, "max_model_len")
    return geometry


def _planned(
    options: EngineOptions,
    geometry: ModelGeometry,
    before: MemorySnapshot,
    rows: tuple[LedgerRow, ...],
    *,
    budget: tuple[BudgetSemantics, float],
    captures_graphs: bool,
) -> DeploymentPlan:
    """Plan one device with known non-KV rows and the memory that was free before anything was loaded.

    Raises:
        DoesNotFitError: it does not fit.
    """
    plan = plan_deployment(
        Deployment(
            geometry=geometry,
            total_bytes=before.total_bytes,
            free_bytes=before.free_bytes,
            utilization=budget[1],
            semantics=budget[0],
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
            enforce_eager=not captures_graphs,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            num_gpu_blocks_override=options.num_gpu_blocks_override,
            measured=rows,
        )
    )
    if plan.refusal is not None:
        raise plan.refusal
    return plan


def _allocate(backend: CudaBackend, plan: DeploymentPlan) -> torch.Tensor:
    backend.initialize(plan.pool.configs()[0])
    # A host maps memory on first touch: better now than in the middle of a request.
    return backend.raw.zero_()


def _allocator(options: EngineOptions, plan: DeploymentPlan) -> AllocatorConfig:
    pool = plan.pool
    return AllocatorConfig(
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


def _sized(
    loaded: LoadedModel,
    runner: ModelRunner,
    options: EngineOptions,
    plan: DeploymentPlan,
    reconciliation: Reconciliation | None,
) -> SizedEngine:
    return SizedEngine(
        options=options,
        loaded=loaded,
        runner=runner,
        allocator=_allocator(options, plan),
        scheduler=options.scheduler,
        plan=plan,
        reconciliation=reconciliation,
    )


def _weights_row(model: Any) -> LedgerRow:
    """Count the bytes of a model's tensors. Tied weights are one tensor and count once."""
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    num_bytes = sum(each.numel() * each.element_size() for each in tensors.values())
    formula = f"bytes of the model's {len(tensors)} tensors"
    return LedgerRow("weights", num_bytes, RowSource.MEASURED, RowRole.RESIDENT, formula)
