"""generate: prompts to tokens in one jitted program, for ``jit``, ``scan`` and training loops.

It is the engine's own loop with everything in it: paged KV, continuous batching, prefix
sharing, forks, preemption and sampling, all on the device. The state lives inside the call
and nothing is remembered between calls, so parameters may change from one to the next::

    decoder, params = build(checkpoint.config, checkpoint.params)
    config = GenerateConfig(decoder, max_new_tokens=64, num_return_sequences=4)
    prompts = pad_prompts([[1, 2, 3], [4, 5]], vocab_size=decoder.vocab_size)
    out = generate(params, prompts, Sampling(jax.random.key(0), temperature=0.7), config)
    out.tokens, out.logprobs, out.mask  # [prompts, 4, 64]

Sizes here are N prompts padded to P tokens, n sequences of each, and W new tokens at most.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.config import POLICIES, EngineConfig
from oxidize_jax.engine.inputs import (
    PENALTIES,
    Prompts,
    Sampling,
    check_prompts,
    check_sampling,
    nearest_penalty,
    request_keys,
)
from oxidize_jax.engine.step import EngineState, Model, Params, init_state, run_steps
from oxidize_jax.messages import short_repr
from oxidize_jax.model.functional import Decoder
from oxidize_jax.model.leaves import leaves_of
from oxidize_jax.sampling.token_mask import pack_bits
from oxidize_jax.scheduler.state import LENGTH, NO_TOKEN, POOL_EXHAUSTED, STOPPED, Totals
from oxidize_jax.scheduler.submit import NewRequest, submit_all
from oxidize_jax.types import BLOCK_SIZE, replace, state

REFUSED = 5
"""Finish reason, beside the scheduler's, of a prompt that can never run; see :func:`generate`."""

FINISH_REASON_NAMES = {
    STOPPED: "stopped",
    LENGTH: "length",
    POOL_EXHAUSTED: "pool_exhausted",
    REFUSED: "refused",
}
"""Names of the numbers in :attr:`Generated.finish_reasons`: a stop id was drawn; the most tokens
were made; it alone has outgrown ``num_blocks``; it could never run."""

