"""A model card: what the file is, how good and how dear, where it comes from, how to use it. JSON for programs and the
same as Markdown for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .formats import FORMATS

SCHEMA_VERSION = 1

LOADING = {
    "onnx": """import numpy, onnxruntime

session = onnxruntime.InferenceSession("{file}")
examples = numpy.zeros({shape}, numpy.{dtype})
logits = session.run(None, {{"input": examples}})[0]""",
    "pt2": """import torch

net = torch.export.load("{file}").module()
examples = torch.zeros({shape}, dtype=torch.{dtype})
logits = net(examples)""",
    "safetensors": """import torch, fedloom

net = fedloom.load(".")
examples = torch.zeros({shape}, dtype=torch.{dtype})
logits = net(examples)""",
    "executorch": """import torch
from executorch.runtime import Runtime

program = Runtime.get().load_program("{file}")
examples = torch.zeros({shape}, dtype=torch.{dtype})
logits = program.load_method("forward").execute([examples])[0]""",
}


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    said = json.dumps({"schema_version": SCHEMA_VERSION, **card}, indent=2, allow_nan=False)
    (folder / "card.json").write_text(said + "\n", encoding="utf-8")
    (folder / "card.md").write_text(as_markdown(card), encoding="utf-8")


def read_card(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    return content


def usage_snippet(card: Mapping[str, Any]) -> str:
    """A few lines of Python that run the file, beside it."""
    shape = (1, *card["input"]["shape"])
    return LOADING[card["format"]].format(file=card["file"], shape=shape, dtype=card["input"]["dtype"])


def as_markdown(card: Mapping[str, Any]) -> str:
    parts = [f"# {card['name']}", "", *_table(_figures(card)), "", "## Input and output", "", *_inputs(card)]
    parts += [
        "",
        "## Use",
        "",
        "```python",
        usage_snippet(card),
        "```",
        "",
        "## Where it comes from",
        "",
        *_origin(card),
    ]
    return "\n".join([*parts, "", "## License", "", *_licence(card)]) + "\n"


def _figures(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    parity, speed = card["parity"], card["latency"]
    rows = [(f"{test} {metric}, judged in round {card['judged']['round']}", _number(metric, value))
            for test, metrics in card["evaluated"]["tests"].items() for metric, value in metrics.items()]  # fmt: skip
    rows += [(f"{test} {metric}, of this file", _number(metric, value))
             for test, metrics in card["measured"].items() for metric, value in metrics.items()]  # fmt: skip
    return [
        *rows,
        ("parameters", f"{card['parameters']:,}"),
        ("multiply-adds for one example", f"{card['macs']:,}"),
        ("bytes of the file", f"{card['bytes']:,}"),
        (f"latency of one example, median of {speed['runs']}",
         f"{speed['median_ms']:.3f} ms, {speed['runtime']}, one thread, {speed['machine']}"),
        ("largest difference to the run's model",
         f"{parity['difference']:.1e} in {parity['examples']} examples, whose largest logit is "
         f"{parity['largest_logit']:.3g}"),
    ]  # fmt: skip


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _inputs(card: Mapping[str, Any]) -> list[str]:
    given, made = card["input"], card["output"]
    axis = "1" if FORMATS[card["format"]].one_at_a_time else "batch"
    lines = [
        f"- `{given['name']}`: {given['dtype']}, [{axis}, {', '.join(map(str, given['shape']))}]. {given['meaning']}",
        f"- `{made['name']}`: float32, [{axis}, {', '.join(map(str, made['shape']))}]. The largest names the class.",
    ]
    if made["labels"]:
        lines.append(f"- classes from 0 on: {', '.join(made['labels'])}")
    return [*lines, *(f"- {one}" for one in card["warnings"])]


def _origin(card: Mapping[str, Any]) -> list[str]:
    said = card["training"]
    paper = f" ({said['paper']})" if said["paper"] else ""
    return [
        f"- {card['family']} with {json.dumps(card['settings'])}",
        f"- trained with `{said['method']}`{paper} for {said['rounds']} rounds on {said['devices']} devices, "
        f"seed {said['seed']}; the recipe is beside this card (`recipe.toml`)",
        f"- data: `{said['dataset']}`, sha256 {said['data_sha256'][:16]}…; {said['leaves']} left the devices",
        f"- made by fedloom {said['fedloom']}, torch {said['torch']}",
    ]


def _licence(card: Mapping[str, Any]) -> list[str]:
    said = card["license"]
    return [f"The data: {said['data']}. The code that trained it: {said['code']}. The weights: {said['weights']}."]


def _number(metric: str, value: float | None) -> str:
    unit = " %" if metric.startswith("accuracy") else ""
    return "–" if value is None else f"{value:.4g}{unit}"
