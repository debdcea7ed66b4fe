"""generate: the whole engine as one pure function, alone, in a loop and beside a training step."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_sampler as reference
from fake_model import VOCAB, FakeModel, quick_jit, solo
from write_checkpoints import TINY_LLAMA as MODEL
from write_checkpoints import random_params

import oxidize_jax
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.engine import Engine
from oxidize_jax.engine.generate import REFUSED, GenerateConfig, _generate, generate
from oxidize_jax.engine.inputs import (
    Prompts,
    Sampling,
    pad_prompts,
    request_keys,
)
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.llm import LLM
from oxidize_jax.model.functional import build
from oxidize_jax.model.storage import parameter_dtype
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.scheduler.state import LENGTH, POOL_EXHAUSTED, STOPPED

W, N_SEQS = 8, 3
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "prefill_tile": 4}
TIGHT = GenerateConfig(
    FakeModel(), W, num_return_sequences=N_SEQS, num_blocks=7, pad_token_id=-100, **SIZES
)
"""Rows for 2 of 18 sequences, and a pool that two long ones outgrow. Prompts are padded to 30."""
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 60], [3] * 13, [3] * 14, [1], [5, 6, 7, 8] * 3]
KEY = jax.random.key(3)
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module")
def tight():
    """``run(prompts, **sampling)``: all calls in one program, which is traced once."""
    run = functools.partial(run_tight, one_program())
    yield run
    chex.clear_trace_counter()


def one_program():
    traced = chex.assert_max_traces(lambda *args: generate(None, *args, TIGHT), n=1)
    return quick_jit(traced)


def run_tight(program, prompts, guard="allow", **sampling):
    if not isinstance(prompts, Prompts):
        prompts = pad_prompts(prompts, vocab_size=VOCAB, width=30)
    defaults = {"stop_token_ids": [-1, -1], "max_new_tokens": W, "min_new_tokens": 0}
    shapes = {"stop_token_ids": (6, 2), "max_new_tokens": (6,), "min_new_tokens": (6,)}
    arrays = {
        name: jnp.broadcast_to(jnp.array((defaults | sampling)[name], jnp.int32), shape)
        for name, shape in shapes.items()
    }
    given = Sampling(KEY, temperature=0, **arrays)
    # Python's own numbers would have to be brought to the device by the call.
    given = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, int | float) else x, given)
    with jax.transfer_guard(guard):
        return jax.block_until_ready(program(prompts, given))


def sequences(out, prompt):
    """Tokens of every sequence of a prompt, with what stands behind their end cut off."""
    return [
        row[:length].tolist()
        for row, length in zip(out.tokens[prompt], out.lengths[prompt], strict=True)
    ]


def expected(prompt, count=W, **options):
    return [solo(prompt, count, **options)[len(prompt) :]] * N_SEQS


def test_every_sequence_is_the_same_as_alone(tight):
    out = jax.device_get(tight(PROMPTS))
    for i, prompt in enumerate(PROMPTS):
        assert sequences(out, i) == expected(prompt)
    assert (out.finish_reasons == LENGTH).all()
    totals = out.totals
    # It was not all too easy.
    assert totals.preemptions > 0
    assert totals.preemptions == out.num_preemptions.sum()
    assert totals.forked_tokens > 0
    assert totals.cached_tokens > 0
    assert totals.copies > 0
    assert out.num_cached[1, :2].tolist() == [4, 0]
    assert totals.generated_tokens == out.lengths.sum()


def test_stop_ids_lengths_and_padding(tight):
    whole = [solo(prompt, W)[len(prompt) :] for prompt in PROMPTS]
    stops = [[whole[0][2], -1], [-1, whole[1][0]], [-1, -1], [-1, -1], [96, 96], [whole[5][3], 0]]
    most = [W, W, 1, 100, 3, W]
    least = [0, 2, 0, 0, 0, 6]
    out = tight(PROMPTS, stop_token_ids=stops, max_new_tokens=most, min_new_tokens=least)
    for i, prompt in enumerate(PROMPTS):
        known = [token for token in stops[i] if token >= 0]
        want = expected(prompt, min(most[i], W), stop_ids=known, min_tokens=least[i])
        assert sequences(out, i) == want
        stopped = STOPPED if want[0][-1] in known else LENGTH
        assert out.finish_reasons[i].tolist() == [stopped] * N_SEQS
    assert sequences(out, 0)[0] == whole[0][:3]
    place = np.arange(W)
    chex.assert_trees_all_equal(out.mask, place < np.asarray(out.lengths)[..., None])
    assert (np.asarray(out.tokens) == -100).sum() == (~out.mask).sum()
    assert ((np.asarray(out.logprobs) < 0) == out.mask).all()


def test_every_sampling_option_is_that_of_the_slow_sampler():
    """Each prompt with options of its own, in rows and blocks for fewer than all."""
    prompts = [[5, 6, 7], [5, 6, 7, 8], [3] * 6, [9, 8], [1], [2, 2]]
    n = len(prompts)
    mask = np.ones((n, VOCAB), bool)
    mask[1, ::2] = False
    per_prompt = {
        "temperature": [0, 0, 0, 0, 5, 5],
        "min_p": [0, 0, 0, 0, 1, 0],
        "typical_p": [1, 1, 1, 1, 1, 0.01],
        "repetition_penalty": [1, 1, 1.5, 1, 1, 1],
        "presence_penalty": [0, 0, 0, 2, 0, 0],
        "frequency_penalty": [0, 0, 0, 0.5, 0, 0],
    }
    per_prompt = {name: np.array(values, np.float32) for name, values in per_prompt.items()}
    bias_ids = np.array([[4, 50]] + [[7, -1]] * 5)
    bias_values = np.array([[90, 100.0]] + [[20, 0]] * 5)
    config = GenerateConfig(FakeModel(), W, num_blocks=7, **SIZES)
    sampling = Sampling(
        KEY, **per_prompt, bias_ids=bias_ids, bias_values=bias_values, token_mask=mask
    )
    given = pad_prompts(prompts, vocab_size=VOCAB, width=6)
    out = quick_jit(lambda given, sampling: generate(None, given, sampling, config))(
        given, jax.tree.map(jnp.asarray, sampling)
    )
    for i, prompt in enumerate(prompts):
        edits = {name: per_prompt[name][i] for name in per_prompt if "penalty" in name}
        edits["allowed"] = np.flatnonzero(mask[i]).tolist()
        edits["logit_bias"] = {
            int(t): v for t, v in zip(bias_ids[i], bias_values[i], strict=True) if t >= 0
        }
        filters = {name: per_prompt[name][i] for name in ("temperature", "min_p", "typical_p")}
        output = sequences(out, i)[0]
        assert len(output) == W
        for place, token in enumerate(output):
            history = prompt + output[:place]
            logits = -((np.arange(VOCAB) - solo(history, 1)[-1]) % VOCAB)
            x = reference.edited_logits(logits, prompt=prompt, output=output[:place], **edits)
            if filters["temperature"]:
                assert reference.probabilities(x, **filters)[token] > 0
            else:
                assert token == x.argmax()


def test_what_can_never_run_is_refused_and_disturbs_nobody(tight):
    good = pad_prompts(PROMPTS, vocab_size=VOCAB, width=30)
    tokens = good.tokens.at[5, 3].set(VOCAB).at[4, 1:].set(VOCAB)
    # None, one that the pool of 28 cannot hold, too many, a negative number.
    for bad in (0, 29, 31, -5):
        lengths = good.lengths.at[2].set(bad)
        most = [W, W, W, 0, W, W]
        out = tight(Prompts(tokens, lengths), max_new_tokens=most)
        reasons = [LENGTH, LENGTH, REFUSED, LENGTH, LENGTH, REFUSED]
        assert out.finish_reasons.tolist() == [[reason] * N_SEQS for reason in reasons]
        for i in (2, 3, 5):
            assert sequences(out, i) == [[]] * N_SEQS
        for i in (0, 1, 4):
            assert sequences(out, i) == expected(PROMPTS[i])


def test_more_tokens_than_the_result_has_room_for_are_as_many_as_it_has(tight):
    out = tight(PROMPTS, max_new_tokens=[100] * 6)  # arrays of JAX, which nobody can look at
    assert out.lengths.tolist() == [[W] * N_SEQS] * 6


def test_finish_reasons_have_names_that_the_package_exports():
    names = oxidize_jax.FINISH_REASON_NAMES
    assert {getattr(oxidize_jax, name.upper()): name for name in names.values()} == names
    assert set(names) == {STOPPED, LENGTH, POOL_EXHAUSTED, REFUSED}
    assert set(oxidize_jax.__all__) >= {"FINISH_REASON_NAMES", *map(str.upper, names.values())}


def test_all_refused_is_no_step(tight):
    good = pad_prompts(PROMPTS, vocab_size=VOCAB, width=30)
    out = tight(Prompts(good.tokens, jnp.zeros_like(good.lengths)))
    assert (out.finish_reasons == REFUSED).all()
    assert out.totals.steps == 0


def test_one_that_outgrows_the_pool_ends_with_what_it_has(tight):
    prompts = [*PROMPTS[:5], list(range(24))]
    out = tight(prompts)
    assert (out.finish_reasons[5] == POOL_EXHAUSTED).all()
    for tokens in sequences(out, 5):
        assert tokens == expected(prompts[5])[0][: len(tokens)]
        assert 4 <= len(tokens) < W
    assert (out.finish_reasons[:5] == LENGTH).all()


def test_nothing_passes_between_host_and_device(tight):
    want = tight(PROMPTS)
    chex.assert_trees_all_equal(tight(PROMPTS, guard="disallow"), want)


REAL_PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 11, 3], [4], [9, 9, 2]]


@pytest.fixture(scope="module")
def own():
    """A trainer's parameters."""
    return jax.tree.map(jnp.asarray, random_params(MODEL))


