"""``oxidize-jax save``: keep a model as it is in memory, so that it starts quickly."""

from __future__ import annotations

import argparse

from oxidize_jax.cli.models import announce_fetch
from oxidize_jax.cli.parser import DTYPES, Parser, filled
from oxidize_jax.cli.terminal import Status

_EXAMPLES = """\
examples:
  oxidize-jax save smollm2-135m-instruct smollm2-int8 --dtype int8
  oxidize-jax generate --model smollm2-int8 "What is the capital of France?\""""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "save",
        help="keep a model as it is in memory, so that it starts quickly",
        description="Load a model, with its weights in the type they are to have, and save it "
        "with its tokenizer to a new folder, which --model takes. Prints the folder's path.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "model",
        type=filled,
        metavar="MODEL",
        help="a built-in name, a .gguf file, a Hugging Face folder or repo id",
    )
    parser.add_argument("folder", type=filled, metavar="FOLDER", help="new or empty")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the weights (default: auto)"
    )
    parser.add_argument(
        "--tokenizer", type=filled, metavar="PATH", help="take the tokenizer from here instead"
    )
    parser.set_defaults(run=run_save, parser=parser)


def run_save(args: argparse.Namespace) -> int:
    """Load, save and print the path."""
    import jax.numpy as jnp

    from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
    from oxidize_jax.checkpoints.resolve import resolve_model
    from oxidize_jax.checkpoints.save import (
        check_folder,
        check_space,
        import_orbax,
        save_model,
    )
    from oxidize_jax.options import Options, weight_dtype
    from oxidize_jax.startup import find_tokenizer, load_tokenizer, with_saved_dtype

    # Before minutes of loading.
    target = check_folder(args.folder)
    import_orbax()
    options = Options(model=args.model, dtype=args.dtype, tokenizer=args.tokenizer)
    options = with_saved_dtype(options)
    status = Status()
    announce_fetch(args.model, status)
    resolved = resolve_model(options.model)
    tokenizer = find_tokenizer(options, resolved)
    load_tokenizer(tokenizer)  # nothing is saved that could not be run
    dtype = jnp.dtype(weight_dtype(options))
    info = describe_checkpoint(resolved.path)
    check_space(target, getattr(info, f"bytes_{dtype.name}"))
    checkpoint = load_checkpoint(resolved.path, dtype, progress=status.watched)
    print(save_model(args.folder, checkpoint.config, checkpoint.params, tokenizer))
    return 0
