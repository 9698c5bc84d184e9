"""The probe for redirects uses the proxy that obstore uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from remote_files import open_object
from web_server import WebServer

from onnxarchive.remote.proxies import UnknownProxyError, proxy_of

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "request_method")
ONCE = {"max_retries": 0, "timeout": "5s"}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables for proxies and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
            patch.delenv(name.upper(), raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def routes(server: WebServer, url: str, variables: Mapping[str, str], **options: Any) -> set[str]:
    """Where the requests for a URL arrive, at the proxy or at the server, which are one here."""
    server.requests.clear()
    with environment(variables), suppress(OSError):
        open_object(url, storage_options={**ONCE, **options}).close()
    return {"proxy" if it.path.startswith("http:") else "server" for it in server.requests}


ADDRESS = "127.0.0.1"
NAME = "localhost"
SUBDOMAIN = "a.localhost"  # has no address on most systems, so nothing arrives at the server
SIX = "[::1]"  # where no server is
EXCLUDED = [
    (ADDRESS, "127.0.0.1", "server"),
    (ADDRESS, " x.invalid ,\t127.0.0.1 ,", "server"),
    (ADDRESS, "127.0.0.0/8", "server"),
    (ADDRESS, "127.9.9.9/8", "server"),
    (ADDRESS, "127.0.0.1/32", "server"),
    (ADDRESS, "126.0.0.0/07", "server"),
    (ADDRESS, "0.0.0.0/0", "server"),
    (ADDRESS, "", "proxy"),
    (ADDRESS, "*", "proxy"),
    (ADDRESS, "10.0.0.0/8", "proxy"),
    (ADDRESS, "127.0.0.1:{port}", "proxy"),
    (ADDRESS, "127.0.0.0/255.0.0.0", "proxy"),
    (ADDRESS, "127.0.0.1/33", "proxy"),
    (ADDRESS, "127.0.0.1/008", "proxy"),
    (ADDRESS, "127.0.0.1/", "proxy"),
    (ADDRESS, "127.0.0.01", "proxy"),
    (ADDRESS, "127.1", "proxy"),
    (ADDRESS, "127.", "proxy"),
    (ADDRESS, ".127.0.0.1", "proxy"),
    (ADDRESS, "0.0.1", "proxy"),
    (ADDRESS, "localhost", "proxy"),
    (ADDRESS, "::ffff:127.0.0.1", "proxy"),
    (ADDRESS, "::/0", "proxy"),
    (ADDRESS, "10.0.0.1 127.0.0.1", "proxy"),
    (NAME, "localhost", "server"),
    (NAME, ".LocalHost", "server"),
    (NAME, "x,*", "server"),
    (NAME, "localhost:{port}", "proxy"),
    (NAME, "..localhost", "proxy"),
    (NAME, "host", "proxy"),
    (NAME, "*host", "proxy"),
    (NAME, "*.localhost", "proxy"),
    (NAME, "localhost.", "proxy"),
    (NAME, "a.localhost", "proxy"),
    (NAME, "127.0.0.1", "proxy"),
    (NAME, "0.0.0.0/0", "proxy"),
    (SUBDOMAIN, "localhost", ""),
    (SUBDOMAIN, ".localhost", ""),
    (SUBDOMAIN, "A.localhost", ""),
    (SUBDOMAIN, "*", ""),
    (SUBDOMAIN, "*.localhost", "proxy"),
    (SUBDOMAIN, "b.a.localhost", "proxy"),
    (SUBDOMAIN, "a.*", "proxy"),
    (SIX, "::1", ""),
    (SIX, "0:0:0:0:0:0:0:1", ""),
    (SIX, "::/0", ""),
    (SIX, "::2/64", ""),
    (SIX, "*", "proxy"),
    (SIX, "[::1]", "proxy"),
    (SIX, "[::1]:{port}", "proxy"),
    (SIX, "::1%lo", "proxy"),
    (SIX, "0.0.0.0/0", "proxy"),
    # obstore converts hosts before it looks for a proxy.
    ("LOCALHOST", "localhost", "server"),
    ("%6cocalhost", "localhost", "server"),
    ("\uff4cocalhost", "localhost", "server"),
    ("localhost.", "localhost", "proxy"),
    ("127.1", "127.0.0.1", "server"),
    ("0x7f.1", "127.0.0.0/8", "server"),
    ("2130706433", "127.0.0.1", "server"),
    ("127.0.0.1.", "127.0.0.1", "server"),
    ("127.1", "127.1", "proxy"),
]


@pytest.mark.parametrize("is_option", [False, True])
@pytest.mark.parametrize(("host", "excluded", "route"), EXCLUDED)
def test_excluded_hosts_are_asked_without_the_proxy(
    server: WebServer, host: str, excluded: str, route: str, is_option: bool
) -> None:
    port = server.port if host not in (SIX, SUBDOMAIN) else 1
    excluded = excluded.format(port=port)
    options, variables = {}, {}
    if is_option:
        options = {"proxy_url": server.url(""), "proxy_excludes": excluded}
        variables = {"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1,localhost,::1"}
    else:
        variables = {"HTTP_PROXY": server.url(""), "NO_PROXY": excluded}
    url = f"http://{host}:{port}/m.onnxa"
    expected = {route} - {""}
    assert routes(server, url, variables, **options) == expected  # obstore alone
    assert routes(server, f"{url}?sig=SECRET", variables, **options) == expected
    assert routes(server, url.replace("//", "//me:SECRET@"), variables, **options) == expected


OTHER = "http://127.0.0.1:1"
SETTINGS = [
    ({}, "server"),
    ({"HTTP_PROXY": "{proxy}"}, "proxy"),
    ({"http_proxy": "{proxy}"}, "proxy"),
    ({"HTTP_PROXY": "{address}"}, "proxy"),
    ({"HTTP_PROXY": "HTTP://{address}/path?a#b"}, "proxy"),
    ({"HTTP_PROXY": "http://me:pass%20word@{address}"}, "proxy"),
    ({"HTTP_PROXY": "{proxy}", "http_proxy": OTHER}, "proxy"),
    ({"HTTP_PROXY": "", "http_proxy": OTHER}, "server"),
    ({"HTTP_PROXY": "", "ALL_PROXY": "{proxy}"}, "proxy"),
    ({"HTTP_PROXY": "{proxy}", "ALL_PROXY": OTHER}, "proxy"),
    ({"HTTPS_PROXY": OTHER, "all_proxy": "{proxy}"}, "proxy"),
    ({"HTTPS_PROXY": OTHER, "FTP_PROXY": OTHER}, "server"),
    ({"HTTP_PROXY": "{proxy}", "NO_PROXY": "", "no_proxy": "127.0.0.1"}, "proxy"),
    ({"HTTP_PROXY": "{proxy}", "no_proxy": "127.0.0.1"}, "server"),
    ({"HTTP_PROXY": OTHER, "REQUEST_METHOD": "GET"}, "server"),
    ({"http_proxy": OTHER, "REQUEST_METHOD": ""}, "server"),
]


@pytest.mark.parametrize(("variables", "route"), SETTINGS)
def test_the_proxy_of_the_environment_is_used_by_the_probe_and_by_obstore(
    server: WebServer, variables: dict[str, str], route: str
) -> None:
    own = {"proxy": server.url(""), "address": f"127.0.0.1:{server.port}"}
    variables = {name: value.format(**own) for name, value in variables.items()}
    assert routes(server, server.url("/m.onnxa"), variables) == {route}
    assert routes(server, server.url("/m.onnxa?sig=SECRET"), variables) == {route}
    assert routes(server, server.url("/m.onnxa?sig=SECRET"), {}, proxy_excludes="*") == {"server"}


@pytest.mark.parametrize(
    ("scheme", "variables", "host", "proxy"),
    [
        ("https", {"HTTP_PROXY": OTHER}, "example.com", None),
        ("https", {"HTTPS_PROXY": OTHER}, "example.com", OTHER),
        ("https", {"https_proxy": OTHER, "NO_PROXY": "10.0.0.0/8"}, "10.1.2.3", None),
        ("https", {"https_proxy": OTHER, "NO_PROXY": "10.0.0.0/8"}, "11.1.2.3", OTHER),
        ("https", {"ALL_PROXY": OTHER, "NO_PROXY": "fd00::/8"}, "fd12::1", None),
        ("https", {"ALL_PROXY": OTHER, "NO_PROXY": "fd00::/8"}, "fe12::1", OTHER),
        ("http", {"HTTPS_PROXY": OTHER}, "example.com", None),
    ],
)
def test_the_proxy_depends_on_the_scheme_of_the_url(
    scheme: str, variables: dict[str, str], host: str, proxy: str | None
) -> None:
    with environment(variables):
        found = proxy_of(scheme, host, {})
    assert (None if found is None else found.geturl()) == proxy


_PIECES = ["localhost", "127.0.0.1", "127", "0", "1", ".", ",", "*", "/", "8", ":", " ", "[", "a"]


def test_hosts_are_excluded_from_the_proxy_by_the_rules_of_obstore(server: WebServer) -> None:
    @settings(max_examples=100, derandomize=True)
    @given(st.lists(st.sampled_from(_PIECES), max_size=8).map("".join))
    @example("127.0.0.1/8")
    @example(".localhost,127.0.0.1")
    def compare(excluded: str) -> None:
        options = {"proxy_url": server.url(""), "proxy_excludes": excluded}
        for host in (ADDRESS, NAME):
            is_direct = proxy_of("http", host, options) is None
            found = routes(server, f"http://{host}:{server.port}/m.onnxa", {}, **options)
            assert found == {"server" if is_direct else "proxy"}

    compare()


@pytest.mark.parametrize(
    "host", ["127.1", "0x7f.1", "127.0.0.1.", "%6cocalhost", "\uff41", "", "a/8"]
)
def test_a_host_that_obstore_would_convert_has_an_unknown_proxy(host: str) -> None:
    with environment({"HTTP_PROXY": OTHER, "NO_PROXY": "127.0.0.1"}):
        with pytest.raises(UnknownProxyError, match="expected a host"):
            proxy_of("http", host, {})
        assert proxy_of("https", host, {}) is None


def test_entries_that_are_not_ascii_are_refused_and_nothing_is_sent(server: WebServer) -> None:
    variables = {"HTTP_PROXY": server.url(""), "NO_PROXY": "\u00e9,127.0.0.1"}
    text = "NO_PROXY or .* characters that are not ASCII; it is unknown which server would get the"
    with environment(variables), pytest.raises(OSError, match=text) as caught:
        open_object(server.url("/m.onnxa?sig=SECRET"), storage_options=ONCE)
    assert not server.requests
    assert "SECRET" not in str(caught.value)
    assert "allow_redirects" not in str(caught.value)
