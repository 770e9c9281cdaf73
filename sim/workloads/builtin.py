"""Built-in workloads: seeded request streams that resemble public traces, so that a study needs no download."""

from ...core.errors import InputError
from .agentic import AgenticParameters, agentic_requests
from .chat import ChatParameters, chat_requests
from .lengths import CodeParameters, ShareGPTParameters, code_requests, sharegpt_requests
from .multi_turn import MultiTurnParameters, multi_turn_requests
from .stream import Workload, WorkloadModel, open_stream


def workload_models() -> dict[str, WorkloadModel]:
    """The built-in workloads by name."""
    chat, agentic, multi_turn = ChatParameters(), AgenticParameters(), MultiTurnParameters()
    models = (
        WorkloadModel(
            "conversation",
            "the Mooncake conversation trace (FAST'25)",
            chat,
            chat_requests,
            3_537.0,
            chat.block_size,
            links_turns=True,
        ),
        WorkloadModel(
            "sharegpt", "ShareGPT at 2 requests/s (SOSP'23)", ShareGPTParameters(), sharegpt_requests, 3_600.0, None
        ),
        WorkloadModel("code", "the Azure 2023 code trace", CodeParameters(), code_requests, 3_436.0, None),
        WorkloadModel(
            "agentic",
            "24 public coding-agent sessions",
            agentic,
            agentic_requests,
            3_600.0,
            agentic.block_size,
            links_turns=True,
            records_think_times=True,
        ),
        WorkloadModel(
            "multi-turn",
            "chat sessions over shared system prompts at rates in stages, as load generators send them",
            multi_turn,
            multi_turn_requests,
            multi_turn.duration_s,
            multi_turn.block_size,
        ),
    )
    return {model.name: model for model in models}


def open_workload(
    name: str,
    *,
    seed: int = 0,
    duration_s: float | None = None,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> Workload:
    """A `Trace` by name; two with one seed are identical, in every process and on every Python version.

    The stream ends after `duration_s` on its own clock (the length of what it resembles unless given) or after `limit`
    requests, whichever comes first. Raises `InputError` for an unknown name or an option out of range.
    """
    models = workload_models()
    if name not in models:
        raise InputError(f"--workload is {name!r}; the built-in ones are {', '.join(models)}")
    return open_stream(
        models[name], seed=seed, duration_s=duration_s, skip_first=skip_first, limit=limit, rate_scale=rate_scale
    )
