"""What a decoder of the Llama family looks like, apart from its weights."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Hashable: it is a static argument of the step.

    Sizes are counts, ``rms_norm_eps`` and ``rope_theta`` as in Hugging Face's
    ``LlamaConfig``. ``head_dim`` need not be ``hidden_size // num_heads``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    architecture: str = "llama"

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in sizes:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}: each kv head serves an equal group of query heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary embedding needs an even size.")

    @property
    def num_parameters(self) -> int:
        """Parameters in the checkpoint; a tied head is counted once."""
        e, q, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        attention = e * q + 2 * e * kv + q * e
        attention += (q + 2 * kv + e) if self.attention_bias else 0
        mlp = 3 * e * self.intermediate_size
        mlp += (2 * self.intermediate_size + e) if self.mlp_bias else 0
        head = 0 if self.tie_word_embeddings else self.vocab_size * e
        return self.vocab_size * e + head + e + self.num_layers * (attention + mlp + 2 * e)
