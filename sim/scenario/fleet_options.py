"""From the options of `kvledger fleet` to the pools of a disaggregated fleet and the links between them."""

import math

import attrs

from ...core.errors import InputError
from ..fleet.disaggregation import FIRST_TOKENS, DisaggregatedShape
from ..fleet.links import SHARINGS, TransferModel
from ..fleet.routing import Router, make_router
from ..fleet.tiers import Tier
from .engine_options import EngineOptions
from .replay_setup import Pool

DEFAULT_REPLICAS = 2


@attrs.frozen(kw_only=True)
class DisaggregationOptions:
    """What decides the pools, as typed; None where an option was not given."""

    replicas: int | None = None
    prefill_replicas: int | None = None
    decode_replicas: int | None = None
    decode_routing: str | None = None
    transfer_gb_s: float | None = None
    transfer_latency_ms: float | None = None
    transfer_sharing: str | None = None
    transfer_bytes_per_block: int | None = None
    first_token_from: str | None = None

    def __attrs_post_init__(self) -> None:
        if (self.prefill_replicas is None) != (self.decode_replicas is None):
            raise InputError("--prefill-replicas and --decode-replicas go together: a request needs both")
        if self.prefill_replicas is None:
            for field in attrs.fields(DisaggregationOptions):
                value = getattr(self, field.name)
                if field.name != "replicas" and value is not None:
                    raise InputError(f"{_option(field.name)} {value} has no effect without --prefill-replicas")
            return
        if self.replicas is not None:
            raise InputError(
                f"--replicas {self.replicas} and --prefill-replicas {self.prefill_replicas} exclude each other: give "
                "the servers of each pool"
            )
        if self.transfer_gb_s is None:
            raise InputError("--prefill-replicas needs --transfer-gb-s; it has no default (inf: copies take no time)")
        if not self.transfer_gb_s > 0:
            raise InputError(f"--transfer-gb-s is {self.transfer_gb_s}; it must be above 0 (inf: copies take no time)")
        if not 0 <= (self.transfer_latency_ms or 0) < math.inf:
            raise InputError(f"--transfer-latency-ms is {self.transfer_latency_ms}; it must be 0 or more")
        self._check("transfer_sharing", SHARINGS)
        self._check("first_token_from", FIRST_TOKENS)

    @property
    def num_replicas(self) -> int:
        """Of a fleet that is not disaggregated."""
        return DEFAULT_REPLICAS if self.replicas is None else self.replicas

    def shape(self, data_parallel_size: int, event_delay_s: float) -> DisaggregatedShape | None:
        """The two pools; None: every server does both."""
        if self.prefill_replicas is None or self.decode_replicas is None:
            return None
        return DisaggregatedShape(
            num_prefill_replicas=self.prefill_replicas,
            num_decode_replicas=self.decode_replicas,
            data_parallel_size=data_parallel_size,
            event_delay_s=event_delay_s,
            first_token_from=self.first_token_from or FIRST_TOKENS[0],
        )

    def transfer(self, pool: Pool) -> TransferModel:
        """The links of a disaggregated fleet.

        Raises:
            InputError: a finite bandwidth, and no bytes to copy.
        """
        bytes_per_block = self.transfer_bytes_per_block or (pool.plan.bytes_per_block if pool.plan else None)
        if not bytes_per_block and self.transfer_gb_s != math.inf:
            raise InputError(
                f"--transfer-gb-s {self.transfer_gb_s:g} needs the bytes of a block: give --model, or "
                "--transfer-bytes-per-block"
            )
        return TransferModel(
            bytes_per_s=(self.transfer_gb_s or 0) * 1e9,
            latency_s=(self.transfer_latency_ms or 0) / 1e3,
            sharing=self.transfer_sharing or SHARINGS[0],
            bytes_per_block=bytes_per_block,
        )

    def decode_router(self) -> Router:
        """Chooses among the decode servers."""
        return make_router(self.decode_routing or "least-outstanding-work")

    def _check(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is not None and value not in choices:
            raise InputError(f"{_option(name)} is {value!r}; it is one of {', '.join(choices)}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# From the options of `kvledger fleet` to the tiers behind each pool.


@attrs.frozen(kw_only=True)
class TierOptions:
    """What decides the tiers, as typed; None where an option was not given."""

    host_blocks: int | None = None
    host_gb_s: float | None = None
    ssd_blocks: int | None = None
    ssd_gb_s: float | None = None
    tier_bytes_per_block: int | None = None

    def tiers(self) -> tuple[Tier, ...]:
        """From the nearest to the farthest.

        Raises:
            InputError: a size without a bandwidth or the other way round, or an SSD without host memory before it.
        """
        out: list[Tier] = []
        for name, blocks, gb_s in (("host", self.host_blocks, self.host_gb_s), ("ssd", self.ssd_blocks, self.ssd_gb_s)):
            if (blocks is None) != (gb_s is None):
                raise InputError(
                    f"--{name}-blocks and --{name}-gb-s go together; neither has a default (--{name}-gb-s inf: copies "
                    "take no time)"
                )
            if blocks is not None and gb_s is not None:
                out.append(Tier(name=name, num_blocks=blocks, bytes_per_s=gb_s * 1e9))
        if self.ssd_blocks is not None and self.host_blocks is None:
            raise InputError("--ssd-blocks needs --host-blocks: what leaves the GPU goes to host memory first")
        if not out and self.tier_bytes_per_block is not None:
            raise InputError(f"--tier-bytes-per-block {self.tier_bytes_per_block} has no effect without --host-blocks")
        return tuple(out)


def with_tiers(engine: EngineOptions, options: TierOptions) -> EngineOptions:
    """The engine with the tiers that the options describe behind its pool."""
    plan = engine.pool.plan
    tiers = options.tiers()
    if not tiers:
        return engine
    bytes_per_block = options.tier_bytes_per_block or (plan.bytes_per_block if plan else None)
    return attrs.evolve(engine, parts=attrs.evolve(engine.parts, tiers=tiers, tier_bytes_per_block=bytes_per_block))
