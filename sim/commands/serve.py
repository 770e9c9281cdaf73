"""`kvledger serve`: an OpenAI-compatible server on the live engine."""

from typing import Annotated

import typer


def serve(
    model: Annotated[
        str, typer.Option(help="Folder of a model as transformers saves it, or a GGUF file; nothing is downloaded.")
    ],
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; its folder's name unless given. Repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLEDGER_API_KEY",
            show_envvar=True,
            help="Clients must send one of these; nobody is asked unless given. Repeatable.",
        ),
    ] = None,
    isolate_api_keys: Annotated[
        bool, typer.Option(help="Clients with different API keys share no cached prefixes.")
    ] = True,
    chat_template: Annotated[str | None, typer.Option(help="File with another template than the tokenizer's.")] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the model's), fp8, ...")] = "auto",
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Size of the pool (512MiB or bytes). On a CPU this or the next one is needed.")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="Blocks of the pool, whatever would fit.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Fraction of a GPU's TOTAL memory; 0.9 unless given.")
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Capture no decode step in a CUDA graph.")
    ] = False,
    cudagraph_capture_sizes: Annotated[
        str | None,
        typer.Option(
            help="Requests of the decode steps that are captured on a GPU (1,2,4,8); up to max-num-seqs unless given."
        ),
    ] = None,
    attention_packages: Annotated[
        bool,
        typer.Option(
            "--attention-packages",
            help="Let FlashAttention and FlashInfer compute attention where they are installed and fit.",
        ),
    ] = False,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            help="Longest request (8192, 32K), auto or -1 for the longest that fits; the model's unless given."
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests of one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Keep finished requests' blocks findable.")] = True,
    enable_chunked_prefill: Annotated[bool, typer.Option(help="Split prompts over steps.")] = True,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs, or priority (lowest value first).")] = "fcfs",
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="1: a live engine runs on one device.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", help="1: a live engine runs on one device.")
    ] = 1,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "-dp", help="1: start a server for each.")
    ] = 1,
    max_queued_requests: Annotated[
        int, typer.Option(min=1, help="Requests that may wait for their first step; more are answered with 429.")
    ] = 1024,
    max_open_requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests whose answer is not sent yet; max-num-seqs + max-queued-requests + 64 unless given."
        ),
    ] = None,
    max_request_bytes: Annotated[str, typer.Option(help="Largest body (4MiB or bytes); more is answered with 413.")] = (
        "4MiB"
    ),
    body_timeout: Annotated[float, typer.Option(help="Seconds that a client may take to send a body.")] = 30.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without any movement after which a connection is cut.")
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that requests may go on after the first Ctrl+C; then they are aborted.")
    ] = 30.0,
    log: Annotated[
        str | None, typer.Option(help="Record every commit in this folder: see kvledger log and kvledger log replay.")
    ] = None,
    log_flush: Annotated[
        str | None, typer.Option(help="When the log reaches the disk: commit, 100commits or 50ms; 50ms unless given.")
    ] = None,
    uvicorn_log_level: Annotated[str, typer.Option(help="critical, error, warning, info, debug or trace.")] = "info",
    disable_uvicorn_access_log: Annotated[
        bool, typer.Option("--disable-uvicorn-access-log", help="Do not print a line for each request.")
    ] = False,
) -> None:
    """Serve a model over OpenAI's completions and chat API, on the pool and the scheduler that kvledger simulates.

    Example: kvledger serve --model ./SmolLM2-135M-Instruct.Q4_1.gguf --kv-cache-memory-bytes 512MiB
    """
    given = dict(locals())

    from ..scenario.serve_run import ServeOptions, run_serve

    given["served_model_name"] = tuple(served_model_name or ())
    given["api_key"] = tuple(api_key or ())
    if not run_serve(ServeOptions(**given)):
        raise typer.Exit(1)
