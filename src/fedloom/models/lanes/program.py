"""Run a traced module for K devices at once, forward and backward, with one node in torch's graph for the whole net.

In memory the devices are the innermost axis: activations are [batch, positions, channels, K], and weights and their
gradients the reverse of their axes, kernels first. Every operation is a kernel that treats the devices as independent
lanes, or an elementwise function of torch; so a device's numbers depend neither on K nor on its place.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import columns, convolution, depthwise, winograd
from .layout import ArrangedWeights, arrange, arranged_strides, offsets
from .tracing import NoLaneKernelError, Operation, Trace, Value

aten = torch.ops.aten


class BlockPass:
    """The tensors of one pass: `weights` lie in memory as the kernels want them, `addresses` are where.

    `derived` is what steps have made of these weights. `evaluates`: neither training nor a backward pass follows.
    """

    def __init__(self, program: "Program", weights: Sequence[Tensor], evaluates: bool):
        self.program, self.evaluates = program, evaluates
        self.weights, self.derived = program.arranged.find(weights, program.shapes)
        self.addresses = [weight.data_ptr() for weight in self.weights]
        self.values: list[Tensor | None] = [None] * len(program.trace.values)
        self.saved: dict[int, Any] = {}
        self.statistics: dict[str, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.needed: frozenset[int] = frozenset()
        self.wanted: Sequence[bool] = ()
        self.flat = torch.empty(0)
        self.again: list[tuple[int, Tensor]] = []
        self.begun: set[int] = set()

    def value(self, number: int) -> Tensor:
        found = self.values[number]
        assert found is not None
        return found

    def address(self, weight: int | None) -> int:
        return 0 if weight is None else self.addresses[weight]

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        before = self.gradients.get(number)
        self.gradients[number] = gradient if before is None else before + gradient

    def wants(self, weight: int | None) -> bool:
        return weight is not None and self.wanted[weight]

    def weight_gradient(self, weight: int | None) -> int:
        """Where to write the gradient of a weight; 0 if it is not wanted. A weight that is used twice has two."""
        if weight is None or not self.wanted[weight]:
            return 0
        if weight not in self.begun:
            self.begun.add(weight)
            return self.flat.data_ptr() + self.program.offsets[weight] * self.flat.element_size()
        other = torch.empty_like(self.weights[weight])
        self.again.append((weight, other))
        return other.data_ptr()


class LaneStep(ABC):
    """An operation for so many devices, ready to run; `keeps` are the values that its backward pass reads."""

    owns_memory = False  # its output is memory of its own
    shares_memory = False  # its output is the memory of its input
    is_cut = False  # no gradient goes back through it

    def __init__(self, operation: Operation, program: "Program"):
        trace = program.trace
        self.keeps: tuple[int, ...] = ()
        self.is_per_example = True
        self.inputs, self.output, self.x = operation.inputs, operation.output, operation.inputs[0]
        self.weights = tuple(None if name is None else program.numbers[name] for name in operation.weights)
        self.settings, self.trace = operation.settings, trace
        self.devices, self.dtype, self.bits = program.devices, program.dtype, program.bits
        self.lanes = convolution.lane_count(self.bits)
        self.before, self.after = trace.values[self.x], trace.values[self.output]
        self.positions = math.prod(self.before.positions)
        self.width = self.before.channels * self.devices  # columns of the input
        self.shape = (trace.batch, math.prod(self.after.positions), self.after.channels, self.devices)
        self.prepare(program)

    def prepare(self, program: "Program") -> None:  # noqa: B027 - most operations have nothing to prepare
        """Choose kernels and sizes, once."""

    def overwrite(self, free: Collection[int]) -> None:  # noqa: B027 - most operations write to new memory
        """Write the output over one of these inputs, which nothing reads later."""

    @abstractmethod
    def forward(self, run: BlockPass) -> None:
        """Compute the output from the inputs."""

    @abstractmethod
    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        """Add the gradients of inputs and weights, given that of the output."""

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def sum_rows(self, x: Tensor, segments: int, rows: int, width: int, factor: float = 1.0) -> Tensor:
        """[segments, width]: sums over the rows of each segment."""
        total = self.empty(segments, width)
        kernel = columns.column_sums(self.lanes, self.bits)
        kernel(x.data_ptr(), total.data_ptr(), segments, rows, width, factor)
        return total


def _image(value: Value) -> tuple[int, int]:
    """Height and width of a map; a sequence has height 1."""
    height, width = (1, 1, *value.positions)[-2:]
    return height, width


class Convolution(LaneStep):
    owns_memory = True
    run_forward: tuple[Any, tuple[int, ...]]
    run_input_gradient: tuple[Any, tuple[int, ...]]
    run_weight_gradient: tuple[Any, tuple[int, ...]]
    by_tiles: winograd.Plan | None = None

    def prepare(self, program: "Program") -> None:
        self.keeps = (self.x,)
        if len(self.before.positions) > 2:
            raise NoLaneKernelError("a convolution of volumes has no lane kernel")
        kernel, stride = ((1, *self.settings[key])[-2:] for key in ("kernel", "stride"))
        padding = (0, *self.settings["padding"])[-2:]
        groups, channels = self.settings["groups"], (self.before.channels, self.after.channels)
        self._plan(convolution.Shape(
            self.trace.batch, *_image(self.before), *channels, kernel, stride, padding, groups, self.devices, self.bits
        ))  # fmt: skip

    def _plan(self, shape: convolution.Shape) -> None:
        self.swaps = False
        if shape.inputs == shape.outputs == shape.groups > 1:
            sizes: tuple[int, ...] = (
                shape.batch, shape.height, shape.width, self.width, shape.out_height, shape.out_width,
                *shape.kernel, *shape.stride, *shape.padding,
            )  # fmt: skip
            rows, _ = convolution.tile_size()
            tile = depthwise.tap_tile(shape.kernel[1], shape.out_width, -(-self.width // self.lanes))
            self.run_forward = depthwise.forward_kernel(self.lanes, self.bits, depthwise.EXAMPLES), sizes
            self.run_input_gradient = depthwise.input_gradient_kernel(self.lanes, self.bits, rows), sizes
            self.run_weight_gradient = depthwise.weight_gradient_kernel(self.lanes, self.bits, *tile), sizes
        else:
            self.run_forward = convolution.plan_forward(shape)
            kernel, sizes, self.swaps = convolution.plan_input_gradient(shape)
            self.run_input_gradient = kernel, sizes
            self.swap = convolution.swap_kernel(self.lanes, self.bits, self.devices)
            self.swap_sizes = shape.kernel[0] * shape.kernel[1], shape.inputs // shape.groups, shape.outputs
            self.run_weight_gradient = convolution.plan_weight_gradient(shape)
            outputs = winograd.find_tile(shape)
            self.by_tiles = None if outputs is None else winograd.Plan(shape, outputs)
        self.sum_bias = columns.column_sums(self.lanes, self.bits)
        self.bias_sizes = 1, shape.batch * shape.out_height * shape.out_width, shape.outputs * self.devices, 1.0

    def weight_address(self, run: BlockPass) -> int:
        return run.address(self.weights[0])

    def forward(self, run: BlockPass) -> None:
        run.values[self.output] = y = torch.empty(self.shape, dtype=self.dtype)
        kernel, sizes = self.run_forward
        x, bias = run.value(self.x).data_ptr(), run.address(self.weights[1])
        if run.evaluates and self.by_tiles is not None:
            scratch = self.empty(self.by_tiles.scratch)
            self.by_tiles(x, self.transformed(run, self.by_tiles), bias, y.data_ptr(), scratch.data_ptr())
        else:
            kernel(x, self.weight_address(run), bias, y.data_ptr(), *sizes)

    def transformed(self, run: BlockPass, plan: winograd.Plan) -> int:
        """The address of the weight as the tiles want it; made once for as long as weights stay the same."""
        key = self.weights[0] or 0, plan.points
        if key not in run.derived:
            run.derived[key] = self.empty(plan.points * plan.weight_numbers)
            plan.transform_weights(run.address(self.weights[0]), run.derived[key].data_ptr())
        return run.derived[key].data_ptr()

    def swapped(self, run: BlockPass) -> Tensor:
        """The weight with inputs and outputs swapped in memory."""
        weight = run.weights[self.weights[0] or 0]
        swapped = torch.empty(weight.numel(), dtype=self.dtype)
        self.swap(self.weight_address(run), swapped.data_ptr(), *self.swap_sizes)
        return swapped

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        x, g = run.value(self.x), gradient.data_ptr()
        if self.x in run.needed:
            dx = torch.empty_like(x)
            kernel, sizes = self.run_input_gradient
            held = self.swapped(run) if self.swaps else None
            kernel(g, self.weight_address(run) if held is None else held.data_ptr(), dx.data_ptr(), *sizes)
            run.add_gradient(self.x, dx)
        self.backward_weight(run, x, g)
        db = run.weight_gradient(self.weights[1])
        if db:
            self.sum_bias(g, db, *self.bias_sizes)

    def backward_weight(self, run: BlockPass, x: Tensor, g: int) -> None:
        dw = run.weight_gradient(self.weights[0])
        if dw:
            kernel, sizes = self.run_weight_gradient
            kernel(x.data_ptr(), g, dw, *sizes)


class LinearStep(Convolution):
    """A convolution of maps of one pixel; the inputs may be the channels and positions of a map, in memory's order."""

    def prepare(self, program: "Program") -> None:
        self.keeps = (self.x,)
        one, inputs = (1, 1), self.before.channels * self.positions
        sizes = self.trace.batch, 1, 1, inputs, self.after.channels, one, one, (0, 0), 1
        self._plan(convolution.Shape(*sizes, self.devices, self.bits))
        # a weight [outputs, channels * positions] counts its inputs in another order than memory does
        self.reorders = self.positions > 1 and len(program.shapes[self.weights[0] or 0]) == 3

    def weight_address(self, run: BlockPass) -> int:
        if not self.reorders:
            return run.address(self.weights[0])
        if self.output not in run.saved:
            apart = run.weights[self.weights[0] or 0].unflatten(2, (self.before.channels, self.positions))
            run.saved[self.output] = apart.permute(3, 2, 1, 0).contiguous()
        address: int = run.saved[self.output].data_ptr()
        return address

    def backward_weight(self, run: BlockPass, x: Tensor, g: int) -> None:
        if not self.reorders or not run.wants(self.weights[0]):
            super().backward_weight(run, x, g)
            return
        apart = self.empty(self.positions, self.before.channels, self.after.channels, self.devices)
        kernel, sizes = self.run_weight_gradient
        kernel(x.data_ptr(), g, apart.data_ptr(), *sizes)
        number, found = self.weights[0] or 0, apart.permute(3, 2, 1, 0)
        if number not in run.begun:
            run.weight_gradient(number)
            # unflattened, so that what lies together is copied together
            run.program.gradient_view(run.flat, number).unflatten(2, found.shape[2:]).copy_(found)
        else:
            run.again.append((number, found.flatten(2)))


