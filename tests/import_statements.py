"""What modules import, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "sinkprune"


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and whether a function must be called for it."""

    module: str
    line: int
    in_function: bool


def imports(source: str, package: str) -> list[Import]:
    """Every module that `source`, a module within `package`, imports."""
    return list(_imports(ast.parse(source), package, in_function=False))


def _imports(node: ast.AST, package: str, *, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        line = getattr(child, "lineno", 0)
        for module in _modules(child, package):
            yield Import(module, line, in_function)
        body_waits = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, package, in_function=in_function or body_waits)


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        # What is imported from a package may be a module of it.
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def package_of(path: Path) -> str:
    """The package a file of the repository is installed in."""
    return ".".join([PACKAGE, *path.relative_to(ROOT).parent.parts])
