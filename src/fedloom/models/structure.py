"""What goes into a module and what comes out of it, and what can be learned about it by looking or by running it once
on artificial examples."""

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Family = Callable[..., nn.Module]
Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class InputSpec:
    """The shape of one example and, if it consists of tokens, the number of different token ids.

    Parameters
    ----------
    shape : the shape of one example.
    tokens : the number of token ids; None for examples of numbers.
    """

    shape: tuple[int, ...]
    tokens: int | None = None

    def zeros(self, *leading: int) -> Tensor:
        """All-zero examples.

        Parameters
        ----------
        leading : the axes in front of the example's own.
        """
        return torch.zeros(*leading, *self.shape, dtype=None if self.tokens is None else torch.int64)

    def random(self, generator: torch.Generator, *leading: int) -> Tensor:
        """Random examples.

        Parameters
        ----------
        generator : the source of randomness.
        leading : the axes in front of the example's own.
        """
        if self.tokens is None:
            return torch.randn(*leading, *self.shape, generator=generator)
        return torch.randint(self.tokens, (*leading, *self.shape), generator=generator)

    def for_submodule(self, batch: Tensor) -> "InputSpec":
        """The input of a submodule.

        Parameters
        ----------
        batch : [batch, ...], what the submodule receives when the whole module runs.
        """
        return InputSpec(tuple(batch.shape[1:]), None if batch.is_floating_point() else self.tokens)


def check_token_input(input_shape: tuple[int, ...], tokens: int | None) -> tuple[int, int]:
    """The sequence length and the number of token ids; raises for examples that are not token sequences."""
    if tokens is None or len(input_shape) != 1:
        raise ValueError(f"it needs sequences of tokens, but an example here is numbers of the shape {input_shape}")
    return input_shape[0], tokens


class Outputs(NamedTuple):
    """The outputs of a module for a batch; a module that returns one tensor has one exit.

    A family whose module returns `Outputs` can have early exits, and features that other methods align or distill.

    Parameters
    ----------
    exits : exit name -> logits [K, batch, (length,) classes], from shallow to deep. The module itself knows no devices:
        its tensors have no axis K. For pixels it returns [batch, classes, height, width], as torch's losses take them.
    taps : stage name -> activations [K, batch, channels, ...]; "features", the last layer's input, is there whatever
        the module returns, if that input is a batch of numbers.

    Examples
    --------
    >>> Outputs(exits={"logits": logits}, taps={"features": features})
    """

    exits: Mapping[str, Tensor]
    taps: Mapping[str, Tensor]

    @property
    def logits(self) -> Tensor:
        """The logits of the last exit."""
        return list(self.exits.values())[-1]


def as_outputs(result: Any) -> Outputs:
    """Wrap what a module's forward returned: logits, `Outputs`, or an object with `logits`, as transformers have it.

    Raises
    ------
    TypeError
        For anything else, such as a tuple.
    """
    if isinstance(result, Outputs):
        return result
    logits = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return Outputs({"logits": logits}, {})
    found = f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        found += f" with {', '.join(map(repr, result)) or 'nothing'}"
    elif isinstance(result, tuple | list):
        found += f" of {len(result)}"
    raise TypeError(
        f"its forward returned {found}; it must return the logits as one tensor [batch, classes], "
        "fedloom.models.Outputs, or an object with the attribute `logits`"
    )


def named_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All layers with their names, as `module.named_modules()` gives them: the module itself first, each of them once.

    torch's own iterators go through a generator for every level of every layer. Methods that draw a subnet in every
    step look at a new module each time, several times over, and spent more on that than on building it.

    Parameters
    ----------
    module : the module.
    """
    found: dict[int, tuple[str, nn.Module]] = {}

    def visit(name: str, layer: nn.Module) -> None:
        if id(layer) not in found:
            found[id(layer)] = name, layer
            for key, child in layer._modules.items():
                if child is not None:
                    visit(f"{name}.{key}" if name else key, child)

    visit("", module)
    return list(found.values())


def layers_of(module: nn.Module) -> list[nn.Module]:
    """All layers, as `module.modules()` gives them.

    Parameters
    ----------
    module : the module.
    """
    return [layer for _, layer in named_layers(module)]


def own_weights(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights of a layer itself, without those of the layers in it.

    Parameters
    ----------
    layer : the layer.
    """
    return [(key, weight) for key, weight in layer._parameters.items() if weight is not None]


