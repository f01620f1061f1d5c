"""Model cards: an exported file's metrics, cost, origin and usage, as JSON, as Markdown and as a page."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..data.tasks import TaskFamily
from ..design import stylesheet
from ..evaluation.metrics import metric_info
from ..wording import format_amount, format_bytes, pluralize
from .formats import FORMATS

SCHEMA_VERSION = 1

USAGE = {
    "onnx": """import numpy, onnxruntime

session = onnxruntime.InferenceSession("{file}")
examples = numpy.zeros({shape}, numpy.{dtype})
logits = session.run(None, {{"input": examples}})[0]""",
    "pt2": """import torch

net = torch.export.load("{file}").module()
examples = torch.zeros({shape}, dtype=torch.{dtype})
logits = net(examples)""",
    "safetensors": """import torch, fedloom

net = fedloom.load_model(".")
examples = torch.zeros({shape}, dtype=torch.{dtype})
logits = net(examples)""",
    "executorch": """import torch
from executorch.runtime import Runtime

program = Runtime.get().load_program("{file}")
examples = torch.zeros({shape}, dtype=torch.{dtype})
logits = program.load_method("forward").execute([examples])[0]""",
}


OUTPUT_MEANINGS: dict[TaskFamily, str] = {
    "classification": "The largest one is the predicted class.",
    "language_modeling": "At every token, the largest one is the predicted class.",
    "segmentation": "At every pixel, the largest one along the second axis is the predicted class.",
    "multi_label": "A label is predicted where it is above 0; its sigmoid is the label's probability.",
    "regression": "The predicted numbers, in the units of the data.",
}
"""What a model's output says, by family of tasks."""


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """Write a model card as JSON, as Markdown and as a page in the style of the report.

    Parameters
    ----------
    folder : the folder of the exported file.
    card : what the card says.
    """
    text = json.dumps({"schema_version": SCHEMA_VERSION, **card}, indent=2, allow_nan=False)
    (folder / "card.json").write_text(text + "\n", encoding="utf-8")
    (folder / "card.md").write_text(as_markdown(card), encoding="utf-8")
    (folder / "card.html").write_text(as_html(card), encoding="utf-8")


def read_card(folder: Path) -> dict[str, Any]:
    """Read a model card.

    Parameters
    ----------
    folder : the folder of the exported file.
    """
    content: dict[str, Any] = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    return content


def usage_snippet(card: Mapping[str, Any]) -> str:
    """A few lines of Python that run the file from its folder.

    Parameters
    ----------
    card : the model card.
    """
    shape = (1, *card["input"]["shape"])
    return USAGE[card["format"]].format(file=card["file"], shape=shape, dtype=card["input"]["dtype"])


def as_markdown(card: Mapping[str, Any]) -> str:
    sections = {
        "Input and output": _inputs_and_outputs(card),
        "Use": ["```python", usage_snippet(card), "```"],
        "Origin": _origin(card),
        "License": _license(card),
    }
    lines = [f"# {card['name']}", "", summarize_card(card), "", *_table(_figures(card))]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *content]
    return "\n".join(lines) + "\n"


def summarize_card(card: Mapping[str, Any]) -> str:
    """What the model is and how good, in one sentence.

    Parameters
    ----------
    card : the model card.
    """
    cost = f"{format_amount(card['macs'])} multiply-adds and {format_bytes(card['bytes'])}"
    found = _headline(card)
    if found is None:
        return f"{card['name']}: not evaluated; {cost}."
    test, metric, value, _ = found
    return f"{card['name']}: {metric.replace('_', ' ')} {_number(metric, value)} on the {test} test, {cost}."


def _headline(card: Mapping[str, Any]) -> tuple[str, str, float, str] | None:
    """Test, metric and value of this file, else of the run, on the test that the model is for; and whose it is."""
    for source, tests in (("of this file", card["measured"]), ("of the run", card["evaluated"]["tests"])):
        for test, metrics in tests.items():
            for metric, value in metrics.items():
                if value is not None:
                    return test, metric, value, source
    return None


