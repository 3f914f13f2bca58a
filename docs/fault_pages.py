"""Sphinx extension: what the rules of diagnosis say of themselves, on the pages of faults.

``diagnosis/FAULT.rst`` is what is written by hand about a fault. The rule's title and advice come
before it, and after it what the rule needs, its limits, and the faults that look alike, that it may
cause and that may cause it. ``.. rates::`` is the table of ``diagnosis/rates.csv``, which
``python -m benchmarks.diagnosis --unseen --write`` makes; without the file, a sentence says so.
"""

import ast
import csv
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import getsource
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks.diagnosis.faults.catalogue import SYMPTOMS
from benchmarks.diagnosis.report import LEVELS, rate
from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import RULES

FOLDER = Path(__file__).parent / "diagnosis"
RATES = FOLDER / "rates.csv"
OWN = "gradlens.diagnosis."

CODE = re.compile(
    r"[A-Za-z_][\w.]*\((?:[^()]|\([^()]*\))*\)"  # a call
    r"|\w+=(?:\{.*?\}|\"\w+\"|[\w-]+)"  # an argument
    r"|\b(?:[a-z]+_\w+|torch(?:\.\w+)+)"  # a name
)
"""Code in a text of a rule, which is also printed in terminals and so has no markup."""

NOBREAK = "\N{NO-BREAK SPACE}"

TERMS = {
    "over": "“a over b” is a divided by b",
    "chance": "“chance” is the loss of a guess",
    "rms": "“rms” is the root mean square",
}
"""What words in the descriptions of limits mean."""


def complete(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what a rule says of itself around the text about its fault."""
    folder, _, fault = name.rpartition("/")
    rule = next((each for each in RULES if each.fault == fault), None)
    if folder == FOLDER.name and rule is not None:
        for file in (sys.modules[rule.find.__module__].__file__, __file__, RATES):
            app.env.note_dependency(str(file))
        source[0] = page(rule, source[0])


def page(rule: Rule, text: str) -> str:
    """The page of a fault, of which a text is written by hand."""
    title = heading(rule.title, "=")
    advice = f".. admonition:: What to do, in short\n\n   {marked(rule.advice)}"
    return "\n\n".join([title, f"``{rule.fault}``", advice, text.strip(), *after(rule)])


def after(rule: Rule) -> Iterator[str]:
    """What follows the text, which ends with how the fault is found."""
    needs = dict.fromkeys(marked(need.words) for need in rule.needs)
    if needs:
        yield f"The rule needs {'; and '.join(needs)}."
    found = limits(rule.find)
    if found:
        yield introduction(rule.find.__module__, " ".join(words for *_, words in found))
        heads = "limit", "value", "what it is, and where it comes from"
        yield table(heads, found, ":class: limits")
    runs = of_fault(rule.fault)
    if runs:
        yield f"It was named in {hits(runs)} runs of the benchmark (:ref:`rates`)."
    yield from others(rule)
    if rule.sources:
        yield heading("Sources", "-")
        yield "\n".join(f"- {linked(each)}" for each in rule.sources)


def introduction(module: str, words: str) -> str:
    """What comes before a rule's limits: their module, and the terms that describe them."""
    imported = ", or of the module in parentheses" if "(``" in words else ""
    explained = [text for term, text in TERMS.items() if re.search(rf"\b{term}\b", words)]
    terms = f" Here, {'; '.join(explained)}." if explained else ""
    return f"Its limits are constants of ``{module}``{imported}.{terms}"


def others(rule: Rule) -> Iterator[str]:
    """The faults that one is connected with."""
    causes = [each.fault for each in RULES if rule.fault in each.explains]
    connected = {
        "What else it may be": rule.others,
        "What it may cause": rule.explains,
        "What may cause it": causes,
    }
    yield heading("Other faults", "-")
    for words, faults in connected.items():
        links = ", ".join(f":doc:`{fault} <{fault}>`" for fault in faults)
        yield f":{words}: {links or 'no other fault'}"


def heading(title: str, line: str) -> str:
    """A heading."""
    return f"{title}\n{line * len(title)}"


def escaped(text: str) -> str:
    """A text in which no character is markup."""
    return "".join(f"\\{sign}" if sign in "*`|_\\" else sign for sign in text)


def marked(text: str) -> str:
    """A text in which code is marked, and no other character is markup."""
    codes = [f"``{code}``" for code in CODE.findall(text)] + [""]
    between = [escaped(each) for each in CODE.split(text)]
    return "".join(part for pair in zip(between, codes, strict=True) for part in pair)


def linked(source: str) -> str:
    """A source, whose number at arXiv is a link."""
    return re.sub(r"arXiv:([\d.]+\d)", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", escaped(source))


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]], *options: str) -> str:
    """A table in which each cell is a line of markup."""
    lines = [".. list-table::", *(f"   {each}" for each in (":header-rows: 1", *options)), ""]
    for row in (heads, *rows):
        lines += [f"   {'*' if not place else ' '} - {cell}" for place, cell in enumerate(row)]
    return "\n".join(lines)


