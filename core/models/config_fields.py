"""Typed access to the fields of a config.json; an error names the field, its value and the file."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs

from ..errors import InputError

Default = TypeVar("Default", int, None)


@attrs.frozen
class ConfigFields:
    """A config's mapping and the place it came from (`config.json`, `config.json: text_config`).

    A field that is null counts as absent. Every access by name is remembered in `asked`, so that a field that nobody
    asked for can be named (`unread_fields`).
    """

    values: Mapping[str, Any]
    place: str
    asked: set[str] = attrs.field(factory=set, eq=False, repr=False)

    def get(self, name: str) -> Any:
        """The value as it is; None where the field is absent."""
        self.asked.add(name)
        return self.values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.get(name) is not None

    def integer(self, name: str, *aliases: str) -> int:
        """A whole number above 0, under the first of these names that is there.

        Raises:
            InputError: absent, or of another type.
        """
        for alias in (name, *aliases):
            if self.has(alias):
                return self._checked_integer(alias)
        raise InputError(f"{self.place}: missing {' or '.join((name, *aliases))}, which nothing else says")

    def integers(self, *names: str) -> tuple[int, ...]:
        """Whole numbers above 0, all of them required.

        Raises:
            InputError: names every one that is missing, or the first that is of another type.
        """
        missing = [name for name in names if not self.has(name)]
        if missing:
            raise InputError(f"{self.place}: missing {', '.join(missing)}, which nothing else says")
        return tuple(self._checked_integer(name) for name in names)

    def integer_or(self, name: str, default: Default) -> int | Default:
        """A whole number above 0, or the architecture's default (None: it has none) where the field is absent."""
        return self._checked_integer(name) if self.has(name) else default

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false, or the architecture's default where the field is absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.place}: {name} is {value!r}; expected true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a string")
        return value

    def integer_list(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers (0 allowed).

        Raises:
            InputError: absent, or not such a list.
        """
        items = self.items(name)
        for index, item in enumerate(items):
            if not isinstance(item, int) or item < 0:
                raise InputError(f"{self.place}: {name}[{index}] is {item!r}; expected a whole number of at least 0")
        return tuple(int(item) for item in items)

    def text_list(self, name: str) -> tuple[str, ...]:
        """A list of strings.

        Raises:
            InputError: absent, or not such a list.
        """
        items = self.items(name)
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise InputError(f"{self.place}: {name}[{index}] is {item!r}; expected a string")
        return items

    def items(self, name: str) -> tuple[Any, ...]:
        """A list of anything.

        Raises:
            InputError: absent, or not a list.
        """
        value = self.get(name)
        if value is None:
            raise InputError(f"{self.place}: missing {name}, which nothing else says")
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a list")
        return tuple(cast("Sequence[Any]", value))

    def section(self, name: str) -> "ConfigFields | None":
        """A nested object, or None where the field is absent.

        Raises:
            InputError: not an object.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InputError(f"{self.place}: {name} is {value!r}; expected an object")
        return ConfigFields(cast("Mapping[str, Any]", value), f"{self.place}: {name}")

    def _checked_integer(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.place}: {name} is {value!r}; expected a whole number above 0")
        return value
