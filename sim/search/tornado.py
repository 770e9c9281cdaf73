"""Changes one assumption at a time and searches again, to show how the answer depends on each."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...core.errors import DoesNotFitError, InputError
from ..figures import Document
from ..latency.linear import LinearLatency
from ..latency.roofline import RooflineLatency
from ..traces.derived import ChangedTrace
from .sizing import FleetSearch, Search, SearchWatch, Setting
from .slo import Trial

Change = Callable[[Setting], Setting]


@attrs.frozen
class Assumption:
    """An assumption, with the label and the change of the setting at its low and at its high end."""

    name: str
    low: tuple[str, Change]
    high: tuple[str, Change]


def assumptions_of(setting: Setting) -> list[Assumption]:
    """The assumptions to change: traffic, latency model, pool, scheduler, router."""
    return [
        _scaled("traffic", 0.8, 1.25, lambda s, by: _with_trace(s, rate=by)),
        _scaled("output lengths", 0.8, 1.25, lambda s, by: _with_trace(s, output=by)),
        _scaled("blocks of the pool", 0.8, 1.25, _with_pool),
        _scaled("max_num_batched_tokens", 0.5, 2, _with_batched_tokens),
        Assumption(
            "routing",
            ("round-robin", lambda s: attrs.evolve(s, routing="round-robin", routing_load_weight=None)),
            ("prefix-aware", lambda s: attrs.evolve(s, routing="prefix-aware")),
        ),
        Assumption(
            "prefix caching", ("off", lambda s: _with_caching(s, False)), ("on", lambda s: _with_caching(s, True))
        ),
        *_of_latency(setting.parts.latency),
    ]


def tornado(
    setting: Setting,
    search: Search,
    answer: Trial,
    assumptions: Sequence[Assumption],
    *,
    num_workers: int = 1,
    on_row: Callable[[Document], None] = lambda row: None,
) -> list[Document]:
    """Find the answer at both ends of each assumption, and the first SLO figure of the unchanged answer there.

    Rows are sorted by the swing of the answer, then by the swing of the SLO figure, largest first; they are the same
    for any number of workers. An end that does not work with the setting has the reason instead. `answer` is the full
    replay of the answer that `search` gave. `on_row` is called with each finished row, in the order of the assumptions.
    """
    from joblib import Parallel, delayed

    parallel: Any = Parallel(n_jobs=num_workers, return_as="generator")
    rows: list[Document] = []
    for row in parallel(delayed(tornado_row)(setting, search, answer, one) for one in assumptions):
        rows.append(row)
        on_row(row)
    return ranked(rows, search.name)


def ranked(rows: Sequence[Document], name: str) -> list[Document]:
    """Rows with the largest swing of the answer (`name`) first."""
    return sorted(rows, key=lambda row: (-row[f"swing_{name}"], -row["swing_slo"], row["assumption"]))


def most_important(rows: Sequence[Document], name: str) -> list[str]:
    """The (at most two) assumptions that change the answer, or else its SLO figure, most."""
    moving = [row["assumption"] for row in rows if row[f"swing_{name}"] or row["swing_slo"]]
    return moving[:2]


def tornado_row(setting: Setting, search: Search, answer: Trial, one: Assumption) -> Document:
    """The row of one assumption."""
    row: Document = {"assumption": one.name}
    row["low"] = _end(one.name, *one.low, setting, search, answer)
    row["high"] = _end(one.name, *one.high, setting, search, answer)
    beyond = search.most + 1 if isinstance(search, FleetSearch) else 0.0
    row[f"swing_{search.name}"] = _swing(row, search.name, beyond)
    row["swing_slo"] = _swing(row, "slo_value", None)
    return row


def _end(name: str, label: str, change: Change, setting: Setting, search: Search, answer: Trial) -> Document:
    try:
        changed = change(setting)
        if changed == setting:
            return _end_as_dict(label, search.name, answer.value, answer)
        changed = attrs.evolve(changed, named={**changed.named, "changed": f"{name} {label}"})
        found = search.find(changed, start=answer.value, probes=0, watch=SearchWatch())
        there = found.trial(answer.value)
        if "stopped_after_requests" in there.figures:
            there = search.replay(changed, answer.value)
    except (InputError, DoesNotFitError) as error:
        return {"value": label, search.name: None, "slo_value": None, "does_not_apply": str(error)}
    return _end_as_dict(label, search.name, found.answer, there)


def _end_as_dict(label: str, name: str, answer: float | None, there: Trial) -> Document:
    first = next(iter(there.verdict.figures.values()))
    kept = {} if answer is not None else {"reason": "no tried value keeps the SLO"}
    return {"value": label, name: answer, "slo_value": first["value"], **kept}


def _swing(row: Document, figure: str, missing: float | None) -> float:
    """Distance between the two ends; `missing` replaces an end without a figure (None: the swing counts as 0)."""
    ends = [row[end] for end in ("low", "high")]
    if any("does_not_apply" in end for end in ends):
        return 0.0
    low, high = (missing if end[figure] is None else end[figure] for end in ends)
    return 0.0 if low is None or high is None else abs(high - low)


def _scaled(name: str, low: float, high: float, change: Callable[[Setting, float], Setting]) -> Assumption:
    """An assumption that is multiplied by `low` at one end and by `high` at the other."""
    return Assumption(name, (f"x {low:g}", lambda s: change(s, low)), (f"x {high:g}", lambda s: change(s, high)))


def _with_trace(setting: Setting, **factors: float) -> Setting:
    return attrs.evolve(setting, open_trace=lambda: ChangedTrace(setting.open_trace(), **factors))


def _with_parts(setting: Setting, **changes: Any) -> Setting:
    return attrs.evolve(setting, parts=attrs.evolve(setting.parts, **changes))


def _with_pool(setting: Setting, factor: float) -> Setting:
    config = setting.parts.allocator
    return _with_parts(setting, allocator=attrs.evolve(config, num_blocks=max(2, round(config.num_blocks * factor))))


def _with_batched_tokens(setting: Setting, factor: float) -> Setting:
    config = setting.parts.scheduler
    tokens = round(config.max_num_batched_tokens * factor)
    return _with_parts(setting, scheduler=attrs.evolve(config, max_num_batched_tokens=tokens))


def _with_caching(setting: Setting, is_on: bool) -> Setting:
    return _with_parts(setting, allocator=attrs.evolve(setting.parts.allocator, enable_caching=is_on))


def _of_latency(latency: Any) -> list[Assumption]:
    if isinstance(latency, LinearLatency):
        names = ("base_s", "prefill_token_s", "decode_seq_s")
        return [_scaled(f"latency: {name}", 0.8, 1.25, _with_coefficient(latency, name)) for name in names]
    if isinstance(latency, RooflineLatency):
        shares = ("compute_efficiency", "weights_bandwidth_efficiency", "kv_bandwidth_efficiency", "link_efficiency")
        times = {"fixed cost of a step": "step_s", "us per layer": "layer_s", "us per all-reduce": "all_reduce_s"}
        return [
            *(_scaled(f"latency: {name}", 0.85, 1.15, _with_factor(latency, name)) for name in shares),
            *(_scaled(f"latency: {title}", 0.5, 2, _with_factor(latency, name)) for title, name in times.items()),
        ]
    return []


def _with_coefficient(latency: LinearLatency, name: str) -> Callable[[Setting, float], Setting]:
    value = getattr(latency, name)
    return lambda s, by: _with_parts(s, latency=attrs.evolve(latency, **{name: value * by}))


def _with_factor(latency: RooflineLatency, name: str) -> Callable[[Setting, float], Setting]:
    """Scales one factor of the roofline; an efficiency is at most 1."""
    most = 1.0 if "efficiency" in name else float("inf")

    def change(setting: Setting, by: float) -> Setting:
        factors = attrs.evolve(latency.factors, **{name: min(getattr(latency.factors, name) * by, most)})
        return _with_parts(setting, latency=attrs.evolve(latency, factors=factors))

    return change
