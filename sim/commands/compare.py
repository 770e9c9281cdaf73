"""`kvledger compare`: memory wasted by static, power-of-two, oracle, growing and paged allocators."""

from ..scenario.compare import CompareOptions
from ..scenario.options import OptionSet
from ..scenario.scenario import Scenario
from ..search.jobs import COMPARE
from .declare import Json, command


@command(scenario=OptionSet.of(Scenario, COMPARE), asked=OptionSet.of(CompareOptions))
def compare(scenario: Scenario, asked: CompareOptions, json: Json = False) -> None:
    """Compare the memory that five allocators waste on the same requests, as PagedAttention (SOSP'23) did.

    Example: kvledger compare --workload sharegpt --model opt-13b --kv-cache-memory-bytes 12GiB
    """
    from ..report.console import print_json, progress
    from ..report.curve import print_compare
    from ..scenario.compare import compare_scenario

    bar, task = progress("Reading the trace")
    with bar:
        result = compare_scenario(scenario, asked, on_progress=lambda count: bar.update(task, completed=count))
    if json:
        print_json(result.to_dict())
    else:
        print_compare(result)
