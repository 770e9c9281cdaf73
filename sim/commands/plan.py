"""`kvledger plan`: how many blocks, tokens and users fit, and where every byte went."""

from typing import Annotated

import typer


def plan(
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Built-in model by name, or the path of a config.json.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Device preset: A10, L4, L40S, A100-80GB, H100, H200, B200, MI300X.")
    ] = None,
    total_memory: Annotated[str | None, typer.Option(help="What the driver reports, e.g. 79.19GiB.")] = None,
    free_memory: Annotated[str | None, typer.Option(help="Free before start; all of the device unless given.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Fraction of TOTAL memory (vLLM); 0.9 unless given.")
    ] = None,
    mem_fraction_static: Annotated[
        float | None, typer.Option(help="Fraction of total for weights and KV cache, activations outside (SGLang).")
    ] = None,
    free_gpu_memory_fraction: Annotated[
        float | None, typer.Option(help="Fraction of what is FREE once everything else is loaded (TensorRT-LLM).")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Pool size per GPU, pinned (8GiB or bytes); utilization is ignored.")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="Blocks of the pool, whatever would fit.")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="The pool holds at most this many tokens.")] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest request (8192, 32K), auto or -1 for the longest that fits.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests of one step.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one step; activations follow it.")
    ] = None,
    async_scheduling: Annotated[bool, typer.Option(help="Two steps in flight, as vLLM does by default.")] = True,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block; 16 unless the model needs more.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8, int8_per_token_head, nvfp4, ...")] = "auto",
    kv_cache_layout: Annotated[
        str, typer.Option(help="Physical order of the cache's axes, e.g. LBNHC or BLNHC.")
    ] = "LBNHC",
    mamba_cache_mode: Annotated[
        str | None, typer.Option(help="Snapshots of state layers: none, align or all; by prefix caching unless given.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Keep finished requests' blocks findable.")] = True,
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None, typer.Option(help="Size windowed layers like full ones; as vLLM does for the model unless given.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of unquantised weights; the model's own unless given.")] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Weights: none, fp8, fp8_block, int8, int4, mxfp4, nvfp4; the model's own unless given."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="GPUs that split heads.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages of layers.")
    ] = 1,
    data_parallel_size: Annotated[int, typer.Option("--data-parallel-size", "-dp", help="Engines of their own.")] = 1,
    decode_context_parallel_size: Annotated[
        int, typer.Option("--decode-context-parallel-size", "-dcp", help="Ranks that split a request's tokens.")
    ] = 1,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    reserve_graph_memory: Annotated[
        bool | None, typer.Option(help="Set graph memory aside when sizing; as --engine-version does unless given.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="vLLM version, e.g. 0.15.1; before 0.21 graph memory was not set aside.")
    ] = None,
    weights_bytes: Annotated[
        str | None, typer.Option(help="Weights per GPU, instead of the estimate (14.96GiB).")
    ] = None,
    non_torch_bytes: Annotated[
        str | None, typer.Option(help="Non-torch memory per GPU, instead of the estimate.")
    ] = None,
    workspace_bytes: Annotated[str | None, typer.Option(help="Sampler and workspaces that stay, per GPU.")] = None,
    encoder_bytes: Annotated[str | None, typer.Option(help="Multimodal encoder per GPU; 0 for text only.")] = None,
    activation_bytes: Annotated[
        str | None, typer.Option(help="Peak activation per GPU, instead of the estimate.")
    ] = None,
    graph_bytes: Annotated[str | None, typer.Option(help="CUDA graphs per GPU, instead of the estimate.")] = None,
    externally_held_bytes: Annotated[
        str | None, typer.Option(help="Weights that another process holds for it.")
    ] = None,
    frontend_reservation_bytes: Annotated[
        str | None, typer.Option(help="Taken off the pool for multimodal inputs.")
    ] = None,
    neighbour_utilization: Annotated[
        list[float] | None, typer.Option(help="Utilization of another engine on the card; may be repeated.")
    ] = None,
    startup_log: Annotated[
        str | None, typer.Option(help="A real start-up log (- for standard input): calibrates the rows.")
    ] = None,
    logged_memory: Annotated[
        str | None, typer.Option(help="Explain a log's 'Available KV cache memory', e.g. 41.73.")
    ] = None,
    logged_tokens: Annotated[str | None, typer.Option(help="... with its 'GPU KV cache size', e.g. 261,648.")] = None,
    expect_num_gpu_blocks: Annotated[
        int | None, typer.Option(help="Explain why the pool is smaller than this.")
    ] = None,
    compare_utilization: Annotated[float | None, typer.Option(help="Explain what this utilization would gain.")] = None,
    context_lengths: Annotated[str, typer.Option(help="Lengths of the capacity table.")] = "2048,8192,32768,131072",
    context_mix: Annotated[str | None, typer.Option(help="Users of a mix of lengths, e.g. 2048:0.8,32768:0.2.")] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="Another constant of the estimates, name=value; repeated.")
    ] = None,
    strict_startup: Annotated[
        bool, typer.Option("--strict-startup", help="Demand utilization * total under an override.")
    ] = False,
    validate: Annotated[bool, typer.Option(help="Check pinned bytes against free memory.")] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the formulas with the numbers substituted.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Say how many KV blocks, tokens and users fit, and where every byte of a GPU goes.

    Example: kvledger plan --model llama-3.1-70b --gpu H100 -tp 4 --max-model-len 32K
    """
    given = dict(locals())

    import attrs

    from ..cli import EXIT_DOES_NOT_FIT
    from ..scenario.plan_question import PlanOptions
    from ..scenario.plan_run import PlanExtras, run_plan

    for name in ("assume", "neighbour_utilization"):
        given[name] = tuple(given[name] or ())
    options = PlanOptions(**{field.name: given[field.name] for field in attrs.fields(PlanOptions)})
    extras = PlanExtras(**{field.name: given[field.name] for field in attrs.fields(PlanExtras)})
    if not run_plan(options, extras):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
