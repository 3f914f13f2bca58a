"""Sphinx extension: runs scripts that draw pictures or write pages, and shows them.

Each script of ``gallery/``, as well as those of ``OWN``, has a page beside it
and a ``main(folder: Path)`` that writes PNG, HTML or text files. The pages of ``tutorials/`` are
scripts, too: their cells are run (``cells``). Each picture has a dark one beside it
(``dark_pictures``). A script runs when it, a table beside it or the package has changed;
the files are kept in the docs' own ``_build``, for all builders. A script that fails or warns ends
the build.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from cells import CELL, PICTURES
from dark_pictures import dark_name
from docutils import nodes
from docutils.parsers.rst.directives import flag, unchanged_required
from sphinx.application import Sphinx
from sphinx.directives.patches import Figure
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import gradlens

STAMP = "made-from.txt"
SOURCES = ("*.py", "*.html", "*.css", "*.js")
CELLS = Path(__file__).with_name("cells.py")
DARK_PICTURES = Path(__file__).with_name("dark_pictures.py")

logger = logging.getLogger(__name__)


class Picture(Figure):
    """``.. picture:: script/name.png``: a figure that a script has drawn.

    Where there is a dark one, too, the reader sees that whose ground is like that of the page.
    """

    def run(self) -> list[nodes.Node]:
        # With a width, the picture is a link to itself in full size.
        given = {"width": "100%", **self.options}
        light = Path(self.arguments[0])
        dark = dark_name(light)
        pictures = [(light, "only-light"), (dark, "only-dark")]
        folder = Path(self.state.document.settings.env.srcdir, PICTURES)
        if not Path(folder, dark).exists():
            pictures = [(light, "picture")]
        found: list[nodes.Node] = []
        for picture, kind in pictures:
            self.arguments[0] = f"/{PICTURES}/{picture.as_posix()}"
            self.options = {**given, "figclass": [kind]}
            found += super().run()
        return found


class HealthyAndSick(SphinxDirective):
    """``.. healthy-and-sick:: script/panel``: two pictures of a panel, and what to see in each.

    ``wide`` ones are one below the other.
    """

    required_arguments = 1
    option_spec: ClassVar = {
        "healthy": unchanged_required,
        "sick": unchanged_required,
        "wide": flag,
    }

    def run(self) -> list[nodes.Node]:
        panel = self.arguments[0]
        name = panel.rpartition("/")[2].replace("-", " ")
        found = nodes.container(classes=["pair", "wide"] if "wide" in self.options else ["pair"])
        for kind in ("healthy", "sick"):
            words = " ".join(self.options[kind].split())
            alt = f"The panel of {name} in a {kind} training"
            picture = f".. picture:: {panel}-{kind}.png\n   :alt: {alt}"
            found += self.parse_text_to_nodes(f"{picture}\n\n   **{kind.capitalize()}**: {words}\n")
        return [found]


def page_role(
    name: str, raw: str, text: str, line: int, inliner: Any, *_: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """``:page:`title <script/name.html>```: a link to a page that a script has written."""
    title, _, target = text.rstrip(">").rpartition(" <")
    depth = inliner.document.settings.env.docname.count("/")
    return [nodes.reference(raw, title, refuri=f"{'../' * depth}pages/{target}")], []


def copy_pages(app: Sphinx, failure: Exception | None) -> None:
    """Put the pages that scripts have written beside those of the documentation."""
    pictures = Path(app.srcdir, PICTURES)
    for page in pictures.glob("*/*.html") if app.builder.format == "html" else ():
        copy = Path(app.outdir, "pages", page.relative_to(pictures))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, copy)


OWN = ("instruments.py", "overhead.py", "reliability.py")
"""Scripts beside their pages that aren't in the gallery."""


def run_scripts(app: Sphinx) -> None:
    """Run all scripts whose pictures are out of date, as many at once as there are cores."""
    own = [Path(app.srcdir, name) for name in OWN]
    scripts = [*own, *Path(app.srcdir, "gallery").glob("*.py")]
    pages = Path(app.srcdir, "tutorials").glob("*.rst")
    scripts += [page for page in pages if page.stem != "index"]
    for script in scripts:
        if not script.with_suffix(".rst").exists():
            raise ExtensionError(f"{script} has no page: write {script.with_suffix('.rst').name}")
    stamps = {script: stamp(script) for script in scripts}
    folders = {script: Path(app.srcdir, PICTURES, script.stem) for script in scripts}
    stale = [script for script in scripts if not is_from(folders[script], stamps[script])]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        jobs = {s: workers.submit(partial(run, s, folders[s], stamps[s])) for s in stale}
        for script, job in jobs.items():
            logger.info("drawing the pictures of %s", script.name)
            job.result()


def run(script: Path, folder: Path, made_from: str) -> None:
    """Run one script in a process of its own; its pictures appear all at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        program = CELLS if script.suffix == ".rst" else DARK_PICTURES
        command = [sys.executable, "-W", "error", program, script, temporary]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise ExtensionError(f"{script} failed:\n{done.stderr[-4000:]}")
        Path(temporary, STAMP).write_text(made_from)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(temporary, folder)


def stamp(script: Path) -> str:
    """Hash of a script or a page's cells, of the tables beside it and of the package's sources."""
    package = Path(gradlens.__file__).parent
    text = script.read_text("utf-8")
    code = CELL.findall(text) if script.suffix == ".rst" else text
    digest = hashlib.sha256(repr(code).encode())
    for table in [CELLS, DARK_PICTURES, *sorted(script.parent.glob("*.csv"))]:
        digest.update(table.read_bytes())
    sources = [file for kind in SOURCES for file in package.rglob(kind)]
    for source in sorted(sources):
        digest.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return digest.hexdigest()


def is_from(folder: Path, made_from: str) -> bool:
    """Whether a folder's pictures were made from such sources."""
    file = folder / STAMP
    return file.exists() and file.read_text() == made_from


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("picture", Picture)
    app.add_directive("healthy-and-sick", HealthyAndSick)
    app.add_role("page", page_role)
    app.connect("builder-inited", run_scripts)
    app.connect("build-finished", copy_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
