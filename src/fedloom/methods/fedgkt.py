"""FedGKT. He, Annavaram & Avestimehr, Group Knowledge Transfer, NeurIPS 2020, Algorithm 1.

A device trains a small net and sends the features, logits and labels of its examples. The server trains a large net on
them and sends back its own logits. Each learns from the labels and from the other's answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..fleet import Candidate, Carried, DeviceModel, Fleet, Turn
from ..models import MODELS, Model, cost, model
from ..seeds import SERVER_ORDER, TEACH
from ..settings import Count, FixedTable, NotNegative, Positive
from ..tensors import Parcel, Tensors
from ..training import Adam, Batch, Client, Outcome, Schedule, cross_entropy, fit, like, on_device
from . import lesson
from .own import OwnModels
from .pairs import feature_shape, parts_problem


@dataclass(frozen=True)
class FedGKT(OwnModels):
    """`weight` is the paper's alpha: of the answers where devices learn, of the labels where the server does."""

    paper = "He, Annavaram & Avestimehr, NeurIPS 2020"
    leaves = "features (near-raw: see fedloom audit), logits and labels of all its examples"
    keeps, gives, admits, ships = "its small net", "personalised", "any models", "extractor"
    sample = FixedTable(server_epochs=2, server_planes=(8, 16), server_blocks=(1, 1))

    temperature: Positive = 3.0
    weight: NotNegative = 1.0
    server_epochs: Count = 20
    server_batch: Count = 64
    server_rate: Positive = 0.001
    server_planes: tuple[Count, ...] = (16, 32, 64)
    server_blocks: tuple[Count, ...] = (6, 6, 6)

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {"weights": self.large(fleet.whole).initial(seed), "answers": lesson.no_answers(fleet)}

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        replies = turn.ask(self.train, {device: lesson.teacher_of(server, device) for device in turn.cohort})
        for taught in turn.compute(self.teach, lesson.gathered(server["weights"], replies, turn.draw(SERVER_ORDER))):
            server = {**taught.sent, "answers": lesson.dealt_back(server["answers"], taught, replies)}
        return server

    @on_device(sends={"lesson": lesson.lesson_layout}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> Outcome:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            logits = client.model(weights, batch.x, batch.draws).logits
            if "teacher" not in inbox:
                return cross_entropy(logits, batch)
            teacher = inbox["teacher"]["logits"].take_along_dim(batch.own_rows.unsqueeze(-1), 1)
            return cross_entropy(logits, batch) + self.weight * lesson.distillation(logits, teacher, self.temperature)

        weights = fit(client, client.memory["weights"], loss)
        return Outcome(send={"lesson": lesson.lesson_of(client, weights)}, remember={"weights": weights})

    @on_device(sends={"weights": like("weights"), "answers": lesson.answer_layout}, stream=TEACH, mixes=False)
    def teach(self, client: Client, inbox: Parcel) -> Outcome:
        """What the server does, as a client that has what the devices sent."""
        optimiser, schedule = Adam(self.server_rate, weight_decay=1e-4), Schedule(self.server_batch, self.server_epochs)
        server, logits = lesson.received(self.large(client.model), optimiser, schedule, inbox)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            made = server.model(weights, batch.x, batch.draws).logits
            answers = lesson.distillation(made, logits[batch.own_rows], self.temperature)
            return answers + self.weight * cross_entropy(made, batch)

        weights = fit(server, inbox["weights"], loss)
        return Outcome(send={"weights": weights, "answers": lesson.answers_of(server, weights)})

    def large(self, small: Model) -> Model:
        size = {"stem": None, "planes": self.server_planes, "blocks": self.server_blocks}
        return model("bottleneck", MODELS["bottleneck"], size, feature_shape(small), small.classes)

    def server_work(self, model: Model, examples: int) -> float:
        return (3.0 * self.server_epochs + 1) * cost(self.large(model)).macs * examples

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        whole = DeviceModel(self.with_server, lambda device: {"weights": server["weights"]})
        return {"clients": DeviceModel(self.own), "server": whole}

    def with_server(self, client: Client, inbox: Parcel) -> Carried:
        return lesson.extended(client, self.large(client.model), inbox["weights"])

    def objection(self, fleet: Fleet) -> str | None:
        return parts_problem("fedgkt", fleet, ("extractor",)) or lesson.map_problem(fleet) or super().objection(fleet)
