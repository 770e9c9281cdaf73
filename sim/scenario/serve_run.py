"""A live server from the options of `kvledger serve`: model, pool, engine, endpoints, and an orderly end."""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs

from ...core.errors import InputError
from ...core.quantities import parse_bytes
from .plan_question import parse_max_model_len

if TYPE_CHECKING:
    from ...backends.serving.engine.live_engine import LiveEngine
    from ...backends.serving.engine.options import EngineOptions
    from ...backends.serving.engine.recording import LiveRecording
    from ...backends.serving.http.limits import RequestLimits
    from ...backends.serving.http.process import ServingProcess
    from ...backends.serving.model.sizing import SizedEngine
    from ...backends.sinks.log.flush_policy import FlushPolicy

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
    kv_cache_dtype: str
    kv_cache_memory_bytes: str | None
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float | None
    enforce_eager: bool
    cudagraph_capture_sizes: str | None
    attention_packages: bool
    max_model_len: str | None
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
    _quieten_progress()
    from ...backends.serving.http.process import listening_socket

    with ExitStack() as opened:
        # Before the model is loaded, so that a port that is taken is known at once.
        listener = opened.enter_context(listening_socket(options.host, options.port))
        port = listener.getsockname()[1]
        process = _prepared(options, opened, on_started=lambda: _say_where(options, port))
        process.run(sockets=[listener])
    return _say_how_it_ended(options, process.engine)


def _check(options: ServeOptions) -> None:
    if options.log is None and options.log_flush is not None:
        raise InputError(f"--log-flush {options.log_flush} has no effect without --log; leave it out")
    for package in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"serving needs {package}: pip install 'kvledger[serve]'")
    if options.log is not None:
        from ..traces.event_log import need_log_libraries

        need_log_libraries()


def _prepared(options: ServeOptions, opened: ExitStack, on_started: Callable[[], None]) -> "ServingProcess":
    """Everything up to the first request. What can be refused without the model is refused before it is loaded."""
    from ...backends.serving.engine.live_engine import LiveEngine
    from ...backends.serving.http.metrics import ServingMetrics
    from ...backends.serving.http.process import ProcessSettings, ServingProcess
    from ...backends.serving.http.prompt_encoder import PromptEncoder
    from ...backends.serving.http.server import OpenAIServer, ServerSettings
    from ...backends.serving.model.loading import load_model
    from ...backends.serving.model.sizing import size_engine
    from ...backends.sinks.log.flush_policy import FlushPolicy

    engine_options, limits = _engine_options(options), _limits(options)
    flush = FlushPolicy.parse(options.log_flush or "50ms")
    process_settings = ProcessSettings(
        drain_timeout_s=options.drain_timeout,
        stall_timeout_s=options.stall_timeout,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
    )
    device = _device(options.device)
    _say(f"Loading {options.model} on {device}")
    sized = size_engine(
        lambda: load_model(options.model, device=device, dtype=options.dtype, chat_template=options.chat_template),
        engine_options,
        device=device,
    )
    for line in sized.lines():
        _say(line)
    loaded = sized.loaded
    settings = ServerSettings(
        model_names=options.served_model_name or (loaded.name,),
        limits=limits,
        max_queued_requests=options.max_queued_requests,
        isolates_api_keys=options.isolate_api_keys,
    )
    metrics = ServingMetrics(settings.model_names[0], sized.allocator.max_model_len)
    engine = LiveEngine(
        sized.runner,
        allocator=sized.allocator,
        scheduler=sized.scheduler,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        observers=[metrics.step],
        recording=_recording(options, flush, sized),
        max_queued_requests=options.max_queued_requests,
        seed=options.seed,
        on_request_ended=metrics.ended,
    )
    opened.callback(engine.shutdown, drain=False)  # harmless where the process has done it
    metrics.watch(engine)
    encoder = PromptEncoder.beside(loaded.tokenizer, sized.runner.vocab_size)
    return ServingProcess(OpenAIServer(engine, encoder, metrics, settings), process_settings, on_started)


def _engine_options(options: ServeOptions) -> "EngineOptions":
    from ...backends.serving.engine.options import EngineOptions

    memory = options.kv_cache_memory_bytes
    return EngineOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=None if options.max_model_len is None else parse_max_model_len(options.max_model_len),
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory_bytes=None if memory is None else parse_bytes(memory, "--kv-cache-memory-bytes"),
        num_gpu_blocks_override=options.num_gpu_blocks_override,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        cudagraph_capture_sizes=_capture_sizes(options.cudagraph_capture_sizes),
        attention_packages=options.attention_packages,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        policy=options.scheduling_policy,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        data_parallel_size=options.data_parallel_size,
    )


def _capture_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InputError(
            f"--cudagraph-capture-sizes {text!r}: give numbers of requests with commas between them, such as 1,2,4,8"
        ) from None


def _limits(options: ServeOptions) -> "RequestLimits":
    from ...backends.serving.http.limits import RequestLimits

    in_engine = options.max_num_seqs + options.max_queued_requests
    return RequestLimits(
        max_request_bytes=parse_bytes(options.max_request_bytes, "--max-request-bytes"),
        body_timeout_s=options.body_timeout,
        max_open_requests=options.max_open_requests or in_engine + OPEN_BESIDE_ENGINE,
        api_keys=options.api_key,
    )


def _recording(options: ServeOptions, flush: "FlushPolicy", sized: "SizedEngine[Any]") -> "LiveRecording | None":
    if options.log is None:
        return None
    from ...backends.serving.engine.recording import LiveRecording

    graphs = sized.runner.graphs
    facts = {"model": options.model, "cudagraph_capture_sizes": [] if graphs is None else list(graphs.sizes)}
    return LiveRecording.create(
        options.log, flush=flush, allocator=sized.allocator, scheduler=sized.scheduler, facts=facts
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _quieten_progress() -> None:
    """Bars of loading belong on a terminal. The library that draws them reads this once, when it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def _say(line: str) -> None:
    print(line, flush=True)


def _say_where(options: ServeOptions, port: int) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    if not options.host.startswith(LOOPBACK) and not options.api_key:
        _say(f"WARNING: {options.host} can be reached from elsewhere, and no --api-key is asked for")
    if options.api_key:
        shares = "no cached prefixes" if options.isolate_api_keys else "cached prefixes"
        _say(f"API keys: {len(options.api_key)}; clients with different ones share {shares}")
    _say(
        f"Bounds: {options.max_num_seqs:,} requests run, {options.max_queued_requests:,} wait (then 429); bodies of "
        f"{options.max_request_bytes} (then 413)"
    )
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
