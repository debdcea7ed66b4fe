"""Chat messages to the text a model was trained on, through its Jinja template."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from oxidize_jax.messages import short_repr

try:
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.parser import Parser

    from oxidize_jax.text.sandbox import Sandbox, render_limited
    from oxidize_jax.text.template_budget import MAX_CHARACTERS, TemplateLimit, current
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError("Chat templates need the jinja2 package: pip install jinja2") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """The text that ``template`` makes of a conversation.

    A template comes with a checkpoint, so it is run as untrusted code: sandboxed, and
    over plain data (strings, numbers, lists, dicts) that it cannot change, within the limits
    of :mod:`~oxidize_jax.text.template_budget` on steps, text and time. It finds what
    Hugging Face templates expect: ``trim_blocks`` and ``lstrip_blocks``, ``break`` and
    ``continue``, ``{% generation %}``, ``raise_exception``, ``strftime_now``, a
    ``tojson`` that escapes nothing, and ``tools`` and ``documents`` that are none unless
    ``extra`` has them.

    Args:
        template: Jinja source.
        messages: dicts with ``role`` and ``content``. Content is text or a list of
            ``{"type": "text", "text": ...}`` parts, which are joined. Other keys go to
            the template as they are.
        bos_token: text of the BOS; None leaves the name undefined, so it prints nothing.
        eos_token: the same for the EOS.
        add_generation_prompt: end with the start of the assistant's turn.
        extra: more names for the template.

    Raises:
        ValueError: bad messages, or the template is not valid, does something unsafe,
            takes too long or too much memory, fails, or refuses these messages.
    """
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    names = {
        "tools": None,
        "documents": None,
        **{name: token for name, token in tokens.items() if token is not None},
        **_plain(extra, "template argument"),
        "messages": _checked_messages(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return render_limited(_compiled(template), names)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template line {error.lineno}: {error.message}") from None
    except SecurityError as error:
        raise ValueError(f"chat template refused, it is not safe to run: {_said(error)}") from None
    except TemplateLimit as error:
        raise ValueError(f"chat template stopped: {error}.") from None
    except _Refused as error:
        raise ValueError(f"the chat template refuses these messages: {_said(error)}") from None
    except Exception as error:  # a template can fail in any way that Python can
        raise ValueError(f"chat template failed: {type(error).__name__}: {_said(error)}") from None


def _said(error: Exception) -> str:
    """What an error says, in one line; a template may put any text there."""
    text = " ".join(str(error)[: 4 * _MAX_MESSAGE].split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


_MAX_MESSAGE = 300  # characters of what a template says in an error
_MAX_LAYOUT = 1000  # characters of a date's layout
_MAX_INDENT = 100  # characters for each level of JSON


class _Refused(Exception):
    """``raise_exception(message)`` in a template."""


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(
            f"messages={type(messages).__name__}: must be a list of {{'role', 'content'}} objects."
        )
    if not messages:
        raise ValueError("messages is empty: send at least one {'role', 'content'} object.")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{where}={type(message).__name__}: must be an object with 'role' and 'content'."
        )
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"{where} has no {key!r}: every message needs 'role' and 'content'.")
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role={short_repr(role)}: must be a name such as 'user'.")
    content = _text_content(message["content"], f"{where}.content")
    return {**_plain(message, where), "content": content}


def _text_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}={type(content).__name__}: must be text or a list of text parts.")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where}[{index}] is of type {short_repr(kind)}: only {{'type': 'text', "
                f"'text': ...}} parts are supported."
            )
    return "".join(part["text"] for part in content)


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's types only: a template gets no object with methods of its own."""
    try:
        return _copied(value, where)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply; make it flatter.") from None


def _copied(value: Any, where: str) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{where}: keys must be strings.")
        return {str(key): _copied(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(
        f"{where}={type(value).__name__}: only text, numbers, booleans, null, lists and objects "
        "can be given to a chat template."
    )


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = Sandbox(
        filters={"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks training targets; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 looks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = indent if isinstance(indent, int) else len(indent or "")
    if max([width, *map(len, separators or ())]) > _MAX_INDENT:
        raise TemplateLimit(f"it indents or separates JSON by more than {_MAX_INDENT}")
    # jinja2's own filter escapes &, <, > and ' for HTML, which a model never saw.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    chunks, length = [], 0
    for chunk in encoder.iterencode(value):
        current.get().look_at_clock()
        length += len(chunk)
        if length > MAX_CHARACTERS:
            raise TemplateLimit(f"it makes JSON of more than {MAX_CHARACTERS} characters")
        chunks.append(chunk)
    return "".join(chunks)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message if isinstance(message, str) else short_repr(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > _MAX_LAYOUT:
        raise TemplateLimit(f"it gives a date a layout of more than {_MAX_LAYOUT} characters")
    return datetime.datetime.now().strftime(layout)
