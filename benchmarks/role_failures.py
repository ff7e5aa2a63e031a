"""Whoever dies or freezes, in whatever role: the run completes with the right answer, or says why.

{primary, audit, witness, staging target} × {SIGKILL, SIGSTOP past the deadline}, and the driver killed in
the middle of a fit, which a second driver continues bit for bit from the checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from _bench import Bench, main
from distributed import Client, LocalCluster

from dask_sdc import Auditor, ClusterError, ShardError
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from dask_sdc.statistics import GaussianMixture, Moments, ShardInfo, tree_fold

SHARDS = 24
DEADLINE = 3.0
ALL = [(role, kind) for role in ("primary", "audit", "witness", "staging") for kind in ("killed", "frozen")]
QUICK = [("primary", "killed"), ("staging", "frozen")]


def data() -> list[np.ndarray]:
    """Return blocks of three clusters."""
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(m, 1.0, (800, 3)) for m in (-6, 0, 6)])
    rng.shuffle(x)
    return np.array_split(x, SHARDS)


def plan(role: str, kind: str) -> list[Fault]:
    """Return the faults of one case; witness and staging need a mismatch first."""
    wrong = Fault("one_bit", "compute", domain="0", role={"primary", "rerun"})
    if role in ("primary", "audit"):
        return [Fault(kind, "compute", role=role, times=1)]
    return [wrong, Fault(kind, "compute", role={"witness": "witness", "staging": "heal"}[role], times=1)]


def case(role: str, kind: str) -> tuple[str, object]:
    """Run one case on a cluster of its own; return how it ended and the answer."""
    with (
        LocalCluster(
            n_workers=4, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
        Auditor(client, audit_rate=0.5, seed=1, worker_timeout_s=DEADLINE) as auditor,
    ):
        client.register_plugin(FaultInjector(FaultPlan(plan(role, kind))))
        try:
            result = auditor.accumulate(Moments(), data())
        except (ShardError, ClusterError) as error:
            return f"{type(error).__name__}: {error}", None
        record = auditor.rounds[-1]
        return f"failed {record.failed}, suspects {record.suspects}, skipped {record.skipped}", result


DRIVER = """
import sys
sys.path.insert(0, {folder!r})
from role_failures import fit
if __name__ == "__main__":
    fit({checkpoint!r}, {kill_after})
"""


def fit(checkpoint: str, kill_after: int | None) -> object:
    """Fit a mixture; with ``kill_after``, die by SIGKILL after that many rounds."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
        Auditor(client, audit_rate=0.5, seed=1) as auditor,
    ):
        if kill_after is not None:
            receive = auditor.rounds

            class Deadly(list):  # type: ignore[type-arg]
                def append(self, item: object) -> None:
                    super().append(item)
                    if len(self) > kill_after:
                        os.kill(os.getpid(), signal.SIGKILL)

            auditor.rounds = Deadly(receive)
        return auditor.fit(GaussianMixture(3, seed=0), data(), max_iter=6, tol=0, checkpoint=checkpoint)


def driver_case(bench: Bench) -> bool:
    """Kill a driver in the middle of its fit and go on from the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(str(Path(folder) / "whole"), None)
        broken = str(Path(folder) / "broken")
        script = Path(folder) / "driver.py"
        script.write_text(
            DRIVER.format(folder=str(Path(__file__).parent), checkpoint=broken, kill_after=3), "utf-8"
        )
        died = subprocess.run([sys.executable, str(script)], check=False, capture_output=True).returncode
        rest = fit(broken, None)
    same = all(np.array_equal(whole.model[k], rest.model[k]) for k in whole.model)  # type: ignore[attr-defined]
    same &= whole.history == rest.history  # type: ignore[attr-defined]
    bench.say(f"driver    killed  exit {died}, continued to {'equal' if same else 'DIFFERENT'} bits")
    return same and died == -signal.SIGKILL


def measure(bench: Bench) -> None:
    """Run all cases."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    statistic, blocks = Moments(), data()
    states = [statistic.update(statistic.init(ShardInfo((3,), x.dtype, k)), x) for k, x in enumerate(blocks)]
    clean = vars(statistic.finalize(tree_fold(states, statistic.combine)))
    cases = wrong = 0
    for role, kind in QUICK if bench.quick else ALL:
        how, result = case(role, kind)
        same = result is not None and all(
            np.array_equal(clean[k], v, equal_nan=True) for k, v in vars(result).items()
        )
        cases += 1
        wrong += not same
        bench.say(f"{role:9} {kind:7} {'equal' if same else 'WRONG'}: {how}")
    cases += 1
    wrong += not driver_case(bench)
    bench.figure("cases", cases, equal=1 + len(QUICK if bench.quick else ALL))
    bench.figure("wrong", wrong, equal=0)


if __name__ == "__main__":
    main("role_failures", measure, __doc__)
