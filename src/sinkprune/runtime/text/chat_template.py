"""Chat templates: programs from checkpoints, in Jinja's language, rendered in bounded time and memory.

A template is read as a tree. What chat templates do not use is refused, and what takes time or room is made to pay
for it (`template_meter` in this package): each round of a loop, each macro, each text. Then Jinja compiles it. So it
renders what transformers would, or raises; the same template with the same conversation always does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.untrusted import TEMPLATE_BYTES, UnreadableError, decoded_text
from sinkprune.runtime.text.template_environment import TemplateEnvironment
from sinkprune.runtime.text.template_meter import meter_of, metered

_DEPTH = 100
_WORDS = 10_000
_REASON = 300
_WRITTEN, _READ, _ROUND, _WALKED, _SLICED, _KEY = " written", " read", " round", " walked", " sliced", " key"
_STATEMENTS = {
    nodes.Assign,
    nodes.AssignBlock,
    nodes.Break,
    nodes.CallBlock,
    nodes.Continue,
    nodes.ExprStmt,
    nodes.FilterBlock,
    nodes.For,
    nodes.If,
    nodes.Macro,
    nodes.Output,
    nodes.Template,
    nodes.With,
}
_EXPRESSIONS = {
    nodes.Add,
    nodes.And,
    nodes.Call,
    nodes.Compare,
    nodes.Concat,
    nodes.CondExpr,
    nodes.Const,
    nodes.Dict,
    nodes.Div,
    nodes.Filter,
    nodes.FloorDiv,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Keyword,
    nodes.List,
    nodes.Mod,
    nodes.Mul,
    nodes.Name,
    nodes.Neg,
    nodes.Not,
    nodes.NSRef,
    nodes.Operand,
    nodes.Or,
    nodes.Pair,
    nodes.Pos,
    nodes.Pow,
    nodes.Slice,
    nodes.Sub,
    nodes.TemplateData,
    nodes.Test,
    nodes.Tuple,
}


class ChatTemplate:
    """A checkpoint's chat template. Raises `BundleError` for what is none, or is nothing that chat templates need."""

    def __init__(self, source: bytes) -> None:
        """`source` is the template's file, in UTF-8."""
        environment = _environment()
        try:
            if len(source) > TEMPLATE_BYTES:
                raise TemplateError(f"it has {len(source)} bytes, expected at most {TEMPLATE_BYTES}")
            # Line ends as a file that is opened as text has them
            text = decoded_text(source).replace("\r\n", "\n").replace("\r", "\n")
            tree = environment.parse(text)
            _check(tree)
            self._template = environment.from_string(_Metering().visit(tree))
        except (TemplateError, UnreadableError) as error:
            raise _invalid(error) from error
        except (RecursionError, MemoryError) as error:
            raise _invalid("it nests too deep") from error
        except (ValueError, SyntaxError, OverflowError) as error:
            # What Jinja takes and Python does not: numbers of thousands of digits, twenty loops in each other.
            raise _invalid(error) from error

    def render(self, messages: list[dict[str, Any]], bos: str, eos: str, given: int) -> str:
        """The conversation `messages` as text, with the start of an answer; `given` is how many characters it has.

        Raises `BundleError` where the template fails, for a reason of its own or because it takes too much.
        """
        variables = {"messages": messages, "add_generation_prompt": True, "bos_token": bos, "eos_token": eos}
        try:
            rendered = self._template.render(metered(variables, given))
            rendered.encode()
        except RecursionError as error:
            raise _failed("it calls itself too deep") from error
        except Exception as error:
            # A template is a program from the checkpoint: it may fail in any way.
            raise _failed(error) from error
        return rendered


def _invalid(reason: object) -> BundleError:
    return BundleError(
        f"the bundle's chat_template.jinja is no valid chat template: {_shown(reason)}. "
        "Mend the checkpoint's template and export it again."
    )


def _failed(reason: object) -> BundleError:
    return BundleError(
        f"the bundle's chat template cannot take an image with a question: {_shown(reason)}. Mend the checkpoint's "
        "template and export it again."
    )


