"""The file of a trace: JSON lines, a header and then one for each event or outcome::

    {"oxidize_jax_trace": 1, "config": {...}, "vocab_size": 97, "secret": 0, "model": {...}, ...}
    {"submit": {"slot": 0, "prompt": [5, 6, 7], "max_new_tokens": 4}}
    {"run": {"max_steps": 16}}
    {"ran": {"steps": 4, "tokens": {"0": [9, 1, 4, 8]}, "digests": {"rows.kv_len": 1734, ...}}}

Fields at their defaults are left out, and digests that are as in the outcome before. The
outcome of a run is a line of its own, so that the run is on record before it is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxidize_jax import __version__
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.trace import (
    Abort,
    Event,
    Fork,
    Outcome,
    ResetPrefixCache,
    Restart,
    Run,
    SetMasks,
    Submit,
    Trace,
    mask_words,
)
from oxidize_jax.engine.tracefields import Limits, check_names, nearest, read_whole
from oxidize_jax.messages import reason, short_repr
from oxidize_jax.scheduler.submit import check_prompt

FORMAT = 1
"""Grows with changes that an older reader would misread."""
_HEADER = "oxidize_jax_trace"
_KINDS: dict[str, type] = {
    "submit": Submit,
    "abort": Abort,
    "fork": Fork,
    "set_masks": SetMasks,
    "reset_prefix_cache": ResetPrefixCache,
    "restart": Restart,
    "run": Run,
    "ran": Outcome,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Lines:
    """Turns a trace into lines, one after the other."""

    def __init__(self) -> None:
        self._digests: Mapping[str, int] = {}

    def header(self, trace: Trace) -> str:
        """The first line; the events of ``trace`` are not in it."""
        return _line(
            {
                _HEADER: FORMAT,
                "config": dataclasses.asdict(trace.config),
                "vocab_size": trace.vocab_size,
                "secret": trace.secret,
                "model": dict(trace.model),
                "backend": trace.backend,
                "jax_version": trace.jax_version,
                "version": __version__,
            }
        )

    def event(self, event: Event) -> str:
        """One event; a run without what came of it."""
        if isinstance(event, Run):
            event = dataclasses.replace(event, outcome=None)
        return _line({_NAMES[type(event)]: _changed_fields(event)})

    def outcome(self, outcome: Outcome) -> str:
        """What came of the run before."""
        if outcome.digests is not None:
            old, self._digests = self._digests, outcome.digests
            new = {name: word for name, word in self._digests.items() if old.get(name) != word}
            outcome = dataclasses.replace(outcome, digests=new)
        return _line({"ran": _changed_fields(outcome)})


def dumps(trace: Trace) -> str:
    """The text of a trace's file."""
    lines = Lines()
    text = [lines.header(trace)]
    for event in trace.events:
        text.append(lines.event(event))
        if isinstance(event, Run) and event.outcome is not None:
            text.append(lines.outcome(event.outcome))
    return "".join(text)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace to a file, in place of what is there."""
    Path(path).expanduser().write_text(dumps(trace), encoding="utf-8")


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Raises ValueError naming file, line and field, and OSError."""
    path = Path(path).expanduser()
    try:
        return loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def loads(text: str) -> Trace:
    """Read the text of a trace's file. Raises ValueError naming line and field."""
    lines = text.split("\n")
    records, torn = _records(lines)
    if not records:
        raise ValueError("line 1: there is no trace here, the file is empty or torn: record anew.")
    trace = _read_header(records[0])
    reader = _Reader(trace)
    for number, record in enumerate(records[1:], 2):
        if record is None:
            continue
        try:
            reader.add(record)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return dataclasses.replace(trace, events=tuple(reader.events), torn=torn)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _changed_fields(value: Any) -> dict[str, Any]:
    """The fields of an event that are not at their defaults, what it must have first."""
    changed = {}
    for field in sorted(dataclasses.fields(value), key=lambda field: field.kw_only is True):
        item = getattr(value, field.name)
        empty = field.default_factory is not dataclasses.MISSING and not item
        if not empty and item != field.default:
            changed[field.name] = _plain(item)
    return changed


def _plain(value: Any) -> Any:
    """``value`` for JSON, which has no infinity and no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _records(lines: list[str]) -> tuple[list[Any], bool]:
    """The lines as JSON (None for a blank one), and whether the last was torn."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    records: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            records.append(None)
            continue
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and number > 1:
                return records, True
            raise ValueError(
                f"line {number}: not JSON ({reason(error)}): mend or cut the file there; only its "
                "last line may be torn."
            ) from None
    return records, False


def _read_header(record: Any) -> Trace:
    if not isinstance(record, dict) or _HEADER not in record:
        raise ValueError(f'line 1: no "{_HEADER}": this is not the file of a trace.')
    if type(record[_HEADER]) is not int or record[_HEADER] != FORMAT:
        raise ValueError(
            f"line 1: {_HEADER}={short_repr(record[_HEADER])}: this version reads format "
            f"{FORMAT}; read it with the version that wrote it, "
            f"{short_repr(record.get('version', '(not named)'))}."
        )
    try:
        return Trace(
            config=_read_config(record.get("config")),
            vocab_size=read_whole("vocab_size", record.get("vocab_size"), 1, 2**31),
            secret=read_whole("secret", record.get("secret", 0), 0, 2**32),
            model=_read_model(record.get("model", {})),
            backend=str(record.get("backend", "")),
            jax_version=str(record.get("jax_version", "")),
        )
    except ValueError as error:
        raise ValueError(f"line 1: {error}") from None


