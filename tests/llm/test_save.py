"""LLM.save, and an LLM made of what it wrote."""

from pathlib import Path

import numpy as np
import pytest

from oxidize_jax import LLM, SamplingParams
from oxidize_jax.checkpoints.load import load_checkpoint

PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=2),
    SamplingParams(temperature=1, max_tokens=6, seed=3, logprobs=2),
]


@pytest.fixture(scope="module")
def restored(llm, make_llm, tmp_path_factory):
    folder = llm.save(tmp_path_factory.mktemp("save") / "model")
    return make_llm(model=str(folder), dtype="auto")


def test_what_was_saved_gives_the_same_tokens_and_logprobs(llm, restored):
    assert restored.options.dtype == "float32"
    assert restored.model_config == llm.model_config
    assert restored.tokenizer.eos_token_ids == llm.tokenizer.eos_token_ids
    expected = llm.generate(["abc", "x y"], PARAMS)
    for ours, theirs in zip(restored.generate(["abc", "x y"], PARAMS), expected, strict=True):
        assert ours.outputs == theirs.outputs
    talk = [{"role": "user", "content": "hello"}]
    assert restored.chat_prompt(talk) == llm.chat_prompt(talk)


def test_what_was_restored_is_saved_again_as_it_is(llm, restored, tmp_path):
    first, second = llm.save(tmp_path / "first"), restored.save(tmp_path / "second")
    names = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(second)) for p in second.rglob("*") if p.is_file())
    for name in names:
        if Path(name).parent.name != "params":  # Orbax writes down when and where
            assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_are_saved_as_a_loader_makes_them(make_llm, tiny_path, tmp_path, dtype):
    """On a CPU those of an engine are views of other types."""
    llm = make_llm(dtype=dtype)
    folder = llm.save(tmp_path / "m")
    saved, loaded = load_checkpoint(folder, dtype).params, load_checkpoint(tiny_path, dtype).params
    assert set(saved) == set(loaded)
    for name, values in loaded.items():
        np.testing.assert_array_equal(np.asarray(saved[name]), np.asarray(values), strict=True)


def test_another_dtype_is_refused_by_name(llm, tmp_path, make_llm):
    folder = llm.save(tmp_path / "m")
    with pytest.raises(ValueError, match="saved with weights in float32, but dtype=int8"):
        LLM(folder, dtype="int8", warm_up=False, progress=False, max_model_len=64)
    with pytest.raises(ValueError, match="is there already"):
        llm.save(folder)


def test_a_save_that_is_not_whole_is_refused_before_anything_is_made(llm, tmp_path):
    folder = llm.save(tmp_path / "m")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer/tokenizer\.json: has 2 bytes"):
        LLM(folder, warm_up=False, progress=False, max_model_len=64)
    (folder / "oxidize_jax.json").unlink()
    with pytest.raises(ValueError, match="not saved to its end"):
        LLM(folder, warm_up=False, progress=False, max_model_len=64)


def test_the_tokenizer_that_was_chosen_is_saved(make_llm, tiny_path, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_path.glob("tokenizer*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    folder = make_llm(tokenizer=str(other)).save(tmp_path / "m")
    assert (folder / "tokenizer" / "chat_template.jinja").is_file()
    assert not (folder / "tokenizer" / "config.json").exists()


def test_a_model_of_a_relative_path_is_saved_from_another_folder(
    make_llm, tiny_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tiny_path.parent)
    llm = make_llm(model=tiny_path.name)
    monkeypatch.chdir(tmp_path)
    assert (llm.save("m") / "tokenizer" / "tokenizer.json").is_file()
    monkeypatch.setattr(llm, "_tokenizer_path", tmp_path)
    with pytest.raises(ValueError, match="the files that the tokenizer came from are gone"):
        llm.save("n")
