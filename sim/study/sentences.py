"""The sentences of a study's answer, part by part: what fits, what the cache serves, how long users wait, what paging
wins.
"""

from collections.abc import Callable, Iterator
from typing import Any

from ..figures import Document, at_path, gib, memory, millions, percent, seconds
from .answer import Figure, Sentence

NINETY = "90%"


def answer_sentences(document: Document) -> list[Sentence]:
    """The answer, as far as the parts of the study are done: `plan`, `curve`, `replay`, `compare`."""
    out: list[Sentence] = []
    for part, tell in (("plan", _of_plan), ("curve", _of_curve), ("replay", _of_replay), ("compare", _of_compare)):
        if document.get(part) is not None:
            out.extend(tell(document))
    return out


def _count(unit: str) -> Callable[[Any], str]:
    return lambda value: f"{value:,} {unit}"


def _percent(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)


def _of_plan(document: Document) -> Iterator[Sentence]:
    plan = document["plan"]
    rows = "the estimated rows of the ledger, each with its range" if _has_estimates(plan) else "the ledger's rows"

    def figure(name: str, path: str, show: Callable[[Any], str], unit: str, assumption: str = rows) -> Figure:
        value = at_path(document, path)
        return Figure(name=name, value=value, shown=show(value), unit=unit, source=path, assumption=assumption)

    if not plan["fits"]:
        yield Sentence("What fits?", (f"Not this: {plan['refusal']['message']}",))
        return
    row = largest_row(plan)
    longest = figure("max_model_len", "plan.max_model_len", _count("tokens"), "tokens", "the longest request allowed")
    yield Sentence(
        "What fits?",
        (
            figure("num_gpu_blocks", "plan.num_gpu_blocks", _count("blocks"), "blocks"),
            " hold ",
            figure("kv_cache_tokens", "plan.kv_cache_tokens", _count("tokens"), "tokens"),
            f" of {plan['model']} on {plan['totals']['gpus']} x {plan['device']['name']}: ",
            figure("max_concurrency", "plan.max_concurrency", lambda value: f"{value:.2f}", "requests"),
            " requests of ",
            longest,
            " at once",
            *_users_of_mean_length(document),
            ".",
        ),
    )
    low, high = plan["num_gpu_blocks_range"]
    index = plan["ledger"].index(row)
    pinned_by = document["derived"]["pool_pinned_by"]
    pinned = "" if pinned_by is None else f"{pinned_by}, which pins the pool. "
    span = f" The ranges of the estimates allow {low:,} to {high:,} blocks." if low != high else ""
    yield Sentence(
        "What limits it?",
        (
            f"{pinned}Beside the KV cache, the largest row of a GPU is “{row['name']}”: ",
            figure(
                "largest_row_bytes", f"plan.ledger.{index}.bytes", gib, "bytes", f"{row['source']}: {row['formula']}"
            ),
            " of ",
            figure("total_bytes", "plan.device.total_bytes", gib, "bytes", "the device as listed, or as given"),
            f" ({row['source']}).{span}",
        ),
    )


def _has_estimates(plan: Document) -> bool:
    return any(row["source"] == "estimate" for row in plan["ledger"])


def largest_row(plan: Document) -> Document:
    """The largest row of the ledger that is not the pool: where to look first."""
    others = [row for row in plan["ledger"] if row["role"] != "pool"]
    return max(others, key=lambda row: row["bytes"])


def _users_of_mean_length(document: Document) -> Iterator[str | Figure]:
    derived = document["derived"]
    if derived.get("users_of_mean_length") is None:
        return
    tokens, users = derived["mean_request_tokens"], derived["users_of_mean_length"]
    yield ", or "
    yield Figure(
        name="users_of_mean_length",
        value=users,
        shown=f"{users:,}",
        unit="requests",
        source="derived.users_of_mean_length",
        assumption="every request as long as the mean one; nothing shared",
    )
    yield " as long as the mean of this trace, "
    yield Figure(
        name="mean_request_tokens",
        value=tokens,
        shown=f"{tokens:,} tokens",
        unit="tokens",
        source="derived.mean_request_tokens",
        assumption="prompt and output, over all requests of the window, rounded up",
    )


