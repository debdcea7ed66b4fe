"""BeamSearchParams: what a user asks of a beam search, checked before it can cost anything."""

from __future__ import annotations

import dataclasses

from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.params import MAX_N, _between, _integer

MAX_LENGTH_PENALTY = 5.0
"""Either way: with more, the score of a long text leaves the range of float32."""

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """How a beam search runs. Names are vLLM's, ``early_stopping`` and what all of it means are
    transformers' (``generate(num_beams=..., do_sample=False)``).

    Every field is checked on construction; a ValueError names the field, the value, what is
    allowed and what to do.
    """

    beam_width: int
    """k: sequences that are kept, and returned; 1 to :data:`~oxidize_jax.sampling.params.MAX_N`.
    At most ``max_num_seqs`` of the engine."""
    max_tokens: int
    """Most new tokens of a sequence; less where ``max_model_len`` has no room for as many."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence ids: every sequence has ``max_tokens``."""
    temperature: float = 0.0
    """0 or 1, which say the same: nothing is drawn, and log probabilities are the model's own.
    In vLLM too no other number changes what is found; here it is refused."""
    length_penalty: float = 1.0
    """A sequence of n new tokens scores ``sum of logprobs / n ** length_penalty``: above 0 the
    longer ones gain, below 0 the shorter. At most :data:`MAX_LENGTH_PENALTY` either way."""
    early_stopping: bool | str = False
    """When a search ends that has found k sequences that end. True: at once. False: when the best
    that goes on would not be among them if it ended now. ``"never"``: when it could not be even
    at its best, which for a ``length_penalty`` above 0 is at ``max_tokens``."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, high in (("beam_width", MAX_N), ("max_tokens", _INT32_MAX)):
            set_(self, name, _integer(name, getattr(self, name), 1, high))
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={short_repr(value)}: must be true or false.")
        hint = "a beam search draws nothing; use 0, or SamplingParams to sample"
        temperature = _between("temperature", self.temperature, 0, 1, hint)
        if temperature not in (0.0, 1.0):
            raise ValueError(f"temperature={short_repr(self.temperature)}: must be 0 or 1; {hint}.")
        set_(self, "temperature", temperature)
        most, hint = MAX_LENGTH_PENALTY, "use 1 for the mean logprob, 0 for their sum"
        penalty = _between("length_penalty", self.length_penalty, -most, most, hint)
        set_(self, "length_penalty", penalty)
        early = self.early_stopping
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            raise ValueError(f"early_stopping={short_repr(early)}: must be True, False or 'never'.")
