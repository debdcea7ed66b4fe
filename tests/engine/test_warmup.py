"""Warm-up: every program is there before the first request, and no other comes after it."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from fake_model import VOCAB, FakeModel, quick_jit, solo
from host_engine import CONFIG, request, run, tokens
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from residues import Residues

from oxidize_jax.engine import programs
from oxidize_jax.engine.engine import Engine, EngineStepError
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.engine.step import init_state, run_steps
from oxidize_jax.engine.warmup import CompileCounter, WarmUp

# Sizes of no other test: nothing is compiled yet. One bucket, to be compiled soon.
OWN = dataclasses.replace(CONFIG, max_model_len=40, num_blocks=14, max_num_batched_tokens=4)
TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture(scope="module")
def engine():
    engine = Engine(OWN, FakeModel(), None)
    engine.warm_up()
    return engine


@pytest.fixture
def traced():
    """Names of the programs that are traced in the test."""
    names = []

    def listen(event, _, fun_name="", **__):
        if event == TRACE_EVENT:
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def use_everything(engine, rng, requests):
    """Random requests of every kind, with aborts, forks and resets."""
    ids = []
    while requests > 0 or engine.num_unfinished:
        while requests > 0 and rng.random() < 0.5:
            keys = [(rng.getrandbits(32), i) for i in range(rng.choice([1, 1, 1, 2, 3]))]
            requests -= len(keys)
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
            sampled = EngineRequest(
                prompt,
                rng.randrange(1, 12),
                min_new_tokens=rng.choice([0, 2]),
                stop_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(3))),
                temperature=rng.choice([0, 0.5, 1]),
                top_k=rng.choice([0, 7]),
                top_p=rng.choice([1, 0.8]),
                num_logprobs=rng.choice([None, 0, 2]),
                priority=rng.choice([0, -1]),
                salt=rng.choice([0, 3]),
                use_cache=rng.random() < 0.9,
                grammar=rng.choice([None, None, Residues(rng.randrange(1, 9), ends=False)]),
            )
            ids += engine.add_group(sampled, keys)
        if ids and rng.random() < 0.3:
            engine.abort(rng.choice(ids[-4:]))
        if ids and rng.random() < 0.3:
            engine.fork(rng.choice(ids[-4:]), [(1, rng.getrandbits(32))])
        if rng.random() < 0.1:
            engine.reset_prefix_cache()
        engine.step(rng.choice([1, 2, 5, 16]))


def test_200_mixed_requests_neither_trace_nor_compile_anything(engine, traced):
    count = engine.num_compiles
    assert count >= 6  # ``start`` was compiled with the engine
    use_everything(engine, random.Random(2), 200)
    assert engine.num_compiles == count
    assert traced == []
    totals = jax.device_get(engine.state.scheduler.totals)
    assert totals.forked_tokens > 0
    assert totals.generated_tokens > 400


def test_a_failed_step_compiles_nothing_either(engine, monkeypatch):
    count = engine.num_compiles
    engine.add(request([1, 2], 9))
    with monkeypatch.context() as patch:
        patch.setattr(programs, "drain", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="division by zero"):
            engine.step()
    again = engine.add(request([1, 2], 5))
    assert tokens(run(engine)[again]) == solo([1, 2], 5)[2:]
    assert engine.num_compiles == count


def test_the_counter_counts_what_is_compiled_from_its_beginning_on():
    def compile_one(number):
        return jax.jit(lambda x: x * np.float32(number)).lower(np.float32(1)).compile()

    first = CompileCounter()
    compile_one(3)
    second = CompileCounter()
    compile_one(5)
    assert (first.count, second.count) == (2, 1)


def test_the_memory_of_an_engine_is_that_of_its_state_and_of_a_run(engine):
    warming = WarmUp(OWN, FakeModel(), None)
    assert list(warming.finish())[-1] == len(warming) == 8
    memory = warming.memory()
    state = init_state(OWN, FakeModel())
    assert memory.state == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert 0 < memory.temporary < 2**30
    assert memory.total == memory.state + memory.temporary


@dataclasses.dataclass(frozen=True)
class UntraceableModel(FakeModel):
    def forward(self, params, kv, batch):
        raise NotImplementedError("this model has no forward")


def test_what_goes_wrong_is_raised_and_the_rest_can_be_cancelled():
    warming = WarmUp(OWN, UntraceableModel(), None)
    with pytest.raises(NotImplementedError, match="no forward"):
        list(warming.finish())
    warming.cancel()


@pytest.fixture
def no_adopted(monkeypatch):
    adopted = {}
    monkeypatch.setattr(programs, "_adopted", adopted)
    return adopted


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder, switched on for executables only."""
    monkeypatch.setenv("OXIDIZE_JAX_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX looks at these settings once
    yield tmp_path / "executables"
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_enable_compilation_cache", before[1])
    reset_cache()


def warm_up():
    for _ in WarmUp(OWN, FakeModel(), None).finish():
        pass


def test_a_run_that_another_process_left_is_not_traced(engine, cache, no_adopted, monkeypatch):
    monkeypatch.setattr(FakeModel, "__module__", "oxidize_jax.model.fake")
    # XLA:CPU does not serialise what has run, as the program of the engine has.
    fresh = quick_jit(run_steps, static_argnums=(0, 1), donate_argnums=3)
    monkeypatch.setattr(programs, "traced_run", fresh)
    warm_up()
    assert [path.name.partition("-")[0] for path in cache.iterdir()] == ["run"] * 2
    assert no_adopted == {}
    monkeypatch.setattr(programs, "traced_run", None)
    warm_up()
    assert len(no_adopted) == 1
    again = engine.add(request([1, 2], 5))
    assert tokens(run(engine)[again]) == solo([1, 2], 5)[2:]


def test_a_model_whose_code_may_change_is_always_traced(engine, cache, no_adopted):
    assert not FakeModel.__module__.startswith("oxidize_jax")
    warm_up()
    warm_up()
    assert not cache.exists()
    assert no_adopted == {}


def test_an_executable_is_called_for_what_it_was_compiled_for_alone(no_adopted):
    def fail(*_):
        raise AssertionError("called")

    model, limit = FakeModel(), np.int32(1)
    programs.adopt_run(OWN, model, fail, discard=fail)
    with jax.default_matmul_precision("float32"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "traced_run", lambda *_: "traced")
        assert programs.run(OWN, model, None, None, limit) == "traced"
        assert programs.run(CONFIG, model, None, None, limit) == "traced"
    with pytest.raises(AssertionError, match="called"):
        programs.run(OWN, model, None, None, limit)


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_arguments_that_an_executable_refuses_are_traced(no_adopted, monkeypatch, error):
    def refuse(*_):
        raise error

    programs.adopt_run(OWN, FakeModel(), refuse, discard=lambda: None)
    monkeypatch.setattr(programs, "traced_run", lambda *_: "traced")
    assert programs.run(OWN, FakeModel(), None, None, np.int32(1)) == "traced"
    assert no_adopted == {}


def test_an_executable_that_fails_is_used_once(engine, no_adopted):
    def broken(*_):
        raise RuntimeError("Function iota_compare_fusion.1 not found")

    discarded = []
    programs.adopt_run(OWN, FakeModel(), broken, discard=lambda: discarded.append(1))
    engine.add(request([1, 2], 5))
    with pytest.raises(EngineStepError, match="submit them again"):
        engine.step()
    assert discarded == [1]
    assert no_adopted == {}
    again = engine.add(request([1, 2], 5))
    assert tokens(run(engine)[again]) == solo([1, 2], 5)[2:]


def test_every_array_of_the_state_is_its_own(engine):
    assert_clean_of(engine)
    leaves = jax.tree.leaves(programs.start(OWN, FakeModel(), np.uint32(5)))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
    assert len(set(pointers)) == len(pointers)


def assert_clean_of(engine):
    engine.step()
    pool = jax.device_get(engine.state.scheduler.pool)
    assert int(pool.num_free) + int(pool.num_cached) == OWN.num_blocks
