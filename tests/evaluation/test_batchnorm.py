"""Static batch norm's statistics: who is asked, and that every batch counts the same."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.data import Preparation
from fedloom.evaluation import BatchNormStatistics
from fedloom.fleet import Request, Tier, make_nested_tiers
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import build_model
from fedloom.tensors import payload_bytes

METHOD = HeteroFL()


def norm_first() -> nn.Module:
    """The norm sees the prepared images themselves, so a test can compute its statistics from the data."""
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 4))


def filled(
    place: Any, query: BatchNormStatistics, tier: Tier | None = None, listener: Any = None
) -> Mapping[str, Tensor]:
    engine = place.engine(METHOD)
    fleet, tier = place.fleet, tier or place.fleet.largest

    def ask(task: Any, boxes: Any) -> list[Any]:
        replies = list(engine.ask(Request(task, boxes, 1)))
        if listener is not None:
            listener.extend(replies)
        return replies

    return query.fill({tier: tier.footprint.read(fleet.global_model.initial_weights(0))}, fleet, ask, 1)[tier]


def norm_first_world(world: Callable[..., Any], sizes: tuple[int, ...]) -> Any:
    return world(sizes=sizes, models=[("a", build_model("norm_first", norm_first, {}, (1, 6, 6), 4))])


def mean_and_variance(images: Tensor) -> tuple[float, float]:
    numbers = images.double().flatten().tolist()
    mean = sum(numbers) / len(numbers)
    return mean, sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)


def test_fill_per_device_weights_by_batches(world: Callable[..., Any]) -> None:
    """Devices with one batch each: the mean of their means, whatever their sizes."""
    place = norm_first_world(world, (2, 5, 9))
    data = place.dataset
    each = [mean_and_variance(data.preparation(data.train.x[torch.as_tensor(rows)])) for rows in place.partition.train]
    made = filled(place, BatchNormStatistics("per_device", 10))
    assert float(made["0.running_mean"]) == pytest.approx(sum(mean for mean, _ in each) / 3, abs=1e-5)
    assert float(made["0.running_var"]) == pytest.approx(sum(variance for _, variance in each) / 3, abs=1e-5)


def test_fill_device_with_more_batches_counts_more(world: Callable[..., Any]) -> None:
    """Four examples in one batch beside eight identical twins of them in two."""
    place = norm_first_world(world, (4, 8))
    x = place.dataset.train.x
    x[4:] = x[:4].repeat(2, 1, 1, 1) + 60
    x[4:] = x[4]  # all alike, so that how they are shuffled into batches does not matter
    first = mean_and_variance(place.dataset.preparation(x[:4]))[0]
    second = mean_and_variance(place.dataset.preparation(x[4:5]))[0]
    made = filled(place, BatchNormStatistics("per_device", 4))
    assert float(made["0.running_mean"]) == pytest.approx((first + 2 * second) / 3, abs=1e-5)


def test_fill_pooled_batches_mix_devices(world: Callable[..., Any]) -> None:
    place = norm_first_world(world, (2, 5, 9))
    mean, variance = mean_and_variance(place.dataset.preparation(place.dataset.train.x))
    made = filled(place, BatchNormStatistics("pooled", 16))
    assert float(made["0.running_mean"]) == pytest.approx(mean, abs=1e-5)
    assert float(made["0.running_var"]) == pytest.approx(variance, abs=1e-5)


def test_fill_pooled_and_per_device_differ(world: Callable[..., Any]) -> None:
    """Devices of one label each: their batches vary less than mixed ones."""
    place = world(
        sizes=(8, 8), labels=[[0], [1]], models=[("a", build_model("norm_first", norm_first, {}, (1, 6, 6), 4))]
    )
    x = place.dataset.train.x
    x.copy_(x // 4)
    x[8:] += 150
    pooled, apart = (
        float(filled(place, BatchNormStatistics(query, 8))["0.running_var"]) for query in ("pooled", "per_device")
    )
    assert pooled > 1.5 * apart


def test_fill_per_device_asks_only_capable_devices(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(4,) * 6)
    large, small = place.fleet.tiers
    for tier, names in ((large, ["0", "1", "2"]), (small, ["0", "1", "2", "3", "4", "5"])):
        replies: list[Any] = []
        made = filled(place, BatchNormStatistics("per_device", 4), tier, replies)
        assert sorted(reply.device.name for reply in replies) == names
        assert {reply.device.model for reply in replies} == {tier.model}
        assert {name: made[name].shape for name in tier.model.statistics()} == dict(tier.model.statistics())


def test_collect_upload_is_sums_and_a_count(world: Callable[..., Any]) -> None:
    """Per norm layer 8 bytes a channel, and 4 for the number of batches."""
    place = world(sizes=(4, 4))
    replies: list[Any] = []
    filled(place, BatchNormStatistics("per_device", 4), None, replies)
    channels = 4 + 6
    assert [payload_bytes(reply.upload) for reply in replies] == [8 * channels + 4] * 2


def test_collect_max_batches_bounds_the_count(world: Callable[..., Any]) -> None:
    place = world(sizes=(12, 12))
    counts = []
    for limit in (None, 1, 2, 100):
        replies: list[Any] = []
        filled(place, BatchNormStatistics("per_device", 4, limit), None, replies)
        counts.append([float(reply.upload["count"]["batches"]) for reply in replies])
    assert counts == [[3, 3], [1, 1], [2, 2], [3, 3]]


def test_fill_other_normalization_asks_no_device(world: Callable[..., Any]) -> None:
    place = world(normalization="group")
    replies: list[Any] = []
    made = filled(place, BatchNormStatistics(), None, replies)
    assert replies == []
    assert made.keys() == place.fleet.global_model.shapes().keys()


def test_fill_each_tier_has_its_own_statistics(world: Callable[..., Any]) -> None:
    """Without the scaler: a narrow net's statistics are of the numbers it is evaluated on."""
    place = world(widths=(1.0, 0.5), sizes=(8, 8))
    plain = world(widths=(1.0, 0.5), sizes=(8, 8), scaler=False)
    query = BatchNormStatistics("pooled", 16)
    for scaled_tier, plain_tier in zip(place.fleet.tiers, plain.fleet.tiers, strict=True):
        made, expected = filled(place, query, scaled_tier), filled(plain, query, plain_tier)
        assert all(torch.equal(made[name], expected[name]) for name in scaled_tier.model.statistics())


