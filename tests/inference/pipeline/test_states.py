"""Hidden states of chosen layers: those of one process, whatever is lost, and as a dataset."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dask_sdc.dataset import GeneratedIds, HiddenStates, generate_dataset
from dask_sdc.exceptions import ContextOverflow, InputError, InputTypeError
from dask_sdc.inference.model.transformer import Transformer
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.array_session import StatesSession
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import CONFIG, PROMPT, generated

Array = np.ndarray[Any, Any]


def layer_by_layer(store: WeightStore, ids: Sequence[int], chunk: int) -> list[Array]:
    """Return what every layer puts out, each in a stage of its own, fed in chunks."""
    x: Array = np.asarray([ids])
    found = []
    for layer in range(CONFIG.n_layers):
        stage = TransformerStage(store, range(layer, layer + 1), last=False)
        stage.load()
        state = stage.init()
        x = np.concatenate(
            [stage.forward(x[:, k : k + chunk], state) for k in range(0, len(ids), chunk)], axis=1
        )
        found.append(x[0])
    return found


def logits_of(store: WeightStore, ids: Sequence[int], chunk: int) -> Array:
    stage = TransformerStage(store, range(CONFIG.n_layers))
    stage.load()
    state, x = stage.init(), np.asarray([ids])
    return np.concatenate([stage.forward(x[:, k : k + chunk], state)[0] for k in range(0, len(ids), chunk)])


LONG = tuple(int(k) for k in np.random.default_rng(3).integers(0, CONFIG.vocab_size, 150))


@pytest.mark.parametrize("stages", [1, 3])
def test_states_are_those_of_single_layers(cluster4: Client, store: WeightStore, stages: int) -> None:
    with Pipeline(cluster4, store, stages=stages, spares=0, prefill_chunk=64) as pipeline:
        states = pipeline.states(LONG, [0, 2, 5, 2], logits=True)
        expected = layer_by_layer(store, LONG, 64)
        assert states.ids == LONG and sorted(states.hidden) == [0, 2, 5]
        for layer, found in states.hidden.items():
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, expected[layer])
        np.testing.assert_array_equal(states.logits, logits_of(store, LONG, 64))
        assert pipeline.states(PROMPT, [1]).logits is None
        # The same pipeline still generates.
        assert pipeline.generate(PROMPT, 8).ids == generated(store, PROMPT, 8)
        with pytest.raises(InputError, match=r"layers: expected ints in 0\.\.5, got \[6\]"):
            pipeline.states(PROMPT, [6])
        with pytest.raises(ContextOverflow):
            pipeline.states([1] * CONFIG.max_context, [0])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_is_lost_changes_no_bit(
    fresh_cluster: Callable[[int], Client],
    folder: Path,
    store: WeightStore,
    stage: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = layer_by_layer(store, LONG, 10)
    returned = StatesSession.returned
    client = fresh_cluster(4)
    with Pipeline(client, folder, stages=3, spares=1, prefill_chunk=10) as pipeline:
        pid = client.run(os.getpid)[pipeline.workers[stage]]

        def killing(session: StatesSession, answer: Any) -> None:
            returned(session, answer)
            if session.position == 80:
                monkeypatch.setattr(StatesSession, "returned", returned)
                os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(StatesSession, "returned", killing)
        states = pipeline.states(LONG, range(6))
        for layer, found in states.hidden.items():
            np.testing.assert_array_equal(found, expected[layer])
        assert [loss.stage for report in pipeline.recoveries for loss in report.losses] == [stage]


def test_taps_go_back_with_the_cache(store: WeightStore) -> None:
    stage = TransformerStage(store, range(2, 5))
    stage.load()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 9, CONFIG.hidden_size)).astype(np.float32)
    whole, cut = stage.init(), stage.init()
    for state in (whole, cut):
        stage.tap(state, [0, 3, 4])
    stage.forward(x, whole)
    stage.forward(x[:, :6], cut)
    stage.truncate(cut, 4)
    stage.forward(x[:, 4:], cut)
    assert sorted(stage.tapped(cut)) == [3, 4]
    for layer in (3, 4):
        np.testing.assert_array_equal(stage.tapped(cut)[layer], stage.tapped(whole)[layer])
    assert isinstance(stage.model, Transformer)


def test_a_dataset_of_hidden_states(cluster4: Client, store: WeightStore, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (3, 17, 1, 40, 8)]
    prompts[2] = [CONFIG.vocab_size]  # no such id
    wanted = HiddenStates([1, 4], logits=True, max_length=64)
    with Pipeline(cluster4, store, stages=3, spares=0) as pipeline:
        data, report = generate_dataset(pipeline, prompts, wanted, tmp_path / "a", batch_size=2)
        assert list(report.reasons) == [2] and "expected ids in 0..96" in report.reasons[2]
        for k, prompt in enumerate(prompts):
            if k == 2:
                continue
            states, begin = pipeline.states(prompt, [1, 4], logits=True), int(data["hidden_1_begin"][k])
            rows = slice(begin, begin + len(prompt))
            np.testing.assert_array_equal(data["ids"][rows], prompt)
            np.testing.assert_array_equal(data["hidden_1"][rows], states.hidden[1])
            np.testing.assert_array_equal(data["hidden_4"][rows], states.hidden[4])
            np.testing.assert_array_equal(data["logits"][rows], states.logits)
        _, report = generate_dataset(pipeline, prompts, wanted, tmp_path / "a", batch_size=2, resume=True)
        assert report.kept == 5
        data, _ = generate_dataset(pipeline, prompts[:2], GeneratedIds(6), tmp_path / "b")
        for k in range(2):
            assert tuple(data["ids"].values[k]) == generated(store, tuple(prompts[k]), 6)
        with pytest.raises(InputTypeError, match="expected HiddenStates or GeneratedIds, got function"):
            generate_dataset(pipeline, prompts, lambda prompt: prompt, tmp_path / "c")
        with pytest.raises(InputError, match="layers"):
            generate_dataset(pipeline, prompts, HiddenStates([6]), tmp_path / "c")
