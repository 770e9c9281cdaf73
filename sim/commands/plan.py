"""`kvledger plan`: how many blocks, tokens and users fit, and where every byte went."""

from typing import Annotated

import typer

from ..scenario.options import OptionSet
from ..scenario.plan import PlanOptions
from ..scenario.scenario import Scenario
from ..search.jobs import PLAN
from .declare import Json, command


@command(scenario=OptionSet.of(Scenario, PLAN), asked=OptionSet.of(PlanOptions))
def plan(
    scenario: Scenario,
    asked: PlanOptions,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the formulas with their numbers.", rich_help_panel="Output")
    ] = False,
    json: Json = False,
) -> None:
    """Say how many KV blocks, tokens and users fit, and where every byte of a GPU goes.

    Example: kvledger plan --model llama-3.1-70b --gpu H100 -tp 4 --max-model-len 32K
    """
    from ..report.console import print_result
    from ..report.plan import print_explanation, print_plan
    from ..scenario.plan import asks_for_explanation, explain_log, plan_scenario
    from .cli import EXIT_DOES_NOT_FIT

    if asks_for_explanation(scenario, asked):
        print_result(explain_log(scenario, asked), print_explanation, json)
        return
    result = plan_scenario(scenario, asked)
    print_result(result, lambda plan: print_plan(plan, explain=explain, mix=asked.context_mix), json)
    if not result.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
