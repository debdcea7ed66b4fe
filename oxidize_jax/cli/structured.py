"""``--json-schema``, ``--regex``, ``--choice``: what the text must keep to."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from oxidize_jax.cli.parser import UsageError
from oxidize_jax.sampling.structured import StructuredOutputsParams

_OPTIONS = {
    "json_schema": "--json-schema",
    "regex": "--regex",
    "choice": "--choice",
    "grammar": "--grammar",
}


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    """The options, of which one may be given."""
    group = parser.add_argument_group(
        "structured output", "One of these; with pip install 'oxidize-jax[structured]'."
    )
    group.add_argument(
        "--json-schema",
        metavar="FILE|TEXT",
        help="write JSON of this schema, a file or the schema itself, which begins with {",
    )
    group.add_argument("--regex", metavar="REGEX", help="write text that matches as a whole")
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="write this; given several times, one of them",
    )
    group.add_argument(
        "--grammar",
        metavar="FILE|TEXT",
        help="write text of this grammar, in llguidance's dialect of Lark; text has a : in it",
    )


def structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """What the options say. Raises UsageError, before any model is loaded."""
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(_OPTIONS[name] for name in given)
        raise UsageError(f"{names}: give one of them; the text cannot keep to both.")
    ((name, value),) = given.items()
    if name == "json_schema" and not value.lstrip().startswith("{"):
        value = _read(name, value)
    if name == "grammar" and ":" not in value:
        value = _read(name, value)
    field = "json" if name == "json_schema" else name
    try:
        params = StructuredOutputsParams(**{field: value})
    except ValueError as error:
        message = str(error).removeprefix(f"structured_outputs.{field}")
        raise UsageError(f"{_OPTIONS[name]}{message}") from None
    if importlib.util.find_spec("llguidance") is None:
        raise UsageError(
            f"{_OPTIONS[name]}: llguidance is not installed: pip install 'oxidize-jax[structured]'"
        )
    return params


def _read(name: str, path: Any) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{_OPTIONS[name]}: cannot read {path!r}: {reason}.") from None