def named_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All weights with their names, as `module.named_parameters()` gives them: each of them once.

    Parameters
    ----------
    module : the module.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, layer in named_layers(module):
        for key, weight in own_weights(layer):
            found.setdefault(id(weight), (f"{name}.{key}" if name else key, weight))
    return list(found.values())


def last_layer(module: nn.Module) -> str | None:
    """The layer that computes the last logits: the one of the declared `label_rows`, else the last one with weights.

    None for a module without weights.
    """
    declared = getattr(module, "label_rows", None)
    if declared:
        return str(declared[-1]).rpartition(".")[0]
    owners = [name for name, layer in named_layers(module) if own_weights(layer)]
    return owners[-1] if owners else None


def label_rows(module: nn.Module, classes: int) -> tuple[str, ...]:
    """The weights with one row per class: those of the last layer, or those that the module declares."""
    declared, last = getattr(module, "label_rows", None), last_layer(module)
    if declared is not None or last is None:
        return tuple(declared or ())
    weights = module.get_submodule(last).named_parameters(recurse=False)
    return tuple(f"{last}.{key}".lstrip(".") for key, weight in weights if weight.shape[:1] == (classes,))


def find_output_shape(module: nn.Module, inputs: InputSpec) -> tuple[int, ...]:
    """The shape of the last exit's logits for one example.

    Raises
    ------
    ValueError
        If the logits have no batch axis: torch's layers take a batch with too few axes for a single example.
    """
    with torch.no_grad():
        logits = as_outputs(module.eval()(inputs.zeros(2))).logits
    if logits.dim() < 1 or len(logits) != 2:
        raise ValueError(
            f"it takes a batch of examples of shape {inputs.shape} for a single example: its logits for two are "
            f"{tuple(logits.shape)}"
        )
    return tuple(logits.shape[1:])


def count_logits(module: nn.Module, inputs: InputSpec) -> int:
    """The length of the last axis of the last exit."""
    return int((1, *find_output_shape(module, inputs))[-1])


def sees_later_tokens(module: nn.Module, inputs: InputSpec) -> bool:
    """True if, in evaluation, the last exit's prediction at a token depends on the tokens after it."""
    x = inputs.random(torch.Generator().manual_seed(0), 8)
    changed = x.clone()
    changed[:, -1] = (x[:, -1] + 1) % (inputs.tokens or 2)
    with torch.no_grad():
        before, after = (as_outputs(module.eval()(tokens)).logits[:, :-1] for tokens in (x, changed))
    return not torch.allclose(before, after, rtol=1e-4, atol=1e-6)


def try_training(module: nn.Module, inputs: InputSpec) -> None:
    """Raise what the module raises in training: instance norm, for one, does not train on maps of one pixel.

    A batch may have a single example, on which only batch norm is allowed to fail here: devices fold its layers.
    """
    has_batch_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module.train()(inputs.zeros(2 if has_batch_norm else 1))


def classes_last(outputs: Outputs, axis: int) -> Outputs:
    """The outputs of a block of devices with the classes in the last axis of every exit.

    `axis` is where the module itself has them, which knows no devices.
    """
    return outputs._replace(exits={name: logits.movedim(axis + 1, -1) for name, logits in outputs.exits.items()})


def last_exit_weights(module: nn.Module, inputs: InputSpec) -> tuple[str, ...]:
    """The weights that learn from the last exit."""
    with torch.inference_mode(False), torch.enable_grad():
        outputs = as_outputs(module.train()(inputs.zeros(2)))
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        names, weights = zip(*named, strict=True)
        gradients = torch.autograd.grad(outputs.logits.sum(), weights, allow_unused=True)
    return tuple(name for name, gradient in zip(names, gradients, strict=True) if gradient is not None)


