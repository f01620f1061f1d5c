"""Parameters, multiply-adds, FLOPs and megabytes as in HeteroFL's tables, and of the other papers' models."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom.models import MODELS, Cost, Model, build_model, compute_cost
from fedloom.tensors import payload_bytes

WIDTHS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}

# level: parameters, published FLOPs, multiply-adds, megabytes
CONVNET = {
    "a": (1_556_874, 80_504_320, 39_974_912, 5.94),
    "b": (391_370, 20_493_056, 10_107_904, 1.49),
    "c": (98_922, 5_306_752, 2_584_064, 0.38),
    "d": (25_274, 1_418_432, 674_560, 0.10),
    "e": (6_594, 400_480, 182_912, 0.03),
}
PRERESNET = {
    "a": (9_622_090, 330_246_144, 328_930_304, 36.71),
    "b": (2_408_746, 83_334_144, 82_676_224, 9.19),
    "c": (603_802, 21_219_840, 20_890_880, 2.30),
    "d": (151_762, 5_498_112, 5_333_632, 0.58),
    "e": (38_350, 1_471_104, 1_388_864, 0.15),
}
PRERESNET_TWO_BLOCKS_EACH = {"a": 11_172_170, "b": 2_796_714, "c": 701_018, "d": 176_178, "e": 44_510}

# level: parameters, published FLOPs in millions, megabytes; parameters with one word less
TRANSFORMER = {
    "a": (19_263_999, "1367.97", "73.49", 19_263_486),
    "b": (9_107_967, "614.78", "34.74", 9_107_710),
    "c": (4_435_455, "290.09", "16.92", 4_435_326),
    "d": (2_200_575, "140.72", "8.39", 2_200_510),
    "e": (1_108_479, "69.28", "4.23", 1_108_446),
}

# settings, classes, parameters; stages = 2 is the simple net
PREACTRESNET: list[tuple[dict[str, Any], int, int]] = [
    ({"exit_after": 0}, 10, 11_171_146),
    ({"exit_after": 0}, 100, 11_217_316),
    ({"stages": 2}, 10, 695_371),
    ({"stages": 2}, 100, 879_781),
    ({}, 10, 11_191_637),
    ({}, 100, 11_422_217),
    ({"stages": 2, "exit_pool": "global"}, 10, 676_171),
    ({"stages": 2, "exit_pool": "global"}, 100, 687_781),
    ({"exit_pool": "global"}, 10, 11_172_437),
    ({"exit_pool": "global"}, 100, 11_230_217),
]
# on 28 x 28 pixels of grey, one block in each stage: stages, parameters, multiply-adds
REDUCED_PREACTRESNET = {
    (8, 16, 32, 64): [(2, 7_459, 1_664_640), (4, 80_077, 3_285_248)],
    (16, 32, 64, 128): [(2, 24_379, 6_540_544), (4, 312_965, 13_021_696)],
}
SHALLOW: dict[str, Any] = {"depths": (1, 1, 1, 1), "kernels": (3, 3, 3, 3)}
# settings, classes, parameters, multiply-adds
MOBILENET: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "largest": ({}, 100, 1_951_076, 13_413_376),
    "largest, ten classes": ({}, 10, 1_858_826, 13_321_216),
    "medium": ({**SHALLOW, "kernels": (5, 5, 5, 5)}, 100, 731_620, 5_950_464),
    "smallest as released": ({**SHALLOW, "widths": (32, 64, 128, 512)}, 100, 210_116, 1_689_088),
    "smallest of the paper": ({**SHALLOW, "widths": (32, 64, 128, 256)}, 100, 118_212, 1_401_344),
    "with shortcuts it never uses": ({"spare_shortcuts": True}, 100, 3_081_572, 13_413_376),
}

# of FedHeNN; layers of convolution and fully connected ones: settings, classes, parameters
LENET: dict[str, tuple[dict[str, Any], int, int]] = {
    "1 and 1": ({"convs": (64,), "hidden": ()}, 10, 130_314),
    "1 and 2": ({"convs": (64,), "hidden": (256,)}, 10, 3_218_954),
    "2 and 2": ({"hidden": (120,)}, 10, 300_658),
    "2 and 3": ({}, 10, 307_842),
    "2 and 3, a hundred classes": ({}, 100, 313_692),
    "2 and 4": ({"hidden": (200, 120, 64)}, 10, 460_042),
    "3 and 3": ({"convs": (64, 64, 128), "kernels": (5, 5, 3), "pooled": 2}, 10, 327_938),
    "for CIFAR-100": ({"convs": (64, 128), "hidden": (256, 128)}, 100, 1_075_044),
    "of LG-FedAvg": ({"convs": (6, 16), "hidden": (120, 100)}, 10, 64_102),
}
# of LG-FedAvg, as HeteroFL's tables print it: parameters, published FLOPs, megabytes
MLP = {(1, 28, 28): (633_226, 1_264_128, 2.42), (3, 32, 32): (1_804_682, 3_607_040, 6.88)}
# FedIN's A to E by their extra blocks: parameters in colour, without biases of convolutions, and of grey images
SPLITNET = {
    (2, 3): (6_261_962, 6_255_306, 6_260_810),
    (2, 1): (4_947_402, 4_942_026, 4_946_250),
    (2, 2): (5_604_682, 5_598_666, 5_603_530),
    (1, 3): (6_097_162, 6_090_826, 6_096_010),
    (1, 1): (4_782_602, 4_777_546, 4_781_450),
}

# mode: mean parameters, mean FLOPs, mean megabytes over its letters
MNIST_MODES = {
    "a": ("1.6 M", "80.5 M", "5.94"),
    "a-b": ("974.1 K", "50.5 M", "3.72"),
    "a-c": ("827.9 K", "42.9 M", "3.16"),
    "a-d": ("791.1 K", "41.0 M", "3.02"),
    "a-e": ("781.7 K", "40.5 M", "2.98"),
    "a-b-c": ("682.4 K", "35.4 M", "2.60"),
    "a-b-d": ("657.8 K", "34.1 M", "2.51"),
    "a-b-e": ("651.6 K", "33.8 M", "2.49"),
    "a-c-d": ("560.4 K", "29.1 M", "2.14"),
    "a-c-e": ("554.1 K", "28.7 M", "2.11"),
    "a-d-e": ("529.6 K", "27.4 M", "2.02"),
    "a-b-c-d": ("518.1 K", "26.9 M", "1.98"),
    "a-b-c-e": ("513.4 K", "26.7 M", "1.96"),
    "a-b-d-e": ("495.0 K", "25.7 M", "1.89"),
    "a-c-d-e": ("421.9 K", "21.9 M", "1.61"),
    "a-b-c-d-e": ("415.8 K", "21.6 M", "1.59"),
    "b": ("391.4 K", "20.5 M", "1.49"),
    "b-c": ("245.1 K", "12.9 M", "0.94"),
    "b-d": ("208.3 K", "11.0 M", "0.79"),
    "b-e": ("199.0 K", "10.4 M", "0.76"),
    "b-c-d": ("171.9 K", "9.1 M", "0.66"),
    "b-c-e": ("165.6 K", "8.7 M", "0.63"),
    "b-d-e": ("141.1 K", "7.4 M", "0.54"),
    "b-c-d-e": ("130.5 K", "6.9 M", "0.50"),
    "c": ("98.9 K", "5.3 M", "0.38"),
    "c-d": ("62.1 K", "3.4 M", "0.24"),
    "c-e": ("52.8 K", "2.9 M", "0.20"),
    "c-d-e": ("43.6 K", "2.4 M", "0.17"),
    "d": ("25.3 K", "1.4 M", "0.10"),
    "d-e": ("15.9 K", "909.5 K", "0.06"),
    "e": ("6.6 K", "400.5 K", "0.03"),
}
CIFAR10_MODES = {
    "a": ("9.6 M", "330.2 M", "36.71"),
    "a-b": ("6.0 M", "206.8 M", "22.95"),
    "a-c": ("5.1 M", "175.7 M", "19.50"),
    "a-d": ("4.9 M", "167.9 M", "18.64"),
    "a-e": ("4.8 M", "165.9 M", "18.43"),
    "a-b-c": ("4.2 M", "144.9 M", "16.07"),
    "a-b-d": ("4.1 M", "139.7 M", "15.49"),
    "a-b-e": ("4.0 M", "138.4 M", "15.35"),
    "a-c-d": ("3.5 M", "119.0 M", "13.20"),
    "a-c-e": ("3.4 M", "117.6 M", "13.05"),
    "a-d-e": ("3.3 M", "112.4 M", "12.48"),
    "a-b-c-d": ("3.2 M", "110.1 M", "12.19"),
    "a-b-c-e": ("3.2 M", "109.1 M", "12.09"),
    "a-b-d-e": ("3.1 M", "105.1 M", "11.65"),
    "a-c-d-e": ("2.6 M", "89.6 M", "9.93"),
    "a-b-c-d-e": ("2.6 M", "88.4 M", "9.78"),
    "b": ("2.4 M", "83.3 M", "9.19"),
    "b-c": ("1.5 M", "52.3 M", "5.75"),
    "b-d": ("1.3 M", "44.4 M", "4.88"),
    "b-e": ("1.2 M", "42.4 M", "4.67"),
    "b-c-d": ("1.1 M", "36.7 M", "4.02"),
    "b-c-e": ("1.0 M", "35.3 M", "3.88"),
    "b-d-e": ("866.3 K", "30.1 M", "3.30"),
    "b-c-d-e": ("800.7 K", "27.9 M", "3.05"),
    "c": ("603.8 K", "21.2 M", "2.30"),
    "c-d": ("377.8 K", "13.4 M", "1.44"),
    "c-e": ("321.1 K", "11.3 M", "1.22"),
    "c-d-e": ("264.6 K", "9.4 M", "1.01"),
    "d": ("151.8 K", "5.5 M", "0.58"),
    "d-e": ("95.1 K", "3.5 M", "0.36"),
    "e": ("38.4 K", "1.5 M", "0.15"),
}


def mnist_net(level: str, widest: str = "a") -> Model:
    sizes = {"width": WIDTHS[level], "widest": WIDTHS[widest]}
    return build_model("convnet", MODELS["convnet"], sizes, (1, 28, 28), 10)


def cifar_net(level: str, blocks: tuple[int, ...] = (1, 1, 1, 2)) -> Model:
    sizes = {"width": WIDTHS[level], "blocks": blocks}
    return build_model("preresnet", MODELS["preresnet"], sizes, (3, 32, 32), 10)


@lru_cache
def cost_of(family: str, level: str) -> Cost:
    return compute_cost(mnist_net(level) if family == "convnet" else cifar_net(level))


@pytest.mark.parametrize("level", WIDTHS)
@pytest.mark.parametrize(("family", "published"), [("convnet", CONVNET), ("preresnet", PRERESNET)])
def test_heterofl_level_counts_are_as_published(
    family: str, published: dict[str, tuple[int, int, int, float]], level: str
) -> None:
    found = cost_of(family, level)
    counted = (found.parameters, found.published_flops, found.macs, round(found.megabytes, 2))
    assert counted == published[level]


def language_net(level: str, words: int = 33_279, widest: str = "a", **settings: Any) -> Model:
    """Every row is 64 tokens; the mask is a token too."""
    sizes = {"width": WIDTHS[level], "widest": WIDTHS[widest], **settings}
    return build_model("transformer", MODELS["transformer"], sizes, (64,), words, words + 1)


@pytest.mark.parametrize("level", WIDTHS)
def test_heterofl_language_model_counts_are_as_published(level: str) -> None:
    found = compute_cost(language_net(level))
    counted = (found.parameters, f"{found.published_flops / 1e6:.2f}", f"{found.megabytes:.2f}")
    assert (*counted, weights_of(language_net(level, 33_278))) == TRANSFORMER[level]


def test_heterofl_language_model_mode_is_as_published() -> None:
    """Only a vocabulary of 33 279 gives the size in the paper's table."""
    assert f"{sum(compute_cost(language_net(level)).megabytes for level in 'ab') / 2:.2f}" == "54.12"
    assert f"{compute_cost(language_net('a', 33_278)).megabytes:.2f}" != TRANSFORMER["a"][2]