def as_html(card: Mapping[str, Any]) -> str:
    found, speed = _headline(card), card["latency"]
    tiles = []
    if found is not None:
        test, metric, value, source = found
        tiles.append((f"{metric.replace('_', ' ').capitalize()}, {test} test", _number(metric, value), source))
    tiles += [
        ("Multiply-adds", format_amount(card["macs"]), "for one example"),
        ("Parameters", format_amount(card["parameters"]), ""),
        ("File", format_bytes(card["bytes"]), card["format"]),
        ("Latency", f"{speed['median_ms']:.3g} ms", f"one example, {speed['runtime']}, one thread"),
    ]
    sections = {
        "Input and output": _without_marks(_inputs_and_outputs(card)),
        "Use": usage_snippet(card),
        "Origin": _without_marks(_origin(card)),
        "License": _license(card),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("fedloom.exporting") / "card.html").read_text(encoding="utf-8"))
    return template.render(
        card=card, summary=summarize_card(card), tiles=tiles, sections=sections, figures=_figures(card),
        css=Markup(stylesheet()),
    )  # fmt: skip


def _without_marks(lines: list[str]) -> list[str]:
    """Lines of a Markdown list as plain text."""
    return [line.removeprefix("- ").replace("`", "") for line in lines]


def _figures(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    parity, speed = card["parity"], card["latency"]
    rows = [(f"{test} {metric}, evaluated in round {card['evaluated']['round']}", _number(metric, value))
            for test, metrics in card["evaluated"]["tests"].items() for metric, value in metrics.items()]  # fmt: skip
    rows += [(f"{test} {metric}, of this file", _number(metric, value))
             for test, metrics in card["measured"].items() for metric, value in metrics.items()]  # fmt: skip
    return [
        *rows,
        ("parameters", _parameters(card)),
        ("multiply-adds for one example", _multiply_adds(card)),
        ("bytes of the file", f"{card['bytes']:,}"),
        (f"latency of one example, median of {speed['runs']}",
         f"{speed['median_ms']:.3f} ms, {speed['runtime']}, one thread, {speed['machine']}"),
        ("largest difference to the run's model",
         f"{parity['difference']:.1e} in {pluralize(parity['examples'], 'example')}, whose largest logit is "
         f"{parity['largest_logit']:.3g}"),
    ]  # fmt: skip


def _parameters(card: Mapping[str, Any]) -> str:
    total, trained = card["parameters"], card["trained_parameters"]
    return f"{total:,}" if trained == total else f"{total:,}, of which {trained:,} were trained and the others frozen"


def _multiply_adds(card: Mapping[str, Any]) -> str:
    unknown = card["uncounted_operations"]
    return f"{card['macs']:,}" + (f", and those of {', '.join(unknown)}, which are not known" if unknown else "")


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _inputs_and_outputs(card: Mapping[str, Any]) -> list[str]:
    inputs, outputs = card["input"], card["output"]
    axis = "1" if FORMATS[card["format"]].one_at_a_time else "batch"
    input_shape, output_shape = (f"[{axis}, {', '.join(map(str, tensor['shape']))}]" for tensor in (inputs, outputs))
    lines = [
        f"- `{inputs['name']}`: {inputs['dtype']}, {input_shape}. {inputs['meaning']}",
        f"- `{outputs['name']}`: float32, {output_shape}. {outputs.get('meaning', OUTPUT_MEANINGS['classification'])}",
    ]
    if outputs["labels"]:
        noun = "labels" if outputs.get("task") == "multi_label" else "classes"
        lines.append(f"- {noun} from 0 on: {', '.join(outputs['labels'])}")
    return [*lines, *(f"- {warning}" for warning in card["warnings"])]


def _origin(card: Mapping[str, Any]) -> list[str]:
    run = card["training"]
    paper = f" ({run['paper']})" if run["paper"] else ""
    return [
        f"- {card['family']} with {json.dumps(card['settings'])}",
        f"- trained with `{run['method']}`{paper} for {pluralize(run['rounds'], 'round')} on "
        f"{pluralize(run['devices'], 'device')}, seed {run['seed']}; the recipe is beside this card (`recipe.toml`)",
        f"- data: `{run['dataset']}`, sha256 {run['data_sha256'][:16]}…; {run['uploads']} left the devices",
        f"- made by fedloom {run['fedloom']}, torch {run['torch']}",
    ]


def _license(card: Mapping[str, Any]) -> list[str]:
    license = card["license"]
    return [
        f"The data: {license['data']}. The code that trained it: {license['code']}. The weights: {license['weights']}."
    ]


def _number(metric: str, value: float | None) -> str:
    unit = f" {metric_info(metric).unit}".rstrip()
    return "–" if value is None else f"{value:.4g}{unit}"
