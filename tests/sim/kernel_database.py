"""A small kernel database: a package on the path whose tables hold times that a formula gives."""

from itertools import product
from pathlib import Path
from typing import Any

SYSTEM = "h200_sxm"
VERSION = "0.24.0"
GEMM_SIZES = (64, 512, 1024, 2048, 4096, 8192, 16384, 65536)
GEMM_ROWS = tuple(1 << power for power in range(16))
# Heads, KV heads, head size and windows: llama-3.1-8b on one and two ranks, and gpt-oss-20b.
ATTENTION = ((32, 8, 128, (0,)), (16, 4, 128, (0,)), (64, 8, 64, (0, 128)))


def gemm_ms(rows: int, columns: int, inner: int) -> float:
    """Of a matrix product: a launch, its sums over the inner axis, its weights, and its arithmetic."""
    return 0.002 + inner / 1e6 + columns * inner * 2 / 4e9 + rows * columns * inner * 2 / 6e11


def context_ms(tokens: int) -> float:
    """Of the attention of a prompt."""
    return 0.004 + tokens * tokens / 1e9


def generation_ms(sequences: int, cached: int) -> float:
    """Of the attention of sequences that decode."""
    return 0.003 + sequences * cached / 1e6


def experts_ms(tokens: int) -> float:
    """Of the routed experts of a layer."""
    return 0.02 + tokens / 1e4


def all_reduce_ms(size: int) -> float:
    """Of an all-reduce of `size` bytes."""
    return 0.005 + size / 1e8


def write_table(root: Path, family: str, name: str, rows: list[dict[str, Any]], version: str = VERSION) -> None:
    """Write one table of the database under `root`."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = root / "aiconfigurator_core" / "systems" / "data" / SYSTEM / family / "vllm" / version / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def gemm_rows(factor: float = 1.0, dtypes: tuple[str, ...] = ("bfloat16",)) -> list[dict[str, Any]]:
    """Matrix products of all sizes."""
    return [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": factor * gemm_ms(m, n, k)}
        for dtype, n, k, m in product(dtypes, GEMM_SIZES, GEMM_SIZES, GEMM_ROWS)
    ]


def write_database(root: Path) -> None:
    """Write a package with tables of the H200; `root` belongs on the path."""
    (root / "aiconfigurator_core").mkdir(parents=True)
    (root / "aiconfigurator_core" / "__init__.py").touch()
    write_table(root, "gemm", "gemm_perf", gemm_rows())
    write_table(root, "gemm", "gemm_perf", gemm_rows(factor=3.0, dtypes=("bfloat16", "fp8")), version="0.9.0")
    heads = [
        {
            "num_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": size,
            "kv_cache_dtype": "bfloat16", "window_size": window,
        }
        for num_heads, num_kv_heads, size, windows in ATTENTION
        for window in windows
    ]  # fmt: skip
    counts = (1, 128, 1024, 8192, 65536)
    write_table(
        root, "attention", "context_attention_perf",
        [
            {**head, "batch_size": batch, "isl": tokens, "step": 0, "latency": batch * context_ms(tokens)}
            for head, batch, tokens in product(heads, (1, 8), counts)
        ],
    )  # fmt: skip
    write_table(
        root, "attention", "generation_attention_perf",
        [
            {**head, "batch_size": batch, "isl": 1, "step": cached, "latency": generation_ms(batch, cached)}
            for head, batch, cached in product(heads, (1, 64, 1024), counts)
        ],
    )  # fmt: skip
    write_table(
        root, "moe", "moe_perf",
        [
            {
                "moe_dtype": "w4a16_mxfp4", "distribution": "power_law_1.01", "hidden_size": 2880, "inter_size": 2880,
                "topk": 4, "num_experts": 32, "moe_tp_size": 1, "moe_ep_size": ranks, "num_tokens": tokens,
                "latency": experts_ms(tokens) / ranks,
            }
            for ranks, tokens in product((1, 2), counts)
        ],
    )  # fmt: skip
    write_table(
        root, "mla", "mla_generation_module_perf",
        [
            {
                "num_heads": 16, "kv_cache_dtype": "bfloat16", "gemm_type": "bfloat16", "batch_size": batch, "isl": 1,
                "step": cached, "latency": 1.0,
            }
            for batch, cached in product((1, 64), counts)
        ],
    )  # fmt: skip
    write_table(
        root, "mla", "mla_context_module_perf",
        [
            {
                "num_heads": 16, "kv_cache_dtype": "bfloat16", "gemm_type": "bfloat16", "batch_size": 1, "isl": tokens,
                "step": step, "latency": context_ms(tokens) + step,
            }
            for step, tokens in product((0, 512), counts)
        ],
    )  # fmt: skip
    write_table(
        root, "comm", "custom_allreduce_perf",
        [
            {
                "num_gpus": 2, "message_size": 1 << power, "kernel_source": source,
                "latency": all_reduce_ms(1 << power) * factor,
            }
            for power in range(10, 30)
            for source, factor in (("vLLM_custom_graph", 1.0), ("vLLM_custom_eager", 0.1))
        ],
    )  # fmt: skip
