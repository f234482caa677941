"""What an agent does to its grade, or to see an asset: in both sandboxes, in both kinds of grading. None of it works.

All attacks of a sandbox and a kind of grading are variants of one run; each has a test. What `in: same` cannot prevent
is in `POSSIBLE`, and is tested to work there, and only there.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integrity.trials import ASSET, EVIL, FORGED, SECRET, Kind, experiment, last_attempt, leaks, make_base, run, told
from sandbox_exec.contracts import Status, TrialCompletion
from sandbox_exec.errors import InvalidExperiment

ENDS = f"python{sys.version_info.major}.{sys.version_info.minor}"
FORGE = f"echo '{FORGED}'"
PLANT = f"""
plant() {{ mkdir -p "$(dirname "$1")" 2>/dev/null; printf '%s\\n' '{EVIL}' >"$1"; }}
"""
SHIM = f"""
evil() {{ cat <<'END'
#!/bin/busybox sh
{FORGE} >/grade/grade.json
exit 0
END
}}
shim() {{ mkdir -p "$(dirname "$1")"; evil >"$1"; chmod 755 "$1"; }}
"""


@dataclass(frozen=True)
class Attack:
    """A script for the shell, which must do without anything that busybox has not."""

    script: str
    status: Status = Status.SUCCESS  # what the trial comes to; if it is this one, with the grade of a wrong answer
    in_same: bool = True  # whether it is another thing there


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
    for home in /tmp /workspace /root "$HOME" /etc; do evil >$home/$rc; done
done 2>/dev/null
evil >/workspace/rc
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
for name in environ cmdline maps mountinfo; do cat /proc/[0-9]*/$name; done 2>/dev/null
ls -la /proc/[0-9]*/fd 2>/dev/null
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
for name in sandbox-exec-docker-1-1-x-1-a sandbox-exec-1; do mkdir -p /tmp/$name /workspace/$name; done
cp "$(command -v sleep)" /workspace/sx-keeper 2>/dev/null && setsid /workspace/sx-keeper 1000 >/dev/null 2>&1 &
cp "$(command -v busybox)" /workspace/sleep 2>/dev/null; setsid /workspace/sleep 1000 >/dev/null 2>&1 &
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
    "a result that is no JSON": Attack("printf '{\"a\": 1, \\377' >/out/result.json", Status.AGENT_ERROR, False),
    "a result that is nested too deeply": Attack(
        "{ printf '{\"a\": '; yes [ | head -n 100000 | tr -d '\\n'; } >/out/result.json", Status.AGENT_ERROR, False
    ),
    "a result that is a link": Attack("ln -s /in/task.json /out/result.json", Status.AGENT_ERROR, False),
    "a result that is a FIFO": Attack("mkfifo /out/result.json", Status.AGENT_ERROR, False),
    "nothing": Attack("true"),
}
POSSIBLE: dict[
    tuple[str, str], dict[str, tuple[str, Status, float | None]]
] = {  # what `in: same` cannot prevent, where, and what comes of it
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
ELSEWHERE: dict[str, tuple[Status, float | None]] = {  # what becomes of those where they are prevented
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
    fought = {name: attack for name, attack in ATTACKS.items() if mode == "fresh" or attack.in_same}
    agents: dict[str, Any] = {name: attack.script for name, attack in fought.items()}
    for possible in POSSIBLE.values():
        agents |= {name: script for name, (script, _, _) in possible.items()}
    agents = {name: script.replace("BASE", str(place / "base")) for name, script in agents.items()}
    agents["knows the answer"] = f"echo {SECRET} >/out/answer"
    one = experiment(place / "base", agents, kind, image, {"in": mode, "timeout_s": 3})
    return Battle(kind, mode, place / "run", run(one, place / "run"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_changes_no_grade_and_sees_no_asset(battle: Battle, attack: str) -> None:
    if attack not in battle.ended:
        assert battle.mode == "same"
        assert not ATTACKS[attack].in_same
        return
    due = ATTACKS[attack].status, 0.0 if ATTACKS[attack].status is Status.SUCCESS else None
    possible = POSSIBLE.get((battle.kind, battle.mode), {})
    if attack in possible:
        _, status, score = possible[attack]
        due = status, score
    assert battle.outcome(attack) == due, told(battle.ended[attack])
    # Who knows the name of an asset can name its links so.
    own = ("answer.tar:tmp/daemon",)  # its own script, which it ran from there
    found = [line for line in battle.leaks(attack) if attack != "links at every path" or SECRET in line]
    assert [line for line in found if not any(name in line for name in own)] == []


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


# --- agents that are root ---

TAKE_PLACES = """
for name in /grading /grade; do rm -rf $name; ln -s /workspace $name; done
mkdir -p /workspace/grade /out/grading; echo x >/workspace/grade.json
mv /run /run.old; ln -s /workspace /run
echo evil >/out/answer
"""
POISON = f"""{SHIM}
evil >/out/evil
for name in sh cat; do rm /bin/$name; cp /out/evil /bin/$name; chmod 755 /bin/$name; done
"""
ROOT = {"takes our places": TAKE_PLACES, "poisons the shell": POISON, "nothing": "true"}


@pytest.mark.parametrize("mode", ["fresh", "same"])
def test_a_poisoned_system_forges_a_grade_in_same_and_only_there(tmp_path: Path, busybox_image: str, mode: str) -> None:
    one = experiment(tmp_path / "base", ROOT, "docker", busybox_image, {"in": mode}, sandbox={"user": "root"})
    ended = run(one, tmp_path / "run")
    scores = {name: end.grade.score if end.grade else None for name, end in ended.items()}
    poisoned = 1.0 if mode == "same" else 0.0
    assert scores == {"takes our places": 0.0, "poisons the shell": poisoned, "nothing": 0.0}, [
        told(end) for end in ended.values()
    ]
    assert leaks(tmp_path / "run") == []


def test_no_image_is_left_of_a_grading_in_same(tmp_path: Path, busybox_image: str, engine: Any) -> None:
    before = {image["Id"] for image in engine.images(all=True)}
    one = experiment(tmp_path / "base", {"a": "true"}, "docker", busybox_image, {"in": "same"})
    run(one, tmp_path / "run")
    labels = {"label": f"sandbox-exec.run={(tmp_path / 'run').name}"}
    left = [image for image in engine.images(all=True, filters=labels) if image["Id"] not in before]
    assert left == []


# --- what an agent is shown of the experiment's folder ---

SEEKER = """
import os


