"""Changes one assumption at a time and searches again, to show how the answer depends on each."""

from collections.abc import Callable, Iterator, Sequence
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


@attrs.frozen(kw_only=True)
class Assumption:
    """An assumption, with the change of the setting at its low and at its high end."""

    name: str
    low_label: str
    high_label: str
    low: Change
    high: Change


def assumptions_of(setting: Setting) -> list[Assumption]:
    """The assumptions to change: traffic, latency model, pool, scheduler, router."""
    out = [
        Assumption(name="traffic", low_label="x 0.8", high_label="x 1.25", low=_rate(0.8), high=_rate(1.25)),
        Assumption(name="output lengths", low_label="x 0.8", high_label="x 1.25", low=_output(0.8), high=_output(1.25)),
        Assumption(name="blocks of the pool", low_label="x 0.8", high_label="x 1.25", low=_pool(0.8), high=_pool(1.25)),
        Assumption(
            name="max_num_batched_tokens", low_label="x 0.5", high_label="x 2", low=_batched(0.5), high=_batched(2.0)
        ),
        Assumption(
            name="routing",
            low_label="round-robin",
            high_label="prefix-aware",
            low=_routing("round-robin"),
            high=_routing("prefix-aware"),
        ),
        Assumption(name="prefix caching", low_label="off", high_label="on", low=_caching(False), high=_caching(True)),
    ]
    return [*out, *_of_latency(setting)]


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

    Rows are sorted by the swing of the answer, then by the swing of the SLO figure, largest first. An end that does
    not work with the setting has the reason instead.

    Args:
        setting: the unchanged setting.
        search: the search that gave the answer.
        answer: the full replay of the answer.
        assumptions: to change, one at a time.
        num_workers: processes; the rows are the same for any number.
        on_row: called with each finished row, in the order of the assumptions.
    """
    rows: list[Document] = []
    for row in _rows(setting, search, answer, assumptions, num_workers):
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


def _rows(
    setting: Setting, search: Search, answer: Trial, assumptions: Sequence[Assumption], num_workers: int
) -> Iterator[Document]:
    if num_workers == 1:
        for one in assumptions:
            yield tornado_row(setting, search, answer, one)
        return
    from joblib import Parallel, delayed

    parallel: Any = Parallel(n_jobs=num_workers, return_as="generator")
    yield from parallel(delayed(tornado_row)(setting, search, answer, one) for one in assumptions)


def tornado_row(setting: Setting, search: Search, answer: Trial, one: Assumption) -> Document:
    """The row of one assumption."""
    row: Document = {"assumption": one.name}
    row["low"] = _end(one.name, one.low_label, setting, one.low, search, answer)
    row["high"] = _end(one.name, one.high_label, setting, one.high, search, answer)
    beyond = search.most + 1 if isinstance(search, FleetSearch) else 0.0
    row[f"swing_{search.name}"] = _swing(row, search.name, beyond)
    row["swing_slo"] = _swing(row, "slo_value", None)
    return row


def _end(name: str, label: str, setting: Setting, change: Change, search: Search, answer: Trial) -> Document:
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


def _rate(factor: float) -> Change:
    return lambda s: attrs.evolve(s, open_trace=lambda: ChangedTrace(s.open_trace(), rate=factor))


def _output(factor: float) -> Change:
    return lambda s: attrs.evolve(s, open_trace=lambda: ChangedTrace(s.open_trace(), output=factor))


def _pool(factor: float) -> Change:
    def change(setting: Setting) -> Setting:
        config = setting.parts.allocator
        allocator = attrs.evolve(config, num_blocks=max(2, round(config.num_blocks * factor)))
        return attrs.evolve(setting, parts=attrs.evolve(setting.parts, allocator=allocator))

    return change


def _batched(factor: float) -> Change:
    def change(setting: Setting) -> Setting:
        config = setting.parts.scheduler
        scheduler = attrs.evolve(config, max_num_batched_tokens=round(config.max_num_batched_tokens * factor))
        return attrs.evolve(setting, parts=attrs.evolve(setting.parts, scheduler=scheduler))

    return change


def _routing(name: str) -> Change:
    return lambda s: attrs.evolve(
        s, routing=name, routing_load_weight=s.routing_load_weight if name == "prefix-aware" else None
    )


def _caching(on: bool) -> Change:
    def change(setting: Setting) -> Setting:
        allocator = attrs.evolve(setting.parts.allocator, enable_caching=on)
        return attrs.evolve(setting, parts=attrs.evolve(setting.parts, allocator=allocator))

    return change


def _of_latency(setting: Setting) -> list[Assumption]:
    latency = setting.parts.latency
    if isinstance(latency, LinearLatency):
        names = ("base_s", "prefill_token_s", "decode_seq_s")
        return [_coefficient(f"latency: {name}", name, 0.8, 1.25) for name in names]
    if isinstance(latency, RooflineLatency):
        shares = ("compute_efficiency", "weights_bandwidth_efficiency", "kv_bandwidth_efficiency", "link_efficiency")
        return [
            *(_factor(f"latency: {name}", name, 0.85, 1.15) for name in shares),
            _factor("latency: fixed cost of a step", "step_s", 0.5, 2.0),
            _factor("latency: us per layer", "layer_s", 0.5, 2.0),
            _factor("latency: us per all-reduce", "all_reduce_s", 0.5, 2.0),
        ]
    return []


def _coefficient(title: str, name: str, low: float, high: float) -> Assumption:
    def scaled(by: float) -> Change:
        def change(setting: Setting) -> Setting:
            latency = setting.parts.latency
            if not isinstance(latency, LinearLatency):
                raise InputError(f"{title} belongs to the linear latency model")
            changed = attrs.evolve(latency, **{name: getattr(latency, name) * by})
            return attrs.evolve(setting, parts=attrs.evolve(setting.parts, latency=changed))

        return change

    return Assumption(name=title, low_label=f"x {low:g}", high_label=f"x {high:g}", low=scaled(low), high=scaled(high))


def _factor(title: str, name: str, low: float, high: float) -> Assumption:
    def scaled(by: float) -> Change:
        def change(setting: Setting) -> Setting:
            latency = setting.parts.latency
            if not isinstance(latency, RooflineLatency):
                raise InputError(f"{title} belongs to the roofline")
            value = getattr(latency.factors, name) * by
            factors = attrs.evolve(latency.factors, **{name: min(value, 1.0) if "efficiency" in name else value})
            changed = attrs.evolve(latency, factors=factors)
            return attrs.evolve(setting, parts=attrs.evolve(setting.parts, latency=changed))

        return change

    return Assumption(name=title, low_label=f"x {low:g}", high_label=f"x {high:g}", low=scaled(low), high=scaled(high))
