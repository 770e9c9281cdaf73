"""A live server from the options of `kvledger serve`: model, pool, engine, endpoints, and an orderly end."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs

from ..core.errors import InputError
from ..core.quantities import parse_bytes

if TYPE_CHECKING:
    from ..backends.serving.live_engine import LiveEngine
    from ..backends.serving.recording import LiveRecording
    from ..backends.serving.server import ServerSettings
    from ..backends.serving.serving_process import ServingProcess
    from ..core.allocator_config import AllocatorConfig
    from ..core.scheduler_config import SchedulerConfig

# Requests that may be in the middle of their body or of their answer beside those that the engine holds.
OPEN_BESIDE_ENGINE = 64
LOOPBACK = ("127.", "localhost", "::1")


@attrs.frozen(kw_only=True)
class ServeOptions:
    """The options of the command, by their names."""

    model: str
    served_model_name: tuple[str, ...]
    host: str
    port: int
    api_key: tuple[str, ...] = attrs.field(repr=False)
    isolate_api_keys: bool
    chat_template: str | None
    device: str
    dtype: str
    block_size: int
    kv_cache_memory_bytes: str | None
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    seed: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    max_queued_requests: int
    max_open_requests: int | None
    max_request_bytes: str
    body_timeout: float
    stall_timeout: float
    drain_timeout: float
    log: str | None
    log_flush: str | None
    uvicorn_log_level: str
    disable_uvicorn_access_log: bool


def run_serve(options: ServeOptions) -> bool:
    """Serve until told to end; False if the engine failed.

    Raises:
        InputError: an option that cannot be served with, or a package that is missing.
        DoesNotFitError: no block fits into the memory that was given.
    """
    _check(options)
    from ..backends.serving.serving_process import listening_socket

    with ExitStack() as opened:
        # Before the model is loaded, so that a port that is taken is known at once.
        listener = opened.enter_context(listening_socket(options.host, options.port))
        port = listener.getsockname()[1]
        process = _prepared(options, opened, on_started=lambda: _say_where(options, port))
        process.run(sockets=[listener])
    return _say_how_it_ended(options, process.engine)


def _check(options: ServeOptions) -> None:
    for name in ("tensor", "pipeline", "data"):
        size = getattr(options, f"{name}_parallel_size")
        if size != 1:
            raise InputError(
                f"--{name}-parallel-size {size}: a live engine runs on one device; give 1 (kvledger plan sizes more)"
            )
    if options.log is None and options.log_flush is not None:
        raise InputError(f"--log-flush {options.log_flush} has no effect without --log; leave it out")
    for package in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"serving needs {package}: pip install 'kvledger[serve]'")
    if options.log is not None:
        from .event_log_dir import need_log_libraries

        need_log_libraries()


def _prepared(options: ServeOptions, opened: ExitStack, on_started: Callable[[], None]) -> "ServingProcess":
    """Everything up to the first request."""
    from ..backends.serving.live_engine import LiveEngine
    from ..backends.serving.model_loading import load_model
    from ..backends.serving.prompt_encoder import PromptEncoder
    from ..backends.serving.server import OpenAIServer
    from ..backends.serving.serving_metrics import ServingMetrics
    from ..backends.serving.serving_process import ProcessSettings, ServingProcess

    _quieten_progress()
    device = _device(options.device)
    loaded = load_model(options.model, device=device, dtype=options.dtype, chat_template=options.chat_template)
    runner, allocator, scheduler = _pool(options, loaded, device)
    settings = _server_settings(options, loaded.name)
    metrics = ServingMetrics(settings.model_names[0], allocator.max_model_len)
    engine = LiveEngine(
        runner,
        allocator=allocator,
        scheduler=scheduler,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        observers=[metrics.step],
        recording=_recording(options, allocator, scheduler),
        max_queued_requests=options.max_queued_requests,
        seed=options.seed,
        on_request_ended=metrics.ended,
    )
    opened.callback(engine.shutdown, drain=False)  # harmless where the process has done it
    metrics.watch(engine)
    server = OpenAIServer(engine, PromptEncoder.beside(loaded.tokenizer, runner.vocab_size), metrics, settings)
    process = ProcessSettings(
        drain_timeout_s=options.drain_timeout,
        stall_timeout_s=options.stall_timeout,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
    )
    return ServingProcess(server, process, on_started)


def _server_settings(options: ServeOptions, model_name: str) -> "ServerSettings":
    from ..backends.serving.request_limits import RequestLimits
    from ..backends.serving.server import ServerSettings

    in_engine = options.max_num_seqs + options.max_queued_requests
    return ServerSettings(
        model_names=options.served_model_name or (model_name,),
        limits=RequestLimits(
            max_request_bytes=parse_bytes(options.max_request_bytes, "--max-request-bytes"),
            body_timeout_s=options.body_timeout,
            max_open_requests=options.max_open_requests or in_engine + OPEN_BESIDE_ENGINE,
            api_keys=options.api_key,
        ),
        max_queued_requests=options.max_queued_requests,
        isolates_api_keys=options.isolate_api_keys,
    )


def _recording(
    options: ServeOptions, allocator: "AllocatorConfig", scheduler: "SchedulerConfig"
) -> "LiveRecording | None":
    if options.log is None:
        return None
    from ..backends.serving.recording import LiveRecording
    from ..backends.sinks.flush_policy import FlushPolicy

    return LiveRecording.create(
        options.log,
        flush=FlushPolicy.parse(options.log_flush or "50ms"),
        allocator=allocator,
        scheduler=scheduler,
        facts={"model": options.model},
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _quieten_progress() -> None:
    """Bars of loading belong on a terminal."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _say(line: str) -> None:
    print(line, flush=True)


