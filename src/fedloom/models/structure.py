"""What can be found out about a plain module, by looking at it or by running it once on made-up examples."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .interface import Inputs, as_outputs

STACKING = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def last_layer(module: nn.Module) -> str | None:
    """The layer that makes the last logits: the one with the label rows a module declares, else the last with weights.

    None for a module without weights.
    """
    declared = getattr(module, "label_rows", None)
    if declared:
        return str(declared[-1]).rpartition(".")[0]
    owners = [name for name, part in module.named_modules() if list(part.parameters(recurse=False))]
    return owners[-1] if owners else None


def label_rows(module: nn.Module, classes: int) -> tuple[str, ...]:
    """The weights that have one row per class: those of the last layer, or what the module names itself."""
    declared, last = getattr(module, "label_rows", None), last_layer(module)
    if declared is not None or last is None:
        return tuple(declared or ())
    own = module.get_submodule(last).named_parameters(recurse=False)
    return tuple(f"{last}.{key}".lstrip(".") for key, weight in own if weight.shape[:1] == (classes,))


def logits_made(module: nn.Module, inputs: Inputs) -> int:
    """How many numbers it ends in, for one example."""
    with torch.no_grad():
        made = as_outputs(module.eval()(inputs.blank(2)))
    return int(made.logits.shape[-1])


def behind_last_exit(module: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The weights that the last exit depends on."""
    with torch.inference_mode(False), torch.enable_grad():
        made = as_outputs(module.train()(inputs.blank(2)))
        names, weights = zip(*module.named_parameters(), strict=True)
        slopes = torch.autograd.grad(made.logits.sum(), weights, allow_unused=True)
    return tuple(name for name, slope in zip(names, slopes, strict=True) if slope is not None)


def unsliceable(module: nn.Module) -> tuple[str, ...]:
    """Weights of layers that stack several things on one axis, so that its first part means nothing."""
    return tuple(
        f"{owner}.{name}".lstrip(".")
        for owner, part in module.named_modules()
        if isinstance(part, STACKING)
        for name, _ in part.named_parameters()
    )


def layers(module: nn.Module) -> frozenset[tuple[type[nn.Module], tuple[tuple[str, Any], ...]]]:
    """What kinds of layers it is made of, with their switches."""
    return frozenset((type(part), switches(vars(part))) for part in module.modules())


def switches(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Those that say more than a size: truth values, also as 0 and 1, texts, and shares such as a dropout's."""
    return tuple(sorted((name, value) for name, value in values.items() if _says_more_than_a_size(value)))


def _says_more_than_a_size(value: Any) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and value in (0, 1))


def children(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_children())


def input_of(module: nn.Module, child: str, inputs: Inputs) -> Inputs:
    """What a child gets when the whole module runs."""
    seen: list[Tensor] = []
    hook = module.get_submodule(child).register_forward_pre_hook(lambda _, given: seen.extend(given))
    with torch.no_grad():
        module.eval()(inputs.blank(2))
    hook.remove()
    if len(seen) != 1:
        raise ValueError(f"{child} is no part that can run alone: in one pass it gets {len(seen)} tensors, not one")
    return inputs.passed_on(seen[0])


def folds(module: nn.Module) -> bool:
    return all(getattr(part, "folds", True) for part in module.modules())
