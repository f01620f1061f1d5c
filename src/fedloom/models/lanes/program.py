"""Run a traced module for K devices at once, forward and backward, with one node in torch's graph for the whole net.

In memory the devices are the innermost axis: activations are [batch, positions, channels, K], and weights and their
gradients the reverse of their axes, kernels first. Every operation is a kernel that treats the devices as independent
lanes, or an elementwise function of torch; so a device's numbers depend neither on K nor on its place.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import columns, convolution, depthwise
from .layout import arrange, disarrange
from .tracing import NoLaneKernelError, Operation, Trace, Value

aten = torch.ops.aten


class Run:
    """The tensors of one pass."""

    def __init__(self, program: "Program", weights: Mapping[str, Tensor], devices: int, dtype: torch.dtype):
        self.program, self.devices, self.dtype = program, devices, dtype
        self.bits = 32 if dtype == torch.float32 else 64
        self.lanes = convolution.lane_count(self.bits)
        self.weights = weights
        self.memory: dict[str, Tensor] = {}
        self.values: list[Tensor | None] = [None] * len(program.trace.values)
        self.saved: dict[int, Any] = {}
        self.statistics: dict[str, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.weight_gradients: dict[str, Tensor] = {}
        self.needed: frozenset[int] = frozenset()
        self.wanted: frozenset[str] = frozenset()

    def value(self, number: int) -> Tensor:
        found = self.values[number]
        assert found is not None
        return found

    def weight(self, name: str) -> Tensor:
        """A weight as it lies in memory, devices last."""
        if name not in self.memory:
            self.memory[name] = arrange(self.weights[name])
        return self.memory[name]

    def address(self, name: str | None) -> int:
        return 0 if name is None else self.weight(name).data_ptr()

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def new_value(self, number: int) -> Tensor:
        value = self.program.trace.values[number]
        made = self.empty(self.program.trace.batch, math.prod(value.positions), value.channels, self.devices)
        self.values[number] = made
        return made

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        before = self.gradients.get(number)
        self.gradients[number] = gradient if before is None else before + gradient

    def take_gradient(self, number: int) -> Tensor | None:
        return self.gradients.pop(number, None)

    def wants(self, name: str | None) -> bool:
        return name is not None and name in self.wanted

    def add_weight_gradient(self, name: str, gradient: Tensor) -> None:
        """Of a weight as it lies in memory."""
        before = self.weight_gradients.get(name)
        self.weight_gradients[name] = gradient if before is None else before + gradient

    def sum_rows(self, x: Tensor, segments: int, rows: int, width: int, factor: float = 1.0) -> Tensor:
        """[segments, width]: sums over the rows of each segment."""
        total = self.empty(segments, width)
        kernel = columns.column_sums(self.lanes, self.bits)
        kernel(x.data_ptr(), total.data_ptr(), segments, rows, width, factor)
        return total


class Step:
    """An operation, ready to run; `keeps` are the values that its backward pass reads."""

    keeps: tuple[int, ...] = ()

    def __init__(self, operation: Operation, trace: Trace):
        self.inputs, self.output, self.weights = operation.inputs, operation.output, operation.weights
        self.x = operation.inputs[0]
        self.settings, self.trace = operation.settings, trace

    def forward(self, run: Run) -> None:
        raise NotImplementedError

    def backward(self, run: Run, gradient: Tensor) -> None:
        raise NotImplementedError


def _image(value: Value) -> tuple[int, int]:
    """Height and width of a map; a sequence has height 1."""
    height, width = (1, 1, *value.positions)[-2:]
    return height, width


class Convolution(Step):
    def __init__(self, operation: Operation, trace: Trace):
        super().__init__(operation, trace)
        self.keeps = (self.x,)
        before, after = trace.values[self.x], trace.values[self.output]
        kernel, stride, padding = (((1, 1) + self.settings[key])[-2:] for key in ("kernel", "stride", "padding"))
        padding = padding if len(before.positions) > 1 else (0, padding[1])
        if len(before.positions) > 2:
            raise NoLaneKernelError("a convolution of volumes has no lane kernel")
        self.sizes = (
            trace.batch, *_image(before), before.channels, after.channels, kernel, stride, padding,
            self.settings["groups"],
        )  # fmt: skip
        self.is_depthwise = before.channels == after.channels == self.settings["groups"] > 1

    def shape(self, run: Run) -> convolution.Shape:
        return convolution.Shape(*self.sizes, run.devices, run.bits)

    def _depthwise(self, run: Run) -> tuple[int, ...]:
        shape = self.shape(run)
        return (
            shape.batch, shape.height, shape.width, shape.inputs * run.devices, shape.out_height, shape.out_width,
            *shape.kernel, *shape.stride, *shape.padding,
        )  # fmt: skip

    def forward(self, run: Run) -> None:
        x, y = run.value(self.x), run.new_value(self.output)
        weight, bias = self.weights
        pointers = x.data_ptr(), run.address(weight), run.address(bias), y.data_ptr()
        if self.is_depthwise:
            depthwise.forward_kernel(run.lanes, run.bits, 5)(*pointers, *self._depthwise(run))
        else:
            kernel, sizes = convolution.plan_forward(self.shape(run))
            kernel(*pointers, *sizes)

    def backward(self, run: Run, gradient: Tensor) -> None:
        weight, bias = self.weights
        assert weight is not None
        x, w, g = run.value(self.x), run.weight(weight), gradient.data_ptr()
        if self.x in run.needed:
            dx = torch.empty_like(x)
            if self.is_depthwise:
                kernel, sizes = depthwise.input_gradient_kernel(run.lanes, run.bits, 5), self._depthwise(run)
                swapped = w
            else:
                kernel, sizes, swap = convolution.plan_input_gradient(self.shape(run))
                swapped = w.transpose(-3, -2).contiguous() if swap else w
            kernel(g, swapped.data_ptr(), dx.data_ptr(), *sizes)
            run.add_gradient(self.x, dx)
        if run.wants(weight):
            dw = torch.empty_like(w)
            if self.is_depthwise:
                kernel, sizes = depthwise.weight_gradient_kernel(run.lanes, run.bits, 8), self._depthwise(run)
            else:
                kernel, sizes = convolution.plan_weight_gradient(self.shape(run))
            kernel(x.data_ptr(), g, dw.data_ptr(), *sizes)
            run.add_weight_gradient(weight, dw)
        if bias is not None and run.wants(bias):
            rows, width = gradient.shape[0] * gradient.shape[1], gradient.shape[2] * run.devices
            run.add_weight_gradient(bias, run.sum_rows(gradient, 1, rows, width).view(-1, run.devices))


class Linear(Step):
    """A convolution with a kernel of the size of the map: [inputs, outputs, K] or [positions, channels, outputs, K]."""

    def __init__(self, operation: Operation, trace: Trace):
        super().__init__(operation, trace)
        self.keeps = (self.x,)
        self.before = trace.values[self.x]
        self.fan_out = trace.values[self.output].channels
        self.positions = math.prod(self.before.positions)
        self.fan_in = self.before.channels * self.positions

    def shape(self, run: Run) -> convolution.Shape:
        batch = self.trace.batch
        return convolution.Shape(
            batch, 1, 1, self.fan_in, self.fan_out, (1, 1), (1, 1), (0, 0), 1, run.devices, run.bits
        )

    def _is_flat(self, run: Run) -> bool:
        """True if the weight's axis of inputs counts channels and positions, in this order."""
        return self.positions > 1 and run.weights[self.weights[0] or ""].dim() == 3

    def _weight(self, run: Run) -> Tensor:
        name = self.weights[0]
        assert name is not None
        if not self._is_flat(run):
            return run.weight(name).view(self.fan_in, self.fan_out, run.devices)
        apart: Tensor = run.weights[name].unflatten(2, (self.before.channels, self.positions))
        return apart.permute(3, 2, 1, 0).contiguous().view(self.fan_in, self.fan_out, run.devices)

    def forward(self, run: Run) -> None:
        w = self._weight(run)
        run.saved[self.output] = w
        kernel, sizes = convolution.plan_forward(self.shape(run))
        y = run.new_value(self.output)
        kernel(run.value(self.x).data_ptr(), w.data_ptr(), run.address(self.weights[1]), y.data_ptr(), *sizes)

    def backward(self, run: Run, gradient: Tensor) -> None:
        weight, bias = self.weights
        assert weight is not None
        x, w, shape = run.value(self.x), run.saved[self.output], self.shape(run)
        if self.x in run.needed:
            dx = torch.empty_like(x)
            kernel, sizes, swap = convolution.plan_input_gradient(shape)
            swapped = w.transpose(0, 1).contiguous() if swap else w
            kernel(gradient.data_ptr(), swapped.data_ptr(), dx.data_ptr(), *sizes)
            run.add_gradient(self.x, dx)
        if run.wants(weight):
            dw = torch.empty_like(w)
            kernel, sizes = convolution.plan_weight_gradient(shape)
            kernel(x.data_ptr(), gradient.data_ptr(), dw.data_ptr(), *sizes)
            if self._is_flat(run):
                apart = dw.view(self.positions, self.before.channels, self.fan_out, run.devices)
                dw = apart.permute(1, 0, 2, 3).reshape(dw.shape)
            run.add_weight_gradient(weight, dw.view(arrange_shape(run.weights[weight])))
        if bias is not None and run.wants(bias):
            total = run.sum_rows(gradient, 1, len(gradient), self.fan_out * run.devices)
            run.add_weight_gradient(bias, total.view(self.fan_out, run.devices))


