"""A jinja2 sandbox that also bounds what a template may take.

jinja2's own sandbox keeps a template from reaching Python; it leaves a template free to
loop for days or to make a text of terabytes. Here every turn of a loop and every call of a
macro counts, and so does what operators, literals, calls and filters make: before it is made
where a short text can become a long one. What no chat needs is not there at all.
"""

from __future__ import annotations

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
from jinja2.utils import Namespace

from oxidize_jax.text import template_budget as limits
from oxidize_jax.text.template_budget import Budget, TemplateLimit, current

MAX_SOURCE = 1_000_000
"""Length of a template. Those of chat models have some thousand characters."""

_MAX_BITS = 4096  # of a whole number
_MAX_FORMAT = 100_000  # characters of a text with fields
_MAX_FIELD = 9999  # characters, by its width
_MAX_SEARCH = 10**9  # characters compared by a method that takes length times length
_MAX_PRECISION = 1000  # digits

# These make something longer by a number, or a text, that they are given.
_PADDING = ("center", "ljust", "rjust", "zfill")
_SLOW_SEARCH = ("strip", "lstrip", "rstrip", "trim", "rfind", "rindex", "rsplit", "rpartition")
_PICKING = ("attr", "first", "last", "max", "min", "random")  # give what was there before
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

# Filters and names that no chat needs: they make texts of any length, or take any time.
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")

# A field of five digits or more, or of a width that is an argument itself.
_WIDE_FIELDS = {
    "%": re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\d{5}|\*)|%\([^)]*\("),
    "{": re.compile(r"\{[^{}]*\d{5}|\{[^{}]+\{"),
}

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format index isalnum isalpha isascii "  # noqa: SIM905
        "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper "
        "join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
        "zfill".split()
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(("is_integer",)),
}
"""Methods of plain data that a template may call."""


def render_limited(template: jinja2.Template, names: Mapping[str, Any]) -> str:
    """The text of a template of a :class:`Sandbox`.

    Raises :class:`TemplateLimit` if it goes beyond one of the limits of
    :mod:`~oxidize_jax.text.template_budget`, and whatever the template raises.
    """
    token = current.set(Budget(deadline=time.monotonic() + limits.MAX_SECONDS))
    try:
        return "".join(_limited(template.generate(names)))
    finally:
        current.reset(token)


def _limited(chunks: Iterable[str]) -> Iterator[str]:
    length = 0
    for chunk in chunks:
        length += len(chunk)
        if length > limits.MAX_CHARACTERS:
            raise TemplateLimit(f"it renders more than {limits.MAX_CHARACTERS} characters")
        yield chunk


