"""The recipe that signs archives: what is accepted, also by model-signing itself, what is read."""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import entry_of, flip_byte, model_of
from onnx import TensorProto, helper, numpy_helper
from processes import completed
from remote_archives import PATH
from web_server import WebServer

import onnxarchive

model_signing: Any = pytest.importorskip(
    "model_signing", reason="model-signing or pyOpenSSL is not installed"
)

pytestmark = pytest.mark.tool

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "tools" / "recipes" / "sign.py"
SHARD = 1 << 20
SHAPE = 600, 1024  # 2.4 MB: three shards
ASSETS = {"labels.txt": b"cat\n", "empty": b""}
END_NBYTES = 128 << 10  # that `open` reads of a remote archive


def load_recipe() -> Any:
    spec = importlib.util.spec_from_file_location("sign_recipe", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


sign: Any = load_recipe()


def weight(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32)


def make_keys(directory: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = directory / "private.pem", directory / "public.pem"
    pem, kind = forms.Encoding.PEM, forms.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(pem, kind, forms.NoEncryption()))
    kind_of_public = forms.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, kind_of_public))
    return private, public


class Signed:
    """A signed archive, with its signature beside it."""

    def __init__(self, directory: Path, method: dict[str, Any]) -> None:
        self.path, self.signature = directory / "m.onnxa", directory / "model.sig"
        model = model_of(*(numpy_helper.from_array(weight(it), f"w{it}") for it in range(2)))
        # An entry of no bytes has no shard.
        assets = {name: it for name, it in ASSETS.items() if it or method is sign.FILES}
        onnxarchive.save(model, self.path, models={"other": model}, assets=assets)
        self.private, self.public = make_keys(directory)
        self.method = method
        self.sign()

    def sign(self) -> None:
        sign.sign(self.path, self.private, self.signature, self.method)

    def open(self, location: object = None) -> Any:
        return sign.SignedArchive(str(location or self.path), self.public, self.signature)

    def attach(self) -> None:
        """Adds the signature to the archive."""
        with onnxarchive.edit(self.path) as edit:
            edit.assets["model.sig"] = self.signature

    def unzip(self) -> Path:
        directory = self.path.with_suffix("")
        zipfile.ZipFile(self.path).extractall(directory)
        return directory


@pytest.fixture(params=["FILES", "SHARDS"])
def signed(request: pytest.FixtureRequest, tmp_path: Path) -> Signed:
    return Signed(tmp_path, getattr(sign, request.param))


def refused(archive: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        archive()


def test_the_command_of_model_signing_accepts_the_unzipped_directory(tmp_path: Path) -> None:
    signed = Signed(tmp_path, sign.FILES)
    signed.attach()
    directory = signed.unzip()
    command: list[object] = [sys.executable, "-m", "model_signing", "verify", "key", directory]
    command += ["--signature", directory / "assets" / "model.sig", "--public_key", signed.public]
    assert "Verification succeeded" in completed(command, status=0).stdout
    flip_byte(directory / "w1", 5000)
    assert "Hash mismatch for 'w1'" in completed(command, status=1).stderr


def test_model_signing_accepts_shards_of_the_unzipped_directory(tmp_path: Path) -> None:
    signed = Signed(tmp_path, sign.SHARDS)
    signed.attach()
    signed.sign()  # with the first signature in the archive
    directory = signed.unzip()
    hashing = model_signing.hashing.Config().use_shard_serialization(shard_size=SHARD)
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=signed.public)
    config.set_hashing_config(hashing).verify(directory, signed.signature)
    flip_byte(directory / "w1", 5000)
    with pytest.raises(ValueError, match=f"Hash mismatch for 'w1:0:{SHARD}'"):
        config.verify(directory, signed.signature)


def test_an_archive_is_verified_without_its_signature_or_with_it(signed: Signed) -> None:
    signed.open().verify()
    signed.attach()
    signed.open().verify()
    sign.SignedArchive(str(signed.path), signed.public).verify()
    found = signed.open().tensor("w1", slice(-3, None))
    np.testing.assert_array_equal(found, weight(1)[-3:])


def test_rows_are_verified_from_their_shards(web: WebServer, tmp_path: Path) -> None:
    signed = Signed(tmp_path, sign.SHARDS)
    web.files[PATH] = signed.path.read_bytes()
    archive = signed.open(web.url(PATH))
    found = archive.tensor("w1", slice(300, 304))
    np.testing.assert_array_equal(found, weight(1)[300:304])
    expected = END_NBYTES + archive.entries["__MODEL_PROTO"].nbytes + SHARD
    assert web.nbytes == expected < len(web.files[PATH]) / 4
    assert len(web.requests) == 3
    found = archive.tensor("w1", slice(255, 257))  # of two shards
    np.testing.assert_array_equal(found, weight(1)[255:257])
    assert archive.tensor("w1", slice(0, 0)).shape == (0, SHAPE[1])


