"""``tool_choice``: a grammar under which the model writes calls and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from oxidize_jax.sampling.structured import StructuredOutputsParams

_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as the models that write calls were trained on it."""


def calls_grammar(tools: Sequence[dict[str, Any]], *, several: bool) -> StructuredOutputsParams:
    """One call of one of ``tools``, or with ``several`` one or more, in the form of Hermes.

    Arguments keep to ``parameters`` of the tool. Raises ValueError for a schema that is none.
    """
    schemas = {f"tool{i}": _call_schema(i, tool["function"]) for i, tool in enumerate(tools)}
    parameters = {
        f"parameters{i}": _moved(tool["function"].get("parameters") or {"type": "object"}, i)
        for i, tool in enumerate(tools)
    }
    schema = {
        "x-guidance": _SPELLING,
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in schemas],
        "$defs": {**schemas, **parameters},
    }
    more = ' ("\\n" call)*' if several else ""
    call = f'"<tool_call>\\n" %json {json.dumps(schema)} "\\n</tool_call>"'
    return StructuredOutputsParams(grammar=f"start: call{more}\ncall: {call}\n")


def _call_schema(place: int, function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {"$ref": f"#/$defs/parameters{place}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: int) -> Any:
    """``schema`` with its references to itself leading to where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/parameters{place}{reference[1:]}"
    return moved
