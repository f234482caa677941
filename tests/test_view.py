"""What an agent sees of the file system, of other processes and of the network."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support import PATIENCE_S, Meeting, Script

from sandbox_exec import Command, InvalidValue, Limits, Pool
from sandbox_exec.containment.view import View, build_view, can_reach, python_paths

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no agent loads this module, and pytest with it


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder that agents can look into if they are shown it: those of root have another uid."""
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def home(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's home, with something in it that is nobody's business."""
    home = tree / "home"
    home.mkdir()
    (home / "secret").write_text("hunter2")
    monkeypatch.setenv("HOME", str(home))
    assert Path.home() == home
    return home


def run(call: Any, *args: Any, **limits: Any) -> Any:
    with Pool(max_workers=1, limits=Limits(**limits)) as pool:
        return pool.submit(call, *args).result(PATIENCE_S).unwrap()


def shown(view: View) -> dict[str, str]:
    return {target: source for source, target in view.binds}


# --- which paths ---


def test_the_view_has_the_system_the_interpreter_and_its_environment() -> None:
    view = build_view((), ())
    paths = {*shown(view), *dict(view.links)}
    assert {"/usr", "/etc", "/bin"} <= paths
    for needed in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), os.path.dirname(pytest.__file__)):
        assert any(needed == path or needed.startswith(path + "/") for path in paths), needed


def test_a_readable_path_is_shown_where_it_is(tree: Path) -> None:
    folder, file = tree / "folder", tree / "file"
    folder.mkdir()
    file.write_text("x")
    view = shown(build_view([folder, file], ()))
    assert view[str(folder)] == str(folder)
    assert view[str(file)] == str(file)


def test_what_is_not_there_is_not_shown(tree: Path) -> None:
    assert str(tree / "nothing") not in shown(build_view([tree / "nothing"], ()))


def test_what_lies_below_what_is_shown_is_not_shown_twice(tree: Path) -> None:
    inner = tree / "a" / "b"
    inner.mkdir(parents=True)
    view = shown(build_view([inner, tree / "a", inner], ()))
    assert str(tree / "a") in view
    assert str(inner) not in view


def test_a_link_is_shown_with_what_it_leads_to(tree: Path) -> None:
    real, link = tree / "real", tree / "link"
    real.mkdir()
    link.symlink_to("real")
    view = shown(build_view([link], ()))
    assert view[str(link)] == str(real)
    assert view[str(real)] == str(real)


def test_a_link_in_a_folder_that_is_shown_leads_somewhere_if_it_was_named(tree: Path) -> None:
    (tree / "shown").mkdir()
    (tree / "real").mkdir()
    (tree / "shown" / "link").symlink_to(tree / "real")
    assert str(tree / "real") not in shown(build_view([tree / "shown"], ()))
    assert str(tree / "real") in shown(build_view([tree / "shown", tree / "shown" / "link"], ()))


def test_what_is_below_the_agents_own_places_is_shown_after_them(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "seen").mkdir()
    late = build_view([tree / "seen"], ()).late
    is_in_tmp = str(tree).startswith("/tmp/")
    assert (str(tree / "seen") in late) is is_in_tmp
    assert "/usr" not in late


def test_what_is_hidden_is_hidden_under_each_of_its_names(tree: Path) -> None:
    (tree / "real" / "secret").mkdir(parents=True)
    (tree / "link").symlink_to("real")
    for named in (tree / "real" / "secret", tree / "link" / "secret"):
        hidden = build_view([tree / "link"], [named]).hidden
        assert {str(tree / "real" / "secret"), str(tree / "link" / "secret")} <= set(hidden)


@pytest.mark.parametrize("broad", ["home", "above", "link", "/", "/tmp", "/var/tmp"])
def test_an_entry_of_sys_path_that_holds_too_much_is_left_out_with_a_warning(
    home: Path, broad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = home.parent / "link"
    link.symlink_to(home)
    path = {"home": str(home), "above": str(home.parent), "link": str(link)}.get(broad, broad)
    monkeypatch.setattr(sys, "path", [*sys.path, path])
    with pytest.warns(UserWarning, match="holds more than an agent may see") as caught:
        view = shown(build_view((), ()))
    assert path in str(caught[0].message)
    assert "readable" in str(caught[0].message)
    assert path not in view
    assert str(home) not in view


def test_the_home_of_the_account_counts_whatever_the_environment_says(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = pwd.getpwuid(os.geteuid()).pw_dir
    monkeypatch.setattr(sys, "path", [*sys.path, account])
    with pytest.warns(UserWarning, match="holds more than an agent may see"):
        assert account not in shown(build_view((), ()))


def test_an_ordinary_sys_path_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sys.prefix in python_paths()


def test_a_home_that_was_asked_for_is_shown(home: Path) -> None:
    assert str(home) in shown(build_view([home], ()))


@pytest.mark.parametrize("path", ["/", "/tmp", "/workspace", "/proc", "/dev", "/dev/shm"])
def test_a_place_that_is_the_agents_own_cannot_be_the_callers_too(path: str) -> None:
    with Pool(max_workers=1) as pool, pytest.raises(InvalidValue, match=f"readable.*{path}"):
        pool.submit(abs, 1, limits=Limits(readable=[path]))
    with pytest.raises(InvalidValue, match=f"readable.*{path}"):
        Pool(limits=Limits(readable=[path]))


def test_who_can_reach_a_path_depends_on_every_folder_above_it(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o711)
    stranger = 1_999_999_999
    assert can_reach(stranger, [str(inner)])
    (tmp_path / "outer").chmod(0o700)
    assert not can_reach(stranger, [str(inner)])


# --- what an agent sees of the file system ---


def test_the_system_is_read_only() -> None:
    def agent(paths: list[str]) -> list[str]:
        return [path for path in paths if not os.statvfs(path).f_flag & os.ST_RDONLY]

    paths = ["/", "/usr", "/etc", "/in", "/agent", sys.prefix, sys.base_prefix, os.path.dirname(pytest.__file__)]
    assert run(agent, paths) == []


def test_only_the_agents_own_places_can_be_written() -> None:
    def agent() -> list[str]:
        writable = []
        for place in ("/", "/usr", "/etc", "/run", "/dev", "/in", "/agent", "/tmp", "/workspace", "/out", "/dev/shm"):
            try:
                with open(f"{place}/probe", "w") as file:
                    file.write("x")
                writable.append(place)
            except OSError:
                pass
        return writable

    assert run(agent) == ["/tmp", "/workspace", "/out", "/dev/shm"]


def test_there_is_nothing_at_the_root_but_the_system_the_agents_places_and_the_way_to_its_python() -> None:
    def agent() -> list[list[str]]:
        return [
            os.listdir("/"),
            os.listdir("/run"),
            os.listdir("/tmp"),
            os.listdir("/var") if os.path.exists("/var") else [],
        ]

    root, in_run, in_tmp, in_var = run(agent)
    expected = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix", "proc", "dev", "run"}
    expected |= {"tmp", "workspace", "out", "in", "agent", ".scratch", ".files"}
    expected |= {path.split("/")[1] for path in shown(build_view((), ()))}
    assert set(root) <= expected
    assert in_run == ["trace"]
    assert in_tmp == [] or all(path.startswith("/tmp/") for path in python_paths() if path.split("/")[2] in in_tmp)
    assert in_var == []


def test_the_callers_home_is_not_there(home: Path) -> None:
    def agent(home: str) -> list[bool]:
        return [os.path.exists(home), os.path.exists(home + "/secret")]

    assert run(agent, str(home)) == [False, False]


def test_of_the_accounts_home_only_the_way_to_the_interpreter_is_there() -> None:
    def agent(home: str) -> list[str]:
        return os.listdir(home) if os.path.exists(home) else []

    account = pwd.getpwuid(os.geteuid()).pw_dir
    needed = {path[len(account) + 1 :].split("/")[0] for path in shown(build_view((), ())) if path.startswith(account)}
    assert set(run(agent, account)) <= needed


def test_a_module_in_the_home_can_be_imported_if_sys_path_says_so_and_what_is_beside_it_not_be_seen(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "project").mkdir()
    (home / "project" / "solver_in_the_home.py").write_text("def solve(x):\n    return x + 1\n")
    (home / "diary").write_text("dear diary")
    monkeypatch.syspath_prepend(str(home / "project"))

    def agent(home: str) -> list[Any]:
        import solver_in_the_home  # type: ignore[import-not-found]

        return [solver_in_the_home.solve(1), sorted(os.listdir(home))]

    assert run(agent, str(home)) == [2, ["project"]]


def test_a_virtual_environment_in_the_home_works_for_functions_and_for_commands(home: Path, tree: Path) -> None:
    venv = home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "only_in_the_venv.py").write_text("answer = 42\n")
    ours = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join([*ours, str(Path(__file__).parent.parent)]))
    (tree / "work").mkdir()
    with Script(
        tree / "work",
        """
        import sys
        from sandbox_exec import Command, Pool

        def agent():
            import only_in_the_venv
            return [only_in_the_venv.answer, sys.prefix]

        with Pool(1) as pool:
            print(pool.submit(agent).result().unwrap())
            program = "import only_in_the_venv, sys; print(only_in_the_venv.answer, sys.prefix)"
            outcome = pool.submit(Command(["python", "-c", program])).result()
            print(outcome.stdout, outcome.stderr)
        """,
        python=str(venv / "bin" / "python"),
    ) as script:
        code, stdout, stderr = script.end()
    assert (code, stderr) == (0, "")
    assert stdout.splitlines()[:2] == [f"[42, '{venv}']", f"42 {venv} "[:-1]]


def test_readable_paths_can_be_read_and_not_written(home: Path) -> None:
    data = home / "data"
    data.mkdir()
    (data / "rows").write_text("1 2 3")
    (data / "rows").chmod(0o666)
    single = home / "single"
    single.write_text("alone")

    def agent(data: str, single: str) -> list[Any]:
        seen: list[Any] = []
        for path in (f"{data}/rows", single):
            with open(path) as file:
                seen.append(file.read())
        try:
            with open(f"{data}/rows", "a"):
                seen.append("written")
        except OSError as error:
            seen.append(error.strerror)
        return [*seen, sorted(os.listdir(os.path.dirname(data)))]

    assert run(agent, str(data), str(single), readable=[data, single]) == [
        "1 2 3", "alone", "Read-only file system", ["data", "single"]
    ]  # fmt: skip


def test_hidden_paths_are_empty_whatever_else_is_readable(home: Path) -> None:
    for name in ("answers", "questions"):
        (home / "data" / name).mkdir(parents=True)
        (home / "data" / name / "rows").write_text(name)
    (home / "data" / "key").write_text("secret")
    (home / "link").symlink_to("data")

    def agent(roots: list[str]) -> list[Any]:
        seen: list[Any] = []
        for root in roots:
            with open(f"{root}/key") as key:
                seen.append([os.listdir(f"{root}/answers"), os.listdir(f"{root}/questions"), key.read()])
        return seen

    hidden = [home / "data" / "answers", home / "data" / "key"]
    roots = [str(home / "data"), str(home / "link")]
    for readable in ([home / "data", home / "link"], [home / "link"]):
        assert run(agent, roots, readable=readable, hidden=hidden) == [[[], ["rows"], ""]] * 2


def test_a_part_of_the_system_can_be_hidden() -> None:
    def agent() -> list[Any]:
        with open("/etc/passwd") as file:
            return [os.listdir("/usr/share"), len(file.read())]

    assert run(agent, hidden=["/usr/share", "/etc/passwd"]) == [[], 0]


def test_calls_with_other_paths_do_not_see_each_others(home: Path) -> None:
    for name in ("a", "b"):
        (home / name).mkdir()

    def agent(home: str) -> list[str]:
        return sorted(os.listdir(home)) if os.path.exists(home) else []

    with Pool(max_workers=1) as pool:
        for names in (["a"], ["b"], ["a", "b"], [], ["a"]):
            limits = Limits(readable=[home / name for name in names])
            assert pool.submit(agent, str(home), limits=limits).result(PATIENCE_S).unwrap() == names


# --- of others ---


def test_an_agent_sees_no_processes_but_its_own() -> None:
    def agent() -> list[int]:
        return sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())

    assert run(agent) == [1]  # its keeper, of which it can see no more than that it is there


def test_an_agent_sees_nothing_of_one_that_runs_beside_it(meeting: Meeting) -> None:
    def marks(meeting: Any) -> None:
        for place in ("/tmp", "/workspace", "/out", "/dev/shm"):
            with open(f"{place}/mark", "w") as file:
                file.write("x")
        meeting.announce("marked")
        meeting.wait()

    def looks() -> list[str]:
        return [place for place in ("/tmp", "/workspace", "/out", "/dev/shm") if "mark" in os.listdir(place)]

    with Pool(max_workers=2, limits=Limits(readable=[meeting.folder])) as pool:
        future = pool.submit(marks, meeting)
        meeting.expect("marked")
        assert pool.submit(looks).result(PATIENCE_S).unwrap() == []
        meeting.let_go()
        assert future.result(PATIENCE_S).ok


def test_an_agent_has_a_name_and_a_home_and_knows_no_other_user() -> None:
    def agent() -> list[Any]:
        import pwd

        names = sorted(entry.pw_name for entry in pwd.getpwall())
        return [pwd.getpwuid(os.getuid()).pw_name, os.path.expanduser("~"), set(names) <= {"agent", "nobody", "root"}]

    assert run(agent) == ["agent", "/tmp", True]
    assert run(os.uname)[1] == "sandbox"


def test_programs_that_ask_who_they_are_get_an_answer() -> None:
    with Pool(max_workers=1) as pool:
        assert pool.submit(Command(["id", "-un"])).result().stdout == "agent\n"


# --- the network ---


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connects(family: int, address: Any) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        try:
            client.connect(tuple(address) if isinstance(address, list) else address)
            return "connected"
        except OSError as error:
            return type(error).__name__


def test_an_agent_reaches_no_listener_of_the_machine(listener: socket.socket) -> None:
    assert connects(socket.AF_INET, listener.getsockname()) == "connected"
    assert run(connects, socket.AF_INET, listener.getsockname()) == "ConnectionRefusedError"


def test_an_agent_reaches_no_abstract_socket_of_the_machine() -> None:
    name = f"\0sandbox-exec-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert connects(socket.AF_UNIX, name) == "connected"
        assert run(connects, socket.AF_UNIX, name) == "ConnectionRefusedError"


def test_an_agent_has_a_loopback_of_its_own_and_nothing_else() -> None:
    def agent() -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname()) as client:
                client.sendall(b"hello")
            connection, _ = server.accept()
            with connection:
                heard = connection.recv(5).decode()
        return [heard, [name for _, name in socket.if_nameindex()]]

    assert run(agent) == ["hello", ["lo"]]


def test_an_agent_that_was_given_the_hosts_network_reaches_its_listeners(listener: socket.socket) -> None:
    assert run(connects, socket.AF_INET, listener.getsockname(), network="host") == "connected"


def test_calls_with_and_without_network_can_take_turns(listener: socket.socket) -> None:
    with Pool(max_workers=1) as pool:
        for network, answer in (("host", "connected"), ("none", "ConnectionRefusedError"), ("host", "connected")):
            limits = Limits.model_validate({"network": network})
            outcome = pool.submit(connects, socket.AF_INET, listener.getsockname(), limits=limits).result(PATIENCE_S)
            assert outcome.unwrap() == answer
            assert outcome.isolation is not None
            assert outcome.isolation.network == network