@pytest.fixture(scope="module")
def decoder(own):
    return build(MODEL, own)


@pytest.fixture(scope="module")
def train(decoder, own):
    """``train(params, sampling)``: two steps, ``(what each generated, its parameters)``.

    Half of the sequences wait for a row.
    """
    prompts = pad_prompts(REAL_PROMPTS, vocab_size=61, width=8)
    config = GenerateConfig(decoder[0], 6, num_return_sequences=2, num_logprobs=2, **SIZES)
    optimizer = optax.sgd(30.0)

    def loss(params, sampling):
        out = generate(params, prompts, sampling, config)
        embedded = params["embed.weight"][out.tokens]
        # Through the generation itself no gradient flows.
        return jnp.mean(
            embedded * out.mask[..., None].astype(jnp.float32)
        ) + out.logprobs.sum(), out

    def two_steps(params, sampling):
        def step(carry, _):
            params, optimizer_state = carry
            grads, out = jax.grad(loss, has_aux=True)(params, sampling)
            updates, optimizer_state = optimizer.update(grads, optimizer_state)
            return (optax.apply_updates(params, updates), optimizer_state), (out, params)

        return jax.lax.scan(step, (params, optimizer.init(params)), length=2)[1]

    program = quick_jit(two_steps)

    def run(temperature, most=(6,) * 4):
        sampling = Sampling(
            KEY,
            jnp.float32(temperature),
            max_new_tokens=jnp.array(most, jnp.int32),
        )
        return jax.device_get(program(own, sampling))

    return run


