"""Options: each is declared once, as a field of a frozen class, with its default, help text and panel.

A class of options converts and checks its values wherever they come from: keyword arguments in Python, a command line,
the text of a sweep's grid, or the JSON of a recorded run.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

import attrs

from ...core.errors import InputError
from ...core.quantities import parse_bytes

TRAFFIC, MODEL, HARDWARE, ENGINE = "Traffic", "Model", "Hardware", "Engine"
LATENCY, FLEET, SEARCH, OUTPUT = "Latency model", "Fleet", "Search", "Output"
PANELS = (TRAFFIC, MODEL, HARDWARE, ENGINE, LATENCY, FLEET, SEARCH, OUTPUT)

_MULTIPLES = {"k": 10**3, "K": 1 << 10, "M": 1 << 20}
_COUNT = re.compile(r"\s*(-?[0-9][0-9_,]*)\s*([kKM]?)\s*\Z")
T = TypeVar("T")


class Amount(int):
    """A whole number that remembers how it was written: `32K` is 32,768 and is shown as `32K`."""

    text: str

    def __new__(cls, value: int, text: str) -> "Amount":
        """Keep `text` beside the value."""
        amount = super().__new__(cls, value)
        amount.text = text
        return amount

    def __reduce__(self) -> tuple[Any, ...]:
        return Amount, (int(self), self.text)

    def __str__(self) -> str:
        """The text as it was written."""
        return self.text


@attrs.frozen(kw_only=True)
class Declared:
    """What is known of an option beside its type and default.

    Attributes:
        panel: heading in the help text under which it is listed.
        help: one sentence.
        names: spellings on the command line, the first one leading; empty: the field's name with dashes.
        unit: `count` (32K), `bytes` (12GiB) or empty.
        is_argument: whether the command line takes it by position.
        metavar: what stands for the value in the help text.
    """

    panel: str
    help: str
    names: tuple[str, ...] = ()
    unit: str = ""
    is_argument: bool = False
    metavar: str | None = None


def option(
    default: Any,
    panel: str,
    help: str,
    *names: str,
    unit: str = "",
    is_argument: bool = False,
    metavar: str | None = None,
) -> Any:
    """Declare a field of an options class; see `Declared`."""
    declared = Declared(panel=panel, help=help, names=names, unit=unit, is_argument=is_argument, metavar=metavar)
    return attrs.field(default=default, metadata={"declared": declared})


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(cls: type[T]) -> type[T]:
    """Decorate a frozen attrs class, keyword-only, whose fields are all options: values are converted and checked."""

    def add_converters(owner: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
        hints = get_type_hints(owner)
        return [field.evolve(converter=_converter(field, hints[field.name])) for field in fields]

    return attrs.frozen(kw_only=True, field_transformer=add_converters)(cls)


def declared(field: "attrs.Attribute[Any]") -> Declared:
    """How a field of an options class was declared."""
    return field.metadata["declared"]


def spelling(field: "attrs.Attribute[Any]") -> str:
    """The option's leading name on the command line: `--max-model-len`."""
    names = declared(field).names
    return names[0].partition("/")[0] if names else f"--{field.name.replace('_', '-')}"


def value_type(field: "attrs.Attribute[Any]", owner: type) -> type:
    """`bool`, `int`, `float`, `str` or `tuple` of an optional field."""
    return _plain_type(get_type_hints(owner)[field.name])


def _plain_type(hint: Any) -> type:
    members = [member for member in get_args(hint) if member is not type(None)] or [hint]
    first = members[0]
    return tuple if getattr(first, "__origin__", None) is tuple or hint is tuple or _is_tuple(hint) else first


def _is_tuple(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is tuple


def _converter(field: "attrs.Attribute[Any]", hint: Any) -> Any:
    convert = {bool: _to_bool, int: _to_count, float: _to_float, str: _to_text, tuple: _to_tuple}[_plain_type(hint)]
    if declared(field).unit == "bytes":
        convert = _to_bytes
    if hint == tuple[float, ...]:
        convert = _to_floats
    is_required = field.default is not None

    def converted(value: Any) -> Any:
        if value is None:
            return field.default if is_required else None
        return convert(field.name, value)

    return converted


def _to_bool(name: str, value: Any) -> bool:
    found = {"yes": True, "true": True, "no": False, "false": False}.get(str(value).lower())
    if found is None:
        raise InputError(f"{name} is {value!r}; it must be yes or no")
    return found


def _to_count(name: str, value: Any) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    match = _COUNT.match(str(value))
    if match is None:
        auto = " or auto" if name == "max_model_len" else ""
        if auto and str(value) == "auto":
            return -1
        raise InputError(f"{name} is {value!r}; it must be a whole number such as 8192, 32K (32,768) or 32k{auto}")
    number = int(match[1].replace(",", "").replace("_", "")) * _MULTIPLES.get(match[2], 1)
    return number if str(number) == str(value) else Amount(number, str(value))


def _to_bytes(name: str, value: Any) -> int:
    if isinstance(value, int):
        return value
    number = parse_bytes(str(value), name)
    return number if str(number) == str(value) else Amount(number, str(value))


def _to_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} is {value!r}; it must be a number") from None


