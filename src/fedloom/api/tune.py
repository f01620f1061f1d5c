"""Search good settings on validation examples, with the same budget for every arm."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines import keep_freed_memory
from ..recipe.paths import resolve_data_folder
from ..recipe.registries import Registries
from ..reporting.search import read_searches, search_sentence, trial_records
from ..results import Record, Result
from ..runs.folder import read_manifest
from ..studies.tune import CHOSEN, Search
from .progress import Progress, run_group

__all__ = ["TuneResult"]


@dataclass(frozen=True, repr=False)
class TuneResult(Result):
    """A finished search: every trial, and the recipe that was chosen for each arm.

    Parameters
    ----------
    folder : of the search; each arm has a folder with its trials, `search.json` and `chosen.toml`.
    searches : the record of each arm.
    registries : names of your own that its recipes need.
    data : the folder of the data sets.
    """

    folder: Path
    searches: tuple[dict[str, Any], ...]
    registries: Registries = field(default_factory=Registries)
    data: Path = field(default_factory=resolve_data_folder)

    @property
    def chosen(self) -> dict[str, Path]:
        """The recipe that was chosen, by arm; it is evaluated on the test set when it runs."""
        return {str(one["arm"]): self.folder / one["arm"] / CHOSEN for one in self.searches}

    @property
    def title(self) -> str:
        return "\n".join([f"search in {self.folder}", *map(search_sentence, self.searches)])

    def records(self) -> list[Record]:
        return [{"arm": one["arm"], **record} for one in self.searches for record in trial_records(one)]

    def content(self) -> dict[str, Any]:
        arms = [{**one, "chosen_recipe": str(self.chosen[one["arm"]])} for one in self.searches]
        return {"run": str(self.folder), "arms": arms}


def run_search(planned: Search, progress: Progress = None) -> TuneResult:
    """Finish a search and read its records. Raises if every trial of an arm failed."""
    keep_freed_memory()
    if not is_finished(planned.home):
        run_group(planned, progress)
    planned.chosen_recipes()
    searches = {one["arm"]: one for one in read_searches(planned.home)}
    return TuneResult(planned.home, tuple(searches[arm] for arm in planned.arms), planned.registries, planned.data)


def is_finished(home: Path) -> bool:
    """True for the folder of a search that has ended."""
    return (home / "manifest.json").is_file() and read_manifest(home)["status"] == "finished"
