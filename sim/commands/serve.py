"""`kvledger serve`: an OpenAI-compatible server on the live engine."""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from ...core.errors import InputError
from ..scenario.options import ENGINE, HARDWARE, MODEL, OUTPUT, option, options, whole_numbers
from ..scenario.scenario import Scenario
from .declare import LogOptions, command

if TYPE_CHECKING:
    from ...backends.serving.engine.live_engine import LiveEngine
    from ...backends.serving.engine.options import EngineOptions
    from ...backends.serving.engine.recording import LiveRecording
    from ...backends.serving.engine.sizing import SizedEngine
    from ...backends.serving.http.process import ServingProcess
    from ...backends.sinks.log.flush_policy import FlushPolicy

# Requests that may be in the middle of their body or of their answer beside those that the engine holds.
OPEN_BESIDE_ENGINE = 64
LOOPBACK = ("127.", "localhost", "::1")
DEFAULTS = {"block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
CLIENTS = "Clients"
# Fields of a scenario that a live engine takes; whole numbers that are not given have the defaults above.
OF_THE_ENGINE = (
    *("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization"),
    *("enforce_eager", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"),
    *("enable_chunked_prefill", "scheduling_policy", "tensor_parallel_size", "pipeline_parallel_size"),
    "data_parallel_size",
)


@options
class ServeOptions:
    """The model, its clients, and the engine's options that only a live server has."""

    model: str = option(
        attrs.NOTHING, MODEL, "Folder of a model as transformers saves it, or a GGUF file; nothing is downloaded."
    )
    served_model_name: tuple[str, ...] = option(
        (), CLIENTS, "Name that clients use for the model; its folder's name unless given. Repeatable."
    )
    host: str = option("127.0.0.1", CLIENTS, "Address to listen on; 0.0.0.0 accepts other machines.")
    chat_template: str | None = option(
        None, MODEL, "File with a chat template that replaces the tokenizer's.", metavar="FILE"
    )
    device: str = option("auto", HARDWARE, "Device: auto (a GPU if there is one), cpu, cuda or cuda:1.")
    dtype: str = option("auto", MODEL, "Element type of the weights: auto, float32, bfloat16 or float16.")
    isolate_api_keys: bool = option(True, CLIENTS, "Clients with different API keys share no cached prefixes.")
    cudagraph_capture_sizes: str | None = option(
        None,
        ENGINE,
        "Batch sizes of the decode steps to capture as CUDA graphs (1,2,4,8). Unless given: up to --max-num-seqs.",
        metavar="N,...",
    )
    attention_packages: bool = option(
        False,
        ENGINE,
        "Let FlashAttention and FlashInfer compute attention where they are installed and fit.",
        "--attention-packages",
    )
    seed: int = option(0, ENGINE, "Sampling seed for requests without one.", metavar="SEED")
    max_request_bytes: int = option(4 << 20, CLIENTS, "Largest request body (4MiB); else status 413.", unit="bytes")
    body_timeout: float = option(30.0, CLIENTS, "Seconds that a client may take to send a body.")
    stall_timeout: float = option(60.0, CLIENTS, "Seconds without any data after which a connection is closed.")
    drain_timeout: float = option(
        30.0, CLIENTS, "Seconds that requests may go on after the first Ctrl+C before they are aborted."
    )
    max_queued_requests: int = option(
        1024, CLIENTS, "Requests that may wait for their first step; more are answered with 429.", least=1
    )
    max_open_requests: int | None = option(
        None,
        CLIENTS,
        "Requests whose answer is not sent yet. Unless given: max-num-seqs + max-queued-requests + "
        f"{OPEN_BESIDE_ENGINE}.",
        least=1,
    )
    uvicorn_log_level: str = option("info", OUTPUT, "Log level: critical, error, warning, info, debug or trace.")
    disable_uvicorn_access_log: bool = option(
        False, OUTPUT, "Print no line for each request.", "--disable-uvicorn-access-log"
    )


@command(scenario=OF_THE_ENGINE)
def serve(
    scenario: Scenario,
    asked: ServeOptions,
    recording: LogOptions,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=CLIENTS)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLEDGER_API_KEY",
            show_envvar=True,
            help="Key that clients must send, one of these. Unless given, no key is needed. Repeatable.",
            rich_help_panel=CLIENTS,
        ),
    ] = None,
) -> None:
    """Serve a model over OpenAI's completions and chat API, on the pool and the scheduler that kvledger simulates.

    Example: kvledger serve --model ./SmolLM2-135M-Instruct.Q4_1.gguf --kv-cache-memory-bytes 512MiB
    """
    for package in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"serving needs {package}: pip install 'kvledger[serve]'")
    if not sys.stderr.isatty():  # bars of loading belong on a terminal; their library reads this once, when imported
        os.environ.setdefault("TQDM_DISABLE", "1")
    from ...backends.serving.http.process import listening_socket

    server = _Server(scenario, asked, recording, tuple(api_key or ()))
    with ExitStack() as opened:
        # Before the model is loaded, so that a port that is taken is known at once.
        listener = opened.enter_context(listening_socket(asked.host, port))
        port = listener.getsockname()[1]
        process = _prepared(server, opened, on_started=lambda: _say_where(server, port))
        process.run(sockets=[listener])
    if not _say_how_it_ended(server, process.engine):
        raise typer.Exit(1)


@attrs.frozen
class _Server:
    """Everything that the command was given."""

    scenario: Scenario
    asked: ServeOptions
    recording: LogOptions
    api_key: tuple[str, ...] = attrs.field(repr=False)

    def engine(self, name: str) -> Any:
        """An option of the engine, or its default here."""
        value = getattr(self.scenario, name)
        return DEFAULTS.get(name) if value is None else value


