"""Prompts, sampling parameters and keys of :func:`~oxidize_jax.engine.generate.generate`.

N prompts are padded to P tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.keys import CHILD_BASE, fold_in
from oxidize_jax.sampling.params import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY
from oxidize_jax.scheduler.submit import check_token_ids
from oxidize_jax.types import state

_INT32_MAX = 2**31 - 1
_WIDTH_MULTIPLE = 16
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of :class:`Sampling`."""


@state
class Prompts:
    """N prompts, padded on the right. See :func:`pad_prompts` and :func:`compact_prompts`."""

    tokens: jax.Array
    """i32[N, P]: token ids; what stands behind a prompt's end is not read."""
    lengths: jax.Array
    """i32[N]: 1 .. P"""


@state
class Sampling:
    """How tokens are chosen and when a sequence ends: for all prompts, or one for each.

    A field is a number, or an array ``[]`` or ``[N]``. All are traced: other values never
    compile again. Numbers out of range in an array, where nothing can be raised, have the
    nearest meaning: temperatures below 0 and NaN are greedy, ``top_p`` of 0 and less keeps
    the likeliest token, of 1 and more all; penalties are moved into their range.
    """

    key: Any
    """A JAX PRNG key (``jax.random.key`` or ``PRNGKey``, threefry), or one for each prompt.
    Of a single key prompt i gets ``fold_in(key, i)``; see :func:`request_keys`."""
    temperature: Any = 1.0
    """0 is greedy."""
    top_k: Any = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    top_p: Any = 1.0
    """Keep the likeliest tokens that together have this probability; 1 keeps all."""
    max_new_tokens: Any = None
    """Most new tokens, by default and at most the configuration's; in an array of JAX more counts
    as that. A prompt with 0 is not run: its sequences are empty, with finish reason ``LENGTH``."""
    min_new_tokens: Any = 0
    """Until there are this many new tokens, no stop id is sampled."""
    stop_token_ids: Any = None
    """``i32[Z]`` or ``i32[N, Z]``: ids that end a sequence, end-of-sequence ids included;
    padding is negative. The stop id is the last token of the sequence."""
    min_p: Any = 0.0
    """Keep tokens at least this many times as likely as the likeliest; 0 keeps all."""
    typical_p: Any = 1.0
    """Keep the most typical tokens that together have this probability; 1 keeps all."""
    repetition_penalty: Any = 1.0
    """Divides the positive logits of tokens in prompt or output, multiplies the negative."""
    presence_penalty: Any = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: Any = 0.0
    """Taken off the logits of tokens in the output once for each time."""
    bias_ids: Any = None
    """``i32[E]`` or ``i32[N, E]``: ids, distinct in a row, whose logits ``bias_values`` are added
    to; padding is negative, and stands last."""
    bias_values: Any = None
    """``f32[E]`` or ``f32[N, E]``, as ``bias_ids``."""
    token_mask: Any = None
    """``bool[V]`` or ``bool[N, V]``: nothing but the ids where it is true is sampled."""


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, vocab_size: int, width: int | None = None
) -> Prompts:
    """:class:`Prompts` from lists of token ids, on the host.

    ``width`` is P, by default the longest prompt rounded up to a multiple of 16: prompts of
    one width share a compiled program. Raises ValueError for no prompts, an empty one, one
    longer than ``width``, and ids outside the vocabulary.
    """
    if not len(prompts):
        raise ValueError("prompts is empty: give at least one list of token ids.")
    for i, ids in enumerate(prompts):
        if isinstance(ids, str | int):
            raise ValueError(f"prompts[{i}]={short_repr(ids)}: must be a list of token ids.")
        if not len(ids):
            raise ValueError(f"prompts[{i}] has 0 tokens: give at least one.")
        check_token_ids(f"prompts[{i}]", ids, vocab_size)
    lengths = [len(ids) for ids in prompts]
    if width is None:
        width = -(-max(lengths) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    if max(lengths) > width:
        longest = lengths.index(max(lengths))
        raise ValueError(
            f"prompts[{longest}] has {lengths[longest]} tokens, but width={width}: shorten it "
            "or raise width."
        )
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return Prompts(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths, dtype=jnp.int32))


