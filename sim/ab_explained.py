"""What the difference between two runs comes from, in sentences; each is told only where its figures differ.

From the options to the pool, from the pool to the cache, from the cache to the work, from the work to the waiting.
"""

from collections.abc import Iterator
from typing import Any

from .console import percent
from .replay_report import seconds, shown
from .reuse_report import millions

NOTICEABLE = 0.005
POOL_SIZE = ("num_blocks", "usable_blocks", "groups", "pool", "num_blocks_if_estimates_are_off")


def explanation(document: dict[str, Any]) -> list[str]:
    """Sentences about B against A (`document` is that of `kvledger ab`)."""
    a, b = document["a"]["result"], document["b"]["result"]
    return [
        *_options(document),
        *_pool(document, a, b),
        *_cache(a, b),
        *_preemptions(a, b),
        *_steps(document),
        *_waiting(document),
        *_verdict(document),
    ]


def _options(document: dict[str, Any]) -> Iterator[str]:
    told = [
        f"{row['name']} {'at its default' if row['b'] is None else row['b']} instead of "
        f"{'its default' if row['a'] is None else row['a']}"
        for row in document["options_that_differ"]
    ]
    yield f"B has {'; '.join(told)}. Nothing else was changed."


def _pool(document: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    one, other = a["assumptions"]["num_blocks"], b["assumptions"]["num_blocks"]
    sizes = _block_size(document, "a"), _block_size(document, "b")
    if None not in sizes:
        tokens = (one - 1) * int(sizes[0] or 0), (other - 1) * int(sizes[1] or 0)
        if not _alike(*tokens):
            yield (
                f"Its pool holds {millions(tokens[1])} tokens rather than {millions(tokens[0])}: "
                f"{tokens[1] / tokens[0]:.2f} times as much."
            )
            return
    if not _alike(one, other) and None in sizes:
        yield f"Its pool has {other:,} blocks rather than {one:,}: {other / one:.2f} times as many."


def _block_size(document: dict[str, Any], side: str) -> int | None:
    """Of a pool of one group of full attention; None where there are several."""
    groups = document[side]["result"]["assumptions"]["groups"]
    if len(groups) != 1 or not groups[0].startswith("FullAttention(block_size="):
        return None
    return int(groups[0].removeprefix("FullAttention(block_size=").rstrip(")"))


def _cache(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    one, other = a["prefix_cache"], b["prefix_cache"]
    if _alike(one["hits_tokens"], other["hits_tokens"]):
        return
    computed = [run["throughput"]["computed_tokens_per_s"] * run["simulated_seconds"] for run in (a, b)]
    change = computed[1] / computed[0] - 1 if computed[0] else 0.0
    yield (
        f"The prefix cache serves {percent(other['hit_rate'])} of the prompt tokens rather than "
        f"{percent(one['hit_rate'])}, so the engine computes {percent(abs(change), 1)} "
        f"{'fewer' if change < 0 else 'more'} tokens ({millions(round(computed[1]))} rather than "
        f"{millions(round(computed[0]))})."
    )


def _preemptions(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    one, other = a["preemptions"], b["preemptions"]
    if one["total"] != other["total"]:
        yield (
            f"It preempts {other['total']:,} times rather than {one['total']:,}, and computes "
            f"{percent(other['recompute_tax'])} of its tokens again rather than {percent(one['recompute_tax'])}."
        )


def _steps(document: dict[str, Any]) -> Iterator[str]:
    latency = [
        row
        for row in document["assumptions_that_differ"]
        if row["name"] not in POOL_SIZE and isinstance(row["a"], int | float) and isinstance(row["b"], int | float)
    ]
    if latency:
        told = ", ".join(f"{row['name']} {shown(row['b'])} (A: {shown(row['a'])})" for row in latency[:6])
        yield f"What its steps rest on is different: {told}."


def _waiting(document: dict[str, Any]) -> Iterator[str]:
    pairs = document["pairs"]
    if pairs is not None and not _alike(pairs["mean_running_a"], pairs["mean_running_b"]):
        yield (
            f"{pairs['mean_running_b']:,.1f} requests run at a time rather than {pairs['mean_running_a']:,.1f}: the "
            "more of them share a step, the longer each waits for its next token."
        )
    if pairs is None or not pairs["mean_ttft_s_difference"]:
        return
    difference, queueing = pairs["mean_ttft_s_difference"], pairs["mean_queue_time_s_difference"]
    computing = difference - queueing
    yield (
        f"Of {pairs['num_requests']:,} requests {pairs['sooner_in_b']:,} get their first token sooner and "
        f"{pairs['later_in_b']:,} later; in the mean {_sooner(difference)}: {_sooner(queueing)} from queueing and "
        f"{_sooner(computing)} from computing the prompt."
    )


def _verdict(document: dict[str, Any]) -> Iterator[str]:
    better = {side: [row["name"] for row in document["figures"] if row["better"] == side] for side in ("a", "b")}
    if not better["a"] and not better["b"]:
        yield "No figure differs."
        return
    for side, name in (("b", "B"), ("a", "A")):
        if not better[side]:
            yield f"{name} is better in no figure."
        elif len(better[side]) <= 6:
            yield f"{name} is better in: {', '.join(better[side])}."
        else:
            yield f"{name} is better in {len(better[side])} of {len(document['figures'])} figures."


def _sooner(difference_s: float) -> str:
    if abs(difference_s) < 5e-5:
        return "no difference"
    return f"{seconds(abs(difference_s))} {'sooner' if difference_s < 0 else 'later'}"


def _alike(one: float, other: float) -> bool:
    return abs(other - one) <= NOTICEABLE * max(abs(one), abs(other))