def main(task):
    found = {}
    for top in %r:
        for folder, folders, files in os.walk(top):
            for name in files:
                try:
                    with open(os.path.join(folder, name), "rb") as file:
                        found[os.path.join(folder, name)] = file.read(100_000).decode("latin-1")
                except OSError as error:
                    found[os.path.join(folder, name)] = str(error)
    return {"found": found}
"""
GRADER = f"""
SECRET = "{SECRET}"


def grade(task):
    return {{"score": 0.0}}
"""


def make_seeker(base: Path, *more: str) -> None:
    make_base(base)
    (base / "agent.py").write_text(SEEKER % ([str(base), *more],))
    (base / "shown.txt").write_text("for everybody")
    (base / "grader.py").write_text(GRADER)
    cached = base / "__pycache__"
    cached.mkdir()
    (cached / f"grader.{sys.implementation.cache_tag}.pyc").write_text(SECRET)


def test_a_function_with_the_experiments_folder_on_its_path_sees_nothing_of_the_grading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    make_seeker(base)
    monkeypatch.syspath_prepend(str(base))
    agents = {"a": {"python": "agent:main"}}
    one = experiment(base, agents, grading={"python": "grader:grade"}, sandbox={"readable": ["."]})
    ended = run(one, tmp_path / "run")
    assert ended["a"].grade is not None, told(ended["a"])
    assert "for everybody" in (last_attempt(tmp_path / "run", "a") / "result.json").read_text()
    assert leaks(tmp_path / "run") == []


def test_what_is_readable_in_a_container_may_not_hold_assets(tmp_path: Path, busybox_image: str) -> None:
    one = experiment(tmp_path / "base", {"a": "true"}, "docker", busybox_image, sandbox={"readable": ["."]})
    with pytest.raises(InvalidExperiment, match=r"sandbox\.readable: .* holds .*which no agent may see"):
        run(one, tmp_path / "run")


@pytest.mark.parametrize("kind", ["process", "docker"])
def test_a_workspace_may_not_hold_assets(tmp_path: Path, kind: Kind, request: pytest.FixtureRequest) -> None:
    image = request.getfixturevalue("busybox_image") if kind == "docker" else None
    tasks = [{"id": "t", "input": {}, "workspace": "."}]
    one = experiment(tmp_path / "base", {"a": "ls -laR /workspace; true"}, kind, image, tasks=tasks)
    with pytest.raises(InvalidExperiment, match=r"workspace '.' holds .* belongs to the grading"):
        run(one, tmp_path / "run")


def test_an_agent_does_not_see_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    make_seeker(base)
    monkeypatch.syspath_prepend(str(base))
    agents: dict[str, Any] = {"knows": f"echo {SECRET} >/out/answer", "seeks": {"python": "agent:main"}}
    one = experiment(base, agents, design={"max_concurrency": 1})
    run(one, base / "runs" / "one")
    seen = (last_attempt(base / "runs" / "one", "seeks") / "result.json").read_text()
    assert f"{base}/shown.txt" in seen
    assert f"{base}/runs/one/" not in seen


def test_what_an_agent_left_in_tmp_is_no_home_of_the_graders_in_same(tmp_path: Path) -> None:
    interpreter = os.path.realpath(sys.executable)  # not that of a virtual environment, which has no user's site
    site = sysconfig.get_path("purelib", "posix_user", vars={"userbase": "/tmp/.local"})
    agents = {"a": f"{PLANT} plant {site}/usercustomize.py; plant {site}/sitecustomize.py; true"}
    grading = {"in": "same", "command": [interpreter, "grade.py"]}
    ended = run(experiment(tmp_path / "base", agents, grading=grading), tmp_path / "run")
    assert ended["a"].grade is not None, told(ended["a"])
    assert ended["a"].grade.score == 0.0


# --- one trial and the next ---


@pytest.mark.parametrize("kind", ["process", "docker"])
def test_what_could_not_be_graded_is_not_seen_by_the_next_grader(
    tmp_path: Path, kind: Kind, request: pytest.FixtureRequest
) -> None:
    """The copies of the first fail halfway; the second leaves nothing, so that whatever is there is the first's."""
    image = request.getfixturevalue("busybox_image") if kind == "docker" else None
    agents = {
        "first": f"echo {SECRET} >/workspace/answer; truncate -s 250M /workspace/a; truncate -s 250M /out/b",
        "second": "true",
    }
    look = 'echo "{\\"score\\": $(cat /workspace/* /out/* 2>/dev/null | wc -c)}" >$SANDBOX_EXEC_GRADE'
    grading = {"command": ["sh", "-c", look]}
    one = experiment(tmp_path / "base", agents, kind, image, grading, design={"max_concurrency": 1})
    ended = run(one, tmp_path / "run")
    assert ended["first"].status is Status.DISK_EXCEEDED
    assert ended["second"].grade is not None, told(ended["second"])
    assert ended["second"].grade.score == 0


