"""What a decoder looks like, apart from its weights."""

from __future__ import annotations

import dataclasses

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
"""Kinds of :class:`RopeScaling`."""
LAYER_ROPES = ("global", "local", "none")
"""Which rotary embedding a layer has; ``none`` is NoPE."""
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""``gelu_tanh`` is GELU by its tanh approximation (``gelu_new``, ``gelu_pytorch_tanh``)."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    Fields and their meaning are those of Hugging Face's ``rope_parameters``; a kind reads only
    its own. ``factors`` divides each frequency by one number (a GGUF's ``rope_freqs``).
    ``longrope`` does so by ``factors`` or, for sequences past
    ``original_max_position_embeddings``, by ``long_factors``. ``dynamic`` begins where a
    model's own context ends, hence changes nothing here: no sequence is longer than that.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    """What cosine and sine are multiplied by."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind={self.kind!r}: must be one of {', '.join(ROPE_KINDS)}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. Hashable: it is a static argument of the step.

    Sizes are counts, ``rms_norm_eps`` and ``rope_theta`` as in Hugging Face's
    ``LlamaConfig``. ``head_dim`` need not be ``hidden_size // num_heads``. The defaults are
    Llama's; what other families do otherwise is one field each.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    """Of whichever norm the model has."""
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    architecture: str = "llama"
    """Name of the family in :mod:`oxidize_jax.checkpoints.families`."""
    output_bias: bool | None = None
    """Bias of the projection after attention; None: as ``attention_bias``."""
    rope_scaling: RopeScaling = RopeScaling()
    rotary_dim: int | None = None
    """Numbers of a head that rotate, the first ones; None: all."""
    local_rope_theta: float = 10_000.0
    """Of layers whose rope is ``local``; it is never scaled."""
    layer_ropes: tuple[str, ...] = ()
    """For each layer one of :data:`LAYER_ROPES`; empty: all ``global``."""
    layer_windows: tuple[int, ...] = ()
    """For each layer how many keys a token sees, itself among them; 0: all. Empty: all see all."""
    longest_sequence: int | None = None
    """Tokens of the longest sequence it will run on, which ``longrope`` chooses its factors by;
    None: ``max_position_embeddings``."""
    learned_positions: bool = False
    """A vector for each position is added to the embeddings (GPT-2)."""
    embedding_scale: float = 1.0
    pre_norms: bool = True
    """Norms of what attention and MLP read."""
    post_norms: bool = False
    """Norms of what they give, before it is added."""
    layer_norm: bool = False
    """Norms are LayerNorms with biases, not RMSNorms."""
    qk_norm: str = "none"
    """RMSNorm of queries and keys: ``head`` by head, or over their ``full`` width."""
    gated_mlp: bool = True
    num_experts: int = 0
    """Gated MLPs in each layer, of ``intermediate_size`` each; 0: one MLP, and no router."""
    num_experts_per_token: int = 0
    """How many of them the router chooses for a token."""
    norm_topk_prob: bool = True
    """Whether the weights of the chosen ones are made to add up to one."""
    activation: str = "silu"
    attention_scale: float | None = None
    """What scores are multiplied by; None: ``head_dim ** -0.5``."""
    attention_softcap: float = 0.0
    """Scores are ``c * tanh(score / c)``; 0: as they are."""
    final_softcap: float = 0.0
    """The same for logits."""

    def __post_init__(self) -> None:
        self._check_sizes()
        choices = {"qk_norm": ("none", "head", "full"), "activation": ACTIVATIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}."
                )
        for name in ("layer_ropes", "layer_windows"):
            count = len(getattr(self, name))
            if count not in (0, self.num_layers):
                raise ValueError(
                    f"{name} names {count} layers, but num_layers={self.num_layers}: name all or "
                    "none."
                )
        for kind in self.layer_ropes:
            if kind not in LAYER_ROPES:
                raise ValueError(
                    f"layer_ropes has {kind!r}: must be one of {', '.join(LAYER_ROPES)}."
                )
        if any(window < 0 for window in self.layer_windows):
            raise ValueError(f"layer_windows={self.layer_windows}: must be 0 (all keys) or more.")
        if self.rotated_dim % 2 or not 0 < self.rotated_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim={self.rotated_dim}: must be even, and at most head_dim="
                f"{self.head_dim}."
            )
        self._check_rope_factors()
        self._check_experts()

    def _check_experts(self) -> None:
        chosen = self.num_experts_per_token
        if not (1 <= chosen <= self.num_experts or chosen == self.num_experts == 0):
            raise ValueError(
                f"num_experts_per_token={chosen}: must be from 1 to num_experts="
                f"{self.num_experts}, or both 0."
            )
        if self.num_experts and (self.mlp_bias or not self.gated_mlp):
            raise ValueError(
                f"num_experts={self.num_experts} with mlp_bias={self.mlp_bias} and gated_mlp="
                f"{self.gated_mlp}: experts are gated and have no biases."
            )

    def _check_rope_factors(self) -> None:
        kind, scaling = self.rope_scaling.kind, self.rope_scaling
        lists = {"factors": ["factors"], "longrope": ["factors", "long_factors"]}
        for name in lists.get(kind, []):
            count = len(getattr(scaling, name))
            if count != self.rotated_dim // 2:
                raise ValueError(
                    f"rope {name}: there are {count}, but {self.rotated_dim} numbers of a head "
                    f"rotate in pairs: there must be {self.rotated_dim // 2}."
                )

    def _check_sizes(self) -> None:
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
    def has_output_bias(self) -> bool:
        """Whether the projection after attention has a bias."""
        return self.attention_bias if self.output_bias is None else self.output_bias

    @property
    def rotated_dim(self) -> int:
        """Numbers of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def ropes(self) -> tuple[str, ...]:
        """The rope of each layer."""
        if self.learned_positions:
            return ("none",) * self.num_layers
        return self.layer_ropes or ("global",) * self.num_layers

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.longest_sequence or self.max_position_embeddings

    def for_sequences(self, length: int) -> ModelConfig:
        """The same model, to run on sequences of up to ``length`` tokens.

        Only a ``longrope`` depends on it. Hugging Face chooses its factors anew when a sequence
        outgrows them, and then forgets its cache; here what is in the cache stays good, since
        the choice is made once for all sequences, as vLLM and llama.cpp do.
        """
        if self.rope_scaling.kind != "longrope":
            return self
        return dataclasses.replace(self, longest_sequence=length)

    @property
    def query_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def num_parameters(self) -> int:
        """Parameters in the checkpoint; a tied head is counted once."""
        e, f, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        norm = 2 * e if self.layer_norm else e
        layer = e * q + 2 * e * kv + q * e
        layer += (3 if self.gated_mlp else 2) * e * f * max(1, self.num_experts)
        layer += self.num_experts * e  # the router
        layer += (q + 2 * kv) if self.attention_bias else 0
        layer += e if self.has_output_bias else 0
        layer += {"none": 0, "head": 2 * d, "full": q + kv}[self.qk_norm]
        layer += ((2 if self.gated_mlp else 1) * f + e) if self.mlp_bias else 0
        layer += 2 * norm * (self.pre_norms + self.post_norms)
        tables = 1 if self.tie_word_embeddings else 2
        positions = self.max_position_embeddings * e if self.learned_positions else 0
        return tables * self.vocab_size * e + positions + norm + self.num_layers * layer
