"""Trace: the events of a run, enough to make the same run again.

A run of the engine is a fold of events over the initial state, and the initial state follows
from the configuration and the pool's secret: so the events are all there is to keep. They
are written by :mod:`~oxidize_jax.engine.recorder`, kept as :mod:`~oxidize_jax.engine.tracefile`
says, and folded again by :mod:`~oxidize_jax.engine.replay`.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.request import RequestOptions
from oxidize_jax.sampling.fields import plain_sampling
from oxidize_jax.sampling.token_mask import pack_token_mask, unpack_token_mask
from oxidize_jax.scheduler import fork as forks
from oxidize_jax.scheduler.pause import MaskUpdate
from oxidize_jax.scheduler.state import NEVER, NO_TOKEN
from oxidize_jax.scheduler.submit import NewRequest


@dataclasses.dataclass(frozen=True)
class Submit(RequestOptions):
    """A request is put into a slot. Fields as in :class:`~oxidize_jax.scheduler.submit.NewRequest`.

    ``output`` is what it generates in a replay without a model, as far as no outcome says so.
    """

    slot: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival: int = 0
    stop_ids: tuple[int, ...] = ()
    """``~id`` of one that is only held back, as on the device."""
    fork_of: int | None = None
    num_logprobs: int = -1
    pause_after: int = NEVER
    output: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Abort:
    """The request in ``slot`` is finished from outside."""

    slot: int


@dataclasses.dataclass(frozen=True)
class Fork:
    """C more slots go on with a request. Fields as in :class:`~oxidize_jax.scheduler.fork.Fork`.

    ``outputs`` are those of the children, as in :class:`Submit`.
    """

    parent: int
    children: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    arrivals: tuple[int, ...]
    last_tokens: tuple[int | None, ...]
    last_logprobs: tuple[float, ...]
    outputs: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class SetMasks:
    """Requests get other token masks, as :class:`~oxidize_jax.scheduler.pause.MaskUpdate` says.

    ``masks`` are the packed words of each as text, see :func:`mask_text`.
    """

    slots: tuple[int, ...]
    pause_at: tuple[int, ...]
    masks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ResetPrefixCache:
    """Nothing computed so far is hit again."""


@dataclasses.dataclass(frozen=True)
class Restart:
    """A step failed, and the engine took a fresh state."""

    secret: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    steps: int
    tokens: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """New tokens by slot."""
    digests: Mapping[str, int] | None = None
    """u32 of every array of the scheduler's state, by name; None where none were taken."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Up to ``max_steps`` steps. Without an outcome the process ended in it, or a step failed."""

    max_steps: int
    outcome: Outcome | None = None


