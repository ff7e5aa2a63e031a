"""Every check of the conformance suites fails on a declaration that is broken in just that way."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dask_sdc.exceptions import InputError
from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic
from dask_sdc.testing import EstimatorTests, StatisticTests


@dataclass(frozen=True)
class Sums(Statistic):
    """A sound statistic: count, weight and sum of the samples."""

    def init(self, info: ShardInfo) -> State:
        return {"count": 0, "weight": 0.0, "total": np.zeros(info.shape), "size": np.zeros(info.shape)}

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
        if not np.all(np.isfinite(w) & (w >= 0)):
            raise InputError("expected finite weights >= 0")
        terms = np.ascontiguousarray(w[:, None] * np.asarray(x, dtype=np.float64))
        block = {
            "count": len(x),
            "weight": float(np.sum(w)),
            "total": np.sum(terms, axis=0),
            "size": np.sum(np.abs(terms), axis=0),
        }
        return self.combine(state, block)

    def combine(self, a: State, b: State) -> State:
        return {key: a[key] + b[key] for key in a}

    def finalize(self, state: State) -> Any:
        return state["total"] / state["weight"] if state["weight"] else None

    def magnitudes(self, state: State) -> Mapping[str, Any]:
        return {"total": state["size"], "size": state["size"], "weight": state["weight"]}

    def terms(self, state: State) -> float:
        return float(state["count"])

    def invariants(self, state: State) -> Iterable[str]:
        if np.any(np.abs(state["total"]) > state["size"] * (1 + 1e-9)):
            yield "a sum is larger than the sum of its sizes"


class Unpicklable(Sums):
    def __reduce__(self) -> Any:
        return (_forgetful, ())


def _forgetful() -> Statistic:
    return Doubling()


class Doubling(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        once = super().update(state, x, weights)
        return super().update(once, x, weights)


class OpenState(Sums):
    def init(self, info: ShardInfo) -> State:
        return {**super().init(info), "seen": set()}

    def combine(self, a: State, b: State) -> State:
        return {**super().combine({k: v for k, v in a.items() if k != "seen"}, b), "seen": set()}


class GrowingFields(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        return {**super().update(state, x, weights), "last": 1}

    def combine(self, a: State, b: State) -> State:
        return {key: a[key] + b[key] for key in ("count", "weight", "total", "size")}


class WritesInput(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        x -= 1
        return super().update(state, x, weights)


class Noisy(Sums):
    calls = itertools.count()

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        state = super().update(state, x, weights)
        return {**state, "weight": state["weight"] + 1e-12 * (1 + next(self.calls))}


class LayoutSensitive(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        state = super().update(state, x, weights)
        return state if x.flags.c_contiguous else {**state, "weight": state["weight"] * (1 + 1e-15)}


class RandomInit(Sums):
    calls = itertools.count()

    def init(self, info: ShardInfo) -> State:
        return {**super().init(info), "count": next(self.calls)}


class NoIdentity(Sums):
    def combine(self, a: State, b: State) -> State:
        both = super().combine(a, b)
        return {**both, "weight": both["weight"] + 1e-3}


class NotAssociative(Sums):
    def combine(self, a: State, b: State) -> State:
        both = super().combine(a, b)
        if a["count"] and b["count"]:
            both["total"] = (a["total"] + b["total"]) / 2
        return both


class ClobbersSecond(Sums):
    def combine(self, a: State, b: State) -> State:
        both = super().combine(a, b)
        b["count"] += 1
        return both


class NoisyCombine(Sums):
    calls = itertools.count()

    def combine(self, a: State, b: State) -> State:
        both = super().combine(a, b)
        return {**both, "weight": both["weight"] + 1e-12 * next(self.calls)}


class CountsEmptyBlocks(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        state = super().update(state, x, weights)
        return {**state, "count": state["count"] + (len(x) == 0)}


class ForgetsEarlierBlocks(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        fresh = {key: value * 0 for key, value in state.items()}
        return super().update(fresh if len(x) else state, x, weights)


class KeepsOneShard(Sums):
    def combine(self, a: State, b: State) -> State:
        return a if a["count"] > b["count"] else b


class FirstSampleOnly(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        fresh = super().update(state, x, weights)
        return {**fresh, "total": state["total"] + x[:1].sum(axis=0)}


class DependsOnOrder(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        state = super().update(state, x, weights)
        return {**state, "total": state["total"] + (x[0] * 1e-7 if len(x) else 0)}


class IgnoresWeights(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        return super().update(state, x)


class SkewsWeights(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        return super().update(state, x, None if weights is None else weights * np.arange(1.0, len(x) + 1))


class TakesAnyWeights(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        w = None if weights is None else np.abs(np.nan_to_num(weights, posinf=1.0))
        return super().update(state, x, w)


class NegativeMagnitudes(Sums):
    def magnitudes(self, state: State) -> Mapping[str, Any]:
        return {"total": -state["size"] - 1.0}


class StrayMagnitudes(Sums):
    def magnitudes(self, state: State) -> Mapping[str, Any]:
        return {"mean": state["size"]}


class MisshapenMagnitudes(Sums):
    def magnitudes(self, state: State) -> Mapping[str, Any]:
        return {"total": np.ones((2, *state["size"].shape))}


class InfiniteTerms(Sums):
    def terms(self, state: State) -> float:
        return math.inf


class FalseAlarm(Sums):
    def invariants(self, state: State) -> Iterable[str]:
        if state["count"] > 300:
            yield "too many samples"


class HidesNaN(Sums):
    def update(self, state: State, x: Any, weights: Any = None) -> State:
        return super().update(state, np.nan_to_num(x, posinf=0.0), weights)


class NoEmptyResult(Sums):
    def finalize(self, state: State) -> Any:
        if not state["count"]:
            raise ZeroDivisionError("no samples")
        return state["total"] / state["weight"]


class FinalizeScales(Sums):
    def finalize(self, state: State) -> Any:
        state["total"] /= max(state["weight"], 1.0)
        return state["total"]


BROKEN_STATISTICS = {
    "test_pickles": [Unpicklable],
    "test_states_are_closed": [OpenState],
    "test_fields_do_not_depend_on_the_data": [GrowingFields],
    "test_does_not_write_to_its_input": [WritesInput],
    "test_equal_input_gives_equal_bits": [Noisy],
    "test_memory_layout_gives_equal_bits": [LayoutSensitive],
    "test_init_depends_on_seed_and_shard_alone": [RandomInit],
    "test_init_is_the_identity": [NoIdentity],
    "test_combine_is_associative": [NotAssociative],
    "test_combine_leaves_its_second_argument": [ClobbersSecond],
    "test_combine_gives_equal_bits": [NoisyCombine],
    "test_empty_blocks_change_nothing": [CountsEmptyBlocks],
    "test_split_blocks_agree_with_the_whole": [ForgetsEarlierBlocks],
    "test_shards_agree_with_the_whole": [KeepsOneShard],
    "test_permuted_samples_stay_within_the_envelope": [FirstSampleOnly, DependsOnOrder],
    "test_weights_of_one_are_no_weights": [SkewsWeights],
    "test_weights_count": [IgnoresWeights],
    "test_bad_weights_are_refused": [TakesAnyWeights],
    "test_magnitudes_are_usable": [
        NegativeMagnitudes,
        StrayMagnitudes,
        MisshapenMagnitudes,
        InfiniteTerms,
    ],
    "test_invariants_hold_on_clean_data": [FalseAlarm],
    "test_non_finite_samples_show": [HidesNaN],
    "test_finalize_of_nothing": [NoEmptyResult],
    "test_finalize_leaves_the_state": [FinalizeScales],
}


class TestSound(StatisticTests):
    """The statistic that the broken ones derive from passes the suite."""

    statistic = Sums()


def run(suite: Any, name: str) -> None:
    """Run one check of a suite, with what pytest would pass."""
    method = getattr(suite, name)
    known = {"rng": np.random.default_rng(0), "bad": -1.0}
    method(**{key: known[key] for key in inspect.signature(method).parameters})


def checks(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


def test_every_check_of_a_statistic_has_a_broken_one() -> None:
    assert BROKEN_STATISTICS.keys() == checks(StatisticTests)


@pytest.mark.parametrize(
    ("name", "broken"), [(name, broken) for name, group in BROKEN_STATISTICS.items() for broken in group]
)
def test_a_broken_statistic_fails_its_check(name: str, broken: type[Statistic]) -> None:
    suite = StatisticTests()
    suite.statistic = broken()
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, ArithmeticError)):
        run(suite, name)


# -- estimators ----------------------------------------------------------------------------------


class Location(Estimator):
    """A sound estimator: moves halfway to the mean in each round; its objective is the distance left."""

    def initialise(self, info: ShardInfo) -> State | Statistic:
        return {"location": np.zeros(info.shape)}

    def statistic(self, model: State) -> Statistic:
        return Sums()

    def maximise(self, model: State, result: Any) -> State:
        return {"location": (model["location"] + result) / 2}

    def objective(self, model: State, result: Any) -> float:
        return float(np.linalg.norm(model["location"] - result))


class UnpicklableEstimator(Location):
    def __reduce__(self) -> Any:
        return (Overshoot, ())


class Overshoot(Location):
    def maximise(self, model: State, result: Any) -> State:
        return {"location": model["location"] + 4 * (result - model["location"])}


class OpenModel(Location):
    def initialise(self, info: ShardInfo) -> State | Statistic:
        return {"location": np.zeros(info.shape), "seen": set()}


class HiddenState(Location):
    def __init__(self) -> None:
        self.velocity = 0.0

    def maximise(self, model: State, result: Any) -> State:
        self.velocity += 0.01
        return {"location": (model["location"] + result) / 2 + self.velocity}


class RandomStart(Location):
    calls = itertools.count()

    def initialise(self, info: ShardInfo) -> State | Statistic:
        return {"location": np.full(info.shape, float(next(self.calls)))}


class InPlace(Location):
    def maximise(self, model: State, result: Any) -> State:
        model["location"] += (result - model["location"]) / 2
        return model


class ShardSensitive(Location):
    def statistic(self, model: State) -> Statistic:
        return FirstSampleOnly()


class NeverConverged(Location):
    def converged(self, previous: float, current: float, tol: float) -> bool:
        return False


class AlwaysConverged(Location):
    def converged(self, previous: float, current: float, tol: float) -> bool:
        return True


class NoResult(Location):
    def result(self, model: State) -> Any:
        return None


class FloatDensity(Location):
    def log_density(self, model: State) -> Statistic:
        return 0.0  # type: ignore[return-value]


BROKEN_ESTIMATORS = {
    "test_pickles": [UnpicklableEstimator],
    "test_models_are_closed": [OpenModel],
    "test_models_survive_a_checkpoint": [HiddenState],
    "test_start_gives_equal_bits": [RandomStart],
    "test_fit_gives_equal_bits": [HiddenState],
    "test_rounds_leave_the_model": [InPlace],
    "test_shards_agree_with_the_whole": [ShardSensitive],
    "test_objective_moves_one_way": [Overshoot],
    "test_equal_objectives_have_converged": [NeverConverged, AlwaysConverged],
    "test_result_of_a_model": [NoResult],
    "test_log_density_or_none": [FloatDensity],
}


class TestSoundEstimator(EstimatorTests):
    """The estimator that the broken ones derive from passes the suite."""

    estimator = Location()
    direction = -1


def test_every_check_of_an_estimator_has_a_broken_one() -> None:
    assert BROKEN_ESTIMATORS.keys() == checks(EstimatorTests)


@pytest.mark.parametrize(
    ("name", "broken"), [(name, broken) for name, group in BROKEN_ESTIMATORS.items() for broken in group]
)
def test_a_broken_estimator_fails_its_check(name: str, broken: type[Estimator]) -> None:
    suite = EstimatorTests()
    suite.estimator, suite.direction = broken(), -1
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(suite, name)
