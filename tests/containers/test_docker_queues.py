"""Queues and lanes with containers: what an agent says of its provider, and tasks with images that join a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine import client
from runs_support import completions, events, statuses

from containers.runs_in_docker import assert_nothing_left, experiment
from sandbox_exec import runs, submission
from sandbox_exec.contracts import ProviderUse, Status
from sandbox_exec.coordinator import Coordinator, RunCallback
from sandbox_exec.errors import SandboxExecError
from sandbox_exec.schedule import retries


def says(**event: Any) -> str:
    return f"echo '{json.dumps(event)}' >$SANDBOX_EXEC_TRACE; "


def test_what_an_agent_says_of_its_provider_counts_in_a_container_too(
    tmp_path: Path, busybox_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RATE_LIMITED_ATTEMPTS", 1)
    monkeypatch.setattr(retries, "_jitter", lambda nth, seed: 0.0)
    texts = {
        "by-code": "exit 75",
        "by-event": says(type="rate_limited", retry_after_s=0.5) + "exit 3",
        "uses": says(type="usage", tokens=70, requests=2) + "exit 0",
    }
    tasks = [{"id": name, "input": name} for name in texts]
    cases = "; ".join(f"{name}) {text};" for name, text in texts.items())
    agent = f"""case $(sed 's/.*"input": "\\([a-z-]*\\)".*/\\1/' /in/task.json) in {cases}; esac"""
    one = experiment(
        tmp_path / "base",
        tasks,
        busybox_image,
        variants=[{"id": "v", "agent": {"command": ["sh", "-c", agent]}, "lane": "x", "tokens_per_trial": 10}],
        lanes={"x": {"rpm": 600, "tpm": 10_000, "adaptive": True, "max_concurrent": 4}},
        design={"max_concurrency": 1},
    )
    summary = runs.run(one, runs=tmp_path, run_id="r")
    found = {ended[-1].slot.task_id: ended[-1] for ended in completions(summary.folder).values()}
    assert {name: one.status for name, one in found.items()} == {
        "by-code": Status.RATE_LIMITED,
        "by-event": Status.RATE_LIMITED,
        "uses": Status.SUCCESS,
    }
    assert found["by-code"].retry_after_s is None
    assert (found["by-event"].retry_after_s, found["by-event"].provider) == (0.5, ProviderUse(turned_away=1))
    assert found["uses"].provider == ProviderUse(tokens=70, requests=2)
    lanes = runs.status_of(summary.folder).lanes
    assert lanes is not None
    assert lanes["x"]["turned_away"] == 2
    assert_nothing_left("r")


def test_tasks_that_join_a_run_bring_images_and_those_that_bring_none_there_is_are_refused(
    tmp_path: Path, busybox_image: str
) -> None:
    other = "sandbox-exec-test-joins:latest"
    engine = client()
    try:
        made = engine.create_container(busybox_image, command=["true"])
        engine.commit(made["Id"], repository="sandbox-exec-test-joins", tag="latest", changes=["ENV FRUIT=fig"])
        engine.remove_container(made["Id"])
        answers: list[Any] = []

        class Joins(RunCallback):
            def on_run_start(self, run: Coordinator) -> None:
                for row in (
                    {"id": "nowhere", "input": "true", "image": "sandbox-exec-test-nowhere:latest"},
                    {"id": "joins", "input": "test $FRUIT = fig", "image": other},
                ):
                    try:
                        answers.append(run.submit([row]).tasks)
                    except SandboxExecError as error:
                        answers.append(str(error))

        one = experiment(tmp_path / "base", [{"id": "a", "input": "test -z $FRUIT"}], busybox_image)
        summary = runs.run(one, runs=tmp_path, run_id="r", callbacks=[Joins()])
        refused, joined = answers
        assert "sandbox-exec-test-nowhere:latest" in refused
        assert joined == ("joins",)
        assert statuses(summary.folder) == [Status.SUCCESS] * 2
        assert submission.submit(summary.folder, [{"id": "later", "input": "test -n $FRUIT", "image": other}]).trials
        assert runs.continue_run(summary.folder).by_status == {Status.SUCCESS: 3}
        assert [event["trials"] for event in events(summary.folder, "submitted")] == [1, 1]
    finally:
        engine.remove_image(other, force=True)
        engine.close()
    assert_nothing_left("r")