@pytest.mark.usefixtures("double")
def test_fill_order_of_replies_is_irrelevant(world: Callable[..., Any]) -> None:
    place = world(sizes=(8, 5, 9, 6, 7, 11, 4, 8))
    engine, weights, fleet = place.engine(METHOD), place.fleet.global_model.initial_weights(0), place.fleet
    made = [
        BatchNormStatistics("per_device", 4).fill(
            {fleet.largest: weights},
            fleet,
            lambda t, boxes, step=step: list(engine.ask(Request(t, boxes, 1)))[::step],
            1,
        )[fleet.largest]
        for step in (1, -1)
    ]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_fill_single_example_with_many_pixels_counts(world: Callable[..., Any]) -> None:
    """Five examples in batches of four: whichever is left over counts as much as the four."""
    place = norm_first_world(world, (5,))
    images = place.dataset.preparation(place.dataset.train.x)
    possible = []
    for left_over in range(5):
        four, one = (mean_and_variance(images[torch.arange(5) != left_over]), mean_and_variance(images[left_over]))
        possible.append([(mine + theirs) / 2 for mine, theirs in zip(four, one, strict=True)])
    made = filled(place, BatchNormStatistics("per_device", 4))
    found = [float(made["0.running_mean"]), float(made["0.running_var"])]
    assert any(found == pytest.approx(each, abs=1e-5) for each in possible)


@pytest.mark.parametrize("query", ["pooled", "per_device"])
def test_fill_single_value_batch_is_skipped(query: Any, world: Callable[..., Any]) -> None:
    """Where the last map is one pixel; nine examples in batches of four leave one over, and so do five."""
    place = world(input_shape=(1, 2, 2), sizes=(5, 4))
    made = filled(place, BatchNormStatistics(query, 4))
    for name in place.fleet.global_model.statistics():
        assert bool(made[name].isfinite().all())
    assert float(made["blocks.1.2.running_var"].max()) > 0


def test_fill_images_are_augmented_as_in_training(world: Callable[..., Any]) -> None:
    """Published statistics are of augmented data: all crops of a white image next to a black border are darker."""
    place = world(
        sizes=(8,),
        preparation=Preparation(crop_padding=4),
        models=[("a", build_model("norm_first", norm_first, {}, (1, 6, 6), 4))],
    )
    place.dataset.train.x[:] = 255
    assert float(filled(place, BatchNormStatistics("pooled", 8))["0.running_mean"]) < 0.99


def test_fill_statistics_of_tiers_are_nested(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(8, 8))
    small = make_nested_tiers([(tier.name, tier.model) for tier in place.fleet.tiers])[1]
    made = filled(place, BatchNormStatistics("pooled", 16), small)
    assert made["blocks.0.2.running_mean"].shape == (2,)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("examples", [5, 500])
def test_fill_parts_of_pool_have_statistics_of_whole(examples: int, world: Callable[..., Any]) -> None:
    """A limit that no pool reaches asks for one part; five examples are too few batches for several."""
    place = world(sizes=(examples, 3), widths=(1.0, 0.5))
    for tier in place.fleet.tiers:
        whole, parts = (filled(place, BatchNormStatistics("pooled", 4, limit), tier) for limit in (10**6, None))
        assert whole.keys() == parts.keys()
        for name, tensor in whole.items():
            assert torch.allclose(parts[name], tensor, rtol=0, atol=1e-12)


def test_fill_part_of_pool_is_missing_gives_nan(world: Callable[..., Any]) -> None:
    place = world(sizes=(80,))
    engine, fleet = place.engine(METHOD), place.fleet
    made = BatchNormStatistics("pooled", 4).fill(
        {fleet.largest: fleet.global_model.initial_weights(0)},
        fleet,
        lambda task, boxes: list(engine.ask(Request(task, boxes, 1)))[1:],
        1,
    )[fleet.largest]
    assert all(bool(made[name].isnan().all()) for name in fleet.global_model.statistics())