def compact_prompts(tokens: jax.Array, mask: jax.Array) -> Prompts:
    """:class:`Prompts` from ``tokens i32[N, P]`` padded anywhere, on the left for example.

    ``mask bool[N, P]`` (or ints, as ``attention_mask``) is true where a token counts. Pure.
    Raises ValueError where the shapes differ.
    """
    if tokens.shape != mask.shape or tokens.ndim != 2:
        raise ValueError(
            f"tokens {list(tokens.shape)} and mask {list(mask.shape)}: both must be [N, P]."
        )
    mask = mask.astype(jnp.bool_)
    order = jnp.argsort(~mask, axis=1, stable=True)
    return Prompts(
        tokens=jnp.take_along_axis(tokens, order, axis=1).astype(jnp.int32),
        lengths=jnp.sum(mask, axis=1, dtype=jnp.int32),
    )


def check_prompts(prompts: Prompts) -> None:
    """Raise ValueError unless there are N rows of ids and N lengths."""
    tokens, lengths = prompts.tokens, prompts.lengths
    for name, values, rank in (("tokens", tokens, 2), ("lengths", lengths, 1)):
        is_array = hasattr(values, "dtype")
        if is_array and values.ndim == rank and jnp.issubdtype(values.dtype, jnp.integer):
            continue
        given = f"{values.dtype}{list(values.shape)}" if is_array else type(values).__name__
        raise ValueError(
            f"prompts.{name} is {given}: must be an array of integers of rank {rank}; make "
            "prompts with pad_prompts or compact_prompts."
        )
    if tokens.shape[0] != lengths.shape[0] or not tokens.size:
        raise ValueError(
            f"prompts has tokens {list(tokens.shape)} and lengths {list(lengths.shape)}: there "
            "must be one length for each of at least one row, and room for a token."
        )


_NUMBERS: dict[str, tuple[Any, float, float]] = {
    "temperature": (np.float32, 0, float(np.finfo(np.float32).max)),
    "top_k": (np.int32, -1, _INT32_MAX),
    "top_p": (np.float32, 0, 1),
    "min_p": (np.float32, 0, 1),
    "typical_p": (np.float32, 0, 1),
    "repetition_penalty": (np.float32, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (np.float32, -MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (np.float32, -MAX_PENALTY, MAX_PENALTY),
    "max_new_tokens": (np.int32, 0, _INT32_MAX),
    "min_new_tokens": (np.int32, 0, _INT32_MAX),
}
"""Type and range of each field of :class:`Sampling` that is one number for a prompt."""


def check_sampling(
    sampling: Sampling, num_prompts: int, vocab_size: int, max_new_tokens: int
) -> Sampling:
    """All fields as arrays of fixed types, so that 0 and 0.5 are one program.

    Numbers are ``[]`` or ``[N]``, lists ``[1, ...]`` or ``[N, ...]``. ``max_new_tokens`` is the
    configuration's. Raises ValueError.
    """
    given = {name: getattr(sampling, name) for name in _NUMBERS}
    if given["max_new_tokens"] is None:
        given["max_new_tokens"] = max_new_tokens
    checked = {name: _per_prompt(name, value, num_prompts) for name, value in given.items()}
    _check_most("max_new_tokens", given["max_new_tokens"], max_new_tokens)
    ids = partial(_id_lists, num_prompts=num_prompts, vocab_size=vocab_size)
    bias_ids = ids("bias_ids", sampling.bias_ids)
    return dataclasses.replace(
        sampling,
        stop_token_ids=ids("stop_token_ids", sampling.stop_token_ids),
        bias_ids=bias_ids,
        bias_values=_bias_values(sampling.bias_values, bias_ids),
        token_mask=_token_mask(sampling.token_mask, num_prompts, vocab_size),
        **checked,
    )


def nearest_penalty(name: str, value: jax.Array) -> jax.Array:
    """``f32[...]``: a penalty that no one could check, within its range; NaN is none."""
    _, low, high = _NUMBERS[name]
    neutral = 1.0 if name == "repetition_penalty" else 0.0
    return jnp.clip(jnp.where(jnp.isnan(value), neutral, value), low, high)


def _check_most(name: str, value: Any, most: int) -> None:
    """``value`` has been checked otherwise; what is on the device nobody can look at."""
    if not isinstance(value, jax.Array) and np.any(np.asarray(value) > most):
        shown = short_repr(np.asarray(value).tolist())
        raise ValueError(
            f"{name}={shown}: must be from 0 to {most}, the {name} of the configuration; lower "
            "it, or raise the configuration's."
        )


def _per_prompt(name: str, value: Any, num_prompts: int) -> jax.Array:
    dtype, low, high = _NUMBERS[name]
    value = _as_array(name, value, dtype, low, high)
    if value.shape not in ((), (num_prompts,)):
        raise ValueError(
            f"{name} has shape {list(value.shape)}: give one number, or {num_prompts}, one for "
            "each prompt."
        )
    return value


def _id_lists(name: str, value: Any, num_prompts: int, vocab_size: int) -> jax.Array:
    none = np.zeros((1, 0), np.int32)
    value = _as_array(name, none if value is None else value, np.int32, -_INT32_MAX, vocab_size - 1)
    if value.ndim == 1:
        value = value[None]
    if value.ndim != 2 or value.shape[0] not in (1, num_prompts):
        raise ValueError(
            f"{name} has shape {list(value.shape)}: give one list of ids, or {num_prompts} of "
            "one length, one for each prompt (padded with -1)."
        )
    return value


def _bias_values(value: Any, ids: jax.Array) -> jax.Array:
    name, low, high = "bias_values", -MAX_BIAS, MAX_BIAS
    none = np.zeros((1, 0), np.float32)
    value = _as_array(name, none if value is None else value, np.float32, low, high)
    value = value[None] if value.ndim == 1 else value
    if value.shape != ids.shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)} and bias_ids {list(ids.shape)}: give one value "
            "for each id."
        )
    return value


