"""The recipes that use a bucket, run against a server of S3."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import weight_model
from object_servers import S3Server, s3_server
from processes import completed

import onnxarchive

pytestmark = pytest.mark.tool

RECIPES = Path(__file__).resolve().parents[3] / "tools" / "recipes"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def run_recipe(server: S3Server, name: str, *arguments: str, status: int = 0) -> str:
    """Runs a recipe with credentials from the environment; returns its output."""
    environment = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
    }
    done = completed(
        [sys.executable, RECIPES / name, *arguments],
        status=status,
        env={**os.environ, **environment},
    )
    assert "SECRET" not in done.stdout + done.stderr
    return done.stdout


def test_a_model_is_saved_to_a_bucket_and_used_from_there(server: S3Server) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    printed = run_recipe(server, "object_store.py", "s3://bucket/folder").splitlines()
    assert printed[0] == f"w {4 << 20}"
    assert "(1024, 1024) float32" in printed
    url = "s3://bucket/folder/model.onnxa"
    assert onnxarchive.check(url, full=True, storage_options=server.options) == []
    with onnxarchive.open(url, storage_options=server.options) as archive:
        assert printed[-1] == f"{archive.contents.file.size:,} bytes downloaded"


def test_a_cluster_converts_the_models_of_a_bucket(server: S3Server) -> None:
    pytest.importorskip("distributed", reason="distributed (Dask) is not installed")
    for seed in range(3):
        url = f"s3://bucket/models/{seed}.onnxa"
        onnxarchive.save(weight_model(seed), url, storage_options=server.options)
    arguments = ("many_models.py", "s3://bucket/models", "s3://bucket/archives")
    lines = run_recipe(server, *arguments).splitlines()
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]
    assert all(line.endswith(" bytes") for line in lines)
    for seed in range(3):
        url = f"s3://bucket/archives/{seed}.onnxa"
        assert onnxarchive.load(url, storage_options=server.options) == weight_model(seed)
    lines = run_recipe(server, *arguments).splitlines()
    assert all(line.endswith(": there already") for line in lines)
    printed = run_recipe(server, "many_models.py", "s3://bucket/none", "s3://bucket/a", status=1)
    assert "1/1 s3://bucket/none: " in printed
