"""Plans a deployment: the memory ledger of each pipeline stage, the pool that all ranks share, and whether it fits.

>>> from kvledger.core.deployment.deployment import Deployment
>>> from kvledger.core.models.geometry import builtin_geometry
>>> H100 = 85_031_714_816
>>> deployment = Deployment(
...     geometry=builtin_geometry("llama-3.1-8b"), total_bytes=H100, free_bytes=H100, utilization=0.9,
...     max_num_seqs=256, max_num_batched_tokens=8192,
... )
>>> plan = plan_deployment(deployment)
>>> plan.num_blocks, plan.fits
(27681, True)
"""

import attrs

from ..errors import DoesNotFitError, InputError
from ..memory.budget import BudgetSemantics, MemoryShortfallError, check_explicit_kv_bytes, request_memory
from ..memory.ledger import LedgerRow, MemoryBudget, MemoryLedger
from ..models.geometry import boundary_warning
from ..planner.inputs import PlanInputs
from ..planner.plan import KVCachePlan, plan_kv_cache
from ..planner.ranks import tightest_rank
from ..planner.specs import StateCacheMode
from ..quantities import format_gib
from .deployment import Deployment


@attrs.frozen(kw_only=True)
class StagePlan:
    """One pipeline stage; all its tensor-parallel ranks are alike."""

    stage: int  # index in the pipeline
    layers: range  # layers of the model on this stage
    ranks: range  # ranks of the engine on this stage
    ledger: MemoryLedger  # memory of each of its GPUs
    unreserved_graphs: LedgerRow | None  # graph memory that is not set aside; None if it is set aside or there is none

    @property
    def graph_bytes_beside(self) -> int:
        """Bytes of graphs that are not set aside, 0 if there are none."""
        return self.unreserved_graphs.num_bytes if self.unreserved_graphs else 0


