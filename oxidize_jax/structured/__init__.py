"""Structured output: schemas, regular expressions and grammars as token masks."""
