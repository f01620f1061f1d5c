"""An experiment: everything that a recipe names, built and ready to run."""

from dataclasses import dataclass, field

from torch import Tensor

from ..data import Dataset, Partition
from ..engines import AttackTransport, ClientStates, Compression, InProcess, NormScreening, Refusal
from ..evaluation import Evaluator
from ..fleet import Engine, Fleet
from ..footprints import Aggregate, ServerOptimizer
from ..methods import Method
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..tensors import Tensors
from .faults import Faults
from .state import RunState


@dataclass(frozen=True)
class Experiment:
    loaded: LoadedRecipe
    registries: Registries  # the names that the recipe was built with
    dataset: Dataset
    partition: Partition
    fleet: Fleet
    method: Method
    engine: Engine
    simulator: InProcess  # holds the simulated devices' data; `engine` itself unless devices are elsewhere
    client_states: ClientStates
    evaluator: Evaluator
    aggregate: Aggregate
    faults: Faults
    refusals: list[tuple[int, Refusal]]  # grows as the run goes
    state: RunState = field(default_factory=RunState)  # changes as the run goes
    warm: Tensors | None = None  # weights to start from
    public: Tensor | None = None  # unlabeled examples that the server has
    compression: Compression | None = None
    screening: NormScreening | None = None
    attack: AttackTransport | None = None
    deployed: bool = False  # real devices, with data of their own
    headline_test: str = "global"  # the test that counts first
    server_optimizer: ServerOptimizer | None = None
