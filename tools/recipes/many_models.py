"""Converts models in a bucket to archives in a bucket, on a Dask cluster.

pip install 'onnxarchive[remote]' distributed
python many_models.py s3://bucket/models s3://bucket/archives --scheduler tcp://scheduler:8786

Each worker streams from store to store. Credentials come from the environment of this process and
of the workers. Or give `convert_many` the argument `storage_options`: the workers get it, too.
Archives that exist are skipped, so a run can be repeated.
"""

from __future__ import annotations

import argparse

from distributed import Client, LocalCluster

import onnxarchive


def show(outcome: onnxarchive.Conversion, count: int, total: int) -> None:
    """Prints the outcome of a conversion."""
    text = outcome.error or ("there already" if outcome.is_skipped else f"{outcome.nbytes:,} bytes")
    print(f"{count}/{total} {outcome.source}: {text}", flush=True)


def main() -> None:
    """Converts the models; the exit status is 1 if a conversion failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models")
    parser.add_argument("archives")
    parser.add_argument("--scheduler", help="default: four processes on this machine")
    arguments = parser.parse_args()
    cluster = arguments.scheduler or LocalCluster(
        n_workers=4, threads_per_worker=1, dashboard_address=None
    )
    with Client(cluster) as client, client.get_executor() as executor:
        outcomes = onnxarchive.convert_many(
            [arguments.models], arguments.archives, executor, skip_existing=True, on_done=show
        )
    if arguments.scheduler is None:
        cluster.close()
    raise SystemExit(any(outcome.error is not None for outcome in outcomes))


if __name__ == "__main__":
    main()
