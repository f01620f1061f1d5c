"""fedloom calibrate: measure how many devices of each tier to run at once here, and write it into the recipe."""

from pathlib import Path
from typing import Annotated

import typer

from ..wording import wrap
from .options import Options, verb
from .output import columns


@verb("sets", "data_dir", "device", "files", "format")
def calibrate(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    write: Annotated[bool, typer.Option("--write", help="Write the numbers into the recipe.")] = False,
) -> None:
    """Measure how many devices of each tier run best as one network. Without it a fixed rule decides."""
    from ..analysis.profiling import calibrate_blocks, set_devices_per_block
    from ..engines import keep_freed_memory
    from ..runs.build import build, build_compute
    from ..runs.data import read_data_spec
    from ..runs.loop import single_thread

    keep_freed_memory()
    loaded = options.load(recipe)
    fleet, _ = build(loaded, options.registries, read_data_spec(loaded, options.registries, options.data))
    with single_thread():
        measured = calibrate_blocks(fleet, loaded.recipe.training.batch_size, compute=build_compute(loaded))
    sizes = sorted({size for tier in measured for size in tier.milliseconds})
    if write:
        recipe.write_text(set_devices_per_block(recipe.read_text(encoding="utf-8"), measured), encoding="utf-8")
    rows = [
        (
            tier.tier,
            *(f"{tier.milliseconds[size]:.2f}" if size in tier.milliseconds else "–" for size in sizes),
            str(tier.best),
        )
        for tier in measured
    ]
    text = columns(("tier", *(f"{size} at once" for size in sizes), "chosen"), rows)
    text += "\n" + wrap(
        "Milliseconds per device and gradient. Chosen: the number of devices with the least time; of several that "
        "differ by no more than repeated measurements do, the smallest."
    )
    options.show(
        [{"tier": tier.tier, "best": tier.best, "milliseconds": tier.milliseconds} for tier in measured],
        text + (f"\nwritten: {recipe}" if write else ""),
    )
