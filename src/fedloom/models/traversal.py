"""The layers and weights of a module, in torch's order.

torch's own iterators go through a generator for every level of every layer. Methods that draw a subnet in every step
look at a new module each time, several times over, and spent more on that than on building it.
"""

from torch import nn


def named_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All layers with their names, as `module.named_modules()` gives them: the module itself first, each of them once.

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
