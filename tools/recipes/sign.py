"""Signs an archive with a key, by `model-signing`, and verifies it.

pip install onnxarchive model-signing pyOpenSSL
openssl ecparam -genkey -name prime256v1 -noout -out private.pem
openssl ec -in private.pem -pubout -out public.pem
python sign.py sign model.onnxa private.pem
python sign.py verify model.onnxa public.pem

The signature, `model.onnxa.sig`, holds the SHA-256 of the archive. (`model-signing` 1.1.1 imports
pyOpenSSL without declaring it, so it is named above.) Who trusts the channel by which a hash
arrives needs no key: `sha256sum model.onnxa`, and `sha256sum -c` where it arrived.
A hash of the file is enough, since its bytes have one reading: `onnxarchive check` refuses others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import model_signing

import onnxarchive


def sign(archive: Path, key: Path) -> None:
    """Signs an archive with a private key."""
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=key)
    config.sign(archive, signature_of(archive))


def verify(archive: Path, key: Path) -> None:
    """Verifies an archive with the public key, then its format.

    Raises:
        ValueError: The archive or the signature has been changed, or another key has signed.
    """
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key)
    config.verify(archive, signature_of(archive))
    if findings := onnxarchive.check(archive):
        raise ValueError(findings[0])


def signature_of(archive: Path) -> Path:
    """The file with an archive's signature, beside it."""
    return archive.with_name(f"{archive.name}.sig")


def main() -> None:
    """Does what the command line says; a failure ends it with a message."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["sign", "verify"])
    parser.add_argument("archive", type=Path)
    parser.add_argument("key", type=Path)
    arguments = parser.parse_args()
    try:
        {"sign": sign, "verify": verify}[arguments.action](arguments.archive, arguments.key)
    except ValueError as error:
        raise SystemExit(f"{arguments.archive}: {error}") from None
    print(f"{arguments.archive}: {arguments.action}: done")


if __name__ == "__main__":
    main()