@pytest.mark.parametrize("kind", ["process", "docker"])
def test_assets_are_seen_by_the_grader_whatever_their_modes_are(
    tmp_path: Path, kind: Kind, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue("busybox_image") if kind == "docker" else None
    base = tmp_path / "base"
    make_base(base)
    for name in ("closed folder", "closed file", "one file"):
        (base / name).mkdir()
        (base / name / ASSET).write_text(SECRET)
    (base / "closed folder").chmod(0o700)
    (base / "closed file" / ASSET).chmod(0o600)
    assets = {"closed folder": "closed folder", "closed file": "closed file", "one file": f"one file/{ASSET}"}
    tasks = [{"id": name, "input": {}, "grading": {"assets": path}} for name, path in assets.items()]
    one = experiment(base, {"a": "true"}, kind, image, {"command": ["sh", "-c", SCORE]}, tasks=tasks)
    ended = run(one, tmp_path / "run")
    scores = {name: end.grade.score if end.grade else None for name, end in ended.items()}
    assert scores == {f"a/{name}": len(SECRET) for name in assets}, [told(end) for end in ended.values()]


SCORE = f'echo "{{\\"score\\": $(cat $SANDBOX_EXEC_GRADING/{ASSET} | wc -c)}}" >$SANDBOX_EXEC_GRADE'
