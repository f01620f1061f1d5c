"""Model cards: the first sentence and the large numbers follow what was measured."""

from typing import Any

from fedloom.exporting.card import as_html, as_markdown, summarize_card


def card(**changes: Any) -> dict[str, Any]:
    return {
        "name": "convnet of tier <small>", "file": "model.onnx", "format": "onnx", "bytes": 12_040, "sha256": "ab",
        "family": "convnet", "settings": {"hidden": [4]}, "parameters": 3010, "trained_parameters": 3010,
        "macs": 142_560, "uncounted_operations": [], "warnings": ["It depends on the batch."],
        "input": {"name": "input", "dtype": "uint8", "shape": [1, 8, 8], "meaning": "Pixels."},
        "output": {"name": "logits", "shape": [10], "labels": []},
        "evaluated": {"round": 3, "tests": {"global": {"accuracy": 81.0}}},
        "measured": {"global": {"accuracy": 83.2}},
        "training": {
            "method": "heterofl", "paper": "", "uploads": "weights", "dataset": "digits", "data_sha256": "ab" * 20,
            "devices": 4, "rounds": 3, "seed": 0, "fedloom": "0", "torch": "2",
        },
        "license": {"data": "CC0", "code": "Apache-2.0", "weights": "yours"},
        "parity": {"difference": 1e-7, "examples": 4, "largest_logit": 3.0},
        "latency": {"median_ms": 0.5, "runs": 100, "runtime": "onnxruntime", "machine": "x86_64"},
        **changes,
    }  # fmt: skip


def test_summarize_card_states_value_and_cost_or_that_there_is_none() -> None:
    assert summarize_card(card()) == (
        "convnet of tier <small>: accuracy 83.2 % on the global test, 143 k multiply-adds and 12 kB."
    )
    assert "accuracy 81 % on the global test" in summarize_card(card(measured={"global": {"accuracy": None}}))
    nothing = card(measured={}, evaluated={"round": 3, "tests": {}})
    assert summarize_card(nothing) == "convnet of tier <small>: not evaluated; 143 k multiply-adds and 12 kB."


def test_card_of_personal_model_leads_with_its_own_test() -> None:
    own = {"local": {"accuracy": 95.0}, "global": {"accuracy": 40.0}}
    assert "accuracy 95 % on the local test" in summarize_card(card(measured=own))
    html = as_html(card(measured=own))
    assert html.index("Accuracy, local test") < html.index("Multiply-adds")


def test_card_page_is_self_contained_and_says_whose_values_it_shows() -> None:
    html = as_html(card())
    assert html.count('class="tile"') == 5 and "of this file</span>" in html
    assert "convnet of tier &lt;small&gt;" in html and "<small>" not in html
    assert "http://" not in html and "https://" not in html
    assert "It depends on the batch." in html and "`" not in html.partition("</style>")[2]
    assert "of the run</span>" in as_html(card(measured={}))


def test_card_markdown_has_the_sentence_first() -> None:
    lines = as_markdown(card()).splitlines()
    assert lines[0] == "# convnet of tier <small>" and lines[2] == summarize_card(card())
