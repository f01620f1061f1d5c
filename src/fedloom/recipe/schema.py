"""The schema of a recipe: everything that determines a run's result. Frozen; unknown keys are errors."""

import re
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..fleet import Assignment, Sampling
from ..footprints import LowCoverage
from ..models import KernelSetting
from ..placement import Precision
from ..settings import Count, Fraction, Natural, NonNegative, Positive, SearchChoices, Share
from .errors import FILE_NAME_RULE

Accountant = Literal["rdp", "pld"]
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$"
MAX_ROUNDS = 1_000_000
MAX_DEVICES = 10_000_000


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OpenSection(Section):
    """A section that names something and whose other keys are its settings, checked against its signature."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PublicDataConfig(Section):
    """Unlabelled examples on the server: held out from all devices, the devices' own training data (which leaks
    it), or another data set's."""

    source: Literal["holdout", "train_pool", "dataset"] = "holdout"
    """Where they come from: `"holdout"` takes them from the training set before it is split, `"train_pool"` uses the
    devices' own data (which leaks it), `"dataset"` takes another data set."""
    examples: Count = 1000
    """Number of examples."""
    dataset: str | None = None
    """Name of the other data set, for `source = "dataset"`."""


class SubsampleConfig(Section):
    """A random share of the devices keeps only part of its training examples."""

    devices: Share
    """Share of the devices, drawn at random."""
    keep: Share = 0.5
    """Share of its training examples that each of them keeps."""


class DataConfig(OpenSection):
    """The data set, and how its examples are split between devices. Other keys are options of the data set."""

    dataset: str = "fashion-mini"
    """Name of a data set."""
    devices: Annotated[int, Interval(ge=1, le=MAX_DEVICES)] = 20
    """Number of devices the training examples are split between."""
    partition: dict[str, Any] = Field(default_factory=lambda: {"kind": "iid"})
    """How examples are split between devices: the `kind` and its options."""
    preparation: str | None = None
    """How stored examples become model input; default: the data set's own."""
    max_examples: Count | None = None
    """Most training examples per device, drawn from its own; default: all."""
    test_examples: Count | None = None
    """Evaluate on the first examples of the test set only; default: all."""
    validation: Count | None = None
    """Evaluate on this many training examples instead of the test set; no device trains on them, and they are the same
    for every seed."""
    tier_label_correlation: Fraction = 0.0
    """0: tiers and labels are independent; 1: devices, and so tiers, are sorted by label."""
    public: PublicDataConfig | None = None
    """Unlabelled examples on the server, for methods that need them."""
    subsample: SubsampleConfig | None = None
    """A random share of the devices keeps only part of its training examples."""


class TaskConfig(Section):
    """What is learned. Without it the data set says so: classes by labels, numbers by targets that are numbers."""

    kind: str | None = None
    """Name of a task; default: that of the data set. One that contradicts the data set is refused."""


class FleetConfig(Section):
    """Which devices take part, and which tier each of them has."""

    participation: Share = 1.0
    """Share of devices in a round."""
    sampling: Sampling = "fixed_size"
    """`"fixed_size"`: a fixed number without replacement; `"poisson"`: each device with probability `participation`, so
    the cohort size varies and can be zero."""
    assignment: Assignment = "fixed"
    """`"fixed"`: tiers are filled in index order according to their shares; `"redrawn"`: every device draws a new tier
    each round."""
    device_tiers: tuple[str, ...] = ()
    """The tier of each device in index order, instead of shares; `fedloom deploy server` writes it after measuring the
    devices."""
    eligible: tuple[str, ...] = ()
    """Tiers that take part; devices of other tiers are left out; default: all."""
    holdout_fraction: Fraction = 0.0
    """Share of devices, drawn at random, that never train and are evaluated separately, as test `"unseen"`."""
    server_speed: Positive | None = None
    """Multiply-adds per second of the server, for `simulated_seconds`."""


