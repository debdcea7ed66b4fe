"""A digest of code as it stands in memory, whatever was changed there after it was read.

Two processes agree on it where every function, class and constant of the modules is the same.
Things of other packages are known by their names: their versions have to be told apart besides.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_PLAIN = (int, float, complex, str, bytes, type(None), type(Ellipsis))
_NAMED = (typing.TypeVar, typing.ParamSpec, types.BuiltinFunctionType, types.MethodDescriptorType)
_ANNOTATIONS = ("typing", "types", "collections.abc", "__future__")
_WRAPPED = ("functools", "jax", "jaxlib", "flax")
"""Packages whose decorators say with ``__wrapped__`` what they run, and do nothing else to it."""
_OF_THE_INTERPRETER = {
    "__annotations__",
    "__builtins__",
    "__cached__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__dict__",
    "__doc__",
    "__file__",
    "__loader__",
    "__path__",
    "__slots__",
    "__spec__",
    "__weakref__",
    "_abc_impl",
}
"""Entries of a module or a class that differ without a difference in what it does."""


class UnknownObjectError(Exception):
    """A module holds something of which nobody can say what it does."""


def fingerprint(names: Iterable[str]) -> str | None:
    """Hex digest of the modules ``names``, packages with all modules inside.

    None where there is anything in them that is not known: a mock in place of a function, say.
    """
    walk = _Walk(tuple(names))
    try:
        for name in walk.roots:
            for module in _modules(name):
                walk.see(module.__name__, vars(module))
    except UnknownObjectError:
        return None
    return walk.digest.hexdigest()


def _modules(name: str) -> list[types.ModuleType]:
    """The module, and those inside it; imported, so that it does not matter which are already."""
    module = importlib.import_module(name)
    inside = pkgutil.iter_modules(getattr(module, "__path__", ()))
    found = [module]
    for info in sorted(inside, key=lambda info: info.name):
        found += _modules(f"{name}.{info.name}")
    return found


class _Walk:
    """Goes through objects in an order that depends on their names alone."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.roots = roots
        self.digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no other object gets the id of one

    def see(self, label: str, value: Any) -> None:
        """Take ``value`` in under ``label``."""
        self._write(label)
        if isinstance(value, _PLAIN):
            # An enum member is its class's business; repr tells 1 from True and 1.0.
            return self._write(f"{type(value).__qualname__} {value!r}")
        if id(value) in self._seen:
            return self._write(f"#{self._seen[id(value)]}")
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._write(type(value).__qualname__)
        self._look_inside(value)
        return None

    def _look_inside(self, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            self._see_all(enumerate(value))
        elif isinstance(value, (set, frozenset)):
            self._see_all(enumerate(sorted(value, key=repr)))
        elif isinstance(value, Mapping):
            items = [(_label(key), entry) for key, entry in value.items()]
            self._see_all(sorted(items, key=lambda item: item[0]))
        elif isinstance(value, types.CodeType):
            self._see_code(value)
        elif isinstance(value, types.ModuleType):
            self._write(value.__name__)
        elif isinstance(value, type):
            self._see_class(value)
        elif isinstance(value, types.FunctionType):
            self._see_function(value)
        elif isinstance(value, (np.ndarray, np.generic, np.dtype)):
            self._see_array(value)
        else:
            self._see_object(value)

    def _see_all(self, items: Iterable[tuple[Any, Any]]) -> None:
        for label, item in items:
            if label not in _OF_THE_INTERPRETER:
                self.see(str(label), item)

    def _see_code(self, code: types.CodeType) -> None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(repr((code.co_code, names, counts)))
        self.see("consts", code.co_consts)

    def _see_function(self, function: types.FunctionType) -> None:
        self._write(f"{function.__module__}.{function.__qualname__}")
        if not self._is_ours(function.__module__):
            return
        # What it finds in its module's globals is seen with that module.
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        self.see("code", function.__code__)
        self.see("defaults", (function.__defaults__, function.__kwdefaults__, cells))

    def _see_class(self, cls: type) -> None:
        self._write(f"{cls.__module__}.{cls.__qualname__}")
        if self._is_ours(cls.__module__):
            self.see("bases", cls.__bases__)
            self.see("members", vars(cls))

    def _see_array(self, value: Any) -> None:
        self._write(repr(np.dtype(getattr(value, "dtype", value))))
        if not isinstance(value, np.dtype):
            self._write(f"{np.shape(value)} {np.asarray(value).tobytes().hex()}")

    def _see_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, (classmethod, staticmethod)):
            self.see("function", value.__func__)
        elif isinstance(value, property):
            self.see("functions", (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self.see("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, functools.cached_property):
            self.see("function", value.func)
        elif kind.__module__.partition(".")[0] in _WRAPPED and hasattr(value, "__wrapped__"):
            self.see("wrapped", value.__wrapped__)
        elif self._is_ours(kind.__module__) or dataclasses.is_dataclass(value):
            self.see("class", kind)
            self.see("fields", _fields(value))
        elif isinstance(value, _NAMED) or kind.__module__ in _ANNOTATIONS:
            self._write(repr(value))
        else:
            raise UnknownObjectError(repr(kind))

    def _is_ours(self, module: str | None) -> bool:
        return any(f"{module}.".startswith(f"{root}.") for root in self.roots)

    def _write(self, text: str) -> None:
        self.digest.update(f"{len(text)} {text}\n".encode(errors="surrogatepass"))


def _label(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value))
