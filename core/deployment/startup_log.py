"""The lines that people grep a server's start-up log for: printed in their familiar shape, and read back.

Read back, they replace estimates by what one real start-up measured, or explain a pool whose configuration is not
known.
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
    """What a server would log about this plan, for the stage that decides the pool."""
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
    """Graph memory after capture, actual against estimated."""
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
        """The figure itself."""
        return gib_to_bytes(self.text)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Fewest and most bytes that print as this figure."""
        half = Decimal(5).scaleb(-self.num_decimals - 1)
        figure = Decimal(self.text)
        return int(-(-(figure - half) * GIB // 1)), int((figure + half) * GIB)

    @property
    def num_decimals(self) -> int:
        """Decimals that are printed."""
        return len(self.text.partition(".")[2])


@attrs.frozen(kw_only=True)
class StartupLog:
    """What one start-up log says; None for what it does not say.

    Attributes:
        weights, non_torch, activation, graphs, available: GiB figures.
        kv_cache_tokens: `GPU KV cache size`.
        num_gpu_blocks: `# GPU blocks` (or CUDA blocks).
        max_concurrency, concurrency_tokens: `Maximum concurrency for N tokens per request`.
        total, utilization: what the instance can use.
    """

    weights: GibFigure | None = None
    non_torch: GibFigure | None = None
    activation: GibFigure | None = None
    graphs: GibFigure | None = None
    available: GibFigure | None = None
    kv_cache_tokens: int | None = None
    num_gpu_blocks: int | None = None
    max_concurrency: float | None = None
    concurrency_tokens: int | None = None
    total: GibFigure | None = None
    utilization: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no known line was found."""
        return all(value is None for value in attrs.astuple(self, recurse=False))


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
    """Find the known lines; of several workers' lines the one with the least memory for the cache counts.

    Raises:
        InputError: none of the known lines is there.
    """
    text = "\n".join(lines)
    found: dict[str, GibFigure | int | float] = {}
    for name, patterns in _GIB_LINES.items():
        figures = [figure for pattern in patterns for figure in re.findall(pattern, text)]
        if figures:
            # Ranks log alike; the tightest decides, which has the most of everything but of what is left.
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
    log = attrs.evolve(StartupLog(), **found)
    if log.is_empty:
        raise InputError(
            f"{place}: none of the known lines was found (Available KV cache memory, GPU KV cache size, # GPU blocks,"
            " Maximum concurrency, Model loading took, Graph capturing finished)"
        )
    return log


def calibrated_rows(log: StartupLog, requested_bytes: int, *, reserve_graph_memory: bool) -> tuple[LedgerRow, ...]:
    """The rows of one real start-up: weights as logged, and what else was not left for the cache.

    Args:
        log: with at least the weights and the memory available for the cache.
        requested_bytes: of the server that wrote the log.
        reserve_graph_memory: whether that server set graph memory aside.

    Raises:
        InputError: the log lacks a line that is needed, or its figures do not fit the request.
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
            f" {log.available.text} GiB for the cache are {-rest:,} B more; give the --total-memory and"
            " --gpu-memory-utilization of that server"
        )
    rest = max(rest, 0)
    rows.append(
        LedgerRow(
            name="peak activation and other" if log.activation is None else "other",
            num_bytes=rest,
            source=RowSource.MEASURED,
            role=RowRole.TRANSIENT if log.activation is None else RowRole.RESIDENT,
            formula=f"requested {requested_bytes:,} - rows above - logged {log.available.text} GiB for the cache",
            low_bytes=max(rest - spread, 0),
            high_bytes=rest + (log.available.num_bytes - low),
        )
    )
    return tuple(rows)


def _calibrated(name: str, figure: GibFigure, role: RowRole) -> LedgerRow:
    low, high = figure.range_bytes
    return LedgerRow(
        name=name,
        num_bytes=figure.num_bytes,
        source=RowSource.MEASURED,
        role=role,
        formula=f"start-up log: {figure.text} GiB",
        low_bytes=min(low, figure.num_bytes),
        high_bytes=max(high, figure.num_bytes),
    )


# The reverse question: which blocks two lines of a start-up log stand for, and which geometry they could be.

MAX_LAYERS = 160
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
_HEAD_SIZES = (64, 80, 96, 112, 120, 128, 160, 192, 256, 512)
_LATENT_SIZES = (320, 512, 576, 640)
_DTYPES = ("bf16", "fp8_e4m3", "fp32", "int4")


@attrs.frozen(kw_only=True)
class UniformStack:
    """Equal layers whose pages add up to a block of the right size."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    is_latent: bool
    bytes_per_block: int

    def __str__(self) -> str:
        """In words."""
        shape = f"latent of {self.head_size}" if self.is_latent else f"{self.num_kv_heads} KV heads x {self.head_size}"
        return f"{self.num_layers} layers of {shape} in {self.dtype} ({self.bytes_per_block:,} B a block)"


@attrs.frozen(kw_only=True)
class PoolExplanation:
    """What the two lines fix.

    Attributes:
        num_blocks: of the pool.
        block_size: tokens of a block.
        low_bytes_per_block, high_bytes_per_block: smallest and largest block that fits both lines, in bytes.
        candidates: stacks of equal layers within that range.
        page_size_bytes: of one layer of the geometry asked about; None where none was.
        whole_layers: layers of that geometry that a block holds at most.
        remainder_low_bytes, remainder_high_bytes: what whole layers of it leave over in a block.
    """

    num_blocks: int
    block_size: int
    low_bytes_per_block: int
    high_bytes_per_block: int
    candidates: tuple[UniformStack, ...]
    page_size_bytes: int | None = None
    whole_layers: int = 0
    remainder_low_bytes: int = 0
    remainder_high_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether some whole number of layers of the geometry asked about gives a block within the range."""
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
            out.append(self._geometry_sentence())
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

    def _geometry_sentence(self) -> str:
        page = self.page_size_bytes or 1
        low, high = self.low_bytes_per_block / page, self.high_bytes_per_block / page
        if self.is_whole:
            return f"{self.high_bytes_per_block // page} layers with pages of {page:,} B give such a block"
        return (
            f"layers with pages of {page:,} B would have to be {low:.3f} to {high:.3f} in number:"
            f" {self.whole_layers} leave {self.remainder_low_bytes:,} to {self.remainder_high_bytes:,} bytes of every"
            f" block unexplained, {self.whole_layers + 1} would not fit"
        )


def explain_pool(
    available: GibFigure, kv_cache_tokens: int, block_size: int, page_size_bytes: int | None = None
) -> PoolExplanation:
    """What the two logged lines fix.

    `num_blocks = floor(available / bytes_per_block)`, so bytes_per_block lies above available / (num_blocks + 1) and at
    most at available / num_blocks, over every amount that prints as the logged figure.

    Args:
        available: "Available KV cache memory".
        kv_cache_tokens: "GPU KV cache size".
        block_size: tokens of a block.
        page_size_bytes: of one layer of a geometry to check against.

    Raises:
        InputError: the tokens are no whole number of blocks.
    """
    if block_size < 1 or kv_cache_tokens < 1 or kv_cache_tokens % block_size:
        raise InputError(
            f"{kv_cache_tokens:,} tokens are no whole number of blocks of {block_size} tokens; give the server's"
            " --block-size, or the tokens stand for several groups (concurrency x max_model_len)"
        )
    num_blocks = kv_cache_tokens // block_size
    low_available, high_available = available.range_bytes
    low = low_available // (num_blocks + 1) + 1
    high = high_available // num_blocks
    whole = high // page_size_bytes if page_size_bytes else 0
    return PoolExplanation(
        num_blocks=num_blocks,
        block_size=block_size,
        low_bytes_per_block=low,
        high_bytes_per_block=high,
        candidates=uniform_stacks(low, high, block_size),
        page_size_bytes=page_size_bytes,
        whole_layers=whole,
        remainder_low_bytes=max(low - whole * page_size_bytes, 0) if page_size_bytes else 0,
        remainder_high_bytes=high - whole * page_size_bytes if page_size_bytes else 0,
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
            UniformStack(
                num_layers=num_layers,
                num_kv_heads=heads,
                head_size=size,
                dtype=dtype,
                is_latent=is_latent,
                bytes_per_block=num_layers * page_bytes,
            )
            for num_layers in range(-(-low_bytes // page_bytes), most + 1)
        )
    return tuple(sorted(found, key=lambda stack: (stack.num_layers, stack.dtype, stack.num_kv_heads)))
