"""fedloom plan: what each tier costs, computed without data and without training."""

import math

import numpy as np
import pytest

from fedloom.analysis import costs

KNOWN = {  # colors and classes
    "digits": (1, 10),
    "fashion-mini": (1, 10),
    "mnist": (1, 10),
    "fashion-mnist": (1, 10),
    "cifar10": (3, 10),
    "cifar100": (3, 100),
    "pathmnist": (3, 9),
    "pneumoniamnist": (1, 2),
}
KEYS = ["name", "parameters", "macs", "published_flops", "bytes_down", "bytes_up", "training_memory"]


def convnet_parameters(inputs, first, second, classes):
    """Two convolutions of 3 x 3 with bias, each with a batch norm, and a classifier."""
    return (9 * inputs + 1) * first + 2 * first + (9 * first + 1) * second + 2 * second + (second + 1) * classes


def convnet_macs(inputs, side, first, second, classes):
    return side**2 * 9 * inputs * first + (side // 2) ** 2 * 9 * first * second + second * classes


def test_plan_heterofl_bytes_are_slice_down_and_slice_with_labels_up(fedloom, write, files):
    write()
    before = files()
    result = fedloom("plan", "my.toml", "--format", "json")
    assert (result.code, result.err) == (0, "")
    assert list(result.data) == ["tiers"]
    large, small = result.data["tiers"]
    assert list(large) == list(small) == KEYS
    assert (large["name"], small["name"]) == ("large", "small")
    assert large["parameters"] == convnet_parameters(1, 2, 4, 10)
    assert small["parameters"] == convnet_parameters(1, 1, 2, 10)
    assert large["macs"] == convnet_macs(1, 8, 2, 4, 10)
    assert small["macs"] == convnet_macs(1, 8, 1, 2, 10)
    for tier in (large, small):
        assert tier["bytes_down"] == 4 * tier["parameters"]
        assert tier["bytes_up"] == tier["bytes_down"] + math.ceil(10 / 8)
    assert files() == before


@pytest.mark.parametrize("dataset", KNOWN)
def test_plan_known_dataset_needs_no_files(dataset, fedloom, write):
    write(('"digits"', f'"{dataset}"'))
    result = fedloom("plan", "my.toml", "--format", "json")
    assert result.code == 0
    inputs, classes = KNOWN[dataset]
    for tier, (first, second) in zip(result.data["tiers"], [(2, 4), (1, 2)], strict=True):
        assert tier["parameters"] == convnet_parameters(inputs, first, second, classes)
        assert tier["bytes_up"] - tier["bytes_down"] == math.ceil(classes / 8)


def test_plan_coarse_labels_size_the_head(fedloom, write):
    write(('"digits"', '"cifar100"\nlabels = "coarse"'))
    (large, _) = fedloom("plan", "my.toml", "--format", "json").data["tiers"]
    assert large["parameters"] == convnet_parameters(3, 2, 4, 20)
    assert large["bytes_up"] - large["bytes_down"] == math.ceil(20 / 8)


@pytest.mark.parametrize(
    ("change", "inputs", "side"),
    [
        (('"digits"', '"cifar10"'), 3, 32),
        (('"digits"', '"fashion-mnist"'), 1, 28),
        (('"digits"', '"fashion-mnist"\npreparation = "fedsup_fashion"'), 3, 32),
        (('"digits"', '"pathmnist"'), 3, 32),
    ],
    ids=["cifar10", "fashion-mnist", "another preparation", "pathmnist, which is resized"],
)
def test_plan_costs_use_the_prepared_image_size(change, inputs, side, fedloom, write):
    write(change)
    result = fedloom("plan", "my.toml", "--format", "json")
    classes = 9 if "pathmnist" in change[1] else 10
    assert result.data["tiers"][0]["macs"] == convnet_macs(inputs, side, 2, 4, classes)


@pytest.mark.parametrize(
    ("method", "down", "up"), [("standalone", 0, 0), ("fedavg", 4, 4), ("centralized", 4, 4), ("heterofl", 4, 4)]
)
def test_plan_methods_bytes_follow_their_messages(method, down, up, fedloom, write):
    write(('name = "heterofl"', f'name = "{method}"'), ("width = 0.5", "width = 1.0"))
    large, small = fedloom("plan", "my.toml", "--format", "json").data["tiers"]
    labels = 2 if method == "heterofl" else 0
    assert (large["bytes_down"], large["bytes_up"]) == (down * large["parameters"], up * large["parameters"] + labels)
    assert small["parameters"] == large["parameters"]


def test_plan_text_is_a_table_of_the_same_numbers(fedloom, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write()
    result = fedloom("plan", "my.toml")
    header, large, small, *_ = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert header.split()[:-3] == ["tier", "parameters", "MACs", "published", "FLOPs", "bytes", "down", "bytes", "up"]
    assert header.endswith("bytes to train")
    tiers = fedloom("plan", "my.toml", "--format", "json").data["tiers"]
    for line, tier in zip((large, small), tiers, strict=True):
        assert line.replace(",", "").split() == [str(tier[key]) for key in KEYS]


def test_plan_compression_adds_compressed_bytes(fedloom, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write()
    compression = (
        "--set",
        "compression.uplink={kind='top_k', share=0.1}",
        "--set",
        "compression.downlink={kind='float16'}",
    )
    plain = fedloom("plan", "my.toml", "--format", "json").data["tiers"]
    compressed = fedloom("plan", "my.toml", *compression, "--format", "json").data["tiers"]
    for before, tier in zip(plain, compressed, strict=True):
        assert list(tier) == [*KEYS, "bytes_down_compressed", "bytes_up_compressed"]
        assert {key: tier[key] for key in KEYS} == before
        assert tier["bytes_up_compressed"] < tier["bytes_down_compressed"] < tier["bytes_down"]
    header, *lines = fedloom("plan", "my.toml", *compression).out.splitlines()
    assert header.split()[-4:] == ["down", "compressed", "up", "compressed"]
    assert [line.replace(",", "").split()[-1] for line in lines[:2]] == [
        str(tier["bytes_up_compressed"]) for tier in compressed
    ]


def test_plan_server_that_trains_is_listed_with_its_cost(fedloom, write):
    write(('name = "heterofl"', 'name = "fedgh"'), ("width = 0.5", "width = 1.0"))
    macs = 3 * 4 * 10 * 10 * 4  # forward and backward through the last layer, ten class means of four devices
    result = fedloom("plan", "my.toml", "--format", "json")
    assert list(result.data) == ["tiers", "server"]
    assert result.data["server"] == {"macs": macs}
    sentence = f"the server trains as well: at most {macs:,} MACs per round"
    assert fedloom("plan", "my.toml").out.endswith(f"{sentence}\n")
    timed = "width = 1.0\nspeed = 1e6\nbandwidth = 1e6"
    write(('name = "heterofl"', 'name = "fedgh"'), ("width = 1.0", timed), ("width = 0.5", timed))
    unknown = fedloom("plan", "my.toml").out
    assert "set fleet.server_speed, or the seconds of a round are unknown" in " ".join(unknown.split())
    known = fedloom("plan", "my.toml", "--set", "fleet.server_speed=9.6e3").out
    assert known.endswith(f"{sentence}, 0.5 s\n")


def test_plan_set_changes_costs(fedloom, write):
    write()
    (_, small) = fedloom("plan", "my.toml", "--set", "model.hidden=[4,8]", "--format", "json").data["tiers"]
    assert small["parameters"] == convnet_parameters(1, 2, 4, 10)


def test_plan_unknown_dataset_is_read(fedloom, write, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    images, labels = np.zeros((6, 5, 5), dtype=np.uint8), np.arange(6) % 3
    np.savez(tmp_path / "elsewhere" / "mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    write(('"digits"', '"npz"\nfile = "mine.npz"'))
    assert fedloom("plan", "my.toml").code == 4
    result = fedloom("plan", "my.toml", "--data-dir", "elsewhere", "--format", "json")
    assert result.code == 0
    assert result.data["tiers"][0]["parameters"] == convnet_parameters(1, 2, 4, 3)


def test_plan_latency_is_measured_on_request(fedloom, write):
    write()
    timed = fedloom("plan", "my.toml", "--latency", "--format", "json").data["tiers"]
    assert [list(tier) for tier in timed] == [[*KEYS, "latency_ms"]] * 2
    assert all(tier["latency_ms"] > 0 for tier in timed)
    assert "ms here" in fedloom("plan", "my.toml", "--latency").out


def test_plan_fleet_assigns_tiers(fedloom, write, tmp_path):
    write()
    (large, small) = fedloom("plan", "my.toml", "--format", "json").data["tiers"]
    find_footprint = (large["training_memory"] + small["training_memory"]) // 2
    (tmp_path / "fleet.csv").write_text(
        f"name,count,memory\nphone,3,{find_footprint}\ngateway,1,1 GB\n", encoding="utf-8"
    )
    fleet = fedloom("plan", "my.toml", "--fleet", "fleet.csv", "--headroom", "1", "--format", "json").data["fleet"]
    assert [(one["name"], one["tier"]) for one in fleet["devices"]] == [("phone", "small"), ("gateway", "large")]
    assert fleet["shares"] == {"small": 0.75, "large": 0.25}
    assert [one["tiers"] for one in fleet["regions"]] == [["large"], ["large", "small"]]
    result = fedloom("plan", "my.toml", "--fleet", "fleet.csv")
    assert result.code == 0
    assert "gateway" in result.out and "updates per round" in result.out


def test_plan_fleet_accepts_probe_output(fedloom, write, tmp_path):
    write()
    result = fedloom("probe", "my.toml", "--name", "here", "--bandwidth", "1e6", "--format", "json")
    assert result.code == 0
    assert set(result.data["speeds"]) == {"large", "small"}
    assert result.data["speed"] == min(result.data["speeds"].values())
    assert (result.data["name"], result.data["bandwidth"]) == ("here", 1e6)
    (tmp_path / "here.json").write_text(result.out, encoding="utf-8")
    (one,) = fedloom("plan", "my.toml", "--fleet", "here.json", "--format", "json").data["fleet"]["devices"]
    assert one["tier"] == "large"
    assert one["transfer_seconds"] > 0
    assert "multiply-adds per second" in fedloom("probe").out


def test_plan_known_speeds_give_device_seconds(fedloom, write):
    write(("width = 1.0", "width = 1.0\nspeed = 1e6\nbandwidth = 1e3"))
    large, small = fedloom("plan", "my.toml", "--format", "json").data["tiers"]
    examples = 1437 // 4
    assert (
        large["device_seconds"] == (large["bytes_down"] + large["bytes_up"]) / 1e3 + 3 * large["macs"] * examples / 1e6
    )
    assert "device_seconds" not in small
    assert "s per round" in fedloom("plan", "my.toml").out


def test_plan_measure_times_a_round(fedloom, write):
    write()
    result = fedloom("plan", "my.toml", "--measure", "--workers", "1", "--format", "json").data["round"]
    assert result["training"] > 0 and result["evaluation"] > 0 and result["workers"] == 1
    assert "a round here" in fedloom("plan", "my.toml", "--measure", "--workers", "1").out


def test_plan_message_above_flowers_limit_is_named(fedloom, write, monkeypatch):
    """A message, not a round: two messages that fit may be larger together."""
    write()
    sizes = {tier["name"]: max(tier["bytes_down"], tier["bytes_up"]) for tier in plan_tiers(fedloom)}
    monkeypatch.setattr(costs, "MAX_MESSAGE_BYTES", sizes["large"] - 1)
    most = sizes["large"]
    problem = f"a message of tier large has {most:,} bytes, more than the {most - 1:,} of Flower's limit"
    result = fedloom("plan", "my.toml")
    assert result.code == 0 and f"{problem}: it can be simulated, not deployed" in result.out
    for refused in (
        fedloom("plan", "my.toml", "--set", 'engine.kind="flower"'),
        fedloom("check", "my.toml", "--set", 'engine.kind="flower"'),
        fedloom("check", "my.toml", "--deployment"),
    ):
        (issue,) = refused.issues
        assert (refused.code, issue.code, issue.message) == (4, "MESSAGE_SIZE", problem)
        assert "compress" in issue.hint
    monkeypatch.setattr(costs, "MAX_MESSAGE_BYTES", sizes["large"])
    assert fedloom("check", "my.toml", "--deployment").code == 0
    assert "Flower" not in fedloom("plan", "my.toml").out


def plan_tiers(fedloom):
    return fedloom("plan", "my.toml", "--format", "json").data["tiers"]