def _of_curve(document: Document) -> Iterator[Sentence]:
    curve = document["curve"]
    question = "How much of the prompts does the prefix cache serve?"
    if not document["derived"]["claims_reuse"]:
        yield Sentence(question, ("The trace does not say which prompts share blocks, so no reuse can be claimed.",))
        return
    if not curve["infinite"]["hit_blocks"]:
        yield Sentence(question, ("No block is asked for twice: there is nothing for a prefix cache to serve.",))
        return
    sequential = "requests one after the other, outputs take no blocks, cold cache (curve.assumptions)"

    def rate(name: str, path: str, assumption: str = sequential) -> Figure:
        value = at_path(document, path)
        return Figure(
            name=name,
            value=value,
            shown=_percent(value),
            unit="share of prompt tokens",
            source=path,
            assumption=assumption,
        )

    ceiling = rate("ceiling_hit_rate", "curve.infinite.token_hit_rate", "nothing is ever evicted")
    if curve.get("at_pool"):
        yield Sentence(
            question,
            (
                "At this capacity LRU serves ",
                rate("lru_hit_rate", "curve.at_pool.lru.token_hit_rate"),
                " of the prompt tokens; the optimum, which knows the future, ",
                rate("optimum_hit_rate", "curve.at_pool.optimum.token_hit_rate", "optimal in blocks; " + sequential),
                "; a cache without end ",
                ceiling,
                ".",
            ),
        )
    yield from _memory_for_ninety(document, sequential, ceiling)


def _memory_for_ninety(document: Document, assumption: str, ceiling: Figure) -> Iterator[Sentence]:
    curve = document["curve"]
    path = f"curve.working_set.lru_blocks_for_share_of_ceiling.{NINETY}"
    num_tokens = at_path(document, path) * curve["block_size"]
    parts: list[str | Figure] = [
        "LRU serves 90 % of the ceiling (",
        ceiling,
        ") from ",
        Figure(
            name="tokens_for_90_percent",
            value=num_tokens,
            shown=f"{millions(num_tokens)} tokens",
            unit="tokens",
            source=f"{path} x curve.block_size",
            assumption=f"counted in blocks of {curve['block_size']} tokens; {assumption}",
        ),
        " on",
    ]
    point = curve.get("at_90_percent") or {}
    if "bytes" in point:
        parts += [
            ", ",
            Figure(
                name="bytes_for_90_percent",
                value=point["bytes"],
                shown=memory(point["bytes"]),
                unit="bytes",
                source="curve.at_90_percent.bytes",
                assumption="keys and values of all layers, over all GPUs together",
            ),
            " of keys and values",
        ]
    plan = document.get("plan")
    if plan is not None and plan["fits"]:
        pools = num_tokens / plan["kv_cache_tokens"]
        parts += [
            ": ",
            Figure(
                name="pools_for_90_percent",
                value=pools,
                shown=f"{pools:,.1f} times",
                unit="pools of this size",
                source=f"{path} x curve.block_size / plan.kv_cache_tokens",
                assumption="one cache that all requests share, whatever it spans",
            ),
            " this pool",
        ]
    yield Sentence("How much memory would serve nearly all?", (*parts, "."))


