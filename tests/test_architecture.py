# SPDX-License-Identifier: Apache-2.0
"""Who may know whom: the direction of imports and includes, and rules that hold for every source file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, CSRC = ROOT / "peftds_ext", ROOT / "csrc"

# What each part of the package may import, besides itself. The root (peftds_ext/__init__.py) only says what
# is loaded on first use.
BASE = {"errors", "env", "config"}
ALLOWED = {
    "errors": set(),
    "env": set(),
    "config": {"errors"},
    "_native": {"errors"},
    "ops": {"errors", "_native"},
    "optim": {*BASE, "_native", "ops", "store", "observe"},
    "store": {*BASE, "_native", "ops"},
    "planner": BASE,
    "observe": BASE,
    "stream": {*BASE, "_native", "ops", "optim", "store", "observe"},
    "integrations": {*BASE, "_native", "ops", "optim", "planner", "store", "stream", "observe"},
    "cli": {*BASE, "_native", "ops", "optim", "planner", "store", "integrations", "observe"},
    "": {"errors", "ops", "optim", "integrations", "observe"},
}
FOREIGN = {"deepspeed", "transformers", "peft", "accelerate"}

# What each part of the C++ code may include, besides itself.
INCLUDES = {
    "base": set(),
    "kernels": {"base"},
    "io": {"base"},
    "stream": {"base", "io", "kernels"},
    "bindings": {"base", "kernels", "io", "stream"},
}
OUTSIDE_KNOWLEDGE = re.compile(r"^(torch|pybind11|ATen|c10|caffe2|Python\.h)")


def part_of(path: Path) -> str:
    """Return the part of the package that a file belongs to; "" for the package's root."""
    first = path.relative_to(PACKAGE).parts[0].partition(".")[0]
    return "" if first == "__init__" else first


class Import:
    """One import: the module, the line, and whether it runs when the file is imported."""

    def __init__(self, module: str, line: int, at_import_time: bool) -> None:
        self.module, self.line, self.at_import_time = module, line, at_import_time


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _modules_of(node: ast.AST, path: Path) -> list[str]:
    """The modules that one statement or call imports, with full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = ("peftds_ext", *path.relative_to(PACKAGE).parent.parts)
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
        return [f"{base}.{alias.name}" for alias in node.names]
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if called in ("importlib.import_module", "import_module", "__import__"):
        assert isinstance(node, ast.Call)
        name = node.args[0] if node.args else None
        return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
    return []


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of a file, wherever they stand, ``importlib.import_module("...")`` included."""

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        for module in _modules_of(node, path):
            yield Import(module, getattr(node, "lineno", 0), at_import_time)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import_time = False
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_import_time)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import_time)

    yield from visit(ast.parse(path.read_text()), True)


def python_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])


def cpp_files() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", python_files(), ids=names)
def test_python_imports_point_downwards(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED or part == "__main__", f"{part} has no place in the order yet: add it to ALLOWED"
    for found in imports_of(path):
        top, _, rest = found.module.partition(".")
        target = rest.partition(".")[0]
        if top != "peftds_ext" or target == part or not target:
            continue
        if not (PACKAGE / target).is_dir() and not (PACKAGE / f"{target}.py").exists():
            continue  # a name of the root, such as __version__
        assert target in ALLOWED[part], f"line {found.line}: {part or 'the root'} must not know {target}"


@pytest.mark.parametrize("path", python_files(), ids=names)
def test_foreign_packages_are_imported_in_integrations_inside_functions(path: Path) -> None:
    for found in imports_of(path):
        if found.module.partition(".")[0] in FOREIGN:
            assert part_of(path) == "integrations", f"line {found.line} imports {found.module}"
            assert not found.at_import_time, f"line {found.line} imports {found.module} at import time"


def test_the_root_imports_only_errors_and_ops_at_import_time() -> None:
    eager = {found.module for found in imports_of(PACKAGE / "__init__.py") if found.at_import_time}
    assert {m for m in eager if m.startswith("peftds_ext")} <= {
        "peftds_ext.errors.NativeLoadError",
        "peftds_ext.ops",
    }


@pytest.mark.parametrize("path", cpp_files(), ids=names)
def test_cpp_includes_point_downwards(path: Path) -> None:
    part = path.relative_to(CSRC).parts[0]
    assert part in INCLUDES, f"{part} has no place in the order yet: add it to INCLUDES"
    for brackets, included in re.findall(
        r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE
    ):
        if OUTSIDE_KNOWLEDGE.match(included):
            assert part == "bindings", f"only bindings/ may include {included}"
        elif brackets == '"':
            assert (CSRC / included).is_file(), f"{included}: not a path below csrc/"
            target = included.partition("/")[0]
            assert target == part or target in INCLUDES[part], f"{part} must not include {included}"


def test_every_translation_unit_is_built() -> None:
    setup = (ROOT / "setup.py").read_text()
    cmake = (ROOT / "CMakeLists.txt").read_text() + (CSRC / "kernels/cuda/CMakeLists.txt").read_text()
    for path in cpp_files():
        if path.suffix in (".cpp", ".cu"):
            name = str(path.relative_to(CSRC))
            assert f'"{name}"' in setup, f"setup.py does not build {name}"
            assert name.startswith("bindings/") or path.name in cmake, f"CMake does not build {name}"


def source_files() -> list[Path]:
    """Every file that a compiler, an interpreter or a build tool reads."""
    folders = [
        PACKAGE,
        CSRC,
        *(ROOT / name for name in ("tests", "benchmarks", "examples", "scripts", ".ci")),
    ]
    suffixes = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".sh", ".cmake"}
    found = [p for folder in folders if folder.is_dir() for p in folder.rglob("*") if p.is_file()]
    chosen = [
        p for p in found if p.suffix in suffixes or p.name == "CMakeLists.txt" or p.parent.name == ".ci"
    ]
    return sorted([*chosen, ROOT / "setup.py", ROOT / "CMakeLists.txt"])


@pytest.mark.parametrize("path", source_files(), ids=names)
def test_every_source_file_names_its_licence_first(path: Path) -> None:
    lines = path.read_text().splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    comment = "//" if path.suffix in (".h", ".cpp", ".cu", ".cuh") else "#"
    assert first == f"{comment} SPDX-License-Identifier: Apache-2.0"


def test_no_compiler_flag_depends_on_the_builders_cpu() -> None:
    builds = [ROOT / name for name in ("setup.py", "CMakeLists.txt", "CMakePresets.json", "pyproject.toml")]
    builds += [*ROOT.glob("scripts/*"), *ROOT.glob(".ci/*"), *CSRC.rglob("CMakeLists.txt"), *cpp_files()]
    flag = re.compile(r"-m(arch|tune|cpu)=|-mavx|-mfma|-msse|-ffast-math|-Ofast")
    for path in builds:
        if path.is_file():
            match = flag.search(path.read_text())
            assert match is None, f"{names(path)}: {match.group() if match else ''}"
