"""A fault to be found: one wrong line, in a copy of the package."""

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import attrs

ROOT = Path(__file__).parents[2]
# The folders of the repository, by the name under which the package has them.
FOLDERS = {"core": "core", "backends": "backends", "kernels": "kernels", "sim": "sim", "testing": "tests/kit"}

# What the kit's adapter needs of the core, without the rest, whose import takes longer than finding a fault.
_EXPORTS = """
from .allocator.allocator import KVCacheAllocator
from .allocator.config import AllocatorConfig
from .cache_kinds import ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from .errors import DoesNotFitError, InputError, MisuseError
from .ledger.event_log import EventLog
from .types import Request
"""


@attrs.frozen
class Mutant:
    """One wrong line.

    Attributes:
        name: the fault in words; names the test.
        file: where, from the root of the repository.
        line: the text that is replaced; must be there exactly once.
        wrong: what it is replaced by.
        field_reports: ids of the reports whose tests fail on it.
    """

    name: str
    file: str
    line: str
    wrong: str
    field_reports: tuple[str, ...] = ()

    def source(self) -> str:
        """The file with the fault in it.

        Raises:
            LookupError: the line is not there, or not once.
        """
        source = (ROOT / self.file).read_text()
        if source.count(self.line) != 1:
            raise LookupError(
                f"mutant {self.name!r}: {self.file} has {source.count(self.line)} places that read {self.line!r}; "
                "name the line as it reads now, or drop the mutant if the rule is gone"
            )
        return source.replace(self.line, self.wrong)

    def core_in(self, folder: Path) -> ModuleType:
        """Copy core/ with the fault in it below `folder` and import it as a package of its own, for the kit."""
        package = "mutant_" + re.sub(r"\W+", "_", self.name)
        target = folder / package
        shutil.copytree(ROOT / "core", target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "__init__.py").write_text(_EXPORTS)
        (target / Path(self.file).relative_to("core")).write_text(self.source())
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(package)
        finally:
            sys.path.remove(str(folder))
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                del sys.modules[name]

    def package_in(self, folder: Path) -> Path:
        """Make `kvledger` below `folder`, with the fault in it, for a process that has `folder` on its PYTHONPATH."""
        package = folder / "kvledger"
        package.mkdir()
        shutil.copy(ROOT / "__init__.py", package)
        for name, directory in FOLDERS.items():
            if Path(self.file).is_relative_to(directory):
                shutil.copytree(ROOT / directory, package / name, ignore=shutil.ignore_patterns("__pycache__"))
                (package / name / Path(self.file).relative_to(directory)).write_text(self.source())
            else:
                (package / name).symlink_to(ROOT / directory, target_is_directory=True)
        return folder