def _of_replay(document: Document) -> Iterator[Sentence]:
    replay = document["replay"]
    model = str(replay["assumptions"].get("latency_model", "the latency model"))

    def figure(name: str, path: str, show: Callable[[Any], str], unit: str, assumption: str) -> Figure:
        value = at_path(replay, path)
        return Figure(
            name=name, value=value, shown=show(value), unit=unit, source=f"replay.{path}", assumption=assumption
        )

    from_arrival = f"from arrival, queueing included, no HTTP server; {model}"
    yield Sentence(
        "How long do users wait?",
        (
            "The first token comes after ",
            figure("ttft_p50", "ttft_s.p50", seconds, "s", from_arrival),
            " (p50) or ",
            figure("ttft_p99", "ttft_s.p99", seconds, "s", from_arrival),
            " (p99), the others every ",
            figure("tpot_p50", "tpot_s.p50", seconds, "s", model),
            " (p50) or ",
            figure("tpot_p99", "tpot_s.p99", seconds, "s", model),
            " (p99).",
        ),
    )
    rejected = replay["requests"]["rejected"]
    refused: tuple[str | Figure, ...] = ()
    if rejected:
        refused = (
            " ",
            figure("rejected", "requests.rejected", _count("requests"), "requests", "longer than the engine serves"),
            " can never fit and were refused.",
        )
    yield Sentence("Does it keep up?", (*_keeping_up(document, figure), *refused))
    if document["derived"]["claims_reuse"]:
        yield Sentence(
            "And with everything running at once?",
            (
                "Beside running requests and their outputs, the engine's cache serves ",
                figure(
                    "replay_hit_rate",
                    "prefix_cache.hit_rate",
                    _percent,
                    "share of prompt tokens",
                    "first admissions only; blocks of running requests cannot be evicted",
                ),
                " of the prompt tokens. It is ",
                figure("kv_cache_usage_mean", "kv_cache_usage.mean", _percent, "share of blocks", "held by requests"),
                " full on average, and preempts ",
                figure("preemptions", "preemptions.total", _count("times"), "preemptions", "last admitted goes first"),
                " (",
                figure("recompute_tax", "preemptions.recompute_tax", percent, "share of computed tokens", "recomputed"),
                " of the work is done again).",
            ),
        )


def _keeping_up(document: Document, figure: Callable[..., Figure]) -> Iterator[str | Figure]:
    derived = document["derived"]

    def of_derived(name: str, show: Callable[[Any], str], unit: str, assumption: str) -> Figure:
        value = derived[name]
        return Figure(
            name=name, value=value, shown=show(value), unit=unit, source=f"derived.{name}", assumption=assumption
        )

    waiting = "from samples of the queue, at most 2,048 over the run"
    yield "No: requests come faster than they are served. " if derived["falls_behind"] else "Yes. "
    yield "When the last one arrived, "
    yield of_derived("waiting_at_last_arrival", lambda value: f"{value:,.0f} requests", "requests", waiting)
    yield " waited, at most "
    yield of_derived("most_waiting", lambda value: f"{value:,.0f}", "requests", waiting)
    yield " did at any time; all were done "
    yield of_derived("seconds_after_last_arrival", seconds, "s", "nothing arrives after the window")
    yield " later. It makes "
    yield figure(
        "output_tokens_per_s",
        "throughput.output_tokens_per_s",
        lambda value: f"{value:,.0f} output tokens/s",
        "tokens/s",
        "from the first arrival to the last token",
    )
    yield "."


def _of_compare(document: Document) -> Iterator[Sentence]:
    names = [row["name"] for row in document["compare"]["allocators"]]
    saturated = "a queue that is never empty; no prefix is shared (compare.assumptions)"

    def figure(name: str, allocator: str, field: str, show: Callable[[Any], str], unit: str) -> Figure:
        path = f"compare.allocators.{names.index(allocator)}.{field}"
        value = at_path(document, path)
        return Figure(name=name, value=value, shown=show(value), unit=unit, source=path, assumption=saturated)

    paged, static = (document["compare"]["allocators"][names.index(name)] for name in ("paged", "static"))
    parts: list[str | Figure] = [
        "Paged memory runs ",
        figure("paged_mean_batch", "paged", "mean_batch", lambda value: f"{value:,.1f}", "requests"),
        " requests at a time, static reservation ",
        figure("static_mean_batch", "static", "mean_batch", lambda value: f"{value:,.1f}", "requests"),
    ]
    if static["mean_batch"]:
        ratio = paged["mean_batch"] / static["mean_batch"]
        parts += [
            ": ",
            Figure(
                name="paged_over_static",
                value=ratio,
                shown=f"{ratio:,.1f} times",
                unit="ratio",
                source="paged mean_batch / static mean_batch of compare.allocators",
                assumption=saturated,
            ),
            " as many",
        ]
    parts += [
        ". Of the memory, ",
        figure("paged_token_pct", "paged", "token_pct", lambda value: f"{value:.1f} %", "percent of slots"),
        " holds tokens with paging, ",
        figure("static_token_pct", "static", "token_pct", lambda value: f"{value:.1f} %", "percent of slots"),
        " without.",
    ]
    yield Sentence("What does paging win?", tuple(parts))
