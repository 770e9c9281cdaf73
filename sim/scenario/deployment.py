"""From a scenario to the deployment to plan, with a sentence for every figure that was assumed."""

import sys
from pathlib import Path
from typing import Any

import attrs

from ...core.deployment.deployment import Deployment, GivenMemory
from ...core.deployment.estimates import EstimateConstants, reserves_graph_memory
from ...core.deployment.startup_log import StartupLog, calibrated_rows, read_startup_log
from ...core.errors import InputError
from ...core.memory.budget import BudgetSemantics, requested_bytes
from ...core.memory.ledger import LedgerRow
from ...core.models.drafts import drafts_for
from ...core.models.geometry import ModelGeometry, load_geometry
from ...core.models.weights import scheme_by_name
from ...core.planner.groups import group_layers
from ...core.planner.layout import KVCacheLayout
from ...core.quantities import format_bytes, parse_bytes
from ..latency.devices import find_device
from .defaults import described, engine_defaults
from .options import spelled
from .scenario import Scenario

DRAFT_OPTIONS = ("speculative_method", "num_draft_layers")
# Fields of a scenario that a deployment has under the same name, with the same meaning.
UNCHANGED = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "dtype", "block_size"),
    *("disable_hybrid_kv_cache_manager", "enable_prefix_caching", "enforce_eager", "kv_cache_memory_bytes"),
    *("num_gpu_blocks_override", "max_total_tokens", "strict_startup", "validate"),
)
# Rows of the ledger that a scenario may give in bytes.
GIVEN_ROWS = ("weights", "non_torch", "workspace", "encoder", "activation", "graph")


@attrs.frozen(kw_only=True)
class PlanQuestion:
    """A deployment to plan, the name of its device, a sentence for every figure that was not typed, and warnings."""

    deployment: Deployment
    device_name: str
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def read_question(scenario: Scenario) -> PlanQuestion:
    """The deployment that a scenario describes. Raises InputError: something is missing, unknown or contradictory."""
    if scenario.model is None:
        raise InputError("no model is given; give --model with a built-in name or the path of a config.json")
    if scenario.enforce_eager and scenario.graph_bytes is not None:
        raise InputError("--enforce-eager captures no CUDA graphs, so --graph-bytes has no effect; give one of them")
    geometry = load_geometry(scenario.model)
    defaults = engine_defaults(scenario)
    scenario = scenario.evolve(**defaults)
    assumptions = [f"{text} (the engine's default)" for text in described(defaults)]
    device_name, total_bytes, cuda_capability = _device(scenario, assumptions)
    free_bytes = scenario.free_memory
    if free_bytes is None:
        free_bytes = total_bytes
        assumptions.append("all of the device is free before the engine starts (--free-memory)")
    semantics, fraction = _budget(scenario)
    reserve_graphs = _reserve_graphs(scenario, assumptions)
    log = None if scenario.startup_log is None else read_log(scenario.startup_log)
    if (own := geometry.default_max_model_len) is not None and scenario.max_model_len is None:
        assumptions.append(f"--max-model-len {own:,}, what the model was made for")
    elif own is not None and scenario.max_model_len == -1:
        assumptions.append(f"--max-model-len auto: the longest that fits, up to the model's own {own:,}")
    if scenario.mamba_cache_mode not in (None, "none", "align", "all"):
        raise InputError(f"--mamba-cache-mode {scenario.mamba_cache_mode!r}; give none, align or all")
    mode: Any = scenario.mamba_cache_mode
    layout, layouts = scenario.kv_cache_layout or KVCacheLayout.LBNHC.name, KVCacheLayout.__members__
    if layout not in layouts:
        raise InputError(f"--kv-cache-layout {layout!r}; known are {', '.join(layouts)}")
    _refuse_what_vllm_refuses(geometry, scenario)
    deployment = Deployment(
        geometry=geometry,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        utilization=fraction,
        semantics=semantics,
        # One step per pipeline stage, and one that is decided while they run.
        max_concurrent_batches=scenario.pipeline_parallel_size + bool(scenario.async_scheduling),
        cuda_capability=cuda_capability,
        quantization=None if scenario.quantization is None else scheme_by_name(scenario.quantization),
        ignore_config_quantization=scenario.quantization == "none",
        drafts=drafts_for(
            geometry,
            scenario.num_speculative_tokens,
            method=scenario.speculative_method,
            num_layers=scenario.num_draft_layers,
            model=None if scenario.draft_model is None else load_geometry(scenario.draft_model),
        ),
        state_cache_mode=mode,
        layout=layouts[layout],
        reserve_graph_memory=reserve_graphs,
        externally_held_bytes=scenario.externally_held_bytes or 0,
        frontend_reservation_bytes=scenario.frontend_reservation_bytes or 0,
        given=GivenMemory(**{f"{row}_bytes": getattr(scenario, f"{row}_bytes") for row in GIVEN_ROWS}),
        measured=_measured(log, scenario, requested_bytes(total_bytes, fraction), semantics, reserve_graphs),
        constants=_constants(scenario.assume),
        **{name: getattr(scenario, name) for name in UNCHANGED},
    )
    if scenario.kv_cache_layout is None:
        deployment = _with_layout(deployment, assumptions)
    assumptions.extend(_derived(deployment))
    return PlanQuestion(
        deployment=deployment,
        device_name=device_name,
        assumptions=tuple(assumptions),
        warnings=() if log is None else log.warnings,
    )