@pytest.mark.parametrize(("layers", "parameters"), [(1, 221_472), (2, 353_568)])
def test_lstm_counts_are_as_published(layers: int, parameters: int) -> None:
    """The paper uses fixed word vectors; here they are weights, 300 per token."""
    net = build_model("lstm", MODELS["lstm"], {"layers": layers}, (25,), 2, 1)
    assert weights_of(net) - 300 == parameters


@pytest.mark.parametrize("level", WIDTHS)
def test_resnet18_counts_are_as_published(level: str) -> None:
    shapes = cifar_net(level, (2, 2, 2, 2)).shapes()
    assert sum(shape.numel() for shape in shapes.values()) == PRERESNET_TWO_BLOCKS_EACH[level]


def of_colour(family: str, settings: dict[str, Any], classes: int) -> Model:
    return build_model(family, MODELS[family], settings, (3, 32, 32), classes)


@pytest.mark.parametrize(("settings", "classes", "parameters"), PREACTRESNET)
def test_fedhen_counts_are_as_published(settings: dict[str, Any], classes: int, parameters: int) -> None:
    shapes = of_colour("preactresnet", settings, classes).shapes()
    assert sum(shape.numel() for shape in shapes.values()) == parameters


def test_fedhen_complex_macs_are_as_published() -> None:
    assert compute_cost(of_colour("preactresnet", {"exit_after": 0}, 10)).macs == 555_422_720


