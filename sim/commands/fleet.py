"""`kvledger fleet`: what happens to a trace on several engines behind a router."""

from ..exports.run_exports import ExportOptions
from ..scenario.fleet import FleetOptions
from ..scenario.scenario import Scenario
from ..search.jobs import FLEET
from .declare import Json, command


@command(scenario=FLEET)
def fleet(scenario: Scenario, servers: FleetOptions, exports: ExportOptions, json: Json = False) -> None:
    """Route a trace to several engines: latency, hits and load of the fleet and of each engine in it.

    With --prefill-replicas and --decode-replicas, each prompt is computed on one engine and copied to another.

    Example: kvledger fleet --workload conversation --replicas 4 --model llama-3.1-8b --gpu H100 --block-size 64

    Example: kvledger fleet --workload conversation --prefill-replicas 2 --decode-replicas 2 --transfer-gb-s 50 \
        --model llama-3.1-8b --gpu H100 --block-size 64
    """
    import attrs

    from ..exports.run_exports import RunExports
    from ..report.console import Bar, print_result
    from ..report.replay import print_fleet
    from ..scenario.engine import engine_of
    from ..scenario.fleet import replay_fleet_scenario
    from .replay import input_files

    engine = engine_of(scenario)
    files = RunExports(
        exports,
        engine.pool.allocator,
        engine.pool.facts,
        inputs=input_files(scenario),
        engines=servers.shape(scenario.data_parallel_size).engine_names,
    )
    with files, Bar("Replaying", total=scenario.limit) as bar:
        result = replay_fleet_scenario(
            scenario,
            servers,
            engine=engine,
            parts_with=lambda parts: attrs.evolve(
                parts,
                listeners_of=files.listeners_of,
                on_finished_on=files.on_finished_on,
                macro_steps=files.macro_steps,
                histograms=files.histograms,
            ),
            on_progress=bar.count,
        )
        files.publish(result.report)
    print_result(result.to_dict(), print_fleet, json)
