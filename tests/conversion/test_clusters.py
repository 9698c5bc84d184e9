"""Models in a bucket, converted to archives in a bucket by a Dask cluster of four processes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import model_of, weight_model
from object_servers import S3Server, s3_server
from obstore.store import S3Store
from onnx import TensorProto
from processes import completed

import onnxarchive

pytestmark = [pytest.mark.tool, pytest.mark.timeout(600)]

MIB = 1 << 20
PART = bytes(range(256)) * (16 * MIB // 256)
LARGE = {"large0": 20, "large1": 3, "large2": 3, "large3": 3}  # the number of their data files
GOOD = {*LARGE, "single", "ready"}
FAILURES = {
    "models/broken": "expected",
    "models/missing": "is missing; copy this file",
    "models/denied": "the server refuses access (HTTP status 403, InvalidObjectState)",
    "bad": "key 'bad/../m.onnx'",
}
SECRET = "SECRET"  # of `S3Server.options`

# Prints the outcomes of three runs, and what the cluster knows of them.
SCRIPT = """
import json, os, sys, threading, time
import dask, distributed
from distributed import Client, LocalCluster
from onnxarchive import convert_many

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith(name))

def deleted_files():
    with open("/proc/self/maps") as file:
        names = file.read().splitlines()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            pass
    return [name for name in names if os.environ["TMPDIR"] in name and "(deleted)" in name]

def kill_busy(client, processes, uploads):
    while not uploads():
        time.sleep(0.01)
    address = next(it for it, keys in client.processing().items() if keys)
    os.kill(processes[address], 9)

