"""Every kind of loss and of corruption of every stage at every moment: the tokens are those of a clean run.

{killed, frozen, failing, message lost; a bit flipped in weights, KV cache or an activation} × {each stage} ×
{prefill, first, middle and last token, during a replay}, greedy, sampled and with drafted tokens, on a small
random model in three stages on processes of their own. Cases run on one cluster, whose nannies start a new
worker for each that was lost, until a worker is quarantined: then on a new one. Flipped bits are found by
audits of every chunk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from _bench import Bench, main
from _stages import plain, write_store
from distributed import Client, LocalCluster

from dask_sdc.exceptions import GenerationInterrupted
from dask_sdc.faults.stages import StageFault, arm_replay_fault, arm_spare_fault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.session import Loss
from dask_sdc.inference.speculative import NGramDrafter

STAGES, WORKERS, TOKENS, CHUNK, TIMEOUT = 3, 6, 24, 16, 2.0
PROMPT = tuple((37 * k + 11) % 512 for k in range(40))
#: Chunks of the prefill, and so the step of the first decoded token.
PREFILL = 3
MOMENTS = {"prefill": 1, "first": PREFILL, "middle": PREFILL + 11, "last": PREFILL + TOKENS - 2}
LOUD, SILENT = ("kill", "freeze", "raise", "drop"), ("weights", "state", "activation")
SETTINGS = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 5}, "drafted": {}}
#: The highest bit of a float32's fraction.
BIT = 22


class Case(NamedTuple):
    """What happens to which stage when, in which mode of generation."""

    kind: str
    stage: int
    moment: str
    mode: str


class Outcome(NamedTuple):
    """What came of it: the tokens, what was said to be lost, and what was done that should not have been.

    ``quarantined`` says whether the cluster has a worker less from now on.
    """

    ids: tuple[int, ...]
    losses: str
    astray: str
    quarantined: bool


@contextlib.contextmanager
def pipeline(client: Client, path: Path, case: Case) -> Iterator[Pipeline]:
    """Start a pipeline; whoever froze in it is killed at the end, so that its nanny starts another."""
    pids = processes(client)
    drafted = {"drafter": NGramDrafter(n=2, width=3), "depth": 2} if case.mode == "drafted" else {}
    # A spare whose weights are bent would be found by auditing, before it is asked to replay.
    rate = 1.0 if case.kind in SILENT and case.moment != "replay" else 0.0
    with Pipeline(
        client, path, STAGES, spares=2, timeout=TIMEOUT, prefill_chunk=CHUNK, audit_rate=rate, **drafted
    ) as running:
        yield running
    if running.quarantined:
        return
    lost = [address for address, pid in pids.items() if not alive(pid)]
    for address in lost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[address], signal.SIGKILL)
    while set(lost) & set(client.scheduler_info(n_workers=-1)["workers"]):
        time.sleep(0.05)


def processes(client: Client) -> dict[str, int]:
    """Return the process of every worker, once all have answered; one that died counts for a while."""
    complete(client)
    while len(pids := client.run(os.getpid, on_error="ignore")) < WORKERS:
        complete(client)
    return pids


def complete(client: Client) -> None:
    """Wait until all workers are back; a nanny whose worker died while it started gives it up."""
    try:
        client.wait_for_workers(WORKERS, timeout=120)
    except TimeoutError:
        missing = WORKERS - len(client.scheduler_info(n_workers=-1)["workers"])
        client.cluster.scale(len(client.cluster.worker_spec) + missing)
        client.wait_for_workers(WORKERS, timeout=120)


def alive(pid: int) -> bool:
    """Say whether a process is there and not stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ"
    return False


def arm(running: Pipeline, case: Case) -> None:
    """Arm what is to happen."""
    if case.moment != "replay":
        arm_stage_fault(running, StageFault(case.kind, case.stage, MOMENTS[case.moment], BIT))
        return
    arm_stage_fault(running, StageFault("kill", case.stage, MOMENTS["middle"]))
    for spare in running.spares[:1]:
        if case.kind == "weights":
            arm_spare_fault(running, spare, case.stage, BIT)
        else:
            arm_replay_fault(running, spare, case.kind)


