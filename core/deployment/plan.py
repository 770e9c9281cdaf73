"""A deployment planned: the ledger of each pipeline stage, the pool that all ranks share, and whether it fits.

>>> plan = plan_deployment(deployment)
>>> plan.pool.num_blocks, plan.fits
(27456, True)
"""

import attrs

from ..errors import DoesNotFitError, InputError
from ..memory.budget import BudgetSemantics, MemoryShortfallError, check_explicit_kv_bytes, request_memory
from ..memory.ledger import LedgerRow, MemoryBudget, MemoryLedger
from ..planner.inputs import PlanInputs
from ..planner.plan import KVCachePlan, plan_kv_cache
from ..planner.ranks import tightest_rank
from ..planner.specs import StateCacheMode
from .deployment import Deployment


@attrs.frozen(kw_only=True)
class StagePlan:
    """One pipeline stage; all its tensor-parallel ranks are alike.

    Attributes:
        stage: its place in the pipeline.
        layers: of the model.
        ranks: of the engine.
        ledger: of each of its GPUs.
        unreserved_graphs: graph memory that was not set aside, where it was not.
    """

    stage: int
    layers: range
    ranks: range
    ledger: MemoryLedger
    unreserved_graphs: LedgerRow | None


@attrs.frozen(kw_only=True)
class DeploymentPlan:
    """The answer, also where it is no.

    Attributes:
        deployment: the question.
        stages: the ledgers.
        pool: the planner's answer, over all ranks.
        startup_refusal: why the engine would not even start; None if it would.
        warnings: what the reader should know.
    """

    deployment: Deployment
    stages: tuple[StagePlan, ...]
    pool: KVCachePlan
    startup_refusal: MemoryShortfallError | None
    warnings: tuple[str, ...]

    @property
    def refusal(self) -> DoesNotFitError | None:
        """Why the answer is no; None if it is yes."""
        return self.startup_refusal or self.pool.refusal

    @property
    def fits(self) -> bool:
        """The engine starts, and one request of the longest length fits on every rank."""
        return self.refusal is None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, 0 where nothing fits."""
        return max(self.pool.num_blocks, 0)

    @property
    def bottleneck_stage(self) -> StagePlan:
        """The stage whose ranks decide the pool."""
        rank = tightest_rank(self.pool.ranks).rank
        return next(stage for stage in self.stages if rank in stage.ranks)

    @property
    def bytes_per_block(self) -> int:
        """Of the rank that decides the pool."""
        return tightest_rank(self.pool.ranks).bytes_per_block

    def rows(self, stage: StagePlan) -> tuple[LedgerRow, ...]:
        """The whole ledger of one GPU of `stage`; the rows add up to the device's total."""
        rank = self.pool.ranks[stage.ranks.start]
        return stage.ledger.rows(max(rank.bytes_used, 0))

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
    """Plan one engine; where it does not fit, the answer is a plan with a refusal and all its figures.

    Raises:
        InputError: something is missing or does not go together.
    """
    _check_one_size(deployment)
    specs = deployment.layer_specs()
    stage_layers = deployment.stage_layers()
    stages: list[StagePlan] = []
    for index, layers in enumerate(stage_layers):
        ranks = range(index * deployment.tensor_parallel_size, (index + 1) * deployment.tensor_parallel_size)
        stages.append(
            StagePlan(
                stage=index,
                layers=layers,
                ranks=ranks,
                ledger=_ledger(deployment, layers),
                unreserved_graphs=deployment.unreserved_graph_row(layers),
            )
        )
    inputs = PlanInputs(
        layer_specs=specs,
        available_bytes=tuple(_pool_limit_bytes(deployment, stage.ledger) for stage in stages for _ in stage.ranks),
        rank_layers=tuple(
            tuple(name for name in specs if int(name.split(".")[1]) in stage.layers)
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
    pool = plan_kv_cache(inputs)
    pool, cap_warnings = _capped(deployment, inputs, pool)
    plan = DeploymentPlan(
        deployment=deployment,
        stages=tuple(stages),
        pool=pool,
        startup_refusal=_startup_refusal(deployment, stages, pool),
        warnings=(),
    )
    return attrs.evolve(plan, warnings=(*_warnings(plan), *cap_warnings, *_pool_warnings(plan)))


def _check_one_size(deployment: Deployment) -> None:
    given = {
        "--kv-cache-memory-bytes": deployment.kv_cache_memory_bytes,
        "--num-gpu-blocks-override": deployment.num_gpu_blocks_override,
    }
    if all(value is not None for value in given.values()):
        raise InputError(f"{' and '.join(given)} both size the pool; give one of them")
    if deployment.kv_cache_memory_bytes is not None and deployment.kv_cache_memory_bytes <= 0:
        raise InputError(
            f"--kv-cache-memory-bytes {deployment.kv_cache_memory_bytes}: give the size of the pool in bytes, above 0"
        )


def _ledger(deployment: Deployment, layers: range) -> MemoryLedger:
    budget = MemoryBudget(
        total_bytes=deployment.total_bytes,
        free_bytes=deployment.free_bytes,
        fraction=deployment.utilization,
        semantics=deployment.semantics,
        externally_held_bytes=deployment.externally_held_bytes,
    )
    return MemoryLedger(
        budget=budget,
        non_kv_rows=deployment.non_kv_rows(layers),
        kv_cache_memory_bytes=deployment.kv_cache_memory_bytes,
        frontend_reservation_bytes=deployment.frontend_reservation_bytes,
    )


def _pool_limit_bytes(deployment: Deployment, ledger: MemoryLedger) -> int:
    """What the pool is checked against: what is free beside everything else under an override (A10), else the
    budget.
    """
    if deployment.num_gpu_blocks_override is not None and not deployment.strict_startup:
        return deployment.free_bytes - ledger.non_kv_bytes - deployment.frontend_reservation_bytes
    return ledger.available_bytes


def _state_cache_mode(deployment: Deployment) -> StateCacheMode | None:
    """As given, else vLLM's rule: snapshots at aligned boundaries if prefixes are cached, none if not."""
    if deployment.state_cache_mode is not None or not deployment.geometry.has_states:
        return deployment.state_cache_mode
    return "align" if deployment.enable_prefix_caching else "none"


def _capped(deployment: Deployment, inputs: PlanInputs, pool: KVCachePlan) -> tuple[KVCachePlan, tuple[str, ...]]:
    """The pool held to `max_total_tokens`, where it would hold more; the lesser of both limits wins (A15)."""
    cap = deployment.max_total_tokens
    if cap is None:
        return pool, ()
    group, *others = pool.groups
    if others:
        raise InputError(
            f"--max-total-tokens {cap:,}: blocks of {len(pool.groups)} groups stand for different tokens, so tokens do"
            " not size the pool; give --num-gpu-blocks-override"
        )
    num_blocks = cap // group.tokens_per_block(deployment.decode_context_parallel_size)
    if num_blocks < 1:
        raise InputError(f"--max-total-tokens {cap}: less than one block of {group.block_size} tokens")
    if num_blocks >= pool.num_blocks:
        return pool, (f"--max-total-tokens {cap:,} is above what memory holds and changes nothing",)
    capped = plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=num_blocks))
    return capped, (f"--max-total-tokens {cap:,} holds the pool to {num_blocks:,} of {pool.num_blocks:,} blocks",)


