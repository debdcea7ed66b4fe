"""Traces: what is recorded is replayed bit for bit, with the model and without, and cut down."""

import dataclasses
import json
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import VOCAB, FakeModel, quick_jit

from oxidize_jax.arrays import at_index
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine import replay as replaying
from oxidize_jax.engine import shrink as shrinking
from oxidize_jax.engine.engine import Engine, EngineRequest, EngineStepError
from oxidize_jax.engine.recorder import Recorder, digest, leaves
from oxidize_jax.engine.replay import (
    MODEL_LEAVES,
    TraceError,
    first_difference,
    replay,
    replay_scheduler,
    scripted_step,
)
from oxidize_jax.engine.shrink import fails_like, fault, shrink, to_test
from oxidize_jax.engine.step import init_state
from oxidize_jax.engine.trace import (
    Abort,
    Fork,
    Outcome,
    ResetPrefixCache,
    Restart,
    Run,
    Submit,
    Trace,
    fork_event,
    new_fork,
    new_request,
    scripted,
    submit_event,
)
from oxidize_jax.engine.tracefile import dumps, loads, read_trace, write_trace
from oxidize_jax.scheduler.invariants import InvariantError
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import FINISHED, UNUSED, init_scheduler

# That of test_engine: what is compiled for one serves the other.
CONFIG = EngineConfig(
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=32,
    num_blocks=12,
    block_size=4,
    max_num_requests=3,
    prefill_tile=4,
    max_logprobs=2,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_bad_words=2,
    max_bad_word_tokens=3,
    token_mask_size=VOCAB,
)
MODEL = FakeModel()
MARK = 66
"""A token that makes the fault of these tests show."""


def quick(step):
    """Compiled on its own and quickly, whatever it calls at the time."""
    return quick_jit(lambda *args: step(*args), static_argnums=0, donate_argnums=1)


SOUND = quick(scripted_step)


@pytest.fixture(autouse=True)
def sound_step(monkeypatch):
    monkeypatch.setattr(replaying, "_jitted_step", SOUND)


