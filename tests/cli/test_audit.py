"""fedloom audit: what left the devices, and how well inputs can be reconstructed from it."""

import pytest

pytestmark = pytest.mark.slow

SPLIT = [
    word
    for change in (
        "method={name='fedin', pairs=8}",
        "model={family='splitnet', channels=4}",
        "tiers=[{name='large', share=0.5, extra=[1, 1]}, {name='small', share=0.5, extra=[0, 1]}]",
    )
    for word in ("--set", change)
]


@pytest.fixture(scope="module")
def made(fedloom_in):
    call, write, _ = fedloom_in
    write()
    assert call("run", "my.toml", "--out", "sliced", "--quiet").code == 0
    assert call("run", "my.toml", *SPLIT, "--out", "split", "--quiet").code == 0
    wide = [*SPLIT, "--set", "model.channels=32", "--set", "rounds=1", "--set", "engine.kernels=torch"]
    assert call("run", "my.toml", *wide, "--out", "wide", "--quiet").code == 0
    return call


def test_audit_method_without_features_shows_uploads(made):
    result = made("audit", "sliced")
    assert result.code == 0
    assert "weights of the device's slice" in result.out
    assert "none leave the devices" in result.out
    assert made("audit", "sliced", "--format", "json").data["inversion"] is None


def test_audit_shared_features_reconstructs_inputs(made):
    found = made("audit", "split", "--examples", "6", "--steps", "90", "--format", "json").data
    assert (found["method"], found["shared_features"], found["acknowledged"]) == ("fedin", "extractor", False)
    assert (found["inversion"]["examples"], found["inversion"]["steps"]) == (6, 90)
    result = made("audit", "split", "--examples", "6", "--steps", "90").out
    assert f"{found['inversion']['psnr']:.1f} dB PSNR" in result
    assert "privacy.acknowledge_feature_sharing" in result


def test_audit_more_steps_reconstruct_better(made):
    few, many = (
        made("audit", "wide", "--steps", str(steps), "--format", "json").data["inversion"]["psnr"] for steps in (3, 300)
    )
    assert many > few + 5


def test_audit_more_channels_leak_more(made):
    narrow, wide = (
        made("audit", run, "--steps", "300", "--format", "json").data["inversion"]["psnr"] for run in ("split", "wide")
    )
    assert wide > narrow + 5


def test_audit_unfinished_run_is_refused(made):
    result = made("audit", "nowhere")
    assert (result.code, result.issues[0].code) == (4, "RUN_FOLDER")


@pytest.mark.parametrize("method", ["fedin", "fedgkt"])
def test_check_deployment_shared_features_need_acknowledgement(made, method):
    shipping = [*SPLIT, "--set", f"method={{name='{method}'}}"]
    assert made("check", "my.toml", *shipping).code == 0
    result = made("check", "my.toml", *shipping, "--deployment")
    (issue,) = result.issues
    assert (result.code, issue.code) == (4, "FEATURES_LEAVE")
    assert "fedloom audit" in issue.hint
    yes = ["--set", "privacy.acknowledge_feature_sharing=true"]
    assert made("check", "my.toml", *shipping, *yes, "--deployment").code == 0


def test_check_deployment_mixed_method_with_shared_features_needs_acknowledgement(made):
    parts = "[{tiers=['large'], method='fedin'}, {tiers=['small'], method='standalone'}]"
    parts = f"method={{name='mixed', strength=0, parts={parts}}}"
    result = made("check", "my.toml", *SPLIT, "--set", parts, "--deployment")
    assert (result.code, result.issues[0].code) == (4, "FEATURES_LEAVE")


def test_check_deployment_simulation_only_setting_is_refused(made):
    one = ["--set", "method={name='centralized'}", "--set", "tiers=[{name='all', share=1.0}]"]
    result = made("check", "my.toml", *one, "--deployment")
    assert (result.code, result.issues[0].code) == (4, "SIMULATION_ONLY")
    assert made("check", "my.toml", "--deployment").code == 0
