"""Finds the best block size: replays at several sizes and picks the largest that costs nothing noticeable.

Small blocks hit more of a shared prefix and waste less of the last block. Large blocks make shorter block tables, fewer
block hashes and fewer events, which no latency model here charges for. So the answer is the largest size whose figures
are within a tolerance of the best of any size.
"""

from collections.abc import Callable, Sequence

from ...core.errors import InputError
from ..figures import Document, at_path
from ..scenario.options import SEARCH, option, options, texts_of, whole_numbers
from ..scenario.scenario import Scenario
from .kept import content_of, files_among
from .sweep import Point, run_sweep

# Path in the replay's document, name, whether more is better.
JUDGED: tuple[tuple[str, str, bool], ...] = (
    ("prefix_cache.hit_rate", "hit rate", True),
    ("ttft_s.p99", "p99 TTFT", False),
    ("tpot_s.p99", "p99 TPOT", False),
    ("throughput.output_tokens_per_s", "output tokens per second", True),
    ("requests.finished", "finished requests", True),
)
OVERRIDE = "num-gpu-blocks-override"
SHOWN = ("ttft_s.p50", "preemptions.total", "kv_cache_usage.max", "assumptions.num_blocks", "assumptions.max_model_len")


@options
class BlockSizeOptions:
    """The block sizes to try, and how."""

    block_sizes: str = option(
        "16,32,64,128,256",
        SEARCH,
        "Tokens per block to try. A pool given in blocks has blocks of the first size.",
        metavar="TOKENS,...",
    )
    tolerance: float = option(0.01, SEARCH, "Share by which a figure may be worse than the best of all sizes.")
    jobs: int = option(1, SEARCH, "Processes that run at the same time.", least=1, metavar="N")
    keep: str | None = option(None, SEARCH, "Folder of finished runs, which are not run again.", metavar="FOLDER")

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise InputError(f"--tolerance is {self.tolerance}; it must be a share from 0 to below 1")
        if len(self.sizes) < 2:
            raise InputError(f"--block-sizes names {len(self.sizes)} size; give two or more to compare")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The block sizes in tokens, ascending."""
        return tuple(sorted(set(whole_numbers(self.block_sizes, "--block-sizes", "tokens", "16,32,64", least=1))))


def block_size_document(
    scenario: Scenario, asked: BlockSizeOptions, on_row: Callable[[Document], None] = lambda row: None
) -> Document:
    """Replay every size; returns a row per size and the answer. A size that the model or trace forbids has an `error`.

    `on_row` is called with each finished row of the sweep.

    Raises InputError: no size has a result.
    """
    sizes, given_blocks, files = asked.sizes, scenario.num_gpu_blocks_override, scenario.trace
    content, points = content_of([*files, *files_among(texts_of(scenario).values())]), []
    for size in sizes:
        options = {**texts_of(scenario), "block-size": str(size)}
        if given_blocks is not None:  # of the smallest size; the pool keeps its tokens at every size
            options[OVERRIDE] = str(given_blocks * sizes[0] // size)
        points.append(Point(command="replay", files=files, options=tuple(options.items()), content=content))
    results = run_sweep(points, num_workers=asked.jobs, kept_in=asked.keep, on_row=on_row)
    rows = [_row(size, result) for size, result in zip(sizes, results, strict=True)]
    done = [row for row in rows if "error" not in row]
    if not done:
        raise InputError(f"no block size has a result; {rows[0]['block_size']}: {rows[0]['error']}")
    first = next(result["result"] for result in results if "result" in result)
    pool = f"{given_blocks} blocks of {sizes[0]} tokens; the same number of tokens at each size"
    answer = judged(done, asked.tolerance)
    return {
        "trace": first["trace"],
        "tolerance": asked.tolerance,
        "pool": "planned for each size" if given_blocks is None else pool,
        "answer": answer,
        "rows": rows,
        "assumptions": first["assumptions"],
    }


def _row(size: int, result: Document) -> Document:
    if "error" in result:
        return {"block_size": size, "error": result["error"]}
    figures = {path: at_path(result["result"], path) for path in (*(path for path, _, _ in JUDGED), *SHOWN)}
    longest = -(-figures["assumptions.max_model_len"] // size)
    return {"block_size": size, "figures": figures, "blocks_of_the_longest_request": longest}


def judged(rows: Sequence[Document], tolerance: float) -> Document:
    """The answer. Adds to each row `behind`, the distance of each figure from the best of any size as a share of that
    best, and `most_behind`, the largest of these.
    """
    for row in rows:
        row["behind"] = {}
    for path, _, is_more_better in JUDGED:
        known = [row["figures"][path] for row in rows if row["figures"][path] is not None]
        if not known:
            continue
        best = max(known) if is_more_better else min(known)
        for row in rows:
            value = row["figures"][path]
            row["behind"][path] = abs(value - best) / abs(best) if value is not None and best else 0.0
    for row in rows:
        row["most_behind"] = max(row["behind"].values(), default=0.0)
    return _answer(rows, tolerance)


def _answer(rows: Sequence[Document], tolerance: float) -> Document:
    good = [row for row in rows if row["most_behind"] <= tolerance]
    chosen = max(good, key=lambda row: row["block_size"]) if good else min(rows, key=lambda row: row["most_behind"])
    size = chosen["block_size"]
    judged = ", ".join(name for _, name, _ in JUDGED)
    if good:
        text = f"{size} tokens is the largest size whose {judged} are within {tolerance:.3g} of the best of any size"
    else:
        path = max(chosen["behind"], key=lambda name: chosen["behind"][name])
        name = next(name for other, name, _ in JUDGED if other == path)
        text = (
            f"{size} tokens is the closest, but no size is within {tolerance:.3g} of the best in everything "
            f"({judged}): its {name} is {chosen['most_behind']:.3g} from the best"
        )
    return {"sentence": text, "block_size": size, "is_within_tolerance": bool(good)}