Event: TypeAlias = Submit | Abort | Fork | SetMasks | ResetPrefixCache | Restart | Run


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run: what its initial state follows from, and the events in order."""

    config: EngineConfig
    vocab_size: int
    events: tuple[Event, ...] = ()
    secret: int = 0
    """The pool's, at the start."""
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the recorder was told of the model, ``name`` and ``dtype`` for instance."""
    backend: str = ""
    jax_version: str = ""
    torn: bool = False
    """The file ended within a line, which was left out."""

    @property
    def num_requests(self) -> int:
        """Requests that were submitted, and forks."""
        submitted = sum(isinstance(event, Submit) for event in self.events)
        return submitted + sum(len(e.children) for e in self.events if isinstance(e, Fork))


def scripted(trace: Trace) -> Trace:
    """The same events without outcomes: what each request generated stands with its event.

    Outcomes hold for the whole run alone; these events can be dropped one by one.
    """
    outputs: dict[tuple[int, int], list[int]] = {}
    owner: dict[int, list[int]] = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Submit):
            owner[event.slot] = outputs[index, 0] = list(event.output)
        elif isinstance(event, Fork):
            known = event.outputs or ((),) * len(event.children)
            for child, (slot, output) in enumerate(zip(event.children, known, strict=True)):
                owner[slot] = outputs[index, child] = list(output)
        elif isinstance(event, Run) and event.outcome is not None:
            for slot, tokens in event.outcome.tokens.items():
                owner[slot].extend(tokens)
    events = tuple(_scripted(event, i, outputs) for i, event in enumerate(trace.events))
    return dataclasses.replace(trace, events=events)


def _scripted(event: Event, index: int, outputs: Mapping[tuple[int, int], list[int]]) -> Event:
    if isinstance(event, Submit):
        return dataclasses.replace(event, output=tuple(outputs[index, 0]))
    if isinstance(event, Fork):
        of = tuple(tuple(outputs[index, child]) for child in range(len(event.children)))
        return dataclasses.replace(event, outputs=of)
    if isinstance(event, Run) and event.outcome is not None:
        # At least one: a run that finds nothing to do plans once all the same.
        return Run(max(1, event.outcome.steps))
    return event


_SCALARS = ("max_new_tokens", "min_new_tokens", "arrival", "priority", "temperature", "top_k",
            "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "salt", "use_cache", "num_logprobs", "pause_after")  # fmt: skip


def submit_event(config: EngineConfig, slot: int, new: NewRequest) -> Submit:
    """The event of a request. What stands behind its prompt is not kept."""
    stops = np.asarray(new.stop_ids)
    fork_of = int(new.fork_of)
    return Submit(
        slot=slot,
        prompt=tuple(np.asarray(new.tokens)[: int(new.prompt_len)].tolist()),
        stop_ids=tuple(stops[stops != NO_TOKEN].tolist()),
        key=tuple(np.asarray(new.key).tolist()),
        fork_of=fork_of if fork_of < config.max_num_requests else None,
        logit_bias=tuple(
            (token, _plain(bias))
            for token, bias in zip(np.asarray(new.bias_ids).tolist(), new.bias_values, strict=True)
            if token != NO_TOKEN
        ),
        bad_words=tuple(
            tuple(token for token in word[::-1] if token != NO_TOKEN)
            for word in np.asarray(new.bad_words).tolist()
            if word[0] != NO_TOKEN
        ),
        **_mask_lists(config, new),
        **{name: _plain(getattr(new, name)) for name in _SCALARS},
    )


def _mask_lists(config: EngineConfig, new: NewRequest) -> dict[str, Any]:
    """The ids that a mask allows, or those that it bans, whichever are fewer."""
    if not new.has_mask:
        return {}
    allowed = unpack_token_mask(np.asarray(new.token_mask), config.token_mask_size)
    if 2 * allowed.sum() > allowed.size:
        return {"banned_token_ids": tuple(np.flatnonzero(~allowed).tolist())}
    return {"allowed_token_ids": tuple(np.flatnonzero(allowed).tolist())}


def _plain(value: Any) -> Any:
    """A scalar as Python has it; a float of 32 bits in its shortest form, 0.9 and not 0.8999..."""
    array = np.asarray(value)
    return float(str(array)) if array.dtype == np.float32 else array.item()


def new_request(config: EngineConfig, event: Submit) -> NewRequest:
    """The arrays of a request, with zeros behind its prompt as the engine puts them."""
    tokens = np.zeros((config.max_model_len,), np.int32)
    tokens[: len(event.prompt)] = event.prompt
    stops = np.full((config.max_stop_token_ids,), NO_TOKEN, np.int32)
    stops[: len(event.stop_ids)] = event.stop_ids
    fork_of = config.max_num_requests if event.fork_of is None else event.fork_of
    arrays: dict[str, Any] = plain_sampling(config)
    types = {name: array.dtype.type for name, array in arrays.items()} | {"use_cache": np.bool_}
    arrays |= {name: types.get(name, np.int32)(getattr(event, name)) for name in _SCALARS}
    for i, (token, bias) in enumerate(event.logit_bias):
        arrays["bias_ids"][i], arrays["bias_values"][i] = token, bias
    for i, word in enumerate(event.bad_words):
        arrays["bad_words"][i, : len(word)] = word[::-1]
    if event.allowed_token_ids is not None or event.banned_token_ids:
        arrays["token_mask"] = pack_token_mask(
            config.token_mask_size, event.allowed_token_ids, event.banned_token_ids
        )
        arrays["has_mask"] = np.bool_(True)
    arrays["key"] = np.asarray(event.key, np.uint32)
    return NewRequest(
        tokens=tokens,  # type: ignore[arg-type]
        prompt_len=np.int32(len(event.prompt)),  # type: ignore[arg-type]
        stop_ids=stops,  # type: ignore[arg-type]
        fork_of=np.int32(fork_of),  # type: ignore[arg-type]
        **arrays,
    )


def masks_event(config: EngineConfig, new: MaskUpdate) -> SetMasks:
    """The event of new masks, without its padding."""
    slots = np.asarray(new.slots)
    used = slots < config.max_num_requests
    return SetMasks(
        slots=tuple(slots[used].tolist()),
        pause_at=tuple(np.asarray(new.pause_at)[used].tolist()),
        masks=tuple(mask_text(words) for words in np.asarray(new.masks)[used]),
    )


def mask_update(config: EngineConfig, event: SetMasks) -> MaskUpdate:
    """The arrays of new masks, padded to C = S: one shape to compile for.

    Raises ValueError for a mask of another length than the configuration's.
    """
    words = tuple(mask_words(text, config.token_mask_words) for text in event.masks)
    return pad_masks(config, event.slots, event.pause_at, words)


def pad_masks(
    config: EngineConfig,
    slots: Sequence[int],
    pause_at: Sequence[int],
    masks: Sequence[np.ndarray],
) -> MaskUpdate:
    """:class:`~oxidize_jax.scheduler.pause.MaskUpdate` of at most S masks, padded to C = S."""
    s, count = config.max_num_seqs, len(slots)
    new_slots = np.full((s,), config.max_num_requests, np.int32)
    new_pauses = np.zeros((s,), np.int32)
    words = np.zeros((s, config.token_mask_words), np.uint32)
    new_slots[:count], new_pauses[:count] = slots, pause_at
    for lane, mask in enumerate(masks):
        words[lane] = mask
    return MaskUpdate(slots=new_slots, masks=words, pause_at=new_pauses)  # type: ignore[arg-type]


def mask_text(words: np.ndarray) -> str:
    """Packed words of a mask as short text: zlib, then base64."""
    data = zlib.compress(words.astype("<u4").tobytes(), 6)
    return base64.b64encode(data).decode()


def mask_words(text: str, count: int) -> np.ndarray:
    """``u32[count]``: undoes :func:`mask_text`. Raises ValueError for other text."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 4 * count + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"not the packed words of a mask ({error}): mend the text.") from None
    if len(data) != 4 * count:
        raise ValueError(f"a mask of {len(data)} bytes: this engine's have {4 * count}.")
    return np.frombuffer(data, "<u4").astype(np.uint32)


