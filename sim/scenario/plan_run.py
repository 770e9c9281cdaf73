"""What `kvledger plan` does with its options: plan, diagnose, count users, and print; or explain two lines of a log."""

from collections.abc import Sequence
from typing import Any

import attrs

from ...core.deployment.deployment import DEFAULT_BLOCK_SIZE
from ...core.deployment.diagnosis import (
    Diagnosis,
    free_memory_but_startup_fails,
    one_request_does_not_fit,
    pool_smaller_than_expected,
    raising_utilization_gained_little,
)
from ...core.deployment.plan import DeploymentPlan, plan_deployment
from ...core.deployment.startup_log import GibFigure, PoolExplanation, StartupLog, explain_pool
from ...core.errors import InputError
from ...core.memory.budget import MemoryCondition, neighbour_warnings
from ...core.models.geometry import load_geometry
from ...core.planner.parallel import tensor_parallel_layers
from ...core.planner.report import capacity_mix
from ..report.console import print_json
from .plan_question import PlanOptions, PlanQuestion, read_log, read_question


@attrs.frozen(kw_only=True)
class PlanExtras:
    """What is asked beside the plan itself."""

    neighbour_utilization: tuple[float, ...]
    logged_memory: str | None
    logged_tokens: str | None
    expect_num_gpu_blocks: int | None
    compare_utilization: float | None
    context_lengths: str
    context_mix: str | None
    explain: bool
    json: bool


def run_plan(options: PlanOptions, extras: PlanExtras) -> bool:
    """Print the answer; True if it is yes.

    Raises:
        InputError: something is missing, unknown or contradictory.
    """
    if _asks_for_explanation(options, extras):
        _print_explanation(options, extras)
        return True
    question = read_question(options)
    plan = plan_deployment(question.deployment)
    capacity = capacity_mix(plan.pool, _lengths(extras.context_lengths)).rows
    diagnoses = _diagnoses(question, plan, extras)
    warnings = (*plan.warnings, *_neighbour_warnings(question, extras))
    mix = None if extras.context_mix is None else _mix_as_dict(plan, extras.context_mix)
    if extras.json:
        from ..report.plan import plan_payload

        document = plan_payload(question, plan, capacity, diagnoses, warnings)
        print_json(document if mix is None else {**document, "context_mix": mix})
        return plan.fits
    from ..report.plan_tables import print_mix, print_plan

    print_plan(question, plan, capacity, diagnoses, warnings, explain=extras.explain)
    if mix is not None:
        print_mix(extras.context_mix or "", mix["users"])
    return plan.fits


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise InputError(f"--context-lengths {text!r}: give token counts separated by commas, e.g. 2048,8192")
    return tuple(int(part) for part in parts)


def _mix_as_dict(plan: DeploymentPlan, text: str) -> dict[str, Any]:
    shares: dict[int, float] = {}
    for part in text.split(","):
        length, _, share = part.strip().partition(":")
        try:
            shares[int(length)] = float(share)
        except ValueError as error:
            raise InputError(f"--context-mix {part!r}: give tokens:share, e.g. 2048:0.8,32768:0.2") from error
    too_long = [length for length in shares if length > plan.pool.max_model_len]
    if too_long:
        raise InputError(
            f"--context-mix: a context of {max(too_long):,} tokens is longer than max_model_len"
            f" {plan.pool.max_model_len:,}"
        )
    users = capacity_mix(plan.pool, sorted(shares), shares).users_in_mix or 0
    return {"shares": [list(pair) for pair in shares.items()], "users": users * plan.deployment.data_parallel_size}


