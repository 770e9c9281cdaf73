"""Finds the smallest change of one parameter that makes a deployment acceptable, and the largest values that work.

Every remedy is tried before it is offered: it is a deployment that was planned and passed.
"""

from collections.abc import Callable
from typing import Any

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
    """The smallest change of one parameter that works."""

    parameter: str  # vLLM's name of it, `gpu_memory_utilization`
    value: int | float | str | None  # the value to set; None for a switch to turn on
    num_blocks: int  # size of the pool with it
    cost: str  # what the change takes away


def find_remedies(deployment: Deployment, accepts: Accepts) -> tuple[Remedy, ...]:
    """Every parameter that alone makes the plan acceptable, with its smallest change."""
    finders = (
        _max_model_len,
        _utilization,
        _batched_tokens,
        _num_seqs,
        _graphs,
        _cache_dtype,
        _weights,
        _tensor_parallel,
        _pinned_bytes,
    )
    found = (finder(deployment, accepts) for finder in finders)
    return tuple(remedy for remedy in found if remedy is not None)


def startup_remedies(deployment: Deployment, largest_utilization: float) -> tuple[Remedy, ...]:
    """What lets an engine start beside the memory that others hold: a smaller request, or a pinned pool."""
    found: list[Remedy | None] = []
    if largest_utilization > 0:
        smaller = _accepted(deployment, _fits, utilization=largest_utilization)
        cost = "takes everything that is free"
        found.append(_remedy("gpu_memory_utilization", smaller, largest_utilization, cost))
    found.append(_pinned_bytes(deployment, _fits))
    return tuple(remedy for remedy in found if remedy is not None)


def try_plan(deployment: Deployment) -> DeploymentPlan | None:
    """The plan, or None if the changed values contradict each other."""
    try:
        return plan_deployment(deployment)
    except InputError:
        return None


def _fits(plan: DeploymentPlan) -> bool:
    return plan.fits


def _accepted(deployment: Deployment, accepts: Accepts, **changes: Any) -> DeploymentPlan | None:
    """The plan of the changed deployment, if the engine starts and the plan is accepted."""
    plan = try_plan(attrs.evolve(deployment, **changes))
    return plan if plan is not None and plan.startup_refusal is None and accepts(plan) else None


def _remedy(parameter: str, plan: DeploymentPlan | None, value: int | float | str | None, cost: str) -> Remedy | None:
    return None if plan is None else Remedy(parameter=parameter, value=value, num_blocks=plan.num_blocks, cost=cost)


def _largest(low: int, high: int, plan_of: Callable[[int], DeploymentPlan | None]) -> tuple[int, DeploymentPlan | None]:
    """The largest value in [low, high] with a plan, if all smaller ones have one too; (0, None) if there is none."""
    best: tuple[int, DeploymentPlan | None] = (0, None)
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
    length, plan = _largest(
        1, deployment.wanted_max_model_len - 1, lambda length: _accepted(deployment, accepts, max_model_len=length)
    )
    return _remedy("max_model_len", plan, length, "longer requests are refused")