_INT32_MAX = 2**31 - 1
_LOWEST = {
    "max_new_tokens": 1,
    "num_return_sequences": 1,
    "num_logprobs": 0,
    "pad_token_id": -_INT32_MAX,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
    "num_blocks": 1,
    "block_size": 1,
    "prefill_tile": 1,
}
"""Fields of :class:`GenerateConfig` that are whole numbers, and the least that each may be."""


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What is compiled in: the model and the sizes. Hashable, a static argument.

    Sizes are those of :class:`~oxidize_jax.config.EngineConfig`; request slots, and what is
    left at None, follow from the prompts. Raises ValueError for sizes that cannot be.
    """

    model: Model
    """The static part of a model, such as a :class:`~oxidize_jax.model.functional.Decoder`."""
    max_new_tokens: int
    """W: width of the result, and the most new tokens of a sequence."""
    num_return_sequences: int = 1
    """n: sequences of each prompt. They are forks, so that a prompt is computed once."""
    num_logprobs: int = 0
    """A: likeliest alternatives to report of each token."""
    pad_token_id: int = 0
    """Stands in ``tokens`` behind a sequence's end; may be any number, such as -100."""
    max_num_seqs: int = 64
    """S: most sequences that run at the same time; more wait for a row."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_model_len: int | None = None
    """Longest prompt plus output; default: P + W, within what a Decoder was made for."""
    num_blocks: int | None = None
    """KV blocks; default: enough for ``max_num_seqs`` full sequences. With fewer, sequences
    are preempted when they run out."""
    block_size: int = BLOCK_SIZE
    prefill_tile: int = 16
    policy: str = "prefill_first"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not hasattr(self.model, "forward"):
            raise ValueError(
                f"model={short_repr(self.model)}: must be a model, such as the decoder that "
                f"oxidize_jax.model.functional.build returns."
            )
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "num_blocks"):
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not low <= value <= _INT32_MAX:
                raise ValueError(
                    f"{name}={short_repr(value)}: must be a whole number, {low} to {_INT32_MAX}."
                )
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise ValueError(
                f"policy={short_repr(self.policy)}: must be one of {', '.join(POLICIES)}."
            )
        longest = _longest(self.model)
        if self.max_model_len is not None and self.max_model_len > longest:
            raise ValueError(
                f"max_model_len={self.max_model_len}: this model was made for {longest} tokens; "
                f"lower it."
            )

    def engine_config(
        self,
        num_prompts: int,
        prompt_width: int,
        num_stop_ids: int = 1,
        num_biases: int = 0,
        masks: bool = False,
    ) -> EngineConfig:
        """The engine's configuration for N prompts of P tokens. Raises ValueError."""
        slots = num_prompts * self.num_return_sequences
        seqs = min(self.max_num_seqs, slots)
        length = self.max_model_len
        if length is None:
            length = min(prompt_width + self.max_new_tokens, _longest(self.model))
        config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=min(self.max_num_batched_tokens, slots * length),
            max_model_len=length,
            num_blocks=1,
            block_size=self.block_size,
            max_num_requests=slots,
            policy=self.policy,
            enable_prefix_caching=self.enable_prefix_caching,
            prefill_tile=self.prefill_tile,
            max_logprobs=self.num_logprobs,
            max_stop_token_ids=max(num_stop_ids, 1),
            max_logit_bias=num_biases,
            max_bad_words=0,
            token_mask_size=self.model.vocab_size if masks else 0,
        )
        blocks = seqs * config.blocks_per_seq if self.num_blocks is None else self.num_blocks
        return dataclasses.replace(config, num_blocks=blocks)


@state
class Generated:
    """What came out, for N prompts with n sequences each. Behind its end a sequence holds
    ``pad_token_id``, and zeros for logprobs."""

    tokens: jax.Array
    """i32[N, n, W]: new tokens, without the prompt."""
    logprobs: jax.Array
    """f32[N, n, W]: of each token, by the model's own distribution (temperature 1, no
    filter), as a policy gradient wants them. No gradient flows through them."""
    lengths: jax.Array
    """i32[N, n]: new tokens, 0 .. W."""
    finish_reasons: jax.Array
    """i32[N, n]: ``STOPPED``, ``LENGTH``, ``POOL_EXHAUSTED`` or ``REFUSED``, which this package
    exports; :data:`FINISH_REASON_NAMES` has their names."""
    top_ids: jax.Array
    """i32[N, n, W, A]: the A likeliest tokens, best first."""
    top_logprobs: jax.Array
    """f32[N, n, W, A]"""
    num_cached: jax.Array
    """i32[N, n]: prompt tokens that came from the prefix cache. What a fork shares with the
    first sequence of its prompt is not among them."""
    num_preemptions: jax.Array
    """i32[N, n]"""
    totals: Totals
    """Counters of the whole run: steps, tokens, cached and forked tokens, preemptions, copies."""

    @property
    def mask(self) -> jax.Array:
        """bool[N, n, W]: where there is a token."""
        place = jnp.arange(self.tokens.shape[-1], dtype=jnp.int32)
        return place < self.lengths[..., None]


def _longest(model: Model) -> int:
    """Positions that ``model`` was made for."""
    return model.config.max_position_embeddings if isinstance(model, Decoder) else _INT32_MAX