def _diagnoses(question: PlanQuestion, plan: DeploymentPlan, extras: PlanExtras) -> tuple[Diagnosis, ...]:
    out: list[Diagnosis] = []
    if extras.expect_num_gpu_blocks is not None and extras.expect_num_gpu_blocks > plan.num_blocks:
        out.append(pool_smaller_than_expected(plan, extras.expect_num_gpu_blocks))
    if extras.compare_utilization is not None:
        higher = plan_deployment(attrs.evolve(question.deployment, utilization=extras.compare_utilization))
        out.append(raising_utilization_gained_little(plan, higher))
    if plan.startup_refusal is not None and plan.startup_refusal.condition is MemoryCondition.FREE_BELOW_REQUESTED:
        out.append(free_memory_but_startup_fails(question.deployment))
    elif plan.refusal is not None:
        out.append(one_request_does_not_fit(plan))
    return tuple(out)


def _neighbour_warnings(question: PlanQuestion, extras: PlanExtras) -> Sequence[str]:
    if not extras.neighbour_utilization:
        return ()
    return neighbour_warnings([question.deployment.utilization, *extras.neighbour_utilization])


def _asks_for_explanation(options: PlanOptions, extras: PlanExtras) -> bool:
    """Whether a log is to be explained rather than used: no device is named, so nothing can be planned."""
    if (extras.logged_memory is None) != (extras.logged_tokens is None):
        raise InputError("--logged-memory and --logged-tokens belong together; give both")
    if extras.logged_memory is not None:
        return True
    return options.startup_log is not None and options.gpu is None and options.total_memory is None


def _logged_lines(options: PlanOptions, extras: PlanExtras) -> StartupLog:
    if options.startup_log is not None:
        return read_log(options.startup_log)
    memory, tokens = extras.logged_memory or "", extras.logged_tokens or ""
    figure = memory.lower().removesuffix("gib").removesuffix("gb").strip()
    count = tokens.lower().removesuffix("tokens").replace(",", "").strip()
    if not figure.replace(".", "", 1).isdigit():
        raise InputError(f"--logged-memory {memory!r}: give the GiB figure as it was printed, e.g. 41.73")
    if not count.isdigit():
        raise InputError(f"--logged-tokens {tokens!r}: give the tokens as they were printed, e.g. 261,648")
    return attrs.evolve(StartupLog(), available=GibFigure(text=figure), kv_cache_tokens=int(count))


def _print_explanation(options: PlanOptions, extras: PlanExtras) -> None:
    log = _logged_lines(options, extras)
    if log.available is None or log.kv_cache_tokens is None:
        raise InputError(
            "the log lacks 'Available KV cache memory' or 'GPU KV cache size', which an explanation needs; to calibrate"
            " a plan with the rest of it, give --model and --gpu as well"
        )
    block_size = options.block_size or DEFAULT_BLOCK_SIZE
    page_size_bytes, num_layers = _page_of_model(options, block_size)
    found = explain_pool(log.available, log.kv_cache_tokens, block_size, page_size_bytes)
    if extras.json:
        print_json(explanation_payload(found, num_layers))
        return
    from ..report.plan_tables import print_explanation

    print_explanation(found)


def explanation_payload(found: PoolExplanation, num_layers: int | None) -> dict[str, Any]:
    """What two lines of a log fix, for --json."""
    return {
        "num_gpu_blocks": found.num_blocks,
        "block_size": found.block_size,
        "bytes_per_block_range": [found.low_bytes_per_block, found.high_bytes_per_block],
        "is_whole_number_of_layers": found.is_whole,
        "page_size_bytes": found.page_size_bytes,
        "num_layers_of_model": num_layers,
        "candidates": [str(candidate) for candidate in found.candidates],
        "sentences": list(found.sentences()),
    }


def _page_of_model(options: PlanOptions, block_size: int) -> tuple[int | None, int | None]:
    """The page of one layer of the model asked about, on one rank; None without a model or if its pages differ."""
    if options.model is None:
        return None, None
    geometry = load_geometry(options.model)
    specs = tensor_parallel_layers(
        geometry.layer_specs(block_size, options.kv_cache_dtype), options.tensor_parallel_size
    )
    pages = {spec.page_size_bytes for spec in specs.values()}
    return (pages.pop() if len(pages) == 1 else None), geometry.num_hidden_layers