def _utilization(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    """Smallest larger utilization, in steps of 0.001; the start-up check is part of the plan."""
    if deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None:
        return None

    def plan_of(steps: int, accepts: Accepts) -> DeploymentPlan | None:
        return _accepted(deployment, accepts, utilization=steps / UTILIZATION_STEPS)

    # Too large a request fails the start-up check, so acceptance is searched only where that passes.
    first = int(deployment.utilization * UTILIZATION_STEPS) + 1
    most, plan = _largest(first, UTILIZATION_STEPS, lambda steps: plan_of(steps, lambda _: True))
    if plan is None:
        return None
    below, plan = _largest(
        UTILIZATION_STEPS - most, UTILIZATION_STEPS - first, lambda below: plan_of(UTILIZATION_STEPS - below, accepts)
    )
    value = (UTILIZATION_STEPS - below) / UTILIZATION_STEPS
    return _remedy("gpu_memory_utilization", plan, value, "less is left for graphs, fragmentation and neighbours")


def _batched_tokens(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    """Activations follow the tokens of a step (A02); a given figure is scaled in proportion."""
    if deployment.measured is not None:
        return None
    activation_bytes = deployment.given.activation_bytes

    def plan_of(tokens: int) -> DeploymentPlan | None:
        given = deployment.given
        if activation_bytes is not None:
            scaled = activation_bytes * tokens // deployment.max_num_batched_tokens
            given = attrs.evolve(given, activation_bytes=scaled)
        return _accepted(deployment, accepts, max_num_batched_tokens=tokens, given=given)

    tokens, plan = _largest(SMALLEST_STEP_TOKENS, deployment.max_num_batched_tokens - 1, plan_of)
    assumed = " (if activations are in proportion to it)" if activation_bytes is not None else ""
    return _remedy("max_num_batched_tokens", plan, tokens, f"prefill takes more steps{assumed}")


def _num_seqs(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.measured is not None or deployment.given.activation_bytes is not None:
        return None
    count, plan = _largest(
        1, deployment.max_num_seqs - 1, lambda count: _accepted(deployment, accepts, max_num_seqs=count)
    )
    return _remedy("max_num_seqs", plan, count, "fewer requests decode at once")


def _graphs(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.enforce_eager or not deployment.reserve_graph_memory or deployment.measured is not None:
        return None
    given = attrs.evolve(deployment.given, graph_bytes=None)
    plan = _accepted(deployment, accepts, enforce_eager=True, given=given)
    return _remedy("enforce_eager", plan, None, "decode steps launch kernel by kernel")


def _cache_dtype(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.kv_cache_dtype != "auto" and "8" in deployment.kv_cache_dtype:
        return None
    plan = _accepted(deployment, accepts, kv_cache_dtype="fp8")
    return _remedy("kv_cache_dtype", plan, "fp8", "keys and values lose precision")


def _weights(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    if deployment.scheme is not None or deployment.given.weights_bytes is not None or deployment.measured is not None:
        return None
    plan = _accepted(deployment, accepts, quantization=quantization_schemes()["fp8"])
    return _remedy("quantization", plan, "fp8", "weights lose precision")


def _tensor_parallel(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    size = minimum_tensor_parallel_size(deployment, accepts)
    if size is None or size <= deployment.tensor_parallel_size:
        return None
    plan = plan_deployment(attrs.evolve(deployment, tensor_parallel_size=size))
    cost = f"{size // deployment.tensor_parallel_size}x the GPUs of this engine"
    return _remedy("tensor_parallel_size", plan, size, cost)


def minimum_tensor_parallel_size(deployment: Deployment, accepts: Accepts) -> int | None:
    """The smallest power of two of GPUs whose plan is accepted (A17, D05); None if none up to 64 is.

    Rows given or measured for one GPU say nothing about more GPUs; the result is None for them, too.
    """
    if deployment.measured is not None or deployment.given.weights_bytes is not None:
        return None
    heads = deployment.geometry.num_attention_heads or 0
    for size in TENSOR_PARALLEL_SIZES:
        if (
            not heads % size
            and size >= deployment.tensor_parallel_size
            and _accepted(deployment, accepts, tensor_parallel_size=size)
        ):
            return size
    return None


def _pinned_bytes(deployment: Deployment, accepts: Accepts) -> Remedy | None:
    """The pool pinned within the memory that is free on the device, in whole blocks (A14)."""
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
    most = max(limit, 0) // per_block
    below, plan = _largest(
        1, most, lambda below: _accepted(deployment, accepts, kv_cache_memory_bytes=(most + 1 - below) * per_block)
    )
    pinned = (most + 1 - below) * per_block
    cost = f"pins {format_gib(pinned)}; utilization is ignored"
    return _remedy("kv_cache_memory_bytes", plan, pinned, cost)


@attrs.frozen(kw_only=True)
class FittingValues:
    """The largest value of each parameter that works, and what vLLM would suggest (A14)."""

    same_pool: WholeBlocks  # `kv_cache_memory_bytes` that gives the plan's own pool again
    to_requested_limit: WholeBlocks  # the largest within the memory that utilization requests
    to_gpu_limit: WholeBlocks  # the largest within the free memory of the device; a block more is refused at start-up
    max_model_len: int | None  # longest request of this pool; None if windows bound what any request holds
    gpu_memory_utilization: float  # largest that passes the check at start-up
    suggested_vllm: KVBytesSuggestion  # by vLLM: the graph memory twice and 150 MiB off; at least 0


def fitting_values(plan: DeploymentPlan) -> FittingValues:
    """The values for one plan; pools are in whole blocks of the stage with the largest block, so all stages agree."""
    deployment = plan.deployment
    per_block = max(rank.bytes_per_block for rank in plan.pool.ranks)
    requested = min(stage.ledger.budget.requested_bytes for stage in plan.stages)
    reserved = deployment.frontend_reservation_bytes
    ledger = plan.bottleneck_stage.ledger
    reserved_graphs = sum_bytes(ledger.non_kv_rows, RowRole.GRAPHS)

    def largest(limit_bytes: int) -> WholeBlocks:
        # Graphs count once, whether they are set aside or not.
        other = max(stage.ledger.non_kv_bytes + stage.graph_bytes_beside for stage in plan.stages)
        return largest_fitting(limit_bytes - other, 0, per_block)

    suggested = ledger.suggested_by_vllm(reserved_graphs + plan.bottleneck_stage.graph_bytes_beside)
    return FittingValues(
        same_pool=WholeBlocks(num_blocks=plan.num_blocks, bytes_per_block=per_block),
        to_requested_limit=largest(requested - reserved),
        to_gpu_limit=largest(deployment.free_bytes - reserved),
        max_model_len=_longest_request(plan),
        gpu_memory_utilization=largest_utilization(
            deployment.total_bytes, deployment.free_bytes + deployment.externally_held_bytes
        ),
        suggested_vllm=KVBytesSuggestion(
            to_requested_limit_bytes=max(suggested.to_requested_limit_bytes, 0),
            to_gpu_limit_bytes=max(suggested.to_gpu_limit_bytes, 0),
        ),
    )


def _longest_request(plan: DeploymentPlan) -> int | None:
    """The longest request that the usable blocks serve, whatever length was asked for; None if there is no bound."""
    pool = plan.pool
    shards = plan.deployment.decode_context_parallel_size
    most = max(group.tokens_per_block(shards) for group in pool.groups) * max(pool.num_usable_blocks, 1) + 1
    longest = largest_max_model_len(
        pool.groups, attrs.evolve(pool.limits, max_model_len=most), max(pool.num_usable_blocks, 0)
    )
    return None if longest == most else longest
