"""Counts how the source is organised: files and imports of each room, and signs of plumbing. `python -m bench.house`.

A room is a folder of core, backends, sim or kernels. An arrow is an import from one room into another; modules that lie
in no room are the vocabulary that all rooms share, and are not counted as one. Sources are searched, not parsed, so
that a test can afford it.
"""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "backends", "sim", "kernels")
Arrow = tuple[str, str]

RELATIVE_IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import", re.MULTILINE)
CLASS = re.compile(r"^ *class (\w+)(?:\(([^:]*)\))?:", re.MULTILINE)
REGISTERED_CLASS = re.compile(r"^@[\w.]+\.register\(.*\)\n(?:@.*\n)*class (\w+)", re.MULTILINE)
# `Name(...)` makes one; `Name if ... else Name` chooses a class to make.
USED_CLASS = re.compile(r"(?<!class )\b([A-Z]\w*)(?=\(| if )|\belse ([A-Z]\w*)", re.MULTILINE)
PRINTS = re.compile(r"(?<![\w.])print\(|^ *(?:from|import) rich\b", re.MULTILINE)


@cache
def texts(folder: str) -> dict[Path, str]:
    """The Python files below a folder that are not empty, and their contents."""
    read = ((path, path.read_text()) for path in sorted((ROOT / folder).rglob("*.py")))
    return {path: text for path, text in read if text.strip()}


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, given its path below the folder; `.` if it lies in none."""
    return parts[0] if len(parts) > 1 else "."


def files_of_rooms(folder: str) -> Counter[str]:
    """Room -> number of modules, subfolders of a room included; package files with a docstring alone do not count."""
    counted: Counter[str] = Counter()
    for path, text in texts(folder).items():
        if path.name != "__init__.py" or len(ast.parse(text).body) > 1:
            counted[room_of(path.relative_to(ROOT / folder).parts)] += 1
    return counted


def arrows(folder: str) -> dict[Arrow, set[str]]:
    """(importing room, imported room) -> the imports between them; a folder's own `__init__.py` is left out."""
    out: dict[Arrow, set[str]] = defaultdict(set)
    for path, text in texts(folder).items():
        inside = path.relative_to(ROOT / folder).parts
        if inside == ("__init__.py",):
            continue
        package = path.relative_to(ROOT).parts[:-1]
        for dots, name in RELATIVE_IMPORT.findall(text):
            target = [*package[: len(package) - len(dots) + 1], *filter(None, name.split("."))]
            if len(target) < 2 or target[0] != folder:
                continue
            imported = target[1] if ROOT.joinpath(*target[:2]).is_dir() else "."
            if imported != room_of(inside):
                out[room_of(inside), imported].add(f"{'/'.join(inside)} imports {'.'.join(target[1:])}")
    return {arrow: imports for arrow, imports in out.items() if "." not in arrow}


def circle(found: dict[Arrow, set[str]]) -> list[str]:
    """Rooms that import each other in a circle; empty if there is none."""
    after: dict[str, set[str]] = defaultdict(set)
    for one, other in found:
        after[one].add(other)
    done: set[str] = set()

    def walk(room: str, path: list[str]) -> list[str]:
        if room in path:
            return [*path[path.index(room) :], room]
        if room in done:
            return []
        for other in sorted(after[room]):
            if way := walk(other, [*path, room]):
                return way
        done.add(room)
        return []

    return next((way for room in sorted(after) if (way := walk(room, []))), [])


def num_lines(folder: str) -> int:
    """Lines of all modules."""
    return sum(len(text.splitlines()) for text in texts(folder).values())


def occurrences(text: str, folder: str) -> int:
    """How often a text occurs in a folder's modules."""
    return sum(module.count(text) for module in texts(folder).values())


def single_subclass_bases() -> list[str]:
    """Our classes with exactly one subclass that are nothing by themselves: two classes that are one idea.

    Exceptions, seams (protocols and abstract classes), and classes that are instantiated or registered themselves are
    left out.
    """
    subclasses: dict[str, set[str]] = defaultdict(set)
    classes: set[str] = set()
    useful: set[str] = set()
    for text in (text for folder in FOLDERS for text in texts(folder).values()):
        useful.update(REGISTERED_CLASS.findall(text))
        useful.update(name for names in USED_CLASS.findall(text) for name in names)
        for name, listed in CLASS.findall(text):
            bases = set(re.findall(r"[\w.]*\b(\w+)", re.sub(r"\[.*?\]", "", listed)))
            classes.add(name)
            if bases & {"Protocol", "ABC"} or name.endswith("Error"):
                useful.add(name)
            for base in bases:
                subclasses[base].add(name)
    return sorted(base for base, own in subclasses.items() if base in classes - useful and len(own) == 1)


def printing_modules(*allowed: str) -> list[str]:
    """Modules of sim outside the allowed rooms that print, or import the console's library."""
    found = []
    for path, text in texts("sim").items():
        code = re.sub(r'"""[^"]*(?:"(?!"")[^"]*)*"""', "", text)
        if PRINTS.search(code) and room_of(path.relative_to(ROOT / "sim").parts) not in allowed:
            found.append(str(path.relative_to(ROOT)))
    return found


def main() -> None:
    """Print every number."""
    print(f"{'folder':10} {'rooms':>6} {'files':>6} {'largest room':>18} {'arrows':>7} {'lines':>7}  circle")
    for folder in FOLDERS:
        files, found = files_of_rooms(folder), arrows(folder)
        rooms = Counter({room: count for room, count in files.items() if room != "."})
        largest = "{} ({})".format(*rooms.most_common(1)[0]) if rooms else "-"
        way = " -> ".join(circle(found)) or "none"
        print(f"{folder:10} {len(rooms):6} {files.total():6} {largest:>18} {len(found):7} {num_lines(folder):7}  {way}")
    total = sum(map(num_lines, FOLDERS))
    print(f"lines: core and sim {num_lines('core') + num_lines('sim'):,}, the whole product {total:,}")
    print(f"given[ in sim: {occurrences('given[' + chr(34), 'sim')}")
    print(f"dict[str, Any] in sim: {occurrences('dict[str, Any]', 'sim')}")
    print(f"base classes with one subclass: {', '.join(single_subclass_bases()) or 'none'}")
    print(f"printing in sim outside commands and report: {', '.join(printing_modules('commands', 'report')) or 'none'}")


if __name__ == "__main__":
    main()