def generate(
    params: Params,
    prompts: Prompts | tuple[jax.Array, jax.Array],
    sampling: Sampling,
    config: GenerateConfig,
) -> Generated:
    """Complete every prompt, in one program on the device.

    Pure: it may be called as it is (it is jitted, and compiles once for each ``config`` and
    shape of prompts), or inside ``jit``, ``scan`` or a training step, with parameters that
    are traced. A sequence depends on its prompt, key and parameters alone, and not on what
    runs beside it, but for rounding: a step of another shape may add up in another order.
    Not differentiable: gradients stop at ``params``. Nothing is donated.

    Args:
      params: what ``config.model`` reads. For a Decoder, the leaves that
        :func:`~oxidize_jax.model.functional.build` returned, or a trainer's own flat dict
        of the names that it takes, all float32 or all bfloat16 (norms in float32). Train
        the latter: the leaves may hold a layer's weights twice, as views.
      prompts: N of them; :class:`Prompts`, or its two arrays. There may be many more than
        ``max_num_seqs``: the rest wait.
      sampling: see :class:`Sampling`.
      config: static.

    Returns:
      :class:`Generated`. Where lengths and ids are traced nothing can be raised, so what can
      never run has finish reason :data:`REFUSED` and no tokens: a prompt of no tokens, or of
      more than fit into P, ``max_model_len`` - 1 or the pool, and one with an id outside
      the vocabulary. It does not disturb the others.

    Raises:
      ValueError: an array of the wrong shape or type, a Python number out of range, or
        parameters that are not the model's.
    """
    prompts = prompts if isinstance(prompts, Prompts) else Prompts(*prompts)
    check_prompts(prompts)
    sampling = check_sampling(
        sampling, prompts.tokens.shape[0], config.model.vocab_size, config.max_new_tokens
    )
    return _generate(config, params, prompts, sampling)


@partial(jax.jit, static_argnums=0)
def _generate(
    config: GenerateConfig, params: Params, prompts: Prompts, sampling: Sampling
) -> Generated:
    params, prompts, sampling = lax.stop_gradient((params, prompts, sampling))
    prompts = jax.tree.map(lambda x: x.astype(jnp.int32), prompts)
    (num_prompts, width), num_stops = prompts.tokens.shape, sampling.stop_token_ids.shape[-1]
    num_biases, masks = sampling.bias_ids.shape[-1], sampling.token_mask is not None
    engine = config.engine_config(num_prompts, width, num_stops, num_biases, masks)
    new = _requests(config, engine, prompts, sampling)
    valid = _can_run(config, engine, prompts)
    valid = jnp.repeat(valid, config.num_return_sequences)
    runs = valid & (new.max_new_tokens > 0)
    slot = jnp.arange(engine.max_num_requests, dtype=jnp.int32)
    state = init_state(engine, config.model)
    scheduler = submit_all(
        engine, state.scheduler, jnp.where(runs, slot, engine.max_num_requests), new
    )
    state = replace(state, scheduler=scheduler)
    if isinstance(config.model, Decoder):
        params = leaves_of(config.model, params)
    state = run_steps(engine, config.model, params, state, jnp.int32(_INT32_MAX))
    unrun = jnp.where(valid, jnp.int32(LENGTH), jnp.int32(REFUSED))
    reasons = jnp.where(runs, state.scheduler.requests.finish_reason, unrun)
    return _results(config, state, reasons)


def _can_run(config: GenerateConfig, engine: EngineConfig, prompts: Prompts) -> jax.Array:
    """bool[N]: what :func:`~oxidize_jax.scheduler.submit.check_prompt` lets pass."""
    tokens, lengths = prompts.tokens, prompts.lengths
    longest = min(tokens.shape[1], engine.max_model_len - 1, engine.num_blocks * engine.block_size)
    inside = jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]
    known = (tokens >= 0) & (tokens < config.model.vocab_size)
    return (lengths >= 1) & (lengths <= longest) & jnp.all(known | ~inside, axis=1)