class Load:
    """Random requests and aborts for an engine."""

    def __init__(self, seed, recorder=None):
        self.rng = random.Random(seed)
        self.engine = Engine(CONFIG, MODEL, None, secret=seed, recorder=recorder)
        self.stem = self.words(12)
        self.ids, self.num_tokens = [], 0

    def words(self, count):
        return tuple(self.rng.randrange(VOCAB) for _ in range(count))

    def request(self):
        rng = self.rng
        sampled, mark = rng.random() < 0.4, [MARK] * (rng.random() < 0.2)
        return EngineRequest(
            (*self.stem[: rng.choice([0, 4, 8, 12])], *self.words(rng.randrange(1, 9)), *mark),
            rng.choice([1, 3, 9, 20]),
            min_new_tokens=rng.choice([0, 2]),
            stop_token_ids=self.words(rng.randrange(3)),
            temperature=0.9 if sampled else 0.0,
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            key=(0, 0),
            num_logprobs=rng.choice([None, 0, 2]),
            priority=rng.choice([0, 0, -1]),
            salt=rng.choice([0, 0, 3]),
            use_cache=rng.random() < 0.9,
        )

    def keys(self, count):
        return [(self.rng.getrandbits(32), self.rng.getrandbits(32)) for _ in range(count)]

    def run(self, requests=32):
        rng, engine = self.rng, self.engine
        while requests > 0 or engine.num_unfinished:
            while requests > 0 and rng.random() < 0.4:
                keys = self.keys(rng.choice([1, 1, 2]))
                requests -= len(keys)
                self.ids += engine.add_group(self.request(), keys)
            if self.ids and rng.random() < 0.5:
                engine.abort(rng.choice(self.ids[-4:]))
            if self.ids and rng.random() < 0.5:
                self.ids += engine.fork(rng.choice(self.ids[-4:]), self.keys(1)) or []
            if rng.random() < 0.1:
                engine.reset_prefix_cache()
            updates = engine.step(rng.choice([1, 2, 5, 16]))
            self.num_tokens += sum(len(update.token_ids) for update in updates)
        return self.engine.state


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """``(path, final state, tokens that callers got)`` of a random load."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with Recorder(path, model={"name": "fake"}) as recorder:
        load = Load(6, recorder)
        state = load.run()
    return path, jax.device_get(state), load.num_tokens


@pytest.fixture(scope="module")
def trace(recorded):
    return read_trace(recorded[0])


class Machine:
    """An engine's programs under random events of every kind, on record."""

    def __init__(self, seed, recorder):
        self.rng, self.recorder = random.Random(seed), recorder
        self.state = init_state(CONFIG, MODEL)
        recorder.start(CONFIG, VOCAB, self.state.scheduler)
        self.arrivals = 0

    def run(self, events):
        for _ in range(events):
            self.rng.choice([self.submit, self.submit, self.fork, self.reset, self.step])()
        self.abort()
        while (jax.device_get(self.state.scheduler.requests.status) % FINISHED).any():
            self.step()

    def put(self, scheduler):
        self.state = programs.with_scheduler(self.state, scheduler)

    def free(self):
        requests = jax.device_get(self.state.scheduler.requests)
        rowless = requests.row == CONFIG.max_num_seqs
        return np.flatnonzero(
            (requests.status == UNUSED) | ((requests.status == FINISHED) & rowless)
        ).tolist()

    def submit(self):
        for slot in self.free()[:1]:
            self.arrivals += 1
            prompt = tuple(self.rng.randrange(3) for _ in range(self.rng.randrange(1, 14)))
            event = Submit(slot, prompt, self.rng.randrange(1, 12), arrival=self.arrivals)
            new = new_request(CONFIG, event)
            self.recorder.submit(slot, new)
            self.put(programs.submit(CONFIG, self.state.scheduler, np.int32(slot), new))

    def fork(self):
        children = tuple(self.free()[:2])
        parent = self.rng.randrange(CONFIG.max_num_requests)
        count = len(children)
        if parent in children or not children:
            return
        self.arrivals += count
        token = self.rng.choice([None, 5])
        fork = Fork(
            parent,
            children,
            keys=tuple((7, i) for i in range(count)),
            arrivals=tuple(self.arrivals - i for i in range(count)),
            last_tokens=(token,) * count,
            last_logprobs=(-1.5,) * count,
        )
        scheduler, ok = programs.fork(CONFIG, self.state.scheduler, new_fork(CONFIG, fork))
        self.put(scheduler)
        if ok:
            self.recorder.fork(new_fork(CONFIG, fork))

    def abort(self):
        slot = self.rng.randrange(CONFIG.max_num_requests)
        self.recorder.abort(slot)
        self.put(programs.abort(self.state.scheduler, np.int32(slot)))

    def reset(self):
        self.recorder.reset_prefix_cache()
        self.put(programs.reset_prefix_cache(self.state.scheduler))

    def step(self):
        limit = self.rng.choice([1, 2, 5])
        self.recorder.run(self.state.scheduler, limit)
        self.state = programs.run(CONFIG, MODEL, None, self.state, np.int32(limit))
        self.recorder.ran(self.state.scheduler)


def assert_same(ours, theirs, *, but=()):
    """Every array is the same, bit for bit."""
    for (name, a), (_, b) in zip(leaves(ours), leaves(theirs), strict=True):
        if name not in but:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


def test_a_random_load_is_replayed_bit_for_bit(recorded, trace):
    _, state, num_tokens = recorded
    assert {type(event) for event in trace.events} == {Submit, Abort, Run, Fork, ResetPrefixCache}
    assert any(event.fork_of is not None for event in trace.events if isinstance(event, Submit))
    totals = state.scheduler.totals
    assert totals.preemptions > 0
    assert totals.cached_tokens > 0
    assert totals.forked_tokens > 0
    again = replay(trace, MODEL, None)
    assert again.difference is None
    assert_same(again.state.scheduler, state.scheduler)
    assert np.array_equal(again.state.kv, state.kv)
    assert first_difference(again.state.scheduler, state.scheduler) is None
    runs = [event for event in trace.events if isinstance(event, Run)]
    assert again.num_compared == again.num_runs == len(runs)
    assert (again.num_steps, again.num_tokens) == (totals.steps, totals.generated_tokens)
    assert 0 < num_tokens <= again.num_tokens  # what aborted requests got, nobody read


