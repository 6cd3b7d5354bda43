"""A lower room never imports a higher one: the order of the rooms is the order in which data flows."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = ("allocator", "errors", "toml", "batch", "tables", "optim", "schedule", "tensorfile", "exported")
ORDER = (
    BASE, ("kernels",), ("data",), ("storage",), ("width",), ("stats",), ("plan",), ("exchange",), ("embeddings",), ("models",),
    ("train",),
    ("recipe",), ("cli",),
)  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The package itself re-exports names of several rooms, so what imports from it stands above them all, as the cli does.
TOP = len(ORDER) - 1


def modules_imported(path: Path, package: str, source: Path) -> list[tuple[int, str]]:
    """(line, full module name) of everything a file imports, anywhere in it. `from a import b` counts as a.b too."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            if module == package:
                found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, module))
    return found


def violations(source: Path) -> list[str]:
    """One line for each import that points upwards, and for each room that has no place in the order."""
    package = source.name
    rooms = {path.stem for path in source.iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    problems = [f"'{room}' has no place in ORDER" for room in sorted(rooms - set(LEVEL) - {"__init__", "__main__"})]
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        level = LEVEL.get(room, TOP)
        for line, module in modules_imported(path, package, source):
            names = module.split(".")
            if names[0] != package:
                continue
            imported = names[1] if len(names) > 1 else ""
            if LEVEL.get(imported, TOP) > level:
                problems.append(f"{path.relative_to(source)}:{line}: '{room}' imports '{module}', which is above it")
    return problems


def test_no_room_imports_a_higher_one():
    assert violations(ROOT / "src" / "unequal") == []


def test_the_check_finds_violations(tmp_path):
    package = tmp_path / "unequal"
    for room in ("kernels", "data", "train", "attic"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .kernels import lookup\n")
    (package / "errors.py").write_text("import json\n")
    (package / "kernels" / "good.py").write_text("from ..errors import UserError\nfrom . import native\nimport torch\n")
    (package / "kernels" / "bad.py").write_text("def f():\n    from ..train.trainer import Trainer\n")
    (package / "data" / "bad.py").write_text(
        "import unequal.train\nfrom .. import Batch, errors\nfrom unequal import train\n"
    )
    assert violations(package) == [
        "'attic' has no place in ORDER",
        "data/bad.py:1: 'data' imports 'unequal.train', which is above it",
        "data/bad.py:2: 'data' imports 'unequal.Batch', which is above it",
        "data/bad.py:3: 'data' imports 'unequal.train', which is above it",
        "kernels/bad.py:2: 'kernels' imports 'unequal.train.trainer', which is above it",
    ]