def _requests(
    config: GenerateConfig, engine: EngineConfig, prompts: Prompts, sampling: Sampling
) -> NewRequest:
    """One request for each sequence, those of a prompt side by side: R = N * n."""
    (num_prompts, width), n = prompts.tokens.shape, config.num_return_sequences
    slots, length = engine.max_num_requests, engine.max_model_len
    width = min(width, length)

    def each(values: jax.Array, *shape: int) -> jax.Array:
        """``[R, ...]`` from one value, or one for each prompt."""
        return jnp.repeat(jnp.broadcast_to(values, (num_prompts, *shape)), n, axis=0)

    def same(value: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.full((slots,), value, dtype)

    tokens = jnp.zeros((num_prompts, length), jnp.int32)
    tokens = tokens.at[:, :width].set(prompts.tokens[:, :width])
    stops = sampling.stop_token_ids
    stops = jnp.where(stops < 0, NO_TOKEN, stops)
    stops = jnp.pad(
        stops, ((0, 0), (0, engine.max_stop_token_ids - stops.shape[-1])), constant_values=NO_TOKEN
    )
    slot = jnp.arange(slots, dtype=jnp.int32)
    bias_ids = jnp.where(sampling.bias_ids < 0, NO_TOKEN, sampling.bias_ids)
    masks = jnp.zeros((1, 0), jnp.uint32)
    if sampling.token_mask is not None:
        masks = pack_bits(sampling.token_mask)
    return NewRequest(
        tokens=each(tokens, length),
        prompt_len=each(prompts.lengths),
        max_new_tokens=each(jnp.minimum(sampling.max_new_tokens, config.max_new_tokens)),
        min_new_tokens=each(sampling.min_new_tokens),
        arrival=slot,
        priority=same(0),
        stop_ids=each(stops, engine.max_stop_token_ids),
        temperature=each(sampling.temperature),
        top_k=each(sampling.top_k),
        top_p=each(sampling.top_p),
        min_p=each(sampling.min_p),
        typical_p=each(sampling.typical_p),
        **{name: each(nearest_penalty(name, getattr(sampling, name))) for name in PENALTIES},
        bias_ids=each(bias_ids, engine.max_logit_bias),
        bias_values=each(sampling.bias_values, engine.max_logit_bias),
        bad_words=jnp.zeros((slots, 0, engine.max_bad_word_tokens), jnp.int32),
        token_mask=each(masks, engine.token_mask_words),
        has_mask=same(sampling.token_mask is not None, jnp.bool_),
        key=request_keys(sampling.key, num_prompts, n).reshape(slots, 2),
        salt=same(0),
        use_cache=same(True, jnp.bool_),
        fork_of=jnp.where(slot % n == 0, slots, slot - slot % n),
        want_logprobs=same(config.num_logprobs > 0, jnp.bool_),
    )


def _results(config: GenerateConfig, state: EngineState, reasons: jax.Array) -> Generated:
    requests, n, width = (
        state.scheduler.requests,
        config.num_return_sequences,
        config.max_new_tokens,
    )
    lane = jnp.arange(reasons.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.arange(width, dtype=jnp.int32)
    lengths = requests.num_tokens - requests.prompt_len
    made = place < lengths[:, None]

    def of_prompts(values: jax.Array) -> jax.Array:
        return values.reshape(values.shape[0] // n, n, *values.shape[1:])

    def new(values: jax.Array, padding: int = 0) -> jax.Array:
        start = requests.prompt_len[:, None]
        found = values.at[lane, start + place].get(mode="fill", fill_value=0)
        where = made.reshape(made.shape + (1,) * (found.ndim - 2))
        return of_prompts(jnp.where(where, found, jnp.asarray(padding, found.dtype)))

    return Generated(
        tokens=new(requests.tokens, config.pad_token_id),
        logprobs=new(requests.logprobs),
        lengths=of_prompts(lengths),
        finish_reasons=of_prompts(reasons),
        top_ids=new(requests.top_ids),
        top_logprobs=new(requests.top_logprobs),
        num_cached=of_prompts(requests.num_cached),
        num_preemptions=of_prompts(requests.num_preemptions),
        totals=state.scheduler.totals,
    )
