"""`kvledger plan`: how many blocks, tokens and users fit, and where every byte went."""

from typing import Annotated

import typer

from ..scenario.plan import PlanOptions
from ..scenario.scenario import Scenario
from ..search.jobs import PLAN
from .declare import Json, command


@command(scenario=PLAN)
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
    from ..scenario.plan import LogExplanation, plan_or_explain
    from .cli import EXIT_DOES_NOT_FIT

    result = plan_or_explain(scenario, asked)
    if isinstance(result, LogExplanation):
        print_result(result, print_explanation, json)
        return
    print_result(result, lambda plan: print_plan(plan, explain=explain, mix=asked.context_mix), json)
    if not result.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