def arrange_shape(weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight as it lies in memory."""
    return (*weight.shape[3:], *reversed(weight.shape[:3]))


class Norm(Step):
    """Batch, group or instance norm, with the activation and the 2 x 2 max pooling behind it if they follow at once."""

    def __init__(self, operation: Operation, trace: Trace):
        super().__init__(operation, trace)
        self.activation, self.pools = self.settings.get("activation", columns.NONE), self.settings.get("pools", False)
        self.keeps = (self.x, self.output) if self.pools else (self.x,)
        value = trace.values[self.x]
        self.channels, self.positions = value.channels, math.prod(value.positions)
        self.image = _image(value)
        self.segments = trace.batch if self.settings["per_example"] else 1
        self.rows = trace.batch * self.positions // self.segments

    def _coefficients(self, run: Run, table: Tensor) -> None:
        """Fill center, root, scale and shift."""
        weight, bias, *statistics = self.weights
        mean, variance, root, scale, shift = (row.data_ptr() for row in table)
        if statistics:
            for row, name in zip(table, statistics, strict=False):
                row.copy_(run.weight(name or "").flatten())
        else:
            x, width = run.value(self.x).data_ptr(), self.channels * run.devices
            columns.moments(run.lanes, run.bits)(x, mean, variance, self.segments, self.rows, width)
        if self.settings.get("tracks") is not None:
            self._track(run, table)
        groups = self.settings["groups"]
        kernel = columns.norm_coefficients(run.lanes, run.bits)
        sizes = self.segments, self.channels, run.devices, 1 if groups is None else self.channels // groups
        weights = run.address(weight), run.address(bias)
        kernel(mean, variance, *weights, root, scale, shift, *sizes, self.settings["eps"])

    def _track(self, run: Run, table: Tensor) -> None:
        """The mean and unbiased variance of the batch; a single number has none."""
        unbias = self.rows / (self.rows - 1) if self.rows > 1 else math.nan
        mean, variance = (row.view(self.channels, run.devices).t() for row in table[:2])
        for key, tensor in (("running_mean", mean.clone()), ("running_var", variance * unbias)):
            run.statistics[f"{self.settings['tracks']}.{key}".lstrip(".")] = tensor

    def _gradients(self, run: Run, table: Tensor, sums: Tensor, lines: Tensor) -> None:
        weight, bias, *statistics = self.weights
        mean, _, root, _, _ = (row.data_ptr() for row in table)
        found = [run.empty(self.channels, run.devices) if run.wants(name) else None for name in (weight, bias)]
        dw, db = (0 if one is None else one.data_ptr() for one in found)
        groups = self.settings["groups"]
        size = 1 if groups is None else self.channels // groups
        share = 0.0 if statistics else 1.0 / (self.rows * size)
        columns.norm_gradients(run.lanes, run.bits)(
            sums[0].data_ptr(), sums[1].data_ptr(), mean, root, run.address(weight), dw, db, lines[0].data_ptr(),
            lines[1].data_ptr(), self.segments, self.channels, run.devices, size, share,
        )  # fmt: skip
        for name, one in zip((weight, bias), found, strict=True):
            if name is not None and one is not None:
                run.add_weight_gradient(name, one)

    def forward(self, run: Run) -> None:
        width = self.channels * run.devices
        table = run.empty(5, self.segments, width)
        x = run.value(self.x)
        self._coefficients(run, table)
        run.saved[self.output] = table
        y = run.new_value(self.output)
        scale, shift = table[3].data_ptr(), table[4].data_ptr()
        if self.pools:
            columns.pool_columns(run.lanes, run.bits)(
                x.data_ptr(), scale, shift, y.data_ptr(), self.trace.batch, *self.image, width, self._per_example(run)
            )
        else:
            columns.scale_columns(run.lanes, run.bits)(
                x.data_ptr(), scale, shift, y.data_ptr(), self.segments, self.rows, width, self.activation
            )

    def _per_example(self, run: Run) -> int:
        return self.channels * run.devices * run.bits // 8 if self.settings["per_example"] else 0

    def backward(self, run: Run, gradient: Tensor) -> None:
        width, table = self.channels * run.devices, run.saved[self.output]
        x, g, batch = run.value(self.x), gradient.data_ptr(), self.trace.batch
        center, scale, shift = self._center(run, table), table[3].data_ptr(), table[4].data_ptr()
        sums, lines = run.empty(2, self.segments, width), run.empty(2, self.segments, width)
        total, weighted = sums[0].data_ptr(), sums[1].data_ptr()
        if self.pools:
            y = run.value(self.output).data_ptr()
            columns.pool_gradient_sums(run.lanes, run.bits)(
                g, x.data_ptr(), y, center, scale, shift, total, weighted, self.segments, batch, *self.image, width
            )
        else:
            sizes = self.segments, self.rows, width, self.activation
            columns.gradient_sums(run.lanes, run.bits)(g, x.data_ptr(), center, scale, shift, total, weighted, *sizes)
        self._gradients(run, table, sums, lines)
        if self.x not in run.needed:
            return
        dx, slope, offset = torch.empty_like(x), lines[0].data_ptr(), lines[1].data_ptr()
        if self.pools:
            columns.pool_gradient_columns(run.lanes, run.bits)(
                g, x.data_ptr(), y, scale, shift, slope, offset, dx.data_ptr(), batch, *self.image, width,
                self._per_example(run),
            )  # fmt: skip
            run.add_gradient(self.x, dx)
            return
        other = run.take_gradient(self.x)
        columns.gradient_columns(run.lanes, run.bits)(
            g,
            x.data_ptr(),
            scale,
            shift,
            slope,
            offset,
            0 if other is None else other.data_ptr(),
            dx.data_ptr(),
            *sizes,
        )
        run.add_gradient(self.x, dx)

    def _center(self, run: Run, table: Tensor) -> int:
        return table[0].data_ptr()


class Parametric(Norm):
    """FedSup's normalization: by a learned shift and the root mean square."""

    def _coefficients(self, run: Run, table: Tensor) -> None:
        weight, center, bias = self.weights
        mean, variance, root, scale, shift = (row.data_ptr() for row in table)
        x, width = run.value(self.x).data_ptr(), self.channels * run.devices
        columns.moments(run.lanes, run.bits)(x, mean, variance, self.segments, self.rows, width)
        columns.parametric_coefficients(run.lanes, run.bits)(
            mean, variance, run.address(weight), run.address(center), run.address(bias), root, scale, shift,
            self.segments, width, self.settings["eps"],
        )  # fmt: skip

    def _gradients(self, run: Run, table: Tensor, sums: Tensor, lines: Tensor) -> None:
        found = [run.empty(self.channels, run.devices) for _ in self.weights]
        mean, _, root, scale, _ = (row.data_ptr() for row in table)
        columns.parametric_gradients(run.lanes, run.bits)(
            sums[0].data_ptr(), sums[1].data_ptr(), mean, root, scale, run.address(self.weights[1]),
            *(one.data_ptr() for one in found), lines[0].data_ptr(), lines[1].data_ptr(), self.segments,
            self.channels * run.devices, float(self.rows), self.settings["eps"],
        )  # fmt: skip
        for name, one in zip(self.weights, found, strict=True):
            if name is not None and run.wants(name):
                run.add_weight_gradient(name, one)

    def _center(self, run: Run, table: Tensor) -> int:
        """The shift, for each segment."""
        shift = run.weight(self.weights[1] or "").flatten()
        run.saved[-self.output] = held = shift.expand(self.segments, -1).contiguous()
        return held.data_ptr()


class Activation(Step):
    def __init__(self, operation: Operation, trace: Trace):
        super().__init__(operation, trace)
        self.keeps, self.limit = (self.output,), 6.0 if operation.kind == "relu6" else None

    def forward(self, run: Run) -> None:
        x = run.value(self.x)
        run.values[self.output] = torch.relu(x) if self.limit is None else torch.clamp(x, 0.0, self.limit)

    def backward(self, run: Run, gradient: Tensor) -> None:
        y = run.value(self.output)
        if self.limit is None:
            run.add_gradient(self.x, aten.threshold_backward(gradient, y, 0))
        else:
            run.add_gradient(self.x, aten.hardtanh_backward(gradient, y, 0.0, self.limit))


class Scale(Step):
    def forward(self, run: Run) -> None:
        run.values[self.output] = run.value(self.x) / self.settings["rate"]

    def backward(self, run: Run, gradient: Tensor) -> None:
        run.add_gradient(self.x, gradient / self.settings["rate"])


class Add(Step):
    def forward(self, run: Run) -> None:
        left, right = self.inputs
        run.values[self.output] = run.value(left) + run.value(right)

    def backward(self, run: Run, gradient: Tensor) -> None:
        for number in self.inputs:
            if number in run.needed:
                run.add_gradient(number, gradient)


class Alias(Step):
    def forward(self, run: Run) -> None:
        run.values[self.output] = run.value(self.x)

    def backward(self, run: Run, gradient: Tensor) -> None:
        run.add_gradient(self.x, gradient)


class Mean(Step):
    """Over all positions."""

    def forward(self, run: Run) -> None:
        x = run.value(self.x)
        batch, positions, channels, devices = x.shape
        total = run.sum_rows(x, batch, positions, channels * devices, 1.0 / positions)
        run.values[self.output] = total.view(batch, 1, channels, devices)

    def backward(self, run: Run, gradient: Tensor) -> None:
        positions = math.prod(self.trace.values[self.x].positions)
        run.add_gradient(self.x, (gradient / positions).repeat(1, positions, 1, 1))


class Pool(Step):
    """Max or average pooling by torch, whose windows never mix channels."""

    def __init__(self, operation: Operation, trace: Trace):
        super().__init__(operation, trace)
        self.keeps, self.is_max = (self.x,), operation.kind == "max_pool"
        self.image, self.after = _image(trace.values[self.x]), _image(trace.values[self.output])
        self.arguments = self.settings["arguments"]

    def forward(self, run: Run) -> None:
        x = as_image(run.value(self.x), self.image)
        if self.is_max:
            y, run.saved[self.output] = aten.max_pool2d_with_indices(x, *self.arguments)
        else:
            y = aten.avg_pool2d(x, *self.arguments)
        run.values[self.output] = from_image(y, run.devices)

    def backward(self, run: Run, gradient: Tensor) -> None:
        x, g = as_image(run.value(self.x), self.image), as_image(gradient, self.after)
        if self.is_max:
            dx = aten.max_pool2d_with_indices_backward(g, x, *self.arguments, run.saved[self.output])
        else:
            dx = aten.avg_pool2d_backward(g, x, *self.arguments)
        run.add_gradient(self.x, from_image(dx, run.devices))


class MixedPool(Step):
    """Max and average pooling, mixed in a learned proportion."""

    def __init__(self, operation: Operation, trace: Trace):
        super().__init__(operation, trace)
        self.keeps, window = (self.x,), self.settings["window"]
        self.image, self.after = _image(trace.values[self.x]), _image(trace.values[self.output])
        self.largest, self.average = (
            (window, window, (0, 0), (1, 1), False),
            (window, window, (0, 0), False, True, None),
        )

    def forward(self, run: Run) -> None:
        x, share = as_image(run.value(self.x), self.image), run.weight(self.weights[0] or "").flatten()
        largest, indices = aten.max_pool2d_with_indices(x, *self.largest)
        top, mean = (from_image(one, run.devices) for one in (largest, aten.avg_pool2d(x, *self.average)))
        run.saved[self.output] = indices, top, mean
        run.values[self.output] = share * top + (1 - share) * mean

    def backward(self, run: Run, gradient: Tensor) -> None:
        indices, top, mean = run.saved[self.output]
        name = self.weights[0] or ""
        share = run.weight(name).flatten()
        if run.wants(name):
            each = gradient * (top - mean)
            total = run.sum_rows(each, 1, each.numel() // run.devices, run.devices)
            run.add_weight_gradient(name, total.view_as(run.weight(name)))
        if self.x in run.needed:
            x = as_image(run.value(self.x), self.image)
            tops, means = (as_image(one.contiguous(), self.after) for one in (gradient * share, gradient * (1 - share)))
            dx = aten.max_pool2d_with_indices_backward(tops, x, *self.largest, indices)
            dx = dx + aten.avg_pool2d_backward(means, x, *self.average)
            run.add_gradient(self.x, from_image(dx, run.devices))


def as_image(value: Tensor, size: tuple[int, int]) -> Tensor:
    """[batch, positions, channels, K] as torch's map, channels-last."""
    return value.view(len(value), *size, -1).permute(0, 3, 1, 2)


def from_image(x: Tensor, devices: int) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().view(len(x), x.shape[2] * x.shape[3], -1, devices)


STEPS: dict[str, Callable[[Operation, Trace], Step]] = {
    "conv": Convolution, "linear": Linear, "norm": Norm, "parametric": Parametric, "relu": Activation,
    "relu6": Activation, "scale": Scale, "add": Add, "alias": Alias, "mean": Mean, "max_pool": Pool, "avg_pool": Pool,
    "mixed_pool": MixedPool,
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
        settings = operation.settings
        if before is not None and uses[before.output] == 1:
            is_norm = operation.kind == "norm" and len(operation.weights) == 2 and settings.get("tracks") is None
            if before.kind == "scale" and is_norm:
                # normalizing x / rate is normalizing x with another eps
                eps = settings["eps"] * before.settings["rate"] ** 2
                kept.remove(before)
                operation = Operation(
                    "norm", before.inputs, operation.output, operation.weights, {**settings, "eps": eps}
                )
            elif before.kind in ("norm", "parametric") and not before.settings.get("pools"):
                changes = _joined(operation, before)
                if changes:
                    kept.remove(before)
                    joined = {**before.settings, **changes}
                    operation = Operation(before.kind, before.inputs, operation.output, before.weights, joined)
        made[operation.output] = operation
        kept.append(operation)
    return kept


def _joined(operation: Operation, norm: Operation) -> dict[str, Any] | None:
    activation = norm.settings.get("activation", columns.NONE)
    if operation.kind in ("relu", "relu6") and activation == columns.NONE:
        return {"activation": columns.RELU if operation.kind == "relu" else columns.RELU6}
    window = ((2, 2), (2, 2), (0, 0), (1, 1), False)
    if operation.kind == "max_pool" and activation == columns.RELU and operation.settings["arguments"] == window:
        return {"pools": True}
    return None


class Program:
    """A traced module for one batch size, for any number of devices that fills vectors."""

    def __init__(self, trace: Trace):
        self.trace = trace
        numbers: list[int] = []
        tree_map(numbers.append, trace.outputs)
        self.outputs = list(dict.fromkeys(numbers))
        self.steps = [STEPS[operation.kind](operation, trace) for operation in fuse(trace, self.outputs)]
        names = (name for step in self.steps for name in step.weights if name is not None)
        self.weights = list(dict.fromkeys(names))
        self.kept = {number for step in self.steps for number in step.keeps}
        self.last_use = {number: step for step in self.steps for number in (*step.inputs, step.output)}

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """Outputs and statistics, devices in front.

        Parameters
        ----------
        weights : the weights of each device, [K, ...].
        x : the inputs, [K, batch, ...].
        """
        used = [weights[name] for name in self.weights]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *used)):
            statistics: dict[str, Tensor] = {}
            found = _Network.apply(self, statistics, x, *used)  # type: ignore[no-untyped-call]
        else:
            run = self.forward(dict(weights), x, keep=False)
            statistics = run.statistics
            found = tuple(self.unfold(run.value(number), number) for number in self.outputs)
        tensors = dict(zip(self.outputs, found, strict=True))
        return tree_map(tensors.__getitem__, self.trace.outputs), statistics

    def forward(self, weights: Mapping[str, Tensor], x: Tensor, keep: bool) -> Run:
        run = Run(self, weights, len(x), x.dtype)
        run.values[0] = self.fold(x)
        for step in self.steps:
            step.forward(run)
            for number in (*step.inputs, step.output):
                unused = number not in self.outputs and self.last_use[number] is step
                if unused and not (keep and number in self.kept):
                    run.values[number] = None
            if not keep:
                run.saved.clear()
                run.memory.clear()
        return run

    def backward(self, run: Run, gradients: Sequence[Tensor | None]) -> None:
        for number, gradient in zip(self.outputs, gradients, strict=True):
            if gradient is not None and number in run.needed:
                run.add_gradient(number, self.fold_gradient(gradient, number))
        for step in reversed(self.steps):
            gradient = run.take_gradient(step.output)
            if gradient is not None and (step.output in run.needed):
                step.backward(run, gradient)

    def needed(self, wanted: frozenset[str], x: bool) -> frozenset[int]:
        """The values whose gradient is needed."""
        found = {0} if x else set[int]()
        for step in self.steps:
            if found.intersection(step.inputs) or wanted.intersection(name for name in step.weights if name):
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
        run = program.forward(dict(zip(program.weights, weights, strict=True)), x, keep=True)
        statistics.update(run.statistics)
        ctx.run, ctx.shape = run, x.shape
        return tuple(program.unfold(run.value(number), number) for number in program.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        run: Run = ctx.run
        program, needs = run.program, ctx.needs_input_grad
        run.wanted = frozenset(name for name, need in zip(program.weights, needs[3:], strict=True) if need)
        run.needed = program.needed(run.wanted, needs[2])
        program.backward(run, gradients)
        dx = run.take_gradient(0) if needs[2] else None
        if dx is not None:
            dx = dx.permute(3, 0, 2, 1).reshape(ctx.shape)
        found = (run.weight_gradients.pop(name, None) for name in program.weights)
        run.gradients.clear()
        return None, None, dx, *(None if one is None else disarrange(one) for one in found)
