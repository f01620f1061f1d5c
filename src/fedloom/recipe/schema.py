"""A recipe: everything that decides a run's result, as one frozen value. Unknown keys are refused."""

import re
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..fleet import Assignment, Sampling
from ..footprints import Thin
from ..settings import Count, Fraction, Natural, NotNegative, Positive, Share

Accountant = Literal["rdp", "pld"]
FILE_NAME = r"^\w[\w.+-]*$"


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OpenPart(Part):
    """A part whose other keys are settings of what it names; they are checked against that thing's own signature."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Public(Part):
    """Examples without labels that the server has: some that no device gets; or, which leaks them to everybody, the
    devices' own; or another data set's."""

    source: Literal["holdout", "train_pool", "dataset"] = "holdout"
    examples: Count = 1000
    dataset: str | None = None


class Subsample(Part):
    """A random share of the devices keeps only a share of its training examples."""

    devices: Share
    keep: Share = 0.5


class Data(OpenPart):
    """Other keys are options of the data set's reader."""

    dataset: str = "fashion-mini"
    devices: Count = 20
    partition: dict[str, Any] = Field(default_factory=lambda: {"kind": "iid"})
    preparation: str | None = None
    max_examples: Count | None = None
    test_examples: Count | None = None
    validation: Count | None = None  # training examples that are judged on in place of the test set
    tier_label_correlation: Fraction = 0.0
    public: Public | None = None
    subsample: Subsample | None = None


class FleetPart(Part):
    participation: Share = 1.0
    sampling: Sampling = "fixed_size"
    assignment: Assignment = "fixed"
    device_tiers: tuple[str, ...] = ()  # the tier of every device, in place of shares
    eligible: tuple[str, ...] = ()
    holdout_fraction: Fraction = 0.0  # a share of the devices that is judged but never trains
    server_speed: Positive | None = None  # multiply-adds a second


class ModelPart(OpenPart):
    """Other keys are settings of the family."""

    family: str = "convnet"


class TierPart(OpenPart):
    """Other keys are settings of the model family, for this tier. With a family of its own it takes none from
    `model`."""

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]  # it names a file too
    share: Share
    family: str | None = None
    speed: Positive | None = None  # multiply-adds a second
    bandwidth: Positive | None = None  # bytes a second


class Training(Part):
    epochs: Count = 1
    batch_size: Count = 10
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    optimizer: dict[str, Any] = Field(default_factory=lambda: {"kind": "sgd"})
    lr_schedule: dict[str, Any] = Field(default_factory=lambda: {"kind": "constant"})
    label_smoothing: Fraction = 0.0


class MethodPart(OpenPart):
    """Other keys are the method's hyper-parameters."""

    name: str


class Evaluation(Part):
    every: Count = 1
    tests: Annotated[tuple[Literal["global", "local"], ...], Len(1)] = ("global", "local")
    per_device: Literal["last", "always", "never"] = "last"
    batch_size: Count = 500
    candidates: tuple[str, ...] = ()
    statistics: dict[str, Any] = Field(default_factory=dict)
    fine_tune: dict[str, Any] | None = None


class EnginePart(Part):
    kind: Literal["in_process", "flower-sim", "flower"] = "in_process"
    devices_per_block: Count | dict[str, Count] | None = None  # that run as one network: all tiers, or tier by tier


class CheckpointPart(Part):
    """How often a run is saved: after every so many rounds; "auto", as often as a twentieth of its time allows; 0, only
    when it is interrupted or ends."""

    every: Natural | Literal["auto"] = "auto"


class AdmissionPart(Part):
    """What the gate between devices and a method minds beside form: off unless said, for no paper has it."""

    norm: Annotated[float, Interval(ge=1)] | None = None  # times the median of their like, for updates
    quarantine: Count | None = None  # rounds in a row
    max_examples: Count = 10**9  # that a device may say it holds


class CompressionPart(Part):
    """How parcels travel in fewer bytes: up from the devices, and down to them."""

    uplink: dict[str, Any] | None = None
    downlink: dict[str, Any] | None = None


class AggregationPart(OpenPart):
    """How replies are merged when some may be bad. Other keys are settings of the rule."""

    rule: str = "none"
    low_coverage: Thin = "hold"  # what becomes of entries with too few votes for the rule
    min_contributors: Count = 3  # votes


