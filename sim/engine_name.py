"""How the engines of a fleet are told apart: pool, server and data-parallel rank."""

import attrs


@attrs.frozen
class EngineName:
    """One engine.

    Attributes:
        replica: the server, from 0 in its pool.
        data_parallel_rank: which of the server's ranks.
        pool: "prefill" or "decode" in a disaggregated fleet, else empty.
    """

    replica: int
    data_parallel_rank: int = 0
    pool: str = ""

    def __str__(self) -> str:
        """`prefill 1.3`; the rank only where it is not the first."""
        number = f"{self.replica}.{self.data_parallel_rank}" if self.data_parallel_rank else f"{self.replica}"
        return f"{self.pool} {number}" if self.pool else number

    def labels(self) -> dict[str, str]:
        """As a Prometheus server that scrapes all servers has them: the rank is vLLM's label `engine`."""
        return {"engine": str(self.data_parallel_rank), "instance": f"{self.pool or 'replica'}-{self.replica}"}


def engine_names(num_replicas: int, data_parallel_size: int, pool: str = "") -> list[EngineName]:
    """Every rank of every server, in order."""
    ranks = range(data_parallel_size)
    return [EngineName(replica, rank, pool) for replica in range(num_replicas) for rank in ranks]
