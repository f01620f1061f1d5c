"""fedloom cka: two finished runs, layer by layer."""

import pytest


@pytest.fixture(scope="module")
def made(fedloom_in):
    call, write, _ = fedloom_in
    write()
    for seed in (1, 2):
        assert call("run", "my.toml", "--seed", seed, "--out", f"run{seed}", "--quiet").code == 0
    return call


def test_cka_model_with_itself_is_one(made):
    result = made("cka", "run1", "run1", "--format", "json").data
    assert result["rows"] == result["columns"] == ["features", "logits"]
    assert [result["cka"][at][at] for at in (0, 1)] == [pytest.approx(1)] * 2


def test_cka_two_models_is_below_one(made):
    result = made("cka", "run1", "run2", "--tier", "small", "--examples", "100", "--format", "json").data
    assert 0 <= result["cka"][0][0] < 1
    text = " ".join(made("cka", "run1", "run2").out.split())
    assert text.startswith("layer features logits features 0.")
    said = "Linear CKA of the layers of run1, tier large (rows) with those of run2, tier large (columns) on 360 test "
    assert said in text


def test_cka_of_perceptron_compares_more_than_one_layer(fedloom, write):
    write(("rounds = 2", "rounds = 1"), ('"convnet"\nhidden = [2, 4]', '"mlp"\nhidden = [4, 4]'))
    assert fedloom("run", "my.toml", "--out", "run", "--quiet").code == 0
    result = fedloom("cka", "run", "run", "--format", "json").data
    assert len(result["rows"]) == len(result["columns"]) > 1


def test_cka_missing_run_or_tier_is_refused(made):
    assert made("cka", "run1", "nowhere").code == 4
    result = made("cka", "run1", "run2", "--tier", "smal")
    assert result.code == 4
    assert "small" in result.err