def test_a_tensor_is_verified_from_its_range(web: WebServer, signed: Signed) -> None:
    web.files[PATH] = signed.path.read_bytes()
    archive = signed.open(web.url(PATH))
    np.testing.assert_array_equal(archive.tensor("w1"), weight(1))
    sizes = [archive.entries[name].nbytes for name in ("__MODEL_PROTO", "w1")]
    assert web.nbytes == END_NBYTES + sum(sizes)
    archive.verify()


def forge(path: Path, name: str, offset: int) -> None:
    """Changes a byte of an entry, and its CRC-32 in the local header and in the directory."""
    data = path.read_bytes()
    entry = entry_of(data, name)
    flip_byte(path, entry.data_offset + offset)
    forged = path.read_bytes()
    content = forged[entry.data_offset : entry.data_offset + entry.nbytes]
    old, new = (struct.pack("<I", it) for it in (entry.crc32, zlib.crc32(content)))
    assert forged.count(old) == 2
    path.write_bytes(forged.replace(old, new))


def test_a_forged_weight_with_its_crc_is_refused(web: WebServer, signed: Signed) -> None:
    forge(signed.path, "w1", 300 * SHAPE[1] * 4)
    assert onnxarchive.check(signed.path, full=True) == []
    message = "w1.*: it was changed after it was signed"
    refused(signed.open().verify, message)
    web.files[PATH] = signed.path.read_bytes()
    archive = signed.open(web.url(PATH))
    refused(lambda: archive.tensor("w1"), message)
    refused(lambda: archive.tensor("w1", slice(300, 301)), message)
    np.testing.assert_array_equal(archive.tensor("w0"), weight(0))


def change_model(edit: onnxarchive.Edit) -> None:
    edit.model.graph.initializer[0].name = "w1"
    edit.model.graph.initializer[1].name = "w0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_model, r"__MODEL_PROTO\S*: it was (changed|not signed)"),
        (lambda edit: edit.assets.update({"new": b"x"}), "assets/new: it was not signed"),
        (lambda edit: edit.assets.update({"new": b""}), "assets/new: it was not signed"),
        (lambda edit: edit.assets.update({"empty": b"x"}), "assets/empty: it was (changed|not)"),
        (lambda edit: edit.assets.update({"labels.txt": b""}), "labels.txt: it was (changed|not)"),
        (lambda edit: edit.assets.pop("labels.txt"), "labels.txt: it was signed, and is missing"),
    ],
)
def test_changed_metadata_and_assets_are_refused(
    signed: Signed, change: Callable[[Any], object], message: str
) -> None:
    with onnxarchive.edit(signed.path) as edit:
        change(edit)
    assert onnxarchive.check(signed.path, full=True) == []
    refused(signed.open().verify, message)


def test_an_entry_of_no_bytes_is_signed_by_files_alone(tmp_path: Path) -> None:
    signed = Signed(tmp_path, sign.FILES)
    with onnxarchive.edit(signed.path) as edit:
        del edit.assets["empty"]
    refused(signed.open().verify, "assets/empty: it was signed, and is missing")
    with onnxarchive.edit(signed.path) as edit:
        edit.assets["empty"] = b""
    signed.open().verify()
    signed.method = sign.SHARDS
    refused(signed.sign, "assets/empty: it has no bytes, so no shard; sign by files")


def test_a_tensor_that_another_model_gives_is_refused(signed: Signed) -> None:
    with onnxarchive.edit(signed.path) as edit:
        change_model(edit)
    refused(lambda: signed.open().tensor("w0"), r"__MODEL_PROTO\S*: it was (changed|not signed)")


def test_an_entry_that_ends_with_a_shard_is_not_taken_for_a_longer_one(signed: Signed) -> None:
    rows = SHARD // (4 * SHAPE[1])
    shorter = [numpy_helper.from_array(weight(it)[:rows], f"w{it}") for it in range(2)]
    onnxarchive.save(model_of(*shorter), signed.path, models={}, assets={})
    assert signed.open().entries["w0"].nbytes == SHARD
    refused(lambda: signed.open().read("w0"), "w0: it was (changed|not signed, or with another)")


def test_a_local_header_that_other_readers_may_follow_is_refused(signed: Signed) -> None:
    name = entry_of(signed.path.read_bytes(), "w1").header_offset + 30
    flip_byte(signed.path, name)
    refused(signed.open().verify, "w1")