def _startup_refusal(deployment: Deployment, stages: list[StagePlan], pool: KVCachePlan) -> MemoryShortfallError | None:
    """The check at start-up: what utilization requests is free, or what is pinned fits beside everything else."""
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
                graphs = stage.unreserved_graphs.num_bytes if stage.unreserved_graphs else 0
                check_explicit_kv_bytes(
                    kv_cache_memory_bytes=deployment.kv_cache_memory_bytes,
                    free_bytes=deployment.free_bytes,
                    non_kv_bytes=stage.ledger.non_kv_bytes + graphs,
                    bytes_per_block=max(pool.ranks[stage.ranks.start].bytes_per_block, 1),
                )
    except MemoryShortfallError as refusal:
        return refusal
    return None


def _pool_warnings(plan: DeploymentPlan) -> tuple[str, ...]:
    """The pool's own warnings, those of ranks that are copies of their stage's first left out."""
    copies = tuple(f"rank {rank} " for stage in plan.stages for rank in stage.ranks[1:])
    return tuple(warning for warning in plan.pool.warnings if not warning.startswith(copies))


def _warnings(plan: DeploymentPlan) -> tuple[str, ...]:
    deployment = plan.deployment
    out: list[str] = []
    if deployment.kv_cache_memory_bytes is not None:
        out.append(
            f"--kv-cache-memory-bytes {deployment.kv_cache_memory_bytes:,} sizes the pool;"
            f" --gpu-memory-utilization {deployment.utilization:g} is ignored"
        )
    for stage in plan.stages:
        graphs = stage.unreserved_graphs
        if graphs is None:
            continue
        used = max(plan.pool.ranks[stage.ranks.start].bytes_used, 0)
        left = deployment.free_bytes - stage.ledger.non_kv_bytes - used
        if graphs.num_bytes > left:
            out.append(
                f"CUDA graphs of about {graphs.num_bytes / (1 << 30):.2f} GiB are not set aside, and only"
                f" {left / (1 << 30):.2f} GiB remain free: capturing them may run out of memory"
            )
    unknown = plan.deployment.geometry.reader.left_out
    if unknown and deployment.given.encoder_bytes is None and deployment.measured is None:
        out.append(
            f"{', '.join(unknown)}: not counted in the parameters; the encoder row is an estimate with a wide range,"
            " so read the range of blocks rather than the figure, or give --encoder-bytes"
        )
    return tuple(out)
