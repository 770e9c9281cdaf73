"""The best block size: the same replay at several of them, and the largest one that costs nothing noticeable.

Small blocks hit more of a shared prefix and waste less of the last block; large ones make shorter block tables and
fewer keys to hash and events to send, which no latency model here charges. So the largest size wins whose figures are,
within a tolerance, as good as the best of any size.
"""

from collections.abc import Callable, Sequence

import attrs

from ...core.errors import InputError
from ..figures import Document, at_path
from ..scenario.options import texts_of
from ..scenario.scenario import Scenario
from .sweep import Point, content_of, run_sweep

# Path in the replay's document, what it is called, whether more is better.
JUDGED: tuple[tuple[str, str, bool], ...] = (
    ("prefix_cache.hit_rate", "hit rate", True),
    ("ttft_s.p99", "p99 TTFT", False),
    ("tpot_s.p99", "p99 TPOT", False),
    ("throughput.output_tokens_per_s", "output tokens a second", True),
    ("requests.finished", "finished requests", True),
)
OVERRIDE = "num-gpu-blocks-override"
SHOWN = ("ttft_s.p50", "preemptions.total", "kv_cache_usage.max", "assumptions.num_blocks", "assumptions.max_model_len")


@attrs.frozen(kw_only=True)
class BlockSizeQuestion:
    """Which sizes to try, on what.

    Attributes:
        scenario: what is replayed, without a block size.
        block_sizes: in tokens.
        tolerance: how much worse than the best figure, as a share of it, is not noticeable.
        num_workers: processes.
        kept_in: folder of finished runs.
    """

    scenario: Scenario
    block_sizes: tuple[int, ...]
    tolerance: float
    num_workers: int = 1
    kept_in: str | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise InputError(f"--tolerance is {self.tolerance}; it must be a share from 0 to below 1")
        if len(self.block_sizes) < 2:
            raise InputError(f"--block-sizes names {len(self.block_sizes)} size; there is a best one of two or more")


def parse_block_sizes(text: str) -> tuple[int, ...]:
    """`16,32,64` -> (16, 32, 64), ascending. Raises `InputError` for anything that is no whole number above 0."""
    try:
        sizes = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise InputError(f"--block-sizes is {text!r}; it must be whole numbers of tokens such as 16,32,64")
    return sizes


def block_size_document(question: BlockSizeQuestion, on_row: Callable[[Document], None] = lambda row: None) -> Document:
    """A row for each size, and the answer. A size that the model or the trace does not allow has an `error`.

    `on_row` is called with each row of the sweep as it is done.

    Raises:
        InputError: no size has a result.
    """
    files = question.scenario.trace
    content = content_of(files)
    points = [
        Point(command="replay", files=files, options=_options(question, size), content=content)
        for size in question.block_sizes
    ]
    results = run_sweep(points, num_workers=question.num_workers, kept_in=question.kept_in, on_row=on_row)
    rows = [_row(size, result) for size, result in zip(question.block_sizes, results, strict=True)]
    done = [row for row in rows if "error" not in row]
    if not done:
        raise InputError(f"no block size has a result; {rows[0]['block_size']}: {rows[0]['error']}")
    answer = judged(done, question.tolerance)
    given_blocks = question.scenario.num_gpu_blocks_override
    pool = f"{given_blocks} blocks of {question.block_sizes[0]} tokens, and as many tokens at each size"
    return {
        "trace": next(result["result"]["trace"] for result in results if "result" in result),
        "tolerance": question.tolerance,
        "pool": "planned for the model at each size" if given_blocks is None else pool,
        "answer": answer,
        "rows": rows,
        "assumptions": next(result["result"]["assumptions"] for result in results if "result" in result),
    }


def _options(question: BlockSizeQuestion, size: int) -> tuple[tuple[str, str], ...]:
    """A pool that is given in blocks has as many tokens at every size: its blocks are of the smallest one."""
    blocks = question.scenario.num_gpu_blocks_override
    options = {**texts_of(question.scenario), "block-size": str(size)}
    if blocks is not None:
        options[OVERRIDE] = str(blocks * question.block_sizes[0] // size)
    return tuple(options.items())


def _row(size: int, result: Document) -> Document:
    if "error" in result:
        return {"block_size": size, "error": result["error"]}
    document = result["result"]
    figures = {path: at_path(document, path) for path, _, _ in JUDGED} | {
        path: at_path(document, path) for path in SHOWN
    }
    longest = -(-figures["assumptions.max_model_len"] // size)
    return {"block_size": size, "figures": figures, "blocks_of_the_longest_request": longest}


def judged(rows: Sequence[Document], tolerance: float) -> Document:
    """The answer. Rows (`block_size`, `figures`) get `behind`: how far each figure is behind the best of any size, as a
    share of that best; and `most_behind`, the largest of these.
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
        text = f"{size} tokens: the largest size whose {judged} are within {tolerance:.3g} of the best of any size"
    else:
        path = max(chosen["behind"], key=lambda name: chosen["behind"][name])
        name = next(name for other, name, _ in JUDGED if other == path)
        text = (
            f"{size} tokens, though no size is within {tolerance:.3g} of the best in everything ({judged}): this one "
            f"is least behind, {chosen['most_behind']:.3g} of the best {name}"
        )
    return {"sentence": text, "block_size": size, "is_within_tolerance": bool(good)}
