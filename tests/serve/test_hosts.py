"""Names by which a server lets itself be called: no other site's, where it listens at loopback."""

from __future__ import annotations

import pytest
from serving import serving

from oxidize_jax.cli.serve import names
from oxidize_jax.serve.hosts import host_of
from oxidize_jax.serve.settings import ServeSettings

LOCAL = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "a.localhost"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]


@pytest.mark.parametrize("host", LOCAL)
def test_addresses_and_localhost_are_let_in(http, host):
    assert http.get("/version", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/models", "/engine", "/"])
def test_a_name_of_another_site_is_refused(http, host, path):
    answer = http.get(path, headers={"Host": host})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]


def test_names_that_are_allowed(llm):
    with serving(llm, allowed_hosts=("Gpu.example",)) as served, served.http() as http:
        for host, status in (("gpu.example:1", 200), ("localhost", 200), ("evil.example", 403)):
            assert http.get("/version", headers={"Host": host}).status_code == status


def test_elsewhere_than_at_loopback_any_name_will_do(llm):
    with serving(llm, host="0.0.0.0") as served, served.http() as http:
        assert http.get("/version", headers={"Host": "gpu.example"}).status_code == 200


@pytest.mark.parametrize(
    ("value", "host"),
    [("A.b:80", "a.b"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("a.b.", "a.b"), ("", "")],
)
def test_the_name_without_its_port(value, host):
    assert host_of(value) == host


@pytest.mark.parametrize(
    ("host", "is_so"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x", False)],
)
def test_names_are_checked_where_only_this_machine_can_call(host, is_so):
    assert ServeSettings(host=host).checks_names == is_so


def test_the_option():
    assert names("a.b, c") == ("a.b", "c")
    with pytest.raises(ValueError, match=r"allowed_hosts=' '"):
        ServeSettings(allowed_hosts=("a", " "))
