"""A recipe: everything that decides a run's result, as one frozen value. Unknown keys are refused."""

from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ..fleet import Assignment
from ..settings import Count, Fraction, Natural, Share


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OpenPart(Part):
    """A part whose other keys are settings of what it names; they are checked against that thing's own signature."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(OpenPart):
    """Other keys are options of the data set's reader."""

    dataset: str = "fashion-mini"
    devices: Count = 20
    partition: dict[str, Any] = Field(default_factory=lambda: {"kind": "iid"})
    preparation: str | None = None
    tier_label_tie: Fraction = 0.0


class FleetPart(Part):
    participation: Share = 1.0
    assignment: Assignment = "fixed"
    eligible: tuple[str, ...] = ()


class ModelPart(OpenPart):
    """Other keys are settings of the family."""

    family: str = "convnet"


class TierPart(OpenPart):
    """Other keys are settings of the model family, for this tier."""

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.+-]*$")]  # it names a file too
    share: Share


class Training(Part):
    epochs: Count = 1
    batch_size: Count = 10
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    optimiser: dict[str, Any] = Field(default_factory=lambda: {"kind": "sgd"})
    rates: dict[str, Any] = Field(default_factory=lambda: {"kind": "constant"})
    label_smoothing: Fraction = 0.0


class MethodPart(OpenPart):
    """Other keys are the method's hyper-parameters."""

    name: str


class Evaluation(Part):
    every: Count = 1
    tests: Annotated[tuple[Literal["global", "local"], ...], Len(1)] = ("global", "local")
    per_device: Literal["last", "always", "never"] = "last"
    batch_size: Count = 500
    statistics: dict[str, Any] = Field(default_factory=dict)


class EnginePart(Part):
    kind: Literal["in_process"] = "in_process"
    block: Count | None = None  # devices of a tier that run at once; 1: device by device; not set: by a rule
    blocks: dict[str, Count] = Field(default_factory=dict)  # the same, tier by tier


class Start(Part):
    """An earlier model to go on from: a run folder or a safetensors file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    source: str | None = Field(default=None, alias="from")


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
    start: Start = Field(default_factory=Start)

    def document(self) -> dict[str, Any]:
        """The recipe with every default spelled out, as it is written beside a run."""
        return self.model_dump(mode="python", by_alias=True, exclude_none=True)
