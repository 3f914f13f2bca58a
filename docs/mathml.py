"""Sphinx extension: formulas as MathML, which browsers show without a script or a network."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def formula(writer: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    """A formula of its own."""
    mathml = tex2mathml(node.astext(), as_block=True)
    writer.body.append(f'<div class="formula">{mathml}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (formula, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