def _prepared(server: _Server, opened: ExitStack, on_started: Callable[[], None]) -> "ServingProcess":
    """Everything up to the first request. What can be refused without the model is refused before it is loaded."""
    from ...backends.serving.engine.live_engine import LiveEngine
    from ...backends.serving.engine.sizing import size_engine
    from ...backends.serving.http.limits import RequestLimits
    from ...backends.serving.http.metrics import ServingMetrics
    from ...backends.serving.http.process import ProcessSettings, ServingProcess
    from ...backends.serving.http.prompt_encoder import PromptEncoder
    from ...backends.serving.http.server import OpenAIServer, ServerSettings
    from ...backends.serving.model.loading import load_model
    from ...backends.sinks.log.flush_policy import FlushPolicy

    asked, engine_options = server.asked, _engine_options(server)
    in_engine = server.engine("max_num_seqs") + asked.max_queued_requests
    limits = RequestLimits(
        max_request_bytes=asked.max_request_bytes,
        body_timeout_s=asked.body_timeout,
        max_open_requests=asked.max_open_requests or in_engine + OPEN_BESIDE_ENGINE,
        api_keys=server.api_key,
    )
    flush = FlushPolicy.parse(server.recording.log_flush or "50ms")
    process_settings = ProcessSettings(
        drain_timeout_s=asked.drain_timeout,
        stall_timeout_s=asked.stall_timeout,
        log_level=asked.uvicorn_log_level,
        access_log=not asked.disable_uvicorn_access_log,
    )
    device = _device(asked.device)
    _say(f"Loading {asked.model} on {device}")
    sized = size_engine(
        lambda: load_model(asked.model, device=device, dtype=asked.dtype, chat_template=asked.chat_template),
        engine_options,
        device=device,
    )
    for line in sized.lines():
        _say(line)
    loaded = sized.loaded
    settings = ServerSettings(
        model_names=asked.served_model_name or (loaded.name,),
        limits=limits,
        max_queued_requests=asked.max_queued_requests,
        isolates_api_keys=asked.isolate_api_keys,
    )
    metrics = ServingMetrics(settings.model_names[0], sized.allocator.max_model_len)
    engine = LiveEngine(
        sized.runner,
        allocator=sized.allocator,
        scheduler=sized.scheduler,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        observers=[metrics.step],
        recording=_recording(server, flush, sized),
        max_queued_requests=asked.max_queued_requests,
        seed=asked.seed,
        on_request_ended=metrics.ended,
    )
    opened.callback(engine.shutdown, drain=False)  # harmless where the process has done it
    metrics.watch(engine)
    encoder = PromptEncoder.beside(loaded.tokenizer, sized.runner.vocab_size)
    return ServingProcess(OpenAIServer(engine, encoder, metrics, settings), process_settings, on_started)


def _engine_options(server: _Server) -> "EngineOptions":
    from ...backends.serving.engine.options import EngineOptions

    sizes = server.asked.cudagraph_capture_sizes
    how = ("--cudagraph-capture-sizes", "requests", "1,2,4,8")
    return EngineOptions(
        **{name: server.engine(name) for name in OF_THE_ENGINE if name != "scheduling_policy"},
        policy=server.scenario.scheduling_policy,
        cudagraph_capture_sizes=None if sizes is None else tuple(whole_numbers(sizes, *how)),
        attention_packages=server.asked.attention_packages,
    )


def _recording(server: _Server, flush: "FlushPolicy", sized: "SizedEngine") -> "LiveRecording | None":
    if server.recording.log is None:
        return None
    from ...backends.serving.engine.recording import LiveRecording

    graphs = sized.runner.graphs
    facts = {"model": server.asked.model, "cudagraph_capture_sizes": [] if graphs is None else list(graphs.sizes)}
    return LiveRecording.create(
        server.recording.log, flush=flush, allocator=sized.allocator, scheduler=sized.scheduler, facts=facts
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _say(line: str) -> None:
    print(line, flush=True)


def _say_where(server: _Server, port: int) -> None:
    host = f"[{server.asked.host}]" if ":" in server.asked.host else server.asked.host
    if not server.asked.host.startswith(LOOPBACK) and not server.api_key:
        _say(f"WARNING: {server.asked.host} can be reached from elsewhere, and no --api-key is asked for")
    if server.api_key:
        shares = "no cached prefixes" if server.asked.isolate_api_keys else "cached prefixes"
        _say(f"API keys: {len(server.api_key)}; clients with different ones share {shares}")
    size = "4MiB" if server.asked.max_request_bytes == 4 << 20 else str(server.asked.max_request_bytes)
    runs, waits = server.engine("max_num_seqs"), server.asked.max_queued_requests
    _say(f"Bounds: {runs:,} requests run, {waits:,} wait (then 429); bodies of {size} (then 413)")
    _say(f"Serving on http://{host}:{port}/v1 (Ctrl+C to end)")


def _say_how_it_ended(server: _Server, engine: "LiveEngine") -> bool:
    stats, pool = engine.stats.scheduler, engine.allocator.pool
    _say(
        f"Ended: {stats.num_finished:,} requests finished, {stats.num_aborted:,} aborted, {stats.num_rejected:,} too "
        f"long; {pool.num_held_blocks:,} of {pool.num_usable_blocks:,} blocks held"
    )
    if server.recording.log is not None:
        _say(f"Log: {server.recording.log} (kvledger log verify {server.recording.log})")
    if engine.failure is not None:
        print(f"kvledger: the engine failed: {type(engine.failure).__name__}: {engine.failure}", file=sys.stderr)
    return engine.failure is None