def main():
    from object_servers import S3Server
    given = json.loads(sys.stdin.read())
    server = S3Server(given["endpoint"])
    dask.config.set({"distributed.scheduler.allowed-failures": 0})
    with (
        LocalCluster(
            processes=True, n_workers=4, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
        client.get_executor() as executor
    ):
        def run(**options):
            calls = []
            found = convert_many(
                ["s3://bucket/models", "s3://bucket/bad"], "s3://bucket/out", executor,
                on_done=lambda item, done, total: calls.append((done, total)),
                storage_options=given["options"], **options
            )
            return [(it.source, it.error, it.error_type, it.is_skipped) for it in found], calls

        client.run(__import__, "onnxarchive.conversion.convert_many")
        processes = client.run(os.getpid)
        killer = threading.Thread(target=kill_busy, args=(client, processes, server.uploads))
        killer.start()
        killed = run()
        killer.join()
        client.wait_for_workers(4)
        before = client.run(memory, "VmRSS")
        again = run(skip_existing=True)
        skipped = run(skip_existing=True)
        peaks = client.run(memory, "VmHWM")
        keys = client.run_on_scheduler(
            lambda dask_scheduler: [str(it[0]) for it in dask_scheduler.transition_log]
        )
        logs = [client.get_worker_logs(), client.get_scheduler_logs()]
        print("RESULT" + json.dumps({
            "killed": killed, "again": again, "skipped": skipped, "keys": keys,
            "peaks": list(peaks.values()), "before": list(before.values()), "logs": repr(logs),
            "deleted": sum(client.run(deleted_files).values(), [])
        }))

if __name__ == "__main__":
    main()
"""


def large_model(parts: int) -> onnx.ModelProto:
    """A model whose tensors of 4 MiB are in files of 16 MiB, `part0` and so on."""
    nbytes = 4 * MIB
    tensors = []
    for part in range(parts):
        for offset in range(0, len(PART), nbytes):
            tensor = TensorProto(
                name=f"{part}.{offset}",
                data_type=TensorProto.FLOAT,
                dims=[nbytes // 4],
                data_location=TensorProto.EXTERNAL,
            )
            place = {"location": f"part{part}", "offset": str(offset), "length": str(nbytes)}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
            tensors.append(tensor)
    return model_of(*tensors)


def fill(server: S3Server) -> None:
    """Puts models into the bucket, and some that fail."""
    store = store_of(server)
    for name, parts in LARGE.items():
        store.put(f"models/{name}/m.onnx", large_model(parts).SerializeToString())
        for part in range(parts):
            store.put(f"models/{name}/part{part}", PART)
    store.put("models/single/m.onnx", weight_model(1, 2 * MIB).SerializeToString())
    onnxarchive.save(weight_model(2), "models/ready/m.onnxa", store=store)
    store.put("models/broken/m.onnx", b"broken")
    for name in ("missing", "denied"):
        store.put(f"models/{name}/m.onnx", large_model(1).SerializeToString())
    # An archived object is refused with the status of a denied one.
    put(server, "models/denied/part0", {"x-amz-storage-class": "GLACIER"})
    put(server, "bad/../m.onnx", {})


def put(server: S3Server, key: str, headers: dict[str, str]) -> None:
    request = urllib.request.Request(
        f"{server.endpoint}/bucket/{key}", b"data", headers=headers, method="PUT"
    )
    urllib.request.urlopen(request).close()


def store_of(server: S3Server) -> S3Store:
    config: Any = dict(server.options)
    client: Any = {"allow_http": config.pop("allow_http")}
    return S3Store("bucket", config=config, client_options=client)


def archives(server: S3Server, prefix: str, folder: Path) -> set[str]:
    """The names of the archives below a prefix, all of which are sound.

    They are checked in a folder, since moto reads a whole object for each range of it.
    """
    store = store_of(server)
    keys = [it["path"] for page in store.list(prefix) for it in page]
    for key in keys:
        with open(folder / "fetched.onnxa", "wb") as file:
            file.writelines(store.get(key).stream())
        assert onnxarchive.check(file.name, full=True) == []
    return {key.removeprefix(f"{prefix}/").removesuffix("/m.onnxa") for key in keys}


def name_of(source: str) -> str:
    """The name of a failure in `FAILURES`, by the URL of a model."""
    return source.removeprefix("s3://bucket/").removesuffix("/m.onnx")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch:
        recording = tmp_path_factory.mktemp("recording") / "requests"
        patch.setenv("MOTO_RECORDER_FILEPATH", str(recording))
        with s3_server() as server:
            fill(server)
            yield server


def test_a_cluster_converts_from_bucket_to_bucket(server: S3Server, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="distributed (Dask) is not installed")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    found = run_script(server, tmp_path, TMPDIR=str(temporary))

    killed, calls = found["killed"]
    errors = {source: error for source, error, *_ in killed if error is not None}
    lost = {source: error for source, error in errors.items() if "the worker failed" in error}
    assert lost  # of the worker that was killed
    assert all("KilledWorker" in error for error in lost.values())
    assert calls == [[done, len(killed)] for done in range(1, len(killed) + 1)]

    for outcomes, _ in (found["again"], found["skipped"]):
        errors = {name_of(source): error for source, error, *_ in outcomes if error is not None}
        assert set(errors) == set(FAILURES)
        assert all(text in errors[name] for name, text in FAILURES.items())
    done = {source for source, error, *_ in killed if error is None}
    again = {source for source, _, _, is_skipped in found["again"][0] if is_skipped}
    assert again == done
    assert sum(is_skipped for *_, is_skipped in found["skipped"][0]) == len(GOOD)

    assert archives(server, "out", tmp_path) == GOOD
    with onnxarchive.open(
        "s3://bucket/out/large0/m.onnxa", storage_options=server.options
    ) as archive:
        assert len(archive.entries) == 81
        assert archive.tensors[f"19.{12 * MIB}"].tobytes() == PART[: 4 * MIB]

    # One model has 320 MiB. What is copied to temporary files counts while it is mapped.
    assert max(found["peaks"]) - min(found["before"]) < 256
    assert found["deleted"] == []
    assert not [it for it in temporary.rglob("*") if it.name.startswith(".onnxarchive")]
    assert {key.rpartition("-")[0] for key in found["keys"] if "convert" in key} == {"convert_one"}
    assert SECRET not in json.dumps(found)


def run_script(server: S3Server, directory: Path, **environment: str) -> dict[str, Any]:
    """Runs `SCRIPT` from a file, which spawned processes can import; the secret is not printed."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(sys.path)
    done = completed(
        [sys.executable, script],
        status=0,
        input=json.dumps({"endpoint": server.endpoint, "options": server.options}),
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert SECRET not in done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.partition("RESULT")[2])
    return found


def test_skipped_models_are_not_read(server: S3Server) -> None:
    options: dict[str, Any] = {"storage_options": server.options, "skip_existing": True}
    sources = [f"s3://bucket/models/{name}/m.onnx" for name in ("single", "large1")]
    for name in ("single", "large1"):
        put(server, f"there/{name}/m.onnxa", {})
    server.request("POST", "/moto-api/recorder/start-recording")
    found = [
        onnxarchive.convert_many([source], f"s3://bucket/there/{name}", **options)[0]
        for source, name in zip(sources, ("single", "large1"), strict=True)
    ]
    server.request("POST", "/moto-api/recorder/stop-recording")
    assert [item.is_skipped for item in found] == [True, True]
    lines = server.request("GET", "/moto-api/recorder/download-recording").splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["HEAD", "HEAD"]


def test_the_command_converts_a_bucket_in_two_threads(server: S3Server, tmp_path: Path) -> None:
    names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION", "allow_http": "AWS_ALLOW_HTTP"}
    names |= {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    environment = {names[key]: str(value).lower() for key, value in server.options.items()}
    environment["AWS_SECRET_ACCESS_KEY"] = SECRET
    command = [sys.executable, "-m", "onnxarchive", "convert", "s3://bucket/models"]
    command += ["--output-dir", "s3://bucket/command", "--jobs", "2", "--skip-existing"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env={**os.environ, **environment}
    ) as process:
        os.close(theirs)
        bar = b""
        try:
            while text := os.read(ours, 1 << 16):
                bar += text
        except OSError:  # the terminal's other end is closed
            pass
        os.close(ours)
        printed = process.communicate()[0]
    lines = printed.splitlines()
    assert "6 models converted, 3 failed" in lines
    assert process.returncode == 3
    assert sum(line.startswith("failed: s3://bucket/models/") for line in lines) == 3
    assert b"/9 [" in bar
    assert b" model" in bar
    assert SECRET not in printed + str(bar)
    assert archives(server, "command", tmp_path) == GOOD