class ModelConfig(OpenSection):
    """The model family, and its settings for all tiers. Other keys are settings of the family."""

    family: str = "convnet"
    """Name of a model family."""


class TierConfig(OpenSection):
    """A class of devices that run the same model; the largest tier's model is the global model.

    Other keys are settings of the model family for this tier, such as `width = 0.5`.
    """

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]
    """Name of the tier, also of its model file."""
    share: Share
    """Share of the devices; the shares of all tiers sum to 1."""
    family: str | None = None
    """A model family of its own, which ignores `[model]`; for methods that admit any models."""
    speed: Positive | None = None
    """Multiply-adds per second of a device; if all tiers have speed and bandwidth, every round has a row
    `simulated_seconds`."""
    bandwidth: Positive | None = None
    """Bytes per second of a device."""


class TrainingConfig(Section):
    """What a device does in a round."""

    epochs: Annotated[Count, SearchChoices((1, 2, 4))] = 1
    """Passes over a device's examples in a round."""
    batch_size: Count = 10
    """Examples per batch."""
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    """`"keep"` an incomplete last batch, `"drop"` it unless it is the device's only one, or `"wrap"` around."""
    shuffle: bool = True
    """Whether a device visits its examples in a new random order in every epoch; else as it has them, such as the
    windows of a text one after the other."""
    optimizer: dict[str, Any] = Field(default_factory=lambda: {"kind": "sgd"})
    """The `kind` of optimizer and its settings."""
    lr_schedule: dict[str, Any] = Field(default_factory=lambda: {"kind": "constant"})
    """The `kind` of learning rate schedule, by round, and its settings."""
    loss: dict[str, Any] | None = Field(default=None, json_schema_extra={"table": {"kind": "cross_entropy"}})
    """The `kind` of loss and its settings; default: the task's, such as cross entropy for classes and squared errors
    for numbers."""


class MethodConfig(OpenSection):
    """The method. Other keys are its settings.

    The method `mixed` has `[[method.parts]]`, each with `tiers`, a `method` and its settings, and optionally
    `align = true`, which aligns its devices' representations with the rest of the fleet.
    """

    name: str
    """Name of a method."""


class EvaluationConfig(Section):
    """What is evaluated, on which examples, and how often."""

    every: Count = 1
    """Rounds between evaluations; the last round is always evaluated."""
    dense_last: Fraction = 0.0
    """Share of the rounds, the last ones, that are all evaluated, whatever `every` is: for a "best round" as papers
    have it, which evaluate every round, at a part of the cost."""
    tests: Annotated[tuple[Literal["global", "local"], ...], Len(1)] = ("global", "local")
    """`"global"`: the whole test set; `"local"`: the devices' own test examples, with labels masked as the method
    specifies."""
    metrics: Annotated[tuple[Any, ...], Len(1)] | None = None
    """Names, or tables of a `kind` and its settings: `["accuracy", { kind = "calibration_error", bins = 10 }]`. Each is
    computed on every test, by tier and by device. Default: those of the task, such as accuracy for classes and, on the
    global test, loss; for data with a label for every token, perplexity and accuracy."""
    per_device: Literal["last", "always", "never"] = "last"
    """Rounds that have a row per device."""
    batch_size: Count = 500
    """Examples per batch; models that depend on the batch see each device's test examples separately."""
    candidates: tuple[str, ...] = ()
    """Which of the method's models to evaluate, such as `["report_paper"]`; default: all."""
    statistics: dict[str, Any] = Field(default_factory=dict)
    """How the statistics of static batch norm are collected."""
    fine_tune: dict[str, Any] | None = None
    """After the last round every device evaluates each tier's model, fine-tunes a part of it on its own data, and
    evaluates again."""


