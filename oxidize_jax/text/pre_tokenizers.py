"""How a text is cut into the words that byte-level BPE works in.

A GGUF file keeps only a name, ``tokenizer.ggml.pre``; what it stands for is what the
tokenizer.json of that family says. Names are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tokenizers import Regex, pre_tokenizers


@dataclasses.dataclass(frozen=True)
class WordRules:
    """What a pre-tokenizer's name says of a byte-level BPE tokenizer."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    """A word that is a token is taken whole, even if merges do not reach it."""
    nfc: bool = False
    """The text is put into Unicode's normal form C first."""
    adds_bos: bool = False
    """A BOS is put in front unless the file says otherwise."""


_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_MARKS_AND_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"

# GPT-4's cut (cl100k): English endings in any case, then letters with one other character in
# front of them; families differ in how many digits stay together.
_GPT4 = rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s|" + _MARKS_AND_BLANKS % ""

# GPT-4o's (o200k): a word is capitals and then small letters, or capitals alone.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*%s"
    r"|\p{N}%s|" + _MARKS_AND_BLANKS % "/"
)


def _cut(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Cuts at each pattern in turn, then spells the parts in bytes."""

    def make() -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, spell])

    return make


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2()])


_GPT4_3_DIGITS = _cut(_GPT4 % "{1,3}")
# Llama 3's vocabulary has words that its merges do not reach.
_LLAMA3 = WordRules(_GPT4_3_DIGITS, whole_words=True, adds_bos=True)

WORD_RULES = {
    "smollm": WordRules(_digits_then_gpt2),
    "gpt-2": WordRules(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    # SmolLM3: Llama 3's cut, without its BOS.
    "smaug-bpe": WordRules(_GPT4_3_DIGITS),
    # OLMo 2 and Phi-4 (14B).
    "dbrx": WordRules(_GPT4_3_DIGITS),
    "qwen2": WordRules(_cut(_GPT4 % ""), nfc=True),
    # Phi-4 mini.
    "gpt-4o": WordRules(_cut(_GPT4O % (f"(?i:{_ENDINGS})?", f"(?i:{_ENDINGS})?", "{1,3}"))),
    # Mistral Nemo and later ones.
    "tekken": WordRules(_cut(_GPT4O % ("", "", "")), whole_words=True, adds_bos=True),
    # What llama.cpp falls back to for a file that names none: nobody's own tokenizer.
    "default": WordRules(_cut(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""``tokenizer.ggml.pre`` -> what it stands for."""
