"""Signs an archive with a key and `model-signing`, and verifies the signature.

pip install onnxarchive model-signing pyOpenSSL
openssl ecparam -genkey -name prime256v1 -noout -out private.pem
openssl ec -in private.pem -pubout -out public.pem
python sign.py sign model.onnxa private.pem
python sign.py verify model.onnxa public.pem

The signature, `model.onnxa.sig`, holds the SHA-256 of the archive, so no entry needs its own hash.
`verify` also checks the archive, and so refuses files that zip readers are known to read
differently. If you can send a hash by a channel that the receiver trusts, you need no key: use
`sha256sum`. (`model-signing` 1.1.1 imports pyOpenSSL, but does not declare this requirement.)
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
    """Verifies the signature of an archive with the public key, then checks the archive.

    Raises:
        ValueError: The archive or the signature has changed, the key is wrong, or the check finds a
            fault.
    """
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key)
    config.verify(archive, signature_of(archive))
    if findings := onnxarchive.check(archive):
        raise ValueError(findings[0])


def signature_of(archive: Path) -> Path:
    """The path of an archive's signature, beside the archive."""
    return archive.with_name(f"{archive.name}.sig")


def main() -> None:
    """Signs or verifies; a wrong signature or archive ends with a message and exit status 1."""
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
