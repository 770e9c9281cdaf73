"""The lines that people grep a server's start-up log for: printed in their familiar shape, and read back.

Read back, they replace estimates by what one real start-up measured, or explain a pool whose configuration is not
known.
"""

import re
from collections.abc import Iterable
from decimal import Decimal

import attrs

from .deployment_plan import DeploymentPlan
from .errors import InputError
from .memory_ledger import LedgerRow, RowRole, RowSource, sum_bytes
from .memory_sizing import graph_utilizations
from .quantities import GIB, gib_to_bytes


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
