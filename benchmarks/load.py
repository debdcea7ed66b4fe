"""Time and peak memory of loading a model, from each format, in one run.

    python benchmarks/load.py --dtype float32 bfloat16 int8 --rounds 5 --json out.json \\
        --transformers VENV/bin/python

* gguf: the built-in model, or --model, as it is;
* sharded: the weights it decodes to, in float32, as a Hugging Face folder of three shards;
* saved: what `oxidize-jax save` makes of it, in the type of the weights;
* transformers: `from_pretrained` on the folder of shards.

Every load is a process of its own, all in turn, round after round; the files are in the
system's memory. Time is that of the loading function alone, with all packages it needs
imported, and until all numbers are there (transformers maps files to memory: every parameter
is read once, into a sum). Memory is how much the process's peak rises meanwhile, over the
bytes of the parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from oxidize_jax.bench import environment
from oxidize_jax.checkpoints.load import load_checkpoint
from oxidize_jax.checkpoints.mapping import stored_names
from oxidize_jax.checkpoints.resolve import resolve_model
from oxidize_jax.checkpoints.save import save_model

SHARDS = 3

PEAK = """
import json, sys, time
path, dtype = sys.argv[1:]
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
"""
OURS = (
    PEAK
    + """
import jax, jax.numpy as jnp, gguf
from gguf.quants import dequantize
from oxidize_jax.checkpoints.load import load_checkpoint
jnp.zeros((1,), jnp.float32).block_until_ready()
before, begun = peak(), time.perf_counter()
params = jax.block_until_ready(load_checkpoint(path, dtype).params)
seconds = time.perf_counter() - begun
size = sum(values.nbytes for values in params.values())
print(json.dumps({"seconds": seconds, "memory": (peak() - before) / size}))
"""
)
THEIRS = (
    PEAK
    + """
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
before, begun = peak(), time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
total = sum(float(values.detach().sum()) for values in model.parameters())
seconds = time.perf_counter() - begun
size = sum(values.nbytes for values in model.parameters())
print(json.dumps({"seconds": seconds, "memory": (peak() - before) / size}))
"""
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a GGUF file")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", metavar="PYTHON", help="an environment that has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every load to it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(prepare(args, Path(scratch)))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name, _ in cases}
        for _ in range(args.rounds):
            for name, command in cases:
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, results in runs.items():
        seconds = statistics.median(result["seconds"] for result in results)
        memory = statistics.median(result["memory"] for result in results)
        print(f"{name:<24} {seconds:7.2f} s {memory:7.2f} x parameters")
    if args.json:
        record = {"environment": environment.describe(), "runs": runs}
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def prepare(args: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Write the formats; the name and the command of each load."""
    source = resolve_model(args.model).path
    shards = write_shards(source, scratch / "shards")
    for dtype in args.dtype:
        loaded = load_checkpoint(source, dtype)
        saved = save_model(scratch / dtype, loaded.config, loaded.params, source)
        del loaded
        for name, path in (("gguf", source), ("sharded", shards), ("saved", saved)):
            yield f"{name} {dtype}", [sys.executable, "-c", OURS, str(path), dtype]
        if args.transformers and dtype != "int8":
            yield f"transformers {dtype}", [args.transformers, "-c", THEIRS, str(shards), dtype]


def write_shards(source: Path, folder: Path) -> Path:
    """The weights in ``source`` as a Hugging Face folder in float32."""
    from peers.make_hf_folder import config_json
    from safetensors.numpy import save_file

    checkpoint = load_checkpoint(source, np.float32)
    tensors = {}
    for parameter, names in stored_names(checkpoint.config, "hf").items():
        values = np.asarray(checkpoint.params[parameter])
        layers = values if parameter.startswith("layers.") else values[None]
        tensors |= {n: np.ascontiguousarray(v) for n, v in zip(names, layers, strict=True)}
    folder.mkdir()
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        names = list(tensors)[shard::SHARDS]
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_json(checkpoint.config)))
    return folder


if __name__ == "__main__":
    sys.exit(main())
