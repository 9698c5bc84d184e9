from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from object_servers import S3Server, azurite, nginx
from remote_files import create_object, list_objects, open_object

from onnxarchive import ObjectChangedError

CONTENT = bytes(range(251)) * 100_000  # three parts of 8 MiB and a bit

pytestmark = pytest.mark.tool


@pytest.fixture(params=["obstore", "s3fs"])
def place(request: pytest.FixtureRequest, s3: S3Server) -> tuple[str, dict[str, Any]]:
    """A URL and the options for it: s3a is a scheme of fsspec."""
    if request.param == "obstore":
        return "s3://bucket/folder/m.onnxa", s3.options
    keys = {"key": "key", "secret": "SECRET", "endpoint_url": s3.endpoint}
    return "s3a://bucket/folder/m.onnxa", keys


def write(url: str, options: dict[str, Any], content: bytes) -> None:
    with create_object(url, len(content), storage_options=options) as writer:
        for start in range(0, len(content), 1_000_003):
            writer.write(memoryview(content)[start : start + 1_000_003])
        writer.commit()


@pytest.mark.parametrize("size", [10, len(CONTENT)])
def test_an_archive_in_s3_is_read_and_listed(
    place: tuple[str, dict[str, Any]], s3: S3Server, size: int
) -> None:
    url, options = place
    write(url, options, CONTENT[:size])
    with open_object(url, storage_options=options) as file:
        assert file.size == size
        assert file.cache_key() is not None
        assert b"".join(file.pieces(0, size)) == CONTENT[:size]
        assert file.read(5, 3) == CONTENT[5:8]
    assert list_objects(url.rpartition("/")[0], storage_options=options) == [("m.onnxa", url)]
    assert not s3.uploads()


def test_an_object_of_s3_that_is_replaced_is_an_error(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    write(url, options, CONTENT)
    with open_object(url, storage_options=options) as file:
        assert file.read(0, 10) == CONTENT[:10]
        write(url, options, CONTENT[::-1])
        with pytest.raises(ObjectChangedError, match="has changed since"):
            file.read(0, 10)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_in_s3_of_an_object_that_is_given_up(
    place: tuple[str, dict[str, Any]], s3: S3Server, error: type[BaseException]
) -> None:
    url, options = place

    def fail() -> None:
        with create_object(url, len(CONTENT), storage_options=options) as writer:
            for _ in range(4):
                writer.write(CONTENT)
            raise error

    with pytest.raises(error):
        fail()
    assert not s3.uploads()
    assert "<Key>" not in s3.request("GET", "/bucket")


def test_a_missing_bucket_is_a_missing_file_without_secrets(s3: S3Server) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_object("s3://no-such-bucket/m.onnxa", storage_options=s3.options)
    assert str(caught.value) == (
        "[Errno 2] No such bucket; create it, or check its name: 's3://no-such-bucket/m.onnxa'"
    )
    with pytest.raises(FileNotFoundError, match=r"No such bucket; create it, .*s3://no-such-b"):
        write("s3://no-such-bucket/m.onnxa", s3.options, CONTENT)


def test_an_archive_in_azure_is_read_and_listed_and_its_versions_are_never_mixed() -> None:
    url = "az://bucket/folder/m.onnxa"
    with azurite() as options:
        with create_object(url, len(CONTENT), storage_options=options) as writer:
            writer.write(CONTENT)  # and not committed
        with pytest.raises(FileNotFoundError, match="No such object"):
            open_object(url, storage_options=options)
        write(url, options, CONTENT)
        with open_object(url, storage_options=options) as file:
            assert file.size == len(CONTENT)
            assert file.cache_key() is not None
            assert b"".join(file.pieces(0, len(CONTENT))) == CONTENT
            assert file.read(5, 3) == CONTENT[5:8]
            listed = list_objects("az://bucket/folder", storage_options=options)
            assert listed == [("m.onnxa", url)]
            write(url, options, CONTENT[::-1])
            with pytest.raises(ObjectChangedError, match="has changed since"):
                file.read(0, 10)


def test_nginx_gives_a_file_by_ranges_and_says_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    path = tmp_path / "root" / "m.onnxa"
    path.write_bytes(CONTENT)
    with nginx(path.parent, tmp_path) as url, open_object(f"{url}/m.onnxa?sig=SECRET") as file:
        assert b"".join(file.pieces(0, file.size)) == CONTENT
        seen = bytearray(file.size)
        for offset, part in file.stream_ranges([(0, file.size)]):
            seen[offset : offset + len(part)] = part
        assert seen == CONTENT
        with pytest.raises(OSError, match="does not answer requests for ranges"):
            open_object(f"{url}/whole/m.onnxa")
        path.write_bytes(CONTENT[1:])
        with pytest.raises(ObjectChangedError, match="has changed since"):
            file.read(0, 10)
