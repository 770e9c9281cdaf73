"""Writes and reads the lines that people grep a server's start-up log for.

The lines of a real start-up replace estimates by measured rows, or explain a pool whose configuration is not known.
"""

import re
from collections.abc import Iterable
from decimal import Decimal

import attrs

from ..errors import InputError
from ..memory.budget import graph_utilizations
from ..memory.ledger import LedgerRow, RowRole, RowSource, sum_bytes
from ..planner.cache_dtype import BITS_PER_ELEMENT
from ..quantities import GIB, MIB, gib_to_bytes
from .plan import DeploymentPlan


def log_lines(plan: DeploymentPlan) -> tuple[str, ...]:
    """The lines that a server would log about this plan, for the stage that decides the pool."""
    ledger = plan.bottleneck_stage.ledger
    pool = plan.pool
    lines = [f"Available KV cache memory: {_gib(ledger.available_bytes)} GiB"]
    if plan.deployment.auto_fits and pool.fits:
        wanted = plan.deployment.wanted_max_model_len
        lines.append(
            f"Auto-fit max_model_len: reduced from {wanted} to {pool.max_model_len} to fit in available GPU memory"
            f" ({_gib(ledger.available_bytes)} GiB available for KV cache)"
            if pool.max_model_len < wanted
            else f"Auto-fit max_model_len: full model context length {wanted} fits in available GPU memory"
        )
    if plan.deployment.num_gpu_blocks_override is not None:
        lines.append(
            f"Overriding num_gpu_blocks with num_gpu_blocks_override={plan.deployment.num_gpu_blocks_override}"
        )
    lines.append(f"# GPU blocks: {plan.num_blocks}")
    lines.append(f"GPU KV cache size: {max(pool.kv_cache_size_tokens, 0):,} tokens")
    lines.append(
        f"Maximum concurrency for {pool.max_model_len:,} tokens per request: {max(pool.max_concurrency, 0):.2f}x"
    )
    graphs = sum_bytes(ledger.non_kv_rows, RowRole.GRAPHS)
    if graphs:
        utilizations = graph_utilizations(plan.deployment.utilization, graphs, plan.deployment.total_bytes)
        lines.append(f"Estimated CUDA graph memory: {_gib(graphs)} GiB total")
        lines.append(
            f"The current --gpu-memory-utilization={utilizations.current:.4f} is equivalent to"
            f" --gpu-memory-utilization={utilizations.without_graphs:.4f} without CUDA graph memory profiling;"
            " to maintain the same effective KV cache size as before, increase it to"
            f" {utilizations.to_keep_the_pool:.4f}"
        )
    return tuple(lines)


