"""The files a plain module can be written to, and how each is opened again in its own runtime."""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ..tensors import to_safetensors
from .module import ExportModule

Predictor = Callable[[Tensor], Tensor]
"""[batch, ...] examples -> logits."""


class MissingDependency(Exception):  # noqa: N818 - named for what is wrong
    """A format whose packages are not installed; `hint` says how to get them."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Format:
    write: Callable[[ExportModule, Tensor, Path], None]  # the module, two examples as it takes them, where to
    open: Callable[
        [Path, Callable[[], ExportModule]], Predictor
    ]  # and, should the file hold no graph, the module without weights
    suffix: str
    runtime: str  # the distribution that runs it
    extra: str = ""  # of this package, that brings what is needed
    needs: tuple[str, ...] = ()
    one_at_a_time: bool = False  # takes batches of one example alone

    def require(self, name: str) -> None:
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            said = f"{name} needs {' and '.join(missing)}, which is not installed"
            raise MissingDependency(said, f"pip install 'fedloom[{self.extra}]'")

    @property
    def runtime_version(self) -> str:
        return f"{self.runtime} {version(self.runtime)}"


def exported_program(module: ExportModule, examples: Tensor, any_batch: bool = True) -> torch.export.ExportedProgram:
    """The module's graph, for batches of any size or of one."""
    shapes = ({0: torch.export.Dim("batch", min=1)},) if any_batch else None
    with quiet():
        made = torch.export.export(module, (examples if any_batch else examples[:1],), dynamic_shapes=shapes)
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of this machine
    return made


def _write_safetensors(module: ExportModule, examples: Tensor, path: Path) -> None:
    path.write_bytes(to_safetensors(module.state_dict()))


def _open_safetensors(path: Path, rebuilt: Callable[[], ExportModule]) -> Predictor:
    from safetensors.torch import load_file

    module = rebuilt()
    module.load_state_dict(load_file(path))
    return module


def _write_pt2(module: ExportModule, examples: Tensor, path: Path) -> None:
    with quiet():
        torch.export.save(exported_program(module, examples), path)


def _open_pt2(path: Path, rebuilt: Callable[[], ExportModule]) -> Predictor:
    with quiet():
        made: Predictor = torch.export.load(path).module()
    return made


def _write_onnx(module: ExportModule, examples: Tensor, path: Path) -> None:
    program = exported_program(module, examples)
    with quiet():
        made = torch.onnx.export(
            program, input_names=["input"], output_names=["logits"], dynamo=True, verbose=False, optimize=True
        )
        assert made is not None
        for node in made.model.graph.all_nodes():
            node.metadata_props.clear()  # what the exporter notes for its own makers, and is most of a small file
        made.save(path, external_data=False)


def _open_onnx(path: Path, rebuilt: Callable[[], ExportModule]) -> Predictor:
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _write_executorch(module: ExportModule, examples: Tensor, path: Path) -> None:
    """For one example: a device plans its memory before it runs, for the largest batch that may ever come."""
    program = exported_program(module, examples, any_batch=False)
    with quiet():
        lowered = import_module("executorch.exir").to_edge(program).to_executorch()
        path.write_bytes(lowered.buffer)


def _open_executorch(path: Path, rebuilt: Callable[[], ExportModule]) -> Predictor:
    with quiet():
        program = import_module("executorch.runtime").Runtime.get().load_program(path)
    method = program.load_method("forward")

    def answer(x: Tensor) -> Tensor:
        # what it hands out is overwritten by its next answer
        return torch.cat([method.execute([one.unsqueeze(0).contiguous()])[0].clone() for one in x])

    answer.program = program  # type: ignore[attr-defined]  # its method lives no longer than it
    return answer


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters say of themselves: nothing that whoever exports could act on."""
    noisy = logging.getLogger("torch.onnx._internal.exporter._registration")  # that torchvision is not there
    before = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            warnings.filterwarnings("ignore", "open_text is deprecated", DeprecationWarning)  # of ExecuTorch's reading
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnxscript|executorch)\b.*")
            yield
    finally:
        noisy.setLevel(before)


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(_write_safetensors, _open_safetensors, ".safetensors", "torch"),
    "pt2": Format(_write_pt2, _open_pt2, ".pt2", "torch"),
    "onnx": Format(_write_onnx, _open_onnx, ".onnx", "onnxruntime", "export", ("onnx", "onnxscript", "onnxruntime")),
    "executorch": Format(
        _write_executorch, _open_executorch, ".pte", "executorch", "executorch", ("executorch",), one_at_a_time=True
    ),
}