class Norm(LaneStep):
    """Batch, group or instance norm, with the activation and the 2 x 2 max pooling behind it if they follow at once."""

    def prepare(self, program: "Program") -> None:
        self.activation, self.pools = self.settings.get("activation", columns.NONE), self.settings.get("pools", False)
        self.keeps = (self.x, self.output) if self.pools else (self.x,)
        per_example = self.settings["per_example"]
        self.segments = self.trace.batch if per_example else 1
        self.rows = self.trace.batch * self.positions // self.segments
        self.stride = self.segments * self.width * self.bits // 8  # bytes of a row of the table
        self.map_sizes = self.segments, self.rows, self.width, self.activation
        images = self.trace.batch, *_image(self.before), self.width
        self.pool_sizes = (*images, self.width * self.bits // 8 if per_example else 0)
        self.pool_sum_sizes = self.segments, *images
        self.moments = columns.moments(self.lanes, self.bits, columns.moments_across(self.width, self.lanes))
        kernels = (
            columns.scale_columns, columns.pool_columns, columns.gradient_sums,
            columns.gradient_columns, columns.pool_gradient_sums, columns.pool_gradient_columns,
        )  # fmt: skip
        (
            self.scale, self.pool, self.sums, self.columns, self.pool_sums, self.pool_columns
        ) = (kernel(self.lanes, self.bits) for kernel in kernels)  # fmt: skip
        self.is_per_example = per_example or len(self.weights) > 2  # with statistics that are given
        self.prepare_coefficients()

    def prepare_coefficients(self) -> None:
        groups = self.settings["groups"]
        size = 1 if groups is None else self.before.channels // groups
        self.coefficients = columns.norm_coefficients(self.lanes, self.bits)
        self.gradients = columns.norm_gradients(self.lanes, self.bits)
        self.group_sizes = self.segments, self.before.channels, self.devices, size
        self.share = 0.0 if len(self.weights) > 2 else 1.0 / (self.rows * size)

    def find_coefficients(self, run: BlockPass, table: Tensor, at: int) -> None:
        """Fill the rows of the table: center, variance, root, scale and shift."""
        weight, bias, *statistics = self.weights
        row = self.stride
        for number, name in enumerate(statistics):
            table[number].copy_(arrange(run.weights[name or 0]).flatten())
        if not statistics:
            self.moments(run.value(self.x).data_ptr(), at, at + row, self.segments, self.rows, self.width)
        if self.settings.get("tracks") is not None:
            self._track(run, table)
        self.coefficients(
            at, at + row, run.address(weight), run.address(bias), at + 2 * row, at + 3 * row, at + 4 * row,
            *self.group_sizes, self.settings["eps"],
        )  # fmt: skip

    def _track(self, run: BlockPass, table: Tensor) -> None:
        """The mean and unbiased variance of the batch; a single number has none."""
        unbias = self.rows / (self.rows - 1) if self.rows > 1 else math.nan
        mean, variance = (row.view(-1, self.devices).t() for row in table[:2])
        for key, tensor in (("running_mean", mean.clone()), ("running_var", variance * unbias)):
            run.statistics[f"{self.settings['tracks']}.{key}".lstrip(".")] = tensor

    def find_gradients(self, run: BlockPass, at: int) -> None:
        """From the sums in rows 5 and 6 of the table to slope and offset in rows 7 and 8."""
        row, (weight, bias) = self.stride, self.weights[:2]
        self.gradients(
            at + 5 * row, at + 6 * row, at, at + 2 * row, run.address(weight), run.weight_gradient(weight),
            run.weight_gradient(bias), at + 7 * row, at + 8 * row, *self.group_sizes, self.share,
        )  # fmt: skip

    def center(self, run: BlockPass, at: int) -> int:
        return at

    def forward(self, run: BlockPass) -> None:
        table = torch.empty((9, self.segments, self.width), dtype=self.dtype)
        run.saved[self.output], at, row = table, table.data_ptr(), self.stride
        self.find_coefficients(run, table, at)
        run.values[self.output] = y = torch.empty(self.shape, dtype=self.dtype)
        x = run.value(self.x).data_ptr()
        if self.pools:
            self.pool(x, at + 3 * row, at + 4 * row, y.data_ptr(), *self.pool_sizes)
        else:
            self.scale(x, at + 3 * row, at + 4 * row, y.data_ptr(), *self.map_sizes)

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        x, g, row = run.value(self.x), gradient.data_ptr(), self.stride
        at = run.saved[self.output].data_ptr()
        lines, sums = (at + 3 * row, at + 4 * row), (at + 5 * row, at + 6 * row)
        if self.pools:
            y = run.value(self.output).data_ptr()
            self.pool_sums(g, x.data_ptr(), y, self.center(run, at), *lines, *sums, *self.pool_sum_sizes)
        else:
            self.sums(g, x.data_ptr(), self.center(run, at), *lines, *sums, *self.map_sizes)
        self.find_gradients(run, at)
        if self.x not in run.needed:
            return
        dx = torch.empty_like(x)
        slopes = at + 7 * row, at + 8 * row
        if self.pools:
            self.pool_columns(g, x.data_ptr(), y, *lines, *slopes, dx.data_ptr(), *self.pool_sizes)
            run.add_gradient(self.x, dx)
            return
        other = run.gradients.pop(self.x, None)
        plus = 0 if other is None else other.data_ptr()
        self.columns(g, x.data_ptr(), *lines, *slopes, plus, dx.data_ptr(), *self.map_sizes)
        run.add_gradient(self.x, dx)


class Parametric(Norm):
    """FedSup's normalization: by a learned shift and the root mean square."""

    def prepare_coefficients(self) -> None:
        self.is_per_example = self.settings["per_example"]
        self.coefficients = columns.parametric_coefficients(self.lanes, self.bits)
        self.gradients = columns.parametric_gradients(self.lanes, self.bits)

    def find_coefficients(self, run: BlockPass, table: Tensor, at: int) -> None:
        row, (weight, center, bias) = self.stride, (run.address(number) for number in self.weights)
        self.moments(run.value(self.x).data_ptr(), at, at + row, self.segments, self.rows, self.width)
        self.coefficients(
            at, at + row, weight, center, bias, at + 2 * row, at + 3 * row, at + 4 * row, self.segments, self.width,
            self.settings["eps"],
        )  # fmt: skip

    def find_gradients(self, run: BlockPass, at: int) -> None:
        row = self.stride
        found = [run.weight_gradient(number) for number in self.weights]
        if not all(found):  # the kernel writes all three
            unwanted = self.empty(3, self.width)
            spare = unwanted.data_ptr()
            found = [address or spare + number * self.width * self.bits // 8 for number, address in enumerate(found)]
        self.gradients(
            at + 5 * row, at + 6 * row, at, at + 2 * row, at + 3 * row, run.address(self.weights[1]), *found,
            at + 7 * row, at + 8 * row, self.segments, self.width, float(self.rows), self.settings["eps"],
        )  # fmt: skip

    def center(self, run: BlockPass, at: int) -> int:
        """The shift, for each segment."""
        if self.segments == 1:
            return run.address(self.weights[1])
        shift = arrange(run.weights[self.weights[1] or 0]).flatten()
        run.saved[-self.output] = held = shift.expand(self.segments, -1).contiguous()
        return held.data_ptr()


class Activation(LaneStep):
    limit: float | None = None

    def prepare(self, program: "Program") -> None:
        self.keeps = (self.output,)

    def forward(self, run: BlockPass) -> None:
        x = run.value(self.x)
        run.values[self.output] = torch.relu(x) if self.limit is None else torch.clamp(x, 0.0, self.limit)

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        y = run.value(self.output)
        if self.limit is None:
            run.add_gradient(self.x, aten.threshold_backward(gradient, y, 0))
        else:
            run.add_gradient(self.x, aten.hardtanh_backward(gradient, y, 0.0, self.limit))


class Activation6(Activation):
    limit = 6.0


class Rescale(LaneStep):
    def forward(self, run: BlockPass) -> None:
        run.values[self.output] = run.value(self.x) / self.settings["rate"]

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        run.add_gradient(self.x, gradient / self.settings["rate"])


class Add(LaneStep):
    into: int | None = None
    """The input whose memory takes the sum."""

    def overwrite(self, free: Collection[int]) -> None:
        self.into = next((number for number in self.inputs if number in free), None)

    def forward(self, run: BlockPass) -> None:
        left, right = map(run.value, self.inputs)
        run.values[self.output] = torch.add(left, right, out=None if self.into is None else run.value(self.into))

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        for number in self.inputs:
            if number in run.needed:
                run.add_gradient(number, gradient)


class Alias(LaneStep):
    shares_memory = True

    def forward(self, run: BlockPass) -> None:
        run.values[self.output] = run.value(self.x)

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        run.add_gradient(self.x, gradient)


class Detach(Alias):
    is_cut = True

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        pass


class Mean(LaneStep):
    """Over all positions."""

    def forward(self, run: BlockPass) -> None:
        total = self.sum_rows(run.value(self.x), self.shape[0], self.positions, self.width, 1.0 / self.positions)
        run.values[self.output] = total.view(self.shape)

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        each = gradient / self.positions
        run.add_gradient(self.x, each.expand(-1, self.positions, -1, -1).contiguous())


class Pool(LaneStep):
    """Max pooling by torch, whose windows never mix channels."""

    def prepare(self, program: "Program") -> None:
        self.keeps = (self.x,)
        self.images = _image(self.before), _image(self.after)

    def forward(self, run: BlockPass) -> None:
        x = as_image(run.value(self.x), self.images[0])
        y, run.saved[self.output] = aten.max_pool2d_with_indices(x, *self.settings["arguments"])
        run.values[self.output] = from_image(y, self.devices)

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        x, g = as_image(run.value(self.x), self.images[0]), as_image(gradient, self.images[1])
        indices = run.saved[self.output]
        dx = aten.max_pool2d_with_indices_backward(g, x, *self.settings["arguments"], indices)
        run.add_gradient(self.x, from_image(dx, self.devices))


class AveragePool(Pool):
    """Average pooling by torch."""

    def forward(self, run: BlockPass) -> None:
        y = aten.avg_pool2d(as_image(run.value(self.x), self.images[0]), *self.settings["arguments"])
        run.values[self.output] = from_image(y, self.devices)

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        x, g = as_image(run.value(self.x), self.images[0]), as_image(gradient, self.images[1])
        run.add_gradient(self.x, from_image(aten.avg_pool2d_backward(g, x, *self.settings["arguments"]), self.devices))


class MixedPoolStep(LaneStep):
    """Max and average pooling, mixed in a learned proportion."""

    def prepare(self, program: "Program") -> None:
        self.keeps, window = (self.x,), self.settings["window"]
        self.images = _image(self.before), _image(self.after)
        self.largest = window, window, (0, 0), (1, 1), False
        self.average = window, window, (0, 0), False, True, None

    def forward(self, run: BlockPass) -> None:
        x, share = as_image(run.value(self.x), self.images[0]), run.weights[self.weights[0] or 0].flatten()
        largest, indices = aten.max_pool2d_with_indices(x, *self.largest)
        top, mean = (from_image(one, self.devices) for one in (largest, aten.avg_pool2d(x, *self.average)))
        run.saved[self.output] = indices, top, mean
        run.values[self.output] = share * top + (1 - share) * mean

    def backward(self, run: BlockPass, gradient: Tensor) -> None:
        indices, top, mean = run.saved[self.output]
        share, into = run.weights[self.weights[0] or 0].flatten(), run.weight_gradient(self.weights[0])
        if into:
            each = gradient * (top - mean)
            kernel = columns.column_sums(self.lanes, self.bits)
            kernel(each.data_ptr(), into, 1, each.numel() // self.devices, self.devices, 1.0)
        if self.x in run.needed:
            x = as_image(run.value(self.x), self.images[0])
            tops, means = (as_image(one, self.images[1]) for one in (gradient * share, gradient * (1 - share)))
            dx = aten.max_pool2d_with_indices_backward(tops, x, *self.largest, indices)
            dx = dx + aten.avg_pool2d_backward(means, x, *self.average)
            run.add_gradient(self.x, from_image(dx, self.devices))


def as_image(value: Tensor, size: tuple[int, int]) -> Tensor:
    """[batch, positions, channels, K] as torch's map, channels-last."""
    return value.view(len(value), *size, -1).permute(0, 3, 1, 2)


def from_image(x: Tensor, devices: int) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().view(len(x), x.shape[2] * x.shape[3], -1, devices)


STEPS: dict[str, Callable[[Operation, "Program"], LaneStep]] = {
    "conv": Convolution, "linear": LinearStep, "norm": Norm, "parametric": Parametric, "relu": Activation,
    "relu6": Activation6, "scale": Rescale, "add": Add, "alias": Alias, "detach": Detach, "mean": Mean,
    "max_pool": Pool, "avg_pool": AveragePool, "mixed_pool": MixedPoolStep,
}  # fmt: skip


def fuse(trace: Trace, outputs: Sequence[int]) -> list[Operation]:
    """Merge a scaler into the normalization behind it, and activation and pooling into that before them."""
    uses = [0] * len(trace.values)
    for number in outputs:
        uses[number] += 1
    for operation in trace.operations:
        for number in operation.inputs:
            uses[number] += 1
    made: dict[int, Operation] = {}
    kept: list[Operation] = []
    for operation in trace.operations:
        before = made.get(operation.inputs[0])
        joined = _join(before, operation) if before is not None and uses[before.output] == 1 else None
        if joined is not None and before is not None:
            kept.remove(before)
        made[operation.output] = joined or operation
        kept.append(joined or operation)
    return kept


def _join(before: Operation, operation: Operation) -> Operation | None:
    """Two operations as one, if there is one that does both."""
    kind, settings = operation.kind, operation.settings
    if before.kind == "scale" and kind == "norm" and len(operation.weights) == 2 and settings.get("tracks") is None:
        # normalizing x / rate is normalizing x with another eps
        changed = {**settings, "eps": settings["eps"] * before.settings["rate"] ** 2}
        return Operation("norm", before.inputs, operation.output, operation.weights, changed)
    if before.kind not in ("norm", "parametric") or before.settings.get("pools"):
        return None
    activation = before.settings.get("activation", columns.NONE)
    changes: dict[str, Any] = {}
    if kind in ("relu", "relu6") and activation == columns.NONE:
        changes = {"activation": columns.RELU if kind == "relu" else columns.RELU6}
    elif kind == "max_pool" and activation == columns.RELU and settings["arguments"] == TWO_BY_TWO:
        changes = {"pools": True}
    both = {**before.settings, **changes}
    return Operation(before.kind, before.inputs, operation.output, before.weights, both) if changes else None


MANY = 250_000
"""Weights beyond which it does not pay to copy them for every lane."""

TWO_BY_TWO = ((2, 2), (2, 2), (0, 0), (1, 1), False)


class Program:
    """A traced module for one batch size and one number of devices, which fills vectors.

    Parameters
    ----------
    trace : the operations of one device.
    devices : how many there are.
    dtype : of all numbers.
    training : whether it is in training mode.
    arranged : the weights of the last pass; shared by programs that differ in the batch size.
    """

    def __init__(self, trace: Trace, devices: int, dtype: torch.dtype, training: bool, arranged: ArrangedWeights):
        self.trace, self.devices, self.dtype, self.training, self.arranged = trace, devices, dtype, training, arranged
        self.bits = 32 if dtype == torch.float32 else 64
        numbers: list[int] = []
        tree_map(numbers.append, trace.outputs)
        self.outputs = list(dict.fromkeys(numbers))
        operations = fuse(trace, self.outputs)
        # in the order of `lay_out`, so that an optimizer can go through weights and gradients as one
        self.weights = sorted({name for operation in operations for name in operation.weights if name is not None})
        self.numbers = {name: number for number, name in enumerate(self.weights)}
        self.shapes = [(devices, *trace.shapes[name]) for name in self.weights]
        self.strides = [arranged_strides(shape) for shape in self.shapes]
        self.offsets, self.total = offsets(self.shapes)
        self.steps = [STEPS[operation.kind](operation, self) for operation in operations]
        self.kept = {number for step in self.steps for number in step.keeps}
        last = {number: step for step in self.steps for number in (*step.inputs, step.output)}
        # whether an example's outputs depend on it alone, and few weights are used for many pixels
        per_example = all(step.is_per_example for step in self.steps)
        self.is_narrow = per_example and self.total <= MANY * devices
        self.free = {
            step.output: [n for n in (*step.inputs, step.output) if last[n] is step and n not in self.outputs]
            for step in self.steps
        }
        shared = {number for step in self.steps if step.shares_memory for number in step.inputs}
        fresh = {step.output for step in self.steps if step.owns_memory} - self.kept - shared
        for step in self.steps:
            step.overwrite(fresh.intersection(self.free[step.output], step.inputs))
        self.free_kept = {key: [n for n in values if n not in self.kept] for key, values in self.free.items()}

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """Outputs and statistics, devices in front.

        Parameters
        ----------
        weights : the weights of each device, [K, ...], or of one device for all.
        x : the inputs, [K, batch, ...].
        """
        used = [weights[name] for name in self.weights]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *used)):
            statistics: dict[str, Tensor] = {}
            found = _Network.apply(self, statistics, x, *used)  # type: ignore[no-untyped-call]
        else:
            run = self.forward(used, x, self.free, evaluates=not self.training)
            statistics = run.statistics
            found = tuple(self.unfold(run.value(number), number) for number in self.outputs)
        tensors = dict(zip(self.outputs, found, strict=True))
        return tree_map(tensors.__getitem__, self.trace.outputs), statistics

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, free: Mapping[int, Sequence[int]], evaluates: bool = False
    ) -> BlockPass:
        run = BlockPass(self, weights, evaluates)
        run.values[0] = self.fold(x)
        for step in self.steps:
            step.forward(run)
            for number in free[step.output]:
                run.values[number] = None
        return run

    def backward(self, run: BlockPass, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the weights."""
        run.flat = torch.empty(self.total, dtype=self.dtype)
        for number, gradient in zip(self.outputs, gradients, strict=True):
            if gradient is not None and number in run.needed:
                run.add_gradient(number, self.fold_gradient(gradient, number))
        for step in reversed(self.steps):
            found = run.gradients.pop(step.output, None)
            if found is not None and step.output in run.needed:
                step.backward(run, found)
        made = [self.gradient_view(run.flat, n) if n in run.begun else None for n in range(len(self.weights))]
        for number, other in run.again:
            made[number] = made[number] + other  # type: ignore[operator]
        return made

    def gradient_view(self, flat: Tensor, number: int) -> Tensor:
        return flat.as_strided(self.shapes[number], self.strides[number], self.offsets[number])

    def needed(self, wanted: Sequence[bool], x: bool) -> frozenset[int]:
        """The values whose gradient is needed."""
        found = {0} if x else set[int]()
        for step in self.steps:
            if step.is_cut:
                continue
            if found.intersection(step.inputs) or any(wanted[n] for n in step.weights if n is not None):
                found.add(step.output)
        return frozenset(found)

    def fold(self, x: Tensor) -> Tensor:
        """[K, batch, channels, ...] -> [batch, positions, channels, K]"""
        devices, batch, channels = x.shape[:3]
        moved = x.flatten(3).permute(1, 3, 2, 0) if x.dim() > 3 else x.permute(1, 2, 0)
        return moved.contiguous().view(batch, -1, channels, devices)

    def unfold(self, value: Tensor, number: int) -> Tensor:
        """[batch, positions, channels, K] -> [K, batch, channels, ...]"""
        shape = self.trace.values[number]
        moved = value.permute(3, 0, 2, 1)
        return moved.flatten(2) if shape.flat or not shape.positions else moved.unflatten(3, shape.positions)

    def fold_gradient(self, gradient: Tensor, number: int) -> Tensor:
        shape = self.trace.values[number]
        devices, batch = gradient.shape[:2]
        apart = gradient.reshape(devices, batch, shape.channels, math.prod(shape.positions))
        return apart.permute(1, 3, 2, 0).contiguous()


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, statistics: dict[str, Tensor], x: Tensor, *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        run = program.forward(weights, x, program.free_kept)
        statistics.update(run.statistics)
        ctx.run, ctx.shape = run, x.shape
        return tuple(program.unfold(run.value(number), number) for number in program.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        run: BlockPass = ctx.run
        program, needs = run.program, ctx.needs_input_grad
        run.wanted = needs[3:]
        run.needed = program.needed(run.wanted, needs[2])
        run.gradients, run.begun, run.again = {}, set(), []
        found = program.backward(run, gradients)
        dx = run.gradients.pop(0, None) if needs[2] else None
        return None, None, None if dx is None else dx.permute(3, 0, 2, 1).reshape(ctx.shape), *found