class Outage(Part):
    """A tier that cannot be reached from one round to another, both counted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    tier: str
    first: Count = Field(alias="from")
    to: Count

    @field_validator("to")
    @classmethod
    def _ends_after_it_begins(cls, to: int, about: ValidationInfo) -> int:
        if to < about.data.get("first", 0):
            raise wrong("a window cannot end before it begins")
        return to


class Corrupt(Part):
    """Devices, so many or a share of all, whose replies are always broken."""

    devices: Count | Share
    how: Literal["nan", "inf", "huge", "shape", "any"] = "any"


class FaultsPart(Part):
    """What goes wrong in a round, and how much of that it takes."""

    dropout: Fraction = 0.0
    trace: str | None = None
    stragglers: dict[str, Any] | None = None
    outages: tuple[Outage, ...] = ()
    corrupt: Corrupt | None = None
    deadline: Positive | None = None  # seconds on the fleet's own devices
    quorum: Fraction = 0.0
    min_coverage: Count = 1
    over_selection: NotNegative = 0.0
    max_failed_rounds: Count = 5


class Privacy(Part):
    """What whoever deploys a recipe has to say yes to; and, with `clip` and `noise`, how every single device is hidden:
    updates no longer than `clip`, and Gaussian noise of `noise` times that on their sum."""

    acknowledge_feature_sharing: bool = False
    clip: Positive | None = None
    noise: Positive | None = None
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5
    target_epsilon: Positive | None = None
    accountant: Accountant = "rdp"

    @field_validator("noise", "target_epsilon")
    @classmethod
    def _only_with_the_rest(cls, value: float | None, about: ValidationInfo) -> float | None:
        if value is not None and about.data.get("clip", 1.0) is None:  # a clip that is wrong itself has been told of
            raise wrong(f"without privacy.clip there is no differential privacy for {about.field_name} to be part of")
        return value

    @field_validator("accountant")
    @classmethod
    def _can_count_so(cls, value: Accountant, about: ValidationInfo) -> Accountant:
        if value == "pld" and (about.data.get("noise") or 1.0) < 0.3:
            raise wrong("pld takes gigabytes where there is so little noise; use rdp, or privacy.noise from 0.3 on")
        return value


class Start(Part):
    """An earlier model to go on from: a run folder or a safetensors file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    source: str | None = Field(default=None, alias="from")


def _assignment(said: str) -> str:
    if not re.match(r"[^=]*[^=\s][^=]*=", said):
        raise wrong(f"{said!r} is not of the form key=value; write it as for --set, e.g. training.epochs=2")
    return said


Change = Annotated[str, AfterValidator(_assignment)]


class Compare(Part):
    """What `fedloom compare` puts beside the recipe; a run takes no notice of it."""

    arms: dict[str, Annotated[tuple[Change, ...], Len(1)]] = Field(default_factory=dict)
    candidate: str | None = None
    baseline: str | None = None
    margin: NotNegative = 1.0

    @field_validator("arms")
    @classmethod
    def _arms_name_folders(cls, arms: dict[str, Any]) -> dict[str, Any]:
        for name in arms:
            if not re.fullmatch(FILE_NAME, name):
                raise wrong(f"the name {name!r} must be of letters, digits and . _ + -, and open with one of them")
        return arms

    @field_validator("baseline")
    @classmethod
    def _baseline_is_an_arm(cls, baseline: str | None, about: ValidationInfo) -> str | None:
        arms = about.data.get("arms", {baseline: ()})  # arms that are wrong themselves have been told of
        if baseline is not None and baseline not in arms:
            raise wrong(f"there is no arm of that name; there are: {', '.join(arms) or 'none'}")
        return baseline


def wrong(said: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{said}", {"said": said})


class Recipe(Part):
    seed: Natural = 0
    rounds: Count
    data: Data = Field(default_factory=Data)
    fleet: FleetPart = Field(default_factory=FleetPart)
    model: ModelPart = Field(default_factory=ModelPart)
    tiers: Annotated[tuple[TierPart, ...], Len(1)]
    training: Training = Field(default_factory=Training)
    method: MethodPart
    evaluation: Evaluation = Field(default_factory=Evaluation)
    engine: EnginePart = Field(default_factory=EnginePart)
    faults: FaultsPart = Field(default_factory=FaultsPart)
    start: Start = Field(default_factory=Start)
    checkpoints: CheckpointPart = Field(default_factory=CheckpointPart)
    aggregation: AggregationPart = Field(default_factory=AggregationPart)
    privacy: Privacy = Field(default_factory=Privacy)
    admission: AdmissionPart = Field(default_factory=AdmissionPart)
    compression: CompressionPart = Field(default_factory=CompressionPart)
    compare: Compare = Field(default_factory=Compare)

    @field_validator("admission")
    @classmethod
    def _nobody_decides_about_others(cls, admission: AdmissionPart, about: ValidationInfo) -> AdmissionPart:
        privacy = about.data.get("privacy")
        if admission.norm is not None and privacy is not None and privacy.clip is not None:
            raise wrong("with differential privacy no device may decide whether another is heard; unset admission.norm")
        return admission

    @field_validator("compare")
    @classmethod
    def _no_arm_has_the_recipes_name(cls, compare: Compare, about: ValidationInfo) -> Compare:
        method = about.data.get("method")
        if method is not None and method.name in compare.arms:
            raise wrong(f"an arm cannot be named {method.name!r}: the recipe itself has that name, from its method")
        return compare

    def document(self) -> dict[str, Any]:
        """The recipe with every default spelled out, as it is written beside a run: what decides that run alone."""
        return self.model_dump(mode="python", by_alias=True, exclude_none=True, exclude={"compare"})
