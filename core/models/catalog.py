"""The built-in models of catalog.toml, and the names that find them."""

import functools
from pathlib import Path
from typing import Any

from ..errors import InputError

# What a tuned or converted copy of a model adds to its name without changing its sizes.
_TUNINGS = frozenset({"instruct", "it", "chat", "hf", "base", "thinking", "pt", "v0.1", "v0.3", "2407", "2501", "2507"})


@functools.cache
def _catalog() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Configs by short name, and short names by alias."""
    import tomllib  # an import of all of core need not wait for it

    configs: dict[str, dict[str, Any]] = {}
    aliases: dict[str, str] = {}
    for name, table in tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8")).items():
        aliases |= dict.fromkeys(table.pop("aliases", ()), name)
        fields = configs[table.pop("like")] if "like" in table else {}
        without = table.pop("without", ())
        configs[name] = {field: value for field, value in (fields | table).items() if field not in without}
    return configs, aliases


def builtin_configs() -> dict[str, dict[str, Any]]:
    """Every built-in config by its short name, in the order of the catalogue."""
    return _catalog()[0]


def catalogue_name(name: str) -> str | None:
    """The built-in name behind a hub id, without organisation and tuning suffixes; None if there is none.

    Any other suffix may be another size, architecture or quantisation, so it is no match.
    """
    configs, aliases = _catalog()
    words = _bare(name).split("-")
    while True:
        wanted = "-".join(words)
        wanted = aliases.get(wanted, wanted)
        if wanted in configs:
            return wanted
        if len(words) < 2 or words[-1] not in _TUNINGS:
            return None
        words.pop()


def unknown_model(name: str) -> InputError:
    """The error for a name that finds no built-in model; it lists close names."""
    from difflib import get_close_matches

    configs = builtin_configs()
    close = get_close_matches(_bare(name), configs, n=6, cutoff=0.4)
    return InputError(
        f"no built-in model is called {name!r}; give a path to its config.json, a description by hand"
        f" (docs/planning.md), or one of {', '.join(close or configs)} (and the quantization of a quantised checkpoint)"
    )


def _bare(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower().replace("_", "-")
