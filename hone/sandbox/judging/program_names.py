"""Finds names that only the program can define, where tests use several of them together.

In `isclose(f(2), 4.0)`, one name is the function under test, and the program must not answer for the other.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import importlib
import sys
from collections.abc import Collection, Iterator, Sequence


def names_used_together(tests: str, defined_names: Collection[str]) -> list[str]:
    """Returns two or more names that a statement of the tests uses and nothing defines, or no names.

    A statement also uses the names behind its variables and functions. Classes of the program are not
    counted, because only its own functions take their instances.
    """
    module = ast.parse(tests)
    known_names = {*defined_names, *_bound_names(module)}

    def is_of_program(name: str) -> bool:
        is_class = name[0].isupper() and not hasattr(collections, name)
        return not (
            is_class
            or name in known_names
            or name in sys.stdlib_module_names
            or hasattr(builtins, name)
        )

    names_behind: dict[str, set[str]] = {}
    for statement in _statements(module.body):
        own_names = list(_own_names(statement))
        direct = {name.id for name in own_names if is_of_program(name.id)}
        indirect = {behind for name in own_names for behind in names_behind.get(name.id, ())}
        if direct and len(direct | indirect) > 1:
            return sorted(direct | indirect)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            changed_names = {statement.name}
            inner_names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            direct = set(filter(is_of_program, inner_names))
        else:  # a call without a result is there for its changes to the arguments
            changes_all = isinstance(statement, ast.Expr)
            changed_names = {
                name.id for name in own_names if changes_all or isinstance(name.ctx, ast.Store)
            }
        for name in changed_names - direct:
            names_behind.setdefault(name, set()).update(direct, indirect)
    return []


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yields each statement before the statements in it."""
    for statement in body:
        yield statement
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(statement, field, ())
            yield from _statements(inner if isinstance(inner, list) else ())


def _own_names(statement: ast.AST) -> Iterator[ast.Name]:
    """Yields the names of a statement, without those of the statements in it."""
    nodes = [statement]
    while nodes:
        for child in ast.iter_child_nodes(nodes.pop()):
            if isinstance(child, ast.Name):
                yield child
            elif not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                nodes.append(child)


def _bound_names(module: ast.Module) -> Iterator[str]:
    """Yields the names that the tests define or import, in any scope."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            with contextlib.suppress(Exception):  # the tests raise the error when they run
                yield from vars(importlib.import_module(node.module or ""))
        elif isinstance(name := getattr(node, "name", None), str):
            yield name
