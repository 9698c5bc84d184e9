from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from onnxarchive.remote.urls import (
    Address,
    is_url,
    misspelled_url,
    unsigned_url,
    url_without_secrets,
)


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("https://host/m.onnxa", True),
        ("HF://user/model/m.onnxa", True),
        ("zip://m.onnxa::s3://bucket/all.zip", True),
        ("simplecache::https://host/m.onnxa", True),
        ("simplecache::zip::ftp://host/m.onnxa", True),
        ("models::m.onnxa", False),
        ("C://models/m.onnxa", False),
        (r"C:\models\m.onnxa", False),
        ("models//m.onnxa", False),
        ("a b://m.onnxa", False),
        ("https:/host/m.onnxa", False),
        (Path("https://host"), False),
        (b"https://host", False),
    ],
)
def test_a_url_begins_with_a_scheme(source: object, is_one: bool) -> None:
    assert is_url(source) is is_one


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/m.onnxa?sig=SECRET#SECRET", "https://host/m.onnxa"),
        ("https://me:SECRET@host:8/a.onnxa", "https://host:8/a.onnxa"),
        ("https://host/a@b.onnxa", "https://host/a@b.onnxa"),
        ("https://me@host/a@b.onnxa", "https://host/a@b.onnxa"),
        ("https://[::1]/a@b.onnxa", "https://[::1]/a@b.onnxa"),
        ("https://me:SECRET@[::1]:8/a.onnxa", "https://[::1]:8/a.onnxa"),
        # A password may have any character, so a part of the path may be removed.
        ("https://me:SECRET@host:8/a@b.onnxa", "https://b.onnxa"),
        ("https://me:SEC/RET@host/m.onnxa", "https://host/m.onnxa"),
        ("https://me:12/SECRET@host/m.onnxa", "https://host/m.onnxa"),
        ("https://me:SEC?RET@host/m.onnxa?sig=SECRET", "https://host/m.onnxa"),
        ("https://me:SEC#RET@host/m.onnxa", "https://host/m.onnxa"),
        ("https://me:SEC@R/E@T@host/m.onnxa", "https://host/m.onnxa"),
        ("simplecache::ftp://me:SE/C?R#ET@host/m", "simplecache::ftp://host/m"),
        ("ftp://me:SEC::RET@host/m", "ftp://host/m"),
        ("zip://x/a@b::ftp::ftp://me:S/@host/m", "zip://x/a@b::ftp::ftp://host/m"),
        ("https://me:SE@CRET@host/m.onnxa", "https://host/m.onnxa"),
        ("zip://m::ftp://me:SECRET@host/a.zip", "zip://m::ftp://host/a.zip"),
        ("memory://bucket/m.onnxa#SECRET", "memory://bucket/m.onnxa"),
        # A key may have any character; but a signature is secret.
        ("s3://bucket/a?b/m@n.onnxa#1", "s3://bucket/a?b/m@n.onnxa#1"),
        ("hf://me/repo@v1/a?b/m#1.onnxa", "hf://me/repo@v1/a?b/m#1.onnxa"),
        ("hf://me:SECRET@me/repo/m#1.onnxa", "hf://me/repo/m#1.onnxa"),
        ("s3://me:SECRET@bucket/m?1", "s3://bucket/m?1"),
        ("s3://bucket/m.onnxa?X-Amz-Date=1&X-Amz-Signature=SECRET", "s3://bucket/m.onnxa"),
        ("az://bucket/m.onnxa?sv=1&SIG=SECRET", "az://bucket/m.onnxa"),
        ("C#/what?/me@home.onnxa", "C#/what?/me@home.onnxa"),  # a path has no query
        # Malformed addresses: without a host, or with another text than a port.
        ("http:///me:SECRET@host/m.onnxa", "http://host/m.onnxa"),
        ("http:////SECRET@host/m.onnxa", "http://host/m.onnxa"),
        ("http://\\me:SECRET@host/m.onnxa", "http://host/m.onnxa"),
        ("s3:///me:SECRET@bucket/m.onnxa", "s3://bucket/m.onnxa"),
        ("s3://?me:SECRET@bucket/m.onnxa", "s3://bucket/m.onnxa"),
        ("simplecache::http:///me:SECRET@host/m", "simplecache::http://host/m"),
        ("http://me:SECRET/m.onnxa", "http://me:.../m.onnxa"),
        ("http://@me:SECRET", "http://me:..."),
        ("http://[me:SECRET/m.onnxa", "http://[me:.../m.onnxa"),
        ("http://me:SECRET::x://y@host/m", "http://me:...::x://host/m"),
        ("http://host:8/m", "http://host:8/m"),
        ("http://[::1]:8/m", "http://[::1]:8/m"),
        ("http://[::1]/m", "http://[::1]/m"),
        ("http:///host/m.onnxa", "http:///host/m.onnxa"),
        ("file:///C:/me@home.onnxa", "file:///C:/me@home.onnxa"),
        ("memory:///a/me@home.onnxa", "memory:///a/me@home.onnxa"),
        ("github://org:repo/m.onnxa", "github://org:repo/m.onnxa"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert url_without_secrets(url) == shown


@settings(max_examples=300, derandomize=True)
@given(
    st.sampled_from(["http", "https", "HTTP", "s3", "gs", "az", "ftp", "x::http", "hf"]),
    st.sampled_from(["://", ":///", ":////", "://@", "://?", "://#", "://\\"]),
    st.text("ab%@[.", max_size=3),
    st.text("ab:/?#@[]\\ .", max_size=6),
    st.sampled_from(["", "@", "@host/m.onnxa", "@host:port/m", "@[::1/m", "@[::1]:8/m"]),
)
def test_no_password_of_a_malformed_url_is_shown(
    scheme: str, slashes: str, user: str, after: str, end: str
) -> None:
    url = f"{scheme}{slashes}{user}:SECRET{after}{end}"
    assert "SECRET" not in url_without_secrets(url)
    assert "SECRET" not in url_without_secrets(f"{url}?sig=SECRET")


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("https:/me:SECRET@host/m.onnxa", "https://host/m.onnxa"),
        (r"https:\me:SECRET@host\m.onnxa", "https://host\\m.onnxa"),
        (" https://me:SECRET@host/m.onnxa", "https://host/m.onnxa"),
        ("'s3://bucket/m.onnxa", "s3://bucket/m.onnxa"),
        ("http//me:SECRET@host/m", "http://host/m"),
        ("http:me:SECRET@host/m", "http://host/m"),
        ("simplecache::http:/me:SECRET@host/m", "http://host/m"),
        ("x y://me:SECRET@host/m", "x y://host/m"),
        ("see https://host/m?sig=SECRET", "see https://host/m"),
        ("models/https:/host", None),
        ("http", None),
        ("https.onnxa", None),
        ("gs/m.onnxa", None),
        ("x y://m?n", None),
        ("C:/me@home/m.onnxa", None),
        ("C:\\me@home\\m.onnxa", None),
        ("file:a@b", None),
        ("/data/run:/me@home/m.onnxa", None),
    ],
)
def test_a_path_that_is_meant_as_a_url_is_recognised(path: str, url: str | None) -> None:
    assert misspelled_url(path) == url


