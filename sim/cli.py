"""The command line: `kvledger <command>`. Each command lives in sim/commands/ and imports what is heavy as it runs."""

import gc
import importlib
import os
import sys

import typer

from ..core.errors import DoesNotFitError, KVLedgerError

EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2

# name -> module in sim/commands that holds a function of the same name (dashes become underscores)
COMMANDS: tuple[str, ...] = (
    "study",
    "plan",
    "curve",
    "replay",
    "fleet",
    "size",
    "block-size",
    "optimum",
    "ab",
    "compare",
    "sweep",
    "sampling",
    "follow",
    "serve",
)

# name -> module in sim/commands whose `build_<name>_app` makes a group of sub-commands
GROUPS: tuple[str, ...] = ("log",)


def build_app() -> typer.Typer:
    """The application with every command of `COMMANDS` and `GROUPS`; their modules import nothing heavy at the top."""
    app = typer.Typer(
        name="kvledger",
        help="The KV-cache memory of LLM serving as a ledger: plan it, replay real traffic on it, compare, decide.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name in COMMANDS:
        module = importlib.import_module(f".commands.{name.replace('-', '_')}", __package__)
        app.command(name)(getattr(module, name.replace("-", "_")))
    for name in GROUPS:
        module = importlib.import_module(f".commands.{name}", __package__)
        app.add_typer(getattr(module, f"build_{name}_app")(), name=name)
    return app


def main() -> None:
    """Run the command line. Exit 0: done; 1: the answer is "no, it does not fit"; 2: bad input."""
    # A run makes many small objects and next to no cycles; the default threshold would look for them a thousand times.
    gc.set_threshold(100_000, 20, 20)
    try:
        build_app()()
    except KVLedgerError as error:
        print(f"kvledger: {error}", file=sys.stderr)
        sys.exit(EXIT_DOES_NOT_FIT if isinstance(error, DoesNotFitError) else EXIT_BAD_INPUT)
    except BrokenPipeError:  # `kvledger ... | head`: the reader went away, which is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        print("kvledger: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
