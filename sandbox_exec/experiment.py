"""An experiment from files or from plain data, the digests of what it was made of, and what changed since.

A file is read as YAML of the safe kind: maps, lists, text, numbers, booleans and null, anchors and merge keys.
Keys are text as they stand there, and so are dates. Everything wrong is told at once, with file and line.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import cloudpickle
import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from sandbox_exec.contracts.experiment import (
    Experiment,
    Fault,
    GradingSettings,
    Loc,
    faults_of,
    id_faults,
    path_text,
    shown,
    told,
)
from sandbox_exec.contracts.words import AgentSpec, Task
from sandbox_exec.errors import InvalidExperiment, InvalidValue
from sandbox_exec.units import MIB, format_bytes

MAX_YAML_CHARS: Final = MIB  # of the file, and of what its aliases expand to; parsing takes seconds for each

MISSING: Final = "missing"  # instead of a digest: so a file that is gone is told like any other change

_MAX_NUMBER_CHARS: Final = 400  # what a float can need; the time to read a number grows with the square
_TAG: Final = "tag:yaml.org,2002:"
_AS_TEXT: Final = {_TAG + name for name in ("str", "timestamp", "value", "merge")}
_AS_VALUE: Final = {_TAG + name for name in ("null", "bool", "int", "float")}


def load_experiment(path: str | os.PathLike[str]) -> Experiment:
    """Return the experiment in a YAML file. Raises `InvalidExperiment` with all that is wrong with it."""
    file = Path(path)
    origin = _Origin(file)
    data = _YamlReader(origin).read(_text_of(origin))
    return _build(data, Path(os.path.abspath(file)).parent, origin)


def load_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """Return the tasks in a JSONL file. Raises `InvalidExperiment` with all that is wrong with them."""
    origin = _Origin(None)
    origin.tasks_file = Path(path)
    tasks = []
    for idx, row in enumerate(_read_rows(origin)):
        try:
            tasks.append(Task.model_validate(row))
        except ValidationError as error:
            for fault in faults_of(error, ("tasks", idx)):
                origin.add(fault)
    if origin.problems:
        origin.refuse()
    return tasks


def load_grading(path: str | os.PathLike[str]) -> GradingSettings:
    """Return the grading in a YAML file: a mapping as the experiment's `grading`, or a mapping that has one.

    Paths in it are relative to the file. Raises `InvalidExperiment` with what is wrong with it.
    """
    origin = _Origin(Path(path))
    data = _YamlReader(origin).read(_text_of(origin))
    if isinstance(data, Mapping) and isinstance(data.get("grading"), Mapping):
        data = data["grading"]
    try:
        return GradingSettings.model_validate(data)
    except ValidationError as error:
        raise InvalidExperiment(told([f"{path}: {fault}" for fault in faults_of(error, ("grading",))])) from error


def experiment_from(data: Mapping[str, Any], base: str | os.PathLike[str] = ".") -> Experiment:
    """Return the experiment in plain data of the form that a file has; an agent may also be {"function": f}.

    Raises `InvalidExperiment` with all that is wrong with it.
    """
    return _build(data, Path(os.path.abspath(base)), _Origin(None))


def check_files(experiment: Experiment) -> None:
    """Raise `InvalidExperiment` if files or folders that the experiment names are not there."""
    faults = [str(fault) for fault in _file_faults(experiment.model_dump(), experiment.base)]
    if faults:
        raise InvalidExperiment(told(faults))


def freeze_functions(experiment: Experiment) -> tuple[Experiment, dict[str, bytes]]:
    """Return the experiment with the digest of its pickle for each callable, and the pickles by their digests.

    A function that can be imported is pickled as its name: its digest does not see that its code changed. One
    of a script that holds a set of text has another pickle, and so another digest, in each process.
    """
    pickles: dict[str, bytes] = {}

    def freeze(function: Any, of: str) -> str:
        try:
            payload: bytes = cloudpickle.dumps(function)
        except Exception as error:  # whatever the callable holds may fail in its own way
            raise InvalidExperiment(f"{of} cannot be pickled: {error}") from error
        digest = _sha256(payload)
        pickles[digest] = payload
        return digest

    variants = []
    for variant in experiment.variants:
        function = variant.agent.function
        if function is not None and not isinstance(function, str):
            digest = freeze(function, f"the agent of variant {variant.id!r}")
            variant = variant.model_copy(update={"agent": AgentSpec(function=digest)})
        variants.append(variant)
    grading = experiment.grading
    if grading is not None and grading.function is not None and not isinstance(grading.function, str):
        grading = grading.model_copy(update={"function": freeze(grading.function, "the grader")})
    return experiment.model_copy(update={"variants": tuple(variants), "grading": grading}), pickles


def input_digests(experiment: Experiment) -> dict[str, str]:
    """Return the digest of each input: what the experiment says, and every file and folder that it names.

    Agents' files are those that commands name as arguments and the modules of Python agents, if they are in
    the experiment's folder; what these load in turn is not seen. `max_concurrency` is no input: it changes
    how fast a run is, not what comes out.
    """
    frozen, _ = freeze_functions(experiment)
    said = frozen.model_dump(mode="json", exclude={"base", "sources"}, exclude_defaults=True)
    said.get("design", {}).pop("max_concurrency", None)
    digests = {f"variant {one['id']!r}": json_digest(one) for one in said["variants"]}
    said["variants"] = [one["id"] for one in said["variants"]]  # their order is the schedule's
    for name in ("name", "seed", "tasks", "variants", "design", "sandbox", "grading"):
        digests[f"the experiment's {name}"] = json_digest(said.get(name) or None)
    return digests | file_digests(frozen)


def file_digests(experiment: Experiment) -> dict[str, str]:
    """Return the digest of every file and folder that the experiment names."""
    paths = sorted({*_input_files(experiment)})
    return {_relative(path, experiment.base): path_digest(path) for path in paths}


def changed_inputs(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return what is different between two results of `input_digests`, in words; empty if nothing is."""
    changes = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, MISSING), new.get(name, MISSING)
        if before != after:
            how = "is new" if before == MISSING else "is gone" if after == MISSING else "has changed"
            changes.append(f"{name} {how}")
    return changes


