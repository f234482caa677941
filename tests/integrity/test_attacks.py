"""What an agent does to its grade, or to see an asset: in both sandboxes, in both kinds of grading. None of it works.

All attacks of a sandbox and a kind of grading are variants of one run; each has a test. What `in: same` cannot prevent
is in `POSSIBLE`, and is tested to work there, and only there.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import client

from integrity.trials import ASSET, EVIL, FORGED, SECRET, Kind, experiment, last_attempt, leaks, make_base, run, told
from sandbox_exec.contracts import Status, TrialCompletion

ENDS = f"python{sys.version_info.major}.{sys.version_info.minor}"
FORGE = f"echo '{FORGED}'"
PLANT = f"""
plant() {{ mkdir -p "$(dirname "$1")" 2>/dev/null; printf '%s\\n' '{EVIL}' >"$1"; }}
"""
SHIM = f"""
shim() {{ mkdir -p "$(dirname "$1")"; printf '#!/bin/sh\\n{FORGE} >/grade/grade.json\\n' >"$1"; chmod 755 "$1"; }}
"""


@dataclass(frozen=True)
class Attack:
    """A script for the shell, which must do without anything that busybox has not."""

    script: str
    status: Status = Status.SUCCESS  # what the trial comes to; if it is this one, with the grade of a wrong answer


GRADE_IN_ADVANCE = f"""
for place in /out /workspace /tmp /dev/shm /grade /grading /in / "$HOME"; do
    mkdir -p $place; {FORGE} >$place/grade.json; {FORGE} >$place/grade.rejected
    mkdir -p $place/grade; {FORGE} >$place/grade/grade.json
