"""Objects of one name, size and ETag in different places: none is taken for another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
from obstore.store import AzureStore, HTTPStore, MemoryStore, S3Store
from remote_files import open_object, reading
from web_server import Answer, Request, WebServer, serving

from onnxarchive.remote.location import Location

SIZE = 300_000
READ = reading(b"")
Access = dict[str, Any]
HTTP: Any = {"allow_http": True}
PUBLIC: Access = {"skip_signature": True, "allow_http": True}
S3, AZURE, HOSTED = "s3://bucket/m.onnxa", "az://bucket/m.onnxa", "hosted://m.onnxa"
NOWHERE = "http://nowhere.invalid"


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


class Place(NamedTuple):
    """Where an object is.

    Attributes:
        url: The URL of the object, or its key in a store.
        access: Arguments that tell how it is reached.
        variables: Variables of the environment that tell it, too.
    """

    url: str
    access: Access
    variables: dict[str, str]


def at(url: str, variables: dict[str, str] | None = None, **options: Any) -> Place:
    return Place(url, {"storage_options": options} if options else {}, variables or {})


def in_store(store: Any) -> Place:
    return Place("m.onnxa", {"store": store}, {})


def in_store_by(variables: dict[str, str], make: Callable[..., Any]) -> Place:
    """A place in a store that was made while these variables were set."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        return in_store(make("b", skip_signature=True, client_options=HTTP))


def azure(server: str) -> dict[str, str]:
    return {"AZURE_STORAGE_ENDPOINT": server, "AZURE_STORAGE_ACCOUNT_NAME": "me"}


def by_account_file(server: str) -> Place:
    names = ("private_key", "private_key_id", "client_email")
    account = dict.fromkeys(names, "") | {"disable_oauth": True, "gcs_base_url": server}
    Path("account.json").write_text(json.dumps(account))
    return at("gs://bucket/m.onnxa", service_account="account.json", allow_http=True)


def by_file_of_s3fs(server: str) -> Place:
    pytest.importorskip("s3fs")
    path = Path(f"{port_of(server)}.ini")
    keys = "aws_access_key_id=key\naws_secret_access_key=SECRET\nregion=us-east-1"
    path.write_text(f"[default]\n{keys}\nendpoint_url={server}\n")
    return at("s3a://bucket/m.onnxa", {"AWS_CONFIG_FILE": str(path)})


def by_option_of_s3fs(server: str) -> Place:
    pytest.importorskip("s3fs")
    return at("s3a://bucket/m.onnxa", anon=True, endpoint_url=server)


def by_configuration_of_fsspec(server: str) -> Place:
    fsspec.config.conf["hosted"] = {"host": server}
    return at(HOSTED)


def port_of(server: str) -> str:
    return server.rpartition(":")[2]


# Places of an object on a server of a URL.
LASTING: dict[str, Callable[[str], Place]] = {
    "option": lambda it: at(S3, endpoint=it, **PUBLIC),
    "variable": lambda it: at(S3, {"AWS_ENDPOINT_URL": it}, **PUBLIC),
    "web store": lambda it: in_store(HTTPStore(it, client_options=HTTP)),
    "proxy variable": lambda it: at(f"{NOWHERE}/m.onnxa", {"http_proxy": it}),
    "file of s3fs": by_file_of_s3fs,
    "option of s3fs": by_option_of_s3fs,
}
PLACES: dict[str, Callable[[str], Place]] = {
    **LASTING,
    "account file": by_account_file,
    "variable of Azure": lambda it: at(AZURE, azure(it), **PUBLIC),
    "store": lambda it: in_store(
        S3Store("b", endpoint=it, skip_signature=True, client_options=HTTP)
    ),
    "store and variable": lambda it: in_store_by({"AWS_ENDPOINT_URL": it}, S3Store),
    "store of Azure": lambda it: in_store_by(azure(it), AzureStore),
    "proxy": lambda it: at(f"{NOWHERE}/m.onnxa", client_options={"PROXY_URL": it}),
    "proxy of S3": lambda it: at(S3, {"http_proxy": it}, endpoint=NOWHERE, **PUBLIC),
    "option of fsspec": lambda it: at(HOSTED, host=it),
    "variable of fsspec": lambda it: at(HOSTED, {"HOSTED_ENDPOINT": it}),
    "configuration of fsspec": by_configuration_of_fsspec,
    "user of fsspec": lambda it: at(f"hosted://{port_of(it)}@m.onnxa"),
    "query of fsspec": lambda it: at(f"{HOSTED}?{it}", host=it),
}


@pytest.fixture
def reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, WebServer], tuple[str, Access]]:
    """Sets the variables of a place at a server; returns the URL and how it is reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(fsspec.config.conf, "hosted", {})

    def place(name: str, server: WebServer) -> tuple[str, Access]:
        url, access, variables = PLACES[name](server.url(""))
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return url, access

    return place


@pytest.mark.parametrize("place", PLACES)
def test_the_cache_gives_the_bytes_of_the_server_that_is_asked(
    servers: list[WebServer], place: str, reach: Any, tmp_path: Path
) -> None:
    files = []
    for server in servers:
        url, access = reach(place, server)
        files.append(open_object(url, **access))
        expected = files[-1].read(0, 100)
        for _ in range(2):
            cached = Location.of(url, **access, cache=tmp_path / "cache")
            with cached.open(reading(expected[:1] * SIZE)) as file:
                assert file.read(0, 100) == expected
    assert files[0].read(0, 100) != files[1].read(0, 100)
    assert files[0].identity != files[1].identity


@pytest.mark.parametrize("place", LASTING)
def test_the_cache_gives_what_was_downloaded_before(
    servers: list[WebServer],
    place: str,
    reach: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = tmp_path / "cache"
    keys = set()
    for token in ("one", "other"):  # of credentials, which change each hour
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        monkeypatch.setenv("BUILD_URL", token)  # of the job that runs this
        url, access = reach(place, servers[0])
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
    location = Location.of(HOSTED, storage_options=options, cache=tmp_path)
    with location.open(READ) as file:
        assert file.read(0, 4) == b"host"
    assert not list(tmp_path.iterdir())


def test_stores_in_memory_are_not_taken_for_each_other() -> None:
    stores = [MemoryStore(), MemoryStore()]
    for number, store in enumerate(stores):
        store.put("m.onnxa", bytes([number]) * 10)
    first, second = (open_object("m.onnxa", store=it) for it in stores)
    assert first.identity != second.identity
    assert open_object("m.onnxa", store=stores[0]).identity == first.identity


def test_options_that_select_an_object_are_not_shown() -> None:
    options = {"password": "SECRET"}
    file = open_object("hosted://me:SECRET@m.onnxa?SECRET", storage_options=options)
    assert "SECRET" not in f"{file.identity}{file.cache_key()}{file.path}"