# Reading


class _Problem(NamedTuple):
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return place + self.text


class _Origin:
    """Where the values of an experiment stood, and what is wrong with them."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.lines: dict[Loc, int] = {}
        self.tasks_file: Path | None = None
        self.row_lines: list[int] = []
        self.problems: list[_Problem] = []
        self.lost: set[Loc] = set()  # values that could not be read: that they are missing is no news

    def add(self, fault: Fault, line: int | None = None) -> None:
        """Note what is wrong. The line is looked up unless given."""
        loc = fault.loc
        if self._is_row(loc):
            inner = Fault(loc[2:], fault.text)
            self.problems.append(_Problem(str(self.tasks_file), self._line(loc), str(inner)))
        else:
            self.problems.append(_Problem(str(self.file or ""), line or self._line(loc), str(fault)))

    def add_row(self, line: int, text: str) -> None:
        """Note what is wrong with a row of the tasks' file that is no task at all."""
        self.problems.append(_Problem(str(self.tasks_file), line, text))

    def name_of(self, loc: Loc) -> str:
        """Where a value is, for a message about another one."""
        if self._is_row(loc):
            return f"line {self._line(loc)}"
        return f"{path_text(loc)} (line {self._line(loc)})" if self.file else path_text(loc)

    def refuse(self) -> NoReturn:
        """Raise with all that was noted, in the order of the files."""
        main = str(self.file or "")
        ordered = sorted(self.problems, key=lambda problem: (problem.file != main, problem.line))
        raise InvalidExperiment(told([*dict.fromkeys(str(problem) for problem in ordered)]))

    def fail(self, text: str, line: int = 0) -> NoReturn:
        """Refuse for something that leaves nothing else to look at."""
        self.problems.append(_Problem(str(self.file or ""), line, text))
        self.refuse()

    def _is_row(self, loc: Loc) -> bool:
        return self.tasks_file is not None and loc[:1] == ("tasks",) and len(loc) > 1

    def _line(self, loc: Loc) -> int:
        if self._is_row(loc):
            return self.row_lines[int(loc[1])]
        prefixes = (loc[:size] for size in range(len(loc), 0, -1))
        found = (self.lines[prefix] for prefix in prefixes if prefix in self.lines)
        return next(found, 1 if self.lines else 0)


