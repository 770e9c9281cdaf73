"""Answers four complaints, each with the responsible row, the numbers, and the smallest change of each parameter.

"The pool is smaller than I expected", "raising utilization gained little", "memory is free but start-up fails", "one
request does not fit".
"""

import attrs

from ..errors import InputError
from ..memory.budget import BudgetSemantics, largest_utilization, requested_bytes
from ..memory.ledger import LedgerRow, RowRole, sum_bytes
from ..quantities import format_bytes, format_gib
from .deployment import Deployment
from .plan import DeploymentPlan
from .remedies import Remedy, find_remedies, minimum_tensor_parallel_size, startup_remedies


@attrs.frozen
class Diagnosis:
    """The answer to a complaint."""

    complaint: str
    row: str  # name of the responsible ledger row, or of the parameter that sizes the pool
    row_bytes: int
    # Sentences about the numbers; they name parameters as vLLM does (`gpu_memory_utilization`).
    findings: tuple[str, ...]
    remedies: tuple[Remedy, ...]  # changes that help


def pool_smaller_than_expected(plan: DeploymentPlan, expected_num_blocks: int) -> Diagnosis:
    """Explain why the pool holds fewer than `expected_num_blocks`.

    Raises:
        InputError: it does not.
    """
    if expected_num_blocks <= plan.num_blocks:
        raise InputError(f"{expected_num_blocks:,} blocks were expected and the pool holds {plan.num_blocks:,}")
    stage = plan.bottleneck_stage
    per_block = plan.bytes_per_block
    missing = expected_num_blocks * per_block - max(stage.ledger.available_bytes, 0)
    row = _responsible(stage.ledger.non_kv_rows, missing)
    findings = [
        f"{expected_num_blocks:,} blocks of {per_block:,} B need {format_bytes(expected_num_blocks * per_block)};"
        f" {format_bytes(stage.ledger.available_bytes)} are available, {format_bytes(missing)} less",
        f"the row that explains it is {row.name}: {format_bytes(row.num_bytes)} ({row.source}; {row.formula})",
    ]
    tensor_parallel_size = plan.deployment.tensor_parallel_size
    if tensor_parallel_size > 1 and expected_num_blocks > plan.num_blocks * tensor_parallel_size * 9 // 10:
        findings.append(
            f"the memory of {tensor_parallel_size} tensor-parallel ranks does not add up to more blocks: each rank"
            " holds its heads of every block, so the pool is what one rank holds"
        )
    remedies = find_remedies(plan.deployment, lambda changed: changed.num_blocks >= expected_num_blocks)
    return Diagnosis("the pool is smaller than expected", row.name, row.num_bytes, tuple(findings), remedies)


def _responsible(rows: tuple[LedgerRow, ...], missing: int) -> LedgerRow:
    """The smallest row besides the weights that alone explains the missing bytes; the largest if together they do.

    Else the weights: no other row is large enough to matter.
    """
    others = [row for row in rows if row.name != "weights"]
    explaining = [row for row in others if row.num_bytes >= missing]
    if explaining:
        return min(explaining, key=lambda row: row.num_bytes)
    if others and (sum_bytes(tuple(others)) >= missing or len(others) == len(rows)):
        return max(others, key=lambda row: row.num_bytes)
    return next(row for row in rows if row.name == "weights")


def raising_utilization_gained_little(lower: DeploymentPlan, higher: DeploymentPlan) -> Diagnosis:
    """Explain why the second plan, with a higher utilization, holds hardly more than the first.

    Raises:
        InputError: the second utilization is not higher.
    """
    low, high = lower.deployment, higher.deployment
    if high.utilization <= low.utilization:
        raise InputError(f"utilization {high.utilization:g} is not higher than {low.utilization:g}")
    gained = higher.num_blocks - lower.num_blocks
    findings = [
        f"from gpu_memory_utilization {low.utilization:g} to {high.utilization:g} the pool goes from"
        f" {lower.num_blocks:,} to {higher.num_blocks:,} blocks (+{gained:,})"
    ]
    sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "max_total_tokens")
    pinned = [name for name in sizes if getattr(high, name) is not None and not gained]
    if pinned:
        row, row_bytes = pinned[0], 0
        findings.append(f"{row} {getattr(high, row):,} sizes the pool, so utilization changes nothing")
    else:
        row, row_bytes = _grown_most(lower, higher)
        more = requested_bytes(high.total_bytes, high.utilization) - requested_bytes(low.total_bytes, low.utilization)
        findings.append(
            f"{high.utilization - low.utilization:.3f} of {format_gib(high.total_bytes)} are {format_bytes(more)}, at"
            f" most {more // higher.bytes_per_block:,} blocks of {higher.bytes_per_block:,} B"
        )
        if row_bytes > more // 10:
            findings.append(f"{format_bytes(row_bytes)} of it went to {row}, which grew at the same time")
        else:
            row, row_bytes = "KV cache blocks", more
            findings.append("every byte more went to the pool; its blocks are large, or the step was small")
    return Diagnosis("raising utilization gained little", row, row_bytes, tuple(findings), remedies=())


