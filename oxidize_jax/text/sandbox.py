"""A jinja2 sandbox that also bounds what a template may take.

jinja2's own sandbox keeps a template from reaching Python; it leaves a template free to
loop for days or to make a text of terabytes. Here every turn of a loop and every call of a
macro counts, and so does what operators, and the methods and filters that can make a short
text a long one, make.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""Turns of loops and calls of macros in one rendering."""

MAX_CHARACTERS = 10_000_000
"""Length of the rendered text, and of any text or list that an operator makes."""

MAX_MADE = 50 * MAX_CHARACTERS
"""Length of all texts and lists that operators make in one rendering."""

MAX_SECONDS = 10.0
"""Time of one rendering, looked at between steps."""

_MAX_BITS = 4096  # of a whole number

# Methods of texts, and filters, that make something longer by a number they are given.
_WIDENING = ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "zfill")

# A field of five digits or more, or of a width that is an argument itself.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|\{[^{}]*\d{5}|\{[^{}]+\{")


class TemplateLimit(Exception):
    """A template took more than it may."""


def render_limited(template: jinja2.Template, names: Mapping[str, Any]) -> str:
    """The text of a template of a :class:`Sandbox`.

    Raises :class:`TemplateLimit` if it goes beyond one of this module's limits, and
    whatever the template raises.
    """
    token = _budget.set(_Budget(deadline=time.monotonic() + MAX_SECONDS))
    try:
        return "".join(_limited(template.generate(names)))
    finally:
        _budget.reset(token)


def _limited(chunks: Iterable[str]) -> Iterator[str]:
    length = 0
    for chunk in chunks:
        length += len(chunk)
        if length > MAX_CHARACTERS:
            raise TemplateLimit(f"it renders more than {MAX_CHARACTERS} characters")
        yield chunk


@dataclasses.dataclass
class _Budget:
    """What one rendering has taken so far."""

    deadline: float
    steps: int = 0
    made: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimit(f"its loops and macros take more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, length: int) -> None:
        self.made += max(0, length)
        if length > MAX_CHARACTERS or self.made > MAX_MADE:
            raise TemplateLimit(
                f"it makes a text or list of more than {MAX_CHARACTERS} items, or {MAX_MADE} in all"
            )


# One template object serves many threads, so what a rendering has taken is not in it.
_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("_budget")


class _LimitedCode(CodeGenerator):
    """Sends ``~`` through the environment, as jinja2 does with intercepted operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Refuses an unsafe attribute where it is asked for, and counts what is taken.

    jinja2 hands out an undefined value for such an attribute, which prints as nothing: a
    hostile template would go unnoticed until it did more.
    """

    code_generator_class = _LimitedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in (*_WIDENING, "format", "join", "replace"):
            if name in self.filters:
                self.filters[name] = _checked_filter(name, self.filters[name])
        del self.globals["lipsum"]  # text of any length, and of no use in a chat

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raises ``SecurityError``."""
        raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """One of the ``intercepted_binops``, if what it makes is not too large."""
        if operator == "+":
            _budget.get().make(_length(left) + _length(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_growth("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template; a method of a text must not make it too long."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _check_growth(method.__name__, text, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def concatenate(self, parts: Iterable[Any]) -> str:
        """``a ~ b``."""
        texts = [str(part) for part in parts]
        _budget.get().make(sum(map(len, texts)))
        return "".join(texts)

    def count_step(self) -> str:
        """Called at the start of each turn of a loop and of each macro."""
        _budget.get().step()
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all(nodes.Stmt)):
            if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
                count = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return tree


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[leading:]
        if name == "join":  # what is joined may be read only once
            value = list(value)
            _check_growth(name, str(rest[0] if rest else kwargs.get("d", "")), (value,))
        else:
            # By name in any order; only of replace does the order matter.
            named = sorted(kwargs.items(), key=lambda item: item[0] != "old")
            _check_growth(name, value, (*rest, *(argument for _, argument in named)))
        return function(*args[:leading], value, *rest, **kwargs)

    return checked


def _check_growth(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Counts what a method of ``value``, or a filter of it, makes; at most, where unknown."""
    budget = _budget.get()
    if name in _WIDENING:
        widths = [width for width in arguments if isinstance(width, int)]
        budget.make(max(1, _length(value)) * max(1, *widths, 1))
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        budget.make(sum(len(str(item)) + len(value) for item in arguments[0]))
    elif name == "replace" and len(arguments) > 1:
        old, new = map(str, arguments[:2])
        budget.make(len(str(value)) + str(value).count(old) * len(new))
    elif name == "format" and _WIDE_FIELD.search(str(value)):
        raise TemplateLimit("it formats a field of 10000 characters or more, or of any width")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(right, int):
        _budget.get().make(_length(left) * right)
    elif isinstance(left, int):
        _budget.get().make(left * _length(right))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimit(f"it makes a number of more than {_MAX_BITS} bits")
