"""StructuredOutputsParams: what the text of a request must keep to, checked for its form."""

from __future__ import annotations

import dataclasses
import json as json_format
from collections.abc import Mapping
from typing import Any

from oxidize_jax.messages import reason, short_repr

MAX_GRAMMAR_CHARS = 65_536
"""Longest schema, regex or grammar, and all choices together."""
MAX_CHOICES = 1_024
"""Most strings of ``choice``."""


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """One of these, and the output is text of that kind (vLLM's names).

    It is that to its end if the request finishes with ``stop`` and no ``stop_reason``; with
    ``length``, or where a stop string or an id of ``stop_token_ids`` cuts it, it is the beginning
    of such a text. Such an id is sampled where the grammar allows its text, and ends the request
    there. The model's own end-of-sequence ids are sampled only where the text may end, even if
    they spell something. Raises ValueError naming the field, and what to do.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as the object itself; kept as text. A keyword that cannot be
    enforced is an error (where the request is made); names that JSON Schema does not have are
    annotations, as its standard says, and mean nothing."""
    regex: str | None = None
    """The whole text matches it (the syntax of Rust's regex: no look-around, no references
    back). ``^`` at its start and ``$`` at its end may be left out."""
    choice: tuple[str, ...] | list[str] | None = None
    """The text is one of these strings. Kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar in llguidance's dialect of Lark; its rule ``start`` is the text.
    Special tokens, and ids that end an output, cannot be named in it: none is part of the text."""

    def __post_init__(self) -> None:
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        names = ", ".join(f.name for f in dataclasses.fields(self))
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs has {got}: give exactly one of {names}.")
        (name,) = given
        if name == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        _check_length(name, self.text)

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None)

    @property
    def text(self) -> str:
        """Its value; choices as a list in JSON."""
        value = getattr(self, self.kind)
        return json_format.dumps(value) if self.kind == "choice" else value


def as_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """``value``, of which a dict is taken for the fields. Raises ValueError."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    names = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
    if not isinstance(value, Mapping) or not set(value) <= set(names):
        raise ValueError(
            f"structured_outputs={short_repr(value)}: must be StructuredOutputsParams, or a dict "
            f"with one of {', '.join(names)}."
        )
    return StructuredOutputsParams(**value)


def _schema_text(schema: Any) -> str:
    """The schema as text, the order of its keys kept: it is the order of the output's."""
    where = "structured_outputs.json"
    try:
        value = json_format.loads(schema) if isinstance(schema, str) else schema
        value = dict(value) if isinstance(value, Mapping) else value
        text = json_format.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{where}: is nested too deeply; make it flatter.") from None
    except (TypeError, ValueError) as error:
        shown = short_repr(schema)
        raise ValueError(f"{where}={shown}: not a JSON schema ({reason(error)}).") from None
    if not isinstance(value, Mapping):
        raise ValueError(
            f'{where}={short_repr(schema)}: must be a JSON object; use {{"type": "object"}} for '
            "any object."
        )
    return text


def _choices(value: Any) -> tuple[str, ...]:
    where = "structured_outputs.choice"
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{where}={short_repr(value)}: must be a list of strings, one at least.")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"{where} has {len(value)} strings: at most {MAX_CHOICES}; drop some.")
    for item in value:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{where}={short_repr(item)}: must be a string, not empty; mend it.")
        _check_unicode(where, item)
    return tuple(value)


def _check_length(name: str, text: Any) -> None:
    where = f"structured_outputs.{name}"
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}={short_repr(text)}: must be text, not empty.")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"{where} has {len(text)} characters: at most {MAX_GRAMMAR_CHARS}; shorten it."
        )
    _check_unicode(where, text)


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has a lone surrogate at index {error.start}: it is not valid Unicode; send "
            "the character whole."
        ) from None