@attrs.frozen(kw_only=True)
class DeploymentPlan:
    """The result of planning, also where the deployment does not fit.

    Attributes:
        deployment: the planned deployment.
        stages: the pipeline stages with their ledgers.
        pool: the planner's result over all ranks.
        startup_refusal: why the engine would not even start; None if it would.
        warnings: sentences for the reader.
    """

    deployment: Deployment
    stages: tuple[StagePlan, ...]
    pool: KVCachePlan
    startup_refusal: MemoryShortfallError | None
    warnings: tuple[str, ...]

    @property
    def refusal(self) -> DoesNotFitError | None:
        """Why it does not fit; None if it does."""
        return self.startup_refusal or self.pool.refusal

    @property
    def fits(self) -> bool:
        """Whether the engine starts and one request of the longest length fits on every rank."""
        return self.refusal is None

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, 0 where nothing fits."""
        return max(self.pool.num_blocks, 0)

    @property
    def bottleneck_stage(self) -> StagePlan:
        """The stage whose ranks decide the size of the pool."""
        rank = tightest_rank(self.pool.ranks).rank
        return next(stage for stage in self.stages if rank in stage.ranks)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the rank that decides the size of the pool."""
        return tightest_rank(self.pool.ranks).bytes_per_block

    def rows(self, stage: StagePlan) -> tuple[LedgerRow, ...]:
        """The whole ledger of one GPU of `stage`; the rows add up to the device's total."""
        return stage.ledger.rows(max(self.pool.ranks[stage.ranks.start].bytes_used, 0))

    @property
    def blocks_range(self) -> tuple[int, int]:
        """Fewest and most blocks that the ranges of the estimates allow; the pool itself where it is pinned."""
        if self.deployment.num_gpu_blocks_override is not None:
            return self.num_blocks, self.num_blocks
        fewest: list[int] = []
        most: list[int] = []
        for stage in self.stages:
            per_block = self.pool.ranks[stage.ranks.start].bytes_per_block
            if per_block:
                low, high = stage.ledger.available_range_bytes
                fewest.append(max(low, 0) // per_block)
                most.append(max(high, 0) // per_block)
        return min(fewest), min(most)


def plan_deployment(deployment: Deployment) -> DeploymentPlan:
    """Plan one engine; where it does not fit, the result is a plan with a refusal and all its figures.

    Raises:
        InputError: a value is missing, or two values contradict each other.
    """
    pinned = deployment.kv_cache_memory_bytes
    if pinned is not None and deployment.num_gpu_blocks_override is not None:
        raise InputError("kv_cache_memory_bytes and num_gpu_blocks_override both size the pool; give one of them")
    if pinned is not None and pinned <= 0:
        raise InputError(f"kv_cache_memory_bytes is {pinned}; give the size of the pool in bytes, above 0")
    specs = deployment.layer_specs()
    last_layer = deployment.geometry.num_hidden_layers - 1  # a drafter's layers are on its stage
    stages = [_stage(deployment, index, layers) for index, layers in enumerate(deployment.stage_layers())]
    inputs = PlanInputs(
        layer_specs=specs,
        available_bytes=tuple(_pool_limit_bytes(deployment, stage.ledger) for stage in stages for _ in stage.ranks),
        rank_layers=tuple(
            tuple(name for name in specs if min(int(name.split(".")[1]), last_layer) in stage.layers)
            for stage in stages
            for _ in stage.ranks
        ),
        max_model_len=deployment.wanted_max_model_len,
        auto_fit_max_model_len=deployment.auto_fits,
        enable_prefix_caching=deployment.enable_prefix_caching,
        max_in_flight_tokens=deployment.max_concurrent_batches * deployment.max_num_batched_tokens,
        decode_context_parallel_size=deployment.decode_context_parallel_size,
        state_cache_mode=_state_cache_mode(deployment),
        layout=deployment.layout,
        disable_hybrid_kv_cache_manager=deployment.hybrid_manager_is_off,
        num_gpu_blocks_override=deployment.num_gpu_blocks_override,
        validate_override=not deployment.strict_startup,
    )
    pool, cap_warnings = _capped(deployment, inputs, plan_kv_cache(inputs))
    # The other ranks of a stage are copies of its first, and so are their warnings.
    copies = tuple(f"rank {rank} " for stage in stages for rank in stage.ranks[1:])
    pool_warnings = (warning for warning in pool.warnings if not warning.startswith(copies))
    return DeploymentPlan(
        deployment=deployment,
        stages=tuple(stages),
        pool=pool,
        startup_refusal=_startup_refusal(deployment, stages, pool),
        warnings=(*_warnings(deployment, stages, pool), *cap_warnings, *pool_warnings),
    )


def _stage(deployment: Deployment, index: int, layers: range) -> StagePlan:
    budget = MemoryBudget(
        total_bytes=deployment.total_bytes,
        free_bytes=deployment.free_bytes,
        fraction=deployment.utilization,
        semantics=deployment.semantics,
        externally_held_bytes=deployment.externally_held_bytes,
    )
    ledger = MemoryLedger(
        budget=budget,
        non_kv_rows=deployment.non_kv_rows(layers),
        kv_cache_memory_bytes=deployment.kv_cache_memory_bytes,
        frontend_reservation_bytes=deployment.frontend_reservation_bytes,
    )
    size = deployment.tensor_parallel_size
    return StagePlan(
        stage=index,
        layers=layers,
        ranks=range(index * size, (index + 1) * size),
        ledger=ledger,
        unreserved_graphs=deployment.unreserved_graph_row(layers),
    )


def _pool_limit_bytes(deployment: Deployment, ledger: MemoryLedger) -> int:
    """The limit of the pool: under an override the memory that everything else leaves free (A10), else the budget."""
    if deployment.num_gpu_blocks_override is not None and not deployment.strict_startup:
        return deployment.free_bytes - ledger.non_kv_bytes - deployment.frontend_reservation_bytes
    return ledger.available_bytes


def _state_cache_mode(deployment: Deployment) -> StateCacheMode | None:
    """The given mode, else vLLM's rule: snapshots at aligned boundaries if prefixes are cached, none if not."""
    if deployment.state_cache_mode is not None or not deployment.geometry.has_states:
        return deployment.state_cache_mode
    return "align" if deployment.enable_prefix_caching else "none"


def _capped(deployment: Deployment, inputs: PlanInputs, pool: KVCachePlan) -> tuple[KVCachePlan, tuple[str, ...]]:
    """The pool limited to `max_total_tokens`, with a warning; the lesser of this limit and the memory wins (A15)."""
    cap = deployment.max_total_tokens
    if cap is None:
        return pool, ()
    group, *others = pool.groups
    if others:
        raise InputError(
            f"max_total_tokens {cap:,}: blocks of {len(pool.groups)} groups hold different tokens, so tokens do not"
            " size the pool; give num_gpu_blocks_override"
        )
    num_blocks = cap // group.tokens_per_block(deployment.decode_context_parallel_size)
    if num_blocks < 1:
        raise InputError(f"max_total_tokens {cap}: less than one block of {group.block_size} tokens")
    if num_blocks >= pool.num_blocks:
        return pool, (f"max_total_tokens {cap:,} is above what memory holds and changes nothing",)
    capped = plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=num_blocks))
    return capped, (f"max_total_tokens {cap:,} holds the pool to {num_blocks:,} of {pool.num_blocks:,} blocks",)


