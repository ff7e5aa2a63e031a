"""Conformance suites: subclass one in a test module to check your own `Statistic` or `Estimator`.

Needs pytest only. A suite for a statistic is three lines; everything else has a default::

    from dask_sdc.testing import StatisticTests

    class TestMyStatistic(StatisticTests):
        statistic = MyStatistic()

The suites check what the audit relies on: that states are a monoid of closed types, that equal input
gives equal bits, that rounding in another order stays inside the envelope, and that invariants hold on
clean data.
"""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.evidence.envelope import compare
from dask_sdc.exceptions import EncodeError, InputError
from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic
from dask_sdc.statistics.fold import tree_fold

__all__ = ["EstimatorTests", "StatisticTests"]

Array = np.ndarray[Any, Any]


class _Blocks:
    """Where the data of a suite come from; override what does not fit.

    Attributes
    ----------
    sample_shape : tuple of int
        Shape of one sample.
    dtype : str
        Data type of the blocks.
    target_shape : tuple of int or None
        Shape of one target; None where there are no targets.
    rtol, atol : float
        Tolerances of the comparison, besides the envelope of the statistic's magnitudes.
    seeds : tuple of int
        Seeds of the data; every test runs on each.
    """

    sample_shape: tuple[int, ...] = (3,)
    dtype: str = "float64"
    target_shape: tuple[int, ...] | None = None
    rtol: float = 1e-9
    atol: float = 1e-12
    seeds: tuple[int, ...] = (0, 1)

    def make_block(self, rng: np.random.Generator, n: int) -> Array:
        """Return ``n`` samples; by default normal, off zero, rounded to `dtype`."""
        return rng.normal(3.0, 2.0, size=(n, *self.sample_shape)).astype(self.dtype)

    def make_target(self, rng: np.random.Generator, x: Array) -> Array:
        """Return targets of a block."""
        shape = () if self.target_shape is None else self.target_shape
        return rng.normal(size=(len(x), *shape)).astype(self.dtype)

    def make_info(self, shard_id: int = 0, seed: int = 0) -> ShardInfo:
        """Return what a statistic knows of a shard."""
        return ShardInfo(self.sample_shape, np.dtype(self.dtype), shard_id, seed, self.target_shape)

    def columns(self, rng: np.random.Generator, n: int) -> tuple[Array, dict[str, Any]]:
        """Return a block, and its target as a keyword where there is one."""
        x = self.make_block(rng, n)
        if self.target_shape is None:
            return x, {}
        return x, {"target": self.make_target(rng, x)}


def _agree(statistic: Statistic, a: State, b: State, rtol: float, atol: float) -> None:
    """Assert that two states agree as an audit would have it."""
    magnitudes, terms = statistic.magnitudes(a), statistic.terms(a)
    comparison = compare(
        a, b, rtol=rtol, atol=atol, magnitudes=magnitudes, terms=terms, finite=statistic.finite
    )
    assert comparison.within, f"expected states within the envelope, got {comparison.reason}"


def _same_bits(a: State, b: State, what: str) -> None:
    assert encode(a) == encode(b), f"expected {what} to give the same bits, got {a!r} and {b!r}"


def _closed(state: State) -> bytes:
    """Assert that a state is made of the closed types and survives the codec; return its bytes."""
    try:
        payload = encode(state)
    except EncodeError as error:
        pytest.fail(f"expected a state of closed types, got {error}")
    assert encode(decode(payload)) == payload, "expected the state to survive its encoding"
    return payload


def _slices(columns: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: column[start:stop] for name, column in columns.items()}


