"""Compares two configurations on one trace: every figure side by side, what differs, and why."""

from collections.abc import Iterator

import attrs

from ...core.errors import InputError, KVLedgerError
from ..figures import Document, at_path, millions, percent, seconds, shown
from ..scenario.fleet import replay_fleet_scenario
from ..scenario.options import read_texts, texts_of
from ..scenario.replay import replay_scenario
from ..scenario.results import Table
from ..scenario.scenario import Scenario
from .jobs import option_sets, reason

NOTICEABLE = 0.005  # relative difference below which two figures count as equal
POOL_SIZE = ("num_blocks", "usable_blocks", "groups", "pool", "num_blocks_if_estimates_are_off")


def explanation(document: Document) -> list[str]:
    """Explains the difference of B from A, one sentence per cause (`document` is that of `kvledger ab`)."""
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


def _options(document: Document) -> Iterator[str]:
    changes = [
        f"{row['name']} {'at its default' if row['b'] is None else row['b']} instead of "
        f"{'its default' if row['a'] is None else row['a']}"
        for row in document["options_that_differ"]
    ]
    yield f"B has {'; '.join(changes)}. All else is equal."


def _pool(document: Document, a: Document, b: Document) -> Iterator[str]:
    one, other = a["assumptions"]["num_blocks"], b["assumptions"]["num_blocks"]
    sizes = _block_size(document, "a"), _block_size(document, "b")
    if None not in sizes:
        tokens = (one - 1) * int(sizes[0] or 0), (other - 1) * int(sizes[1] or 0)
        if not _alike(*tokens):
            yield (
                f"B's pool holds {millions(tokens[1])} tokens, A's {millions(tokens[0])}: "
                f"{tokens[1] / tokens[0]:.2f} times as many."
            )
            return
    if not _alike(one, other) and None in sizes:
        yield f"B's pool has {other:,} blocks, A's {one:,}: {other / one:.2f} times as many."


def _block_size(document: Document, side: str) -> int | None:
    """The block size of a pool with one full-attention group; None for any other pool."""
    groups = document[side]["result"]["assumptions"]["groups"]
    if len(groups) != 1 or not groups[0].startswith("FullAttention(block_size="):
        return None
    return int(groups[0].removeprefix("FullAttention(block_size=").rstrip(")"))


def _cache(a: Document, b: Document) -> Iterator[str]:
    one, other = a["prefix_cache"], b["prefix_cache"]
    if _alike(one["hits_tokens"], other["hits_tokens"]):
        return
    computed = [run["throughput"]["computed_tokens_per_s"] * run["simulated_seconds"] for run in (a, b)]
    change = computed[1] / computed[0] - 1 if computed[0] else 0.0
    yield (
        f"B's prefix cache serves {percent(other['hit_rate'])} of the prompt tokens, A's {percent(one['hit_rate'])}, "
        f"so B computes {percent(abs(change), 1)} {'fewer' if change < 0 else 'more'} tokens "
        f"({millions(round(computed[1]))}, A: {millions(round(computed[0]))})."
    )


def _preemptions(a: Document, b: Document) -> Iterator[str]:
    one, other = a["preemptions"], b["preemptions"]
    if one["total"] != other["total"]:
        yield (
            f"B preempts {other['total']:,} times and recomputes {percent(other['recompute_tax'])} of its tokens; A "
            f"{one['total']:,} times and {percent(one['recompute_tax'])}."
        )


def _steps(document: Document) -> Iterator[str]:
    latency = [
        row
        for row in document["assumptions_that_differ"]
        if row["name"] not in POOL_SIZE and isinstance(row["a"], int | float) and isinstance(row["b"], int | float)
    ]
    if latency:
        values = ", ".join(f"{row['name']} {shown(row['b'])} (A: {shown(row['a'])})" for row in latency[:6])
        yield f"B's steps take different times, because these assumptions differ: {values}."


def _waiting(document: Document) -> Iterator[str]:
    pairs = document["pairs"]
    if pairs is not None and not _alike(pairs["mean_running_a"], pairs["mean_running_b"]):
        yield (
            f"B runs {pairs['mean_running_b']:,.1f} requests at a time, A {pairs['mean_running_a']:,.1f}. The more "
            "requests share a step, the longer each waits for its next token."
        )
    if pairs is None or not pairs["mean_ttft_s_difference"]:
        return
    difference, queueing = pairs["mean_ttft_s_difference"], pairs["mean_queue_time_s_difference"]
    computing = difference - queueing
    yield (
        f"Of {pairs['num_requests']:,} requests, {pairs['sooner_in_b']:,} get their first token sooner in B and "
        f"{pairs['later_in_b']:,} later. The mean is {_sooner(difference)}: {_sooner(queueing)} because of queueing, "
        f"{_sooner(computing)} because of computing the prompt."
    )


def _verdict(document: Document) -> Iterator[str]:
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


