"""Text in and out: tokenizer, chat template, incremental detokenizer.

The modules here need `tokenizers` (and `jinja2` for chat templates), so nothing is
imported until a module is named: ``from oxidize_jax.text.tokenizer import Tokenizer``.
"""
