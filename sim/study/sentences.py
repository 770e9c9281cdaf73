"""Writes the sentences of a study's answer: what fits, cache hits, latency, and what paging gains."""

from collections.abc import Callable, Iterator
from typing import Any

from ..figures import Document, at_path, gib, memory, millions, percent, seconds
from .answer import Figure, Sentence

NINETY_PERCENT = "curve.working_set.lru_blocks_for_share_of_ceiling.90%"
Show = Callable[[Any], str]
Parts = list[str | Figure]


def answer_sentences(document: Document) -> list[Sentence]:
    """The sentences of every finished part: `plan`, `curve`, `replay`, `compare`."""
    writers = {"plan": _of_plan, "curve": _of_curve, "replay": _of_replay, "compare": _of_compare}
    return [
        sentence for part, write in writers.items() if document.get(part) is not None for sentence in write(document)
    ]


def _figure(document: Document, name: str, source: str, show: Show, unit: str, assumption: str) -> Figure:
    """The figure of a study's document at the path `source`."""
    value = at_path(document, source)
    return Figure(name=name, value=value, shown=show(value), unit=unit, source=source, assumption=assumption)


def _count(unit: str) -> Show:
    return lambda value: f"{value:,} {unit}"


def _decimal(digits: int, unit: str = "") -> Show:
    return lambda value: f"{value:,.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)


def _of_plan(document: Document) -> Iterator[Sentence]:
    plan, derived = document["plan"], document["derived"]
    if not plan["fits"]:
        yield Sentence("What fits?", (f"This deployment does not fit: {plan['refusal']['message']}",))
        return
    rows = "the rows of the memory ledger"
    if any(row["source"] == "estimate" for row in plan["ledger"]):
        rows = "the estimated rows of the memory ledger, each with its range"

    def figure(name: str, path: str, show: Show, unit: str, assumption: str = rows) -> Figure:
        return _figure(document, name, path, show, unit, assumption)

    same_length: Parts = []
    if derived.get("users_of_mean_length") is not None:
        users, mean = "users_of_mean_length", "mean_request_tokens"
        every = "every request has the mean length; no prefix is shared"
        of_mean = "mean of prompt plus output over the window, rounded up"
        same_length = [
            ", or ",
            figure(users, f"derived.{users}", _decimal(0), "requests", every),
            " of this trace's mean length, ",
            figure(mean, f"derived.{mean}", _count("tokens"), "tokens", of_mean),
        ]
    yield Sentence(
        "What fits?",
        (
            figure("num_gpu_blocks", "plan.num_gpu_blocks", _count("blocks"), "blocks"),
            " hold ",
            figure("kv_cache_tokens", "plan.kv_cache_tokens", _count("tokens"), "tokens"),
            f" of {plan['model']} on {plan['totals']['gpus']} x {plan['device']['name']}: ",
            figure("max_concurrency", "plan.max_concurrency", lambda value: f"{value:.2f}", "requests"),
            " requests of ",
            figure("max_model_len", "plan.max_model_len", _count("tokens"), "tokens", "the longest accepted request"),
            " at once",
            *same_length,
            ".",
        ),
    )
    row = largest_row(plan)
    low, high = plan["num_gpu_blocks_range"]
    pinned = f"{derived['pool_pinned_by']}: it fixes the pool's size. " if derived["pool_pinned_by"] else ""
    span = f" The uncertainty of the estimates allows {low:,} to {high:,} blocks." if low != high else ""
    path = f"plan.ledger.{plan['ledger'].index(row)}.bytes"
    yield Sentence(
        "What limits it?",
        (
            f"{pinned}After the KV cache, the largest use of a GPU's memory is “{row['name']}”: ",
            figure("largest_row_bytes", path, gib, "bytes", f"{row['source']}: {row['formula']}"),
            " of ",
            figure("total_bytes", "plan.device.total_bytes", gib, "bytes", "the device as listed, or as given"),
            f" ({row['source']}).{span}",
        ),
    )