def run(client: Client, path: Path, case: Case) -> Outcome:
    """Run one case."""
    with pipeline(client, path, case) as running:
        before = running.workers
        arm(running, case)
        try:
            ids = running.generate(PROMPT, TOKENS, stop=[], **SETTINGS[case.mode]).ids
        except GenerationInterrupted as error:
            why = f"{type(error).__name__}: {error}"
            return Outcome(tuple(error.committed), why, "given up", bool(running.quarantined))
        losses = [loss for report in running.recoveries for loss in report.losses]
        strayed = astray(case, running, before, losses)
        return Outcome(ids, "; ".join(map(str, losses)), strayed, bool(running.quarantined))


def astray(case: Case, running: Pipeline, before: tuple[str, ...], losses: list[Loss]) -> str:
    """Say what was done that should not have been: another stage blamed, replaced or quarantined."""
    wrong = []
    # What drops a message is the way to the next stage, or that stage's ear.
    blamed = {case.stage, case.stage + 1} if case.kind == "drop" else {case.stage}
    if others := {loss.stage for loss in losses} - blamed:
        wrong.append(f"blamed {sorted(others)}")
    if moved := [k for k in range(STAGES) if k != case.stage and running.workers[k] != before[k]]:
        wrong.append(f"replaced {moved}")
    suspects = {worker for receipt in running.receipts for worker in receipt.suspected_workers}
    if others := suspects - {before[case.stage]}:
        wrong.append(f"accused {sorted(others)}")
    if case.kind in SILENT and case.moment != "replay" and losses and not suspects:
        wrong.append("nobody accused")
    return ", ".join(wrong)


def cases(quick: bool) -> list[Case]:
    """Return all cases, or a few of every kind."""
    everything = [
        Case(*parts)
        for parts in (
            *product(LOUD, range(STAGES), [*MOMENTS, "replay"], ("greedy", "sampled")),
            *product(LOUD, range(STAGES), ("prefill", "first", "middle"), ("drafted",)),
            *product(SILENT, range(STAGES), [*MOMENTS, "replay"], ("greedy", "sampled")),
        )
    ]
    possible = [
        case
        for case in everything
        # Nobody is sent anything by the tail, and a spare that replays can be killed, frozen or bent.
        if not (case.kind == "drop" and case.stage == STAGES - 1)
        and not (case.moment == "replay" and case.kind in ("raise", "drop", "state", "activation"))
        # And it puts out nothing before the prompt ends.
        and not (case.moment == "prefill" and case.kind == "activation" and case.stage == STAGES - 1)
    ]
    if not quick:
        return possible
    return [
        Case("kill", 0, "middle", "greedy"),
        Case("freeze", 1, "first", "sampled"),
        Case("drop", 0, "last", "greedy"),
        Case("raise", 2, "first", "drafted"),
        Case("weights", 1, "middle", "greedy"),
        Case("weights", 2, "replay", "sampled"),
    ]


def outcomes(path: Path, todo: Sequence[Case]) -> Iterator[tuple[Case, Outcome, float]]:
    """Run cases, and yield each with what came of it and the seconds that it took."""
    left = list(todo)
    while left:
        with (
            LocalCluster(
                n_workers=WORKERS,
                threads_per_worker=1,
                processes=True,
                dashboard_address=":0",
                silence_logs=60,
            ) as cluster,
            Client(cluster) as client,
        ):
            quarantined = False
            while left and not quarantined:
                began = time.perf_counter()
                outcome = run(client, path, case := left.pop(0))
                quarantined = outcome.quarantined
                yield case, outcome, time.perf_counter() - began


def measure(bench: Bench) -> None:
    """Run all cases and print the matrix."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    wrong, astray, slow, todo = 0, 0, 0.0, cases(bench.quick)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.zarr"
        store = write_store(path)
        expected = {mode: plain(store, PROMPT, TOKENS, CHUNK, **given) for mode, given in SETTINGS.items()}
        for case, outcome, seconds in outcomes(path, todo):
            same = outcome.ids == expected[case.mode]
            wrong, astray = wrong + (not same), astray + bool(outcome.astray)
            slow = max(slow, seconds)
            verdict = "equal" if same else "DIFFERENT"
            where = f"{case.kind:10} stage {case.stage} {case.moment:8} {case.mode:8}"
            bench.say(
                f"{where} {verdict}{' ASTRAY: ' + outcome.astray if outcome.astray else ''}  {outcome.losses}"
            )
    bench.figure("cases", len(todo))
    bench.figure("different", wrong, equal=0)
    bench.figure("astray", astray, equal=0)
    bench.figure("longest_case_s", slow)


if __name__ == "__main__":
    main("kill_matrix", measure, __doc__)
