"""The most that a better eviction policy can gain over LRU with one pool, in tokens, GPU hours and money."""

from bisect import bisect_left
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.pool.policies.policy import eviction_policies
from ...core.types import LatencyModel, StepLoad
from ..cache.capacity_curve import ASSUMPTIONS, CapacityCurve, capacity_curve
from ..figures import Document, duration, millions, percent
from ..scenario.engine import engine_of
from ..scenario.options import SEARCH, option, options
from ..scenario.results import Table
from ..scenario.scenario import Scenario
from ..scenario.traffic import open_traffic

NOT_COMPARED = ("lfu", "length-aware")  # unless named
HOURS_A_MONTH = 730
HOUR_S = 3_600
NO_REUSE = "does not say which prompts share blocks, so eviction policies cannot be compared"


@options
class OptimumOptions:
    """The policies to compare, and a price."""

    price_per_gpu_hour: float | None = option(None, SEARCH, "Price of a GPU hour: gives the answer in money.")
    policy: str | None = option(
        None,
        SEARCH,
        "Eviction policies to show between LRU and the optimum: any of {eviction policies}. Unless given: all of them "
        f"but {' and '.join(NOT_COMPARED)}.",
        metavar="POLICY,...",
    )


@attrs.frozen(kw_only=True)
class Worth:
    """Hit rates of every policy with one pool of `capacity` blocks of the trace, and the cost of a prompt token.

    `seconds_per_token` is the time that the engine takes per prompt token, on `num_gpus` (1 without a model).
    """

    curve: CapacityCurve
    capacity: int
    seconds_per_token: float
    num_gpus: int
    price_per_gpu_hour: float | None
    assumptions: Document

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that LRU computes and the optimum serves."""
        points = {name: points[0] for name, points in self.curve.policies.items()}
        return points["optimum"].hit_tokens - points["lru"].hit_tokens

    @property
    def saved_gpu_hours(self) -> float:
        """GPU hours that computing them takes."""
        return self.saved_tokens * self.seconds_per_token * self.num_gpus / HOUR_S

    @property
    def lru_blocks_for_the_same(self) -> int:
        """The smallest LRU capacity that serves as much as the optimum does with the pool."""
        wanted = self.curve.policies["optimum"][0].hit_tokens
        sizes = range(self.capacity, max(self.capacity, self.curve.lru.smallest_for(1.0)))
        return self.capacity + bisect_left(sizes, wanted, key=lambda size: self.curve.lru.at(size).hit_tokens)

    @property
    def window_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.curve.prompts.arrivals_s[-1] - self.curve.prompts.arrivals_s[0])

    def to_frame(self) -> Any:
        """A data frame with a row for each policy."""
        return Table.of_rows(self.to_dict()["policies"]).to_frame()

    def to_dict(self) -> Document:
        """The document of `kvledger optimum --json`."""
        curve = self.curve
        rows = {name: points[0] for name, points in curve.policies.items()}
        same = self.lru_blocks_for_the_same
        return {
            "trace": curve.info.as_dict(),
            "window": curve.info.window_as_dict(),
            "pool": {
                "num_blocks": self.capacity,
                "block_size": curve.block_size,
                "tokens": self.capacity * curve.block_size,
                "gpus": self.num_gpus,
            },
            "policies": [
                {
                    "policy": name,
                    "hit_tokens": point.hit_tokens,
                    "token_hit_rate": curve.token_hit_rate(point),
                    "computed_tokens": curve.input_tokens - point.hit_tokens,
                }
                for name, point in rows.items()
            ],
            "optimum_over_lru": {
                "tokens": self.saved_tokens,
                "share_of_prompt_tokens": self.saved_tokens / curve.input_tokens,
                "us_per_prompt_token": self.seconds_per_token * 1e6,
                "gpu_hours": self.saved_gpu_hours,
                "window_hours": self.window_s / HOUR_S,
            },
            "lru_for_the_same": {"num_blocks": same, "times_the_pool": same / self.capacity},
            "money": self._money(same / self.capacity),
            "answer": {"sentence": self._sentence(same / self.capacity)},
            "assumptions": self.assumptions,
        }

    def _money(self, times: float) -> dict[str, float] | None:
        price = self.price_per_gpu_hour
        if price is None:
            return None
        windows = HOURS_A_MONTH * HOUR_S / self.window_s if self.window_s else 0.0
        return {
            "price_per_gpu_hour": price,
            "computed_in_vain_in_the_window": self.saved_gpu_hours * price,
            f"computed_in_vain_per_month_of_{HOURS_A_MONTH}_hours": self.saved_gpu_hours * price * windows,
            f"memory_for_the_same_per_month_of_{HOURS_A_MONTH}_hours": (
                (times - 1) * self.num_gpus * price * HOURS_A_MONTH
            ),
        }

    def _sentence(self, times: float) -> str:
        curve = self.curve
        lru, best = (curve.token_hit_rate(curve.policies[name][0]) for name in ("lru", "optimum"))
        text = (
            f"With this pool, LRU serves {percent(lru)} of the prompt tokens. Best possible eviction: {percent(best)}. "
            f"So no policy saves more than {millions(self.saved_tokens)} tokens or {self.saved_gpu_hours:,.3g} GPU "
            f"hours in {duration(self.window_s)}. LRU needs {times:,.3g} times the pool to serve as much"
        )
        money = self._money(times)
        if money is None:
            return text + "."
        _, window, month, memory = money.values()
        return (
            f"{text}. The saving is worth {window:,.2f} in this window and {month:,.0f} per month at this traffic; "
            f"GPUs with that much more memory for LRU cost {memory:,.0f} per month."
        )


def optimum_worth(scenario: Scenario, asked: OptimumOptions | None = None) -> Worth:
    """Compare eviction policies on a scenario's traffic at the pool of its engine.

    Raises InputError: a price without a model, a trace that claims no reuse, a pool smaller than a block of the trace,
    or a model whose blocks are not all of one kind.
    """
    price_per_gpu_hour = None if asked is None else asked.price_per_gpu_hour
    trace, engine = open_traffic(scenario), engine_of(scenario)
    groups, config = engine.parts.allocator.groups, engine.parts.allocator
    if price_per_gpu_hour is not None and not (0 < price_per_gpu_hour < float("inf") and engine.pool.plan is not None):
        raise InputError(
            f"--price-per-gpu-hour is {price_per_gpu_hour}; it must be above 0, and needs --model and --gpu"
        )
    if len(groups) != 1:
        raise InputError(
            f"the pool has {len(groups)} KV cache groups, and this comparison needs one; give a model whose layers all "
            "use full attention"
        )
    trace_block_size = trace.info.trace_block_size
    if trace_block_size is None:
        raise InputError(f"{trace.info.name} {NO_REUSE}")
    capacity = (config.num_blocks - 1) * groups[0].block_size // trace_block_size
    if capacity < 1:
        raise InputError(f"the pool is smaller than one block of the trace ({trace_block_size} tokens)")
    if asked is not None and asked.policy is not None:
        named = [name.strip() for name in asked.policy.split(",")]
    else:
        named = [name for name in eviction_policies.names() if name not in NOT_COMPARED]
    policies = ("lru", *(name for name in named if name not in ("lru", "optimum")), "optimum")
    curve = capacity_curve(trace, capacities=[capacity], policies=policies)
    if not curve.info.claims_reuse:
        raise InputError(f"{curve.info.name} {NO_REUSE}")
    mean_context = curve.input_tokens / curve.prompts.num_requests / 2
    seconds = _seconds_per_token(engine.parts.latency, engine.parts.scheduler.max_num_batched_tokens, mean_context)
    plan = engine.pool.plan
    return Worth(
        curve=curve,
        capacity=capacity,
        seconds_per_token=seconds,
        num_gpus=1 if plan is None else plan.deployment.num_gpus,
        price_per_gpu_hour=price_per_gpu_hour,
        assumptions={
            "counted": "; ".join(ASSUMPTIONS),
            "prompt_token": f"computed in full steps of {engine.parts.scheduler.max_num_batched_tokens:,} prompt "
            f"tokens, each with a context of {mean_context:,.0f} tokens (half the mean prompt); a GPU hour "
            "is worth its price",
            "memory_for_lru": "bought as more engines of the same kind, counting only their pools",
            "month": "the traffic of the window, all day",
            **engine.pool.facts,
            **engine.parts.latency.assumptions(),
        },
    )


def _seconds_per_token(latency: LatencyModel, num_tokens: int, mean_context: float) -> float:
    return latency.step_seconds(StepLoad(num_tokens, 0, round(num_tokens * mean_context), 0, 0)) / num_tokens
