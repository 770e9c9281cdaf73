"""The smallest change of each knob, alone, that makes a deployment do what was asked.

Every remedy is tried before it is offered: it is a deployment that was planned and passed.
"""

from collections.abc import Callable

import attrs

from ..errors import InputError
from ..memory.budget import UTILIZATION_STEPS, WholeBlocks, largest_fitting, largest_utilization
from ..memory.ledger import KVBytesSuggestion, RowRole, sum_bytes
from ..models.weights import quantization_schemes
from ..planner.ranks import largest_max_model_len
from ..quantities import format_gib
from .deployment import Deployment
from .plan import DeploymentPlan, plan_deployment

Accepts = Callable[[DeploymentPlan], bool]

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16, 32, 64)
SMALLEST_STEP_TOKENS = 256  # fewer batched tokens than this starve prefill


@attrs.frozen(kw_only=True)
class Remedy:
    """One knob, changed as little as works.

    Attributes:
        option: the knob.
        value: to set it to; None for a switch.
        num_blocks: of the pool then.
        cost: what the change takes away.
    """

    option: str
    value: int | float | str | None
    num_blocks: int
    cost: str

    def __str__(self) -> str:
        """As it would be typed, and what it costs."""
        value = "" if self.value is None else f" {self.value}"
        return f"{self.option}{value} ({self.num_blocks:,} blocks; {self.cost})"


def find_remedies(deployment: Deployment, accepts: Accepts) -> tuple[Remedy, ...]:
    """Every knob that alone makes the plan acceptable, with its smallest change."""
    finders = (
        _max_model_len,
        _utilization,
        _batched_tokens,
        _num_seqs,
        _graphs,
        _cache_dtype,
        _weights,
        _tensor_parallel,
        _explicit_bytes,
    )
    found = (finder(deployment, accepts) for finder in finders)
    return tuple(remedy for remedy in found if remedy is not None)


def startup_remedies(deployment: Deployment, largest_utilization: float) -> tuple[Remedy, ...]:
    """What lets an engine start beside what others hold: a smaller request, or a pool of its own size."""
    found: list[Remedy] = []
    if largest_utilization > 0:
        smaller = try_plan(attrs.evolve(deployment, utilization=largest_utilization))
        if smaller is not None and smaller.fits:
            found.append(
                Remedy(
                    option="--gpu-memory-utilization",
                    value=largest_utilization,
                    num_blocks=smaller.num_blocks,
                    cost="takes everything that is free",
                )
            )
    pinned = _explicit_bytes(deployment, lambda plan: plan.fits)
    return (*found, pinned) if pinned is not None else tuple(found)


def try_plan(deployment: Deployment) -> DeploymentPlan | None:
    """The plan, or None where the changed options do not go together."""
    try:
        return plan_deployment(deployment)
    except InputError:
        return None


def _accepted(deployment: Deployment, accepts: Accepts) -> DeploymentPlan | None:
    plan = _started(deployment)
    return plan if plan is not None and accepts(plan) else None


def _started(deployment: Deployment) -> DeploymentPlan | None:
    """The plan, if the engine starts at all."""
    plan = try_plan(deployment)
    return plan if plan is not None and plan.startup_refusal is None else None


def _largest(low: int, high: int, plan_of: Callable[[int], DeploymentPlan | None]) -> tuple[int, DeploymentPlan] | None:
    """The largest value in [low, high] whose plan is accepted, given that all smaller ones are too."""
    best: tuple[int, DeploymentPlan] | None = None
    while low <= high:
        middle = (low + high) // 2
        plan = plan_of(middle)
        if plan is None:
            high = middle - 1
        else:
            best = (middle, plan)
            low = middle + 1
    return best


