"""Objects of one name, size and ETag in different places: none is taken for another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from remote_files import open_object, reading
from web_server import Answer, Request, WebServer, serving

from onnxarchive.remote.location import Location

SIZE = 300_000
READ = reading(b"")
PUBLIC = {"skip_signature": True, "allow_http": True}
Access = dict[str, Any]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[WebServer]]:
    with serving({}) as first, serving({}) as second:
        for number, server in enumerate((first, second), 1):
            server.change = same_etag(bytes([number]) * SIZE)
        yield [first, second]


def same_etag(content: bytes) -> Callable[[Request, Answer], Answer]:
    """Serves the content under each path."""
    server = WebServer({"/": content})
    server._server.server_close()

    def change(request: Request, _answer: Answer) -> Answer:
        request.headers.pop("if-match", None)
        answer = server.answer(Request(request.method, "/", request.headers))
        return Answer(answer.status, {**answer.headers, "ETag": '"same"'}, answer.body)

    return change


class Hosted(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Files of one size and ETag; the host is their content."""

    protocol = "hosted"

    def __init__(self, host: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.host = (host or os.environ["HOSTED_ENDPOINT"]).encode()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        user, at, _ = path.removeprefix("hosted://").rpartition("@")
        return {"host": user} if at else {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": SIZE, "type": "file", "etag": "same"}

    def cat_file(self, path: str, start: int, end: int, **_: Any) -> bytes:
        return (self.host * SIZE)[start:end]


fsspec.register_implementation("hosted", Hosted, clobber=True)


def by_option(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    options = PUBLIC | {"endpoint": server.url("")}
    return "s3://bucket/m.onnxa", {"storage_options": options}


def by_variable(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    environment.setenv("AWS_ENDPOINT_URL", server.url(""))
    return "s3://bucket/m.onnxa", {"storage_options": PUBLIC}


def by_account_file(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    names = ("private_key", "private_key_id", "client_email")
    account = dict.fromkeys(names, "") | {"disable_oauth": True, "gcs_base_url": server.url("")}
    Path("account.json").write_text(json.dumps(account))
    options = {"service_account": "account.json", "allow_http": True}
    return "gs://bucket/m.onnxa", {"storage_options": options}


def by_azure_variable(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    environment.setenv("AZURE_STORAGE_ENDPOINT", server.url(""))
    environment.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    return "az://bucket/m.onnxa", {"storage_options": PUBLIC}


def by_store(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    from obstore.store import S3Store

    client: Any = {"allow_http": True}
    store = S3Store("b", endpoint=server.url(""), skip_signature=True, client_options=client)
    return "m.onnxa", {"store": store}


def by_store_and_variable(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    from obstore.store import S3Store

    with environment.context() as variables:
        variables.setenv("AWS_ENDPOINT_URL", server.url(""))
        store = S3Store("b", skip_signature=True, client_options={"allow_http": True})
    return "m.onnxa", {"store": store}


def by_azure_store(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    from obstore.store import AzureStore

    with environment.context() as variables:
        variables.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
        variables.setenv("AZURE_STORAGE_ENDPOINT", server.url(""))
        store = AzureStore("b", skip_signature=True, client_options={"allow_http": True})
    return "m.onnxa", {"store": store}


def by_web_store(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    from obstore.store import HTTPStore

    store = HTTPStore(server.url(""), client_options={"allow_http": True})
    return "m.onnxa", {"store": store}


def by_proxy(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    options = {"client_options": {"PROXY_URL": server.url("")}}
    return "http://nowhere.invalid/m.onnxa", {"storage_options": options}


def by_proxy_variable(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    environment.setenv("http_proxy", server.url(""))
    return "http://nowhere.invalid/m.onnxa", {}


def by_proxy_of_s3(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    environment.setenv("http_proxy", server.url(""))
    options = PUBLIC | {"endpoint": "http://nowhere.invalid"}
    return "s3://bucket/m.onnxa", {"storage_options": options}


def by_file_of_s3fs(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    pytest.importorskip("s3fs")
    path = Path(f"{server.port}.ini")
    keys = "aws_access_key_id=key\naws_secret_access_key=SECRET\nregion=us-east-1"
    path.write_text(f"[default]\n{keys}\nendpoint_url={server.url('')}\n")
    environment.setenv("AWS_CONFIG_FILE", str(path))
    return "s3a://bucket/m.onnxa", {}


def by_option_of_s3fs(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    pytest.importorskip("s3fs")
    return "s3a://bucket/m.onnxa", {
        "storage_options": {"anon": True, "endpoint_url": server.url("")}
    }


def by_option_of_fsspec(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    return "hosted://m.onnxa", {"storage_options": {"host": server.url("")}}


def by_variable_of_fsspec(server: WebServer, environment: pytest.MonkeyPatch) -> tuple[str, Access]:
    environment.setenv("HOSTED_ENDPOINT", server.url(""))
    return "hosted://m.onnxa", {}


def by_configuration_of_fsspec(
    server: WebServer, environment: pytest.MonkeyPatch
) -> tuple[str, Access]:
    environment.setitem(fsspec.config.conf, "hosted", {"host": server.url("")})
    return "hosted://m.onnxa", {}


def by_user_of_fsspec(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    return f"hosted://{server.port}@m.onnxa", {}


def by_query_of_fsspec(server: WebServer, _: pytest.MonkeyPatch) -> tuple[str, Access]:
    return f"hosted://m.onnxa?{server.port}", {"storage_options": {"host": server.url("")}}


@pytest.mark.parametrize(
    "place",
    [
        by_option,
        by_variable,
        by_account_file,
        by_azure_variable,
        by_store,
        by_store_and_variable,
        by_azure_store,
        by_web_store,
        by_proxy,
        by_proxy_variable,
        by_proxy_of_s3,
        by_file_of_s3fs,
        by_option_of_s3fs,
        by_option_of_fsspec,
        by_variable_of_fsspec,
        by_configuration_of_fsspec,
        by_user_of_fsspec,
        by_query_of_fsspec,
    ],
)
def test_the_cache_gives_the_bytes_of_the_server_that_is_asked(
    servers: list[WebServer],
    place: Callable[[WebServer, pytest.MonkeyPatch], tuple[str, Access]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    for server in servers:
        url, access = place(server, monkeypatch)
        files.append(open_object(url, **access))
        expected = files[-1].read(0, 100)
        for _ in range(2):
            cached = Location.of(url, **access, cache=tmp_path / "cache")
            with cached.open(reading(expected[:1] * SIZE)) as file:
                assert file.read(0, 100) == expected
    assert files[0].read(0, 100) != files[1].read(0, 100)
    assert files[0].identity != files[1].identity


@pytest.mark.parametrize(
    "place",
    [by_option, by_variable, by_web_store, by_proxy_variable, by_file_of_s3fs, by_option_of_s3fs],
)
def test_the_cache_gives_what_was_fetched_before(
    servers: list[WebServer],
    place: Callable[[WebServer, pytest.MonkeyPatch], tuple[str, Access]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    keys = set()
    for token in ("one", "other"):  # of credentials, which change each hour
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        monkeypatch.setenv("BUILD_URL", token)  # of the job that runs this
        url, access = place(servers[0], monkeypatch)
        if url.startswith("s3:"):
            access["storage_options"] = access["storage_options"] | {"token": token}
        with Location.of(url, **access, cache=cache).open(reading(bytes([1]) * SIZE)) as file:
            file.read(0, SIZE)
        keys.add(open_object(url, **access).cache_key())
    assert len(keys) == 1
    assert keys != {None}
    assert len(list(cache.glob("*.onnxa"))) == 1


def test_options_without_a_lasting_form_are_not_cached(
    servers: list[WebServer], tmp_path: Path
) -> None:
    session = pytest.importorskip("aiobotocore.session").AioSession()
    options = {"anon": True, "endpoint_url": servers[0].url(""), "session": session}
    url = "s3a://bucket/m.onnxa"
    with Location.of(url, storage_options=options, cache=tmp_path).open(READ) as file:
        assert file.read(0, 4) == bytes([1] * 4)
        again = open_object(url, storage_options=options)
        assert again.identity == file.identity
        assert again.cache_key() is None
    assert not list(tmp_path.iterdir())


def test_files_of_an_unknown_server_are_not_cached(tmp_path: Path) -> None:
    options = {"host": "host"}
    with Location.of("hosted://m.onnxa", storage_options=options, cache=tmp_path).open(
        READ
    ) as file:
        assert file.read(0, 4) == b"host"
    assert not list(tmp_path.iterdir())


def test_stores_in_memory_are_not_taken_for_each_other() -> None:
    from obstore.store import MemoryStore

    stores = [MemoryStore(), MemoryStore()]
    for number, store in enumerate(stores):
        store.put("m.onnxa", bytes([number]) * 10)
    first, second = (open_object("m.onnxa", store=it) for it in stores)
    assert first.identity != second.identity
    assert open_object("m.onnxa", store=stores[0]).identity == first.identity


def test_what_selects_an_object_is_not_shown() -> None:
    options = {"password": "SECRET"}
    file = open_object("hosted://me:SECRET@m.onnxa?SECRET", storage_options=options)
    assert "SECRET" not in f"{file.identity}{file.cache_key()}{file.path}"
