"""The same experiment gives the same history, byte for byte, at any concurrency."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
from runs_support import Script, children, history_of, in_children, reap_orphans, run_local, run_scripted, varied

from sandbox_exec.contracts import Slot, Status, TrialDispatch
from sandbox_exec.coordinator import Coordinator, RunCallback, RunEnd
from sandbox_exec.testing import Bells, Play

AT_ONCE = (1, 2, 8, 32)


class Most(RunCallback):
    """How many trials were under way at once."""

    most = 0

    def on_run_start(self, run: Coordinator) -> None:
        self._run = run

    def on_trial_selected(self, slot: Slot, attempt: int) -> None:
        self.most = max(self.most, len(self._run.board.in_flight))


def test_real_trials_give_the_same_history_at_any_concurrency(tmp_path: Path) -> None:
    ones = {at_once: varied(tmp_path / "base", 11, 17, max_concurrency=at_once) for at_once in AT_ONCE}
    known = children()

    def run(at_once: int) -> None:
        seen = Most()
        assert run_local(tmp_path / f"run-{at_once}", ones[at_once], callbacks=[seen]) == RunEnd("completed")
        (tmp_path / f"most-{at_once}").write_text(str(seen.most))

    assert in_children([partial(run, at_once) for at_once in AT_ONCE]) == [0] * len(AT_ONCE)
    reap_orphans(known)
    found = {at_once: history_of(tmp_path / f"run-{at_once}") for at_once in AT_ONCE}
    most = {at_once: int((tmp_path / f"most-{at_once}").read_text()) for at_once in AT_ONCE}
    assert found[2] == found[8] == found[32] == found[1]
    assert (most[1], most[2], most[8]) == (1, 2, 8)
    assert most[32] > 8
    lines = [json.loads(line) for line in found[1]]
    assert {"success", "agent_error", "task_timeout", "skipped"} <= {line["status"] for line in lines}
    assert {1, 2, 3} <= {len(line["attempts"]) for line in lines}
    assert {line["error_type"] for line in lines} >= {"KeyError", "RuntimeError", "Skipped"}
    assert all(line["result_digest"] for line in lines if line["status"] == "success")


def fates(seed: int) -> Script:
    """How an attempt ends is the trial's own; what is heard of it when, and what is lost, is the seed's."""

    def script(dispatch: TrialDispatch) -> Play:
        own, other = random.Random(dispatch.trial_id), random.Random(f"{seed} {dispatch.trial_id} {dispatch.attempt}")
        bells: Bells = (("started", other.randrange(5)), ("finished", other.randrange(9)))
        if other.random() < 0.1:
            return Play(None, bells=(("lost", other.randrange(5)),))
        status = own.choice([Status.SUCCESS, Status.SUCCESS, Status.AGENT_ERROR, Status.TASK_TIMEOUT])
        if dispatch.variant.id == "weak":
            status = Status.AGENT_ERROR
        return Play(status, result_sha256=f"{dispatch.limits.timeout_s} {dispatch.seed}", bells=bells, early=False)

    return script


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_heard_when_the_history_is_the_same_at_any_concurrency(tmp_path: Path, seed: int) -> None:
    found = []
    for at_once in AT_ONCE:
        one = varied(tmp_path / "base", seed, 30, max_concurrency=at_once, infra_retries=50)
        folder = tmp_path / f"run-{at_once}"
        end, _ = run_scripted(folder, one, fates(seed + at_once), capacity=at_once, order=random.Random(seed))
        assert end == RunEnd("completed")
        found.append(history_of(folder))
    assert all(one == found[0] for one in found)