def with_payload(signature: Path, change: Callable[[str], str]) -> None:
    """Changes what a signature signs."""
    bundle = json.loads(signature.read_text())
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"]).decode()
    changed = change(payload)
    assert changed != payload
    envelope["payload"] = base64.b64encode(changed.encode()).decode()
    signature.write_text(json.dumps(bundle))


def test_a_changed_digest_or_signature_is_refused(signed: Signed, tmp_path: Path) -> None:
    before = signed.signature.read_text()
    manifest = json.loads(base64.b64decode(json.loads(before)["dsseEnvelope"]["payload"]))
    digest = manifest["predicate"]["resources"][-1]["digest"]
    other = "0" * len(digest)
    with_payload(signed.signature, lambda payload: payload.replace(digest, other))
    refused(signed.open, "the signature was changed")
    bundle = json.loads(before)
    found = bundle["dsseEnvelope"]["signatures"][0]
    found["sig"] = base64.b64encode(base64.b64decode(found["sig"])[:-1] + b"\0").decode()
    signed.signature.write_text(json.dumps(bundle))
    refused(signed.open, "the signature was changed")
    signed.signature.write_text(before)
    signed.open()
    (tmp_path / "other").mkdir()
    signed.public = make_keys(tmp_path / "other")[1]
    refused(signed.open, "Key mismatch")


# What sigstore gives for an identity.
BY_IDENTITY = {"certificate": {"rawBytes": "AAAA"}, "tlogEntries": []}


def change_bundle(signature: Path, change: Callable[[Any], object]) -> None:
    bundle = json.loads(signature.read_text())
    change(bundle)
    signature.write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: change_bundle(path, lambda it: it["dsseEnvelope"].update(signatures=[])),
        lambda path: change_bundle(path, lambda it: it.update(verificationMaterial=BY_IDENTITY)),
    ],
)
def test_what_is_no_signature_by_a_key_is_refused(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    signed = Signed(tmp_path, sign.FILES)
    make(signed.signature)
    refused(signed.open, "expected a signature by a key, found another file")


def test_rows_that_cannot_be_cut_from_the_bytes_are_refused(tmp_path: Path) -> None:
    path, signature = tmp_path / "m.onnxa", tmp_path / "model.sig"
    nibbles = helper.make_tensor("n", TensorProto.UINT2, [3, 4096 + 3], [1, 2, 3] * 4099)
    inside = numpy_helper.from_array(np.ones(2, np.float32), "inside")
    onnxarchive.save(model_of(nibbles, inside), path)
    private, public = make_keys(tmp_path)
    sign.sign(path, private, signature)
    archive = sign.SignedArchive(str(path), public, signature)
    expected = numpy_helper.to_array(nibbles)
    np.testing.assert_array_equal(archive.tensor("n"), expected)
    refused(lambda: archive.tensor("n", slice(1, 2)), "n: it has no rows of whole bytes")
    refused(lambda: archive.tensor("inside"), "the default model has no tensor 'inside' outside")
    refused(lambda: archive.tensor("w"), "the default model has no tensor 'w' outside")


@pytest.mark.parametrize("rows", [slice(0, 4, 2), slice(5, 2)])
def test_rows_that_are_no_range_are_refused(tmp_path: Path, rows: slice) -> None:
    archive = Signed(tmp_path, sign.FILES).open()
    refused(lambda: archive.tensor("w0", rows), "expected rows FIRST:LAST, found")


def test_the_recipe_runs_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["sign.py", *map(str, arguments)])
        sign.main()
        return capsys.readouterr().out

    private, public = make_keys(tmp_path)
    path, signature = tmp_path / "m.onnxa", tmp_path / "model.sig"
    onnxarchive.save(model_of(numpy_helper.from_array(weight(0), "w")), path)
    assert run("sign", path, private, signature, "--shards") == f"{path}: sign: done\n"
    assert run("verify", path, public, signature) == f"{path}: verify: done\n"
    printed = run("verify", path, public, signature, "--tensor", "w", "--rows", "0:4")
    assert printed == f"{weight(0)[:4]}\n{path}: verify: done\n"
    flip_byte(path, 1000)
    with pytest.raises(SystemExit, match=rf"m\.onnxa: w:0:{SHARD}: it was changed"):
        run("verify", path, public, signature, "--tensor", "w")
    with pytest.raises(SystemExit, match=r"m\.onnxa: there is no signature assets/model\.sig"):
        run("verify", path, public)
    path.write_bytes(b"text")
    with pytest.raises(SystemExit, match=r"^\S*m\.onnxa: expected an ONNX archive, found a text"):
        run("verify", path, public, signature)


def test_the_version_whose_half_public_names_are_used_is_pinned() -> None:
    pin = f"model-signing=={model_signing.__version__}"
    assert pin in RECIPE.read_text()
    assert pin in (ROOT / ".ci" / "run").read_text()
