"""`kvledger sampling`: what sharing saves when one prompt has many continuations."""

import attrs

from ..scenario.sampling import DEFAULT_LIMIT, SamplingOptions
from ..scenario.scenario import Scenario
from ..search.jobs import SAMPLING
from .declare import Json, command


@command(scenario=SAMPLING)
def sampling(scenario: Scenario, asked: SamplingOptions, json: Json = False) -> None:
    """Run each request alone with its samples, beams or drafts, and count the blocks that sharing saves.

    The first 100 requests are used unless --limit is given.

    Example: kvledger sampling --workload sharegpt --beam-width 4
    """
    from ..report.console import Bar, print_result
    from ..report.replay import print_sampling
    from ..scenario.sampling import sample_scenario

    if scenario.limit is None:
        scenario = attrs.evolve(scenario, limit=DEFAULT_LIMIT)
    with Bar("Sampling", total=scenario.limit) as bar:
        result = sample_scenario(scenario, asked, on_progress=bar.count)
    print_result(result, print_sampling, json)