def _say_where(options: ServeOptions, port: int) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    if not options.host.startswith(LOOPBACK) and not options.api_key:
        _say(f"WARNING: {options.host} can be reached from elsewhere, and no --api-key is asked for")
    if options.api_key:
        shares = "no cached prefixes" if options.isolate_api_keys else "cached prefixes"
        _say(f"API keys: {len(options.api_key)}; clients with different ones share {shares}")
    _say(f"Serving on http://{host}:{port}/v1 (Ctrl+C to end)")


def _say_how_it_ended(options: ServeOptions, engine: "LiveEngine") -> bool:
    stats, pool = engine.stats.scheduler, engine.allocator.pool
    _say(
        f"Ended: {stats.num_finished:,} requests finished, {stats.num_aborted:,} aborted, {stats.num_rejected:,} too "
        f"long; {pool.num_held_blocks:,} of {pool.num_usable_blocks:,} blocks held"
    )
    if options.log is not None:
        _say(f"Log: {options.log} (kvledger log verify {options.log})")
    if engine.failure is not None:
        print(f"kvledger: the engine failed: {type(engine.failure).__name__}: {engine.failure}", file=sys.stderr)
    return engine.failure is None


def _pool(options: ServeOptions, loaded, device: str):
    from ..backends import CudaBackend
    from ..backends.serving import ModelRunner, kv_cache_config, transformers_geometry
    from ..core.allocator_config import AllocatorConfig
    from ..core.allocator_groups import allocator_groups
    from ..core.scheduler_config import SchedulerConfig

    geometry = transformers_geometry(loaded.model)
    plan = kv_cache_config(geometry, num_blocks=options.num_gpu_blocks_override or 100, block_size=options.block_size)
    backend = CudaBackend(device=device, max_num_batched_tokens=options.max_num_batched_tokens)
    backend.initialize(plan)
    runner = ModelRunner(loaded.model, backend)
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_chunked_prefill=options.enable_chunked_prefill,
        policy=options.scheduling_policy,
    )
    allocator = AllocatorConfig(
        num_blocks=plan.num_blocks,
        groups=allocator_groups(plan),
        max_model_len=options.max_model_len or runner.max_model_len or 1,
        max_num_reqs=options.max_num_seqs,
        enable_caching=options.enable_prefix_caching,
        max_in_flight_tokens=options.max_num_batched_tokens,
    )
    return runner, allocator, scheduler
