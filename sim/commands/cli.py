"""The command line: `kvledger <command>`. Each command lives in sim/commands/ and is imported when it is asked for."""

import ast
import functools
import gc
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...core.errors import DoesNotFitError, KVLedgerError
from ...core.registry import PLUGINS_VARIABLE

EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2

# Commands in the order of the help text; each is a function of sim/commands/<name>.py, dashes being underscores there.
COMMANDS: tuple[str, ...] = (
    *("study", "plan", "curve", "replay", "fleet", "size", "block-size", "optimum", "ab", "compare", "sweep"),
    *("validate", "explain-run"),
    *("sampling", "follow", "serve"),
)
# Groups of sub-commands; each is made by `build_<name>_app` of its module.
GROUPS: tuple[str, ...] = ("log",)
GROUP_HELP = {"log": "Look into the event log of a run: show, verify, diff, at, stats, steps, convert, replay."}


class _Commands(Mapping[str, Any]):
    """Commands by name, imported when they are asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS + GROUPS:
            raise KeyError(name)
        return build_command(name)

    def __iter__(self) -> Any:
        return iter((*COMMANDS, *GROUPS))

    def __len__(self) -> int:
        return len(COMMANDS) + len(GROUPS)


class _LazyGroup(TyperGroup):
    """The application, which imports a command when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": None})
        self.commands: Any = _Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the first sentence of their docstrings, read without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in self.commands])


@functools.cache
def build_command(name: str) -> Any:
    """The command or group called `name`."""
    module = importlib.import_module(f".{name.replace('-', '_')}", __package__)
    if name in GROUPS:
        return typer.main.get_command(getattr(module, f"build_{name}_app")())
    from .declare import PanelCommand

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=PanelCommand)(getattr(module, name.replace("-", "_")))
    return typer.main.get_command(app)


def build_app() -> typer.Typer:
    """The application with every command of `COMMANDS` and `GROUPS`."""
    app = typer.Typer(
        name="kvledger",
        help="The KV-cache memory of LLM serving as a ledger: plan it, replay real traffic on it, compare, decide.",
        cls=_LazyGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from ... import __version__

        print(f"kvledger {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="FILE",
            help="Python file that registers policies, trace formats, latency models, routers or architectures; "
            "repeatable, and before the command.",
        ),
    ] = None,
) -> None:
    for file in plugin or ():
        others = [path for path in os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep) if path]
        if file not in others:  # worker processes inherit it
            os.environ[PLUGINS_VARIABLE] = os.pathsep.join([*others, file])


def _summary(name: str) -> str:
    if name in GROUP_HELP:
        return GROUP_HELP[name]
    path = Path(__file__).parent / f"{name.replace('-', '_')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    text = ast.get_docstring(functions[name.replace("-", "_")]) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def main() -> None:
    """Run the command line. Exit 0: done; 1: the answer is "no, it does not fit"; 2: bad input."""
    # A run makes many small objects and next to no cycles; the default threshold would look for them a thousand times.
    gc.set_threshold(100_000, 20, 20)
    try:
        build_app()(prog_name="kvledger")
    except KVLedgerError as error:
        from ..search.jobs import reason

        print(f"kvledger: {reason(error)}", file=sys.stderr)
        sys.exit(EXIT_DOES_NOT_FIT if isinstance(error, DoesNotFitError) else EXIT_BAD_INPUT)
    except (BrokenPipeError, SystemExit) as ended:
        # `kvledger ... | head`: the reader went away, which is no fault. Typer makes an exit with 1 of it.
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        print("kvledger: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
