"""`kvledger compare`: memory wasted by static, power-of-two, oracle, growing and paged allocators."""

from typing import Annotated

import typer


def compare(
    trace: Annotated[str | None, typer.Argument(help="Trace file, gz or plain: Mooncake JSONL or Azure CSV.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Instead of a file: conversation, sharegpt, code or agentic.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the built-in workload; 0 unless given.")] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(help="KV memory in token slots.")] = None,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="KV memory in blocks of --block-size.")] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV memory in bytes (12GiB), of all GPUs together; needs --model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Model by name, or its config.json: bytes of a token.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Storage of keys and values, with --model; the model's own unless given.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request in tokens, which static reserves; longer ones are refused.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the paged allocator.")] = 16,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests that run at a time at most; without it, the memory decides.")
    ] = None,
    watermark: Annotated[
        float, typer.Option(help="Share of its blocks that the paged allocator keeps free when it admits.")
    ] = 0.01,
    trace_block_size: Annotated[
        int | None, typer.Option(help="Tokens that one hash id stands for; the format's own (512) unless given.")
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", "--trace-format", help="mooncake or azure; by content unless given.")
    ] = None,
    on_bad_row: Annotated[
        str | None, typer.Option(help="refuse (unless given): stop at a bad row. skip: leave it out and count it.")
    ] = None,
    skip_first: Annotated[int, typer.Option(help="Requests to leave out at the start.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Requests to use after those.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Compare the memory that five allocators waste on the same requests, as PagedAttention (SOSP'23) did.

    Example: kvledger compare --workload sharegpt --model opt-13b --kv-cache-memory-bytes 12GiB
    """
    from ..baselines.baselines import compare_allocators
    from ..report.compare import compare_payload, print_compare
    from ..report.console import print_json
    from ..scenario.compare_setup import kv_memory, longest_request, read_lengths, token_bytes
    from ..scenario.trace_source import open_trace_or_workload

    tokens = token_bytes(model, kv_cache_dtype)
    memory = kv_memory(tokens, kv_cache_tokens, num_gpu_blocks_override, kv_cache_memory_bytes, block_size)
    source = open_trace_or_workload(
        trace,
        workload,
        trace_format=trace_format,
        trace_block_size=trace_block_size,
        on_bad_row=on_bad_row,
        seed=seed,
        skip_first=skip_first,
        limit=limit,
    )
    lengths = read_lengths(source)
    longest = longest_request(max_model_len, tokens, lengths)
    usages = compare_allocators(
        lengths,
        num_slots=memory.value,
        max_model_len=longest.value,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
        kv_bytes_per_token=None if tokens is None else tokens.kv_bytes_per_token,
    )
    setup = {
        "trace": source.info.as_dict(),
        "window": source.info.window_as_dict(),
        "num_slots": memory.value,
        "num_slots_source": memory.source,
        "kv_bytes_per_token": None if tokens is None else tokens.kv_bytes_per_token,
        "max_model_len": longest.value,
        "max_model_len_source": longest.source,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "watermark": watermark,
    }
    if json:
        print_json(compare_payload(usages, setup))
    else:
        print_compare(usages, setup)
