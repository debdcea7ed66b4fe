"""Make tests/goldens/smollm2_score.json: log probabilities of a text by transformers.

Run once, where torch and transformers are installed (neither is needed by the tests)::

    python tests/tools/make_score_goldens.py FOLDER IDS.json > tests/goldens/smollm2_score.json

``FOLDER`` holds the model in float32, as ``benchmarks/peers/make_hf_folder.py`` writes it, and
``IDS.json`` is ``{"text": ..., "token_ids": [...]}``. The golden adds, all in float32:

- ``logprobs``: of each token but the first, in one pass,
- ``ranks``: how many tokens are at least as likely, which is vLLM's rank,
- ``top``: ids and log probabilities of the three likeliest, for every tenth token,
- ``perplexity``: of that pass,
- ``windows``: perplexity and tokens scored with windows of 128 tokens every 64,
- ``embedding``: mean over the tokens of the hidden states behind the final norm.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys

import torch
import transformers

WINDOW, STRIDE, EVERY = 128, 64, 10


def main() -> None:
    folder, source = sys.argv[1:]
    golden = json.loads(pathlib.Path(source).read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = torch.tensor(golden["token_ids"])
    with torch.inference_mode():
        out = model(input_ids=ids[None], output_hidden_states=True)
        logprobs = out.logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:, None])
        top = logprobs.topk(3)
        losses = []
        for begin in range(0, len(ids), STRIDE):
            part = ids[begin : begin + WINDOW]
            scores = model(input_ids=part[None]).logits[0, :-1].log_softmax(-1)
            own = scores.gather(1, part[1:, None])[:, 0]
            # What no window before has scored: it ended WINDOW - STRIDE tokens in.
            losses += (-own[WINDOW - STRIDE - 1 if begin else 0 :]).tolist()
            if begin + WINDOW >= len(ids):
                break
    golden |= {
        "logprobs": [round(x, 5) for x in chosen[:, 0].tolist()],
        "ranks": (logprobs >= chosen).sum(-1).tolist(),
        "top": [
            [[i, round(x, 5)] for i, x in zip(a, b, strict=True)]
            for a, b in zip(
                top.indices[::EVERY].tolist(), top.values[::EVERY].tolist(), strict=True
            )
        ],
        "perplexity": math.exp(-float(chosen.double().mean())),
        "windows": {"perplexity": math.exp(sum(losses) / len(losses)), "tokens": len(losses)},
        "embedding": [round(x, 5) for x in out.hidden_states[-1][0].mean(0).tolist()],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(golden))


if __name__ == "__main__":
    main()
