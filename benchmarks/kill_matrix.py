"""Every kind of loss of every stage at every moment: the tokens are those of an unfailed run.

{killed, frozen, failing, message lost} × {each stage} × {prefill, first, middle and last token, during the
replay}, greedy and sampled, on a small random model in three stages on processes of their own. Each case runs
on the same cluster, whose nannies start a new worker for each that was lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from _bench import Bench, main
from _stages import plain, write_store
from distributed import Client, LocalCluster

from dask_sdc.exceptions import GenerationInterrupted
from dask_sdc.faults.stages import StageFault, arm_replay_fault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline

STAGES, WORKERS, TOKENS, CHUNK, TIMEOUT = 3, 6, 24, 16, 2.0
PROMPT = tuple((37 * k + 11) % 512 for k in range(40))
#: Chunks of the prefill, and so the step of the first decoded token.
PREFILL = 3
MOMENTS = {"prefill": 1, "first": PREFILL, "middle": PREFILL + 11, "last": PREFILL + TOKENS - 2}
KINDS = ("kill", "freeze", "raise", "drop")
SETTINGS = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 5}}


@contextlib.contextmanager
def pipeline(client: Client, path: Path) -> Iterator[Pipeline]:
    """Start a pipeline; whoever froze in it is killed at the end, so that its nanny starts another."""
    client.wait_for_workers(WORKERS, timeout=60)
    pids = client.run(os.getpid)
    with Pipeline(client, path, stages=STAGES, spares=2, timeout=TIMEOUT, prefill_chunk=CHUNK) as running:
        yield running
    lost = [address for address, pid in pids.items() if not alive(pid)]
    for address in lost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[address], signal.SIGKILL)
    while set(lost) & set(client.scheduler_info(n_workers=-1)["workers"]):
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Say whether a process is there and not stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ"
    return False


def case(
    client: Client, path: Path, kind: str, stage: int, moment: str, mode: str
) -> tuple[str, tuple[int, ...], bool]:
    """Run one case; return what was lost, the tokens, and whether nobody else was replaced."""
    with pipeline(client, path) as running:
        before = running.workers
        if moment == "replay":
            arm_stage_fault(running, StageFault("kill", stage, MOMENTS["middle"]))
            arm_replay_fault(running, running.spares[0], kind)
        else:
            arm_stage_fault(running, StageFault(kind, stage, MOMENTS[moment]))
        try:
            ids = running.generate(PROMPT, TOKENS, stop=[], **SETTINGS[mode]).ids
        except GenerationInterrupted as error:
            return f"{type(error).__name__}: {error}", tuple(error.committed), False
        losses = "; ".join(str(loss) for report in running.recoveries for loss in report.losses)
        kept = [k for k in range(STAGES) if k != stage and running.workers[k] != before[k]]
    return losses, ids, not kept


def cases(quick: bool) -> list[tuple[str, int, str, str]]:
    """Return kind, stage, moment and mode of every case."""
    everything = [
        (kind, stage, moment, mode)
        for kind, stage, moment, mode in product(KINDS, range(STAGES), [*MOMENTS, "replay"], SETTINGS)
        if not (kind == "drop" and stage == STAGES - 1)
        and not (moment == "replay" and kind in ("raise", "drop"))
    ]
    if not quick:
        return everything
    return [("kill", 0, "middle", "greedy"), ("freeze", 1, "first", "sampled"), ("drop", 0, "last", "greedy")]


def measure(bench: Bench) -> None:
    """Run all cases and print the matrix."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    wrong, astray, slow, todo = 0, 0, 0.0, cases(bench.quick)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=60
        ) as cluster,
        Client(cluster) as client,
    ):
        path = Path(folder) / "model.zarr"
        store = write_store(path)
        expected = {mode: plain(store, PROMPT, TOKENS, CHUNK, **given) for mode, given in SETTINGS.items()}
        for kind, stage, moment, mode in todo:
            began = time.perf_counter()
            losses, ids, alone = case(client, path, kind, stage, moment, mode)
            same = ids == expected[mode]
            wrong, astray = wrong + (not same), astray + (not alone)
            slow = max(slow, time.perf_counter() - began)
            verdict = "equal" if same else "DIFFERENT"
            bench.say(
                f"{kind:7} stage {stage} {moment:8} {mode:8} {verdict}{'' if alone else ' ASTRAY'}  {losses}"
            )
    bench.figure("cases", len(todo))
    bench.figure("different", wrong, equal=0)
    bench.figure("others_replaced", astray, equal=0)
    bench.figure("longest_case_s", slow)


if __name__ == "__main__":
    main("kill_matrix", measure, __doc__)