@pytest.mark.parametrize("hidden", REDUCED_PREACTRESNET)
def test_fedhen_reduced_counts_are_as_published(hidden: tuple[int, ...]) -> None:
    for stages, parameters, macs in REDUCED_PREACTRESNET[hidden]:
        settings = {"hidden": hidden, "blocks": (1, 1, 1, 1), "stages": stages}
        found = compute_cost(build_model("preactresnet", MODELS["preactresnet"], settings, (1, 28, 28), 10))
        assert (found.parameters, found.macs) == (parameters, macs)


@pytest.mark.parametrize("name", MOBILENET)
def test_fedsup_supernet_counts_are_as_published(name: str) -> None:
    settings, classes, parameters, macs = MOBILENET[name]
    found = compute_cost(of_colour("mobilenet", settings, classes))
    assert (found.parameters, found.macs) == (parameters, macs)


def weights_of(net: Model) -> int:
    return sum(shape.numel() for shape in net.shapes().values())


@pytest.mark.parametrize("name", LENET)
def test_fedhenn_depth_counts_are_as_published(name: str) -> None:
    settings, classes, parameters = LENET[name]
    assert weights_of(of_colour("lenet", settings, classes)) == parameters


@pytest.mark.parametrize("shape", MLP)
def test_mlp_counts_are_as_published(shape: tuple[int, ...]) -> None:
    found = compute_cost(build_model("mlp", MODELS["mlp"], {}, shape, 10))
    assert (found.parameters, found.published_flops, round(found.megabytes, 2)) == MLP[shape]


