"""Staged inference on a Dask cluster: what users call."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import dask
from distributed import Client

from dask_sdc.cluster.session import Session
from dask_sdc.evidence.ledger import Ledger
from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.exceptions import (
    ClosedError,
    ContextOverflow,
    GenerationInterrupted,
    InputError,
    InputTypeError,
)
from dask_sdc.inference.checkpoint import Checkpoint, token_ids
from dask_sdc.inference.heal import RecoveryReport
from dask_sdc.inference.pipeline.audits import Mismatch
from dask_sdc.inference.pipeline.coordinator import Coordinator, session_name
from dask_sdc.inference.pipeline.crew import Crew
from dask_sdc.inference.pipeline.evidence import receipt_of
from dask_sdc.inference.pipeline.ops import Ring
from dask_sdc.inference.pipeline.placement import (
    Candidate,
    boundaries_of,
    choose_workers,
    expect_workers,
    place,
)
from dask_sdc.inference.pipeline.routes import Routes
from dask_sdc.inference.pipeline.session import Request, TokenSession
from dask_sdc.inference.pipeline.streams import (
    Generation,
    News,
    check_settings,
    last_of,
    synchronous,
    tokens_of,
)
from dask_sdc.inference.pipeline.worker import Place, StageWorkerPlugin, describe
from dask_sdc.inference.receipts import RunReceipt, ids_digest
from dask_sdc.inference.shadow import ShadowAudit
from dask_sdc.inference.speculative import Drafter
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore
from dask_sdc.inference.weights.tokenizer import Tokenizer

__all__ = ["Pipeline"]

logger = logging.getLogger("dask_sdc.inference")


class Pipeline:
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
        Workers that are kept ready to take the place of a stage.
    spare_weights : {"memory", "disk"}
        Where spares have the weights. Memory: every spare has all stages loaded. Disk: it has one stage
        loaded, and proved copies of the others on its local disk, which are loaded when needed. Which stage
        is loaded goes round among the spares, the largest first.
    drafter : Drafter, optional
        Guesses tokens that the stages then verify; no token changes.
    depth : int
        Chunks of one session in flight at most, where there is a drafter; 1 for one that drafts trees.
    prefill_chunk : int
        Positions of a prefill chunk.
    timeout : float
        Seconds without an answer after which a stage counts as frozen.
    replay : {"exact", "fast"}
        How a lost stage is fed again. Exact: it has to reproduce every recorded bit, and no token changes.
        Fast: in long chunks through BLAS, compared by sketch; where two tokens are as likely as each other
        but for rounding, the text may then go on with the other one.
    kv_bytes : int, optional
        Bytes for the KV caches of all sessions per stage; a quarter of the worker's memory by default.
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
        File to which receipts, recoveries and runs are appended.

    Raises
    ------
    InputError
        For bad arguments, before anything is sent to the cluster.
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
        timeout: float = 10.0,
        replay: str = "exact",
        kv_bytes: int | None = None,
        journal_bytes: int = 2**28,
        spill: str | os.PathLike[str] | None = None,
        tokenizer: Tokenizer | None = None,
        audit_rate: float = 0.0,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(client, Client):
            raise InputTypeError(f"client: expected a distributed.Client, got {type(client).__name__}")
        for name, value, least in (
            ("spares", spares, 0),
            ("depth", depth, 1),
            ("prefill_chunk", prefill_chunk, 1),
            ("journal_bytes", journal_bytes, 0),
        ):
            _check_int(name, value, least)
        if (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 < timeout < float("inf")
        ):
            raise InputError(f"timeout: expected seconds > 0, got {timeout!r}")
        if stages != "auto":
            _check_int("stages", stages, 1)
        if replay not in ("exact", "fast"):
            raise InputError(f"replay: expected 'exact' or 'fast', got {replay!r}")
        if spare_weights not in ("memory", "disk"):
            raise InputError(f"spare_weights: expected 'memory' or 'disk', got {spare_weights!r}")
        if kv_bytes is not None:
            _check_int("kv_bytes", kv_bytes, 1)
        self._audit = ShadowAudit(audit_rate) if _check_number("audit_rate", audit_rate) > 0 else None
        if self._audit is not None and replay == "fast":
            raise InputError("expected replay='exact' with audits, which compare bits, got 'fast'")
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
        self.client, self.tokenizer = client, tokenizer or _tokenizer_of(self.store)
        self._stages, self._spares, self._drafter, self._depth = stages, spares, drafter, depth
        self._chunk, self._timeout, self._kv_bytes = prefill_chunk, float(timeout), kv_bytes
        self._exact = replay == "exact"
        self._journal_bytes, self._spill = journal_bytes, None if spill is None else os.fspath(spill)
        self.name = f"sdc-pipeline-{uuid.uuid4().hex[:12]}"
        self._session = Session(client, "auto", None, dask.config.get("sdc.lanes"), False, self._timeout)
        self._coordinator: Coordinator | None = None
        self._ledger = None if ledger is None else Ledger(ledger)
        self.receipts: list[SDCAuditReceipt] = []
        self.quarantined: dict[str, str] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._routes = Routes(client.rpc, self._timeout)
        self._crew = Crew(self._session, self._routes, spares, spare_weights, self._watch)
        self._closed = False
        if not client.asynchronous:
            client.sync(self._start)

    # -- starting --------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._session.attach()
        await self.client.register_plugin(StageWorkerPlugin())
        chosen = await self._placed()
        cuts = (0, *self.boundaries, self.config.n_layers)
        self._parts = [TransformerStage(self.store, range(a, b)) for a, b in pairwise(cuts)]
        places = [
            Place(number, len(self._parts), self._journal_bytes, self._spill)
            for number in range(len(self._parts))
        ]
        ring = Ring(self.name, self._routes, [describe(part) for part in self._parts], places, self.name)
        ring.sizes = tuple(part.nbytes for part in self._parts)
        ring.relays = tuple(self._session.addresses())
        self._crew.ring = ring
        self.client.subscribe_topic(self.name, self._hear)
        digests = await asyncio.gather(*(ring.seat(k, one.address, 0) for k, one in enumerate(chosen)))
        await asyncio.gather(*(ring.wire(k) for k in range(len(ring))))
        expected = [part.digest for part in self._parts]
        if list(digests) != expected:
            raise InputError(f"expected stages with digests {expected}, got {list(digests)}")
        self._coordinator = Coordinator(
            ring,
            digests,
            self._crew,
            self._timeout,
            self._budget(chosen),
            self._exact,
            self._audit,
            self._differs,
        )
        await self._crew.keep_spares()
        self._watch(self._hear_of_workers())

    async def _placed(self) -> list[Candidate]:
        """Choose who takes the stages, and where the layers are cut unless that was given."""
        candidates = await self._crew.measured()
        if self.boundaries:
            chosen = choose_workers(candidates, len(self.boundaries) + 1)
            expect_workers(chosen, len(self.boundaries) + 1)
            return chosen
        layers = [range(i, i + 1) for i in range(self.config.n_layers)]
        # A lookup of embeddings costs nothing but memory.
        costs = [TransformerStage(self.store, layer, first=False).nbytes for layer in layers]
        sizes = [TransformerStage(self.store, layer).nbytes for layer in layers]
        stages = None if self._stages == "auto" else int(self._stages)
        chosen, self.boundaries = place(candidates, stages, self._spares, costs, sizes)
        return chosen

    def _budget(self, chosen: Sequence[Candidate]) -> int:
        """Return the positions that the fullest stage has memory for; an auditor may follow all of them."""
        sizes = [part.bytes_per_position for part in self._parts]
        if self._audit is not None:
            sizes = [sum(sizes)] * len(sizes)
        memories = [self._kv_bytes or (one.memory or 2**32) // 4 for one in chosen]
        return min(memory // max(1, size) for memory, size in zip(memories, sizes, strict=True))

    def _watch(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- news ------------------------------------------------------------------------------------

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Take what a stage says of itself."""
        news = event[1]
        if self._coordinator is not None:
            self._coordinator.stage_failed(news["stage"], news["why"])

    async def _hear_of_workers(self) -> None:
        """Sound the alarm as soon as a worker that holds a stage is gone; make spares of those that come."""
        while True:
            await self._session.next_events(1.0)
            lost = [address for address in self._ring.addresses if self._crew.gone(address)]
            if lost and self._coordinator is not None:
                self._coordinator.alarm(f"workers left: {lost}")
            self._crew.tend()

    # -- evidence --------------------------------------------------------------------------------

    async def _differs(self, mismatch: Mismatch) -> None:
        """Take whoever an audit named out of service, and write it down."""
        status = "not_requested"
        for domain in mismatch.finding.decision.suspects:
            why = f"stage {mismatch.finding.stage} of {self.name}, chunk {mismatch.finding.chunk}: wrong"
            failure = await self._session.quarantine(domain, why)
            status = "deferred:refused" if failure else "committed"
            if not failure:
                self.quarantined[domain] = why
        receipt = receipt_of(mismatch, status)
        self.receipts.append(receipt)
        self._write("receipt", receipt.to_dict())

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._ledger is not None:
            self._ledger.append(kind, record)

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
            Ids that end the text; by default those of the model.
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
        return self.client.sync(last_of, self.follow(request, streamed=False))

    def stream(self, prompt: Any, max_new_tokens: int = 64, **settings: Any) -> Any:
        """Generate tokens and yield each id as it is committed; parameters as of `generate`.

        Returns
        -------
        iterator of int
            An asynchronous one with an asynchronous client.
        """
        check_settings(settings)
        request = self.request(prompt, max_new_tokens, **settings)
        tokens = tokens_of(self.follow(request, streamed=True))
        return tokens if self.client.asynchronous else synchronous(self.client, tokens)

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
                raise InputError("prompt: expected ids, as there is no tokenizer, got text")
            prompt = self.tokenizer.encode(prompt)
        ids = token_ids(prompt, "prompt")
        if not ids or max(ids) >= self.config.vocab_size:
            raise InputError(
                f"prompt: expected ids in 0..{self.config.vocab_size - 1}, at least one, got {ids[:8]}"
            )
        _check_int("max_new_tokens", max_new_tokens, 1)
        _check_int("seed", seed, 0)
        if seed >= 2**64:
            raise InputError(f"seed: expected an int below 2**64, got {seed}")
        _check_number("temperature", temperature)
        if _check_number("top_p", top_p) == 0 or top_p > 1:
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
            "model_digest": self.store.digest,
            "tokenizer_digest": self.store.tokenizer_digest or "",
            "stage_boundaries": self.boundaries,
        }
        depth = self._depth if self._drafter is not None else 1
        # Nobody but the tail knows which branch of a tree counts before the next chunk: too late for audits.
        trees = self._audit is None
        return TokenSession(session_name(), request, self._chunk, self._drafter, depth, facts, trees)

    def _capacity(self, request: Request) -> int:
        """Return the positions that a session may take, drafted ones included."""
        wanted = len(request.prompt) + len(request.committed) + request.max_new_tokens
        return min(self.config.max_context, wanted)

    # -- what happened ---------------------------------------------------------------------------

    @property
    def recoveries(self) -> list[RecoveryReport]:
        """Reports of what was healed, in order."""
        return list(self._running.recoveries)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the stages, from the head to the tail."""
        return tuple(self._ring.addresses)

    @property
    def spares(self) -> tuple[str, ...]:
        """Addresses of the workers that are ready to take the place of a stage."""
        return self._crew.spares

    @property
    def _running(self) -> Coordinator:
        if self._coordinator is None or self._closed:
            raise ClosedError("expected a pipeline that was started and not closed")
        return self._coordinator

    @property
    def _ring(self) -> Ring:
        assert self._coordinator is not None
        return self._coordinator.ring

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> Any:
        """Give up the stages; may be called again. The client stays open."""
        if self._closed:
            return _nothing() if self.client.asynchronous else None
        self._closed = True
        if self.client.status != "running":
            return _nothing() if self.client.asynchronous else None
        return self.client.sync(self._stop)

    async def _stop(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._coordinator is not None:
            await self._coordinator.close()
            ring = self._coordinator.ring
            leaving = {*ring.addresses, *self._crew.prepared}
            calls = [
                asyncio.wait_for(ring.call_at(address, "leave", forget=True), self._timeout)
                for address in leaving
                if not self._crew.gone(address)
            ]
            await asyncio.gather(*calls, return_exceptions=True)
        if self._ledger is not None:
            self._ledger.close()
        self.client.unsubscribe_topic(self.name)
        await self._session.detach()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __await__(self) -> Any:
        return self._opened().__await__()

    async def _opened(self) -> Pipeline:
        if self._coordinator is None:
            await self._start()
        return self

    async def __aenter__(self) -> Pipeline:
        return await self._opened()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


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
                f"session {session.name}: an audit found that token {k} was wrong when it was handed out: "
                f"expected {new}, got {old}",
                session=session.name,
                committed=session.committed,
                checkpoint=session.state().checkpoint(),
            )


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    pairs = zip(a, b, strict=False)
    return next((k for k, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


async def _nothing() -> None:
    return None


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: expected an int of at least {least}, got {value!r}")


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{name}: expected a finite number >= 0, got {value!r}")
    return float(value)