def layer_weights(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The trained weights of each layer of the list that the module names in `layer_list`, from shallow to deep.

    Empty for a module that names none.
    """
    listed = getattr(module, "layer_list", None)
    if listed is None:
        return ()
    return tuple(
        tuple(f"{listed}.{number}.{name}" for name, weight in layer.named_parameters() if weight.requires_grad)
        for number, layer in enumerate(module.get_submodule(listed).children())
    )


def is_own_family(build: Family) -> bool:
    """True for a function of this package, which draws weights in no other way than torch's layers and ours."""
    return inspect.isfunction(build) and build.__module__.startswith("fedloom.models.")


def has_known_layers(module: nn.Module) -> bool:
    """True if all layers, the outermost too, are torch's or ours: what they do depends on no number of examples."""
    return all(type(layer).__module__.startswith(("torch.nn.", "fedloom.models.")) for layer in layers_of(module))


PAIRS_OF_SIZES = ("kernel_size", "stride", "padding")


def layer_kinds(module: nn.Module) -> frozenset[tuple[type[nn.Module], tuple[tuple[str, Any], ...]]]:
    """The types of its layers, with all their settings that are not sizes; of other pairs those of 0 and 1.

    So a convolution with dilation is of another kind than one without, and pooling to one cell than to several.
    """
    return frozenset((type(layer), non_size_settings(vars(layer)) + _unit_pairs(layer)) for layer in layers_of(module))


def _unit_pairs(layer: nn.Module) -> tuple[tuple[str, Any], ...]:
    pairs = {name: value for name, value in vars(layer).items() if isinstance(value, tuple) and name[0] != "_"}
    return tuple(
        (name, pair)
        for name, pair in sorted(pairs.items())
        if name not in PAIRS_OF_SIZES and all(isinstance(one, int) and one in (0, 1) for one in pair)
    )


def non_size_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings that are more than a size: booleans (also as 0 and 1), strings, and fractions such as dropout's."""
    return tuple(sorted((name, value) for name, value in settings.items() if _is_switch(value)))


def _is_switch(value: Any) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and value in (0, 1))


def centered_start(axis: int, small: int, large: int) -> int:
    """Where a smaller size begins on an axis of a weight: channels at the first, kernels so that centers coincide."""
    return (large - small) // 2 if axis >= 2 else 0


def centered(axis: int, small: int, large: int) -> slice:
    """The part of an axis that a smaller size covers: the first channels, the center of kernels."""
    start = centered_start(axis, small, large)
    return slice(start, start + small)


def part_of(large: Tensor | None, small: Tensor) -> Tensor:
    """The part of a larger model's weight that a smaller size covers; `small` itself if it does not fit in."""
    if large is None or large.dim() != small.dim() or any(map(operator.gt, small.shape, large.shape)):
        return small
    for axis, (length, whole) in enumerate(zip(small.shape, large.shape, strict=True)):
        large = large.narrow(axis, centered_start(axis, length, whole), length)
    return large.contiguous()


def child_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_children())


def infer_child_input(module: nn.Module, child: str, inputs: InputSpec) -> InputSpec:
    """The input that a child receives when the whole module runs."""
    received: list[Tensor] = []
    hook = module.get_submodule(child).register_forward_pre_hook(lambda _, arguments: received.extend(arguments))
    with torch.no_grad():
        module.eval()(inputs.zeros(2))
    hook.remove()
    if len(received) != 1:
        raise ValueError(f"{child} cannot run on its own: one pass gives it {len(received)} tensors instead of one")
    return inputs.for_submodule(received[0])


def is_foldable(module: nn.Module) -> bool:
    """False if a layer declares `foldable = False`: its activations have no channel axis."""
    return all(getattr(layer, "foldable", True) for layer in layers_of(module))


DRAWS = frozenset({nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_})
"""What draws the weights of torch's layers and ours, as a whole: functions that draw until a number fits, such as
`trunc_normal_`, would never end if what they call drew nothing."""


class _WithoutDrawing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            tensor.detach().zero_()
            return tensor
        return func(*args, **kwargs)


def build_skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """A module that is built for its structure: arbitrary weights, and everything else as it should be.

    Drawing initial weights takes most of the time of building a module, and methods that draw a subnet in every step
    build one for each. It is for our own families alone: others may do whatever they like while they build, such as to
    fill a cache. A module with buffers, which might be computed from drawn numbers, or with layers that are neither
    torch's nor ours, is built as it is.

    Parameters
    ----------
    build : builds the module.
    """
    try:
        with _WithoutDrawing():
            module = build()
    except Exception:  # a family may look at its weights; if the error is another one, it is raised again
        return build()
    return module if has_known_layers(module) and not _has_constants(module) else build()


def _has_constants(module: nn.Module) -> bool:
    """True if there are buffers, but for the statistics of batch norm."""
    return any(
        buffer is not None
        for layer in layers_of(module)
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm)
        for buffer in layer._buffers.values()
    )