# Limits: the constants that a rule uses, and the sentences under them.


def limits(find: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each limit that a function and those that it calls use."""
    found: dict[str, tuple[str, str, str]] = {}
    for function in called(find):
        for name in used(function.__code__):
            home, *entry = described(function.__module__).get(name, ("", "", "", ""))
            names, values, words = entry
            if home and home != find.__module__:
                words += f" (``{home.removeprefix(OWN)}``)"
            if home:
                found.setdefault(f"{names} {words}", (names, values, words))
    return [*found.values()]


def called(function: Callable[..., Any]) -> list[FunctionType]:
    """A function, and those of the diagnosis that it calls, each once."""
    found: dict[FunctionType, None] = {}
    waiting: list[Any] = [function]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, FunctionType) and each.__module__.startswith(OWN) and each not in found:
            found[each] = None
            waiting += [each.__globals__.get(name) for name in used(each.__code__)]
    return [*found]


def used(code: CodeType) -> list[str]:
    """The names of what code uses from its module, in their order."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for each in inner for name in used(each))]))


@cache
def described(module: str) -> Mapping[str, tuple[str, str, str, str]]:
    """By the name of each number of a module: the names, values and meaning of its statement.

    Before these comes the module that has the statement, from which others import the number.
    """
    tree = ast.parse(getsource(sys.modules[module])).body
    found: dict[str, tuple[str, str, str, str]] = {}
    for statement, following in zip(tree, [*tree[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(OWN):
            theirs = described(str(statement.module))
            names = {each.asname or each.name: each.name for each in statement.names}
            found |= {ours: theirs[name] for ours, name in names.items() if name in theirs}
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            targets, values = parts(statement.targets[0]), parts(statement.value)
            if all(isinstance(getattr(each, "value", None), (int, float)) for each in values):
                words = " ".join(str(ast.literal_eval(following.value)).split())
                entry = module, literals(targets), literals(values), words.replace("‖", "\\‖")
                found |= dict.fromkeys(map(ast.unparse, targets), entry)
    return found


def parts(expression: ast.expr) -> list[ast.expr]:
    """The elements of a tuple, or an expression that is none."""
    return expression.elts if isinstance(expression, ast.Tuple) else [expression]


def literals(expressions: list[ast.expr]) -> str:
    """Code in one line, which can be broken only between expressions."""
    return ", ".join(f"``{ast.unparse(each)}``" for each in expressions)


# Rates, which a benchmark has measured.


class Rates(SphinxDirective):
    """``.. rates::``: how often each fault is named."""

    def run(self) -> list[nodes.Node]:
        """The table, or a sentence if nothing has been measured."""
        self.env.note_dependency(str(RATES))
        return self.parse_text_to_nodes(rates())


def rates() -> str:
    """The table of rates, and the false alarms below it."""
    rows = measured()
    if not rows:
        return "The rates of this version have not been measured yet."
    faulty, healthy = [r for r in rows if r["fault"]], [r for r in rows if not r["fault"]]
    groups = {f":doc:`{each.fault} <{each.fault}>`": of_fault(each.fault) for each in RULES}
    groups["all facts"] = [row for row in faulty if row["fault"] not in SYMPTOMS]
    groups["all symptoms"] = [row for row in faulty if row["fault"] in SYMPTOMS]
    groups["all"] = faulty
    cells = [
        (
            name,
            *(unbroken(hits([r for r in chosen if r["level"] == level])) for level in "012"),
            unbroken(rate(named(chosen))),
        )
        for name, chosen in groups.items()
        if chosen
    ]
    heads = ("fault", *LEVELS, "named, with the interval of 95 %")
    false_alarms = rate([bool(row["alarms"]) for row in healthy])
    return f"{table(heads, cells)}\n\nFalse alarms in healthy runs: {false_alarms}."


def unbroken(text: str) -> str:
    """A text in one line: on a phone, the table can be scrolled."""
    return text.replace(" ", NOBREAK)


@cache
def measured() -> list[dict[str, str]]:
    """The runs of the benchmark that count; none if it has not been run."""
    if not RATES.exists():
        return []
    with RATES.open(newline="") as file:
        return [row for row in csv.DictReader(file) if not row["left_out"]]


def of_fault(fault: str) -> list[dict[str, str]]:
    """The runs with a fault."""
    return [row for row in measured() if row["fault"] == fault]


def named(rows: list[dict[str, str]]) -> list[bool]:
    """In which runs the fault was named."""
    return [row["is_named"] == "True" for row in rows]


def hits(rows: list[dict[str, str]]) -> str:
    """In how many of the runs the fault was named; a dash if there are none."""
    return f"{sum(named(rows))} of {len(rows)}" if rows else "–"


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("rates", Rates)
    app.connect("source-read", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
