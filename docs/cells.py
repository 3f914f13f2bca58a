"""Sphinx extension: pages whose code is run by the build, with what it prints and draws below it.

``.. cell::`` is Python that is run as a cell of a notebook, and ``.. cell:: console`` commands of
gradlens behind ``$``. ``run_gallery`` runs the cells of each page of ``tutorials/``, one after the
other, in a process and a folder of the page's own, by calling this module. Files that they leave
there are shown by ``.. picture:: page/name.png``. ``:alt:`` describes the picture that a cell
itself displays. Each picture has a dark one, too (``dark_pictures``). Code that fails or warns ends
the build.
"""

import json
import os
import re
import shlex
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from io import BytesIO, TextIOWrapper
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import matplotlib
from dark_pictures import both_grounds, dark_name
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gradlens.cli.main import main

PICTURES = "_build/pictures"
OUTPUTS = "cells.json"
COLUMNS = "84"
"""The width of a block of code on a wide screen."""

BACKEND = "module://matplotlib_inline.backend_inline"
"""Where notebooks draw figures."""

CLEARED = "\033[2K\r"
"""What ``clear_output`` prints where there is no notebook."""

CELL = re.compile(r"^\.\. cell::(.*)\n((?:   :.*\n)*)\n((?:   .*\n|\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Output:
    """What a cell has printed, the table and the name of the picture that it has displayed."""

    text: str = ""
    table: str = ""
    picture: str = ""


class Cell(SphinxDirective):
    """``.. cell::``: code, and what it gave when it was run."""

    has_content = True
    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """The code and its output."""
        number = self.env.temp_data["cell"] = self.env.temp_data.get("cell", -1) + 1
        folder = f"/{PICTURES}/{Path(self.env.docname).name}"
        outputs = json.loads(Path(self.env.srcdir, folder[1:], OUTPUTS).read_text("utf-8"))
        return [*self._nodes(Output(**outputs[number]), folder)]

    def _nodes(self, output: Output, folder: str) -> Iterator[nodes.Node]:
        code = "\n".join(self.content)
        if self.arguments:
            yield block(f"{code}\n{output.text}", "console")
            return
        yield block(code, "python")
        if output.text:
            yield block(output.text, "text", classes=["output"])
        if output.table:
            yield nodes.raw("", f'<div class="output">{output.table}</div>', format="html")
        if ("alt" in self.options) != bool(output.picture):
            raise self.error("a cell has :alt: if it displays a picture, and only then")
        if output.picture:
            light = Path(output.picture)
            for picture, kind in ((light, "only-light"), (dark_name(light), "only-dark")):
                uri = f"{folder}/{picture}"
                image = nodes.image(uri=uri, alt=self.options["alt"], width="100%")
                yield nodes.figure("", image, classes=[kind])


def block(text: str, language: str, **attributes: Any) -> nodes.literal_block:
    """A block of code."""
    return nodes.literal_block(text, text, language=language, **attributes)


def run(page: str) -> list[Output]:
    """Run the cells of a page in the working directory."""
    # Imported here because Sphinx, which needs the directive alone, is not a notebook.
    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib_inline.backend_inline import configure_inline_support
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    configure_inline_support(shell, BACKEND)
    found = []
    with both_grounds() as dark_pictures:
        for number, (kind, _, code) in enumerate(CELL.findall(page)):
            code = dedent(code).strip()
            if kind.strip():
                found.append(in_terminal(code))
            else:
                found.append(in_notebook(shell, code, Path(f"cell-{number}.png"), dark_pictures))
    return found


def in_terminal(commands: str) -> Output:
    """What commands of gradlens print."""
    # Of an encoding with blocks and arrows, which tables of runs have.
    printed = TextIOWrapper(BytesIO(), "utf-8", write_through=True)
    with redirect_stdout(printed):
        for command in commands.replace("\\\n", " ").splitlines():
            _, program, *arguments = shlex.split(command)
            if program != "gradlens" or main(arguments):
                raise ValueError(f"{command!r} failed")
    printed.seek(0)
    return Output(printed.read().rstrip())


def in_notebook(shell: Any, code: str, path: Path, dark_pictures: Mapping[bytes, bytes]) -> Output:
    """What a cell prints and displays; a picture is written to a path, and a dark one beside it."""
    from IPython.utils.capture import capture_output

    with capture_output() as captured:
        # What a cell's last line displays is captured, too.
        shell.display_trap.hook = sys.displayhook
        shell.run_cell(code, store_history=True).raise_error()
    displayed: dict[str, str] = {}
    for output in captured.outputs:
        displayed |= output.data
    picture = b64decode(displayed.get("image/png", ""))
    if picture:
        path.write_bytes(picture)
        dark_name(path).write_bytes(dark_pictures[picture])
    printed = captured.stdout.replace(CLEARED, "").rstrip()
    return Output(printed, displayed.get("text/html", ""), path.name if picture else "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("cell", Cell)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def hide_torchvision() -> None:
    """Make it a library that isn't installed: some builds don't match the CPU build of torch."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == "torchvision":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    metadata.version = version
    sys.modules["torchvision"] = None  # type: ignore[assignment]


if __name__ == "__main__":
    hide_torchvision()
    text = Path(sys.argv[1]).read_text("utf-8")
    os.environ["COLUMNS"] = COLUMNS
    matplotlib.use(BACKEND)
    os.chdir(sys.argv[2])
    outputs = [asdict(output) for output in run(text)]
    Path(OUTPUTS).write_text(json.dumps(outputs), "utf-8")
