"""Workloads: prompts as token ids, and how many tokens to generate for each."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oxidize_jax.messages import reason, short_repr

FIRST_TOKEN = 3
"""Random ids start here: those before are often special."""
RANDOM_VOCAB = 10_000
"""Random ids end before this one, so that a workload fits most vocabularies."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One request; it ends after exactly ``max_tokens`` tokens (end-of-sequence is ignored)."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + self.max_tokens


def random_workload(
    num_prompts: int = 64,
    input_len: tuple[int, int] = (32, 256),
    output_len: tuple[int, int] = (32, 256),
    *,
    seed: int = 0,
    vocab_size: int = RANDOM_VOCAB,
) -> tuple[Item, ...]:
    """``num_prompts`` requests of random ids, the same for everyone who names the same seed.

    Both ranges include their ends, in tokens. ``vocab_size`` is where ids end; the default
    workload is the one that the figures in benchmarks/README.md are of.
    """
    rng = random.Random(seed)
    items = []
    for _ in range(num_prompts):
        length = rng.randint(*input_len)
        prompt = tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(length))
        items.append(Item(prompt, rng.randint(*output_len)))
    return tuple(items)


def prefix_workload(
    groups: int,
    prompts_per_group: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    *,
    seed: int = 0,
    vocab_size: int = RANDOM_VOCAB,
) -> tuple[Item, ...]:
    """Prompts of which each group begins with the same ``prefix_len`` ids, in random order."""
    rng = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count))

    prefixes = [ids(prefix_len) for _ in range(groups)]
    items = [
        Item(prefix + ids(suffix_len), output_len)
        for prefix in prefixes
        for _ in range(prompts_per_group)
    ]
    rng.shuffle(items)
    return tuple(items)


def read_workload(path: str | Path) -> tuple[Item, ...]:
    """Read ``[{"prompt_token_ids": [...], "max_tokens": n}, ...]``.

    Raises ValueError naming the file and the entry that is not of this form.
    """
    path = Path(path).expanduser()
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(
            f"workload {str(path)!r}: is nested too deeply; make it flatter."
        ) from None
    except ValueError as error:  # of the syntax, the encoding, or a number of very many digits
        raise ValueError(f"workload {str(path)!r}: not valid JSON: {reason(error)}.") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f'workload {str(path)!r}: must be a list of {{"prompt_token_ids": [...], '
            '"max_tokens": n}, with at least one.'
        )
    return tuple(_item(path, index, entry) for index, entry in enumerate(entries))


def _item(path: Path, index: int, entry: Any) -> Item:
    where = f"workload {str(path)!r}, entry {index}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be an object with prompt_token_ids and max_tokens.")
    ids, count = entry.get("prompt_token_ids"), entry.get("max_tokens")
    if not isinstance(ids, list) or not ids or not all(_is_whole(i, 0) for i in ids):
        raise ValueError(f"{where}: prompt_token_ids must be a list of token ids, at least one.")
    if count is None or not _is_whole(count, 1):
        raise ValueError(
            f"{where}: max_tokens={short_repr(count)}: must be a whole number, 1 or more."
        )
    return Item(tuple(ids), count)


def write_workload(path: str | Path, items: Sequence[Item]) -> None:
    """Write what :func:`read_workload` reads."""
    entries = [
        {"prompt_token_ids": list(item.prompt_token_ids), "max_tokens": item.max_tokens}
        for item in items
    ]
    Path(path).expanduser().write_text(json.dumps(entries, separators=(",", ":")), "utf-8")


def describe(items: Sequence[Item]) -> dict[str, int]:
    """Counts of a workload, for a report."""
    return {
        "requests": len(items),
        "prompt_tokens": sum(len(item.prompt_token_ids) for item in items),
        "output_tokens": sum(item.max_tokens for item in items),
        "longest": max(item.num_tokens for item in items),
    }


def check_fits(items: Sequence[Item], max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError naming the first request that the engine would cut short or refuse."""
    for index, item in enumerate(items):
        if item.num_tokens > max_model_len:
            raise ValueError(
                f"request {index} of the workload has {item.num_tokens} tokens of prompt and "
                f"output, but max_model_len={max_model_len}: raise it, or shorten the workload."
            )
        if (highest := max(item.prompt_token_ids)) >= vocab_size:
            raise ValueError(
                f"request {index} of the workload has token id {highest}, but the model's "
                f"vocabulary ends at {vocab_size - 1}: give another workload."
            )


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