def test_without_the_model_all_but_the_logprobs_is_the_same(recorded, trace):
    _, state, _ = recorded
    again = replay_scheduler(trace)
    assert again.difference is None
    assert_same(again.state, state.scheduler, but=MODEL_LEAVES)
    assert again.num_steps == state.scheduler.totals.steps
    # The same tokens without their outcomes, as a trace that is being cut down has them.
    bare = replay_scheduler(scripted(trace), check=False)
    assert_same(bare.state, state.scheduler, but=MODEL_LEAVES)
    assert bare.num_compared == 0


@pytest.mark.parametrize("seed", range(2))
def test_replaced_tokens_and_resets_are_replayed_too(tmp_path, seed):
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        machine = Machine(seed, recorder)
        machine.run(60)
    trace = read_trace(path)
    assert {type(event) for event in trace.events} == {Submit, Abort, Run, Fork, ResetPrefixCache}
    assert machine.state.scheduler.totals.forked_tokens > 0
    full = replay(trace, MODEL, None)
    assert full.difference is None
    assert_same(full.state.scheduler, machine.state.scheduler)
    for events in (trace, scripted(trace)):
        bare = replay_scheduler(events)
        assert bare.difference is None
        assert_same(bare.state, machine.state.scheduler, but=MODEL_LEAVES)


def test_recording_changes_nothing(recorded):
    assert_same(Load(6).run(), recorded[1])


