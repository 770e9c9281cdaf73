"""Writes the sentences of a study's answer: what fits, cache hits, latency, and what paging gains."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..figures import Document, at_path, gib, memory, millions, percent, seconds
from .answer import Figure, Sentence

NINETY_PERCENT = "curve.working_set.lru_blocks_for_share_of_ceiling.90%"
# A figure of the document: its path there, how its value is shown, the value's unit, what it depends on most.
Row = tuple[str, Callable[[Any], str], str, str]
BLOCKS, TOKENS, TIMES = "{:,} blocks".format, "{:,} tokens".format, "{:,.1f} times".format


def answer_sentences(document: Document) -> list[Sentence]:
    """The sentences of every finished part: `plan`, `curve`, `replay`, `compare`."""
    writers = {"plan": _of_plan, "curve": _of_curve, "replay": _of_replay, "compare": _of_compare}
    return [
        sentence for part, write in writers.items() if document.get(part) is not None for sentence in write(document)
    ]


def _sentence(document: Document, question: str, text: str, **figures: Row | Figure) -> Sentence:
    """A sentence from a text with the names of its figures in braces."""

    def figure(name: str) -> Figure:
        row = figures[name]
        if isinstance(row, Figure):
            return row
        source, show, unit, assumption = row
        value = at_path(document, source)
        return Figure(name=name, value=value, shown=show(value), unit=unit, source=source, assumption=assumption)

    pieces = enumerate(re.split(r"{(\w+)}", text))
    return Sentence(question, tuple(figure(piece) if place % 2 else piece for place, piece in pieces if piece))


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
    same_length = ""
    if derived.get("users_of_mean_length") is not None:
        same_length = ", or {users_of_mean_length} of this trace's mean length, {mean_request_tokens}"
    every = "every request has the mean length; no prefix is shared"
    of_mean = "mean of prompt plus output over the window, rounded up"
    yield _sentence(
        document,
        "What fits?",
        f"{{num_gpu_blocks}} hold {{kv_cache_tokens}} of {plan['model']} on {plan['totals']['gpus']} x "
        f"{plan['device']['name']}: {{max_concurrency}} requests of {{max_model_len}} at once{same_length}.",
        num_gpu_blocks=("plan.num_gpu_blocks", BLOCKS, "blocks", rows),
        kv_cache_tokens=("plan.kv_cache_tokens", TOKENS, "tokens", rows),
        max_concurrency=("plan.max_concurrency", "{:.2f}".format, "requests", rows),
        max_model_len=("plan.max_model_len", TOKENS, "tokens", "the longest accepted request"),
        users_of_mean_length=("derived.users_of_mean_length", "{:,.0f}".format, "requests", every),
        mean_request_tokens=("derived.mean_request_tokens", TOKENS, "tokens", of_mean),
    )
    # The largest row of the memory ledger other than the pool.
    row = max((row for row in plan["ledger"] if row["role"] != "pool"), key=lambda row: row["bytes"])
    low, high = plan["num_gpu_blocks_range"]
    pinned = f"{derived['pool_pinned_by']}: it fixes the pool's size. " if derived["pool_pinned_by"] else ""
    span = f" The uncertainty of the estimates allows {low:,} to {high:,} blocks." if low != high else ""
    path = f"plan.ledger.{plan['ledger'].index(row)}.bytes"
    yield _sentence(
        document,
        "What limits it?",
        f"{pinned}After the KV cache, the largest use of a GPU's memory is “{row['name']}”: {{largest_row_bytes}} of "
        f"{{total_bytes}} ({row['source']}).{span}",
        largest_row_bytes=(path, gib, "bytes", f"{row['source']}: {row['formula']}"),
        total_bytes=("plan.device.total_bytes", gib, "bytes", "the device as listed, or as given"),
    )


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

    def rate(path: str, assumption: str) -> Row:
        return f"curve.{path}.token_hit_rate", _percent, "share of prompt tokens", assumption

    ceiling = rate("infinite", "no block is ever evicted")
    if curve.get("at_pool"):
        yield _sentence(
            document,
            question,
            "With this pool, LRU eviction serves {lru_hit_rate} of the prompt tokens. Best possible eviction: "
            "{optimum_hit_rate}. Unlimited cache: {ceiling_hit_rate}.",
            lru_hit_rate=rate("at_pool.lru", in_order),
            optimum_hit_rate=rate("at_pool.optimum", f"most blocks served; {in_order}"),
            ceiling_hit_rate=ceiling,
        )
    tokens = at_path(document, NINETY_PERCENT) * curve["block_size"]
    text = "To serve 90 % of what an unlimited cache serves ({ceiling_hit_rate}), LRU needs {tokens_for_90_percent}"
    if "bytes" in (curve.get("at_90_percent") or {}):
        text += " or {bytes_for_90_percent} of KV cache"
    pools = tokens / plan["kv_cache_tokens"] if plan is not None and plan["fits"] else None
    if pools is not None:
        text += ": {pools_for_90_percent} this pool"
    yield _sentence(
        document,
        "How much memory would serve nearly all repeated tokens?",
        f"{text}.",
        ceiling_hit_rate=ceiling,
        tokens_for_90_percent=Figure(
            name="tokens_for_90_percent",
            value=tokens,
            shown=f"{millions(tokens)} tokens",
            unit="tokens",
            source=f"{NINETY_PERCENT} x curve.block_size",
            assumption=f"counted in blocks of {curve['block_size']} tokens; {in_order}",
        ),
        bytes_for_90_percent=(
            "curve.at_90_percent.bytes",
            memory,
            "bytes",
            "KV cache of all layers, over all GPUs together",
        ),
        pools_for_90_percent=Figure(
            name="pools_for_90_percent",
            value=pools,
            shown=TIMES(pools or 0.0),
            unit="pools of this size",
            source=f"{NINETY_PERCENT} x curve.block_size / plan.kv_cache_tokens",
            assumption="one cache that all requests share, on however many GPUs",
        ),
    )


def _of_replay(document: Document) -> Iterator[Sentence]:
    replay, derived = document["replay"], document["derived"]
    model = str(replay["assumptions"].get("latency_model", "the latency model"))
    from_arrival = f"from the client's send, includes the HTTP server (http_ms) and queueing; {model}"
    yield _sentence(
        document,
        "How long do users wait?",
        "Time to first token: {ttft_p50} (p50), {ttft_p99} (p99). Time per output token after it: {tpot_p50} (p50), "
        "{tpot_p99} (p99).",
        ttft_p50=("replay.ttft_s.p50", seconds, "s", from_arrival),
        ttft_p99=("replay.ttft_s.p99", seconds, "s", from_arrival),
        tpot_p50=("replay.tpot_s.p50", seconds, "s", model),
        tpot_p99=("replay.tpot_s.p99", seconds, "s", model),
    )
    verdict = "No: requests arrive faster than the engine serves them." if derived["falls_behind"] else "Yes."
    rejected = " {rejected} can never fit in the pool and were rejected." if replay["requests"]["rejected"] else ""
    samples = "read from at most 2,048 samples of the queue"
    yield _sentence(
        document,
        "Does it keep up?",
        f"{verdict} When the last request arrived, {{waiting_at_last_arrival}} were waiting (at most {{most_waiting}} "
        "at any time), and the rest took {seconds_after_last_arrival} more. Throughput: {output_tokens_per_s}."
        f"{rejected}",
        waiting_at_last_arrival=("derived.waiting_at_last_arrival", "{:,.0f} requests".format, "requests", samples),
        most_waiting=("derived.most_waiting", "{:,.0f}".format, "requests", samples),
        seconds_after_last_arrival=(
            "derived.seconds_after_last_arrival",
            seconds,
            "s",
            "no request arrives after the window",
        ),
        output_tokens_per_s=(
            "replay.throughput.output_tokens_per_s",
            "{:,.0f} output tokens/s".format,
            "tokens/s",
            "from the first arrival to the last token",
        ),
        rejected=(
            "replay.requests.rejected",
            "{:,} requests".format,
            "requests",
            "larger than the pool or longer than max_model_len",
        ),
    )
    if not derived["claims_reuse"]:
        return
    first = "first admission of each request; blocks of running requests cannot be evicted"
    victim, again = "the last admitted request is preempted first", "tokens recomputed after a preemption"
    yield _sentence(
        document,
        "How does the cache do in the whole engine?",
        "While running requests and their outputs share the pool, the cache serves {replay_hit_rate} of the prompt "
        "tokens. The pool is {kv_cache_usage_mean} full on average, and the engine preempts {preemptions} "
        "({recompute_tax} of all computed tokens are recomputed).",
        replay_hit_rate=("replay.prefix_cache.hit_rate", _percent, "share of prompt tokens", first),
        kv_cache_usage_mean=("replay.kv_cache_usage.mean", _percent, "share of blocks", "held by requests"),
        preemptions=("replay.preemptions.total", "{:,} times".format, "preemptions", victim),
        recompute_tax=("replay.preemptions.recompute_tax", percent, "share of computed tokens", again),
    )


def _of_compare(document: Document) -> Iterator[Sentence]:
    allocators = document["compare"]["allocators"]
    index = {row["name"]: number for number, row in enumerate(allocators)}
    saturated = "requests always wait; no prefix is shared (compare.assumptions)"

    def row(allocator: str, field: str, show: Callable[[Any], str], unit: str) -> Row:
        return f"compare.allocators.{index[allocator]}.{field}", show, unit, saturated

    paged, static = (allocators[index[name]]["mean_batch"] for name in ("paged", "static"))
    ratio = ": {paged_over_static} as many" if static else ""
    yield _sentence(
        document,
        "What does paging gain?",
        "Paged allocation runs {paged_mean_batch} requests at a time, static reservation {static_mean_batch}"
        f"{ratio}. Share of the memory that holds tokens: {{paged_token_pct}} paged, {{static_token_pct}} static.",
        paged_mean_batch=row("paged", "mean_batch", "{:,.1f}".format, "requests"),
        static_mean_batch=row("static", "mean_batch", "{:,.1f}".format, "requests"),
        paged_over_static=Figure(
            name="paged_over_static",
            value=paged / (static or 1),
            shown=TIMES(paged / (static or 1)),
            unit="ratio",
            source="paged mean_batch / static mean_batch of compare.allocators",
            assumption=saturated,
        ),
        paged_token_pct=row("paged", "token_pct", "{:.1f} %".format, "percent of slots"),
        static_token_pct=row("static", "token_pct", "{:.1f} %".format, "percent of slots"),
    )