class StatisticTests(_Blocks):
    """Checks of one `Statistic`.

    Attributes
    ----------
    statistic : Statistic
        The declaration under test.
    order_matters : bool
        Set it where the result depends on the order of samples, as a random sample of them does.
    non_finite_shows : bool
        Clear it where NaN and Inf are counted or skipped, though the state is finite.
    empty_result : bool
        Clear it where no samples have no result; `finalize` must then raise `InputError`.
    """

    statistic: Statistic
    order_matters: bool = False
    non_finite_shows: bool = True
    empty_result: bool = True

    @pytest.fixture(params=[0, 1], ids=lambda i: f"data{i}")
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        """Return the generator of a test's data."""
        return np.random.default_rng(self.seeds[request.param % len(self.seeds)])

    def state(self, x: Array, shard_id: int = 0, **columns: Any) -> State:
        """Return the state of one block of a shard."""
        statistic = self.statistic
        return statistic.update(statistic.init(self.make_info(shard_id)), x, **columns)

    def states(self, rng: np.random.Generator, sizes: tuple[int, ...]) -> list[State]:
        """Return the states of shards of the given numbers of samples."""
        blocks = [self.columns(rng, n) for n in sizes]
        return [self.state(x, shard, **columns) for shard, (x, columns) in enumerate(blocks)]

    def combine(self, a: State, b: State) -> State:
        """Combine copies: `combine` may reuse the memory of what it is given."""
        return self.statistic.combine(_copy(a), _copy(b))

    def supports(self, name: str) -> bool:
        """Whether `update` takes the column."""
        parameters = inspect.signature(self.statistic.update).parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)

    # -- declarations and states -------------------------------------------------------

    def test_pickles(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 20)
        clone = pickle.loads(pickle.dumps(self.statistic))
        state = clone.update(clone.init(self.make_info()), x, **columns)
        _same_bits(self.state(x, **columns), state, "the unpickled statistic")

    def test_states_are_closed(self, rng: np.random.Generator) -> None:
        _closed(self.statistic.init(self.make_info()))
        for state in self.states(rng, (0, 1, 40)):
            _closed(state)

    def test_fields_do_not_depend_on_the_data(self, rng: np.random.Generator) -> None:
        empty, full = self.statistic.init(self.make_info()), self.states(rng, (30,))[0]
        assert type(empty) is type(full), f"expected one type of state, got {type(empty)} and {type(full)}"
        if isinstance(empty, dict):
            assert empty.keys() == full.keys(), (
                f"expected fields {sorted(empty)}, got {sorted(full)} after data"
            )

    def test_does_not_write_to_its_input(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 30)
        for array in (x, *columns.values()):
            array.flags.writeable = False
        before = x.copy()
        self.state(x, **columns)
        assert x.tobytes() == before.tobytes(), "expected the block to be left as it was"

    # -- determinism -------------------------------------------------------------------

    def test_equal_input_gives_equal_bits(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 300)
        _same_bits(self.state(x, **columns), self.state(x.copy(), **columns), "the same block twice")

    def test_memory_layout_gives_equal_bits(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 300)
        spread = np.empty((600, *x.shape[1:]), x.dtype)[::2]
        spread[...] = x
        reference = self.state(x, **columns)
        _same_bits(reference, self.state(np.asfortranarray(x), **columns), "Fortran order")
        _same_bits(reference, self.state(spread, **columns), "strided rows")
        _same_bits(reference, self.state(x.astype(x.dtype.newbyteorder()), **columns), "the other byte order")

    def test_init_depends_on_seed_and_shard_alone(self) -> None:
        for shard, seed in ((0, 0), (3, 0), (3, 7)):
            first, second = (self.statistic.init(self.make_info(shard, seed)) for _ in range(2))
            _same_bits(first, second, f"init of shard {shard} with seed {seed}")

    # -- the monoid --------------------------------------------------------------------

    def test_init_is_the_identity(self, rng: np.random.Generator) -> None:
        for state in self.states(rng, (25,)):
            for other in (0, 5):
                empty = self.statistic.init(self.make_info(other))
                self.agree(state, self.combine(empty, state))
                self.agree(state, self.combine(state, empty))

    def test_combine_is_associative(self, rng: np.random.Generator) -> None:
        a, b, c = self.states(rng, (40, 7, 90))
        left = self.combine(self.combine(a, b), c)
        right = self.combine(a, self.combine(b, c))
        self.agree(left, right)

    def test_combine_leaves_its_second_argument(self, rng: np.random.Generator) -> None:
        a, b = self.states(rng, (20, 30))
        before = encode(b)
        self.statistic.combine(a, b)
        assert encode(b) == before, "expected combine to leave its second argument as it was"

    def test_combine_gives_equal_bits(self, rng: np.random.Generator) -> None:
        a, b = self.states(rng, (20, 30))
        _same_bits(self.combine(a, b), self.combine(a, b), "the same two states twice")

    def test_empty_blocks_change_nothing(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 50)
        state = self.state(x, **columns)
        after = self.statistic.update(_copy(state), x[:0], **_slices(columns, 0, 0))
        self.agree(state, after)

    def test_split_blocks_agree_with_the_whole(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 500)
        for cuts in ((0, 1, 500), (0, 250, 500), (0, 17, 130, 131, 500)):
            state = self.statistic.init(self.make_info())
            for start, stop in itertools.pairwise(cuts):
                state = self.statistic.update(state, x[start:stop], **_slices(columns, start, stop))
            self.agree(self.state(x, **columns), state)

    def test_shards_agree_with_the_whole(self, rng: np.random.Generator) -> None:
        if self.order_matters:
            pytest.skip("the result depends on how samples fall into shards")
        x, columns = self.columns(rng, 500)
        cuts = (0, 100, 100, 163, 480, 500)
        parts = [
            self.state(x[start:stop], shard, **_slices(columns, start, stop))
            for shard, (start, stop) in enumerate(itertools.pairwise(cuts))
        ]
        self.agree(self.state(x, **columns), tree_fold(parts, self.statistic.combine))

    def test_permuted_samples_stay_within_the_envelope(self, rng: np.random.Generator) -> None:
        if self.order_matters:
            pytest.skip("the result depends on the order of samples")
        x, columns = self.columns(rng, 1000)
        order = rng.permutation(1000)
        permuted = {name: column[order] for name, column in columns.items()}
        # The auditor's default tolerances: what is left must be in the magnitudes.
        _agree(self.statistic, self.state(x, **columns), self.state(x[order], **permuted), 1e-12, 1e-12)

    def agree(self, a: State, b: State) -> None:
        """Assert that two states agree, as a tolerant audit would have it, and on what is exact."""
        _agree(self.statistic, a, b, self.rtol, self.atol)

    # -- columns -----------------------------------------------------------------------

    def test_weights_of_one_are_no_weights(self, rng: np.random.Generator) -> None:
        if not self.supports("weights"):
            pytest.skip("takes no weights")
        x, columns = self.columns(rng, 200)
        plain = self.statistic.finalize(self.state(x, **columns))
        weighted = self.statistic.finalize(self.state(x, weights=np.ones(200), **columns))
        _agree_numbers(_fields(plain), _fields(weighted), self.rtol)

    def test_weights_count(self, rng: np.random.Generator) -> None:
        if not self.supports("weights"):
            pytest.skip("takes no weights")
        x, columns = self.columns(rng, 50)
        weights = np.where(np.arange(50) < 25, 1.0, 3.0)
        state = self.state(x, weights=weights, **columns)
        assert encode(state) != encode(self.state(x, weights=np.ones(50), **columns)), (
            "expected weights to change the state, got the state without them"
        )

    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
    def test_bad_weights_are_refused(self, rng: np.random.Generator, bad: float) -> None:
        if not self.supports("weights"):
            pytest.skip("takes no weights")
        x, columns = self.columns(rng, 5)
        with pytest.raises(InputError):
            self.state(x, weights=np.array([1.0, 1.0, bad, 1.0, 1.0]), **columns)

    # -- what the audit reads ----------------------------------------------------------

    def test_magnitudes_are_usable(self, rng: np.random.Generator) -> None:
        for state in (self.statistic.init(self.make_info()), *self.states(rng, (1, 60))):
            magnitudes, terms = self.statistic.magnitudes(state), self.statistic.terms(state)
            assert terms >= 0 and math.isfinite(terms), f"expected a finite number of terms, got {terms}"
            if magnitudes is not None:
                _check_magnitudes(state, magnitudes)

    def test_invariants_hold_on_clean_data(self, rng: np.random.Generator) -> None:
        states = self.states(rng, (0, 1, 2, 33, 400))
        for state in (self.statistic.init(self.make_info()), *states, tree_fold(states, self.combine)):
            broken = list(self.statistic.invariants(state))
            assert broken == [], f"expected no broken invariant on clean data, got {broken}"

    def test_non_finite_samples_show(self, rng: np.random.Generator) -> None:
        looked_at = self.non_finite_shows and not self.order_matters
        if not (self.statistic.finite and looked_at and self.dtype[0] in "fc"):
            pytest.skip("non-finite values are legal, impossible, or may not be looked at")
        for bad in (np.nan, np.inf):
            x, columns = self.columns(rng, 100)
            x[57] = bad
            try:
                with np.errstate(all="ignore"):
                    state = self.state(x, **columns)
            except (InputError, ArithmeticError):
                continue
            assert not _finite(state), (
                f"expected {bad} to show in the state, got finite numbers; "
                "set non_finite_shows = False if it is counted or skipped on purpose"
            )

    def test_finalize_of_nothing(self) -> None:
        state = self.statistic.init(self.make_info())
        if self.empty_result:
            self.statistic.finalize(state)
        else:
            with pytest.raises(InputError):
                self.statistic.finalize(state)

    def test_finalize_leaves_the_state(self, rng: np.random.Generator) -> None:
        state = self.states(rng, (300,))[0]
        before = encode(state)
        self.statistic.finalize(state)
        assert encode(state) == before, "expected finalize to leave the state as it was"