class EngineConfig(OpenSection):
    """Where the devices' work runs. Other keys are settings of an engine of your own."""

    kind: str = "in_process"
    """`"in_process"`: on this machine; `"flower-sim"`: simulated by Flower on Ray, for fleets larger than one machine;
    `"flower"`: real devices. Simulated faults need `"in_process"`."""
    devices_per_block: Count | dict[str, Count] | None = None
    """Devices of a tier that run as one network: a number, or one per tier, which `fedloom calibrate` measures; 1: one
    after the other; results differ by rounding; default: a fixed rule."""
    device: str = "cpu"
    """The torch device that devices are simulated on: `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`, `"xpu"`, or `"auto"`: the
    first that torch finds. Server state, aggregation and checkpoints stay on the CPU."""
    devices: tuple[str, ...] = ()
    """A torch device for each worker process, such as `["cuda:0", "cuda:1"]`; default: one process uses `device`."""
    precision: Precision = "float32"
    """What models compute in; weights and optimizers stay in float32. `"float16"` scales losses."""
    compile: bool = False
    """Whether models are compiled by `torch.compile`: the first round takes minutes longer, later ones less."""
    tf32: bool = False
    """Whether CUDA may round factors of float32 products to TF32."""
    deterministic: bool = False
    """Use only deterministic algorithms on an accelerator, so that a run repeats its bits on the same hardware; an
    operation that has none raises. The CPU always repeats them."""
    kernels: KernelSetting = "auto"
    """What computes the models: `"torch"`; `"lanes"`: kernels with the devices in the lanes of vectors, which need the
    extra `fast`; `"auto"`: the latter if they are installed and the model is large enough. Where they have no kernel
    for a layer, torch computes the model. Results differ by rounding."""


class CheckpointConfig(Section):
    """How often a run saves its state."""

    every: Natural | Literal["auto"] = "auto"
    """Rounds between checkpoints; `"auto"`: as often as 5 % of the run's time allows; 0: only when the run stops."""


class AdmissionConfig(Section):
    """Optional checks of replies beyond their format; off by default, since no paper has them."""

    norm: Annotated[float, Interval(ge=1)] | None = None
    """Refuse updates whose norm exceeds this multiple of the median of earlier admitted updates of the same tier and
    task; in the first round, of the replies to the same request."""
    quarantine: Count | None = None
    """Exclude a device from training after this many consecutive refused rounds; default: never."""
    max_examples: Count = 10**9
    """Refuse devices that claim more examples."""


class CompressionConfig(Section):
    """Compression of uploads and of what the server sends."""

    uplink: dict[str, Any] | None = None
    """The `kind` of compressor for uploads and its settings; every round has a row `bytes_up_compressed`."""
    downlink: dict[str, Any] | None = None
    """The same for what the server sends, except `top_k` and `low_rank`; every round has a row
    `bytes_down_compressed`."""


class AggregationConfig(OpenSection):
    """Robust aggregation, and the server's step. Other keys are settings of the rule."""

    rule: str = "none"
    """Name of a rule, applied per coverage region; `"none"`: the mean, as in the papers."""
    low_coverage: LowCoverage = "hold"
    """For weights that too few updates cover: `"hold"` keeps their value, `"clipped"` takes the mean of clipped
    updates."""
    min_contributors: Count = 3
    """Updates that a rule needs."""
    server_optimizer: dict[str, Any] | None = None
    """The `kind` of server optimizer (FedOpt) and its settings, such as `{ kind = "adam", lr = 0.01 }`; default: the
    average itself is the new model. Weights that no update covers keep their value and their moments."""


