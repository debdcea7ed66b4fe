"""EngineConfig: every size that fixes a shape, and the policy. Frozen and hashable."""

from __future__ import annotations

import dataclasses
from typing import Any

from oxidize_jax.messages import short_repr
from oxidize_jax.types import BLOCK_SIZE

POLICIES = ("prefill_first", "decode_first")
_INT32_MAX = 2**31 - 1
_DETERMINISTIC_TOKENS = 32
"""Least tokens of a deterministic step, and what their number is a multiple of."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static configuration of the engine; each value is part of the compiled program.

    Names follow vLLM's ``SchedulerConfig`` and ``CacheConfig``.
    """

    max_num_seqs: int = 16
    """S: sequences that may hold KV blocks and run at the same time."""
    max_num_batched_tokens: int = 512
    """Token budget of one step, never exceeded."""
    max_model_len: int = 2048
    """N: longest prompt plus output, in tokens."""
    num_blocks: int = 2048
    """B: physical blocks in the pool."""
    block_size: int = BLOCK_SIZE
    """K: tokens in a block."""
    max_num_requests: int = 64
    """R: request slots on the device (waiting + running + not yet read)."""
    policy: str = "prefill_first"
    """``prefill_first``: prompts take the budget before decodes, so that a new request
    joins at once. ``decode_first``: running sequences never wait for a prompt."""
    enable_prefix_caching: bool = True
    """Share full blocks between requests whose prompts begin alike."""
    prefill_tile: int = 16
    """Q: tokens of one sequence that attend together in a prefill chunk."""
    max_logprobs: int = 5
    """Most alternatives per token that a request may ask for; 0 turns them off."""
    max_stop_token_ids: int = 16
    """Z: most stop ids (end-of-sequence ids included) of one request."""
    max_logit_bias: int = 300
    """Most token ids of one request's ``logit_bias``; each takes 8 bytes of every slot."""
    max_bad_words: int = 32
    """Most token sequences that one request's output must not contain."""
    max_bad_word_tokens: int = 16
    """Longest of them; each takes 4 bytes times this of every slot."""
    token_mask_size: int = 0
    """Tokens that a request may allow or ban: the vocabulary, a bit for each in every slot; with
    0 it can do neither."""
    deterministic: bool = False
    """A request's tokens and log probabilities are the same bits whatever runs beside it, however
    its prompt is cut, preempted or found in the cache. All steps then have one shape, of
    :attr:`step_tokens`, in which every token is computed as a decode is: what a token gets
    depends on the tokens before it, and on nothing else that a step may have otherwise. It
    holds for one machine, one version of JAX, one ``block_size``, ``max_num_seqs`` and
    ``max_model_len``: another shape may add up in another order."""

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            _check_int(name, getattr(self, name), low)
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy={short_repr(self.policy)}: must be one of {', '.join(POLICIES)}."
            )
        for name in ("enable_prefix_caching", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name}={short_repr(getattr(self, name))}: must be true or false."
                )
        if self.num_blocks * self.block_size > _INT32_MAX:
            raise ValueError(
                f"num_blocks={self.num_blocks} x block_size={self.block_size} exceeds "
                f"{_INT32_MAX} slots, the range of a 32-bit slot index: lower num_blocks."
            )
        if self.max_num_requests < self.max_num_seqs:
            raise ValueError(
                f"max_num_requests={self.max_num_requests} is below max_num_seqs="
                f"{self.max_num_seqs}: every running sequence needs a request slot."
            )

    @property
    def blocks_per_seq(self) -> int:
        """M: width of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def token_mask_words(self) -> int:
        """Words of 32 bits in a token mask."""
        return -(-self.token_mask_size // 32)

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step. A deterministic one has ``max_num_seqs``, rounded up: all
        pay for the largest, and so that its size does not go with the budget."""
        if not self.deterministic:
            return self.max_num_batched_tokens
        return -(-self.max_num_seqs // _DETERMINISTIC_TOKENS) * _DETERMINISTIC_TOKENS

    @property
    def token_budget(self) -> int:
        """Tokens that a step may have."""
        return min(self.max_num_batched_tokens, self.step_tokens)

    @property
    def max_prefill_tiles(self) -> int:
        """Most prefill tiles in a step: twice what the budget fills, for short prompts."""
        if self.deterministic:
            return self.step_tokens  # there are none, hence no limit
        tokens = max(self.max_num_batched_tokens, 2 * self.prefill_tile)
        return 2 * -(-tokens // self.prefill_tile)


_LOWEST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "num_blocks": 1,
    "block_size": 1,
    "max_num_requests": 1,
    "prefill_tile": 1,
    "max_logprobs": 0,
    "max_stop_token_ids": 1,
    "max_logit_bias": 0,
    "max_bad_words": 0,
    "max_bad_word_tokens": 1,
    "token_mask_size": 0,
}


def _check_int(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _INT32_MAX:
        raise ValueError(
            f"{name}={short_repr(value)}: must be a whole number from {low} to {_INT32_MAX}."
        )
