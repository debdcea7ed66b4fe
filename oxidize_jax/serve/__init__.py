"""An OpenAI-compatible HTTP server round one :class:`~oxidize_jax.llm.LLM`.

asyncio stands on one side and one thread that runs the engine on the other; see
:mod:`~oxidize_jax.serve.engine_thread`. Needs the ``serve`` extra.
"""