def _token_mask(value: Any, num_prompts: int, vocab_size: int) -> jax.Array | None:
    """``bool[1, V]`` or ``bool[N, V]``, or None."""
    if value is None:
        return None
    on_host = not isinstance(value, jax.Array)
    value = _on_host("token_mask", value) if on_host else value
    value = value[None] if value.ndim == 1 else value
    if value.dtype != np.bool_ or value.shape not in ((1, vocab_size), (num_prompts, vocab_size)):
        raise ValueError(
            f"token_mask is {value.dtype}{list(value.shape)}: must be bool, [{vocab_size}] or "
            f"[{num_prompts}, {vocab_size}], true where an id may be sampled."
        )
    if on_host and not value.any(axis=1).all():
        raise ValueError("token_mask leaves a prompt no id: allow one.")
    return jax.device_put(value) if on_host else value


def _as_array(name: str, value: Any, dtype: Any, low: float, high: float) -> jax.Array:
    """``value`` in its type; what is on the host is checked, and put on the device."""
    on_host = not isinstance(value, jax.Array)
    if on_host:
        value = _on_host(name, value)
        value = value.astype(np.int32) if not value.size else value  # an empty list is float
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if value.dtype.kind not in kinds and not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name} is {value.dtype}: must be numbers.")
    if "f" not in kinds and not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} is {value.dtype}: must be whole numbers.")
    if not on_host:
        return value.astype(dtype)
    if not ((value >= low) & (value <= high)).all():
        shown = short_repr(value.tolist())
        raise ValueError(f"{name}={shown}: must be from {low} to {high:.10g}.")
    # Put there by name, which a guard against transfers that nobody asked for lets pass.
    return jax.device_put(value.astype(dtype))


def _on_host(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(
            f"{name} has lists of different lengths: make them one length (ids are padded with "
            "-1, biases with 0)."
        ) from None


def request_keys(key: jax.Array, num_prompts: int, num_return_sequences: int = 1) -> jax.Array:
    """Threefry key data ``u32[N, n, 2]`` of every sequence.

    Of a single key prompt i has ``fold_in(key, i)``; keys ``[N]`` are the prompts' own. The
    first sequence draws with its prompt's key, the others with keys folded from it, as
    :func:`~oxidize_jax.sampling.keys.child_key` does. Raises ValueError for other keys.
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if typed else jnp.asarray(key)
    if data.dtype != jnp.uint32 or data.shape not in ((2,), (num_prompts, 2)):
        raise ValueError(
            f"key has data {data.dtype}{list(data.shape)}: give one threefry key, such as "
            f"jax.random.key(0), or {num_prompts}, one for each prompt."
        )
    if data.ndim == 1:
        prompt = jnp.arange(num_prompts, dtype=jnp.uint32)
        data = fold_in(jnp.broadcast_to(data, (num_prompts, 2)), prompt)
    parent = jnp.repeat(data, num_return_sequences, axis=0)
    child = jnp.tile(jnp.arange(num_return_sequences, dtype=jnp.uint32), num_prompts)
    folded = fold_in(parent, child + jnp.uint32(CHILD_BASE))
    keys = jnp.where((child == 0)[:, None], parent, folded)
    return keys.reshape(num_prompts, num_return_sequences, 2)