def _build(data: Any, base: Path, origin: _Origin) -> Experiment:
    if not isinstance(data, Mapping):
        origin.add(Fault((), f"an experiment is a mapping with name, tasks and variants; found {shown(data)}"))
        origin.refuse()
    fields = dict(data)
    for name in [name for name in fields if not isinstance(name, str) or name in ("base", "sources")]:
        origin.add(Fault((name,), "unknown field"))
        del fields[name]
    sources = [os.path.abspath(origin.file)] if origin.file else []
    tasks, noted = fields.get("tasks"), len(origin.problems)
    if isinstance(tasks, str | os.PathLike):
        origin.tasks_file = (origin.file.parent if origin.file else base) / tasks
        fields["tasks"] = _read_rows(origin)
        sources += [os.path.join(base, tasks)] if fields["tasks"] else []
    elif "tasks" in fields and not isinstance(tasks, list | tuple):
        origin.add(Fault(("tasks",), f"should be the path of a JSONL file, or a list; found {shown(tasks)}"))
        fields["tasks"] = []
    if len(origin.problems) > noted:
        origin.lost.add(("tasks",))
    known = [*_raw_faults(fields, origin), *_file_faults(fields, base)]
    for fault in known:
        origin.add(fault)
    try:
        experiment = Experiment(**fields, base=base, sources=sources)
    except InvalidExperiment as error:
        cause, noted_locs = error.__cause__, origin.lost | {fault.loc for fault in known}
        for fault in faults_of(cause) if isinstance(cause, ValidationError) else [Fault((), str(error))]:
            if fault.loc not in noted_locs:
                origin.add(fault)
        origin.refuse()
    if origin.problems:
        origin.refuse()
    return experiment


def _raw_faults(fields: Mapping[str, Any], origin: _Origin) -> Iterator[Fault]:
    """What is wrong between tasks or variants, seen before each is validated: so that all is told at once."""
    needs = []
    # Among rows that could not be read may be the one that is needed.
    complete = ("tasks",) not in origin.lost
    for idx, row in enumerate(_items(fields, "tasks")):
        depends_on = _at(row, "depends_on")
        usable = isinstance(depends_on, list) and all(isinstance(one, str) for one in depends_on)
        needs.append((_id_of(row, idx), depends_on if usable and complete else ()))
    variants = _items(fields, "variants")
    yield from id_faults(needs, [_id_of(variant, idx) for idx, variant in enumerate(variants)], origin.name_of)
    if origin.file is not None:
        for idx, variant in enumerate(variants):
            if _at(variant, "agent", "function") is not None:
                text = "is for experiments made in Python; allowed: command, artifact, python"
                yield Fault(("variants", idx, "agent", "function"), text)


def _id_of(row: object, idx: int) -> str:
    own = _at(row, "id")
    return own if isinstance(own, str) else f"\0{idx}"  # no id that anybody has: its absence is told elsewhere


