"""Builds the API reference from the docstrings: `make docs`, or `python docs/reference.py [FOLDER [PACKAGE ...]]`."""

import importlib
import sys
from pathlib import Path

import pdoc
import pdoc.render

PACKAGES = (
    "kvledger",
    "kvledger.core",
    "kvledger.core.pool.policies.policy",
    "kvledger.core.models.architecture",
    "kvledger.core.registry",
    "kvledger.backends",
    "kvledger.backends.serving",
    "kvledger.backends.sinks",
    "kvledger.sim",
    "kvledger.sim.traces",
    "kvledger.sim.traces.format",
    "kvledger.sim.latency.models",
    "kvledger.sim.fleet.routing",
    "kvledger.testing",
    "kvledger.kernels",
)


def build(folder: Path, *packages: str) -> None:
    """Write one HTML page for each package, with the names in its `__all__`.

    Raises:
        AttributeError: a name in `__all__` does not exist.
    """
    found: set[str] = set()
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))  # pdoc sees only names that were imported already
            found.add(f"{package}.{name}")
    pdoc.render.configure(docformat="google", show_source=False)
    # A package in another one's `__all__` gets its page with that one.
    pdoc.pdoc(*(package for package in packages if package not in found), output_directory=folder)


if __name__ == "__main__":
    _, *arguments = sys.argv
    build(Path(arguments[0] if arguments else Path(__file__).parent / "site"), *(arguments[1:] or PACKAGES))