def largest_row(plan: Document) -> Document:
    """The largest row of the memory ledger other than the pool."""
    return max((row for row in plan["ledger"] if row["role"] != "pool"), key=lambda row: row["bytes"])


def _of_curve(document: Document) -> Iterator[Sentence]:
    curve, plan = document["curve"], document.get("plan")
    question = "How much of the prompts does the prefix cache serve?"
    if not document["derived"]["claims_reuse"]:
        yield Sentence(question, ("Unknown: the trace does not say which prompts share blocks.",))
        return
    if not curve["infinite"]["hit_blocks"]:
        yield Sentence(question, ("Nothing: no prompt block occurs twice.",))
        return
    in_order = "requests run one after the other, outputs take no blocks, the cache starts empty (curve.assumptions)"

    def rate(name: str, path: str, assumption: str) -> Figure:
        return _figure(document, name, path, _percent, "share of prompt tokens", assumption)

    ceiling = rate("ceiling_hit_rate", "curve.infinite.token_hit_rate", "no block is ever evicted")
    if curve.get("at_pool"):
        yield Sentence(
            question,
            (
                "With this pool, LRU eviction serves ",
                rate("lru_hit_rate", "curve.at_pool.lru.token_hit_rate", in_order),
                " of the prompt tokens. Best possible eviction: ",
                rate("optimum_hit_rate", "curve.at_pool.optimum.token_hit_rate", f"most blocks served; {in_order}"),
                ". Unlimited cache: ",
                ceiling,
                ".",
            ),
        )
    tokens = at_path(document, NINETY_PERCENT) * curve["block_size"]
    parts: Parts = [
        "To serve 90 % of what an unlimited cache serves (",
        ceiling,
        "), LRU needs ",
        Figure(
            name="tokens_for_90_percent",
            value=tokens,
            shown=f"{millions(tokens)} tokens",
            unit="tokens",
            source=f"{NINETY_PERCENT} x curve.block_size",
            assumption=f"counted in blocks of {curve['block_size']} tokens; {in_order}",
        ),
    ]
    if "bytes" in (curve.get("at_90_percent") or {}):
        over = "KV cache of all layers, over all GPUs together"
        size = _figure(document, "bytes_for_90_percent", "curve.at_90_percent.bytes", memory, "bytes", over)
        parts += [" or ", size, " of KV cache"]
    if plan is not None and plan["fits"]:
        pools = Figure(
            name="pools_for_90_percent",
            value=tokens / plan["kv_cache_tokens"],
            shown=f"{tokens / plan['kv_cache_tokens']:,.1f} times",
            unit="pools of this size",
            source=f"{NINETY_PERCENT} x curve.block_size / plan.kv_cache_tokens",
            assumption="one cache that all requests share, on however many GPUs",
        )
        parts += [": ", pools, " this pool"]
    yield Sentence("How much memory would serve nearly all repeated tokens?", (*parts, "."))


