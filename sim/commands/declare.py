"""From declared options to the parameters of a command: `@command(scenario=..., exports=...)`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import attrs
import typer
from typer.core import TyperCommand

from ...core.errors import InputError
from ..scenario.options import PANELS, OptionSet, declared, spelled, spelling, value_type

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead of tables.", rich_help_panel="Output"),
]
Plots = Annotated[
    str | None,
    typer.Option(help="Folder for the plots, as SVG and PNG files.", rich_help_panel="Output", metavar="FOLDER"),
]
Jobs = Annotated[int, typer.Option(help="Processes that run at the same time.", rich_help_panel="Search", metavar="N")]
Keep = Annotated[
    str | None,
    typer.Option(help="Folder of finished runs, which are not run again.", rich_help_panel="Search", metavar="FOLDER"),
]
PricePerGpuHour = Annotated[
    float | None, typer.Option(help="Price of a GPU hour: gives the answer in money.", rich_help_panel="Search")
]
Log = Annotated[
    str | None,
    typer.Option(
        help="Record every commit in this folder; see kvledger log.", rich_help_panel="Output", metavar="FOLDER"
    ),
]
LogFlush = Annotated[
    str | None,
    typer.Option(
        help="When commits reach the disk: commit, 100commits or 50ms; 50ms unless given.", rich_help_panel="Output"
    ),
]


class Changes(dict[str, Any]):
    """Options that were given on the command line, by name."""


def command(**sets: OptionSet) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `def name(*, scenario: Scenario, ..., own options)`: each set's options become the command's.

    The function is called with an instance of each set's class, under the set's name; a parameter annotated with
    `Changes` gets the options of its set that were given, instead of an instance.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function).parameters.values() if p.name not in sets]
        as_changes = {name for name in sets if inspect.signature(function).parameters[name].annotation is Changes}
        fields = [(name, field, chosen) for name, chosen in sets.items() for field in chosen.fields]
        context_name = next((p.name for p in own if p.annotation is typer.Context), "_context")

        def run(**values: Any) -> None:
            context = values.get(context_name)
            kwargs: dict[str, Any] = {p.name: values[p.name] for p in own if p.name in values}
            for name, chosen in sets.items():
                picked = {field: values[field] for field in chosen.names}
                if name in as_changes:
                    kwargs[name] = Changes(given_on_command_line(context, picked))
                else:
                    kwargs[name] = _made(chosen, picked)
            function(**kwargs)

        parameters = [_parameter(field, chosen) for _, field, chosen in fields]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        if as_changes and context_name == "_context":
            parameters.append(inspect.Parameter(context_name, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        run.__doc__, run.__name__, run.__module__ = function.__doc__, function.__name__, function.__module__
        run.__dict__["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _made(chosen: OptionSet, values: Mapping[str, Any]) -> Any:
    """The set's class with these values; its errors name options as they are spelled on the command line."""
    try:
        return chosen.cls(**values)
    except InputError as error:
        raise InputError(spelled(str(error), chosen.names)) from None


def given_on_command_line(context: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that were typed, rather than left at their defaults."""
    return {name: value for name, value in values.items() if context.get_parameter_source(name).name == "COMMANDLINE"}


def _parameter(field: "attrs.Attribute[Any]", chosen: OptionSet) -> inspect.Parameter:
    """What typer reads of one option: whole numbers arrive as text, since `32K` is one."""
    how, kind = declared(field), value_type(field, chosen.cls)
    typed: Any = {bool: bool, float: float, str: str, int: str, tuple: list[str]}[kind]
    default: Any = field.default
    if kind is tuple:
        default = None
    elif kind is int and default is not None:
        default = str(default)
    if how.is_argument:
        info: Any = typer.Argument(metavar=field.name.upper(), help=how.help)
    else:
        names = how.names or (spelling(field),)
        if kind is bool and not any("/" in name for name in names) and not how.names:
            names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
        info = typer.Option(*names, help=how.help, rich_help_panel=how.panel, metavar=how.metavar)
    annotation = Annotated[typed if default is not None else typed | None, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class PanelCommand(TyperCommand):
    """A command whose help text lists options under the headings of their panels, without a library for drawing."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options panel by panel."""
        records: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            panel = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            records.setdefault(panel, []).append((record[0], with_names(record[1])))
        for panel in sorted(records, key=_rank):
            with formatter.section(panel):
                formatter.write_dl(records[panel])


def _rank(panel: str) -> int:
    order = ("Arguments", *PANELS, "Options")
    return order.index(panel) if panel in order else len(order)


def with_names(text: str) -> str:
    """A help text with `{trace formats}` and its like replaced by the registered names."""
    for placeholder, names in _NAMES.items():
        if placeholder in text:
            text = text.replace(placeholder, ", ".join(names()))
    return text


def _eviction_policies() -> Iterable[str]:
    from ...core.pool.policies.policy import eviction_policies

    return eviction_policies.names()


def _curve_policies() -> Iterable[str]:
    from ..cache.policies import policy_names

    return policy_names()


def _trace_formats() -> Iterable[str]:
    from ..traces import trace_formats

    return trace_formats.names()


def _workloads() -> Iterable[str]:
    from ..workloads.builtin import workloads

    return workloads.names()


def _latency_models() -> Iterable[str]:
    from ..latency.models import latency_models

    return latency_models.names()


def _routers() -> Iterable[str]:
    from ..fleet.routing import routers

    return routers.names()


def _gpus() -> Iterable[str]:
    from ..latency.devices import devices

    return devices()


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "{eviction policies}": _eviction_policies,
    "{curve policies}": _curve_policies,
    "{trace formats}": _trace_formats,
    "{workloads}": _workloads,
    "{latency models}": _latency_models,
    "{routers}": _routers,
    "{gpus}": _gpus,
}