class EstimatorTests(_Blocks):
    """Checks of one `Estimator`.

    Attributes
    ----------
    estimator : Estimator
        The declaration under test.
    direction : int
        1 where the objective rises from round to round, -1 where it falls, 0 where it may do either.
    rounds : int
        Rounds that the tests fit.
    """

    estimator: Estimator
    direction: int = 0
    rounds: int = 4

    @pytest.fixture
    def rng(self) -> np.random.Generator:
        """Return the generator of a test's data."""
        return np.random.default_rng(self.seeds[0])

    def shards(self, rng: np.random.Generator) -> list[tuple[Array, dict[str, Any]]]:
        """Return the shards that the tests fit; their samples are enough for a start."""
        return [self.columns(rng, n) for n in (150, 0, 220, 31)]

    def accumulate(self, statistic: Statistic, shards: list[tuple[Array, dict[str, Any]]]) -> Any:
        """Run one round over shards, in order, and return its result."""
        states = [
            statistic.update(statistic.init(self.make_info(shard)), x, **columns)
            for shard, (x, columns) in enumerate(shards)
        ]
        return statistic.finalize(tree_fold(states, statistic.combine))

    def start(self, shards: list[tuple[Array, dict[str, Any]]]) -> State:
        """Return the first model."""
        first = self.estimator.initialise(self.make_info())
        return self.accumulate(first, shards) if isinstance(first, Statistic) else first

    def fit(self, shards: list[tuple[Array, dict[str, Any]]], model: State) -> tuple[State, list[float]]:
        """Run `rounds` rounds; return the last model and the objectives."""
        objectives = []
        for _ in range(self.rounds):
            result = self.accumulate(self.estimator.statistic(model), shards)
            objectives.append(self.estimator.objective(model, result))
            model = self.estimator.maximise(model, result)
        return model, objectives

    def test_pickles(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        model = self.start(shards)
        clone = pickle.loads(pickle.dumps(self.estimator))
        result = self.accumulate(clone.statistic(model), shards)
        same = self.accumulate(self.estimator.statistic(model), shards)
        _same_bits(
            self.estimator.maximise(model, same), clone.maximise(model, result), "the unpickled estimator"
        )

    def test_models_are_closed(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        first = self.start(shards)
        _closed(first)
        _closed(self.fit(shards, first)[0])

    def test_models_survive_a_checkpoint(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        first = self.start(shards)
        restored = decode(encode(first))
        _same_bits(self.fit(shards, first)[0], self.fit(shards, restored)[0], "a restored model")

    def test_start_gives_equal_bits(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        _same_bits(self.start(shards), self.start(shards), "the same start twice")

    def test_fit_gives_equal_bits(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        first = self.start(shards)
        _same_bits(self.fit(shards, first)[0], self.fit(shards, first)[0], "the same fit twice")

    def test_rounds_leave_the_model(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        first = self.start(shards)
        before = encode(first)
        self.fit(shards, first)
        assert encode(first) == before, "expected maximise to leave the model that it is given"

    def test_shards_agree_with_the_whole(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        first = self.start(shards)
        names = shards[0][1].keys()
        columns = {name: np.concatenate([c[name] for _, c in shards]) for name in names}
        whole = [(np.concatenate([x for x, _ in shards]), columns)]
        _agree_numbers(self.fit(shards, first)[0], self.fit(whole, first)[0], self.rtol)

    def test_objective_moves_one_way(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        _, objectives = self.fit(shards, self.start(shards))
        assert all(math.isfinite(value) for value in objectives), f"expected finite ones, got {objectives}"
        slack = self.rtol * max(abs(value) for value in objectives) + self.atol
        steps = [self.direction * step for step in np.diff(objectives)]
        assert min(steps) >= -slack, f"expected objectives of direction {self.direction}, got {objectives}"

    def test_equal_objectives_have_converged(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        _, objectives = self.fit(shards, self.start(shards))
        assert self.estimator.converged(objectives[-1], objectives[-1], 0.0)
        assert not self.estimator.converged(objectives[-1], objectives[-1] + 1.0, 1e-12 / abs(objectives[-1]))

    def test_result_of_a_model(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        model, _ = self.fit(shards, self.start(shards))
        assert self.estimator.result(model) is not None

    def test_log_density_or_none(self, rng: np.random.Generator) -> None:
        shards = self.shards(rng)
        model = self.start(shards)
        try:
            statistic = self.estimator.log_density(model)
        except NotImplementedError:
            return
        assert isinstance(statistic, Statistic), f"expected a Statistic, got {type(statistic).__name__}"
        self.accumulate(statistic, shards)


def _copy(state: State) -> State:
    return pickle.loads(pickle.dumps(state))


def _leaves(state: State, path: str = "") -> dict[str, Array]:
    """Return the leaves of a state as arrays, by path."""
    if isinstance(state, Mapping):
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        items = [(str(i), value) for i, value in enumerate(state)]
    else:
        return {path: np.asarray(state)}
    found: dict[str, Array] = {}
    for key, value in items:
        found.update(_leaves(value, f"{path}.{key}" if path else key))
    return found


def _finite(state: State) -> bool:
    numbers = (leaf for leaf in _leaves(state).values() if leaf.dtype.kind in "fc")
    return all(bool(np.all(np.isfinite(leaf))) for leaf in numbers)


def _fields(result: Any) -> Any:
    """Return the fields of a result object by name; other results as they are."""
    return vars(result) if hasattr(result, "__dict__") else result


def _agree_numbers(a: Any, b: Any, rtol: float) -> None:
    """Assert that two values hold the same numbers, whatever their dtypes.

    A field may be None on one side: what only weights have, or a model before its first round.
    """
    left, right = _leaves(a), _leaves(b)
    assert left.keys() == right.keys(), f"expected fields {sorted(left)}, got {sorted(right)}"
    numbers = [path for path in left if {left[path].dtype.kind, right[path].dtype.kind} <= set("biufc")]
    assert numbers, f"expected numbers, got {a!r}"
    for path in numbers:
        scale = float(np.max(np.abs(left[path]), initial=0.0, where=np.isfinite(left[path])))
        np.testing.assert_allclose(right[path], left[path], rtol, rtol * scale, err_msg=path)


def _check_magnitudes(state: State, magnitudes: Mapping[str, Any]) -> None:
    assert isinstance(state, Mapping), "expected a dict state where there are magnitudes"
    unknown = sorted(set(magnitudes) - set(state))
    assert not unknown, f"expected magnitudes of fields of the state, got {unknown}"
    for name, magnitude in magnitudes.items():
        for path, part in _leaves(magnitude, name).items():
            assert np.all(part >= 0) and np.all(np.isfinite(part)), (
                f"{path}: expected finite magnitudes >= 0, got {part!r}"
            )
        if not isinstance(magnitude, Mapping):
            shape = np.shape(state[name])
            fits = np.broadcast_shapes(shape, np.shape(magnitude)) == shape
            assert fits, f"{name}: expected magnitudes to broadcast to {shape}, got {np.shape(magnitude)}"