def _of_replay(document: Document) -> Iterator[Sentence]:
    replay = document["replay"]
    model = str(replay["assumptions"].get("latency_model", "the latency model"))

    def figure(name: str, path: str, show: Show, unit: str, assumption: str) -> Figure:
        return _figure(document, name, f"replay.{path}", show, unit, assumption)

    from_arrival = f"measured from arrival, includes queueing, no HTTP server; {model}"
    yield Sentence(
        "How long do users wait?",
        (
            "Time to first token: ",
            figure("ttft_p50", "ttft_s.p50", seconds, "s", from_arrival),
            " (p50), ",
            figure("ttft_p99", "ttft_s.p99", seconds, "s", from_arrival),
            " (p99). Time per output token after it: ",
            figure("tpot_p50", "tpot_s.p50", seconds, "s", model),
            " (p50), ",
            figure("tpot_p99", "tpot_s.p99", seconds, "s", model),
            " (p99).",
        ),
    )
    rejected: Parts = []
    if replay["requests"]["rejected"]:
        too_long = "larger than the pool or longer than max_model_len"
        number = figure("rejected", "requests.rejected", _count("requests"), "requests", too_long)
        rejected = [" ", number, " can never fit in the pool and were rejected."]
    yield Sentence("Does it keep up?", (*_keeping_up(document), *rejected))
    if document["derived"]["claims_reuse"]:
        first = "first admission of each request; blocks of running requests cannot be evicted"
        victim = "the last admitted request is preempted first"
        again = "tokens recomputed after a preemption"
        yield Sentence(
            "How does the cache do in the whole engine?",
            (
                "While running requests and their outputs share the pool, the cache serves ",
                figure("replay_hit_rate", "prefix_cache.hit_rate", _percent, "share of prompt tokens", first),
                " of the prompt tokens. The pool is ",
                figure("kv_cache_usage_mean", "kv_cache_usage.mean", _percent, "share of blocks", "held by requests"),
                " full on average, and the engine preempts ",
                figure("preemptions", "preemptions.total", _count("times"), "preemptions", victim),
                " (",
                figure("recompute_tax", "preemptions.recompute_tax", percent, "share of computed tokens", again),
                " of all computed tokens are recomputed).",
            ),
        )


def _keeping_up(document: Document) -> Iterator[str | Figure]:
    def of_queue(name: str, show: Show) -> Figure:
        samples = "read from at most 2,048 samples of the queue"
        return _figure(document, name, f"derived.{name}", show, "requests", samples)

    behind = document["derived"]["falls_behind"]
    yield "No: requests arrive faster than the engine serves them. " if behind else "Yes. "
    yield "When the last request arrived, "
    yield of_queue("waiting_at_last_arrival", _decimal(0, " requests"))
    yield " were waiting (at most "
    yield of_queue("most_waiting", _decimal(0))
    yield " at any time), and the rest took "
    after, nothing = "seconds_after_last_arrival", "no request arrives after the window"
    yield _figure(document, after, f"derived.{after}", seconds, "s", nothing)
    yield " more. Throughput: "
    rate, span = "output_tokens_per_s", "from the first arrival to the last token"
    yield _figure(document, rate, f"replay.throughput.{rate}", _decimal(0, " output tokens/s"), "tokens/s", span)
    yield "."


def _of_compare(document: Document) -> Iterator[Sentence]:
    allocators = document["compare"]["allocators"]
    index = {row["name"]: number for number, row in enumerate(allocators)}
    saturated = "requests always wait; no prefix is shared (compare.assumptions)"

    def figure(allocator: str, field: str, show: Show, unit: str) -> Figure:
        path = f"compare.allocators.{index[allocator]}.{field}"
        return _figure(document, f"{allocator}_{field}", path, show, unit, saturated)

    ratio: Parts = []
    paged, static = (allocators[index[name]]["mean_batch"] for name in ("paged", "static"))
    if static:
        times = Figure(
            name="paged_over_static",
            value=paged / static,
            shown=f"{paged / static:,.1f} times",
            unit="ratio",
            source="paged mean_batch / static mean_batch of compare.allocators",
            assumption=saturated,
        )
        ratio = [": ", times, " as many"]
    parts: Parts = [
        "Paged allocation runs ",
        figure("paged", "mean_batch", _decimal(1), "requests"),
        " requests at a time, static reservation ",
        figure("static", "mean_batch", _decimal(1), "requests"),
        *ratio,
        ". Share of the memory that holds tokens: ",
        figure("paged", "token_pct", lambda value: f"{value:.1f} %", "percent of slots"),
        " paged, ",
        figure("static", "token_pct", lambda value: f"{value:.1f} %", "percent of slots"),
        " static.",
    ]
    yield Sentence("What does paging gain?", tuple(parts))