class OutageConfig(Section):
    """A tier that is offline in the rounds `from` to `to`, both included."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    tier: str
    """Name of the tier."""
    first: Count = Field(alias="from")
    """First round without the tier."""
    to: Count
    """Last round without the tier."""

    @field_validator("to")
    @classmethod
    def _check_order(cls, to: int, info: ValidationInfo) -> int:
        if to < info.data.get("first", 0):
            raise value_error("an outage cannot end before it begins")
        return to


class CorruptionConfig(Section):
    """Devices, as a number or a share, whose replies are always corrupt."""

    devices: Count | Share
    """How many devices, or which share of them."""
    how: Literal["nan", "inf", "huge", "shape", "any"] = "any"
    """What is wrong with their replies."""


class FaultsConfig(Section):
    """Simulated faults, and when a round with faults still counts."""

    dropout: Fraction = 0.0
    """Share of a round's devices whose reply is lost; they train, but their state is not updated."""
    trace: str | None = None
    """File that says which devices are available in which rounds; unavailable devices are not asked."""
    stragglers: dict[str, Any] | None = None
    """Devices slower or faster than their tier: the `kind` and its settings."""
    outages: tuple[OutageConfig, ...] = ()
    """Tiers that are offline for some rounds."""
    corrupt: CorruptionConfig | None = None
    """Devices whose replies are always corrupt."""
    deadline: Positive | None = None
    """In simulated seconds, or in real seconds if devices are asked by messages; later replies are discarded."""
    quorum: Fraction = 0.0
    """Required share of replies; with fewer, or with none, a round changes nothing."""
    min_coverage: Count = 1
    """Updates that must cover a weight; with fewer it keeps its value."""
    over_selection: NonNegative = 0.0
    """Ask this share of additional devices, and use the first replies by `simulated_seconds`."""
    max_failed_rounds: Count = 5
    """Consecutive failed rounds after which the run ends with exit code 3."""


