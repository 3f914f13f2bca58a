"""Files that say the same agree."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from gradlens import __version__

ROOT = Path(__file__).parent.parent


def test_the_citation_has_the_version_and_licence_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    fields = dict(re.findall(r"^([a-z-]+): (.+)$", citation, re.MULTILINE))
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert fields["version"] == __version__
    assert fields["license"] == setup["metadata"]["license"]
    assert setup["metadata"]["author"] in citation


def test_every_library_of_the_tests_is_pinned() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    wanted = re.findall(r"^[A-Za-z][\w-]*", setup["options.extras_require"]["test"], re.MULTILINE)
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {name.lower() for name in wanted} <= {name.lower() for name in pinned}