def _max_model_len(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.auto_fits:
        return None
    found = _largest(
        1,
        deployment.wanted_max_model_len - 1,
        lambda length: _accepted(attrs.evolve(deployment, max_model_len=length), accepts),
    )
    if found is None:
        return None
    return Remedy(
        option="--max-model-len",
        value=found[0],
        num_blocks=found[1].num_blocks,
        cost="longer requests are refused",
    )


def _utilization(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    """Smallest larger utilization, in steps of 0.001; the start-up check is part of the plan."""
    if deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None:
        return None

    def plan_of(steps_below: int) -> DeploymentPlan | None:
        utilization = (UTILIZATION_STEPS - steps_below) / UTILIZATION_STEPS
        # Too large a request fails the start-up check, so acceptance is searched only where that passes.
        return _accepted(attrs.evolve(deployment, utilization=utilization), accepts)

    first = int(deployment.utilization * UTILIZATION_STEPS) + 1
    largest = _largest(
        first,
        UTILIZATION_STEPS,
        lambda steps: _started(attrs.evolve(deployment, utilization=steps / UTILIZATION_STEPS)),
    )
    if largest is None:
        return None
    found = _largest(UTILIZATION_STEPS - largest[0], UTILIZATION_STEPS - first, plan_of)
    if found is None:
        return None
    return Remedy(
        option="--gpu-memory-utilization",
        value=(UTILIZATION_STEPS - found[0]) / UTILIZATION_STEPS,
        num_blocks=found[1].num_blocks,
        cost="less is left for graphs, fragmentation and neighbours",
    )


def _batched_tokens(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    """Activations follow the tokens of a step (A02); a given figure is scaled in proportion."""
    if deployment.measured is not None:
        return None

    def plan_of(tokens: int) -> DeploymentPlan | None:
        given = deployment.given
        if given.activation_bytes is not None:
            scaled = given.activation_bytes * tokens // deployment.max_num_batched_tokens
            given = attrs.evolve(given, activation_bytes=scaled)
        return _accepted(attrs.evolve(deployment, max_num_batched_tokens=tokens, given=given), accepts)

    found = _largest(SMALLEST_STEP_TOKENS, deployment.max_num_batched_tokens - 1, plan_of)
    if found is None:
        return None
    assumed = " (if activations are in proportion to it)" if deployment.given.activation_bytes is not None else ""
    return Remedy(
        option="--max-num-batched-tokens",
        value=found[0],
        num_blocks=found[1].num_blocks,
        cost=f"prefill takes more steps{assumed}",
    )


def _num_seqs(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.measured is not None or deployment.given.activation_bytes is not None:
        return None
    found = _largest(
        1,
        deployment.max_num_seqs - 1,
        lambda count: _accepted(attrs.evolve(deployment, max_num_seqs=count), accepts),
    )
    if found is None:
        return None
    return Remedy(
        option="--max-num-seqs", value=found[0], num_blocks=found[1].num_blocks, cost="fewer requests decode at once"
    )


def _graphs(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.enforce_eager or not deployment.reserve_graph_memory or deployment.measured is not None:
        return None
    given = attrs.evolve(deployment.given, graph_bytes=None)
    plan = _accepted(attrs.evolve(deployment, enforce_eager=True, given=given), accepts)
    if plan is None:
        return None
    return Remedy(
        option="--enforce-eager", value=None, num_blocks=plan.num_blocks, cost="decode steps launch kernel by kernel"
    )


def _cache_dtype(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.kv_cache_dtype != "auto" and "8" in deployment.kv_cache_dtype:
        return None
    plan = _accepted(attrs.evolve(deployment, kv_cache_dtype="fp8"), accepts)
    if plan is None:
        return None
    return Remedy(
        option="--kv-cache-dtype", value="fp8", num_blocks=plan.num_blocks, cost="keys and values lose precision"
    )


def _weights(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.scheme is not None or deployment.given.weights_bytes is not None or deployment.measured is not None:
        return None
    plan = _accepted(attrs.evolve(deployment, quantization=quantization_schemes()["fp8"]), accepts)
    if plan is None:
        return None
    return Remedy(option="--quantization", value="fp8", num_blocks=plan.num_blocks, cost="weights lose precision")


def _tensor_parallel(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    size = minimum_tensor_parallel_size(deployment, accepts)
    if size is None or size <= deployment.tensor_parallel_size:
        return None
    plan = plan_deployment(attrs.evolve(deployment, tensor_parallel_size=size))
    return Remedy(
        option="--tensor-parallel-size",
        value=size,
        num_blocks=plan.num_blocks,
        cost=f"{size // deployment.tensor_parallel_size}x the GPUs of this engine",
    )


def minimum_tensor_parallel_size(deployment: Deployment, accepts: Accepts) -> int | None:
    """The smallest power of two of GPUs whose plan is accepted (A17, D05); None where none up to 64 is.

    Rows given or measured for one GPU say nothing about more of them, so then there is no answer.
    """
    if deployment.measured is not None or deployment.given.weights_bytes is not None:
        return None
    for size in TENSOR_PARALLEL_SIZES:
        if size < deployment.tensor_parallel_size:
            continue
        if _accepted(attrs.evolve(deployment, tensor_parallel_size=size), accepts) is not None:
            return size
    return None


def _explicit_bytes(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    """The pool pinned to what is really free on the device, in whole blocks (A14)."""
    if deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None:
        return None
    plan = try_plan(attrs.evolve(deployment, num_gpu_blocks_override=1))
    if plan is None:
        return None
    per_block = plan.bytes_per_block
    limit = min(
        deployment.free_bytes - stage.ledger.non_kv_bytes - deployment.frontend_reservation_bytes
        for stage in plan.stages
    )
    found = _largest(
        1,
        max(limit, 0) // per_block,
        lambda below: _accepted(
            attrs.evolve(deployment, kv_cache_memory_bytes=(max(limit, 0) // per_block + 1 - below) * per_block),
            accepts,
        ),
    )
    if found is None:
        return None
    pinned = (max(limit, 0) // per_block + 1 - found[0]) * per_block
    return Remedy(
        option="--kv-cache-memory-bytes",
        value=pinned,
        num_blocks=found[1].num_blocks,
        cost=f"pins {format_gib(pinned)}; utilization is ignored",
    )


# Values to paste: the largest of each option that works, and what vLLM would suggest, side by side (A14).


@attrs.frozen(kw_only=True)
class FittingValues:
    """Largest values that work.

    Attributes:
        same_pool: `--kv-cache-memory-bytes` that gives the plan's own pool again.
        to_requested_limit: the largest within what utilization requests.
        to_gpu_limit: the largest within all that is free on the device; a block more is refused at start-up.
        max_model_len: longest request of this pool; None where windows bound what any request holds.
        gpu_memory_utilization: largest that passes the check at start-up.
        suggested_vllm: what vLLM suggests: the graph memory twice and 150 MiB off.
    """

    same_pool: WholeBlocks
    to_requested_limit: WholeBlocks
    to_gpu_limit: WholeBlocks
    max_model_len: int | None
    gpu_memory_utilization: float
    suggested_vllm: KVBytesSuggestion


def fitting_values(plan: DeploymentPlan) -> FittingValues:
    """The values for one plan. Pools are in whole blocks of the stage with the largest block, so that all stages
    agree.
    """
    deployment = plan.deployment
    per_block = max(rank.bytes_per_block for rank in plan.pool.ranks)
    requested = min(stage.ledger.budget.requested_bytes for stage in plan.stages)
    reserved = deployment.frontend_reservation_bytes

    def largest(limit_bytes: int) -> WholeBlocks:
        spare = min(limit_bytes - _non_kv_bytes(plan, index) for index in range(len(plan.stages)))
        return largest_fitting(spare, 0, per_block)

    pool = WholeBlocks(num_blocks=plan.num_blocks, bytes_per_block=per_block)
    return FittingValues(
        same_pool=pool,
        to_requested_limit=largest(requested - reserved),
        to_gpu_limit=largest(deployment.free_bytes - reserved),
        max_model_len=longest_request(plan),
        gpu_memory_utilization=largest_utilization(
            deployment.total_bytes, deployment.free_bytes + deployment.externally_held_bytes
        ),
        suggested_vllm=_suggested_vllm(plan),
    )


def _non_kv_bytes(plan: DeploymentPlan, stage_index: int) -> int:
    """Everything beside the pool on a GPU of the stage, graphs counted once whether they are reserved or not."""
    stage = plan.stages[stage_index]
    return stage.ledger.non_kv_bytes + (stage.unreserved_graphs.num_bytes if stage.unreserved_graphs else 0)


def longest_request(plan: DeploymentPlan) -> int | None:
    """The longest request that the usable blocks serve, whatever length was asked for; None if there is no bound."""
    pool = plan.pool
    shards = plan.deployment.decode_context_parallel_size
    most = max(group.tokens_per_block(shards) for group in pool.groups) * max(pool.num_usable_blocks, 1) + 1
    longest = largest_max_model_len(
        pool.groups, attrs.evolve(pool.limits, max_model_len=most), max(pool.num_usable_blocks, 0)
    )
    return None if longest == most else longest


def _suggested_vllm(plan: DeploymentPlan) -> KVBytesSuggestion:
    stage = plan.bottleneck_stage
    reserved = sum_bytes(stage.ledger.non_kv_rows, RowRole.GRAPHS)
    graphs = reserved + (stage.unreserved_graphs.num_bytes if stage.unreserved_graphs else 0)
    return stage.ledger.suggested_by_vllm(graphs)
