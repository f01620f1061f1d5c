"""The file formats for an exported module: how each is written, and how it is opened in its own runtime."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..registry import Registry
from ..tensors import to_safetensors
from .module import ExportModule

Predictor = Callable[[Tensor], Tensor]
"""[batch, ...] examples -> logits."""


class MissingDependency(Exception):  # noqa: N818 - named for what is wrong
    """The packages of a format are not installed.

    Parameters
    ----------
    message : which are missing.
    hint : how to install them.
    """

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Format:
    """A file format for an exported module: how it is written, and how it is opened in its own runtime.

    Parameters
    ----------
    write : writes a file: (module, two examples, path).
    open : opens one: (path, what builds the module if the file has no graph) -> a function from examples to logits.
    suffix : the suffix of the file.
    runtime : the distribution that runs it.
    extra : the extra of this package that installs the runtime; "": none is needed.
    needs : the modules that the extra installs.
    one_at_a_time : whether it takes only batches of one example.
    """

    write: Callable[[ExportModule, Tensor, Path], None]
    open: Callable[[Path, Callable[[], ExportModule]], Predictor]
    suffix: str
    runtime: str
    extra: str = ""
    needs: tuple[str, ...] = ()
    one_at_a_time: bool = False

    def __str__(self) -> str:
        needs = f"; needs pip install 'fedloom[{self.extra}]'" if self.extra else ""
        return f"A {self.suffix} file, run by {self.runtime}{needs}."

    def require(self, name: str) -> None:
        """Raise `MissingDependency` if the format's packages are not installed.

        Parameters
        ----------
        name : what the format is called in the message.
        """
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            message = f"{name} needs {' and '.join(missing)}, which is not installed"
            raise MissingDependency(message, f"pip install 'fedloom[{self.extra}]'")

    @property
    def runtime_version(self) -> str:
        """The runtime and its version."""
        return f"{self.runtime} {version(self.runtime)}"


def exported_program(module: ExportModule, examples: Tensor, any_batch: bool = True) -> torch.export.ExportedProgram:
    """The module's graph, for batches of any size or of one example."""
    shapes = ({0: torch.export.Dim("batch", min=1)},) if any_batch else None
    with suppress_warnings():
        program = torch.export.export(module, (examples if any_batch else examples[:1],), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of this machine
    return program


def _metadata(module: ExportModule) -> dict[str, str]:
    """What a file says of itself beside its graph and weights."""
    return {"class_names": json.dumps(module.class_names)} if module.class_names else {}


def _write_safetensors(module: ExportModule, examples: Tensor, path: Path) -> None:
    path.write_bytes(to_safetensors(module.state_dict(), _metadata(module)))


def _open_safetensors(path: Path, build_module: Callable[[], ExportModule]) -> Predictor:
    from safetensors.torch import load_file

    module = build_module()
    module.load_state_dict(load_file(path))
    return module


def _write_pt2(module: ExportModule, examples: Tensor, path: Path) -> None:
    with suppress_warnings():
        torch.export.save(exported_program(module, examples), path, extra_files=_metadata(module))


def _open_pt2(path: Path, build_module: Callable[[], ExportModule]) -> Predictor:
    with suppress_warnings():
        predictor: Predictor = torch.export.load(path).module()
    return predictor


def _name_batch_axis(graph: Any) -> None:
    """Call the batch axis "batch" everywhere: the exporter numbers its symbols."""
    symbol = str(graph.inputs[0].shape[0])
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if str(size) == symbol:
                value.shape[axis] = "batch"


def _write_onnx(module: ExportModule, examples: Tensor, path: Path) -> None:
    program = exported_program(module, examples)
    with suppress_warnings():
        onnx_program = torch.onnx.export(
            program, input_names=["input"], output_names=["logits"], dynamo=True, verbose=False, optimize=True
        )
        assert onnx_program is not None
        _name_batch_axis(onnx_program.model.graph)
        for node in onnx_program.model.graph.all_nodes():
            node.metadata_props.clear()  # debug information of the exporter, which is most of a small file
        onnx_program.model.metadata_props.update(_metadata(module))
        onnx_program.save(path, external_data=False)


def _open_onnx(path: Path, build_module: Callable[[], ExportModule]) -> Predictor:
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _write_executorch(module: ExportModule, examples: Tensor, path: Path) -> None:
    """For one example: memory is planned ahead, for the largest batch that may ever come."""
    program = exported_program(module, examples, any_batch=False)
    with suppress_warnings():
        lowered = import_module("executorch.exir").to_edge(program).to_executorch()
        path.write_bytes(lowered.buffer)


def _open_executorch(path: Path, build_module: Callable[[], ExportModule]) -> Predictor:
    with suppress_warnings():
        program = import_module("executorch.runtime").Runtime.get().load_program(path)
    method = program.load_method("forward")

    def predict(x: Tensor) -> Tensor:
        # cloned, because the next call overwrites the output
        return torch.cat([method.execute([example.unsqueeze(0).contiguous()])[0].clone() for example in x])

    predict.program = program  # type: ignore[attr-defined]  # the method must not outlive its program
    return predict


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress warnings of the exporters that a user cannot act on."""
    noisy = logging.getLogger("torch.onnx._internal.exporter._registration")  # warns that torchvision is missing
    before = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights")  # of every LSTM and GRU
            warnings.filterwarnings("ignore", "open_text is deprecated", DeprecationWarning)  # ExecuTorch
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnxscript|executorch)\b.*")
            yield
    finally:
        noisy.setLevel(before)


FORMATS: Registry[Format] = Registry(
    "export_formats",
    {
        "safetensors": Format(_write_safetensors, _open_safetensors, ".safetensors", "torch"),
        "pt2": Format(_write_pt2, _open_pt2, ".pt2", "torch"),
        "onnx": Format(
            _write_onnx, _open_onnx, ".onnx", "onnxruntime", "export", ("onnx", "onnxscript", "onnxruntime")
        ),
        "executorch": Format(
            _write_executorch, _open_executorch, ".pte", "executorch", "executorch", ("executorch",), one_at_a_time=True
        ),
    },
)
