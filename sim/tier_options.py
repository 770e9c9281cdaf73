"""From the options of `kvledger fleet` to the tiers behind each pool."""

import attrs

from ..core.errors import InputError
from .engine_options import EngineOptions
from .tiers import Tier


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
