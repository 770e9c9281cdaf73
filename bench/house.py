"""How the house stands: files and arrows of each room, and the counts that show plumbing. `python -m bench.house`.

folder  rooms, files, largest room, arrows between rooms, circles, lines
counts  option dictionaries, untyped dictionaries in sim, base classes with one subclass
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "backends", "sim", "kernels")
Arrow = tuple[str, str]


def modules(folder: str) -> list[Path]:
    """The Python files below a folder that hold something."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if path.read_text().strip()]


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, given its path below the folder; `.` for files on the doorstep."""
    return parts[0] if len(parts) > 1 else "."


def arrows(folder: str) -> dict[Arrow, set[str]]:
    """(importing room, imported room) -> the imports between them."""
    out: dict[Arrow, set[str]] = defaultdict(set)
    for path in modules(folder):
        inside = path.relative_to(ROOT / folder).parts
        if inside == ("__init__.py",):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = list(path.relative_to(ROOT).parts[:-1])
            target = base[: len(base) - node.level + 1] + (node.module or "").split(".")
            target = [part for part in target if part]
            if len(target) < 2 or target[0] != folder:
                continue
            is_room = ROOT.joinpath(*target[:2]).is_dir()
            imported = target[1] if is_room else "."
            if imported != room_of(inside):
                out[room_of(inside), imported].add(f"{'/'.join(inside)} imports {'.'.join(target[1:])}")
    return out


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


def files_of_rooms(folder: str) -> Counter[str]:
    """Room -> number of modules, subfolders of a room included; package files with a docstring alone do not count."""
    counted: Counter[str] = Counter()
    for path in modules(folder):
        tree = ast.parse(path.read_text())
        if path.name == "__init__.py" and len(tree.body) <= 1:
            continue
        counted[room_of(path.relative_to(ROOT / folder).parts)] += 1
    return counted


def num_lines(folder: str) -> int:
    """Lines of all modules."""
    return sum(len(path.read_text().splitlines()) for path in modules(folder))


def single_subclass_bases() -> list[str]:
    """Our own base classes with one subclass that nobody makes instances of: two classes that are one idea."""
    classes: set[str] = set()
    subclasses: dict[str, set[str]] = defaultdict(set)
    seams: set[str] = set()
    made: set[str] = set()
    for folder in FOLDERS:
        for path in modules(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    made.add(node.func.id)
                if not isinstance(node, ast.ClassDef):
                    continue
                classes.add(node.name)
                bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                if {"Protocol", "ABC"} & set(bases) or node.name.endswith("Error"):
                    seams.add(node.name)
                for base in bases:
                    subclasses[base].add(node.name)
    return sorted(base for base, own in subclasses.items() if base in classes and len(own) == 1 and base not in seams)


def occurrences(text: str, folder: str) -> int:
    """How often a text stands in a folder's modules."""
    return sum(path.read_text().count(text) for path in modules(folder))


def main() -> None:
    """Print every number."""
    print(f"{'folder':10} {'rooms':>6} {'files':>6} {'largest room':>18} {'arrows':>7} {'lines':>7}  circle")
    for folder in FOLDERS:
        files, found = files_of_rooms(folder), arrows(folder)
        room, most = (
            max(((room, count) for room, count in files.items() if room != "."), key=lambda each: each[1])
            if (set(files) - {"."})
            else ("-", 0)
        )
        between = [arrow for arrow in found if "." not in arrow]
        way = " -> ".join(circle({arrow: found[arrow] for arrow in between})) or "none"
        largest = f"{room} ({most})"
        rooms = len(set(files) - {"."})
        print(
            f"{folder:10} {rooms:6} {sum(files.values()):6} {largest:>18} {len(between):7} {num_lines(folder):7}  {way}"
        )
    total = sum(map(num_lines, FOLDERS))
    print(f"lines: core and sim {num_lines('core') + num_lines('sim'):,}, the whole product {total:,}")
    print(f"given[ in sim: {occurrences('given[' + chr(34), 'sim')}")
    print(f"dict[str, Any] in sim: {occurrences('dict[str, Any]', 'sim')}")
    print(f"base classes with one subclass: {', '.join(single_subclass_bases()) or 'none'}")


if __name__ == "__main__":
    main()
