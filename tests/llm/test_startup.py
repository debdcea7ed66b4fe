"""Start of an LLM: programs compiled while the model loads, memory that fits, what goes wrong."""

import jax.numpy as jnp
import pytest

from oxidize_jax import LLM, SamplingParams, startup
from oxidize_jax.checkpoints.load import load_checkpoint
from oxidize_jax.engine.warmup import Memory, WarmUp
from oxidize_jax.model.functional import build

PARAMS = [
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=1, max_tokens=12, seed=3, n=3, logprobs=2, top_k=5),
    SamplingParams(max_tokens=5, min_tokens=2, stop=["e"], stop_token_ids=[7], top_p=0.9),
]


@pytest.fixture(scope="module")
def warm(make_llm):
    return make_llm(warm_up=True, max_model_len=60)


def test_nothing_compiles_once_it_is_made(warm):
    count = warm.num_compiles
    for turn in range(3):
        prompts = [[turn + i] * (1 + 9 * i % 40) for i in range(6)]
        warm.generate(prompts, [PARAMS[i % 3] for i in range(6)])
        list(warm.stream([turn, 5, 6], PARAMS[turn]))
        assert next(warm.stream("left alone", PARAMS[1]))
        warm.reset_prefix_cache()
    warm.generate("abc", PARAMS[0])
    assert warm.num_compiles == count


def test_without_warm_up_the_first_request_compiles(make_llm):
    llm = make_llm(max_model_len=56)
    count = llm.num_compiles
    llm.generate("abc", PARAMS[0])
    assert llm.num_compiles > count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_abstract_parameters_are_those_of_the_loader(tiny_path, dtype):
    checkpoint = load_checkpoint(tiny_path, jnp.dtype(dtype))
    abstract = startup.abstract_parameters(checkpoint.config, jnp.dtype(dtype))
    _, made = build(checkpoint.config, checkpoint.params)
    _, expected = build(checkpoint.config, abstract)
    assert {n: (a.shape, a.dtype) for n, a in made.items()} == {
        n: (a.shape, a.dtype) for n, a in expected.items()
    }


def test_a_model_that_cannot_be_loaded_is_one_line_and_stops_the_compiler(
    make_llm, monkeypatch, tiny_path
):
    cancelled = []

    def broken(*_, **__):
        raise ValueError("the file is cut off")

    monkeypatch.setattr(startup, "load_checkpoint", broken)
    monkeypatch.setattr(WarmUp, "cancel", lambda self: cancelled.append(self))
    with pytest.raises(ValueError, match="cut off"):
        make_llm(warm_up=True, max_model_len=60)
    assert len(cancelled) == 1


def test_sizes_that_do_not_fit_beside_the_model_are_refused_in_one_line(make_llm, monkeypatch):
    monkeypatch.setattr(WarmUp, "memory", lambda _: Memory(2**30, 2**40))
    with pytest.raises(ValueError, match=r"num_blocks=16 needs 1 GiB .*a step 1.02e\+03 GiB") as e:
        make_llm(warm_up=True, max_model_len=60, num_blocks=16)
    assert "\n" not in str(e.value)


def test_a_cache_of_unasked_size_shrinks_to_what_is_left(make_llm, monkeypatch, warm):
    monkeypatch.setattr(startup, "kv_block_bytes", lambda *_: 100)
    monkeypatch.setattr(startup, "free_memory", lambda: 5000)
    monkeypatch.setattr(WarmUp, "memory", lambda _: Memory(5000, 250))
    llm = make_llm(warm_up=True, max_model_len=60)
    assert llm.config.num_blocks == warm.config.num_blocks - 3
    count = llm.num_compiles
    assert llm.generate("abc", PARAMS[0])[0].outputs[0].token_ids
    assert llm.num_compiles == count


def test_a_missing_tokenizer_is_found_before_anything_is_compiled(tiny_path, monkeypatch):
    monkeypatch.setattr(startup, "WarmUp", None)
    with pytest.raises(ValueError, match="no/such/folder"):
        LLM(tiny_path, tokenizer="no/such/folder")
