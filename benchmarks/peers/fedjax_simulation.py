"""FedJAX: its federated averaging with its default backend, on as many cores as there are workers."""

import os

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.workload import (
    BATCH,
    CLIP,
    DECAY,
    MOMENTUM,
    RATE,
    Laps,
    Workload,
    device_examples,
    initial_weights,
    read_input,
    write_result,
)


def main() -> None:
    workload, laps = read_input(), Laps()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: workload.workers])  # before XLA counts its threads
    weights = simulate(workload, laps)
    from importlib.metadata import version

    write_result(workload, laps, weights, f"{version('fedjax')}, jax {version('jax')}")


def simulate(workload: Workload, laps: Laps) -> dict[str, Tensor]:
    import jax

    jax.tree_map = jax.tree.map  # what FedJAX 0.0.17 calls it; later versions of JAX have dropped the name
    import fedjax
    import jax.numpy as jnp
    import optax
    from jax import lax

    def network(weights, x):  # type: ignore[no-untyped-def]
        """HeteroFL's net, examples [batch, height, width, channels]."""
        for number in range(len(workload.channels)):
            name = f"blocks.{number}"
            if number:
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = lax.conv_general_dilated(
                x, weights[f"{name}.0.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC")
            )
            x = x + weights[f"{name}.0.bias"]
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = (x - mean) * lax.rsqrt(variance + 1e-5) * weights[f"{name}.1.weight"] + weights[f"{name}.1.bias"]
            x = jax.nn.relu(x)
        return x.mean((1, 2)) @ weights["classifier.weight"].T + weights["classifier.bias"]

    def loss(weights, batch, rng):  # type: ignore[no-untyped-def]
        return optax.softmax_cross_entropy_with_integer_labels(network(weights, batch["x"]), batch["y"]).mean()

    local = optax.chain(optax.clip_by_global_norm(CLIP), optax.add_decayed_weights(DECAY), optax.sgd(RATE, MOMENTUM))
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.create_optimizer_from_optax(local),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, drop_remainder=False),
    )
    clients = [_client(fedjax, workload, device) for device in range(workload.devices)]
    keys = jax.random.split(jax.random.PRNGKey(0), workload.devices)
    state = algorithm.init({name: jnp.asarray(weight.numpy()) for name, weight in initial_weights(workload).items()})
    for _ in range(workload.rounds):
        cohort = [(str(number), client, keys[number]) for number, client in enumerate(clients)]
        state, _ = algorithm.apply(state, cohort)
        jax.block_until_ready(state.params)
        laps.lap()
    return {name: torch.from_numpy(np.array(weight)) for name, weight in state.params.items()}


def _client(fedjax, workload: Workload, device: int):  # type: ignore[no-untyped-def]
    x, y = device_examples(workload, device)
    return fedjax.ClientDataset({"x": x.permute(0, 2, 3, 1).contiguous().numpy(), "y": y.numpy()})


if __name__ == "__main__":
    main()
