"""Pushes an archive to a registry of OCI artifacts, then reads and runs it from there.

pip install 'onnxarchive[ort,remote]' oras
REGISTRY_TOKEN=... python registry.py model.onnxa registry.example/team/model:1.0

The archive is a layer, which a registry serves by ranges. Every function and command that takes a
URL takes the layer's, with the token in the option `default_headers`:

onnxarchive ls URL --storage-option default_headers='{"authorization": "Bearer ..."}'

The registry's token service issues the token, for `repository:team/model:pull,push`; `pull` is
enough to read. (By itself, oras 0.2 asks for a token to pull, and then cannot push with it.)

Hosted registries redirect requests for layers to a store, by a signed URL. With a header, which may
be secret, this is an error, unless `allow_redirects` is true. Then the registry alone gets
`Authorization`. The store gets the other headers and, in `Referer`, the layer's URL: put no secret
into those.
"""

from __future__ import annotations

import os
import sys

from oras.client import OrasClient

import onnxarchive


def push(path: str, target: str, token: str) -> str:
    """Pushes an archive as the only layer of an artifact; returns the URL of the layer."""
    client = OrasClient(insecure=target.startswith(("127.0.0.1:", "localhost:")))
    client.auth.set_token_auth(token)
    file = f"{path}:application/octet-stream"
    # In chunks, since oras holds all that it sends at once in memory.
    client.push(target, files=[file], disable_path_validation=True, do_chunked=True)
    (layer,) = client.get_manifest(target)["layers"]
    return f"{client.prefix}://{client.get_container(target).get_blob_url(layer['digest'])}"


def main() -> None:
    """Pushes an archive, then reads a row of its largest tensor and makes a session."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    token = os.environ.get("REGISTRY_TOKEN", "")
    url = push(sys.argv[1], sys.argv[2], token)
    print(url)
    headers = {"authorization": f"Bearer {token}"}
    options = {"default_headers": headers, "allow_redirects": True}
    with onnxarchive.open(url, storage_options=options) as archive:
        part = max(map(archive.get_slice, archive.tensors), key=lambda part: part.nbytes)
        print(part.name, part[:1])  # this row is read, and no other
    # Downloaded once; later sessions only ask the registry whether it still has the layer.
    session = onnxarchive.session(url, cache=True, storage_options=options)
    print("outputs:", *(it.name for it in session.get_outputs()))


if __name__ == "__main__":
    main()
