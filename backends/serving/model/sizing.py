"""From a model to an engine's memory: profile or count, plan, allocate, warm up; with the ledger and the known lines.

    sized = size_engine(lambda: load_model(path, device="cpu"), EngineOptions(kv_cache_memory_bytes=1 << 29, ...))
    print(*sized.lines(), sep=os.linesep)
    engine = LiveEngine(sized.runner, allocator=sized.allocator, scheduler=sized.scheduler)

On a GPU the largest step is run and measured, and the pool gets what `gpu_memory_utilization` leaves, unless its size
is given. On a CPU nobody knows what share of the host is meant, so the size must be given.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs
import torch

from ....core.allocator.config import AllocatorConfig
from ....core.deployment.deployment import Deployment
from ....core.deployment.estimates import EstimateConstants, StepShape, activation_row
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
from ...cuda.attention_packages import AttentionPackage, installed_packages
from ...cuda.backend import CudaBackend
from ...cuda.graphs import CudaGraphs, GraphCapturer
from ...cuda.torch_device import torch_device
from ...profiling.device import DeviceAccess, open_cuda_device
from ...profiling.probe import DeviceProbe, HostDevice
from ...profiling.profiler import MemoryProfiler, Reconciliation
from ...profiling.step import StepLimits
from ..engine.lengths import length_limit
from ..engine.options import EngineOptions
from .profiled_model import ProfiledModel, SampledGraphs
from .runner import ModelRunner
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
        return (*self._shorter_than_made_for(), *filter(self._is_news, self.plan.warnings), *measured)

    def _shorter_than_made_for(self) -> tuple[str, ...]:
        limit = self.runner.length_limit
        return (limit.reason,) if limit.is_longrope and self.options.max_model_len_is_open else ()

    def _is_news(self, warning: str) -> bool:
        """That a utilization is ignored is none to somebody who gave none."""
        return self.options.gpu_memory_utilization is not None or "gpu_memory_utilization" not in warning

    def lines(self) -> tuple[str, ...]:
        """The lines that people grep a server's start-up log for, the ledger, and the warnings."""
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
    load: Callable[[], Loaded],
    options: EngineOptions,
    *,
    device: str | torch.device,
    device_access: DeviceAccess | None = None,
    graph_capturer: GraphCapturer | None = None,
) -> SizedEngine[Loaded]:
    """Load the model, size the pool, allocate it, take the model over, and on a GPU capture its decode steps.

    Args:
        load: loads the model onto the device.
        options: what it is sized for.
        device: "cpu", "cuda" or "cuda:1".
        device_access: where a profile reads memory; that of `device` unless given. With it a CPU is profiled too.
        graph_capturer: captures decode steps where memory is profiled; on a GPU `CudaGraphs()` unless given.

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
    if options.attention_packages:
        raise InputError("attention_packages has no effect on a CPU; leave it out")
    _refuse_sizes_without_graphs(options)
    before = DeviceProbe(HostDevice()).read()
    loaded = load()
    geometry = _geometry(loaded.model, options)
    rows = (_weights_row(loaded.model), _activations_row(geometry, options, loaded.model.dtype))
    plan = _planned(
        options,
        geometry,
        before,
        rows,
        # The pool's size is given, so this decides nothing but what the account calls available: all that is free.
        budget=(BudgetSemantics.OF_FREE, 1.0),
        captures_graphs=False,
    )
    backend = _backend(options, loaded.model, device)
    _allocate(backend, plan)
    return _sized(loaded, ModelRunner(loaded.model, backend), options, plan, None)


def _size_by_profile(
    load: Callable[[], Loaded],
    options: EngineOptions,
    device: torch.device,
    access: DeviceAccess,
    capturer: GraphCapturer | None,
) -> SizedEngine[Loaded]:
    """By what the device says before loading, after it, at the peak of the largest step, and around graphs."""
    packages = _packages(options)
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
        budget=(BudgetSemantics.OF_TOTAL, DEFAULT_UTILIZATION if utilization is None else utilization),
        captures_graphs=measured.graphs is not None,
    )
    backend = _backend(options, loaded.model, device, packages)
    planned_bytes = plan.pool.configs()[0].size_bytes
    profiler.allocate_pool(lambda: _allocate(backend, plan), planned_bytes=planned_bytes)
    runner = ModelRunner(loaded.model, backend)
    _warm_up(runner, _allocator(options, plan))
    if capturer is not None and sizes:
        profiler.capture_graphs(lambda: runner.capture(sizes, capturer))
    return _sized(loaded, runner, options, plan, profiler.reconcile())


def _warm_up(runner: ModelRunner, allocator: AllocatorConfig) -> None:
    """Steps and graphs read the tables of the pool that is to come, so these are made first, outside inference mode:
    they are written in the engine's thread.
    """
    with torch.inference_mode(False):
        runner.backend.create_tables(allocator)
    runner.warm_up()


def _geometry(model: Any, options: EngineOptions) -> ModelGeometry:
    """What the model stores.

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
    """The plan of one device whose non-KV rows are known, read before anything was loaded.

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


def _backend(
    options: EngineOptions, model: Any, device: torch.device, packages: Sequence[AttentionPackage] = ()
) -> CudaBackend:
    return CudaBackend(
        device=device,
        max_num_batched_tokens=options.max_num_batched_tokens,
        model_dtype=model.dtype,
        attention_packages=packages,
    )


def _packages(options: EngineOptions) -> Sequence[AttentionPackage]:
    """Whose attention the options ask for.

    Raises:
        InputError: none of them is installed.
    """
    if not options.attention_packages:
        return ()
    packages = installed_packages()
    if not packages:
        raise InputError(
            "attention_packages is set, but neither flash_attn nor flashinfer can be imported; install one, or leave "
            "it out: kvledger has an attention kernel of its own"
        )
    return packages


def _allocate(backend: CudaBackend, plan: DeploymentPlan) -> torch.Tensor:
    backend.initialize(plan.pool.configs()[0])
    # A host maps zeros when they are first touched: better now than in the middle of a request.
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
    loaded: Loaded,
    runner: ModelRunner,
    options: EngineOptions,
    plan: DeploymentPlan,
    reconciliation: Reconciliation | None,
) -> SizedEngine[Loaded]:
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