def _items(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    items = fields.get(name)
    return items if isinstance(items, list | tuple) else []


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _read_rows(origin: _Origin) -> list[Any]:
    rows: list[Any] = []
    assert origin.tasks_file is not None
    try:
        _must_be_file(origin.tasks_file)
        with open(origin.tasks_file, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        rows.append(_row(line))
                        origin.row_lines.append(number)
                    except (ValueError, RecursionError) as error:
                        origin.add_row(number, _why_no_row(error))
    except (OSError, ValueError) as error:
        origin.add(Fault(("tasks",), f"cannot read {str(origin.tasks_file)!r}: {_reason(error)}"))
        return []
    if not rows and not origin.problems:
        origin.add(Fault(("tasks",), f"{str(origin.tasks_file)!r} is empty; needed: one task as a JSON object a line"))
    return rows


def _row(line: bytes) -> Any:
    return json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_repeats, parse_constant=_no_constant)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For a reader of JSON: refuse a key that stands twice, of which each reader takes another."""
    members = dict(pairs)
    if len(members) < len(pairs):
        (name, _), *_ = (Counter(name for name, _ in pairs)).most_common(1)
        raise InvalidValue(f"the key {shown(name)} stands there twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise InvalidValue(f"{name} is not JSON: numbers are finite")


def _why_no_row(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"not a JSON object: {error.msg} at column {error.colno}"
        case RecursionError():
            return "nested too deeply"
        case UnicodeDecodeError():
            return f"not UTF-8: {error.reason} at byte {error.start}"
    return str(error)


def _text_of(origin: _Origin) -> str:
    assert origin.file is not None
    try:
        _must_be_file(origin.file)
        with open(origin.file, "rb") as file:
            data = file.read(MAX_YAML_CHARS + 1)
    except (OSError, ValueError) as error:
        origin.fail(f"cannot be read: {_reason(error)}")
    if len(data) > MAX_YAML_CHARS:
        origin.fail(f"is larger than {format_bytes(MAX_YAML_CHARS)}; put tasks into a JSONL file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        origin.fail(f"not UTF-8: {error.reason}", data.count(b"\n", 0, error.start) + 1)


def _must_be_file(path: Path) -> None:
    # Opening a pipe would wait for a writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise InvalidValue("it is not a file")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


class _YamlReader:
    """Plain data from YAML, with the line of every value. Aliases are written out, within the same bound."""

    def __init__(self, origin: _Origin) -> None:
        self._origin = origin
        self._left = MAX_YAML_CHARS

    def read(self, text: str) -> Any:
        """Return the one document's value. Refuses what no value can be made of; notes the rest."""
        try:
            # The loader is asked for nodes only, and for the values of plain numbers: nothing is ever made of tags.
            self._loader = yaml.SafeLoader(text)
            root = self._loader.get_single_node()
            return None if root is None else self._value(root, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            why = ", ".join(part for part in (error.context, error.problem) if part)
            self._origin.fail(f"not YAML: {why}", mark.line + 1 if mark else 0)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self._origin.fail(f"not YAML: the character {shown(text[error.position])} is not allowed", line)
        except RecursionError:
            self._origin.fail("nested too deeply, or an alias that holds itself")
        except (ValueError, OverflowError) as error:  # PyYAML lets through what its own conversions raise
            self._origin.fail(f"not YAML: {error}")

    def _value(self, node: Node, loc: Loc) -> Any:
        self._spend(1)
        match node:
            case ScalarNode():
                self._spend(len(node.value))
                return self._scalar(node, loc)
            case SequenceNode(tag=tag) if tag == _TAG + "seq":
                items = []
                for idx, item in enumerate(node.value):
                    self._origin.lines[*loc, idx] = _line(item)
                    items.append(self._value(item, (*loc, idx)))
                return items
            case MappingNode(tag=tag) if tag == _TAG + "map":
                members = {}
                for name, (line, value) in self._members(node, loc).items():
                    self._origin.lines[*loc, name] = line
                    members[name] = self._value(value, (*loc, name))
                return members
        return self._refuse_tag(node, loc)

    def _members(self, node: MappingNode, loc: Loc) -> dict[str, tuple[int, Node]]:
        members: dict[str, tuple[int, Node]] = {}
        merged: list[Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merged += value.value if isinstance(value, SequenceNode) else [value]
            elif not isinstance(key, ScalarNode):
                self._origin.add(Fault(loc, "a key is text, not a list or a mapping"), _line(key))
            elif key.value in members:
                text = f"stands there twice; first in line {members[key.value][0]}"
                self._origin.add(Fault((*loc, key.value), text), _line(key))
            else:
                self._spend(1 + len(key.value))
                members[key.value] = (_line(key), value)
        for source in merged:
            if isinstance(source, MappingNode):
                self._spend(1)
                for name, member in self._members(source, loc).items():
                    members.setdefault(name, member)
            else:
                self._origin.add(Fault(loc, "<< takes a mapping, or a list of mappings"), _line(source))
        return members

    def _scalar(self, node: ScalarNode, loc: Loc) -> Any:
        if node.tag in _AS_TEXT:
            return node.value
        if node.tag in _AS_VALUE:
            try:
                if len(node.value) > _MAX_NUMBER_CHARS:
                    raise InvalidValue("too long")
                return self._loader.construct_object(node)
            except (ValueError, LookupError):  # "0x", a number of 5000 digits, or `!!bool perhaps`
                kind = node.tag.removeprefix(_TAG)
                return self._lose(node, loc, f"{shown(node.value)} is no {kind}")
        return self._refuse_tag(node, loc)

    def _refuse_tag(self, node: Node, loc: Loc) -> None:
        self._lose(node, loc, f"the tag {shown(node.tag)} is not allowed; use plain YAML")

    def _lose(self, node: Node, loc: Loc, text: str) -> None:
        self._origin.add(Fault(loc, text), _line(node))
        self._origin.lost.add(loc)

    def _spend(self, chars: int) -> None:
        self._left -= chars
        if self._left < 0:
            self._origin.fail(f"its aliases expand to more than {format_bytes(MAX_YAML_CHARS)}")


def _line(node: Node) -> int:
    return node.start_mark.line + 1


# Files


def _named_files(data: Mapping[str, Any]) -> Iterator[tuple[Loc, Any]]:
    for idx, row in enumerate(_items(data, "tasks")):
        yield ("tasks", idx, "workspace"), _at(row, "workspace")
        yield ("tasks", idx, "reference"), _at(row, "reference")
        yield ("tasks", idx, "grading", "assets"), _at(row, "grading", "assets")
    for idx, variant in enumerate(_items(data, "variants")):
        yield ("variants", idx, "agent", "artifact"), _at(variant, "agent", "artifact")
    yield ("grading", "assets"), _at(data, "grading", "assets")


def _file_faults(data: Mapping[str, Any], base: Path) -> Iterator[Fault]:
    seen: dict[str, str] = {}
    for loc, path in _named_files(data):
        if isinstance(path, str | os.PathLike) and os.fspath(path):
            full = os.path.join(base, path)
            if full not in seen:
                seen[full] = _absence(full, file=loc[-1] == "artifact")
            if seen[full]:
                yield Fault(loc, seen[full])


def _absence(path: str, *, file: bool) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot find {path!r}: {error.strerror}"
    except ValueError:
        return ""  # a NUL or the like: told by the contract
    if stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and not file):
        return ""
    return f"{path!r} is not a file" if file else f"{path!r} is neither a file nor a folder"


def _input_files(experiment: Experiment) -> Iterator[str]:
    base = str(experiment.base)
    yield from map(str, experiment.sources)
    named = (path for _, path in _named_files(experiment.model_dump()))
    yield from (os.path.join(base, path) for path in named if path is not None)
    gradings = [experiment.grading, *(task.grading for task in experiment.tasks)]
    programs = [(variant.agent.command, variant.agent.python) for variant in experiment.variants]
    programs += [(grading.command, grading.python) for grading in gradings if grading is not None]
    arguments: set[str] = set()
    for command, python in programs:
        arguments.update(command or ())
        if python is not None:
            module = python.partition(":")[0].partition(".")[0]
            arguments.add(f"{module}.py")
            if os.path.isdir(os.path.join(base, module)):
                yield os.path.join(base, module)
    for argument in arguments:
        path = os.path.join(base, argument)
        if Path(path).is_relative_to(base) and _is_file(path):
            yield path


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # most arguments are no paths: too long a name, a NUL
        return False


def _relative(path: str, base: Path) -> str:
    return os.path.relpath(path, base) if Path(path).is_relative_to(base) else path


def path_digest(path: str) -> str:
    """The digest of a file or a folder; MISSING if there is none."""
    try:
        return _tree_digest(path) if stat.S_ISDIR(os.stat(path).st_mode) else _file_digest(path)
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise InvalidExperiment(f"cannot read {error.filename or path!r}: {error.strerror}") from error


def _file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _tree_digest(top: str) -> str:
    """The digest of names, kinds, contents and the right to execute; not of times, owners and Python's caches."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(top, onerror=_raise):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted([*folders, *files]):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            content = ""  # a folder's is told by what follows; a socket has none
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            elif stat.S_ISREG(mode):
                content = _file_digest(path)
            executable = stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)
            entry = [os.path.relpath(path, top), stat.S_IFMT(mode), executable, content]
            digest.update(json.dumps(entry).encode() + b"\n")
    return f"sha256:{digest.hexdigest()}"


def _raise(error: OSError) -> NoReturn:
    raise error


def json_digest(value: Any) -> str:
    """The digest of a value that JSON can say."""
    return _sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