class _LimitedCode(CodeGenerator):
    """Sends what makes or compares values through the environment, as jinja2 does with
    intercepted operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._allowed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._allowed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._allowed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._allowed(super().visit_Compare, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._allowed(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _allowed(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.allowed(")
        visit(node, frame)
        self.write(")")


class _Namespace(Namespace):
    """Can hold itself, so it is not printed with what it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    """Refuses an unsafe attribute where it is asked for, and counts what is taken.

    jinja2 hands out an undefined value for such an attribute, which prints as nothing: a
    hostile template would go unnoticed until it did more.

    ``filters`` are put beside jinja2's own or in their place.
    """

    code_generator_class = _LimitedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(finalize=_counted_output, **options)
        self.filters.update(filters)
        for name in _NO_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _checked_filter(name, function)
        for name, function in self.tests.items():
            self.tests[name] = _timed(function)
        del self.globals["lipsum"]  # text of any length, and of no use in a chat
        self.globals["namespace"] = _Namespace

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods or not callable(value)
        return not isinstance(obj, bytes | type)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raises ``SecurityError``."""
        raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` in the sandbox; ``format_map`` is refused."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and value.__name__ != "format":
            self.unsafe_undefined("", value.__name__)
        return wrapped

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``; the hash of an argument takes time."""
        current.get().look_at_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """One of the ``intercepted_binops``, if what it makes is not too large."""
        budget = current.get()
        budget.look_at_clock()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.make(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            budget.weight(left, right)
            total = super().call_binop(context, operator, left, right)
            return budget.allow_sum(total, left, right)
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, "%", left, (right,))
        return budget.allow(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template; a method of a text must not make it too long."""
        budget = current.get()
        budget.look_at_clock()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ == "join" and len(args) == 1:
                args = (list(args[0]),)  # may be read only once
            _check_growth(budget, method.__name__, text, (*args, *kwargs.values()))
        # A macro has them as one list.
        budget.weight(*args, *kwargs.values())
        return budget.allow(super().call(__context, __obj, *args, **kwargs))

    def concatenate(self, parts: Iterable[Any]) -> str:
        """``a ~ b``."""
        budget = current.get()
        budget.look_at_clock()
        budget.weight(*parts)
        texts = [str(part) for part in parts]
        budget.make(sum(map(len, texts)))
        return "".join(texts)

    def allowed(self, value: Any) -> Any:
        """What a literal, a slice or a comparison gave."""
        budget = current.get()
        budget.look_at_clock()
        return budget.allow(value)

    def count_step(self, length: int) -> str:
        """Called at the start of each turn of a loop and of each macro, with the length of the
        text that stands in it."""
        budget = current.get()
        budget.step()
        budget.put_out(length)
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it has more than {MAX_SOURCE} characters itself")
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all(nodes.Stmt)):
            if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
                length = nodes.Const(sum(len(t.data) for t in node.find_all(nodes.TemplateData)))
                counter = nodes.EnvironmentAttribute("count_step")
                count = nodes.Call(counter, [length], [], None, None)
                node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return tree


@jinja2.pass_context  # so jinja2 does not call it while it compiles
def _counted_output(context: Context, value: Any) -> Any:
    budget = current.get()
    budget.look_at_clock()
    budget.put_out(budget.weigh(value)[0])
    return value


def _timed(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        current.get().look_at_clock()
        return function(*args, **kwargs)

    return timed


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.look_at_clock()
        value, *rest = args[leading:]
        if name == "join":  # what is joined may be read only once
            value = list(value)
            _check_growth(budget, name, str(rest[0] if rest else kwargs.get("d", "")), (value,))
        else:
            # By name in any order; only of replace does the order matter.
            named = sorted(kwargs.items(), key=lambda item: item[0] != "old")
            _check_growth(budget, name, value, (*rest, *(argument for _, argument in named)))
        made = function(*args[:leading], value, *rest, **kwargs)
        if isinstance(made, str) and (name in _PICKING or any(made is given for given in args)):
            return made
        return budget.allow(made)

    return checked


def _check_growth(budget: Budget, name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Counts what a method of ``value``, or a filter of it, makes; at most, where unknown."""
    numbers = [number for number in arguments if isinstance(number, int)]
    texts = [text for text in arguments if isinstance(text, str)]
    if name in _PADDING or name in ("batch", "slice"):
        budget.make(max(_length(value), *numbers, 0) + budget.weight(*arguments))
    elif name == "indent":
        lines = 1 + sum(str(value).count(end) for end in _LINE_ENDS)
        budget.make(_length(value) + lines * max(0, *numbers, *map(len, texts), 4))
    elif name == "join" and arguments and isinstance(arguments[0], list):
        budget.make(sum(budget.weigh(item)[0] + len(value) for item in arguments[0]))
    elif name == "replace" and len(arguments) > 1:
        old, new = map(str, arguments[:2])
        budget.make(len(str(value)) + str(value).count(old) * len(new))
    elif name == "format":
        # The method has fields in braces and is sent here as such; the filter is the operator.
        _check_format(budget, "%", str(value), arguments)
        _check_format(budget, "{", str(value), arguments)
    elif name in _SLOW_SEARCH and texts:
        if _length(value) * max(map(len, texts)) > _MAX_SEARCH:
            raise TemplateLimit(f"it searches a long text for a long one ({name})")
    elif name == "round" and any(abs(number) > _MAX_PRECISION for number in numbers):
        raise TemplateLimit(f"it makes more than {_MAX_PRECISION} digits")
    elif name == "sum" and not all(isinstance(a, str | int | float | None) for a in arguments):
        raise TemplateLimit("it makes a sum of what is no number")


def _check_format(budget: Budget, mark: str, text: str, arguments: tuple[Any, ...]) -> None:
    fields = text.count(mark)
    if not fields:
        return
    if len(text) > _MAX_FORMAT:
        raise TemplateLimit(f"it formats a text of more than {_MAX_FORMAT} characters")
    budget.make(len(text) + fields * max(_MAX_FIELD, budget.weight(*arguments)))
    if _WIDE_FIELDS[mark].search(text):
        raise TemplateLimit("it formats a field of 10000 characters or more, or of any width")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(right, int):
        budget.make(budget.weigh(left)[0] * right)
    elif isinstance(left, int):
        budget.make(left * budget.weigh(right)[0])


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimit(f"it makes a number of more than {_MAX_BITS} bits")
