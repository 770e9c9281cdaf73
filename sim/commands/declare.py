"""From declared options to the parameters of a command: `@command(scenario=..., exports=...)`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Annotated, Any

import attrs
import typer
from typer.core import TyperCommand

from ...core.errors import InputError
from ..scenario.options import OUTPUT, PANELS, OptionSet, declared, option, options, spelled, spelling, value_type
from ..scenario.scenario import Scenario

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.", rich_help_panel="Output")
]
Plots = Annotated[
    str | None,
    typer.Option(help="Folder for the plots, as SVG and PNG files.", rich_help_panel="Output", metavar="FOLDER"),
]


@options
class LogOptions:
    """The event log of a run, if one is to be written."""

    log: str | None = option(None, OUTPUT, "Record every commit in this folder; see kvledger log.", metavar="FOLDER")
    log_flush: str | None = option(
        None, OUTPUT, "When commits reach the disk: commit, 100commits or 50ms; 50ms unless given."
    )

    def __attrs_post_init__(self) -> None:
        if self.log is None and self.log_flush is not None:
            raise InputError(f"--log-flush {self.log_flush} has no effect without --log; leave it out")
        if self.log is not None:
            from ..traces.logged import need_log_libraries

            need_log_libraries()


class Changes(dict[str, Any]):
    """Options that were given on the command line, by name."""


def command(**fields: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `def name(scenario: Scenario, ...)`: fields of its options classes become options of the command.

    These are all fields of a parameter's class, or those in `fields` under the parameter's name. A parameter annotated
    with `Changes` gets the options of a scenario that were typed; the function then takes typer's `context` as well.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(function).parameters
        classes = {p.name: Scenario if p.annotation is Changes else p.annotation for p in given.values()}
        sets = {name: OptionSet.of(cls, fields.get(name)) for name, cls in classes.items() if attrs.has(cls)}
        own = [p for p in given.values() if p.name not in sets]

        def run(**values: Any) -> None:
            kwargs: dict[str, Any] = {p.name: values[p.name] for p in own}
            for name, chosen in sets.items():
                picked = {field: values[field] for field in chosen.names}
                if given[name].annotation is Changes:
                    source = values["context"].get_parameter_source
                    typed = {field: value for field, value in picked.items() if source(field).name == "COMMANDLINE"}
                    kwargs[name] = Changes(typed)
                else:
                    kwargs[name] = _made(chosen, picked)
            function(**kwargs)

        parameters = [_parameter(field, chosen) for chosen in sets.values() for field in chosen.fields]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
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


def _parameter(field: "attrs.Attribute[Any]", chosen: OptionSet) -> inspect.Parameter:
    """What typer reads of one option: whole numbers arrive as text, since `32K` is one."""
    how, kind = declared(field), value_type(field, chosen.cls)
    typed: Any = {bool: bool, float: float, str: str, int: str, tuple: list[str]}[kind]
    default: Any = inspect.Parameter.empty if field.default is attrs.NOTHING else field.default
    if kind is tuple:
        default = None
    elif kind is int and isinstance(default, int):
        default = str(default)
    if how.is_argument:
        info: Any = typer.Argument(metavar=how.metavar or field.name.upper(), help=how.help)
    else:
        names = how.names or (spelling(field),)
        if kind is bool and not how.names:
            names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
        info = typer.Option(
            *names, help=how.help, rich_help_panel=how.panel, metavar=how.metavar or how.unit.upper() or None
        )
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
        order = ("Arguments", *PANELS, "Options")
        for panel in sorted(records, key=lambda name: order.index(name) if name in order else len(order)):
            with formatter.section(panel):
                formatter.write_dl(records[panel])


# What stands in help texts for the names that are registered -> a module of this package and its function.
_NAMES = {
    "{eviction policies}": ("core.pool.policies.policy", "eviction_policies.names"),
    "{curve policies}": ("sim.cache.policies", "policy_names"),
    "{trace formats}": ("sim.traces", "trace_formats.names"),
    "{workloads}": ("sim.workloads.builtin", "workloads.names"),
    "{latency models}": ("sim.latency.models", "latency_models.names"),
    "{routers}": ("sim.fleet.routing", "routers.names"),
    "{gpus}": ("sim.latency.devices", "devices"),
    "{KV cache dtypes}": ("core.planner.cache_dtype", "known_cache_dtypes"),
}


def with_names(text: str) -> str:
    """A help text with `{trace formats}` and its like replaced by the registered names."""
    for placeholder, (module, function) in _NAMES.items():
        if placeholder in text:
            names = attrgetter(function)(import_module(f"...{module}", __package__))
            text = text.replace(placeholder, ", ".join(names()))
    return text
