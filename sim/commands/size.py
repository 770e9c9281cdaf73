"""`kvledger size`: how many GPUs, in what shape, keep an SLO on a trace."""

from typing import Annotated, Any

import typer

from .fleet import NOT_OF_A_FLEET
from .replay import replay
from .shared_options import takes_options_of


@takes_options_of(replay, leave_out=(*NOT_OF_A_FLEET, "tensor_parallel_size"))
def size(
    slo_ttft_p99: Annotated[float | None, typer.Option(help="Seconds: the 99th percentile of TTFT.")] = None,
    slo_tpot_p99: Annotated[float | None, typer.Option(help="Seconds: the 99th percentile of TPOT.")] = None,
    slo_goodput: Annotated[
        float | None, typer.Option(help="Share of requests that keep --slo-ttft and --slo-tpot.")
    ] = None,
    slo_ttft: Annotated[float | None, typer.Option(help="Seconds: a request's TTFT, for the goodput.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Seconds: a request's TPOT, for the goodput.")] = None,
    tensor_parallel_sizes: Annotated[
        str | None, typer.Option(help="GPUs of a replica to try, such as 2,4,8; with --model 1,2,4,8 unless given.")
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "-dp", help="Ranks of a replica, each with a ledger of its own.")
    ] = 1,
    routing: Annotated[
        str, typer.Option(help="round-robin, least-outstanding-work, sticky or prefix-aware.")
    ] = "prefix-aware",
    routing_load_weight: Annotated[
        float | None, typer.Option(help="Prefix-aware: weight of outstanding prompt tokens; 1 unless given.")
    ] = None,
    event_delay_ms: Annotated[float, typer.Option(help="From an engine's commit to the router's knowing of it.")] = 0.0,
    replicas: Annotated[
        int | None, typer.Option(help="A fleet that is given: how much faster may the trace come?")
    ] = None,
    max_replicas: Annotated[int, typer.Option(help="Where to give up.")] = 64,
    seeds: Annotated[
        int | None, typer.Option(help="A workload: search with as many seeds; 1 unless given. The worst one counts.")
    ] = None,
    probes: Annotated[
        int, typer.Option(help="Further runs on either side of the answer: do they agree that more is better?")
    ] = 1,
    tornado: Annotated[bool, typer.Option("--tornado", help="How the answer moves with each assumption.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes for the tornado.")] = 1,
    keep: Annotated[
        str | None, typer.Option(help="Folder of finished runs: an interrupted search goes on where it stopped.")
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="What a GPU costs an hour: the answer in money.")
    ] = None,
    plots: Annotated[
        str | None, typer.Option(help="Folder for the plots (the runs, the tornado) as SVG and PNG files.")
    ] = None,
    **given: Any,
) -> None:
    """How many replicas and GPUs keep a service-level objective on a trace: bisection over full replays.

    With --replicas N: the highest request rate at which so many keep it.

    Example: kvledger size trace.jsonl --model llama-3.1-70b --gpu H100 --slo-ttft-p99 2 --block-size 64
    """
    from ..cli import EXIT_DOES_NOT_FIT
    from ..scenario.size_run import run_size
    from ..search.size_question import SizeQuestion
    from ..search.slo import Slo

    question = SizeQuestion(
        given=given,
        slo=Slo(
            ttft_p99_s=slo_ttft_p99,
            tpot_p99_s=slo_tpot_p99,
            goodput_share=slo_goodput,
            ttft_s=slo_ttft,
            tpot_s=slo_tpot,
        ),
        tensor_parallel_sizes=tensor_parallel_sizes,
        data_parallel_size=data_parallel_size,
        routing=routing,
        routing_load_weight=routing_load_weight,
        event_delay_s=event_delay_ms / 1e3,
        num_replicas=replicas,
        max_replicas=max_replicas,
        num_seeds=seeds,
        num_probes=probes,
        with_tornado=tornado,
        num_workers=jobs,
        kept_in=keep,
        price_per_gpu_hour=price_per_gpu_hour,
    )
    if not run_size(question, plots, as_json=given["json"]):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
