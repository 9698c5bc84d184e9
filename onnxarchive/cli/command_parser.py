"""The parser of one command's arguments, with options before, between and after the paths."""

from __future__ import annotations

import argparse
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Parses options between positional arguments: `convert model.onnx --force model.onnxa`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; see `argparse.ArgumentParser`."""
        # `parse_known_intermixed_args` refuses subcommands, and forgets "--".
        if self._subparsers is not None or "--" in args:
            return super().parse_known_args(args, namespace)
        # In some versions of Python, `parse_known_intermixed_args` calls `self.parse_known_args`.
        # The attribute that is set here sends this call to the base class.
        self.__dict__["parse_known_args"] = super().parse_known_args
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            del self.__dict__["parse_known_args"]
