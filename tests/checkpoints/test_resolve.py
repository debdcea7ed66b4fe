from __future__ import annotations

import sys

import huggingface_hub
import pytest
from write_checkpoints import random_params, write_gguf, write_hf_folder

from oxidize_jax.checkpoints import builtin
from oxidize_jax.checkpoints.builtin import BUILTIN_MODELS
from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.resolve import ResolvedModel, resolve_model, saved_folder
from oxidize_jax.options import Options
from oxidize_jax.startup import with_saved_dtype


@pytest.fixture
def gguf_file(tmp_path, config):
    return write_gguf(tmp_path / "tiny-llama.gguf", config, random_params(config))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """A test that reaches for the hub without saying so fails."""

    def fail(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


def test_gguf_file_as_text_and_as_path(gguf_file, monkeypatch):
    expected = ResolvedModel("gguf", gguf_file)
    assert resolve_model(gguf_file) == resolve_model(str(gguf_file)) == expected
    monkeypatch.setenv("HOME", str(gguf_file.parent))
    assert resolve_model("~/tiny-llama.gguf") == expected
    monkeypatch.chdir(gguf_file.parent)
    assert resolve_model("tiny-llama.gguf").path.resolve() == gguf_file


def test_folder_with_config_or_with_one_gguf(tmp_path, config, gguf_file):
    folder = write_hf_folder(tmp_path / "hf", config, random_params(config))
    assert resolve_model(folder) == ResolvedModel("folder", folder)
    assert resolve_model(tmp_path) == ResolvedModel("gguf", gguf_file)
    (tmp_path / "b.gguf").write_bytes(gguf_file.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 \.gguf files: name one \(b\.gguf, tiny"):
        resolve_model(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json and no \.gguf"):
        resolve_model(str(tmp_path / "empty"))


def test_folder_named_like_a_repo_id_is_a_folder(tmp_path, config, monkeypatch):
    folder = write_hf_folder(tmp_path / "org" / "name", config, random_params(config))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").path.resolve() == folder


def test_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(32))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "model", ["org/name.gguf", "./org/name", "~/name", "/org/name", "../name", "a/b.safetensors"]
)
def test_what_looks_like_a_path_is_never_a_repo_id(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve_model(model)


def test_missing_file_names_what_is_near(gguf_file):
    wrong = gguf_file.with_name("tinyllama.gguf")
    with pytest.raises(CheckpointError, match=r"no such file.*Did you mean '.*tiny-llama\.gguf'"):
        resolve_model(wrong)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("x" * 5000, r"model='x+'\.\.\. \(5000 characters\): "),
        ("/" + "x" * 5000 + ".gguf", r"model='/x+'\.\.\. \(5006 characters\): "),
        ("", "a model name is empty"),
        ("/dev/null", "model='/dev/null': is not a regular file or a folder"),
        ("~no-such-user-here/m.gguf", "no such user"),
    ],
)
def test_names_that_no_model_can_have_are_one_line(model, named):
    with pytest.raises(CheckpointError, match=named) as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)
    assert "Did you mean" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_misspelt_builtin_names_the_right_one():
    with pytest.raises(CheckpointError, match="Did you mean 'smollm2-135m-instruct'"):
        resolve_model("smollm2-135m-instuct")
    with pytest.raises(CheckpointError, match=r"not a built-in model.*org/name") as caught:
        resolve_model("qqq zzz")
    assert "Did you mean" not in str(caught.value)


def test_builtin_name_is_fetched(gguf_file, monkeypatch):
    asked = []

    def fetch(name, *, allow_download):
        asked.append((name, allow_download))
        return gguf_file

    monkeypatch.setattr("oxidize_jax.checkpoints.resolve.fetch_builtin", fetch)
    name = "smollm2-135m-instruct"
    assert name in builtin.BUILTIN_MODELS
    assert resolve_model(name) == ResolvedModel("gguf", gguf_file)
    resolve_model(name, allow_download=False)
    assert asked == [(name, True), (name, False)]


@pytest.mark.parametrize("allow_download", [True, False])
def test_repo_id_is_fetched_without_other_formats(tmp_path, config, monkeypatch, allow_download):
    folder = write_hf_folder(tmp_path, config, random_params(config))
    seen = {}

    def snapshot_download(repo_id, **options):
        seen.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    resolved = resolve_model("org/na.me-1", allow_download=allow_download)
    assert resolved == ResolvedModel("folder", folder)
    assert seen["repo_id"] == "org/na.me-1"
    assert seen["local_files_only"] == (not allow_download)
    patterns = {key: seen[key] for key in ("allow_patterns", "ignore_patterns")}
    listed = ["config.json", "model.safetensors", "chat_template.jinja", "original/params.json"]
    listed += ["model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin"]
    kept = list(huggingface_hub.utils.filter_repo_objects(listed, **patterns))
    assert kept == [listed[0], listed[1], listed[2], listed[4]]


def test_hub_failure_is_one_line(monkeypatch):
    def offline(repo_id, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache\nmore text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"'org/name'.*not in the cache") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_hub_package_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'oxidize_jax\[hub\]'"):
        resolve_model("org/name")


def test_a_saved_model_named_like_a_built_in_one_is_found_by_its_path_alone(
    tmp_path, gguf_file, monkeypatch
):
    name = next(iter(BUILTIN_MODELS))
    folder = tmp_path / name
    folder.mkdir()
    (folder / "oxidize_jax.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "oxidize_jax.checkpoints.resolve.fetch_builtin", lambda name, allow_download: gguf_file
    )
    for model in (name, f"./{name}", str(folder), folder, str(gguf_file), "no/such"):
        kind = "gguf" if model == "no/such" else resolve_model(model).kind
        assert (saved_folder(model) is not None) == (kind == "saved")
    assert with_saved_dtype(Options(name)).dtype == "auto"