def _shown(reason: object) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in str(reason)[:_REASON])
    return text.encode("utf-8", "replace").decode().removesuffix(".")


class _Words(Extension):
    """Refuses a template of too many words and signs before more of them are read."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """The tokens of `stream`; raises `TemplateError`."""
        for number, token in enumerate(stream):
            if number >= _WORDS:
                raise TemplateError(f"it has more than {_WORDS} words and signs")
            yield token


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what the model writes; LLaVA's own does. It changes no text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> TemplateEnvironment:
    environment = TemplateEnvironment(["jinja2.ext.loopcontrols", _Generation, _Words])
    payments = {
        _WRITTEN: _written,
        _READ: _read,
        _ROUND: _round,
        _WALKED: _walked,
        _SLICED: _sliced,
        _KEY: _key,
    }
    environment.filters.update(payments)
    return environment


def _check(tree: nodes.Template) -> None:
    """Refuse a tree that is too deep or holds what chat templates do not use; raises `TemplateError`."""
    level: list[nodes.Node] = [tree]
    for _ in range(_DEPTH):
        for node in level:
            if type(node) not in _STATEMENTS | _EXPRESSIONS:
                raise TemplateError(f"line {node.lineno}: chat templates have no '{type(node).__name__.lower()}'")
        level = [child for node in level for child in node.iter_child_nodes()]
        if not level:
            return
    raise TemplateError(f"it nests more than {_DEPTH} deep")


class _Metering(NodeTransformer):
    """Puts payments into a template's tree. They are filters whose names no template can write."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Texts that are not the template's own are paid for as they are written."""
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.TemplateData) else _pay(_WRITTEN, part) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` writes both."""
        self.generic_visit(node)
        node.nodes = [_pay(_WRITTEN, part) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """What is compared is read."""
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = _pay(_READ, side.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A slice is a copy."""
        self.generic_visit(node)
        return _pay(_SLICED, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Keys with parts take as long to look up as they like."""
        self.generic_visit(node)
        node.key = node.key if isinstance(node.key, nodes.Const) else _pay(_KEY, node.key)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Each round is paid for, and each item that the loop's own condition passes over."""
        test = 0 if node.test is None else _weight(node.test)
        self._visit_body(node)
        if test:
            node.iter = _pay(_WALKED, node.iter, test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Each call is paid for."""
        return self._visit_body(node)

    visit_CallBlock = visit_Macro

    def _visit_body(self, node: Any) -> Any:
        weight = nodes.Const(1 + sum(map(_weight, node.body)), lineno=node.lineno)
        text = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_pay(_ROUND, weight, text), lineno=node.lineno))
        return node


def _weight(node: nodes.Node) -> int:
    """How many steps a node takes, with all that is in it."""
    text = node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", None)
    return 1 + (len(text) >> 3 if isinstance(text, str) else 0) + sum(map(_weight, node.iter_child_nodes()))


def _pay(payment: str, node: Any, *numbers: int) -> nodes.Filter:
    given: list[nodes.Expr] = [nodes.Const(number, lineno=node.lineno) for number in numbers]
    return nodes.Filter(node, payment, given, [], None, None, lineno=node.lineno)


@pass_context
def _written(context: Context, value: Any) -> str:
    return meter_of(context).text(value)


@pass_context
def _read(context: Context, value: Any) -> Any:
    meter = meter_of(context)
    whole = meter.whole(value)
    meter.read(whole)
    return whole


@pass_context
def _sliced(context: Context, value: Any) -> Any:
    return meter_of(context).made(value)


@pass_context
def _round(context: Context, weight: int, text: int) -> None:
    """A round of a loop or a macro, of so many steps and characters of its own."""
    meter = meter_of(context)
    meter.step(weight)
    meter.make(text)


@pass_context
def _walked(context: Context, values: Any, weight: int) -> Any:
    meter = meter_of(context)
    values = meter.whole(values)
    meter.step(weight * len(values) if hasattr(values, "__len__") else 0)
    return values


@pass_context
def _key(context: Context, value: Any) -> Any:
    if not isinstance(value, (str, int, float)) and value is not None:
        raise TemplateError(f"a {type(value).__name__} is no key")
    return value