def _read_config(fields: Any) -> EngineConfig:
    if not isinstance(fields, dict):
        raise ValueError(
            f"config={short_repr(fields)}: must be an object with the fields of EngineConfig."
        )
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    check_names("config", fields, known)
    config = EngineConfig(**fields)
    if missing := sorted(known - fields.keys()):
        raise ValueError(f"config.{missing[0]} is missing: a trace has every field.")
    return config


def _read_model(fields: Any) -> dict[str, str]:
    if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
        raise ValueError(f"model={short_repr(fields)}: must be an object whose values are text.")
    return fields


class _Reader:
    """Turns records into events, and refuses those that no engine can have made."""

    def __init__(self, trace: Trace) -> None:
        self.events: list[Event] = []
        self._config = trace.config
        self._vocab_size = trace.vocab_size
        self._digests: dict[str, int] = {}
        self._used: set[int] = set()

    def add(self, record: Any) -> None:
        """Append an event, or give the last run its outcome."""
        if not isinstance(record, dict) or len(record) != 1:
            raise ValueError("must be an object with one key, the kind of the event.")
        ((kind, fields),) = record.items()
        if kind not in _KINDS:
            raise ValueError(f"{short_repr(kind)} is no event{nearest(kind, _KINDS)}.")
        if not isinstance(fields, dict):
            raise ValueError(f"{kind}={short_repr(fields)}: must be an object.")
        event = self._read(kind, fields)
        if isinstance(event, Outcome):
            self._add_outcome(event)
            return
        self._check(event)
        self.events.append(event)

    def _read(self, kind: str, fields: dict[str, Any]) -> Any:
        cls = _KINDS[kind]
        known = {f.name: f for f in dataclasses.fields(cls) if f.name != "outcome"}
        check_names(kind, fields, known)
        for name, field in known.items():
            required = field.default is field.default_factory is dataclasses.MISSING
            if required and name not in fields:
                raise ValueError(f"{kind}.{name} is missing: every {kind} has one.")
        limits = Limits(self._config, self._vocab_size)
        values = {name: limits.read(f"{kind}.{name}", name, v) for name, v in fields.items()}
        return cls(**values)

    def _add_outcome(self, outcome: Outcome) -> None:
        run = self.events[-1] if self.events else None
        if not isinstance(run, Run) or run.outcome is not None:
            raise ValueError("ran: there is no run before it: mend or cut the file there.")
        for slot in outcome.tokens:
            if slot not in self._used:
                raise ValueError(f"ran.tokens: slot {slot} holds no request.")
        if outcome.digests is not None:
            self._digests = {**self._digests, **outcome.digests}
            outcome = dataclasses.replace(outcome, digests=self._digests)
        self.events[-1] = Run(run.max_steps, outcome)

    def _check(self, event: Event) -> None:
        if isinstance(event, Submit):
            check_prompt(self._config, len(event.prompt))
            most = self._config.max_stop_token_ids
            if len(event.stop_ids) > most:
                raise ValueError(
                    f"submit.stop_ids has {len(event.stop_ids)} ids; the limit is "
                    f"max_stop_token_ids={most}."
                )
            self._check_lists(event)
            if event.fork_of == event.slot:
                raise ValueError(f"submit.fork_of={event.slot}: a request is no fork of itself.")
            self._used.add(event.slot)
        elif isinstance(event, Fork):
            self._check_fork(event)
            self._used.update(event.children)
        elif isinstance(event, SetMasks):
            self._check_masks(event)
        elif isinstance(event, Restart):
            self._used.clear()

    def _check_lists(self, event: Submit) -> None:
        config = self._config
        longest = max(map(len, event.bad_words), default=1)
        limits = (
            ("logit_bias", len(event.logit_bias), config.max_logit_bias, "max_logit_bias"),
            ("bad_words", len(event.bad_words), config.max_bad_words, "max_bad_words"),
            ("bad_words: one", longest, config.max_bad_word_tokens, "max_bad_word_tokens"),
        )
        for name, count, most, limit in limits:
            if count > most:
                raise ValueError(f"submit.{name} has {count} entries; the limit is {limit}={most}.")
        masks = event.allowed_token_ids is not None or event.banned_token_ids
        if masks and config.token_mask_size < self._vocab_size:
            raise ValueError(
                f"submit allows or bans ids, and token_mask_size={config.token_mask_size} is "
                f"less than vocab_size={self._vocab_size}."
            )

    def _check_masks(self, event: SetMasks) -> None:
        count, most = len(event.slots), self._config.max_num_seqs
        if not 1 <= count <= most:
            raise ValueError(
                f"set_masks.slots has {count} slots; the limit is 1 to max_num_seqs={most}."
            )
        for name in ("pause_at", "masks"):
            if (got := len(getattr(event, name))) != count:
                raise ValueError(
                    f"set_masks.{name} has {got} entries for {count} slots: give each one."
                )
        if len(set(event.slots)) != count:
            raise ValueError("set_masks.slots names a slot twice: give each once.")
        for i, text in enumerate(event.masks):
            try:
                mask_words(text, self._config.token_mask_words)
            except ValueError as error:
                raise ValueError(f"set_masks.masks[{i}]: {error}") from None

    def _check_fork(self, event: Fork) -> None:
        count = len(event.children)
        if not count:
            raise ValueError("fork.children is empty: a fork has one child or more.")
        for field in dataclasses.fields(Fork)[2:]:
            got = len(getattr(event, field.name))
            if got != count and (got or field.name != "outputs"):
                raise ValueError(
                    f"fork.{field.name} has {got} entries for {count} children: give each one."
                )
        if len({event.parent, *event.children}) != count + 1:
            raise ValueError("fork.children: parent and children must be different slots.")