@pytest.mark.parametrize("extra", SPLITNET)
def test_fedin_counts_are_as_published(extra: tuple[int, int]) -> None:
    coloured, bare = (of_colour("splitnet", {"extra": extra, "conv_bias": bias}, 10) for bias in (True, False))
    grey = build_model("splitnet", MODELS["splitnet"], {"extra": extra}, (1, 32, 32), 10)
    assert (weights_of(coloured), weights_of(bare), weights_of(grey)) == SPLITNET[extra]
    assert weights_of(coloured.with_settings(tied=True)) == SPLITNET[1, 1][0]


@pytest.mark.parametrize(("channels", "extractor"), [(3, 1_920), (1, 768)])
def test_fedin_shared_ends_counts_are_as_published(channels: int, extractor: int) -> None:
    net = build_model("splitnet", MODELS["splitnet"], {"extra": (1, 1)}, (channels, 32, 32), 10)
    assert (weights_of(net.submodel("extractor")), weights_of(net.submodel("classifier"))) == (extractor, 10_250)
    assert (net.submodel("intermediate").input_shape, net.submodel("classifier").input_shape) == ((64, 16, 16), (1024,))


def test_fedgkt_counts_are_as_published() -> None:
    device = of_colour("bottleneck", {}, 10)
    assert weights_of(device) == 10_586
    longer = {"stem": None, "planes": (16, 32, 64), "blocks": (6, 6, 6)}
    server = build_model("bottleneck", MODELS["bottleneck"], longer, (16, 32, 32), 10)
    assert tuple(server.shapes()["classifier.weight"]) == (10, 256)


