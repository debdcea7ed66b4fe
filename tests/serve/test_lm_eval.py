"""lm-evaluation-harness against the running server, offline, on tasks of this folder.

It is in an environment of its own: set OXIDIZE_JAX_LM_EVAL to its ``lm_eval`` command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMMAND = os.environ.get("OXIDIZE_JAX_LM_EVAL") or shutil.which("lm_eval")
TASKS = Path(__file__).parent / "lm_eval_tasks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="set OXIDIZE_JAX_LM_EVAL to lm_eval's command"),
]


@pytest.fixture
def tasks(tmp_path):
    """The tasks, with the paths of their files."""
    for source in TASKS.glob("*.yaml"):
        text = source.read_text()
        for name in ("choices", "questions"):
            text = text.replace(name.upper(), str(TASKS / f"{name}.jsonl"))
        (tmp_path / source.name).write_text(text)
    return tmp_path


def test_choices_and_generations(llm, served, tasks):
    out = tasks / "out"
    arguments = {
        "model": "tiny",
        "base_url": f"{served.url}/v1/completions",
        "tokenizer_backend": "remote",
        "max_length": llm.config.max_model_len - 1,
        "num_concurrent": 2,
        "max_retries": 1,
        "timeout": 300,
    }
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"HF_HOME": str(tasks / "hf"), "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    run = subprocess.run(
        [COMMAND, "--model", "local-completions", "--model_args", given,
         "--tasks", "tiny_choice,tiny_generate", "--include_path", str(tasks),
         "--output_path", str(out), "--log_samples"],
        capture_output=True, text=True, timeout=900, env=environment, cwd=tasks,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-5000:]
    (results,) = out.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    assert 0 <= scores["tiny_choice"]["acc,none"] <= 1
    assert 0 <= scores["tiny_generate"]["exact_match,none"] <= 1
    (samples,) = out.rglob("samples_tiny_choice_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        doc = sample["doc"]
        pairs = [(doc["question"], choice) for choice in doc["choices"]]
        want = llm.loglikelihood(pairs, use_tqdm=False)
        for response, one in zip(sample["filtered_resps"], want, strict=True):
            assert float(response[0]) == pytest.approx(one.logprob, abs=1e-3)
            assert str(response[1]) == str(one.is_greedy)