def _grown_most(lower: DeploymentPlan, higher: DeploymentPlan) -> tuple[str, int]:
    before = {row.name: row.num_bytes for row in lower.bottleneck_stage.ledger.non_kv_rows}
    growth = {row.name: row.num_bytes - before.get(row.name, 0) for row in higher.bottleneck_stage.ledger.non_kv_rows}
    name = max(growth, key=lambda row: growth[row])
    return name, growth[name]


def free_memory_but_startup_fails(deployment: Deployment) -> Diagnosis:
    """Explain why an engine is refused at start-up although memory is free.

    Raises:
        InputError: the requested memory is free, so start-up does not fail for lack of it.
    """
    requested = requested_bytes(deployment.total_bytes, deployment.utilization) - deployment.externally_held_bytes
    if deployment.semantics is BudgetSemantics.OF_FREE or requested <= deployment.free_bytes:
        raise InputError(f"{format_bytes(requested)} are requested and {format_bytes(deployment.free_bytes)} are free")
    held = deployment.total_bytes - deployment.free_bytes
    largest = largest_utilization(deployment.total_bytes, deployment.free_bytes + deployment.externally_held_bytes)
    findings = (
        f"gpu_memory_utilization {deployment.utilization:g} asks for {format_bytes(requested)} of"
        f" {format_gib(deployment.total_bytes)} in total, whatever this model needs",
        f"{format_bytes(deployment.free_bytes)} are free, since {format_bytes(held)} are held by others: short by"
        f" {format_bytes(requested - deployment.free_bytes)}",
        f"largest gpu_memory_utilization that starts: {largest:g}",
    )
    remedies = startup_remedies(deployment, largest)
    return Diagnosis("memory is free but start-up fails", "requested", requested, findings, remedies)


def one_request_does_not_fit(plan: DeploymentPlan) -> Diagnosis:
    """Explain why one request of the longest length does not fit, and what would make it fit.

    Raises:
        InputError: it does.
    """
    if plan.refusal is None:
        raise InputError(f"one request of {plan.pool.max_model_len:,} tokens fits")
    stage = plan.bottleneck_stage
    per_block = plan.bytes_per_block
    missing = (plan.pool.blocks_per_request + 1) * per_block - stage.ledger.available_bytes
    findings = [str(plan.refusal)]
    if stage.ledger.available_bytes <= 0:
        weights = max(stage.ledger.non_kv_rows, key=lambda row: row.num_bytes)
        minimum = minimum_tensor_parallel_size(plan.deployment, lambda changed: changed.fits)
        findings.append(
            f"{weights.name} alone take {format_bytes(weights.num_bytes)} of the"
            f" {format_bytes(stage.ledger.budget.requested_bytes)} requested"
            + (f"; smallest tensor_parallel_size that fits: {minimum}" if minimum else "")
        )
        row = weights
    else:
        row = _responsible(stage.ledger.non_kv_rows, missing)
        findings.append(
            f"the row to look at is {row.name}: {format_bytes(row.num_bytes)} ({row.source}; {row.formula})"
        )
    transient = [other for other in stage.ledger.non_kv_rows if other.role is RowRole.TRANSIENT and other is not row]
    findings.extend(f"{other.name} takes {format_bytes(other.num_bytes)} ({other.formula})" for other in transient)
    remedies = find_remedies(plan.deployment, lambda changed: changed.fits)
    return Diagnosis("one request does not fit", row.name, row.num_bytes, tuple(findings), remedies)
