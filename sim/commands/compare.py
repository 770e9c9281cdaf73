"""`kvledger compare`: memory wasted by static, power-of-two, oracle, growing and paged allocators."""

from ..scenario.compare import CompareOptions
from ..scenario.scenario import Scenario
from ..search.jobs import COMPARE
from .declare import Json, command


@command(scenario=COMPARE)
def compare(scenario: Scenario, asked: CompareOptions, json: Json = False) -> None:
    """Compare the memory that five allocators waste on the same requests, as PagedAttention (SOSP'23) did.

    Example: kvledger compare --workload sharegpt --model opt-13b --kv-cache-memory-bytes 12GiB
    """
    from ..report.console import Bar, print_result
    from ..report.curve import print_compare
    from ..scenario.compare import compare_scenario

    with Bar("Reading the trace") as bar:
        result = compare_scenario(scenario, asked, on_progress=bar.count)
    print_result(result, print_compare, json)