def by_sequence(outs, step):
    """What one step generated, ``[8, ...]``."""
    outs = dataclasses.replace(outs, totals=None)
    return jax.tree.map(lambda x: x[step].reshape(8, *x.shape[3:]), outs)


def on_the_host(model, params, temperature):
    """Updates of every sequence, from the host engine, in other sizes."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "max_num_requests": 4}
    config = EngineConfig(max_model_len=32, num_blocks=12, prefill_tile=4, **sizes)
    engine = Engine(config, model, params, secret=0)
    ids = []
    keys = np.asarray(request_keys(KEY, 4, 2)).tolist()
    for prompt, own in zip(REAL_PROMPTS, keys, strict=True):
        request = EngineRequest(tuple(prompt), 6, temperature=temperature, num_logprobs=2)
        ids += engine.add_group(request, [tuple(key) for key in own])
    updates = {request_id: [] for request_id in ids}
    while engine.num_unfinished:
        for update in engine.step():
            updates[update.request_id].append(update)
    return [updates[request_id] for request_id in ids]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_training_loop_makes_what_the_host_engine_makes_of_each_steps_parameters(
    train, temperature
):
    outs, used = train(temperature)
    for step in range(2):
        made = by_sequence(outs, step)
        params = jax.tree.map(lambda x, step=step: jnp.asarray(x[step]), used)
        for i, updates in enumerate(on_the_host(*build(MODEL, params), temperature)):
            assert made.tokens[i].tolist() == [t for u in updates for t in u.token_ids]
            logprobs = [value for u in updates for value in u.logprobs]
            np.testing.assert_allclose(made.logprobs[i], logprobs, atol=1e-4)
            top = np.array([pairs for u in updates for pairs in u.top_logprobs])
            assert made.top_ids[i].tolist() == top[..., 0].tolist()
            np.testing.assert_allclose(made.top_logprobs[i], top[..., 1], atol=1e-4)
            assert updates[-1].finish_reason == "length"
    moved = jax.tree.map(lambda x: bool((x[0] != x[1]).any()), used)
    assert [name for name, has in moved.items() if has] == ["embed.weight"]
    assert (outs.tokens[0] != outs.tokens[1]).any()


def test_a_sampled_sequence_is_the_same_alone(train):
    together = train(0.9)[0]
    assert len({tuple(row) for row in together.tokens[0].reshape(8, 6).tolist()}) == 8
    for i in range(4):
        alone = train(0.9, most=np.where(np.arange(4) == i, 6, 0))[0]
        assert alone.lengths[0].tolist() == [[6 * (i == j)] * 2 for j in range(4)]
        assert alone.tokens[0, i].tolist() == together.tokens[0, i].tolist()
        np.testing.assert_allclose(alone.logprobs[0, i], together.logprobs[0, i], atol=1e-5)


@pytest.mark.slow
def test_called_as_it_is_it_is_compiled_once(decoder):
    model, params = decoder
    config = GenerateConfig(model, 3, **SIZES)
    prompts = pad_prompts(REAL_PROMPTS, vocab_size=61)
    out = generate(params, prompts, Sampling(KEY, 0), config)
    assert out.lengths.tolist() == [[3]] * 4
    before = _generate._cache_size()
    generate(params, prompts, Sampling(jax.random.key(9), 1.5, 7, 0.5, 3, 2), config)
    shorter = Prompts(prompts.tokens + 1, jnp.maximum(prompts.lengths - 1, 1))
    sampling = Sampling(KEY, jnp.float32(1), 3, max_new_tokens=jnp.int32(1))
    other = generate(jax.tree.map(jnp.negative, params), shorter, sampling, config)
    assert other.lengths.tolist() == [[1]] * 4
    assert _generate._cache_size() == before


@pytest.mark.slow
def test_a_real_model_says_what_llm_says(smollm2_path):
    llm = LLM(smollm2_path, dtype="float32", max_model_len=64, max_num_seqs=2, progress=False)
    texts = ["The capital of France is", "Once upon a time there was", "2 + 2 ="]
    outputs = llm.generate(texts, SamplingParams(max_tokens=8, temperature=0))
    model, params = llm.engine.model, llm.engine.params
    prompts = pad_prompts([llm.tokenizer.encode(t) for t in texts], vocab_size=model.vocab_size)
    config = GenerateConfig(model, 8, num_return_sequences=2, max_num_seqs=4)
    stops = list(llm.tokenizer.eos_token_ids)
    out = generate(params, prompts, Sampling(KEY, 0, stop_token_ids=stops), config)
    for i, output in enumerate(outputs):
        assert sequences(out, i) == [list(output.outputs[0].token_ids)] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_program_makes_the_cache_once_and_never_copies_it(dtype):
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, random_params(MODEL)))
    params = {
        name: leaf
        if name.endswith("norm.weight")
        else jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
        for name, leaf in shapes.items()
    }
    model, _ = build(MODEL, params, kv_dtype=dtype)
    config = GenerateConfig(model, 4, num_blocks=16384, **{**SIZES, "block_size": 16})
    prompts = pad_prompts([[1], [2], [3]], vocab_size=61, width=8)
    # The parameters are a trainer's own, traced.
    program = jax.jit(lambda *args: generate(*args, config))
    compiled = program.lower(params, prompts, Sampling(KEY)).compile()
    kv = jax.eval_shape(lambda: model.init_kv(16384, 16))
    shape = ",".join(map(str, kv.shape))
    text = compiled.as_text()
    assert re.search(rf"= \w+\[{shape}\]\S* broadcast\(", text), "the cache is not in the program"
    assert not re.findall(rf"= \w+\[{shape}\]\S* (?:copy|convert|bitcast-convert)\(", text)
    kv_bytes = kv.size * kv.dtype.itemsize
    assert kv_bytes < compiled.memory_analysis().temp_size_in_bytes < 1.2 * kv_bytes


def shapes_with(model, params):
    config = GenerateConfig(model, 4, **SIZES)
    prompts = pad_prompts([[1], [2]], vocab_size=61, width=4)
    return jax.eval_shape(lambda p: generate(p, prompts, Sampling(KEY), config), params)


def test_parameters_are_a_trainers_own_or_what_build_made_of_them(decoder, own):
    shapes = shapes_with(decoder[0], own)
    assert shapes_with(*decoder) == shapes
    assert shapes.tokens.shape == (2, 1, 4)


def test_parameters_of_another_model_are_refused(decoder, own):
    params = {name: leaf for name, leaf in own.items() if name != "final_norm.weight"}
    assert len(params) == len(own) - 1
    with pytest.raises(
        ValueError, match=r"parameter 'final_norm.weight' \[24\] is missing; add it"
    ):
        shapes_with(decoder[0], params)


def changed(leaves, name, change):
    """``leaves`` without one of them, with one more, or with one cast or cut."""
    leaf = leaves[name]
    made = {
        "missing": {},
        "unknown": {name: leaf, "layers.x.weight": leaf},
        "cut": {name: leaf[..., :-1]},
        "half": {name: leaf.astype(jnp.float16)},
        "byte": {name: leaf.astype(jnp.int8)},
    }[change]
    return {n: other for n, other in leaves.items() if n != name} | made


@pytest.mark.parametrize("change", ["missing", "unknown", "cut", "half", "byte"])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("own", "layers.q.weight"),
        ("own", "layers.input_norm.weight"),
        ("built", "layers.input_norm.weight"),
        ("built", "layer.1.up.weight"),
        ("built in bfloat16", "layers.q.weight"),
        ("built in bfloat16", "layer.1.up.weight"),
    ],
)
def test_a_parameter_that_is_not_as_it_must_be_is_named(own, form, change, name):
    params = own
    if form == "built in bfloat16":
        norms = {n: leaf for n, leaf in own.items() if n.endswith("norm.weight")}
        params = {n: leaf.astype(jnp.bfloat16) for n, leaf in own.items()} | norms
    model, leaves = build(MODEL, params)
    if form == "own":
        leaves = own
    named = "layers.x.weight" if change == "unknown" else name
    with pytest.raises(ValueError, match=f"^parameter '{named}' "):
        shapes_with(model, changed(leaves, name, change))


def test_parameters_that_are_no_dict_or_have_no_embedding_are_refused(decoder):
    model, leaves = decoder
    with pytest.raises(ValueError, match="params is list: must be the leaves that build returned"):
        shapes_with(model, list(leaves.values()))
    with pytest.raises(ValueError, match=r"parameter 'embed.weight' \[61, 24\] is missing"):
        shapes_with(model, changed(leaves, "embed.weight", "missing"))


def test_leaves_that_were_built_under_jit_are_taken(decoder, own):
    def run(params):
        model, leaves = build(
            MODEL, {n: x.astype(parameter_dtype(n, BF16)) for n, x in params.items()}
        )
        assert leaves["layers.q.weight"].dtype == jnp.uint16
        return shapes_with(model, leaves)

    assert jax.eval_shape(run, own).tokens.shape == (2, 1, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number, 1 to 2147483647"),
        ({"max_new_tokens": 2**31}, "max_new_tokens=2147483648: must be a whole number, 1 to"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5: must be a whole number"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4': must be a whole number"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens=None: must be a whole"),
        ({"max_model_len": 0}, "max_model_len=0: must be a whole number, 1 to"),
        ({"num_blocks": -1}, "num_blocks=-1: must be a whole number, 1 to"),
        ({"policy": [1]}, r"policy=\[1\]: must be one of prefill_first, decode_first"),
        ({"model": None}, "model=None: must be a model, such as the decoder"),
        ({"num_return_sequences": True}, "num_return_sequences=True"),
        ({"num_logprobs": -1}, "num_logprobs=-1"),
        ({"pad_token_id": 1.5}, "pad_token_id=1.5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        GenerateConfig(**({"model": FakeModel(), "max_new_tokens": 4} | sizes))


def test_a_length_that_the_model_was_not_made_for_is_refused(decoder):
    longest = MODEL.max_position_embeddings
    GenerateConfig(decoder[0], 4, max_model_len=longest)
    with pytest.raises(ValueError, match=f"max_model_len={longest + 1}: this model was made for"):
        GenerateConfig(decoder[0], 4, max_model_len=longest + 1)


def test_sizes_follow_from_the_prompts(decoder):
    config = GenerateConfig(decoder[0], 100, num_return_sequences=4)
    engine = config.engine_config(num_prompts=3, prompt_width=28)
    assert (engine.max_num_requests, engine.max_num_seqs) == (12, 12)
    assert (engine.max_model_len, engine.num_blocks) == (128, 12 * 8)
    # No further than the model was made for.
    assert config.engine_config(100, 2000).max_model_len == MODEL.max_position_embeddings
    assert config.engine_config(100, 2000).max_num_seqs == 64