def test_the_file_is_complete_after_every_event(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    engine = Engine(CONFIG, MODEL, None, recorder=Recorder(path))
    assert read_trace(path).events == ()
    engine.add(EngineRequest((1, 2, 3), 4))
    seen = []
    run = programs.run

    def look(*args):
        seen.append(read_trace(path).events[-1])
        return run(*args)

    monkeypatch.setattr(programs, "run", look)
    engine.step(2)
    assert seen == [Run(2), Run(2)]  # the second before the first is read
    events = read_trace(path).events
    assert events[0] == Submit(0, (1, 2, 3), 4)
    for event in events[1:]:
        assert event.outcome.steps == 2
        assert list(map(len, event.outcome.tokens.values())) == [2]


def test_jx04_a_failed_step_is_on_record_and_the_replay_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    engine = Engine(CONFIG, MODEL, None, secret=9, recorder=Recorder(path))
    engine.add(EngineRequest((1, 2, 3), 9))
    engine.step(2)

    def broken(*_):
        raise RuntimeError("the device went away")

    with monkeypatch.context() as patch:
        patch.setattr(programs, "run", broken)
        with pytest.raises(EngineStepError):
            engine.step(2)
    engine.add(EngineRequest((4, 5), 3))
    while engine.num_unfinished:
        engine.step()
    trace = read_trace(path)
    assert trace.events[3:5] == (Run(2), Restart(9))
    runs = [event for event in trace.events if isinstance(event, Run)]
    for again in (replay(trace, MODEL, None), replay_scheduler(trace)):
        assert again.difference is None
        assert (again.num_runs, again.num_compared) == (len(runs), len(runs) - 1)


def changed(path, number, change):
    """The file's text with the record of line ``number`` changed."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    change(record)
    lines[number] = json.dumps(record)
    return "\n".join(lines) + "\n"


def outcome_lines(path, key):
    """``(line, event)`` of the outcomes in which ``key`` is not empty."""
    event, found = -1, []
    for number, line in enumerate(path.read_text().splitlines()):
        record = json.loads(line)
        event += number > 0 and "ran" not in record
        if record.get("ran", {}).get(key):
            found.append((number, event))
    return found


@pytest.mark.parametrize("which", [0, 5, -1])
def test_a_changed_token_is_found_at_its_event(recorded, which):
    number, event = outcome_lines(recorded[0], "tokens")[which]

    def change(record):
        tokens = next(iter(record["ran"]["tokens"].values()))
        tokens[-1] = (tokens[-1] + 1) % VOCAB

    trace = loads(changed(recorded[0], number, change))
    full, bare = replay(trace, MODEL, None).difference, replay_scheduler(trace).difference
    assert full.event == bare.event == event
    assert "on record" in full.what
    # Without a model the changed token is what is put in: the digest shows it.
    assert "requests.tokens" in bare.leaves


@pytest.mark.parametrize("which", [0, 7, -1])
def test_a_changed_digest_is_found_at_its_event_with_the_arrays_name(recorded, which):
    number, event = outcome_lines(recorded[0], "digests")[which]
    name = []

    def change(record):
        name.extend([n for n in record["ran"]["digests"] if n not in MODEL_LEAVES][:1])
        record["ran"]["digests"][name[0]] ^= 1

    trace = loads(changed(recorded[0], number, change))
    for again in (replay(trace, MODEL, None), replay_scheduler(trace)):
        assert again.difference.event == event
        assert again.difference.leaves == (name[0],)
        assert name[0] in again.difference.what
        assert again.num_events == event


def test_logprobs_are_compared_with_the_model_on_the_same_backend_only(recorded):
    number, event = outcome_lines(recorded[0], "digests")[0]

    def change(record):
        record["ran"]["digests"]["requests.logprobs"] ^= 1

    trace = loads(changed(recorded[0], number, change))
    assert replay(trace, MODEL, None).difference.event == event
    elsewhere = dataclasses.replace(trace, backend="elsewhere")
    assert replay(elsewhere, MODEL, None).difference is None
    assert replay(elsewhere, MODEL, None, floats=True).difference.event == event
    assert replay_scheduler(trace).difference is None


def test_another_number_of_steps_is_a_difference(trace):
    index = next(i for i, e in enumerate(trace.events) if isinstance(e, Run))
    run = trace.events[index]
    outcome = dataclasses.replace(run.outcome, steps=run.outcome.steps + 1, digests=None)
    events = (*trace.events[:index], Run(run.max_steps, outcome), *trace.events[index + 1 :])
    difference = replay(dataclasses.replace(trace, events=events), MODEL, None).difference
    assert difference.event == index
    assert f"{outcome.steps} steps on record" in difference.what


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(recorded, trace):
    text = recorded[0].read_text()
    last = text.rstrip("\n").rindex("\n") + 1
    for end in (last + 1, last + 2, last + 9, len(text) - 3, len(text) - 2):
        torn = loads(text[:end])
        assert torn.torn
        assert torn.events == (*trace.events[:-1], Run(trace.events[-1].max_steps))
    assert loads(text[: len(text) - 1]) == trace
    assert not trace.torn
    again = replay_scheduler(loads(text[:-9]))
    assert again.difference is None
    assert again.num_compared == again.num_runs - 1


EVERYTHING = Trace(
    config=CONFIG,
    vocab_size=VOCAB,
    secret=2**32 - 1,
    model={"name": "fake"},
    events=(
        Submit(0, (1, 2), 3, stop_ids=(4,), top_p=0.5, key=(1, 2**32 - 1), use_cache=False),
        Submit(1, (1, 2), 3, fork_of=0, priority=-4, output=(5, 6)),
        Run(2, Outcome(2, {0: (3,), 1: (5,)}, {"rows.kv_len": 7, "plan.order": 1})),
        Run(1, Outcome(0, {}, {"rows.kv_len": 8, "plan.order": 1})),
        Abort(1),
        Fork(0, (2,), ((1, 2),), (9,), (None,), (float("-inf"),), ((1, 2, 3),)),
        ResetPrefixCache(),
        Run(16),
        Restart(5),
    ),
)


def test_a_trace_is_read_as_it_was_written(tmp_path, trace):
    for each in (EVERYTHING, trace, scripted(trace)):
        write_trace(tmp_path / "copy.jsonl", each)
        assert read_trace(tmp_path / "copy.jsonl") == each


def test_floats_keep_their_bits_and_are_short():
    for value in (0.9, 0.1, 1 / 3, 1e-38, 3.4e38):
        event = Submit(0, (1,), 1, temperature=value)
        again = submit_event(CONFIG, 0, new_request(CONFIG, event))
        assert np.float32(again.temperature) == np.float32(value)
        assert len(str(again.temperature)) <= 12
    fork = Fork(0, (1, 2), ((0, 0),) * 2, (0, 1), (None, 3), (float("-inf"), -0.7))
    assert fork_event(CONFIG, new_fork(CONFIG, fork)) == fork


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.3, "typical_p": 0.7, "repetition_penalty": 1.1},
        {"presence_penalty": -1.3, "frequency_penalty": 1e-3},
        {"logit_bias": ((VOCAB - 1, -99.9), (0, 0.1))},
        {"bad_words": ((1, 2, 3), (4,))},
        {"allowed_token_ids": (0, 5, VOCAB - 1)},
        {"banned_token_ids": (0, 5, VOCAB - 1)},
    ],
    ids=str,
)
def test_sampling_options_come_back_from_arrays_and_from_the_file(options):
    event = Submit(0, (1,), 1, **options)
    assert submit_event(CONFIG, 0, new_request(CONFIG, event)) == event
    assert loads(dumps(Trace(CONFIG, VOCAB, (event,)))).events == (event,)


def test_a_list_without_room_is_refused_with_the_limit():
    bias = '{"submit":{"slot":0,"prompt":[1],"max_new_tokens":1,"logit_bias":[[1,2.0]]}}\n'
    small = dataclasses.replace(CONFIG, max_logit_bias=0, token_mask_size=0)
    with pytest.raises(ValueError, match=r"line 2: submit.logit_bias has 1 .* max_logit_bias=0"):
        loads(dumps(Trace(small, VOCAB)) + bias)
    mask = bias.replace('"logit_bias":[[1,2.0]]', '"banned_token_ids":[1]')
    with pytest.raises(ValueError, match=f"token_mask_size=0 is less than vocab_size={VOCAB}"):
        loads(dumps(Trace(small, VOCAB)) + mask)


def test_the_file_is_small(recorded, trace):
    """No padding, no defaults, no digest that is as before."""
    lines = dumps(EVERYTHING).splitlines()
    assert lines[2] == (
        '{"submit":{"slot":1,"prompt":[1,2],"max_new_tokens":3,"fork_of":0,"output":[5,6],'
        '"priority":-4}}'
    )
    assert lines[5:7] == [
        '{"run":{"max_steps":1}}',
        '{"ran":{"steps":0,"digests":{"rows.kv_len":8}}}',
    ]
    assert recorded[0].stat().st_size / len(trace.events) < 1000


HEADER = dumps(Trace(CONFIG, VOCAB))


def header(**changes):
    return json.dumps(json.loads(HEADER) | changes) + "\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1", "empty or torn"]),
        ('{"oxidize', ["line 1", "not JSON"]),
        ("[]\n", ["line 1", "not the file of a trace"]),
        ('{"a": 1}\n', ["line 1", "oxidize_jax_trace"]),
        (header(oxidize_jax_trace=2), ["line 1", "oxidize_jax_trace=2", "format 1"]),
        (header(vocab_size=0), ["line 1", "vocab_size=0", "1 to"]),
        (header(secret=-1), ["line 1", "secret=-1"]),
        (header(model={"name": 3}), ["line 1", "model="]),
        (header(config=[]), ["line 1", "config=[]"]),
        (header(config={"block_sise": 4}), ["config.block_sise", "did you mean 'block_size'"]),
        (header(config={"block_size": 0}), ["line 1", "block_size=0"]),
        (HEADER + "{]\n{}\n", ["line 2", "not JSON", "only its last line"]),
        (HEADER + "3\n", ["line 2", "one key"]),
        (HEADER + '\n{"sumbit": {}}', ["line 3", "'sumbit'", "did you mean 'submit'"]),
        (HEADER + '{"run": 3}', ["line 2", "run=3", "object"]),
        (HEADER + '{"run": {}}', ["line 2", "run.max_steps is missing"]),
        (HEADER + '{"run": {"max_steps": 0}}', ["line 2", "run.max_steps=0", "1 to"]),
        (HEADER + '{"run": {"max_steps": true}}', ["run.max_steps=True"]),
        (HEADER + '{"run": {"max_steps": 1, "outcome": 1}}', ["run.outcome is not known"]),
        (HEADER + '{"abort": {"slot": 3}}', ["line 2", "abort.slot=3", "0 to 2"]),
        (HEADER + '{"abort": {"slot": 1, "slto": 1}}', ["abort.slto", "did you mean 'slot'"]),
        (HEADER + '{"ran": {"steps": 1}}', ["line 2", "no run before it"]),
        (
            HEADER + '{"run": {"max_steps": 1}}\n{"ran": {"steps": 1, "tokens": {"0": [1]}}}',
            ["line 3", "slot 0 holds no request"],
        ),
        (
            HEADER + '{"run": {"max_steps": 1}}\n{"ran": {"steps": 1, "tokens": {"x": [1]}}}',
            ["line 3", "ran.tokens: slot='x'"],
        ),
        (
            HEADER + '{"submit": {"slot": 0, "prompt": [97], "max_new_tokens": 1}}',
            ["line 2", "submit.prompt[0]=97", "0 to 96"],
        ),
        (
            HEADER + '{"submit": {"slot": 0, "prompt": [], "max_new_tokens": 1}}',
            ["line 2", "0 tokens"],
        ),
        (
            HEADER
            + '{"submit": {"slot": 0, "prompt": [1], "max_new_tokens": 1, "stop_ids": [1, 2, 3]}}',
            ["line 2", "submit.stop_ids", "max_stop_token_ids=2"],
        ),
        (
            HEADER + '{"submit": {"slot": 0, "prompt": [1], "max_new_tokens": 1, "top_p": 1e39}}',
            ["line 2", "submit.top_p=1e+39", "32 bits"],
        ),
        (
            HEADER + '{"submit": {"slot": 0, "prompt": [1], "max_new_tokens": 1, "key": [1]}}',
            ["line 2", "submit.key=[1]", "list of 2"],
        ),
        (
            HEADER + '{"submit": {"slot": 0, "prompt": [1], "max_new_tokens": 1, "use_cache": 1}}',
            ["line 2", "submit.use_cache=1", "true or false"],
        ),
        (
            HEADER + '{"fork": {"parent": 0, "children": [1], "keys": [], "arrivals": [1], '
            '"last_tokens": [null], "last_logprobs": [0]}}',
            ["line 2", "fork.keys has 0 entries for 1 children"],
        ),
        (
            HEADER + '{"fork": {"parent": 1, "children": [1], "keys": [[1, 2]], "arrivals": [1], '
            '"last_tokens": [null], "last_logprobs": [0]}}',
            ["line 2", "different slots"],
        ),
        (
            HEADER + '{"fork": {"parent": 1, "children": [], "keys": [], "arrivals": [], '
            '"last_tokens": [], "last_logprobs": []}}',
            ["line 2", "fork.children is empty"],
        ),
        (
            HEADER + '{"submit": {"slot": 1, "prompt": [1], "max_new_tokens": 1, "fork_of": 1}}',
            ["line 2", "submit.fork_of=1"],
        ),
        (header(config={}), ["line 1", "config.block_size is missing"]),
    ],
)
def test_a_bad_file_is_one_line_that_names_line_and_field(tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.jsonl") as caught:
        read_trace(path)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recorder_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ValueError, match=r"trace=.*no/run.jsonl.*give a file"):
        Recorder(tmp_path / "no" / "run.jsonl")
    with pytest.raises(ValueError, match="digest_every=-1"):
        Recorder(tmp_path / "run.jsonl", digest_every=-1)
    recorder = Recorder(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="start it first"):
        recorder.abort(0)
    Engine(CONFIG, MODEL, None, recorder=recorder)
    with pytest.raises(ValueError, match="has an engine: make one for each"):
        Engine(CONFIG, MODEL, None, recorder=recorder)


def test_a_full_disk_ends_the_recording_and_not_the_engine(tmp_path):
    def full(_):
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "run.jsonl")
    engine = Engine(CONFIG, MODEL, None, recorder=recorder)
    recorder._file.close()
    recorder._file = types.SimpleNamespace(write=full, close=lambda: None)
    engine.add(EngineRequest((1, 2, 3), 20))
    with pytest.warns(RuntimeWarning, match=r"run.jsonl ends here: No space left"):
        engine.step(1)
    while engine.num_unfinished:
        engine.step()
    assert read_trace(tmp_path / "run.jsonl").events == ()


@pytest.mark.parametrize("every", [0, 3])
def test_digests_can_be_few_and_the_tokens_are_compared_all_the_same(tmp_path, every):
    with Recorder(tmp_path / "run.jsonl", digest_every=every) as recorder:
        Load(1, recorder).run(8)
    trace = read_trace(tmp_path / "run.jsonl")
    taken = [e.outcome.digests is not None for e in trace.events if isinstance(e, Run)]
    assert taken == [every > 0 and n % every == 0 for n in range(1, len(taken) + 1)]
    assert any(taken) == (every > 0)
    assert loads(dumps(trace)) == trace
    again = replay(trace, MODEL, None)
    assert again.difference is None
    assert again.num_compared == len(taken)


def test_a_digest_sees_every_bit_and_its_place():
    state = init_scheduler(CONFIG)
    before = digest(state)
    assert list(before) == [name for name, _ in leaves(state)]
    requests = state.requests
    for name, values in {
        "tokens": requests.tokens.at[2, 31].set(1),
        "logprobs": requests.logprobs.at[0, 0].set(-0.0),
        "use_cache": requests.use_cache.at[1].set(False),
        "row": requests.row[::-1].at[0].set(0),
    }.items():
        other = dataclasses.replace(requests, **{name: values})
        other = dataclasses.replace(state, requests=other)
        after = digest(other)
        assert {n for n in after if after[n] != before[n]} == {f"requests.{name}"}
        assert first_difference(state, other).startswith(f"requests.{name}[")
    swapped = [digest_of_arrivals(state, values) for values in ([1, 2, 0], [2, 1, 0])]
    assert swapped[0] != swapped[1]


def digest_of_arrivals(state, values):
    requests = dataclasses.replace(state.requests, arrival=jnp.array(values, jnp.int32))
    return digest(dataclasses.replace(state, requests=requests))["requests.arrival"]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((Submit(0, (1,), 4), Submit(0, (1,), 4)), r"event 1 \(submit, slot 0\): .*still in use"),
        ((Submit(0, (1,), 4), Run(2), Submit(0, (2,), 1)), r"event 2 .*still in use"),
        (
            (Submit(0, (1, 2), 4), Submit(1, (1, 3), 4, fork_of=0)),
            r"event 1 \(submit, slot 1\): a fork of slot 0, another prompt",
        ),
        ((Fork(0, (1,), ((0, 0),), (0,), (None,), (0.0,)),), r"event 0 \(fork of slot 0\)"),
    ],
)
def test_events_that_no_engine_makes_are_refused(events, message):
    trace = Trace(CONFIG, VOCAB, events)
    with pytest.raises(TraceError, match=message):
        replay_scheduler(trace)
    with pytest.raises(TraceError, match=message):
        replay(trace, MODEL, None)


def test_a_model_of_another_vocabulary_is_refused(trace):
    with pytest.raises(ValueError, match=r"vocab_size=96: .* 97 \(fake\)"):
        replay(trace, FakeModel(vocab_size=96), None)


def leaky_schedule(config, state):
    """Block 0 stays in use when a prompt with MARK leaves its row while another runs on."""
    after = schedule(config, state)
    none = config.max_num_requests
    left = (state.rows.request < none) & (after.rows.request != state.rows.request)
    requests = state.requests
    place = jnp.arange(config.max_model_len, dtype=jnp.int32)
    prompt = place < requests.prompt_len[:, None]
    marked = jnp.any((requests.tokens == MARK) & prompt, axis=1)
    bad = at_index(marked, jnp.where(left, state.rows.request, none), False)
    leak = jnp.any(bad) & jnp.any(after.rows.request < none)
    ref_count = after.pool.ref_count.at[0].add(leak.astype(jnp.int32))
    pool = dataclasses.replace(after.pool, ref_count=ref_count)
    return dataclasses.replace(after, pool=pool)


@pytest.fixture(scope="module")
def leaky_step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "schedule", leaky_schedule)
        step = quick(scripted_step)
        state = init_scheduler(CONFIG)
        step(CONFIG, state, jnp.zeros_like(state.requests.tokens))  # traced while it is patched
    return step


def test_a_fault_is_cut_down_to_a_test(trace, monkeypatch, leaky_step):
    assert any(MARK in e.prompt for e in trace.events if isinstance(e, Submit))
    assert len(trace.events) >= 40
    assert fault(trace) is None
    with pytest.raises(ValueError, match="does not fail"):
        shrink(trace, lambda _: False)
    monkeypatch.setattr(replaying, "_jitted_step", leaky_step)
    error = fault(trace)
    assert isinstance(error, InvariantError)
    assert error.__notes__[0].startswith("in step ")
    sizes = []
    small = shrink(trace, fails_like(error), progress=lambda t: sizes.append(len(t.events)))
    kinds = [type(event) for event in small.events]
    assert kinds.count(Submit) in (2, 3)
    assert len(kinds) <= 5
    assert sizes[0] == len(trace.events)
    assert sizes[-1] == len(small.events)
    submits = [event for event in small.events if isinstance(event, Submit)]
    assert any(MARK in submit.prompt for submit in submits)
    assert sum(len(submit.prompt) for submit in submits) < 30
    assert all(s.output == () and s.temperature == 0 for s in submits)
    # The file of the small trace, and the test made of it, fail with the fault and only then.
    again, source = loads(dumps(small)), to_test(small)
    assert max(map(len, source.splitlines())) <= 100
    made: dict = {}
    exec(compile(source, "test_small.py", "exec"), made)
    assert isinstance(fault(again), InvariantError)
    with pytest.raises(InvariantError):
        made["test_replay"]()
    monkeypatch.setattr(replaying, "_jitted_step", SOUND)
    made["test_replay"]()
    assert fault(again) is None


def test_another_fault_is_not_the_same(monkeypatch):
    trace = Trace(CONFIG, VOCAB, (Submit(0, (1,), 1), Run(1)))

    def broken(*_):
        raise InvariantError("something else: 3")

    monkeypatch.setattr(replaying, "_jitted_step", broken)
    assert fails_like(InvariantError("something else: 4"))(trace)
    assert not fails_like(InvariantError("ref_count: 4"))(trace)
    assert not fails_like(RuntimeError("something else: 3"))(trace)
    nonsense = dataclasses.replace(trace, events=trace.events[:1] * 2)
    assert not fails_like(TraceError("nonsense"))(nonsense)


def test_events_that_belong_together_go_together():
    """Whatever is left fails, so all but what the condition asks for must go."""

    def fails(trace):
        slots, steps = set(), 0
        for event in trace.events:
            if isinstance(event, Submit):
                slots.add(event.slot)
            elif isinstance(event, Fork):
                assert event.parent in slots
            elif isinstance(event, Run) and 1 in slots:
                steps += event.max_steps
        return steps >= 3

    fork = Fork(0, (2,), ((0, 0),), (5,), (None,), (0.0,))
    events = (
        *(Submit(0, (1, 2), 3), Run(4), fork, Run(2), Abort(2), ResetPrefixCache()),
        *(Submit(1, (5, 6, 7), 9, priority=2, output=(1,)), Run(7), Abort(1), Run(1)),
    )
    assert shrinking._requests(events) == [{0, 2, 4}, {6, 8}]
    small = shrink(Trace(CONFIG, VOCAB, events), fails)
    assert small.events == (Submit(1, (5,), 1), Run(3))


def test_the_source_of_a_test_gives_every_event_back():
    source = to_test(EVERYTHING, name="test_all")
    made: dict = {}
    exec(compile(source, "test_all.py", "exec"), made)
    expected = dataclasses.replace(scripted(EVERYTHING), model={})
    assert made["TRACE"] == expected
    assert callable(made["test_all"])
    assert max(map(len, source.splitlines())) <= 100
