"""The look of everything that fedloom shows: colors of arms and of tiers, type, spacing, and the frame of a page.

Arms and tiers never share a hue. The colors of a palette stay distinct for color-blind readers and have the same hues
on dark paper. Pages are one file each and load nothing.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files

ARMS_LIGHT = ("#0a63b5", "#dd6305", "#00513c", "#2b9bcf", "#7d1f12", "#6e5a00")
ARMS_DARK = ("#4a9df0", "#ff8433", "#2fd09f", "#a5e0ff", "#d05545", "#f5dc6a")
TIERS_LIGHT = ("#3d0f73", "#7a2fb0", "#b5319a", "#d9578f", "#a77fb5")  # the darker, the larger
TIERS_DARK = ("#efe0ff", "#b67cf0", "#f59bdc", "#cf5c98", "#86649e")  # the lighter, the larger
NEUTRALS_LIGHT = ("#4d5258", "#6b7178", "#4d5258", "#6b7178")  # controls: reference lines, distinct by their dash
NEUTRALS_DARK = ("#c3c8ce", "#a0a6ad", "#c3c8ce", "#a0a6ad")

LIGHT = {
    "paper": "#ffffff", "ink": "#16181d", "soft": "#555b64", "grid": "#e4e6ea", "line": "#cdd1d7", "wash": "#f5f6f8",
    "link": "#004f8f", "accent": "#0a63b5", "amount": "#1c4b73", "good": "#00603f", "bad": "#a02314", "ok": "#9fb3c2",
    "lost": "#dd6305", "late": "#b08c00", "refused": "#a02314", "spare": "#d5dae0",
}  # fmt: skip
DARK = {
    "paper": "#14161a", "ink": "#eceef1", "soft": "#aeb4bd", "grid": "#2b2f36", "line": "#434852", "wash": "#1c1f25",
    "link": "#84c5ff", "accent": "#4a9df0", "amount": "#8fc4ee", "good": "#54d6a3", "bad": "#ff9a8a", "ok": "#4d6274",
    "lost": "#ff8433", "late": "#f5dc6a", "refused": "#ff7a66", "spare": "#33383f",
}  # fmt: skip


def css_variables(dark: bool = False) -> dict[str, str]:
    """All colors by the name of their CSS variable.

    Parameters
    ----------
    dark : on dark paper.
    """
    named = {f"--{name}": color for name, color in (DARK if dark else LIGHT).items()}
    palettes: Mapping[str, Sequence[str]] = {
        "a": ARMS_DARK if dark else ARMS_LIGHT,
        "t": TIERS_DARK if dark else TIERS_LIGHT,
        "n": NEUTRALS_DARK if dark else NEUTRALS_LIGHT,
    }
    return named | {f"--{letter}{at}": color for letter, colors in palettes.items() for at, color in enumerate(colors)}


def stylesheet() -> str:
    """Colors for light paper, dark paper and print, then the rules that every page shares."""
    light, dark = (";".join(f"{name}:{color}" for name, color in css_variables(dark).items()) for dark in (False, True))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n" + (
        files("fedloom.design") / "base.css"
    ).read_text(encoding="utf-8")