def test_a_misspelled_url_that_names_a_directory_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert misspelled_url("gs:/b") == "gs://b"
    (tmp_path / "gs:").mkdir()
    assert misspelled_url("gs:/b") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("?X-Amz-Signature=1&X-Amz-Date=2&versionId=v", "?versionId=v&X-Amz-Signature=3"),
        ("?sv=1&se=2&sr=b&sp=r&sig=abc", "?sv=1&se=3&sr=b&sp=r&sig=def"),
        ("?X-Goog-Signature=1&X-Goog-Expires=2", ""),
        ("?AWSAccessKeyId=1&Expires=2&Signature=3", ""),
    ],
)
def test_urls_that_differ_in_their_signature_have_the_same_name(one: str, other: str) -> None:
    base = "https://me:SECRET@host/m.onnxa"
    assert unsigned_url(base + one) == unsigned_url("https://host/m.onnxa" + other)


def test_parameters_that_are_no_signature_stay_in_the_name() -> None:
    assert unsigned_url("https://host/get?id=1&sp=2") != unsigned_url("https://host/get?id=2&sp=2")
    assert unsigned_url("https://host/get?id=1&sp=2") != unsigned_url("https://host/get?id=1")
    assert unsigned_url("https://host:8/a@m.onnxa") != unsigned_url("https://host:9/b@m.onnxa")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host/a%20b/m.onnx?sig=1#f", "https://host/a%20b/w%20%3F.bin?sig=1#f"),
        ("s3://bucket/a b/m?n#o.onnx", "s3://bucket/a b/w ?.bin"),
        ("memory://a%20b/m.onnx", "memory://a%20b/w ?.bin"),
        ("a b/m.onnx", "a b/w ?.bin"),
    ],
)
def test_the_url_of_another_file_has_the_same_folder(url: str, expected: str) -> None:
    assert Address(url).beside("w ?.bin").url == expected
