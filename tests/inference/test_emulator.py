"""The linear climate emulator: fit, rollout, and the rules that hold for every stage."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import CorruptionError, InputError
from dask_sdc.inference.emulator import LinearEmulator, fit_linear_emulator, rollout
from dask_sdc.inference.stage import Stage

Array = np.ndarray[Any, Any]


def synthetic(times: int = 400, noise: float = 0.0) -> Array:
    """A field of two turning patterns on a cycle of four."""
    rng = np.random.default_rng(0)
    patterns = np.linalg.qr(rng.normal(size=(30, 2)))[0].T
    step = 0.98 * np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
    c = np.array([3.0, 0.0])
    cycle = rng.normal(size=(4, 30))
    fields = []
    for t in range(times):
        fields.append(c @ patterns + cycle[t % 4] + 10)
        c = step @ c + noise * rng.normal(size=2)
    return np.array(fields).reshape(times, 5, 6)


def loaded(emulator: LinearEmulator) -> list[Stage]:
    stages = emulator.stages()
    for stage in stages:
        stage.load()
    return stages


def plain(emulator: LinearEmulator, history: Array, steps: int) -> Array:
    """The same model as one loop over whole vectors."""
    flat = history.reshape(len(history), -1)
    period, order = len(emulator.climatology), emulator.order
    c = [
        ((x - emulator.climatology[t % period]) * emulator.scale) @ emulator.components.T
        for t, x in enumerate(flat)
    ]
    out = []
    for t in range(len(flat), len(flat) + steps):
        past = c[-order:][::-1]
        past += [np.zeros_like(c[0])] * (order - len(past))
        c.append(emulator.coef @ np.concatenate(past) + emulator.intercept)
        anomaly = c[-1] @ emulator.components / emulator.scale
        out.append((anomaly + emulator.climatology[t % period]).reshape(emulator.shape))
    return np.array(out)


def test_a_linear_world_is_learned() -> None:
    field = synthetic(noise=0.5)
    emulator = fit_linear_emulator(field, 2, period=4, latitude=np.linspace(-60, 60, 5))
    made = rollout(loaded(emulator), field[None, :200], 4)[0]
    persisted = field[196:200]
    truth = field[200:204]
    assert np.abs(made[0] - truth[0]).mean() < 0.3 * np.abs(persisted[0] - truth[0]).mean()
    eigenvalues = np.linalg.eigvals(emulator.coef)
    np.testing.assert_allclose(np.abs(eigenvalues), 0.98, atol=0.03)
    np.testing.assert_allclose(np.abs(np.angle(eigenvalues)), 0.5, atol=0.05)


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("known", [1, 2, 50])
def test_rollout_is_the_plain_loop(order: int, known: int) -> None:
    field = synthetic(100, noise=0.3)
    emulator = fit_linear_emulator(field, 5, order=order, period=4, l2=0.1, latitude=np.linspace(0, 80, 5))
    made = rollout(loaded(emulator), field[None, :known], 9)
    assert made.shape == (1, 9, 5, 6)
    np.testing.assert_allclose(made[0], plain(emulator, field[:known], 9), rtol=1e-12)


def test_bits_do_not_depend_on_chunks() -> None:
    field = synthetic(100, noise=0.3)
    stages = loaded(fit_linear_emulator(field, 5, order=2, period=4))
    outs, ends = [], []
    for sizes in ([40], [1] * 40, [7, 30, 3]):
        states = [stage.init() for stage in stages]
        out, at = [], 0
        for size in sizes:
            chunk = field[None, at : at + size]
            for stage, state in zip(stages, states, strict=True):
                chunk = stage.forward(chunk, state)
            out.append(chunk)
            at += size
        outs.append(np.concatenate(out, axis=1).tobytes())
        ends.append([encode(stage.snapshot(state)) for stage, state in zip(stages, states, strict=True)])
        assert [stage.position(state) for stage, state in zip(stages, states, strict=True)] == [40] * 3
    assert outs[0] == outs[1] == outs[2]
    assert ends[0] == ends[1] == ends[2]


def test_times_are_taken_back() -> None:
    field = synthetic(200, noise=0.3)
    stages = loaded(fit_linear_emulator(field, 5, order=3, period=4))
    for stage in stages:
        chunk = field[None] if stage is stages[0] else np.random.default_rng(1).normal(size=(1, 200, 5))
        once, twice = stage.init(), stage.init()
        expected = stage.forward(chunk, once)
        stage.forward(chunk[:, :150], twice)
        stage.truncate(twice, 90)
        assert stage.forward(chunk[:, 90:], twice).tobytes() == expected[:, 90:].tobytes()
        assert encode(stage.snapshot(once)) == encode(stage.snapshot(twice))
        with pytest.raises(InputError, match=r"to truncate to 136\.\.200, got 135"):
            stage.truncate(twice, 135)


def test_digests_prove_the_arrays() -> None:
    stages = fit_linear_emulator(synthetic(), 2).stages()
    assert len({stage.digest for stage in stages}) == 3
    assert stages[1].nbytes == 8 * (2 * 2 + 2)
    sent = [pickle.loads(pickle.dumps(stage)) for stage in stages]
    assert [stage.digest for stage in sent] == [stage.digest for stage in stages]
    sent[1]._arrays["coef"][0, 1] += 1e-12
    sent[0].load()
    with pytest.raises(CorruptionError, match="StepStage: expected digest"):
        sent[1].load()


@pytest.mark.parametrize(
    ("shape", "options"),
    [((10, 4), {}), ((3, 4, 4), {"order": 3}), ((5, 4, 4), {"period": 12}), ((50, 4, 4), {"modes": 0})],
)
def test_bad_fields_are_refused(shape: tuple[int, ...], options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected a field"):
        fit_linear_emulator(np.zeros(shape), **options)


def test_the_climate_of_the_demo() -> None:
    samples = pytest.importorskip("iris_sample_data")
    xr = pytest.importorskip("xarray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a calendar that pandas does not know
        with xr.open_dataset(Path(samples.path) / "A1B_north_america.nc", engine="h5netcdf") as data:
            air = data["air_temperature"][:, ::4, ::5].load()
    emulator = fit_linear_emulator(air[:200], 6, latitude=air["latitude"])
    made = rollout(loaded(emulator), air.to_numpy()[None, :200], 30)[0]
    truth = air.to_numpy()[200:230].astype(float)
    error = np.sqrt(((made - truth) ** 2).mean())
    mean_error = np.sqrt(((air.to_numpy()[:200].mean(axis=0) - truth) ** 2).mean())
    # A world that warms is better foretold from its last state than from its mean.
    assert error < 0.8 * mean_error
