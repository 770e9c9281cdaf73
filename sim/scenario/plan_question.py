"""From the options of `kvledger plan` to a deployment, with a list of what was assumed and where each figure came
from.
"""

import sys
from pathlib import Path
from typing import Any

import attrs

from ...core.deployment.deployment import Deployment, GivenMemory
from ...core.deployment.estimates import EstimateConstants, reserves_graph_memory
from ...core.deployment.startup_log import StartupLog, calibrated_rows, read_startup_log
from ...core.errors import InputError
from ...core.memory.budget import BudgetSemantics, requested_bytes
from ...core.models.geometry import ModelGeometry, load_geometry
from ...core.models.weights import scheme_by_name
from ...core.planner.layout import KVCacheLayout
from ...core.quantities import format_bytes, parse_bytes
from ..latency.devices import find_device

DEFAULT_UTILIZATION = 0.9
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 8192


@attrs.frozen(kw_only=True)
class PlanOptions:
    """The options as typed; None where an option was not given."""

    model: str | None
    gpu: str | None
    total_memory: str | None
    free_memory: str | None
    gpu_memory_utilization: float | None
    mem_fraction_static: float | None
    free_gpu_memory_fraction: float | None
    kv_cache_memory_bytes: str | None
    num_gpu_blocks_override: int | None
    max_total_tokens: int | None
    max_model_len: str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    async_scheduling: bool
    block_size: int | None
    kv_cache_dtype: str
    kv_cache_layout: str
    mamba_cache_mode: str | None
    enable_prefix_caching: bool
    disable_hybrid_kv_cache_manager: bool | None
    dtype: str | None
    quantization: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    enforce_eager: bool
    reserve_graph_memory: bool | None
    engine_version: str | None
    weights_bytes: str | None
    non_torch_bytes: str | None
    workspace_bytes: str | None
    encoder_bytes: str | None
    activation_bytes: str | None
    graph_bytes: str | None
    externally_held_bytes: str | None
    frontend_reservation_bytes: str | None
    startup_log: str | None
    assume: tuple[str, ...]
    strict_startup: bool
    validate: bool


@attrs.frozen(kw_only=True)
class PlanQuestion:
    """A deployment and what stands behind it.

    Attributes:
        deployment: to be planned.
        device_name: as it is shown.
        assumptions: a sentence for every figure that was not typed.
    """

    deployment: Deployment
    device_name: str
    assumptions: tuple[str, ...]


def read_question(options: PlanOptions) -> PlanQuestion:
    """The deployment that the options describe.

    Raises:
        InputError: something is missing, unknown or contradictory.
    """
    if options.model is None:
        raise InputError("no model is given; give --model with a built-in name or the path of a config.json")
    if options.enforce_eager and options.graph_bytes is not None:
        raise InputError(
            "--enforce-eager captures no CUDA graphs, so --graph-bytes has nothing to say; give one of them"
        )
    geometry = load_geometry(options.model)
    assumptions: list[str] = []
    device_name, total_bytes = _device(options, assumptions)
    free_bytes = _bytes(options.free_memory, "--free-memory")
    if free_bytes is None:
        free_bytes = total_bytes
        assumptions.append("all of the device is free before the engine starts (--free-memory)")
    semantics, fraction = _budget(options, assumptions)
    reserve_graphs = _reserve_graphs(options, assumptions)
    max_num_seqs = _or_default(options.max_num_seqs, DEFAULT_MAX_NUM_SEQS, "--max-num-seqs", assumptions)
    max_num_batched_tokens = _or_default(
        options.max_num_batched_tokens, DEFAULT_MAX_NUM_BATCHED_TOKENS, "--max-num-batched-tokens", assumptions
    )
    deployment = Deployment(
        geometry=geometry,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        utilization=fraction,
        semantics=semantics,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        data_parallel_size=options.data_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        max_model_len=_max_model_len(options, geometry, assumptions),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_concurrent_batches=max(options.pipeline_parallel_size, 2 if options.async_scheduling else 1),
        kv_cache_dtype=options.kv_cache_dtype,
        dtype=options.dtype,
        quantization=None if options.quantization is None else scheme_by_name(options.quantization),
        ignore_config_quantization=options.quantization == "none",
        block_size=options.block_size,
        state_cache_mode=_state_cache_mode(options.mamba_cache_mode),
        layout=_layout(options.kv_cache_layout),
        disable_hybrid_kv_cache_manager=options.disable_hybrid_kv_cache_manager,
        enable_prefix_caching=options.enable_prefix_caching,
        enforce_eager=options.enforce_eager,
        reserve_graph_memory=reserve_graphs,
        kv_cache_memory_bytes=_bytes(options.kv_cache_memory_bytes, "--kv-cache-memory-bytes"),
        num_gpu_blocks_override=options.num_gpu_blocks_override,
        max_total_tokens=options.max_total_tokens,
        externally_held_bytes=_bytes(options.externally_held_bytes, "--externally-held-bytes") or 0,
        frontend_reservation_bytes=_bytes(options.frontend_reservation_bytes, "--frontend-reservation-bytes") or 0,
        given=_given(options),
        measured=_measured(options, total_bytes, fraction, reserve_graphs),
        strict_startup=options.strict_startup,
        validate=options.validate,
        constants=_constants(options.assume),
    )
    assumptions.extend(_derived(deployment))
    return PlanQuestion(deployment=deployment, device_name=device_name, assumptions=tuple(assumptions))


