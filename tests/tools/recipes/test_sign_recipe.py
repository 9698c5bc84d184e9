"""The recipe that signs an archive and verifies it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from models import weight_model
from processes import completed

import onnxarchive

pytestmark = pytest.mark.tool

RECIPE = Path(__file__).resolve().parents[3] / "tools" / "recipes" / "sign.py"


def make_keys(directory: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = directory / "private.pem", directory / "public.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, RECIPE, *map(str, arguments)])


def test_a_signature_is_of_these_bytes_by_this_key(tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="model-signing or pyOpenSSL is not installed")
    archive = tmp_path / "m.onnxa"
    onnxarchive.save(weight_model(1), archive)
    private, public = make_keys(tmp_path)
    (tmp_path / "other").mkdir()
    done = run("sign", archive, private)
    assert done.returncode == 0, done.stderr
    done = run("verify", archive, public)
    assert done.stdout == f"{archive}: verify: done\n", done.stderr

    done = run("verify", archive, make_keys(tmp_path / "other")[1])
    assert done.returncode == 1
    assert done.stderr.startswith(f"{archive}: ")
    onnxarchive.save(weight_model(2), archive)
    done = run("verify", archive, public)
    assert done.returncode == 1
    assert "Signature mismatch" in done.stderr