class PrivacyConfig(Section):
    """Consent that a deployment needs, and device-level differential privacy: updates are clipped to the norm `clip`,
    and Gaussian noise with standard deviation `noise * clip` is added to their sum."""

    acknowledge_feature_sharing: bool = False
    """Required to deploy methods that upload features; `fedloom audit` measures what features reveal."""
    clip: Positive | None = None
    """Norm to which every device's update is clipped."""
    noise: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = None
    """Standard deviation of the noise, as a multiple of `clip`; with both, every round has a row `epsilon`."""
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5
    """The delta of (epsilon, delta)."""
    target_epsilon: Positive | None = None
    """Refuse a recipe whose rounds would exceed it."""
    accountant: Accountant = "rdp"
    """`"pld"` is tighter by about a tenth, and takes up to a second per round."""

    @field_validator("noise", "target_epsilon")
    @classmethod
    def _check_clip_is_set(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("clip", 1.0) is None:  # an invalid clip is missing from the data
            raise value_error(f"{info.field_name} needs privacy.clip: without it there is no differential privacy")
        return value

    @field_validator("accountant")
    @classmethod
    def _check_accountant(cls, value: Accountant, info: ValidationInfo) -> Accountant:
        if value == "pld" and (info.data.get("noise") or 1.0) < 0.3:
            raise value_error("pld takes gigabytes of memory below privacy.noise = 0.3; use rdp, or more noise")
        return value


class StartConfig(Section):
    """A model to start from: a run folder or a safetensors file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    source: str | None = Field(default=None, alias="from")
    """A run's folder, or a safetensors file of the global model."""


def _check_override(override: str) -> str:
    if not re.match(r"[^=]*[^=\s][^=]*=", override):
        raise value_error(f"{override!r} is not of the form key=value; write it as for --set, e.g. training.epochs=2")
    return override


Override = Annotated[str, AfterValidator(_check_override)]


class CompareConfig(Section):
    """What `fedloom compare` compares the recipe with; runs ignore it.

    At equal rounds an arm counts up to the recipe's last round; for `--equal bytes` it may have other `rounds` and
    `evaluation.every`. With arms, controls run only if `--controls` names them.
    """

    arms: dict[str, Annotated[tuple[Override, ...], Len(1)]] = Field(default_factory=dict)
    """Names, each with overrides as for `--set`; an arm keeps the seed, data, evaluation and tier names."""
    control_changes: tuple[Override, ...] = ()
    """Overrides for all controls, for a method with a net of its own: the net that suits the simple alternatives."""
    rounds_by: Literal["recipe", "bytes"] = "recipe"
    """How many rounds arms and controls have: those of their recipes; or `"bytes"`, as many as the first arm's bytes
    pay for, with learning-rate schedules stretched alike. They are then compared at equal bytes."""
    candidate: str | None = None
    """Which of the evaluated models counts, such as `"report_paper"`; default: the method's first."""
    metric: str | None = None
    """The metric that verdicts and tables are about, as its rows name it; default: the task's, such as accuracy for
    classes, perplexity for text and rmse for numbers."""
    baseline: str | None = None
    """The arm whose final value (median over seeds, minus `margin` points) is the target of rounds-to-target."""
    margin: NonNegative = 1.0
    """Points that are subtracted from the baseline's final value."""

    @field_validator("arms")
    @classmethod
    def _check_arm_names(cls, arms: dict[str, Any]) -> dict[str, Any]:
        for name in arms:
            if not re.fullmatch(FILE_NAME, name):
                raise value_error(f"the name {name!r} {FILE_NAME_RULE}")
        return arms

    @field_validator("baseline")
    @classmethod
    def _check_baseline(cls, baseline: str | None, info: ValidationInfo) -> str | None:
        arms = info.data.get("arms", {baseline: ()})  # invalid arms are missing from the data
        if baseline is not None and baseline not in arms:
            raise value_error(f"there is no arm of that name; there are: {', '.join(arms) or 'none'}")
        return baseline


def _check_search(text: str) -> str:
    if not re.fullmatch(r"\s*[^=\s]+\s*(=\s*\S.*)?", text):
        raise value_error(f"{text!r} is not of the form key, key=low..high, key=low..high:log or key=value,value")
    return text


SearchedKey = Annotated[str, AfterValidator(_check_search)]


class TuneConfig(Section):
    """What `fedloom tune` searches, and how; runs ignore it."""

    search: tuple[SearchedKey, ...] = ()
    """Keys to search, as declared (`"training.optimizer.lr"`), with a range (`"training.optimizer.lr=0.01..1:log"`)
    or with values (`"training.epochs=1,2,4"`); default: all that the method and the optimizer declare."""
    halving: Count = 3
    """One of so many trials goes on to the next stage, which ends after so many times the rounds; 1: all trials run all
    rounds."""
    seeds: Count = 1
    """Number of seeds of a trial, counted from the recipe's; its score is their mean."""


def value_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{message}", {"message": message})


class Recipe(Section):
    """One run: everything that determines its result."""

    seed: Natural = 0
    """Seed of every random draw of the run."""
    rounds: Annotated[int, Interval(ge=1, le=MAX_ROUNDS)]
    """Number of rounds."""
    data: DataConfig = Field(default_factory=DataConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tiers: Annotated[tuple[TierConfig, ...], Len(1)]
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    method: MethodConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    start: StartConfig = Field(default_factory=StartConfig)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    compression: CompressionConfig = Field(default_factory=CompressionConfig)
    compare: CompareConfig = Field(default_factory=CompareConfig)
    tune: TuneConfig = Field(default_factory=TuneConfig)

    @field_validator("admission")
    @classmethod
    def _check_dp_admission(cls, admission: AdmissionConfig, info: ValidationInfo) -> AdmissionConfig:
        privacy = info.data.get("privacy")
        if admission.norm is not None and privacy is not None and privacy.clip is not None:
            raise value_error("admission.norm compares clients with each other, which voids the DP guarantee; unset it")
        return admission

    @field_validator("compare")
    @classmethod
    def _check_arm_is_not_method(cls, compare: CompareConfig, info: ValidationInfo) -> CompareConfig:
        method = info.data.get("method")
        if method is not None and method.name in compare.arms:
            raise value_error(
                f"an arm cannot be named {method.name!r}: the recipe itself is the arm of that name, after its method; "
                f"name this one by what it changes, such as {method.name + '-2'!r}, or leave it out"
            )
        return compare

    def document(self) -> dict[str, Any]:
        """The recipe with all defaults, as it is stored with a run; without what no run depends on."""
        return self.model_dump(mode="python", by_alias=True, exclude_none=True, exclude={"compare", "tune"})
