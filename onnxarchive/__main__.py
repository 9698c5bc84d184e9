"""The command line as `python -m onnxarchive`."""

from onnxarchive.cli import run

if __name__ == "__main__":
    run()
