"""Registries: names that users type, and what each stands for. Installed packages and plug-in files can add to them."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar, cast

from .errors import InputError

T = TypeVar("T")
Entry = TypeVar("Entry")  # a decorated class keeps its own type, so that others can derive from it

# Python files that are run before a registry is read, separated as in PATH. `kvledger --plugin FILE` adds to it.
PLUGINS_VARIABLE = "KVLEDGER_PLUGINS"
_loaded_files: set[Path] = set()


class Registry(Generic[T]):
    """What can be chosen by name: eviction policies, trace formats, latency models, routers, architectures.

    A package adds to a registry through an entry point of its group; a single file adds to it when it is run as a
    plug-in (`KVLEDGER_PLUGINS=my_policy.py`, or `kvledger --plugin my_policy.py`). Both use the decorator:

        @eviction_policies.register("2q")
        class TwoQueues(EvictionPolicy): ...

    Attributes:
        kind: what the names stand for, for messages: `eviction policy`.
        group: the entry-point group, `kvledger.eviction_policies`.
    """

    def __init__(self, kind: str, group: str) -> None:
        """Start empty."""
        self.kind = kind
        self.group = group
        self._entries: dict[str, T] = {}
        self._has_read_entry_points = False

    def register(self, *names: str) -> Callable[[Entry], Entry]:
        """Decorate what each of `names` stands for.

        Raises:
            InputError: a name is taken by something else.
        """

        def add(entry: Entry) -> Entry:
            for name in names:
                if self._entries.setdefault(name, cast("T", entry)) is not entry:
                    raise InputError(f"{self.kind} {name!r} is registered twice; choose another name for one of them")
            return entry

        return add

    def names(self) -> tuple[str, ...]:
        """All names: ours in the order of their registration, then those that were added."""
        self._read_additions()
        return tuple(self._entries)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the entries, in the order of `names`."""
        self._read_additions()
        return iter(tuple(self._entries.values()))

    def __contains__(self, name: str) -> bool:
        """Whether there is an entry called `name`."""
        if name not in self._entries:
            self._read_additions()
        return name in self._entries

    def get(self, name: str) -> T:
        """The entry called `name`.

        Raises:
            InputError: there is none; the message lists the names.
        """
        if name not in self:
            raise InputError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}")
        return self._entries[name]

    def _read_additions(self) -> None:
        load_plugin_files()
        if self._has_read_entry_points:
            return
        self._has_read_entry_points = True
        from importlib import metadata  # takes 20 ms, and a name of ours needs none of it

        for point in metadata.entry_points(group=self.group):
            entry = point.load()
            if point.name not in self._entries:  # an entry point may name a module whose decorators registered it
                self._entries[point.name] = entry


def load_plugin_files() -> None:
    """Run each file of `KVLEDGER_PLUGINS` once.

    Raises:
        InputError: a file does not exist.
    """
    for text in filter(None, os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep)):
        path = Path(text).resolve()
        if path in _loaded_files:
            continue
        spec = importlib.util.spec_from_file_location(f"kvledger_plugin_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InputError(f"plug-in {text}: no such Python file (from {PLUGINS_VARIABLE} or --plugin)")
        _loaded_files.add(path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
