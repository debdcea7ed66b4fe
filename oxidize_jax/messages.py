"""How a user's value is shown in an error: in short, in one line, whatever it is."""

from __future__ import annotations

from typing import Any


def short_repr(value: Any, most: int = 40) -> str:
    """``repr`` of a value, cut behind ``most`` characters; it never fails.

    What Python cannot print, such as lists in lists 100,000 deep, numbers of more than 4,300
    digits or an object whose ``repr`` is broken, is described by its type.
    """
    try:
        text = repr(value)
    except Exception:
        if isinstance(value, int):
            # log10(2), rounded down: at least so many digits, without working them out.
            return f"a number of over {value.bit_length() * 30102 // 100_000} digits"
        return f"a value of type {type(value).__name__} that cannot be shown"
    if "\n" in text:  # arrays have lines
        text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def reason(error: Exception) -> str:
    """What ``error`` says of a text that was read. Where a number in it has more digits than
    Python takes, Python's words are advice for a programmer: here they are for a user."""
    said = str(error)
    return "a number in it has too many digits" if "set_int_max_str_digits" in said else said
