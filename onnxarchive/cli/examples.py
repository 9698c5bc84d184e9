"""An example for each command, shown at the end of the command's help."""

from __future__ import annotations

from typing import Any, Final

EXAMPLES: Final = {
    "convert": "convert model.onnx archive.onnxa",
    "export": "export model.onnxa exported.onnx",
    "link": "link model.onnxa linked.onnx",
    "extract": "extract model.onnxa unzipped",
    "ls": "ls model.onnxa",
    "info": "info model.onnxa --model decoder",
    "models": "models model.onnxa",
    "check": "check --full model.onnxa",
    "diff": "diff model.onnxa other.onnxa",
    "replace-model": "replace-model model.onnxa decoder.onnx --name decoder",
    "remove-model": "remove-model model.onnxa decoder",
    "rename-model": "rename-model model.onnxa decoder encoder",
    "assets": "assets ls model.onnxa",
    "assets ls": "assets ls model.onnxa",
    "assets add": "assets add model.onnxa labels.txt",
    "assets rm": "assets rm model.onnxa labels.txt",
    "assets cat": "assets cat model.onnxa labels.txt",
    "set-metadata": "set-metadata model.onnxa author=Ada",
    "recover": "recover model.onnxa",
    "run": "run model.onnxa --repeat 5",
    "view": "view model.onnxa --model decoder",
    "download": "download https://example.com/model.onnxa",
    "cat": "cat model.onnxa layer.0/weight > weight.npy",
    "cache": "cache ls",
    "cache ls": "cache ls",
    "cache clear": "cache clear https://example.com/model.onnxa",
    "completion": "completion bash > onnxarchive.bash",
}
"""Arguments by command."""


def add_examples(commands: Any) -> None:
    """Puts an example at the end of each command's help."""
    for command in commands.choices.values():
        name = command.prog.removeprefix("onnxarchive ")
        command.epilog = f"Example: onnxarchive {EXAMPLES[name]}"
        if command._subparsers is not None:
            add_examples(command._subparsers._group_actions[0])