def _to_text(name: str, value: Any) -> str:
    return str(value)


def _to_tuple(name: str, value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _to_floats(name: str, value: Any) -> tuple[float, ...]:
    return tuple(_to_float(name, item) for item in _to_tuple(name, value))


def given_values(instance: Any) -> dict[str, Any]:
    """`field -> value` of every option that is not at its default."""
    fields = attrs.fields(type(instance))
    return {field.name: value for field in fields if (value := getattr(instance, field.name)) != field.default}


def texts_of(instance: Any) -> dict[str, str]:
    """`spelling -> text` of every option that is not at its default, without positional ones; `yes`/`no` for flags."""
    out: dict[str, str] = {}
    for name, value in given_values(instance).items():
        field = attrs.fields_dict(type(instance))[name]
        if declared(field).is_argument:
            continue
        first = (declared(field).names or (spelling(field),))[0]
        if value is False and "/" in first:
            out[first.partition("/")[2].removeprefix("--")] = "yes"
        elif isinstance(value, bool):
            out[spelling(field).removeprefix("--")] = "yes" if value else "no"
        else:
            out[spelling(field).removeprefix("--")] = str(value)
    return out


@attrs.frozen
class OptionSet:
    """Some options of a class, as one command takes them.

    Attributes:
        cls: the options class.
        names: its fields that the command takes, in the order of the class.
    """

    cls: type
    names: tuple[str, ...]

    @classmethod
    def of(cls, owner: type, names: Iterable[str] | None = None, without: Iterable[str] = ()) -> "OptionSet":
        """The named fields of `owner` (all of them unless given), without some."""
        every = [field.name for field in attrs.fields(owner)]
        wanted, left_out = set(every if names is None else names), set(without)
        unknown = (wanted | left_out) - set(every)
        if unknown:
            raise KeyError(f"{owner.__name__} has no options {', '.join(sorted(unknown))}")
        return cls(owner, tuple(name for name in every if name in wanted - left_out))

    @property
    def fields(self) -> list["attrs.Attribute[Any]"]:
        """The declarations, in order."""
        by_name = attrs.fields_dict(self.cls)
        return [by_name[name] for name in self.names]


def read_texts(sets: Iterable[OptionSet], texts: Mapping[str, str], command: str) -> list[Any]:
    """An instance of each set's class, from options as typed: `{"max-num-seqs": "64", "async-scheduling": "yes"}`.

    Raises:
        InputError: the command has no such option, or a value is wrong.
    """
    chosen = list(sets)
    places = {name: place for place in _places(chosen) for name in place[3]}
    values: list[dict[str, Any]] = [{} for _ in chosen]
    for text, value in texts.items():
        name = text.strip().lstrip("-")
        place = places.get(name)
        if place is None:
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise InputError(f"kvledger {command} has no option --{name}{hint}")
        index, field, is_negated, _ = place
        values[index][field] = (not _to_bool(field, value)) if is_negated else value
    return [options.cls(**given) for options, given in zip(chosen, values, strict=True)]


def _places(sets: list[OptionSet]) -> Iterator[tuple[int, str, bool, list[str]]]:
    """(index of the set, field, whether the name negates it, names without dashes)."""
    for index, chosen in enumerate(sets):
        for field in chosen.fields:
            names = declared(field).names or (spelling(field),)
            yes = [name.partition("/")[0].lstrip("-") for name in names]
            yield index, field.name, False, [*yes, field.name]
            no = [name.partition("/")[2].lstrip("-") for name in names if "/" in name]
            if value_type(field, chosen.cls) is bool:
                yield index, field.name, True, no or [f"no-{name}" for name in yes]


def spelled(text: str, names: Iterable[str]) -> str:
    """A message with Python names of options (`max_model_len`) spelled as on the command line (`--max-model-len`)."""
    return _pattern(tuple(names)).sub(lambda match: f"--{match[0].replace('_', '-')}", text)


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    wanted = sorted((name for name in names if "_" in name), key=len, reverse=True)
    if not wanted:
        return re.compile(r"(?!)")  # matches nowhere
    return re.compile(r"(?<![\w.`'\"-])(?:" + "|".join(map(re.escape, wanted)) + r")(?![\w(`'\"=]|\.\w)")
