"""oxidize-jax generate with --json-schema, --regex, --choice and --grammar."""

import json

import jsonschema
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture
def structured(run, config):
    """``structured(*argv)``: the text that is printed."""

    def call(*argv):
        status, out, err = run("generate", "--config", config, "--raw", "once", *argv)
        assert (status, err) == (0, "")
        return out.removesuffix("\n")

    return call


def test_each_option(structured, tmp_path):
    jsonschema.validate(json.loads(structured("--json-schema", json.dumps(SCHEMA))), SCHEMA)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    jsonschema.validate(json.loads(structured("--json-schema", file)), SCHEMA)
    assert structured("--regex", "x[0-9]y")[::2] == "xy"
    assert structured("--choice", "left", "--choice", "right") in ("left", "right")
    file = tmp_path / "grammar.lark"
    file.write_text('start: "(" inner ")"\ninner: "a" | "b"\n')
    assert structured("--grammar", file) in ("(a)", "(b)")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice: give one of them"),
        (["--json-schema", "{"], "--json-schema='{': not a JSON schema"),
        (["--json-schema", "nowhere.json"], "--json-schema: cannot read 'nowhere.json'"),
        (["--grammar", "nowhere.lark"], "--grammar: cannot read 'nowhere.lark'"),
        (["--choice", ""], "--choice='': must be a string, not empty"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos=True: structured_outputs ends"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(refused, argv, message, monkeypatch):
    monkeypatch.setattr("oxidize_jax.cli.generate._load", lambda *_: pytest.fail("loads"))
    assert message in refused("generate", "--raw", "once", *argv)


def test_a_missing_package_is_named(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refused("generate", "--raw", "once", "--regex", "a")
    assert message.startswith("--regex: llguidance is not installed: pip install")
