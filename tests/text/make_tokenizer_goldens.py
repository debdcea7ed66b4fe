"""Records what transformers, tokenizers and sentencepiece say, for the tests beside this file.

Not run by the tests. It needs `pip install transformers sentencepiece jinja2 protobuf` and no
network:  python tests/text/make_tokenizer_goldens.py

byte_level.json     a small byte-level BPE vocabulary and its ids by GPT2Tokenizer, Qwen2Tokenizer
                    and transformers' own reading of GGUF metadata (pre = llama-bpe)
sentencepiece.json  two small SentencePiece BPE models (with and without the space prefix) and
                    the ids and texts that the sentencepiece library itself gives
llama_folder.json   the first of those models as the tokenizer.json that transformers makes of it
                    (legacy, the rule for Llama 2), with its ids round special tokens
chat.json           texts that transformers renders from chat templates
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import SpmConverter
from transformers.integrations.gguf import convert_gguf_tokenizer

HERE = Path(__file__).parent
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "In 1984 there were 365 days; in 2024, 366. Pi is 3.14159265 and e is 2.71828.",
    "Thé café était fermé — naïve façade, Ångström, señor, Straße und Größe.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)",
    "東京は日本の首都です。 Москва — столица России. القاهرة هي عاصمة مصر.",
    "I'm sure they're right: we've said it'll do, he'd agree. HE'LL SAY IT'S FINE.",
    "tabs\t\tand  double  spaces   triple\n\n\nnew lines\r\nwindows\r\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]
TEXTS = [
    "",
    " ",
    "   ",
    "\n\n\n",
    "\t \t\n \r\n x",
    "G",
    " G",
    "  G ",
    "Hello, world! The quick brown fox.",
    "1, 1, 2, 3, 5, 8, 13 and 1234567 or ½ ² \uff13 Ⅷ",
    "I'm, it's, THEY'RE, we'Ll 'tis 'S",
    "café cafe\u0301 naïve Ångström",
    "日本の首都は東京です",
    "القاهرة هي عاصمة مصر",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "\x01\x07\x1b[0m \x7f \u200b\u00a0\u3000end",
    "def f(x):\n    return x**2  # square\n\n\nprint(f(3))\n",
    "a" * 40 + " " * 20 + "\n" * 10 + "9" * 10,
    "price: $3.50+20% <= €7 ~ £2 ^ `x` |y|",
]
SPECIAL_TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "x<|im_end|>G <|im_end|> G<|endoftext|>",
    "<think>hm</think> so<|im_end",
]


def main() -> None:
    write("byte_level.json", byte_level())
    write("sentencepiece.json", {"prefix": spm(True), "no_prefix": spm(False)})
    write("llama_folder.json", llama_folder())
    write("chat.json", chat())


def write(name: str, content: object) -> None:
    versions = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    versions += f", sentencepiece {sentencepiece.__version__}"
    text = json.dumps({"reference": versions, "data": content}, ensure_ascii=True, indent=0)
    (HERE / "goldens" / name).write_text(text + "\n", encoding="ascii")


def byte_level() -> dict:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [tuple(merge) for merge in model["merges"]]
    types = [3 if token in SPECIAL else 1 for token in tokens]
    tokens, types = tokens + USER_DEFINED, types + [4] * len(USER_DEFINED)
    vocab = {token: i for i, token in enumerate(tokens)}
    metadata = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": "llama-bpe",
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in merges],
    }
    llama_bpe, _ = convert_gguf_tokenizer("llama", metadata)
    backends = {
        "gpt-2": with_added(transformers.GPT2Tokenizer(vocab, merges)),
        "qwen2": with_added(transformers.Qwen2Tokenizer(vocab, merges)),
        "llama-bpe": llama_bpe,
    }
    cases = {
        pre: [[text, *round_trip(backend, text)] for text in TEXTS + SPECIAL_TEXTS]
        for pre, backend in backends.items()
    }
    return {"tokens": tokens, "types": types, "merges": metadata["merges"], "cases": cases}


def with_added(tokenizer) -> tokenizers.Tokenizer:
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    return backend


def round_trip(backend: tokenizers.Tokenizer, text: str) -> tuple[list[int], str]:
    ids = backend.encode(text, add_special_tokens=False).ids
    return ids, backend.decode(ids, skip_special_tokens=True)


def spm(add_dummy_prefix: bool) -> dict:
    model = spm_model(add_dummy_prefix)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    cases = [[text, (ids := processor.encode(text)), processor.decode(ids)] for text in TEXTS]
    return {
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "types": [piece.type for piece in proto.pieces],
        "cases": cases,
    }


def spm_model(add_dummy_prefix: bool) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        control_symbols=["<|im_end|>"],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def llama_folder() -> dict:
    proto = sentencepiece_model_pb2.ModelProto.FromString(spm_model(True))
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    backend = SpmConverter.build_tokenizer_from_spm_proto(proto, vocab, legacy=True)
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    texts = ["G", " G", "<s>G", "<s> G", "<|im_end|>G", "<|im_end|> G", "a<|im_end|>\n<s>G</s>"]
    cases = [[text, *round_trip(backend, text)] for text in texts + TEXTS]
    return {"tokenizer": json.loads(backend.to_str()), "cases": cases}


CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'none' %}
{%- endif %}
    {% if tools is not none %}
tools: {{ tools | tojson(indent=2) }}
    {% endif %}
{{ '<<' ~ system ~ '>>' }}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
        {{- message['content'] + eos_token }}
        {%- endgeneration %}
        {%- continue %}
    {%- endif %}
[INST] {{ message['content'] }} [/INST]
{%- endfor %}
{{ documents }}{{ pad_token }}{{ messages[-1] | tojson }}
{%- if add_generation_prompt %} > {% endif %}
"""
TALK = [
    {"role": "system", "content": " Be <brief> & 'kind'. "},
    {"role": "user", "content": "Qu'est-ce que c'est \"là\"?\n"},
    {"role": "assistant", "content": "Rien 😀"},
    {"role": "user", "content": "Ok", "name": "zoé"},
]
TOOL = {"type": "function", "function": {"name": "f<x>", "parameters": {"é": [1, None, True]}}}


def chat() -> list[dict]:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    cases = []
    for template in (CHATML, LLAMA_LIKE):
        for messages in (TALK, TALK[1:2]):
            for extra in ({}, {"tools": [TOOL]}):
                for prompt in (True, False):
                    text = tokenizer.apply_chat_template(
                        messages,
                        chat_template=template,
                        tokenize=False,
                        add_generation_prompt=prompt,
                        **extra,
                    )
                    cases.append(
                        {
                            "template": template,
                            "messages": messages,
                            "extra": extra,
                            "add_generation_prompt": prompt,
                            "text": text,
                        }
                    )
    return cases


if __name__ == "__main__":
    main()
