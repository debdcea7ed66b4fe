"""oxidize-jax save."""

from __future__ import annotations

import sys

import pytest

from oxidize_jax.checkpoints.load import describe_checkpoint


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_model_is_saved_described_and_saved_again(run, tiny, tmp_path, dtype):
    folder = tmp_path / "m"
    status, out, err = run("save", str(tiny), str(folder), "--dtype", dtype)
    assert (status, out, err) == (0, f"{folder}\n", "")
    assert describe_checkpoint(folder).config == describe_checkpoint(tiny).config
    status, out, err = run("models", str(folder))
    assert (status, err) == (0, "")
    rows = " ".join(out.split())
    assert f"saved, weights in {dtype}" in rows
    assert "supported yes" in rows
    # Without a dtype it is the saved one.
    assert run("save", str(folder), str(tmp_path / "again"))[0] == 0
    first, again = (tmp_path / name / "oxidize_jax.json" for name in ("m", "again"))
    assert first.read_text() == again.read_text()


def test_what_cannot_be_saved_is_said_in_a_line(run, tiny, tmp_path, monkeypatch):
    def error(*arguments):
        status, out, err = run("save", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    assert "is there already" in error(str(tiny), str(tiny))
    assert "no such file" in error(str(tmp_path / "none"), str(tmp_path / "m"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny / name).read_bytes())
    assert "tokenizer.json: not found" in error(str(bare), str(tmp_path / "m"))
    assert run("save", str(tiny), str(tmp_path / "saved"), "--dtype", "int8")[0] == 0
    wrong = error(str(tmp_path / "saved"), str(tmp_path / "m"), "--dtype", "float32")
    assert "saved with weights in int8, but dtype=float32" in wrong
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "pip install 'oxidize_jax[orbax]'" in error(str(tiny), str(tmp_path / "m"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "saved"]
