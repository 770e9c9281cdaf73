"""Options: each is declared once, as a field of a frozen class, with its default, help text and panel.

A class of options converts and checks its values wherever they come from: keyword arguments in Python, a command line,
the text of a sweep's grid, or the JSON of a recorded run.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import attrs

from ...core.errors import InputError
from ...core.quantities import parse_bytes

TRAFFIC, MODEL, HARDWARE, ENGINE = "Traffic", "Model", "Hardware", "Engine"
LATENCY, FLEET, SEARCH, OUTPUT = "Latency model", "Fleet", "Search", "Output"
PANELS = (TRAFFIC, MODEL, HARDWARE, ENGINE, LATENCY, FLEET, SEARCH, OUTPUT)

# Amounts of a GPU's memory below this, without a unit, were meant in another one.
SMALLEST_AMOUNT = 1 << 16
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
        unit: `bytes` (12GiB) or empty.
        least, most: the smallest and the largest number allowed, if there is one.
        is_argument: whether the command line takes it by position.
        metavar: what stands for the value in the help text; the unit unless given.
    """

    panel: str
    help: str
    names: tuple[str, ...] = ()
    unit: str = ""
    least: int | None = None
    most: int | None = None
    is_argument: bool = False
    metavar: str | None = None


def option(default: Any, panel: str, help: str, *names: str, **how: Any) -> Any:
    """Declare a field of an options class; `how` has further attributes of `Declared`.

    The default `attrs.NOTHING` stands for an option that must be given.
    """
    return attrs.field(default=default, metadata={"declared": Declared(panel=panel, help=help, names=names, **how)})


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
    if get_origin(hint) is tuple:
        return tuple
    return next(kind for kind in (*get_args(hint), hint) if kind is not NoneType)


def _converter(field: "attrs.Attribute[Any]", hint: Any) -> Any:
    kind, how = _plain_type(hint), declared(field)
    convert = _to_bytes if how.unit == "bytes" else _CONVERTERS[get_args(hint)[0] if kind is tuple else kind]

    def converted(value: Any) -> Any:
        if value is None:
            return None if field.default is attrs.NOTHING else field.default
        if kind is tuple:
            return tuple(convert(field.name, item) for item in ([value] if isinstance(value, str) else value))
        number = convert(field.name, value)
        if how.least is not None and number < how.least:
            raise InputError(f"{spelling(field)} is {number}; it must be at least {how.least}")
        if how.most is not None and number > how.most:
            raise InputError(f"{spelling(field)} is {number}; it must be at most {how.most:,}")
        without_unit = how.unit == "bytes" and not isinstance(number, Amount)
        if without_unit and how.panel == HARDWARE and 0 < number < SMALLEST_AMOUNT:
            raise InputError(f"{spelling(field)} is {number}, which are bytes; did you mean {int(number)}GiB?")
        return number

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


_CONVERTERS = {bool: _to_bool, int: _to_count, float: _to_float, str: lambda name, value: str(value)}


def whole_numbers(text: str, option: str, unit: str, example: str, least: int | None = None) -> list[int]:
    """`1000,5000` -> [1000, 5000].

    Raises InputError: anything else, or a number below `least`; the message names option, piece and unit.
    """
    numbers: list[int] = []
    for piece in map(str.strip, text.split(",")):
        if not re.fullmatch("-?[0-9]+", piece) or (least is not None and int(piece) < least):
            raise InputError(
                f"{option} {text}: {piece!r} is not a whole number of {unit}; give numbers with commas between them, "
                f"such as {example}"
            )
        numbers.append(int(piece))
    return numbers


def given_values(instance: Any) -> dict[str, Any]:
    """`field -> value` of every option that is not at its default."""
    fields = attrs.fields(type(instance))
    return {field.name: value for field in fields if (value := getattr(instance, field.name)) != field.default}


def _names(field: "attrs.Attribute[Any]") -> tuple[list[str], list[str]]:
    """The option's spellings without dashes, and those that negate it, as far as they are declared."""
    parts = [name.split("/") for name in declared(field).names or (spelling(field),)]
    return [yes.lstrip("-") for yes, *_ in parts], [name.lstrip("-") for _, *no in parts for name in no]


def texts_of(instance: Any) -> dict[str, str]:
    """`spelling -> text` of every option that is not at its default, without positional ones; `yes`/`no` for flags."""
    out: dict[str, str] = {}
    for name, value in given_values(instance).items():
        field = attrs.fields_dict(type(instance))[name]
        (spelled, *_), negated = _names(field)
        if declared(field).is_argument:
            continue
        if value is False and negated:
            out[negated[0]] = "yes"
        else:
            out[spelled] = str(value) if not isinstance(value, bool) else "yes" if value else "no"
    return out


@attrs.frozen
class OptionSet:
    """Some options of a class, as one command takes them, in the order of the class."""

    cls: type
    names: tuple[str, ...]

    @classmethod
    def of(cls, owner: type, names: Iterable[str] | None = None) -> "OptionSet":
        """The named fields of `owner`; all of them unless given."""
        every = [field.name for field in attrs.fields(owner)]
        wanted = set(every if names is None else names)
        if unknown := wanted - set(every):
            raise KeyError(f"{owner.__name__} has no options {', '.join(sorted(unknown))}")
        return cls(owner, tuple(name for name in every if name in wanted))

    @property
    def fields(self) -> list["attrs.Attribute[Any]"]:
        """The declarations, in order."""
        by_name = attrs.fields_dict(self.cls)
        return [by_name[name] for name in self.names]


def read_texts(sets: Iterable[OptionSet], texts: Mapping[str, str], command: str) -> list[Any]:
    """An instance of each set's class, from options as typed: `{"max-num-seqs": "64", "async-scheduling": "yes"}`.

    Raises InputError: the command has no such option, or a value is wrong.
    """
    chosen = list(sets)
    places: dict[str, tuple[int, str, bool]] = {}  # name -> index of the set, field, whether the name negates it
    for index, options in enumerate(chosen):
        for field in options.fields:
            names, negated = _names(field)
            places |= dict.fromkeys([*names, field.name], (index, field.name, False))
            if value_type(field, options.cls) is bool:
                places |= dict.fromkeys(negated or [f"no-{name}" for name in names], (index, field.name, True))
    values: list[dict[str, Any]] = [{} for _ in chosen]
    for text, value in texts.items():
        name = text.strip().lstrip("-")
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise InputError(f"kvledger {command} has no option --{name}{hint}")
        index, field, is_negated = places[name]
        values[index][field] = (not _to_bool(field, value)) if is_negated else value
    return [options.cls(**given) for options, given in zip(chosen, values, strict=True)]


def spelled(text: str, names: Iterable[str]) -> str:
    """A message with Python names of options (`max_model_len`) spelled as on the command line (`--max-model-len`)."""
    return _pattern(tuple(names)).sub(lambda match: f"--{match[0].replace('_', '-')}", text)


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    wanted = sorted((name for name in names if "_" in name), key=len, reverse=True)
    if not wanted:
        return re.compile(r"(?!)")  # matches nowhere
    return re.compile(r"(?<![\w.`'\"-])(?:" + "|".join(map(re.escape, wanted)) + r")(?![\w(`'\"=]|\.\w)")
