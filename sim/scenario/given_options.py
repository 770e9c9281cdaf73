"""Options of a command line as they were given, as the text of a point that runs again with some of them changed."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from ...core.errors import InputError
from ..search.sweep import Point, content_of

# A command of its own prints; these say how, and where to.
NOT_OF_A_POINT = ("trace", "json")


def option_texts(given: Mapping[str, Any], command: Any) -> dict[str, str]:
    """`name -> text` of every option in `given` that is not at its default; `yes` and `no` for switches.

    Args:
        given: option -> value.
        command: the function whose options they are.
    """
    parameters = signature(command).parameters
    out: dict[str, str] = {}
    for name, value in given.items():
        if name in NOT_OF_A_POINT or name not in parameters or value == parameters[name].default or value is None:
            continue
        text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        option, text = _spelled(parameters[name], text)
        out[option] = text
    return out


def _spelled(parameter: Parameter, text: str) -> tuple[str, str]:
    """The option's first long name; of a pair such as `--closed-loop/--open-loop` the half that was meant."""
    declared: list[Any] = []
    for annotation in getattr(parameter.annotation, "__metadata__", ()):
        # In an `Annotated` the first name given to typer stands where a default would.
        declared += [getattr(annotation, "default", None), *(getattr(annotation, "param_decls", None) or ())]
    names = [word for word in declared if isinstance(word, str) and word.startswith("--")]
    name = names[0] if names else f"--{parameter.name.replace('_', '-')}"
    positive, _, negative = name.partition("/")
    if negative and text == "no":
        return negative.removeprefix("--"), "yes"
    return positive.removeprefix("--"), text


def changed(options: Mapping[str, str], changes: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The options with some of them set otherwise, or `default` taken away, in the order of the first."""
    merged = {**options, **changes}
    return tuple((name, text) for name, text in merged.items() if text != "default")


def point_of(command: str, files: tuple[str, ...], options: tuple[tuple[str, str], ...]) -> Point:
    """A run of a command."""
    return Point(command=command, files=files, options=options, content=content_of(files))


def parse_change(text: str, option: str) -> tuple[str, str]:
    """`kv-cache-dtype=fp8` -> its name and value. Raises `InputError` for anything else."""
    name, separator, value = text.partition("=")
    name = name.strip().lstrip("-")
    if not name or not separator or not value.strip():
        raise InputError(f"{option} is {text!r}; it must look like kv-cache-dtype=fp8 (NAME=default takes it away)")
    return name, value.strip()
