"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from oxidize_jax.messages import short_repr
from oxidize_jax.text.backend_errors import backend_errors
from oxidize_jax.text.tokenizer import Tokenizer, make_tokenizer

try:
    import tokenizers
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "Reading a tokenizer needs the tokenizers package: pip install tokenizers"
    ) from error


MAX_TOKEN_ID = 2**24
"""A table has an entry for each id below the largest. No vocabulary comes near it."""


def load_hf_folder(path: Path) -> Tokenizer:
    """Implements :meth:`Tokenizer.from_hf_folder`.

    The post-processor of tokenizer.json alone decides which special tokens ``encode``
    adds; ``add_bos_token`` in tokenizer_config.json is not looked at, which is what
    transformers 5 does where there is a tokenizer.json. Truncation and padding that a
    tokenizer.json may declare are switched off: a prompt is never cut silently.
    """
    backend = _read_backend(path)
    settings = _read_json(path / "tokenizer_config.json")
    special_map = _read_json(path / "special_tokens_map.json")
    names = _special_tokens(special_map) | _special_tokens(settings)
    extra = [*_extra_special(special_map), *_extra_special(settings)]
    _add_declared_tokens(backend, settings, [*names.values(), *extra])
    vocabulary = backend.get_vocab(with_added_tokens=True)
    vocab_size = _vocab_size(path / "tokenizer.json", vocabulary)
    own = [vocabulary[names[name]] for name in ("eos_token", "eot_token") if name in names]
    limit = max(vocab_size, _model_vocab_size(path / "config.json"))
    return make_tokenizer(
        backend,
        vocab_size=vocab_size,
        eos_token_ids=[
            *own,
            *_declared_eos(path / "config.json", limit),
            *_declared_eos(path / "generation_config.json", limit),
        ],
        special_tokens=names,
        chat_template=_chat_template(path, settings),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{file}: not found. A folder needs tokenizer.json (a tokenizer.model or vocab.json "
            "alone is not read): save the tokenizer with transformers once to make it."
        )
    with backend_errors(f"{file}: not a tokenizer this reads"):
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _vocab_size(file: Path, vocabulary: dict[str, int]) -> int:
    largest = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if largest is None:
        return 0
    if vocabulary[largest] > MAX_TOKEN_ID:
        raise ValueError(
            f"{file}: token {short_repr(largest)} has id {vocabulary[largest]}: ids up to "
            f"{MAX_TOKEN_ID} are read; the file is damaged."
        )
    return vocabulary[largest] + 1


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty if the file is not there."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{file}: has a lone surrogate (half of a character, such as \\ud800): it is not "
            "valid Unicode; write the character whole."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not an object.")
    return content


def _special_tokens(content: dict[str, Any]) -> dict[str, str]:
    """``{"bos_token": "<s>", ...}`` from a file that may spell a token as an object."""
    named = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in content.items()
        if name.endswith("_token") and (isinstance(value, str) or _is_token_object(value))
    }
    return {name: text for name, text in named.items() if text}


def _extra_special(content: dict[str, Any]) -> list[str]:
    """The special tokens of a file that have no name of their own."""
    extra = content.get("additional_special_tokens") or content.get("extra_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, dict) else extra
    listed = values if isinstance(values, list) else [values]
    tokens = [token["content"] if _is_token_object(token) else token for token in listed]
    if values is not listed or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"tokenizer_config.json or special_tokens_map.json: additional_special_tokens="
            f"{reprlib.repr(extra)}: must be a list of tokens."
        )
    return tokens


def _is_token_object(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], special: list[str]
) -> None:
    """Adds the tokens that only the files beside tokenizer.json declare.

    An id that ``added_tokens_decoder`` gives must come out the same.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = settings.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(
        key.isdecimal() and len(key) < 20 and _is_token_object(fields)
        for key, fields in declared.items()
    ):
        raise ValueError(
            f"tokenizer_config.json: added_tokens_decoder={reprlib.repr(declared)}: must be an "
            "object of ids and tokens."
        )
    for token_id, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        if fields["content"] in known:
            continue
        known.add(fields["content"])
        with backend_errors(f"tokenizer_config.json: added_tokens_decoder[{token_id}]"):
            backend.add_tokens([_added_token(fields)])
        given = backend.token_to_id(fields["content"])
        if given != int(token_id):
            raise ValueError(
                f"tokenizer_config.json: added_tokens_decoder[{token_id}] is "
                f"{fields['content']!r}, which tokenizer.json makes id {given}: the two files "
                "are of different tokenizers."
            )
    missing = [token for token in dict.fromkeys(special) if token not in known]
    with backend_errors("tokenizer_config.json or special_tokens_map.json: special tokens"):
        backend.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in missing]
        )


def _added_token(fields: dict[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(
        fields["content"], **{flag: bool(fields[flag]) for flag in flags if flag in fields}
    )


def _model_vocab_size(file: Path) -> int:
    """``vocab_size`` of config.json, often padded beyond the tokenizer's; 0 without one."""
    size = _read_json(file).get("vocab_size")
    # Anything else is for the reader of the model's configuration to refuse.
    return size if isinstance(size, int) else 0


def _declared_eos(file: Path, vocab_size: int) -> list[int]:
    """``eos_token_id`` of a config file: a number, a list, null or absent."""
    value = _read_json(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(
                f"{file}: eos_token_id={reprlib.repr(value)}: must be an id of 0 or more, or a "
                "list of them."
            )
        if token_id >= vocab_size:
            raise ValueError(
                f"{file}: eos_token_id={reprlib.repr(value)} is outside the vocabulary of "
                f"{vocab_size} tokens: the files are of different models, or the id is wrong."
            )
    return ids


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or the ``chat_template`` of the config: its text or its default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}.") from None
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {e.get("name"): e.get("template") for e in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{path / 'tokenizer_config.json'}: chat_template={reprlib.repr(template)}: must be "
            "text, or a list of templates with names."
        )
    return template
