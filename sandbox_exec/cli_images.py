"""The commands about Docker images: images build, images list."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from sandbox_exec.contracts import Contract
from sandbox_exec.errors import InvalidValue

CTRL_C: Final = 130  # as a shell says it of what that ended
_CODES: Final = "Exit codes: 0 done; 2 bad usage; 3 no engine, or a tool is missing here; 5 the build failed."
_SHORT: Final = 12  # digits of an id, as the docker command shows it

Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs; progress goes to stderr.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the shell's door."""
    images = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    images.callback()(_images)
    images.command(epilog=_epilog(_BUILD_EXAMPLES))(build)
    images.command("list", epilog=_epilog(_LIST_EXAMPLES))(list_)
    app.add_typer(images, name="images")


_BUILD_EXAMPLES = """
  sandbox-exec images build                          all of ours
  sandbox-exec images build python:3.11              one of ours, and what it is built on
  sandbox-exec images build ./my-task                a folder with a Dockerfile, as my-task:1
  sandbox-exec images build ./my-task --tag exam:7 --network host
"""
_LIST_EXAMPLES = """
  sandbox-exec images list
  sandbox-exec images list --json | jq -r '.[] | select(.state != "built").name'
"""


def _epilog(examples: str) -> str:
    return f"Examples:\n\n\b\n{examples.strip(chr(10))}\n\n{_CODES}"


def _images() -> None:
    """Build and list the Docker images that trials run in."""


def build(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One of ours, or a folder with a Dockerfile. Default: all of ours."),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME:TAG", help="What to call the image.")] = None,
    network: Annotated[
        str, typer.Option(metavar="NETWORK", help="That RUN gets: none, host, bridge or a named one.")
    ] = "none",
    force: Annotated[bool, typer.Option("--force", help="Build again, though nothing has changed.")] = False,
    json: Json = False,
) -> None:
    """Build images.

    What is unchanged is not touched: the folder's files, the recipe and the image below make a hash, which is a label
    of the image.
    """
    from sandbox_exec import images

    if name is None and tag is not None:
        raise InvalidValue("--tag is for one image: name it, or the folder of its Dockerfile")
    names = [name] if name is not None else [source.name for source in images.known()]
    done = []
    try:
        for one in names:
            built = images.build(one, tag=tag, network=network, force=force, say=_say)
            done.append(built)
            if not json:
                print(f"{built.state:<9}  {_short(built.id)}  {built.name}  ({built.wall_s:.1f} s)", flush=True)
    except KeyboardInterrupt:
        print("sandbox-exec: interrupted; an image that was there is as it was", file=sys.stderr)
        raise typer.Exit(CTRL_C) from None
    if json:
        _print_json(done)


def list_(json: Json = False) -> None:
    """List our images, built or not, and what else was built by us.

    built: as its folder says; changed: not any more, `build` builds it again; missing: not built yet.
    """
    from sandbox_exec import images
    from sandbox_exec.units import format_bytes

    found = images.list_images()
    if json:
        _print_json(found)
        return
    width = max(len(image.name) for image in found)
    for image in found:
        size = format_bytes(image.size_bytes) if image.size_bytes else ""
        print(f"{image.name:<{width}}  {image.state:<7}  {_short(image.id):<{_SHORT}}  {size}".rstrip())


def _short(image_id: str) -> str:
    return image_id.removeprefix("sha256:")[:_SHORT]


def _print_json(rows: Iterable[Contract]) -> None:
    print(json_.dumps([row.model_dump(mode="json") for row in rows], indent=2))


def _say(line: str) -> None:
    from sandbox_exec.display import clean

    print(clean(line), file=sys.stderr, flush=True)
