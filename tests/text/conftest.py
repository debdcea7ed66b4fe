"""Tokenizers small enough to build in a test, and the real one."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from oxidize_jax.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    return Tokenizer.from_gguf(smollm2_path)


@pytest.fixture(scope="session")
def golden():
    """``golden(name)``: what another library recorded (see make_tokenizer_goldens.py)."""
    return lambda name: json.loads((GOLDENS / f"{name}.json").read_text())["data"]


@pytest.fixture(scope="session")
def byte_level_metadata(golden):
    """``byte_level_metadata(pre, **more)``: GGUF metadata of the small byte-level vocabulary."""
    vocabulary = golden("byte_level")

    def make(pre="gpt-2", **more):
        values = {
            "model": "gpt2",
            "pre": pre,
            "tokens": vocabulary["tokens"],
            "token_type": vocabulary["types"],
            "merges": vocabulary["merges"],
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return {f"tokenizer.ggml.{key}": v for key, v in (values | more).items() if v is not None}

    return make


@pytest.fixture(scope="session")
def spm_metadata(golden):
    """``spm_metadata(**more)``: GGUF metadata of a small SentencePiece vocabulary."""

    def make(prefix=True, **more):
        model = golden("sentencepiece")["prefix" if prefix else "no_prefix"]
        values = {
            "model": "llama",
            "tokens": model["tokens"],
            "scores": model["scores"],
            "token_type": model["types"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            "add_space_prefix": prefix,
        }
        return {f"tokenizer.ggml.{key}": v for key, v in (values | more).items() if v is not None}

    return make


@pytest.fixture(scope="session")
def spm(spm_metadata):
    return Tokenizer.from_gguf(spm_metadata())


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata):
    return Tokenizer.from_gguf(byte_level_metadata())


@pytest.fixture
def hf_folder(tmp_path, golden):
    """``hf_folder(adds_bos, **files)``: the small byte-level tokenizer as a model folder.

    Special tokens are those of the vocabulary (ids 0, 1, 2); ``files`` are written as
    JSON under their names (``config={...}``), or as text where they are strings.
    """
    vocabulary = golden("byte_level")

    def make(adds_bos=False, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **files):
        vocab = {token: i for i, token in enumerate(vocabulary["tokens"])}
        merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
            )
        backend.enable_truncation(4)
        backend.enable_padding(length=4)
        backend.save(str(tmp_path / "tokenizer.json"))
        defaults = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        files = {"tokenizer_config": defaults, **files}
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / f"{name}.jinja").write_text(content)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make