def _refuse_what_vllm_refuses(geometry: ModelGeometry, scenario: Scenario) -> None:
    heads, ranks = geometry.num_attention_heads, scenario.tensor_parallel_size
    if heads is not None and heads % ranks:
        raise InputError(
            f"--tensor-parallel-size {ranks} does not divide the {heads} attention heads of {geometry.name}, so vLLM"
            " refuses to start"
        )
    own, wanted = geometry.longest_request, scenario.max_model_len
    if own is not None and wanted is not None and wanted > own:
        raise InputError(
            f"--max-model-len {wanted:,} is beyond the {own:,} tokens that {geometry.name} was made for, so vLLM"
            " refuses to start"
        )


def _device(scenario: Scenario, assumptions: list[str]) -> tuple[str, int, int | None]:
    total = scenario.total_memory
    if scenario.gpu is None and total is None:
        raise InputError(
            "no device is given; give --gpu with a preset (H100, A100-80GB, L4, ...) or --total-memory with what the"
            " driver reports, e.g. --total-memory 79.19GiB"
        )
    if scenario.gpu is None:
        return "device", total or 0, None
    device = find_device(scenario.gpu)
    if device.is_described:
        assumptions.append(f"{device.name} by the figures of {scenario.gpu}, not calibrated: {device.figures_source}")
    if total is not None:
        return device.name, total, device.cuda_capability
    assumptions.append(f"{device.name} reports {format_bytes(device.total_bytes)} in total: {device.total_source}")
    return device.name, device.total_bytes, device.cuda_capability


