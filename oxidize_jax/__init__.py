"""oxidize_jax: an LLM inference engine in JAX whose whole step is a pure function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "FINISH_REASON_NAMES",
    "LENGTH",
    "LLM",
    "POOL_EXHAUSTED",
    "REFUSED",
    "STOPPED",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "GenerateConfig",
    "Generated",
    "Prompts",
    "RequestOutput",
    "Sampling",
    "SamplingParams",
    "ScoreConfig",
    "Scored",
    "StreamDelta",
    "StructuredOutputsParams",
    "__version__",
    "compact_prompts",
    "generate",
    "pad_prompts",
    "request_keys",
    "score",
]

_HOMES = {
    "LLM": "oxidize_jax.llm",
    "SamplingParams": "oxidize_jax.sampling.params",
    "BeamSearchParams": "oxidize_jax.sampling.beam_params",
    "BeamSearchOutput": "oxidize_jax.outputs",
    "StructuredOutputsParams": "oxidize_jax.sampling.structured",
    "EngineConfig": "oxidize_jax.config",
    "RequestOutput": "oxidize_jax.outputs",
    "CompletionOutput": "oxidize_jax.outputs",
    "StreamDelta": "oxidize_jax.outputs",
    "generate": "oxidize_jax.engine.generate",
    "FINISH_REASON_NAMES": "oxidize_jax.engine.generate",
    "REFUSED": "oxidize_jax.engine.generate",
    "STOPPED": "oxidize_jax.scheduler.state",
    "LENGTH": "oxidize_jax.scheduler.state",
    "POOL_EXHAUSTED": "oxidize_jax.scheduler.state",
    "GenerateConfig": "oxidize_jax.engine.generate",
    "Generated": "oxidize_jax.engine.generate",
    "Prompts": "oxidize_jax.engine.inputs",
    "Sampling": "oxidize_jax.engine.inputs",
    "compact_prompts": "oxidize_jax.engine.inputs",
    "pad_prompts": "oxidize_jax.engine.inputs",
    "request_keys": "oxidize_jax.engine.inputs",
    "score": "oxidize_jax.scoring.score",
    "ScoreConfig": "oxidize_jax.scoring.score",
    "Scored": "oxidize_jax.scoring.score",
}

if TYPE_CHECKING:
    from oxidize_jax.config import EngineConfig
    from oxidize_jax.engine.generate import (
        FINISH_REASON_NAMES,
        REFUSED,
        GenerateConfig,
        Generated,
        generate,
    )
    from oxidize_jax.engine.inputs import (
        Prompts,
        Sampling,
        compact_prompts,
        pad_prompts,
        request_keys,
    )
    from oxidize_jax.llm import LLM
    from oxidize_jax.outputs import (
        BeamSearchOutput,
        CompletionOutput,
        RequestOutput,
        StreamDelta,
    )
    from oxidize_jax.sampling.beam_params import BeamSearchParams
    from oxidize_jax.sampling.params import SamplingParams
    from oxidize_jax.sampling.structured import StructuredOutputsParams
    from oxidize_jax.scheduler.state import LENGTH, POOL_EXHAUSTED, STOPPED
    from oxidize_jax.scoring.score import ScoreConfig, Scored, score


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that importing costs nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'oxidize_jax' has no attribute {name!r}")
