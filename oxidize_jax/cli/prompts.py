"""Prompts from the command line, from files and from standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from oxidize_jax.cli.parser import UsageError

STDIN = "-"


def read_prompts(given: Sequence[str], files: Sequence[str]) -> list[str]:
    """The prompts ``given``, then each line of ``files``; standard input if there are neither.

    Blank lines of a file are skipped, and ``-`` is standard input. Standard input that is
    read for want of anything else is one prompt, line breaks and all.

    Raises ValueError for an empty prompt, a file that cannot be read or has none, text that
    is not UTF-8, or if nothing is given and standard input is a terminal.
    """
    prompts = list(given)
    for number, prompt in enumerate(prompts, 1):
        _check(prompt, f"prompt {number}" if len(prompts) > 1 else "the prompt")
    for file in files:
        prompts += _lines(file)
    if prompts:
        return prompts
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            'there is no prompt: give one, as in `oxidize-jax generate "Name three seas."`, or '
            "--file FILE, or pipe text in."
        )
    text = _read(STDIN).strip("\r\n")
    _check(text, "standard input (read because no prompt was given)")
    return [text]


def read_texts(given: Sequence[str], files: Sequence[str]) -> list[tuple[str, str]]:
    """``(name, text)`` of the texts ``given``, then of whole ``files``; else standard input.

    A text's name is how it begins, a file's its path. Raises ValueError as :func:`read_prompts`.
    """
    texts = [(_beginning(text), text) for text in given]
    texts += [(file, _read(file)) for file in files]
    if not texts:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                'there is no text: give one, as in `oxidize-jax score "The sea is blue."`, or '
                "--file FILE, or pipe it in."
            )
        texts = [("standard input", _read(STDIN))]
    for name, text in texts:
        _check(text, f"the text {name!r}")
    return texts


def _beginning(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= 40 else first[:39] + "…"


def _lines(file: str) -> list[str]:
    lines = [line.removesuffix("\r") for line in _read(file).split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"--file {file}: there is no prompt in it, only blank lines; write one.")
    return prompts


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(
            f"--file {file}: {error.strerror}; give a text file that can be read, or - for "
            "standard input."
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        name = "standard input" if file == STDIN else f"--file {file}"
        raise UsageError(
            f"{name}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; convert it, "
            "as in `iconv -f latin1 -t utf-8`."
        ) from None


def _check(prompt: str, name: str) -> None:
    if not prompt.strip():
        raise UsageError(f"{name} is empty: give at least one character that is not a space.")
    # Python keeps bytes of an argument that are not UTF-8 as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UsageError(f"{name} is not UTF-8 text: check the encoding of the terminal.")
