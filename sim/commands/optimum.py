"""`kvledger optimum`: what a better eviction policy could win at most, in tokens, GPU time and money."""

from ..scenario.scenario import Scenario
from ..search.jobs import OPTIMUM
from ..search.optimum import OptimumOptions
from .declare import Json, command


@command(scenario=OPTIMUM)
def optimum(scenario: Scenario, asked: OptimumOptions, json: Json = False) -> None:
    """Compare LRU with the best possible eviction at the pool of one engine: what a better policy could win.

    Example: kvledger optimum --workload conversation --model llama-3.1-8b --gpu H100 --price-per-gpu-hour 2.5
    """
    from ..report.comparisons import print_worth
    from ..report.console import print_result
    from ..search.optimum import optimum_worth

    print_result(optimum_worth(scenario, asked).to_dict(), print_worth, json)
