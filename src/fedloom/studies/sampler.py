"""Propose settings with Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011); extra `tune`.

Proposals depend on the seed and on the scores of earlier trials alone, so a search that is repeated from its record
proposes the same again.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import dumps_value
from ..recipe.search_space import Domain, Space
from ..settings import SearchRange

DIGITS = 4  # of a proposed number, so that recipes stay readable


def check_installed() -> str:
    """The version of Optuna. Raises if it is not installed."""
    try:
        import optuna
    except ImportError:
        issue = RecipeIssue((), "EXTRA_MISSING", "Optuna is not installed", "pip install 'fedloom[tune]'")
        raise RecipeError([issue], "tune") from None
    return str(optuna.__version__)


class Sampler:
    """Proposes settings, several at a time, and learns from their scores.

    Parameters
    ----------
    space : what is searched.
    seed : of its draws.
    startup : the number of trials that are drawn at random, before any score is used.
    """

    def __init__(self, space: Space, seed: int, startup: int):
        check_installed()
        import optuna

        logging.getLogger("optuna").setLevel(logging.WARNING)  # it reports every trial on stderr
        self._space, self._values = dict(space), {key: _by_text(domain) for key, domain in space.items()}
        self._distributions = {key: _distribution(domain) for key, domain in space.items()}
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=startup)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)

    def ask(self) -> tuple[Any, dict[str, Any]]:
        """A trial of Optuna's, and the settings it proposes."""
        trial = self._study.ask(self._distributions)
        return trial, {key: self._value(key, trial.params[key]) for key in self._space}

    def _value(self, key: str, drawn: Any) -> Any:
        if self._values.get(key):
            return self._values[key][drawn]
        return float(f"{drawn:.{DIGITS}g}") if isinstance(drawn, float) else drawn

    def tell(self, trial: Any, scores: Sequence[float], complete: bool) -> None:
        """Report the scores of a trial, higher is better, after each stage that it has run; none if it failed."""
        from optuna.trial import TrialState

        for stage, score in enumerate(scores):
            trial.report(score, stage)
        state = TrialState.COMPLETE if complete else TrialState.PRUNED if scores else TrialState.FAIL
        self._study.tell(trial, scores[-1] if complete else None, state=state)

    def tell_of(self, values: Mapping[str, Any], scores: Sequence[float], complete: bool) -> None:
        """The same for settings that it has not proposed; those outside of the space are ignored."""
        import optuna

        texts = {key: dumps_value(values[key]) if self._values[key] else values[key] for key in self._space}
        inside = all(
            texts[key] in self._values[key] if self._values[key] else _is_inside(self._space[key], texts[key])
            for key in self._space
        )
        if not inside or not scores:
            return
        state = optuna.trial.TrialState.COMPLETE if complete else optuna.trial.TrialState.PRUNED
        made = optuna.trial.create_trial(
            state=state, value=scores[-1] if complete else None, params=texts, distributions=self._distributions,
            intermediate_values=dict(enumerate(scores)),
        )  # fmt: skip
        self._study.add_trial(made)


def _by_text(domain: Domain) -> dict[str, Any]:
    """The values of choices by their text, since Optuna takes no tables; empty for a range."""
    return {} if isinstance(domain, SearchRange) else {dumps_value(value): value for value in domain.values}


def _distribution(domain: Domain) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(domain, SearchRange):
        return CategoricalDistribution(tuple(_by_text(domain)))
    if isinstance(domain.low, int) and isinstance(domain.high, int):
        return IntDistribution(domain.low, domain.high, log=domain.log)
    return FloatDistribution(float(domain.low), float(domain.high), log=domain.log)


def _is_inside(domain: Domain, value: Any) -> bool:
    if not isinstance(domain, SearchRange) or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and domain.low <= value <= domain.high