def _startup_refusal(deployment: Deployment, stages: list[StagePlan], pool: KVCachePlan) -> MemoryShortfallError | None:
    """The check at start-up: the requested memory is free, or the pinned pool fits beside everything else."""
    sizes_itself = deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None
    try:
        if deployment.semantics is not BudgetSemantics.OF_FREE and (not sizes_itself or deployment.strict_startup):
            request_memory(
                total_bytes=deployment.total_bytes,
                free_bytes=deployment.free_bytes,
                gpu_memory_utilization=deployment.utilization,
                externally_held_bytes=deployment.externally_held_bytes,
            )
        if deployment.kv_cache_memory_bytes is not None and deployment.validate:
            for stage in stages:
                check_explicit_kv_bytes(
                    kv_cache_memory_bytes=deployment.kv_cache_memory_bytes,
                    free_bytes=deployment.free_bytes,
                    non_kv_bytes=stage.ledger.non_kv_bytes + stage.graph_bytes_beside,
                    bytes_per_block=max(pool.ranks[stage.ranks.start].bytes_per_block, 1),
                )
    except MemoryShortfallError as refusal:
        return refusal
    return None


def _warnings(deployment: Deployment, stages: list[StagePlan], pool: KVCachePlan) -> list[str]:
    out: list[str] = [*deployment.geometry.warnings]
    if deployment.drafts is not None and deployment.drafts.model is not None:
        out.extend(deployment.drafts.model.warnings)
    if deployment.kv_cache_memory_bytes is not None:
        out.append(
            f"kv_cache_memory_bytes {deployment.kv_cache_memory_bytes:,} sizes the pool;"
            f" gpu_memory_utilization {deployment.utilization:g} is ignored"
        )
    for stage in stages:
        used = max(pool.ranks[stage.ranks.start].bytes_used, 0)
        left = deployment.free_bytes - stage.ledger.non_kv_bytes - used
        if stage.graph_bytes_beside > left and stage.unreserved_graphs is not None:
            out.append(
                f"CUDA graphs of about {format_gib(stage.graph_bytes_beside)} are not set aside, and only"
                f" {format_gib(left)} remain free: capturing them may run out of memory"
            )
    boundary = boundary_warning(deployment.geometry, deployment.cache_dtype)
    if boundary is not None:
        out.append(boundary)
    unknown = deployment.geometry.left_out
    if unknown and deployment.given.encoder_bytes is None and deployment.measured is None:
        out.append(
            f"{', '.join(unknown)}: not counted in the parameters; the encoder row is an estimate with a wide range,"
            " so read the range of blocks rather than the figure, or give encoder_bytes"
        )
    return out