def printed(number: float) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.1f} K"


@pytest.mark.parametrize("mode", MNIST_MODES)
@pytest.mark.parametrize(("family", "published"), [("convnet", MNIST_MODES), ("preresnet", CIFAR10_MODES)])
def test_mode_cost_is_mean_over_levels(family: str, published: dict[str, tuple[str, str, str]], mode: str) -> None:
    costs = [cost_of(family, letter) for letter in mode.split("-")]
    means = [sum(each) / len(costs) for each in zip(*((c.parameters, c.published_flops) for c in costs), strict=True)]
    megabytes = sum(c.megabytes for c in costs) / len(costs)
    assert (*map(printed, means), f"{megabytes:.2f}") == published[mode]


@pytest.mark.parametrize(
    "net",
    [
        mnist_net("d"),
        cifar_net("e"),
        of_colour("preactresnet", {"width": 0.125}, 10),
        of_colour("mobilenet", SHALLOW, 10),
        of_colour("lenet", {"width": 0.125}, 10),
        of_colour("mlp", {"width": 0.125}, 10),
        of_colour("splitnet", {"width": 0.125, "tied": True}, 10),
        of_colour("bottleneck", {}, 10),
        build_model("lstm", MODELS["lstm"], {"layers": 2}, (25,), 2, 50),
    ],
    ids=["convnet", "preresnet", "preactresnet", "mobilenet", "lenet", "mlp", "splitnet", "bottleneck", "lstm"],
)
def test_macs_are_half_of_torch_flops(net: Model) -> None:
    module = net.module().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(net.zero_inputs(1))
    assert compute_cost(net).macs * 2 == counter.get_total_flops()


def test_macs_exclude_token_products() -> None:
    """In each of 4 layers and 8 heads there are two products of all token pairs, of width 32 at full size."""
    net = language_net("d", words=50)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.module().requires_grad_(False).eval()(net.zero_inputs(1))
    assert compute_cost(net).macs * 2 == counter.get_total_flops() - 2 * (4 * 8 * 2 * 64**2 * 32 // 8)


@pytest.mark.parametrize("level", WIDTHS)
def test_slice_of_narrower_global_model_has_same_size(level: str) -> None:
    """Levels are shares of the full model, so their sizes do not depend on which one is global."""
    for widest in "abcde"[: "abcde".index(level) + 1]:
        assert dict(mnist_net(level, widest).shapes()) == dict(mnist_net(level).shapes())
        few = [dict(language_net(level, 50, one).shapes()) for one in (widest, "a")]
        assert few[0] == few[1]


@pytest.mark.parametrize(("level", "size"), [("a", 6_227_496), ("e", 26_376)])
def test_message_bytes_match_parameters(level: str, size: int) -> None:
    assert payload_bytes({"weights": mnist_net(level).initial_weights(0)}) == size
