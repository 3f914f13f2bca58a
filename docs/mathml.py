"""Sphinx extension: formulas as MathML, which browsers show without a script or a network."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

FENCE = re.compile(r'<mo(?: class="mathopen")?>([‖⟨⟩])</mo>')
"""Norms and inner products, whose left signs alone would grow: the right ones have exponents."""


def mathml(text: str, as_block: bool = False) -> str:
    """A formula of LaTeX."""
    return FENCE.sub(r'<mo stretchy="false">\1</mo>', tex2mathml(text, as_block=as_block))


def formula(writer: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    """A formula of its own."""
    writer.body.append(f'<div class="formula">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (formula, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