def _device(options: PlanOptions, assumptions: list[str]) -> tuple[str, int]:
    total = _bytes(options.total_memory, "--total-memory")
    if options.gpu is None and total is None:
        raise InputError(
            "no device is given; give --gpu with a preset (H100, A100-80GB, L4, ...) or --total-memory with what the"
            " driver reports, e.g. --total-memory 79.19GiB"
        )
    if options.gpu is None:
        return "device", total or 0
    device = find_device(options.gpu)
    if total is not None:
        return device.name, total
    assumptions.append(f"{device.name} reports {format_bytes(device.total_bytes)} in total: {device.total_source}")
    return device.name, device.total_bytes


def _budget(options: PlanOptions, assumptions: list[str]) -> tuple[BudgetSemantics, float]:
    given = {
        BudgetSemantics.OF_TOTAL: options.gpu_memory_utilization,
        BudgetSemantics.STATIC_FRACTION: options.mem_fraction_static,
        BudgetSemantics.OF_FREE: options.free_gpu_memory_fraction,
    }
    named = [(semantics, value) for semantics, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(
            "--gpu-memory-utilization, --mem-fraction-static and --free-gpu-memory-fraction mean different things; give"
            " one of them"
        )
    if named:
        return named[0]
    assumptions.append(f"--gpu-memory-utilization {DEFAULT_UTILIZATION} (the engine's default)")
    return BudgetSemantics.OF_TOTAL, DEFAULT_UTILIZATION


def _reserve_graphs(options: PlanOptions, assumptions: list[str]) -> bool:
    if options.reserve_graph_memory is not None:
        if options.engine_version is not None and options.reserve_graph_memory != reserves_graph_memory(
            options.engine_version
        ):
            raise InputError(
                f"--engine-version {options.engine_version} and --reserve-graph-memory/--no-reserve-graph-memory"
                " contradict each other; give one of them"
            )
        return options.reserve_graph_memory
    if options.engine_version is not None:
        return reserves_graph_memory(options.engine_version)
    if not options.enforce_eager:
        assumptions.append("graph memory is set aside, as vLLM does since 0.21 (--engine-version)")
    return True


def _or_default(value: int | None, default: int, option: str, assumptions: list[str]) -> int:
    if value is not None:
        return value
    assumptions.append(f"{option} {default} (the engine's usual default; activations follow it)")
    return default


def _max_model_len(options: PlanOptions, geometry: ModelGeometry, assumptions: list[str]) -> int | None:
    text = options.max_model_len
    if text is None:
        if geometry.max_position_embeddings is not None:
            assumptions.append(f"--max-model-len {geometry.max_position_embeddings:,}, what the model was made for")
        return None
    return parse_max_model_len(text)


def parse_max_model_len(text: str) -> int:
    """`8192`, `32K` (32,768) and `32k` (32,000) as tokens; -1 for `auto` and `-1`, the longest that fits.

    Raises:
        InputError: none of them.
    """
    if text in ("auto", "-1"):
        return -1
    multiple = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    digits = text[:-1] if multiple > 1 else text
    if not digits.isdigit():
        raise InputError(f"--max-model-len {text!r}: give tokens (8192, 32K for 32,768, 32k for 32,000), or auto")
    return int(digits) * multiple


def _state_cache_mode(mode: str | None) -> Any:
    if mode is not None and mode not in ("none", "align", "all"):
        raise InputError(f"--mamba-cache-mode {mode!r}; give none, align or all")
    return mode


def _layout(name: str) -> KVCacheLayout:
    if name not in KVCacheLayout.__members__:
        raise InputError(f"--kv-cache-layout {name!r}; known are {', '.join(KVCacheLayout.__members__)}")
    return KVCacheLayout[name]


def _given(options: PlanOptions) -> GivenMemory:
    return GivenMemory(
        weights_bytes=_bytes(options.weights_bytes, "--weights-bytes"),
        non_torch_bytes=_bytes(options.non_torch_bytes, "--non-torch-bytes"),
        workspace_bytes=_bytes(options.workspace_bytes, "--workspace-bytes"),
        encoder_bytes=_bytes(options.encoder_bytes, "--encoder-bytes"),
        activation_bytes=_bytes(options.activation_bytes, "--activation-bytes"),
        graph_bytes=_bytes(options.graph_bytes, "--graph-bytes"),
    )


def _bytes(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option)


def read_log(path: str) -> StartupLog:
    """A start-up log from a file, or from standard input (`-`).

    Raises:
        InputError: it cannot be read, or holds none of the known lines.
    """
    if path == "-":
        return read_startup_log(sys.stdin, "standard input")
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    return read_startup_log(text.splitlines(), path)


def _measured(options: PlanOptions, total_bytes: int, fraction: float, reserve_graphs: bool):
    if options.startup_log is None:
        return None
    given = [
        name
        for name in ("weights", "non_torch", "workspace", "encoder", "activation", "graph")
        if getattr(options, f"{name}_bytes") is not None
    ]
    if given:
        option = f"--{given[0].replace('_', '-')}-bytes"
        raise InputError(f"{option} and --startup-log both say what a row takes; give one of them")
    log = read_log(options.startup_log)
    return calibrated_rows(log, requested_bytes(total_bytes, fraction), reserve_graph_memory=reserve_graphs)


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