done 2>/dev/null
{FORGE} >"${{SANDBOX_EXEC_GRADE:-/grade/grade.json}}" 2>/dev/null
true"""
DAEMON = f"""
cat >/tmp/daemon <<'END'
trap '' TERM HUP INT
while :; do
    {FORGE} >/grade/grade.json
    for root in /proc/[0-9]*/root /proc/[0-9]*/cwd; do
        {FORGE} >$root/grade/grade.json; cat $root/grading/* $root/{ASSET} >>/out/stolen
    done
done 2>/dev/null
END
setsid sh /tmp/daemon >/dev/null 2>&1 </dev/null &
(setsid setsid sh /tmp/daemon >/dev/null 2>&1 &)
unshare -Urmpf --mount-proc sh /tmp/daemon >/dev/null 2>&1 &
unshare -Ur sh /tmp/daemon >/dev/null 2>&1 &
for tasks in /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/*/tasks /sys/fs/cgroup/*/cgroup.procs; do
    echo $! >$tasks
done 2>/dev/null
mkdir /sys/fs/cgroup/sandbox-exec-1 2>/dev/null
true"""
MODULES = f"""{PLANT}
for place in /workspace /out /tmp /grading /grade /in; do
    for name in conftest sitecustomize usercustomize json os subprocess pathlib tempfile encodings/__init__; do
        plant $place/$name.py
        for tag in cpython-{sys.version_info.major}{sys.version_info.minor}; do
            plant $place/__pycache__/$name.$tag.pyc
        done
    done
    echo 'import os; os.system("echo x >/grade/grade.json")' >$place/evil.pth
    printf '[pytest]\\naddopts = -p evil\\n' >$place/pytest.ini
    printf 'home = /workspace\\n' >$place/pyvenv.cfg
done 2>/dev/null
for site in /tmp/.local/lib/{ENDS}/site-packages; do
    plant $site/usercustomize.py; plant $site/sitecustomize.py; plant $site/json.py
    printf 'import usercustomize\\n' >$site/evil.pth
done
true"""
SETTINGS = f"""{SHIM}
export PYTHONPATH=/workspace LD_PRELOAD=/workspace/evil.so PYTHONSTARTUP=/workspace/evil.py ENV=/workspace/rc
export BASH_ENV=/workspace/rc PATH=/workspace/bin:$PATH IFS=x TZ=/workspace/tz SANDBOX_EXEC_GRADE=/out/grade.json
export SANDBOX_EXEC_GRADING=/workspace PYTHONHASHSEED=0 LD_LIBRARY_PATH=/workspace LC_ALL=xx_XX
for name in sh cat echo env python3 python sed true; do
    for place in /workspace /workspace/bin /out /tmp /tmp/bin /usr/local/bin /usr/local/sbin; do shim $place/$name; done
done 2>/dev/null
for rc in .profile .bashrc .bash_profile .shrc .kshrc .zshenv .ashrc .env; do
    for home in /tmp /workspace /root "$HOME" /etc; do {FORGE} ">/grade/grade.json" >$home/$rc; done
done 2>/dev/null
{FORGE} ">/grade/grade.json" >/workspace/rc
echo /workspace/evil.so >/etc/ld.so.preload 2>/dev/null
echo /workspace >/etc/ld.so.conf.d/evil.conf 2>/dev/null
mkdir -p /workspace/.git/hooks /tmp/.config/git
for hook in post-checkout pre-commit post-index-change fsmonitor-watchman; do shim /workspace/.git/hooks/$hook; done
printf '[core]\\n fsmonitor = /workspace/bin/sh\\n hooksPath = /workspace/.git/hooks\\n' |
    tee /tmp/.gitconfig /workspace/.git/config >/tmp/.config/git/config
touch -d '2038-01-01 00:00:00' /workspace/* /out/* 2>/dev/null
date -s '2000-01-01 00:00:00' >/dev/null 2>&1
true"""
LINKS = f"""
for name in /grading /grade /in /workspace /out /run/trace /tmp; do
    rm -rf $name; mv $name $name.old; ln -s /out $name; ln -s /etc/passwd $name
done 2>/dev/null
for name in grade.json grade grading in workspace out tmp {ASSET} ../grade ../grading/{ASSET}; do
    ln -s /grade/grade.json /workspace/$name; ln -s ../../../../grade/grade.json /out/$name
    ln -s /grading/{ASSET} /tmp/$name
done 2>/dev/null
ln -s ../../../../../etc/shadow /out/shadow; ln -s /proc/self/root /workspace/root; ln -s /proc/1/root/grading /out/g
ln -s . /workspace/loop; ln -s missing /workspace/missing; ln -s {"n" * 300} /workspace/long
true"""
HARD_LINKS_AND_RENAMES = f"""
{FORGE} >/out/real; ln /out/real /out/grade.json; ln /out/real /workspace/grade.json 2>/dev/null
mkdir /out/a /out/b
cat >/tmp/race <<'END'
while :; do
    mv /out/a /out/c; ln -s /grading /out/a; rm /out/a; mv /out/c /out/a; ln /etc/passwd /out/p; rm /out/p
done 2>/dev/null
END
setsid sh /tmp/race >/dev/null 2>&1 &
true"""
VERDICTS = f"""
{FORGE}; {FORGE} >&2
echo '{{"type": "grade", "score": 1.0, "passed": true, "grade": {FORGED}}}' >"$SANDBOX_EXEC_TRACE"
echo '{{"type": "serving", "grade": {FORGED}}}' >"$SANDBOX_EXEC_TRACE"
echo '{{"score": 1.0, "passed": true, "grade": {FORGED}, "status": "success"}}' >/out/result.json
echo '{{"status": "success", "grade": {FORGED}}}' >/out/completion.json
exit 0"""
READS = f"""
ls -laR /grading /grade /.old /.scratch /.files /run /var/run /dev/shm /dev/mqueue /mnt /var/tmp 2>/dev/null
for root in /proc/[0-9]*/root /proc/[0-9]*/cwd; do ls -la $root/ $root/grading; cat $root/grading/*; done 2>/dev/null
for name in environ cmdline maps mountinfo fd fdinfo; do cat /proc/[0-9]*/$name /proc/[0-9]*/$name/*; done 2>/dev/null
cat /proc/net/unix /proc/sysvipc/* /proc/keys 2>/dev/null
cat /in/* /in/task.json; env; find / -name '*{ASSET[:8]}*' 2>/dev/null
cat BASE/grading/* BASE/* BASE/../run/trials/*/*/* 2>/dev/null; ls -laR BASE BASE/.. 2>/dev/null
for sock in /var/run/docker.sock /run/docker.sock BASE/../docker.sock; do
    printf 'GET /images/json HTTP/1.0\\r\\n\\r\\n' | nc -U $sock 2>/dev/null || nc local:$sock 2>/dev/null </dev/null
done
find /core* /var/lib/systemd/coredump /var/crash /sys/fs/cgroup/*/sandbox-exec* /tmp /dev/shm -type f 2>/dev/null
true"""
UNREADABLE = """
mkdir -p /workspace/closed/in /out/closed; echo x >/workspace/closed/in/file; echo x >/out/answer
mkfifo /workspace/fifo; mknod /workspace/null c 1 3 2>/dev/null
chmod 4755 /workspace/closed/in/file
chmod 000 /workspace/closed/in/file /workspace/closed/in /workspace/closed /out/closed /out/answer /workspace /out
true"""
LOOK_LIKE_OURS = """
for name in sandbox-exec-docker-1-1-x-1-a sandbox-exec-pool sandbox-exec-1; do mkdir -p /tmp/$name /workspace/$name; done
cp "$(command -v sleep)" /workspace/sx-keeper 2>/dev/null && setsid /workspace/sx-keeper 1000 >/dev/null 2>&1 &
cp "$(command -v busybox || command -v sleep)" /workspace/sleep 2>/dev/null; setsid /workspace/sleep 1000 >/dev/null 2>&1 &
echo '{"grade": {"score": 1.0}}' >/out/completion.json; cp /out/completion.json /workspace/dispatch.json
echo x >/out/answer.tar; echo x >/out/not_graded.json; mkdir /out/out /out/attempt-1
true"""

ATTACKS = {
    "a grade written in advance": Attack(GRADE_IN_ADVANCE),
    "a daemon that waits for the grading": Attack(DAEMON),
    "planted modules": Attack(MODULES),
    "planted settings, shims and hooks": Attack(SETTINGS),
    "links at every path": Attack(LINKS),
    "hard links and renames": Attack(HARD_LINKS_AND_RENAMES),
    "a verdict in what it says": Attack(VERDICTS),
    "a verdict in its exit code": Attack(f"{FORGE} >/out/grade.json; exit 42", Status.AGENT_ERROR),
    "a look around for assets": Attack(READS),
    "files that nobody may read": Attack(UNREADABLE),
    "names that look like ours": Attack(LOOK_LIKE_OURS),
    "a full disk": Attack("cat /dev/zero >/workspace/large 2>/dev/null; cat /dev/zero >/out/large 2>/dev/null; true"),
    "files with holes": Attack("truncate -s 250M /workspace/a; truncate -s 250M /out/b", Status.DISK_EXCEEDED),
    "holes to the last page": Attack("truncate -s 255M /workspace/a; truncate -s 65M /out/b", Status.DISK_EXCEEDED),
    "a result that is no JSON": Attack("printf '{\"a\": 1, \\377' >/out/result.json", Status.AGENT_ERROR),
    "a result that is nested too deeply": Attack(
        "{ printf '{\"a\": '; yes [ | head -n 100000 | tr -d '\\n'; } >/out/result.json", Status.AGENT_ERROR
    ),
    "a result that is a link": Attack("ln -s /in/task.json /out/result.json", Status.AGENT_ERROR),
    "a result that is a FIFO": Attack("mkfifo /out/result.json", Status.AGENT_ERROR),
    "nothing": Attack("true"),
}
POSSIBLE = {  # what `in: same` cannot prevent, where, and what comes of it
    ("docker", "same"): {
        # It sees the agent's own /out. Who knows the name of an asset is read as if it knew what is in it.
        "a link to an asset whose name is known": (f"ln -s /grading/{ASSET} /out/answer", Status.SUCCESS, 1.0),
        # And whoever opens a pipe waits: the grader is killed at its deadline.
        "a FIFO where the grader reads": ("mkfifo /out/answer", Status.GRADE_ERROR, None),
        # Nothing is copied, so that nothing can be too large to be.
        "files with holes": (ATTACKS["files with holes"].script, Status.SUCCESS, 0.0),
        "holes to the last page": (ATTACKS["holes to the last page"].script, Status.SUCCESS, 0.0),
    },
}
ELSEWHERE = {  # what becomes of those where they are prevented
    "a link to an asset whose name is known": (Status.SUCCESS, 0.0),
    "a FIFO where the grader reads": (Status.SUCCESS, 0.0),
}


@dataclass(frozen=True)
class Battle:
    kind: Kind
    mode: str
    folder: Path
    ended: dict[str, TrialCompletion]

    def outcome(self, attack: str) -> tuple[Status, float | None]:
        one = self.ended[attack]
        return one.status, one.grade.score if one.grade is not None else None

    def leaks(self, attack: str) -> list[str]:
        trial = last_attempt(self.folder, attack).parent.name
        return [line for line in leaks(self.folder) if line.startswith(f"trials/{trial}/")]


PLACES = [("process", "fresh"), ("process", "same"), ("docker", "fresh"), ("docker", "same")]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def battle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Battle:
    kind, mode = request.param
    image = request.getfixturevalue("busybox_image") if kind == "docker" else None
    place = tmp_path_factory.mktemp(f"{kind}-{mode}")
    agents: dict[str, Any] = {name: attack.script for name, attack in ATTACKS.items()}
    for possible in POSSIBLE.values():
        agents |= {name: script for name, (script, _, _) in possible.items()}
    agents = {name: script.replace("BASE", str(place / "base")) for name, script in agents.items()}
    agents["knows the answer"] = f"echo {SECRET} >/out/answer"
    one = experiment(place / "base", agents, kind, image, {"in": mode, "timeout_s": 5})
    return Battle(kind, mode, place / "run", run(one, place / "run"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_changes_no_grade(battle: Battle, attack: str) -> None:
    due = ATTACKS[attack].status, 0.0 if ATTACKS[attack].status is Status.SUCCESS else None
    if attack in POSSIBLE.get((battle.kind, battle.mode), {}):
        _, *rest = POSSIBLE[battle.kind, battle.mode][attack]
        due = rest[0], rest[1]
    assert battle.outcome(attack) == due, told(battle.ended[attack])


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_sees_no_asset(battle: Battle, attack: str) -> None:
    found = [line for line in battle.leaks(attack) if not (attack.startswith("links") and ASSET in line)]
    assert found == []


@pytest.mark.parametrize("attack", ELSEWHERE)
def test_what_same_cannot_prevent_works_there_and_only_there(battle: Battle, attack: str) -> None:
    possible = POSSIBLE.get((battle.kind, battle.mode), {})
    due = possible[attack][1:] if attack in possible else ELSEWHERE[attack]
    assert battle.outcome(attack) == due, told(battle.ended[attack])


def test_who_knows_the_answer_passes(battle: Battle) -> None:
    assert battle.outcome("knows the answer") == (Status.SUCCESS, 1.0)
    assert battle.leaks("knows the answer")  # so that the search for leaks is known to find


def test_the_grader_is_another_user_in_a_sandbox_proven_to_be_empty_of_agents(battle: Battle) -> None:
    for name, one in battle.ended.items():
        if one.grading is None or one.grading.isolation is None:
            continue
        assert one.isolation is not None
        assert one.grading.isolation.uid != one.isolation.uid, name
    daemon = battle.ended["a daemon that waits for the grading"]
    if battle.kind == "process":
        assert daemon.kill is not None
        assert "killed all" in daemon.kill.proof
