"""Writes and reads the lines that people grep a server's start-up log for.

The lines of a real start-up replace estimates by measured rows, or explain a pool whose configuration is not known.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import attrs

from ..errors import InputError
from ..memory.budget import graph_utilizations
from ..memory.ledger import LedgerRow, RowRole, RowSource, sum_bytes
from ..quantities import GIB, gib_to_bytes
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
    """A GiB figure as a log prints it: the bytes lie within half a unit of its last decimal.

    Attributes:
        text: the figure.
        num_rounded: printed figures that it is the sum of; each of them was rounded.
    """

    text: str
    num_rounded: int = 1

    @property
    def num_bytes(self) -> int:
        """The figure in bytes."""
        return gib_to_bytes(self.text)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Fewest and most bytes that print as this figure."""
        num_decimals = len(self.text.partition(".")[2])
        half = Decimal(5).scaleb(-num_decimals - 1) * self.num_rounded
        figure = Decimal(self.text)
        return int(-(-(figure - half) * GIB // 1)), int((figure + half) * GIB)


@attrs.frozen(kw_only=True)
class StartupLog:
    """The figures of one start-up; None where the log has no such line."""

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
    free_after: GibFigure | None = None  # memory that is free once the pool is allocated (SGLang)
    block_size: int | None = None  # tokens of a block (TensorRT-LLM)
    engine: str = "vLLM"  # whose lines these are
    warnings: tuple[str, ...] = ()  # what the reader should know of the log


# SGLang divides by 2^30 and prints GB.
_FIGURE = r"([0-9]+(?:\.[0-9]+)?)\s*Gi?B"
_GIB_LINES = {
    "weights": (
        rf"Model loading took\s+{_FIGURE}",
        rf"[Ll]oading model weights took\s+{_FIGURE}",
        rf"weights take\s+{_FIGURE}",
        rf"Load weight end\..*mem usage=\s*{_FIGURE}",
        rf"after loading model weights \(inside torch\).*?:\s*{_FIGURE}",
    ),
    "non_torch": (
        rf"non_torch_memory(?: takes)?\s+{_FIGURE}",
        rf"Memory used outside torch \(.*?\).*?:\s*{_FIGURE}",
    ),
    "activation": (
        rf"activation peak memory(?: takes)?\s+{_FIGURE}",
        rf"allocated during inference \(inside torch\).*?:\s*{_FIGURE}",
    ),
    "graphs": (
        rf"[Gg]raph capturing finished in .*took\s+{_FIGURE}",
        rf"CUDA graph memory:\s+{_FIGURE}",
        rf"Capture cuda graph end\..*mem usage=\s*{_FIGURE}",
    ),
    "available": (rf"Available KV cache memory:\s+{_FIGURE}", rf"reserved for KV Cache is\s+{_FIGURE}"),
    "total": (rf"total_gpu_memory\s*\(?\s*{_FIGURE}", rf"device total memory\s+{_FIGURE}"),
    "free_after": (rf"Memory pool end\..*avail mem=\s*{_FIGURE}",),
}
_COUNT_LINES = {
    "kv_cache_tokens": r"GPU KV cache size:\s+([0-9,]+)\s+tokens",
    "num_gpu_blocks": r"#\s*(?:GPU|CUDA) blocks:\s+([0-9,]+)",
    "concurrency_tokens": r"Maximum concurrency for\s+([0-9,]+)\s+tokens",
    "block_size": r"Number of tokens per block:\s+([0-9]+)",
}
_CONCURRENCY = re.compile(r"tokens per request:\s+([0-9.]+)x")
_UTILIZATION = re.compile(r"gpu_memory_utilization\s*[=(]?\s*\(?\s*([01]\.[0-9]+)")
# A pool's line of SGLang: its tokens, and the bytes of keys and values together or apart.
_SGLANG_POOL = re.compile(
    r"KV Cache is allocated\..*?#tokens:\s*([0-9,]+),"
    rf"\s*(?:KV size:\s*{_FIGURE}|K size:\s*{_FIGURE},\s*V size:\s*{_FIGURE})"
)
# A pool of TensorRT-LLM. It makes a small one, measures a forward pass, and then makes the one that it serves with.
_TENSORRT_POOL = re.compile(rf"Allocated\s+{_FIGURE} for max tokens in paged KV cache \(([0-9,]+)\)")
_TENSORRT_PROFILE = "Peak memory during memory usage profiling"
# Which engine of a data-parallel server logged a line, and which of its ranks.
_ENGINE = re.compile(r"(?<![A-Za-z])DP\s?(\d+)|EngineCore_(\d+)")
_RANK = re.compile(r"\b(TP\s?\d+|PP\s?\d+|Worker_\w+|rank[= ]\d+)")
# What a start begins with, whoever logs it; and the phases that follow each other in it.
_START = re.compile(
    r"vLLM API server version|Initializing an? (?:V\d+ )?LLM engine|Scheduled restart job|server_args=ServerArgs"
)
_LOADING, _PROFILING, _POOL, _READY = range(4)
_PHASES = (
    (
        _LOADING,
        re.compile(r"Model loading took|[Ll]oading model weights took|Load weight (?:begin|end)|GB for model weights"),
    ),
    (_PROFILING, re.compile(r"Available KV cache memory|reserved for KV Cache is")),
    (_POOL, re.compile(r"GPU KV cache size|# ?(?:GPU|CUDA) blocks|Maximum concurrency for")),
    (_READY, re.compile(r"max_total_num_tokens=|ready to roll|Setting PyTorch memory fraction")),
)


@attrs.define
class _Start:
    """The lines of one start, and how far it has come."""

    lines: list[str] = attrs.Factory(list[str])
    phase: int = _LOADING


def read_startup_log(lines: Iterable[str], place: str) -> StartupLog:
    """Find the known lines of the last complete start; of several ranks' lines the tightest count.

    A log may hold several starts, one after the other. A start is complete if it came to a pool. If earlier ones differ
    from it, a warning says so (field report A21).

    Raises:
        InputError: there is none of the known lines.
    """
    chosen: list[str] = []
    warnings: list[str] = []
    for starts in _starts_by_engine(lines):
        known = [start for start in starts if _figures(start.lines)]
        complete = [start for start in known if start.phase >= _POOL or _has_pool("\n".join(start.lines))]
        if not known:
            continue
        last = (complete or known)[-1]
        chosen += last.lines
        warnings += _warnings_about(known, last)
    found = _figures(chosen)
    if not found:
        raise InputError(
            f"{place}: none of the known lines was found (vLLM: Available KV cache memory, GPU KV cache size, # GPU"
            " blocks, Maximum concurrency, Model loading took, Graph capturing finished; SGLang: KV Cache is allocated,"
            " Load weight end, Memory pool end, Capture cuda graph end; TensorRT-LLM: Allocated ... for max tokens in"
            " paged KV cache, Number of tokens per block)"
        )
    return attrs.evolve(StartupLog(), **found, warnings=tuple(dict.fromkeys(warnings)))


def _has_pool(text: str) -> bool:
    return bool(_SGLANG_POOL.search(text) or _TENSORRT_POOL.search(text))


def _starts_by_engine(lines: Iterable[str]) -> list[list[_Start]]:
    """The starts of each engine in the log; lines that name no engine belong to all or to the only one."""
    engines: dict[str, list[_Start]] = {}
    for line in lines:
        match = _ENGINE.search(line)
        starts = engines.setdefault(next(filter(None, match.groups())) if match else "", [_Start()])
        phase = next((phase for phase, pattern in _PHASES if pattern.search(line)), None)
        if _begins(starts[-1], line, phase):
            starts.append(_Start())
        starts[-1].lines.append(line)
        if phase is not None:
            starts[-1].phase = max(starts[-1].phase, phase)
    return list(engines.values())


def _begins(start: _Start, line: str, phase: int | None) -> bool:
    """Whether a line begins another start: by what it says, or because it belongs to a phase that is over.

    SGLang loads a drafter behind the pool of the model, so there a phase is over once the server is ready.
    """
    if _START.search(line):
        return bool(_figures(start.lines))
    over = _READY if "Load weight" in line or _SGLANG_POOL.search(line) else _POOL
    is_early = phase in (_LOADING, _PROFILING) or _SGLANG_POOL.search(line) is not None
    return is_early and start.phase >= over


def _warnings_about(known: list[_Start], last: _Start) -> list[str]:
    """One sentence if the log holds several starts that differ."""
    if len(known) < 2:
        return []
    figures = [_figures(start.lines) for start in known]
    names = ("available", "kv_cache_tokens", "num_gpu_blocks", "weights")
    different = [name for name in names if len({_shown(found.get(name)) for found in figures}) > 1]
    if not different:
        return []
    used = known.index(last) + 1
    texts = [f"{_LABELS[name]} {', '.join(_shown(found.get(name)) for found in figures)}" for name in different]
    which = "the last counts" if used == len(known) else f"number {used} counts, the last that came to a pool"
    return [f"the log holds {len(known)} starts that differ ({'; '.join(texts)}): {which}"]


_LABELS = {
    "available": "GiB for the KV cache:",
    "kv_cache_tokens": "tokens:",
    "num_gpu_blocks": "blocks:",
    "weights": "GiB of weights:",
}


def _shown(value: object) -> str:
    if isinstance(value, GibFigure):
        return value.text
    return f"{value:,}" if isinstance(value, int) else "none"


def _figures(lines: Sequence[str]) -> dict[str, Any]:
    """The known figures of some lines, by the names of `StartupLog`; empty if there are none."""
    text = "\n".join(lines)
    found: dict[str, Any] = {}
    for name, patterns in _GIB_LINES.items():
        figures = [figure for pattern in patterns for figure in re.findall(pattern, text)]
        if figures:
            # Each rank logs its own; the tightest decides, which uses the most and has the least left.
            pick = min if name in ("available", "total", "free_after") else max
            found[name] = GibFigure(text=pick(figures, key=Decimal))
    for name, pattern in _COUNT_LINES.items():
        counts = [int(count.replace(",", "")) for count in re.findall(pattern, text)]
        if counts:
            found[name] = min(counts)
    if match := _CONCURRENCY.search(text):
        found["max_concurrency"] = float(match.group(1))
    if match := _UTILIZATION.search(text):
        found["utilization"] = float(match.group(1))
    return found | _sglang_pool(lines) | _tensorrt_pool(lines)


def _tensorrt_pool(lines: Sequence[str]) -> dict[str, Any]:
    """Tokens and bytes of TensorRT-LLM's pool, of the tightest rank; those before its measurement are for a trial."""
    last = max([place for place, line in enumerate(lines) if _TENSORRT_PROFILE in line], default=-1)
    pools = _TENSORRT_POOL.findall("\n".join(lines[last + 1 :])) or _TENSORRT_POOL.findall("\n".join(lines))
    if not pools:
        return {}
    size, tokens = min(pools, key=lambda pool: int(pool[1].replace(",", "")))
    pool = {"kv_cache_tokens": int(tokens.replace(",", "")), "available": GibFigure(text=size)}
    return {**pool, "engine": "TensorRT-LLM"}


def _sglang_pool(lines: Sequence[str]) -> dict[str, Any]:
    """Tokens and bytes of SGLang's pool: of the tightest rank, with the pools of a drafter that it has beside it."""
    pools: dict[str, list[tuple[int, list[str]]]] = {}
    for line in lines:
        if match := _SGLANG_POOL.search(line):
            tokens, *sizes = match.groups()
            rank = " ".join(_RANK.findall(line.partition("KV Cache")[0]))
            pools.setdefault(rank, []).append((int(tokens.replace(",", "")), [size for size in sizes if size]))
    if not pools:
        return {}
    tokens = min(count for rank in pools.values() for count, _ in rank)
    sums = [[size for _, sizes in rank for size in sizes] for rank in pools.values()]
    least = min(sums, key=lambda sizes: sum(map(Decimal, sizes)))
    available = GibFigure(text=str(sum(map(Decimal, least))), num_rounded=len(least))
    return {"kv_cache_tokens": tokens, "available": available, "engine": "SGLang"}


def calibrated_rows(
    log: StartupLog, requested_bytes: int, *, reserve_graph_memory: bool, only_resident: bool = False
) -> tuple[LedgerRow, ...]:
    """The rows of one real start-up: weights as logged, and everything else that the cache did not get.

    Args:
        log: the figures of the start-up.
        requested_bytes: memory that the logged server requested.
        reserve_graph_memory: whether it set graph memory aside.
        only_resident: whether the request covers weights and cache alone, as SGLang's static fraction does.

    Raises:
        InputError: the log lacks a required line, or its figures do not fit the request.
    """
    if log.engine == "TensorRT-LLM":
        raise InputError(
            "a plan is not calibrated by a log of TensorRT-LLM, which takes a fraction of what weights and activations"
            " leave; without --gpu the log is explained, and its figures can be given one by one (--weights-bytes, ...)"
        )
    weights_line, pool_line = {
        "SGLang": ("Load weight end", "KV Cache is allocated"),
    }.get(log.engine, ("Model loading took", "Available KV cache memory"))
    missing = [name for name, value in ((weights_line, log.weights), (pool_line, log.available)) if value is None]
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
    rest = requested_bytes - log.available.num_bytes
    rest -= sum_bytes(tuple(rows), RowRole.RESIDENT if only_resident else None)
    spread = high - log.available.num_bytes
    if rest + spread < 0:
        raise InputError(
            f"the log's figures do not fit: requested {requested_bytes:,} B, but the rows and the"
            f" {log.available.text} GiB for the cache are {-rest:,} B more; give the total_memory and"
            " gpu_memory_utilization of that server"
        )
    rest = max(rest, 0)
    is_resident = only_resident or log.activation is not None
    rows.append(
        LedgerRow(
            "other" if is_resident else "peak activation and other",
            rest,
            RowSource.MEASURED,
            RowRole.RESIDENT if is_resident else RowRole.TRANSIENT,
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