def graph_memory_line(actual_bytes: int, estimated_bytes: int) -> str:
    """The line about graph memory after capture, actual against estimated."""
    difference = actual_bytes - estimated_bytes
    share = f" ({abs(difference) / actual_bytes:.1%})" if actual_bytes else ""
    return (
        f"CUDA graph pool memory: {_gib(actual_bytes)} GiB (actual), {_gib(estimated_bytes)} GiB (estimated),"
        f" difference: {_gib(abs(difference))} GiB{share}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"


@attrs.frozen(kw_only=True)
class GibFigure:
    """A GiB figure as a log prints it: the bytes lie within half a unit of its last decimal."""

    text: str

    @property
    def num_bytes(self) -> int:
        """The figure in bytes."""
        return gib_to_bytes(self.text)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Fewest and most bytes that print as this figure."""
        num_decimals = len(self.text.partition(".")[2])
        half = Decimal(5).scaleb(-num_decimals - 1)
        figure = Decimal(self.text)
        return int(-(-(figure - half) * GIB // 1)), int((figure + half) * GIB)


@attrs.frozen(kw_only=True)
class StartupLog:
    """The figures of one start-up log; None where it has no such line."""

    weights: GibFigure | None = None
    non_torch: GibFigure | None = None
    activation: GibFigure | None = None
    graphs: GibFigure | None = None
    available: GibFigure | None = None
    kv_cache_tokens: int | None = None  # `GPU KV cache size`
    num_gpu_blocks: int | None = None  # `# GPU blocks` (or CUDA blocks)
    max_concurrency: float | None = None  # `Maximum concurrency for N tokens per request`
    concurrency_tokens: int | None = None  # the N of that line
    total: GibFigure | None = None  # memory of the device
    utilization: float | None = None  # the share of it that the instance may use


_FIGURE = r"([0-9]+(?:\.[0-9]+)?)\s*Gi?B"
_GIB_LINES = {
    "weights": (
        rf"Model loading took\s+{_FIGURE}",
        rf"[Ll]oading model weights took\s+{_FIGURE}",
        rf"weights take\s+{_FIGURE}",
    ),
    "non_torch": (rf"non_torch_memory(?: takes)?\s+{_FIGURE}",),
    "activation": (rf"activation peak memory(?: takes)?\s+{_FIGURE}",),
    "graphs": (rf"[Gg]raph capturing finished in .*took\s+{_FIGURE}", rf"CUDA graph memory:\s+{_FIGURE}"),
    "available": (rf"Available KV cache memory:\s+{_FIGURE}", rf"reserved for KV Cache is\s+{_FIGURE}"),
    "total": (rf"total_gpu_memory\s*\(?\s*{_FIGURE}",),
}
_COUNT_LINES = {
    "kv_cache_tokens": r"GPU KV cache size:\s+([0-9,]+)\s+tokens",
    "num_gpu_blocks": r"#\s*(?:GPU|CUDA) blocks:\s+([0-9,]+)",
    "concurrency_tokens": r"Maximum concurrency for\s+([0-9,]+)\s+tokens",
}
_CONCURRENCY = re.compile(r"tokens per request:\s+([0-9.]+)x")
_UTILIZATION = re.compile(r"gpu_memory_utilization\s*[=(]?\s*\(?\s*([01]\.[0-9]+)")


def read_startup_log(lines: Iterable[str], place: str) -> StartupLog:
    """Find the known lines; of several workers' lines the one that leaves the cache the least memory counts.

    Raises:
        InputError: there is none of the known lines.
    """
    text = "\n".join(lines)
    found: dict[str, GibFigure | int | float] = {}
    for name, patterns in _GIB_LINES.items():
        figures = [figure for pattern in patterns for figure in re.findall(pattern, text)]
        if figures:
            # Each rank logs its own; the tightest decides, which uses the most and has the least left.
            pick = min if name in ("available", "total") else max
            found[name] = GibFigure(text=pick(figures, key=Decimal))
    for name, pattern in _COUNT_LINES.items():
        counts = [int(count.replace(",", "")) for count in re.findall(pattern, text)]
        if counts:
            found[name] = min(counts)
    if match := _CONCURRENCY.search(text):
        found["max_concurrency"] = float(match.group(1))
    if match := _UTILIZATION.search(text):
        found["utilization"] = float(match.group(1))
    if not found:
        raise InputError(
            f"{place}: none of the known lines was found (Available KV cache memory, GPU KV cache size, # GPU blocks,"
            " Maximum concurrency, Model loading took, Graph capturing finished)"
        )
    return attrs.evolve(StartupLog(), **found)


def calibrated_rows(log: StartupLog, requested_bytes: int, *, reserve_graph_memory: bool) -> tuple[LedgerRow, ...]:
    """The rows of one real start-up: weights as logged, and everything else that the cache did not get.

    `requested_bytes` is the memory that the logged server requested; `reserve_graph_memory` whether it set graph memory
    aside.

    Raises:
        InputError: the log lacks a required line, or its figures do not fit the request.
    """
    missing = [
        name
        for name, value in (("Model loading took", log.weights), ("Available KV cache memory", log.available))
        if value is None
    ]
    if log.weights is None or log.available is None:
        raise InputError(f"the start-up log has no line {' and no line '.join(missing)}, which calibration needs")
    rows = [_calibrated("weights", log.weights, RowRole.RESIDENT)]
    if log.non_torch is not None:
        rows.append(_calibrated("non-torch", log.non_torch, RowRole.RESIDENT))
    if log.activation is not None:
        rows.append(_calibrated("peak activation", log.activation, RowRole.TRANSIENT))
    if log.graphs is not None and reserve_graph_memory:
        rows.append(_calibrated("CUDA graphs", log.graphs, RowRole.GRAPHS))
    low, high = log.available.range_bytes
    rest = requested_bytes - sum_bytes(tuple(rows)) - log.available.num_bytes
    spread = high - log.available.num_bytes
    if rest + spread < 0:
        raise InputError(
            f"the log's figures do not fit: requested {requested_bytes:,} B, but the rows and the"
            f" {log.available.text} GiB for the cache are {-rest:,} B more; give the total_memory and"
            " gpu_memory_utilization of that server"
        )
    rest = max(rest, 0)
    rows.append(
        LedgerRow(
            "peak activation and other" if log.activation is None else "other",
            rest,
            RowSource.MEASURED,
            RowRole.TRANSIENT if log.activation is None else RowRole.RESIDENT,
            f"requested {requested_bytes:,} - rows above - logged {log.available.text} GiB for the cache",
            low_bytes=max(rest - spread, 0),
            high_bytes=rest + (log.available.num_bytes - low),
        )
    )
    return tuple(rows)


def _calibrated(name: str, figure: GibFigure, role: RowRole) -> LedgerRow:
    (low, high), num_bytes = figure.range_bytes, figure.num_bytes
    formula = f"start-up log: {figure.text} GiB"
    return LedgerRow(name, num_bytes, RowSource.MEASURED, role, formula, min(low, num_bytes), max(high, num_bytes))


MAX_LAYERS = 160
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
_HEAD_SIZES = (64, 80, 96, 112, 120, 128, 160, 192, 256, 512)
_LATENT_SIZES = (320, 512, 576, 640)
_DTYPES = ("bf16", "fp8_e4m3", "fp32", "int4")


@attrs.frozen
class UniformStack:
    """Equal layers whose pages add up to a block of a wanted size."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    is_latent: bool
    bytes_per_block: int

    def __str__(self) -> str:
        """The stack in words."""
        shape = f"latent of {self.head_size}" if self.is_latent else f"{self.num_kv_heads} KV heads x {self.head_size}"
        return f"{self.num_layers} layers of {shape} in {self.dtype} ({self.bytes_per_block:,} B a block)"


@attrs.frozen(kw_only=True)
class PoolExplanation:
    """What two lines of a start-up log determine: the blocks of its pool, and the geometries that they could have."""

    num_blocks: int
    block_size: int  # tokens per block
    low_bytes_per_block: int  # the smallest block that fits both lines
    high_bytes_per_block: int  # the largest
    candidates: tuple[UniformStack, ...]  # stacks of equal layers within that range
    page_size_bytes: int | None = None  # page of one layer of the geometry to check; None without one

    @property
    def is_whole(self) -> bool:
        """Whether some whole number of layers of the geometry to check gives a block within the range."""
        if self.page_size_bytes is None:
            return bool(self.candidates)
        most, too_few = self.high_bytes_per_block, self.low_bytes_per_block - 1
        return most // self.page_size_bytes > too_few // self.page_size_bytes

    def sentences(self) -> tuple[str, ...]:
        """The explanation in words."""
        out = [
            f"{self.num_blocks:,} blocks of {self.block_size} tokens",
            f"a block takes {self.low_bytes_per_block:,} to {self.high_bytes_per_block:,} bytes"
            f" ({self.low_bytes_per_block / MIB:.3f} MiB); the range is that of the GiB figure's last decimal",
        ]
        if self.page_size_bytes is not None:
            out.append(self._geometry_sentence(self.page_size_bytes))
        if self.candidates:
            out.append("stacks of equal layers that give such a block: " + "; ".join(map(str, self.candidates[:8])))
        elif not (self.page_size_bytes is not None and self.is_whole):
            out.append(
                f"no stack of up to {MAX_LAYERS} equal layers of usual heads, sizes and dtypes gives such a block. What"
                " could: layers of several sizes (an indexer, a draft model's layer, full and sliding layers that"
                " differ), pages padded to one size, scales stored beside quantised elements, several groups, where the"
                " logged tokens are concurrency x max_model_len and not blocks x block size, or a GiB line of another"
                " rank than the one that decides the pool"
            )
        return tuple(out)

    def _geometry_sentence(self, page: int) -> str:
        low, high = self.low_bytes_per_block, self.high_bytes_per_block
        layers, rest = divmod(high, page)
        if self.is_whole:
            return f"{layers} layers with pages of {page:,} B give such a block"
        return (
            f"layers with pages of {page:,} B would have to be {low / page:.3f} to {high / page:.3f} in number:"
            f" {layers} leave {max(low - layers * page, 0):,} to {rest:,} bytes of every block unexplained,"
            f" {layers + 1} would not fit"
        )


def explain_pool(
    available: GibFigure, kv_cache_tokens: int, block_size: int, page_size_bytes: int | None = None
) -> PoolExplanation:
    """Derive blocks and bytes per block from two logged lines.

    `num_blocks = floor(available / bytes_per_block)`, so bytes_per_block lies above available / (num_blocks + 1) and at
    most at available / num_blocks, over every amount that prints as the logged figure.

    Args:
        available: the figure of "Available KV cache memory".
        kv_cache_tokens: the figure of "GPU KV cache size".
        block_size: tokens per block.
        page_size_bytes: page of one layer of a geometry to check.

    Raises:
        InputError: the tokens are not a whole number of blocks.
    """
    if block_size < 1 or kv_cache_tokens < 1 or kv_cache_tokens % block_size:
        raise InputError(
            f"{kv_cache_tokens:,} tokens are no whole number of blocks of {block_size} tokens; give the server's"
            " block_size, or the tokens stand for several groups (concurrency x max_model_len)"
        )
    num_blocks = kv_cache_tokens // block_size
    low_available, high_available = available.range_bytes
    low = low_available // (num_blocks + 1) + 1
    high = high_available // num_blocks
    return PoolExplanation(
        num_blocks=num_blocks,
        block_size=block_size,
        low_bytes_per_block=low,
        high_bytes_per_block=high,
        candidates=uniform_stacks(low, high, block_size),
        page_size_bytes=page_size_bytes,
    )


def uniform_stacks(low_bytes: int, high_bytes: int, block_size: int) -> tuple[UniformStack, ...]:
    """Stacks of equal layers whose block lies within the range, fewest layers first."""
    pages = [
        (heads, size, dtype, False, 2 * heads * size) for heads in _HEADS for size in _HEAD_SIZES for dtype in _DTYPES
    ]
    pages += [(1, size, dtype, True, size) for size in _LATENT_SIZES for dtype in _DTYPES]
    found: list[UniformStack] = []
    for heads, size, dtype, is_latent, elements in pages:
        page_bytes = elements * block_size * BITS_PER_ELEMENT[dtype] // 8
        most = min(high_bytes // page_bytes, MAX_LAYERS)
        found.extend(
            UniformStack(num_layers, heads, size, dtype, is_latent, bytes_per_block=num_layers * page_bytes)
            for num_layers in range(-(-low_bytes // page_bytes), most + 1)
        )
    return tuple(sorted(found, key=lambda stack: (stack.num_layers, stack.dtype, stack.num_kv_heads)))