def _budget(scenario: Scenario) -> tuple[BudgetSemantics, float]:
    given = {
        BudgetSemantics.OF_TOTAL: scenario.gpu_memory_utilization,
        BudgetSemantics.STATIC_FRACTION: scenario.mem_fraction_static,
        BudgetSemantics.OF_FREE: scenario.free_gpu_memory_fraction,
    }
    named = [(semantics, value) for semantics, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(
            "--gpu-memory-utilization, --mem-fraction-static and --free-gpu-memory-fraction mean different things; give"
            " one of them"
        )
    return named[0]


def _reserve_graphs(scenario: Scenario, assumptions: list[str]) -> bool:
    if scenario.reserve_graph_memory is not None:
        if scenario.engine_version is not None and scenario.reserve_graph_memory != reserves_graph_memory(
            scenario.engine_version
        ):
            raise InputError(
                f"--engine-version {scenario.engine_version} and --reserve-graph-memory/--no-reserve-graph-memory"
                " contradict each other; give one of them"
            )
        return scenario.reserve_graph_memory
    if scenario.engine_version is not None:
        return reserves_graph_memory(scenario.engine_version)
    if not scenario.enforce_eager:
        assumptions.append("graph memory is set aside, as vLLM does since 0.21 (--engine-version)")
    return True


def _with_layout(deployment: Deployment, assumptions: list[str]) -> Deployment:
    """The deployment with blocks outermost, where its layers' pages fit no other layout."""
    specs = deployment.layer_specs()
    try:
        group_layers(specs, deployment.layout, deployment.hybrid_manager_is_off)
    except InputError:
        packed = attrs.evolve(deployment, layout=KVCacheLayout.BLNHC)
        group_layers(specs, packed.layout, packed.hybrid_manager_is_off)
        assumptions.append("--kv-cache-layout BLNHC, since the pages of some layers fit no other")
        return packed
    return deployment


def read_log(path: str) -> StartupLog:
    """A start-up log from a file, or from standard input (`-`).

    Raises InputError: it cannot be read, or holds none of the known lines.
    """
    if path == "-":
        return read_startup_log(sys.stdin, "standard input")
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    return read_startup_log(text.splitlines(), path)


def _measured(
    log: StartupLog | None,
    scenario: Scenario,
    requested: int,
    semantics: BudgetSemantics,
    reserve_graphs: bool,
) -> tuple[LedgerRow, ...] | None:
    if log is None:
        return None
    given = [name for name in GIVEN_ROWS if getattr(scenario, f"{name}_bytes") is not None]
    if given:
        option = f"--{given[0].replace('_', '-')}-bytes"
        raise InputError(f"{option} and --startup-log both say what a row takes; give one of them")
    return calibrated_rows(
        log,
        requested,
        reserve_graph_memory=reserve_graphs,
        only_resident=semantics is BudgetSemantics.STATIC_FRACTION,
    )


def _constants(assumed: tuple[str, ...]) -> EstimateConstants:
    constants = EstimateConstants()
    for text in assumed:
        name, _, value = text.partition("=")
        known = [field.name for field in attrs.fields(EstimateConstants) if not field.name.endswith("_range")]
        if name not in known:
            raise InputError(f"--assume {text!r}: known are {', '.join(known)}, e.g. --assume {known[1]}=32")
        number = parse_bytes(value, f"--assume {name}")
        constants = attrs.evolve(constants, **{name: number})
    return constants


def _derived(deployment: Deployment) -> list[str]:
    geometry = deployment.geometry
    out: list[str] = []
    if geometry.from_class:
        out.append(f"{', '.join(geometry.from_class)}: left out of the config, so as the architecture's class has it")
    if deployment.drafts is not None:
        out.append(spelled(deployment.drafts.assumption(), DRAFT_OPTIONS))
    out.extend(spelled(note, ("kv_cache_dtype",)) for note in deployment.cache_notes)
    block_size, why = deployment.resolved_block_size()
    if deployment.block_size != block_size:
        out.append(f"blocks of {block_size} tokens: {why}")
    if deployment.dtype is None and geometry.dtype is not None:
        out.append(f"--dtype {geometry.dtype}, from the model's config")
    if deployment.scheme is not None and deployment.quantization is None:
        out.append(f"weights are {deployment.scheme.name}, from the model's config")
    if deployment.hybrid_manager_is_off and deployment.disable_hybrid_kv_cache_manager is None:
        out.append("layers with chunks are sized like full ones, as vLLM does by default for this architecture")
    if geometry.has_states and deployment.state_cache_mode is None:
        mode = "align" if deployment.enable_prefix_caching else "none"
        out.append(f"--mamba-cache-mode {mode}, as prefix caching is {'on' if mode == 'align' else 'off'}")
    return out