def fork_event(config: EngineConfig, new: forks.Fork) -> Fork:
    """The event of a fork that was taken, without its padding."""
    children = np.asarray(new.children)
    used = children < config.max_num_requests

    def of(values: Any) -> Any:
        return np.asarray(values)[used].tolist()

    return Fork(
        parent=int(new.parent),
        children=tuple(of(children)),
        keys=tuple(map(tuple, of(new.keys))),
        arrivals=tuple(of(new.arrivals)),
        last_tokens=tuple(None if token == NO_TOKEN else token for token in of(new.last_tokens)),
        last_logprobs=tuple(_plain(value) for value in np.asarray(new.last_logprobs)[used]),
    )


def new_fork(config: EngineConfig, event: Fork) -> forks.Fork:
    """The arrays of a fork, padded to C = R as the engine does: one shape to compile for."""
    r, count = config.max_num_requests, len(event.children)

    def padded(values: Any, fill: Any, dtype: Any) -> Any:
        array = np.full((r, *np.shape(fill)), fill, dtype)
        array[:count] = values
        return array

    last = tuple(NO_TOKEN if token is None else token for token in event.last_tokens)
    return forks.Fork(
        parent=np.int32(event.parent),  # type: ignore[arg-type]
        children=padded(event.children, r, np.int32),
        keys=padded(event.keys, (0, 0), np.uint32),
        arrivals=padded(event.arrivals, 0, np.int32),
        last_tokens=padded(last, NO_TOKEN, np.int32),
        last_logprobs=padded(event.last_logprobs, 0.0, np.float32),
    )
