"""Staged inference on a Dask cluster: what users call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
from distributed import Client

from dask_sdc.exceptions import (
    ClosedError,
    ContextOverflow,
    GenerationInterrupted,
    InputError,
    InputTypeError,
)
from dask_sdc.inference.checkpoint import Checkpoint, token_ids
from dask_sdc.inference.pipeline.array_session import StatesSession
from dask_sdc.inference.pipeline.base import StagedPipeline, check_int, check_number
from dask_sdc.inference.pipeline.clients import iterated, synced
from dask_sdc.inference.pipeline.coordinator import session_name
from dask_sdc.inference.pipeline.devices import with_memories, with_paces
from dask_sdc.inference.pipeline.placement import (
    Candidate,
    boundaries_of,
    choose_workers,
    expect_workers,
    place,
)
from dask_sdc.inference.pipeline.session import Request, TokenSession
from dask_sdc.inference.pipeline.streams import (
    Generation,
    News,
    States,
    check_settings,
    last_of,
    tokens_of,
)
from dask_sdc.inference.receipts import RunReceipt, ids_digest
from dask_sdc.inference.speculative import Drafter
from dask_sdc.inference.stage import DEVICES, Stage, TransformerStage
from dask_sdc.inference.weights.store import WeightStore
from dask_sdc.inference.weights.tokenizer import Tokenizer

__all__ = ["Pipeline"]


class Pipeline(StagedPipeline):
    """A model in stages on the workers of a cluster, which survives the loss of a stage.

    Parameters
    ----------
    client : Client
        The cluster; an asynchronous client makes every method a coroutine, and the pipeline an
        asynchronous context manager.
    weights : WeightStore, path or URL
        The model; see ``dask sdc weights convert``. Every worker must be able to read it.
    stages : int or "auto"
        How many stages; "auto" makes as many as the memory needs, two at least where there are workers.
        They go to the fastest workers, in failure domains of their own as far as there are enough; only to
        workers with the resource ``SDC-STAGE``, if any worker declares it.
    boundaries : sequence of int, optional
        First layer of every stage but the head, instead of a split by the measured speed of the workers.
    spares : int
        Workers that are kept ready to take the place of a stage; fewer where there are not that many.
    spare_weights : {"memory", "disk"}
        Where spares have the weights. Memory: every spare has all stages loaded. Disk: it has one stage
        loaded, and proved copies of the others on its local disk, which are loaded when needed. Which stage
        is loaded goes round among the spares, the largest first.
    drafter : Drafter, optional
        Guesses tokens that the stages then verify; no token changes.
    depth : int
        Chunks of one session in flight at most, where there is a drafter; without one there is only one,
        and leave it at 1 for a drafter of trees.
    prefill_chunk : int
        Positions of a prefill chunk.
    device : {"cpu", "cuda"}
        Where stages compute. On CUDA devices, one per worker, layers are cut by the speed of the devices and
        by what is free of their memory, and caches take their part of that.
    timeout : float
        Seconds without an answer after which a stage counts as frozen.
    replay : {"exact", "fast"}
        How a lost stage is fed again. Exact: it has to reproduce every recorded bit, and no token changes.
        Fast: in long chunks through BLAS, compared by sketch; where two tokens are as likely as each other
        but for rounding, the text may then go on with the other one.
    kv_bytes : int, optional
        Bytes for the KV caches of all sessions per stage; a quarter of the worker's memory by default, of
        what is free of its device's where the stage is on one.
    journal_bytes : int
        Memory for what one session sends over one boundary; more goes to files.
    spill : str or None
        Folder for those files on the workers; None keeps all in memory, up to ``journal_bytes``.
    tokenizer : Tokenizer, optional
        For prompts that are text; by default the one in the weight store, if there is one.
    audit_rate : float
        Share of the chunks that a spare, or the worker of another stage, computes once more, of every
        failure domain. Tokens are handed out once the audits that were drawn up to them agree.
    ledger : str or path, optional
        File to which receipts and runs are appended, these with what was healed.
    name : str, optional
        What the pipeline's name on the cluster begins with; a random part makes it one that no other has.

    Attributes
    ----------
    receipts : list of SDCAuditReceipt
        Chunks on which two workers did not agree.
    quarantined : dict of str to str
        Why, by failure domain that an audit named.
    boundaries : tuple of int
        First layer of every stage but the head.
    store : WeightStore
        The model.
    tokenizer : Tokenizer or None
        What takes text.

    Raises
    ------
    InputError
        For bad arguments, before anything is sent to the cluster.
    InputTypeError
        If the client is no `Client`, or the drafter no drafter.
    NoDomainError
        If there are fewer workers than stages.
    CorruptionError
        If a stage's weights are damaged, naming the tensor.

    Examples
    --------
    >>> with Pipeline(client, "smollm2.zarr", stages=3, spares=1) as pipeline:  # doctest: +SKIP
    ...     print(pipeline.generate("The capital of France is", max_new_tokens=20).text)
    """

    def __init__(
        self,
        client: Client,
        weights: Any,
        stages: int | str = "auto",
        *,
        boundaries: Sequence[int] | None = None,
        spares: int = 1,
        spare_weights: str = "memory",
        drafter: Drafter | None = None,
        depth: int = 1,
        prefill_chunk: int = 256,
        device: str = "cpu",
        timeout: float = 10.0,
        replay: str = "exact",
        kv_bytes: int | None = None,
        journal_bytes: int = 2**28,
        spill: str | os.PathLike[str] | None = None,
        tokenizer: Tokenizer | None = None,
        audit_rate: float = 0.0,
        ledger: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            client,
            name=name,
            spares=spares,
            spare_weights=spare_weights,
            timeout=timeout,
            replay=replay,
            kv_bytes=kv_bytes,
            journal_bytes=journal_bytes,
            spill=spill,
            audit_rate=audit_rate,
            ledger=ledger,
        )
        depth = check_int("depth", depth, 1)
        prefill_chunk = check_int("prefill_chunk", prefill_chunk, 1)
        if device not in DEVICES:
            raise InputError(f"device: expected one of {', '.join(DEVICES)}, got {device!r}")
        if not isinstance(stages, str) or stages != "auto":
            stages = check_int("stages", stages, 1)
        _check_methods("drafter", drafter, "draft")
        _check_methods("tokenizer", tokenizer, "encode", "decode")
        self.store = weights if isinstance(weights, WeightStore) else WeightStore.open(weights)
        self.config = self.store.config
        self.boundaries: tuple[int, ...] = ()
        if boundaries is not None:
            self.boundaries = boundaries_of(boundaries, self.config.n_layers)
            if stages not in ("auto", len(self.boundaries) + 1):
                raise InputError(
                    f"expected {len(self.boundaries) + 1} stages by boundaries, got stages={stages}"
                )
            stages = len(self.boundaries) + 1
        self.tokenizer = tokenizer or _tokenizer_of(self.store)
        self._stages, self._drafter, self._depth, self._chunk = stages, drafter, depth, prefill_chunk
        self._device = device
        self._drafting = asyncio.Lock()
        if not client.asynchronous:
            synced(client, self._start)

    async def _placed(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Stage]]:
        """Choose who takes the stages, and where the layers are cut unless that was given."""
        if self._device == "cuda":
            candidates = await with_memories(self._routes, candidates)
            if not self.boundaries:
                candidates = await with_paces(self._routes, candidates)
        if self.boundaries:
            chosen = choose_workers(candidates, len(self.boundaries) + 1)
            expect_workers(chosen, len(self.boundaries) + 1)
        else:
            chosen, self.boundaries = self._cut(candidates)
        cuts = (0, *self.boundaries, self.config.n_layers)
        return chosen, [
            TransformerStage(self.store, range(a, b), device=self._device) for a, b in pairwise(cuts)
        ]

    def _cut(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], tuple[int, ...]]:
        """Choose who takes the stages, and the first layer of every stage but the head."""
        layers = [range(i, i + 1) for i in range(self.config.n_layers)]
        # A lookup of embeddings costs nothing but memory.
        costs = [TransformerStage(self.store, layer, first=False).nbytes for layer in layers]
        sizes = [TransformerStage(self.store, layer).nbytes for layer in layers]
        stages = None if self._stages == "auto" else int(self._stages)
        return place(candidates, stages, self._spares, costs, sizes)

    # -- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        resume: Checkpoint | None = None,
    ) -> Any:
        """Generate tokens.

        Parameters
        ----------
        prompt : str or sequence of int
            Text (with a tokenizer) or ids, at least one.
        max_new_tokens : int
            Tokens to generate at most, those of ``resume`` not counted.
        temperature : float
            0 takes the likeliest token.
        top_p : float
            Mass of the tokens that are drawn from, in (0, 1].
        seed : int
            With temperature > 0: same seed, same tokens, whatever fails meanwhile.
        stop : sequence of int, optional
            Ids that end the text, by default those of the model; the one that did is the last of the result.
        resume : Checkpoint, optional
            Goes on from there, after a check that it belongs to prompt, model and settings.

        Returns
        -------
        Generation

        Raises
        ------
        ContextOverflow
            If prompt and new tokens exceed the context or the memory for the KV caches.
        CheckpointError
            If the checkpoint is another text's.
        GenerationInterrupted
            If a loss cannot be healed; carries the committed tokens and a checkpoint.
        """
        request = self.request(prompt, max_new_tokens, temperature, top_p, seed, stop, resume)
        return synced(self.client, last_of, self.follow(request, streamed=False))

    def stream(self, prompt: Any, max_new_tokens: int = 64, **settings: Any) -> Any:
        """Generate tokens and yield each id as it is committed; parameters as of `generate`.

        Returns
        -------
        iterator of int
            An asynchronous one with an asynchronous client.
        """
        check_settings(settings)
        request = self.request(prompt, max_new_tokens, **settings)
        return iterated(self.client, tokens_of(self.follow(request, streamed=True)))

    def states(self, prompt: Any, layers: Sequence[int] = (), *, logits: bool = False) -> Any:
        """Feed a text and return hidden states, without generating anything.

        Parameters
        ----------
        prompt : str or sequence of int
            The text.
        layers : sequence of int
            Layers, from 0, whose outputs are wanted: what transformers has as ``hidden_states[layer + 1]``,
            and before the final norm also for the last layer.
        logits : bool
            Whether the logits of every position are wanted.

        Returns
        -------
        States

        Raises
        ------
        InputError
            If there is no such layer.
        ContextOverflow, GenerationInterrupted
            As `generate`.
        """
        request = self.request(prompt, 1)
        last = self.config.n_layers - 1
        if not isinstance(logits, bool | np.bool_):
            raise InputTypeError(f"logits: expected True or False, got {logits!r}")
        if not isinstance(layers, Iterable):
            raise InputTypeError(f"layers: expected a sequence of int, got {layers!r}")
        wanted = tuple(layers)
        if any(type(layer) is not int or not 0 <= layer <= last for layer in wanted):
            raise InputError(f"layers: expected ints in 0..{last}, got {list(wanted)}")
        return synced(self.client, self._states, request.prompt, tuple(dict.fromkeys(wanted)), logits)

    async def _states(self, ids: tuple[int, ...], layers: tuple[int, ...], logits: bool) -> States:
        session = StatesSession(
            ids,
            self._chunk,
            layers,
            logits,
            name=session_name(),
            depth=1,
            stages=len(self._parts),
            model_digest=self.store.digest,
            resume=None,
        )
        run = self._running.run(session, len(ids))
        try:
            async for _ in run:
                pass
        finally:
            await run.aclose()
        made = session.take(session.count)
        hidden = {layer: session.tapped[layer][0] for layer in layers}
        return States(ids, hidden, np.concatenate(made, axis=1)[0] if logits else None)

    async def follow(self, request: Request, streamed: bool) -> AsyncGenerator[News, None]:
        """Run a request; say what is new after every traversal, and at the end give the generation.

        Raises
        ------
        GenerationInterrupted
            If a loss cannot be healed, or ``streamed`` tokens were wrong.
        """
        session, given, began = self._new_session(request), tuple[int, ...](), len(self._running.recoveries)
        run = self._running.run(session, self._capacity(request))
        yield News(0, (), checkpoint=session.state().checkpoint())
        try:
            async for count in run:
                fresh = session.fresh[:count]
                if streamed:
                    _check_given(session, given, fresh)
                    if len(fresh) < len(given):
                        continue  # what was taken back after it was handed out is compared as it comes again
                kept = len(given) if given == fresh[: len(given)] else _alike(given, fresh)
                yield News(kept, fresh[kept:])
                given = fresh
            yield News(len(given), (), generation=self._generation(session, request, began))
        finally:
            await run.aclose()

    def _generation(self, session: TokenSession, request: Request, began: int) -> Generation:
        ids = session.fresh
        return Generation(
            request.prompt,
            ids,
            None if self.tokenizer is None else self.tokenizer.decode(ids),
            bool(ids) and ids[-1] in request.stop,
            session.statistics,
            session.state().checkpoint(),
            self._receipt(session, request, began),
            session.audited,
        )

    def _receipt(self, session: TokenSession, request: Request, began: int) -> RunReceipt:
        """Return the receipt of a session that is over; ``began`` recoveries came before it."""
        receipt = RunReceipt(
            session.name,
            self.store.digest,
            ids_digest(request.prompt, session.committed),
            len(request.prompt),
            len(session.committed),
            {**request.text, "prefill_chunk": self._chunk},
            session.chains,
            self._running.blocks,
            tuple(report.to_dict() for report in self._running.recoveries[began:]),
        )
        self._write("run", receipt.to_dict())
        return receipt

    def request(
        self,
        prompt: Any,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        resume: Checkpoint | None = None,
    ) -> Request:
        """Return a request with these settings, checked; see `generate`."""
        if self._closed:
            raise ClosedError("expected an open pipeline, it was closed")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                why = (
                    "the store has none"
                    if find_spec("tokenizers")
                    else "the library tokenizers is not installed"
                )
                raise InputError(f"prompt: expected ids, as there is no tokenizer ({why}), got text")
            prompt = self.tokenizer.encode(prompt)
        ids = token_ids(prompt, "prompt")
        if not ids:
            raise InputError("prompt: expected at least one token, got none")
        if max(ids) >= self.config.vocab_size:
            raise InputError(f"prompt: expected ids in 0..{self.config.vocab_size - 1}, got {max(ids)}")
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1)
        seed = check_int("seed", seed, 0)
        check_number("temperature", temperature)
        if check_number("top_p", top_p) == 0 or top_p > 1:
            raise InputError(f"top_p: expected a number in (0, 1], got {top_p!r}")
        ends = frozenset(self.config.eos_ids if stop is None else token_ids(stop, "stop"))
        request = Request(ids, max_new_tokens, float(temperature), float(top_p), seed, ends)
        if resume is not None:
            if not isinstance(resume, Checkpoint):
                raise InputTypeError(f"resume: expected a Checkpoint, got {type(resume).__name__}")
            resume.check(ids, self.store.digest, {**request.text, "prefill_chunk": self._chunk})
            request = Request(**{**vars(request), "committed": resume.committed})
        total = len(ids) + len(request.committed) + max_new_tokens
        if total > self.config.max_context:
            raise ContextOverflow(
                f"expected at most {self.config.max_context} positions of prompt and new tokens, got "
                f"{len(ids) + len(request.committed)} + {max_new_tokens}"
            )
        return request

    def _new_session(self, request: Request) -> TokenSession:
        facts = {
            "tail": len(self._parts) - 1,
            "vocabulary": self.config.vocab_size,
            "model_digest": self.store.digest,
            "tokenizer_digest": self.store.tokenizer_digest or "",
            "stage_boundaries": self.boundaries,
        }
        depth = self._depth if self._drafter is not None else 1
        # Nobody but the tail knows which branch of a tree counts before the next chunk: too late for audits.
        trees = self._audit is None
        return TokenSession(
            session_name(), request, self._chunk, self._drafter, depth, facts, trees, self._drafting
        )

    def _capacity(self, request: Request) -> int:
        """Return the positions that a session may take, drafted ones included."""
        wanted = len(request.prompt) + len(request.committed) + request.max_new_tokens
        return min(self.config.max_context, wanted)


def _check_methods(name: str, value: Any, *methods: str) -> None:
    """Refuse what is neither None nor an object with these methods; a class has nothing to call them on."""
    able = not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in methods)
    if value is not None and not able:
        expected = " and ".join(methods)
        raise InputTypeError(f"{name}: expected an object with {expected}, got {value!r:.80}")


def _tokenizer_of(store: WeightStore) -> Tokenizer | None:
    """Return the store's tokenizer, None if it has none or the optional library is not there."""
    content = store.tokenizer() if find_spec("tokenizers") is not None else None
    return None if content is None else Tokenizer(content)


def _check_given(session: TokenSession, given: Sequence[int], fresh: Sequence[int]) -> None:
    """Raise if tokens that were streamed already were computed again to others.

    Raises
    ------
    GenerationInterrupted
        With the tokens as they should have been.
    """
    for k, (old, new) in enumerate(zip(given, fresh, strict=False)):
        if old != new:
            raise GenerationInterrupted(
                f"session {session.name}: token {k} was found to be wrong after it was handed out: "
                f"expected {new}, got {old}",
                session=session.name,
                committed=session.committed,
                checkpoint=session.state().checkpoint(),
            )


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    pairs = zip(a, b, strict=False)
    return next((k for k, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