# Path in a replay's document, name, and whether more is better (None: neither).
FIGURES: tuple[tuple[str, str, bool | None], ...] = (
    ("prefix_cache.hit_rate", "prompt tokens from the cache, share", True),
    ("ttft_s.mean", "TTFT mean, s", False),
    ("ttft_s.p50", "TTFT p50, s", False),
    ("ttft_s.p99", "TTFT p99, s", False),
    ("tpot_s.p50", "TPOT p50, s", False),
    ("tpot_s.p99", "TPOT p99, s", False),
    ("itl_s.p99", "ITL p99, s", False),
    ("e2e_s.p99", "E2E p99, s", False),
    ("preemptions.total", "preemptions", False),
    ("preemptions.recompute_tax", "tokens recomputed, share", False),
    ("kv_cache_usage.mean", "KV cache in use, mean share", None),
    ("kv_cache_usage.max", "KV cache in use, max share", None),
    ("throughput.output_tokens_per_s", "output tokens per second", True),
    ("requests.rejected", "requests rejected", False),
    ("simulated_seconds", "simulated time, s", False),
)
COMMANDS = ("replay", "fleet")
ROW_COLUMNS = ("ttft_s", "queue_time_s")


@attrs.frozen(kw_only=True)
class AbQuestion:
    """Two sets of changes to the same scenario, as text; the text `default` resets an option.

    `command` is `replay` or `fleet`.
    """

    command: str
    scenario: Scenario
    a: dict[str, str]
    b: dict[str, str]

    def __attrs_post_init__(self) -> None:
        if self.command not in COMMANDS:
            raise InputError(f"--command is {self.command!r}; it is one of {', '.join(COMMANDS)}")
        if self.options(self.a) == self.options(self.b):
            raise InputError("A and B are the same: give --b NAME=VALUE for an option that B changes")

    def options(self, changes: dict[str, str]) -> dict[str, str]:
        """The scenario's options with some of them changed, as text."""
        merged = {**texts_of(self.scenario), **changes}
        return {name: text for name, text in merged.items() if text != "default"}


@attrs.frozen(kw_only=True)
class Side:
    """One of the two runs: its options as text, its document, and its finished requests (none for a fleet)."""

    options: dict[str, str]
    result: Document
    requests: Table


def ab_document(question: AbQuestion) -> Document:
    """Run both sides; returns their figures side by side, the options and assumptions that differ, and why.

    Raises InputError: a side cannot run; the message gives the reason.
    """
    a, b = _run(question, "A", question.a), _run(question, "B", question.b)
    document: Document = {
        "command": question.command,
        "trace": a.result["trace"],
        "same": {name: text for name, text in a.options.items() if b.options.get(name) == text},
        "options_that_differ": _differing(a.options, b.options),
        "assumptions_that_differ": _differing(a.result["assumptions"], b.result["assumptions"]),
        "figures": [_figure(path, name, is_more_better, a.result, b.result) for path, name, is_more_better in FIGURES],
        "pairs": _pairs(a, b),
        "explanation": [],
        **{name: {"options": side.options, "result": side.result} for name, side in (("a", a), ("b", b))},
    }
    document["explanation"] = explanation(document)
    return document


def _run(question: AbQuestion, name: str, changes: dict[str, str]) -> Side:
    options = question.options(changes)
    try:
        scenario, *fleet = read_texts(option_sets(question.command)[0], options, question.command)
        scenario = scenario.evolve(trace=question.scenario.trace)
        run = replay_fleet_scenario(scenario, *fleet) if fleet else replay_scenario(scenario, keep_requests=True)
    except KVLedgerError as error:
        given = ", ".join(f"{option} {text}" for option, text in options.items())
        raise InputError(f"{name} ({given}) has no result: {type(error).__name__}: {reason(error)}") from error
    result = run.to_dict()
    result.pop("timing")  # depends on the machine
    return Side(options=options, result=result, requests=run.requests)


def _differing(a: Document, b: Document) -> list[Document]:
    names = list(dict.fromkeys([*a, *b]))
    return [{"name": name, "a": a.get(name), "b": b.get(name)} for name in names if a.get(name) != b.get(name)]


def _figure(path: str, name: str, is_more_better: bool | None, a: Document, b: Document) -> Document:
    one, other = at_path(a, path), at_path(b, path)
    better = difference = ratio = None
    if one is not None and other is not None:
        difference, ratio = other - one, other / one if one else None
        if is_more_better is not None and difference:
            better = "b" if (difference > 0) == is_more_better else "a"
    figure = {"figure": path, "name": name, "a": one, "b": other}
    return {**figure, "difference": difference, "ratio": ratio, "better": better}


def _pairs(a: Side, b: Side) -> Document | None:
    """Compares each request between both runs: TTFT, queueing time, requests running.

    None for a fleet, which keeps no requests, and if no request finished in both runs.
    """
    others = {row["request_id"]: row for row in b.requests}
    pairs = [(row, others[row["request_id"]]) for row in a.requests if row["request_id"] in others]
    if not pairs:
        return None
    count = len(pairs)
    mean = {column: sum(other[column] - one[column] for one, other in pairs) / count for column in ROW_COLUMNS}
    return {
        "num_requests": count,
        "sooner_in_b": sum(other["ttft_s"] < one["ttft_s"] for one, other in pairs),
        "later_in_b": sum(other["ttft_s"] > one["ttft_s"] for one, other in pairs),
        "mean_ttft_s_difference": mean["ttft_s"],
        "mean_queue_time_s_difference": mean["queue_time_s"],
        "mean_running_a": _mean_running(a),
        "mean_running_b": _mean_running(b),
    }


def _mean_running(side: Side) -> float:
    """Requests between first admission and last token, averaged over the simulated time."""
    span_s = side.result["simulated_seconds"]
    return sum(row["e2e_s"] - row["queue_time_s"] for row in side.requests) / span_s if span_s else 0.0
