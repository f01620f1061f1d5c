"""The schema of a recipe: everything that determines a run's result. Frozen; unknown keys are errors."""

import re
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..fleet import Assignment, Sampling
from ..footprints import LowCoverage
from ..settings import Count, Fraction, Natural, NonNegative, Positive, Share
from .errors import FILE_NAME_RULE

Accountant = Literal["rdp", "pld"]
FILE_NAME = r"^\w[\w.+-]*$"


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
    examples: Count = 1000
    dataset: str | None = None


class SubsampleConfig(Section):
    """A random share of the devices keeps only part of its training examples."""

    devices: Share
    keep: Share = 0.5


class DataConfig(OpenSection):
    """Other keys are options of the data set's reader."""

    dataset: str = "fashion-mini"
    devices: Count = 20
    partition: dict[str, Any] = Field(default_factory=lambda: {"kind": "iid"})
    preparation: str | None = None
    max_examples: Count | None = None
    test_examples: Count | None = None
    validation: Count | None = None  # training examples to evaluate on instead of the test set
    tier_label_correlation: Fraction = 0.0
    public: PublicDataConfig | None = None
    subsample: SubsampleConfig | None = None


class FleetConfig(Section):
    participation: Share = 1.0
    sampling: Sampling = "fixed_size"
    assignment: Assignment = "fixed"
    device_tiers: tuple[str, ...] = ()  # the tier of each device, instead of shares
    eligible: tuple[str, ...] = ()
    holdout_fraction: Fraction = 0.0  # of devices that are evaluated but never train
    server_speed: Positive | None = None  # multiply-adds per second


class ModelConfig(OpenSection):
    """Other keys are settings of the family."""

    family: str = "convnet"


class TierConfig(OpenSection):
    """Other keys are settings of the model family for this tier. A tier with its own family ignores `model`."""

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]  # also names a file
    share: Share
    family: str | None = None
    speed: Positive | None = None  # multiply-adds per second
    bandwidth: Positive | None = None  # bytes per second


class TrainingConfig(Section):
    epochs: Count = 1
    batch_size: Count = 10
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    optimizer: dict[str, Any] = Field(default_factory=lambda: {"kind": "sgd"})
    lr_schedule: dict[str, Any] = Field(default_factory=lambda: {"kind": "constant"})
    label_smoothing: Fraction = 0.0


class MethodConfig(OpenSection):
    """Other keys are the method's hyper-parameters."""

    name: str


class EvaluationConfig(Section):
    every: Count = 1
    tests: Annotated[tuple[Literal["global", "local"], ...], Len(1)] = ("global", "local")
    per_device: Literal["last", "always", "never"] = "last"
    batch_size: Count = 500
    candidates: tuple[str, ...] = ()
    statistics: dict[str, Any] = Field(default_factory=dict)
    fine_tune: dict[str, Any] | None = None


class EngineConfig(Section):
    kind: Literal["in_process", "flower-sim", "flower"] = "in_process"
    devices_per_block: Count | dict[str, Count] | None = None  # one number, or one per tier


class CheckpointConfig(Section):
    """Rounds between checkpoints. "auto": as often as 5 % of the run's time allows; 0: only when the run stops."""

    every: Natural | Literal["auto"] = "auto"


class AdmissionConfig(Section):
    """Optional checks of replies beyond their format; off by default, since no paper has them."""

    norm: Annotated[float, Interval(ge=1)] | None = (
        None  # largest update norm, relative to the median of comparable updates
    )
    quarantine: Count | None = None  # consecutive refused rounds
    max_examples: Count = 10**9  # that a device may claim


class CompressionConfig(Section):
    """Compression of uploads and of what the server sends."""

    uplink: dict[str, Any] | None = None
    downlink: dict[str, Any] | None = None


class AggregationConfig(OpenSection):
    """Robust aggregation. Other keys are settings of the rule."""

    rule: str = "none"
    low_coverage: LowCoverage = "hold"  # for weights that too few updates cover
    min_contributors: Count = 3


class OutageConfig(Section):
    """A tier that is offline in the rounds `from` to `to`, both included."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    tier: str
    first: Count = Field(alias="from")
    to: Count

    @field_validator("to")
    @classmethod
    def _check_order(cls, to: int, info: ValidationInfo) -> int:
        if to < info.data.get("first", 0):
            raise value_error("an outage cannot end before it begins")
        return to


class CorruptionConfig(Section):
    """Devices, as a number or a share, whose replies are always corrupt."""

    devices: Count | Share
    how: Literal["nan", "inf", "huge", "shape", "any"] = "any"


class FaultsConfig(Section):
    """Simulated faults, and when a round with faults still counts."""

    dropout: Fraction = 0.0
    trace: str | None = None
    stragglers: dict[str, Any] | None = None
    outages: tuple[OutageConfig, ...] = ()
    corrupt: CorruptionConfig | None = None
    deadline: Positive | None = None  # simulated seconds
    quorum: Fraction = 0.0
    min_coverage: Count = 1
    over_selection: NonNegative = 0.0
    max_failed_rounds: Count = 5


class PrivacyConfig(Section):
    """Consent that a deployment needs, and device-level differential privacy: updates are clipped to the norm `clip`,
    and Gaussian noise with standard deviation `noise * clip` is added to their sum."""

    acknowledge_feature_sharing: bool = False
    clip: Positive | None = None
    noise: Positive | None = None
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5
    target_epsilon: Positive | None = None
    accountant: Accountant = "rdp"

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


def _check_override(override: str) -> str:
    if not re.match(r"[^=]*[^=\s][^=]*=", override):
        raise value_error(f"{override!r} is not of the form key=value; write it as for --set, e.g. training.epochs=2")
    return override


Override = Annotated[str, AfterValidator(_check_override)]


class CompareConfig(Section):
    """What `fedloom compare` compares the recipe with; runs ignore it."""

    arms: dict[str, Annotated[tuple[Override, ...], Len(1)]] = Field(default_factory=dict)
    candidate: str | None = None
    baseline: str | None = None
    margin: NonNegative = 1.0

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


def value_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{message}", {"message": message})


class Recipe(Section):
    seed: Natural = 0
    rounds: Count
    data: DataConfig = Field(default_factory=DataConfig)
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
                f"an arm cannot be named {method.name!r}: the recipe itself has that name, from its method"
            )
        return compare

    def document(self) -> dict[str, Any]:
        """The recipe with all defaults, as it is stored with a run; `compare` is left out, as no run depends on it."""
        return self.model_dump(mode="python", by_alias=True, exclude_none=True, exclude={"compare"})
