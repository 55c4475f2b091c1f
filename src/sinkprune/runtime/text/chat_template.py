"""Chat templates: untrusted Jinja programs from checkpoints, rendered in bounded time and memory.

Jinja's sandbox compiles and runs them. `TemplateEnvironment` counts each operation. `_CountingTransformer` adds calls
for operations that Jinja runs without its environment, such as rounds of a loop, comparisons and slices. A template
renders the text of transformers or fails, and always does the same with the same conversation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.untrusted import UnreadableError, decoded_text
from sinkprune.runtime.text.template_environment import TemplateEnvironment

_WORDS, _DEPTH = 10_000, 100
_WRITTEN, _TIMES_GIVEN = 1 << 15, 16
"""The characters that a template may add, and the times that it may repeat the conversation."""
_REASON = 300
_TAGS = (
    "break call continue elif else endcall endfilter endfor endgeneration endif endmacro endset endwith filter for "
    "generation if macro set with"
)
_READ, _SPEND = " read", " spend"
"""Names of filters that no template can spell."""


class ChatTemplate:
    """A checkpoint's chat template."""

    def __init__(self, source: bytes) -> None:
        """Compile the template's file in UTF-8; raises `BundleError` if it is invalid or uses unknown constructs."""
        self._environment = TemplateEnvironment(["jinja2.ext.loopcontrols", _ChatTags])
        self._environment.filters |= {_READ: self._environment.read, _SPEND: self._environment.spend}
        self._turn = threading.Lock()
        try:
            # transformers opens the file as text, which translates line ends.
            text = decoded_text(source).replace("\r\n", "\n").replace("\r", "\n")
            tree = _CountingTransformer().visit(self._environment.parse(text))
            self._template = self._environment.from_string(tree)
        except (TemplateError, UnreadableError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            # Python raises the last two for numbers of thousands of digits and for twenty nested loops.
            raise _template_error("is no valid chat template", error) from error

    def render(
        self, messages: list[dict[str, Any]], bos: str, eos: str, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the conversation `messages` as text, with the start of an answer.

        `tools` are the functions that the answer may call: data of the template, as the messages are. Raises
        `BundleError` if the template fails or computes too much.
        """
        variables: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": True,
            "bos_token": bos,
            "eos_token": eos,
        }
        given = len(str(messages))
        if tools is not None:
            variables["tools"], given = tools, given + len(str(tools))
        try:
            # The environment has one counter.
            with self._turn:
                self._environment.begin(given)
                rendered = self._template.render(variables)
            if len(rendered) > _WRITTEN + _TIMES_GIVEN * given:
                raise TemplateError(f"it makes {len(rendered)} characters of a conversation of {given}")
            rendered.encode()
        except Exception as error:
            # An untrusted program may fail in any way.
            raise _template_error("cannot take an image with a question", error) from error
        return rendered


def _template_error(problem: str, error: Exception) -> BundleError:
    reason = "it nests too deep" if isinstance(error, (RecursionError, MemoryError)) else str(error)[:_REASON]
    reason = "".join(letter if letter.isprintable() else " " for letter in reason).removesuffix(".")
    return BundleError(
        f"the bundle's chat_template.jinja {problem}: {reason}. Mend the checkpoint's chat template and export it "
        "again."
    )


class _ChatTags(Extension):
    """Allows only the tags that published chat templates use, and limits the number of words and signs.

    In LLaVA's own template `{% generation %}` marks the text of the model. It changes no text.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Yield the tokens of `stream`; raises `TemplateError` for other tags and too many tokens."""
        before = None
        for number, token in enumerate(stream):
            if number >= _WORDS:
                raise TemplateError(f"it has more than {_WORDS} words and signs")
            if before == "block_begin" and token.value not in _TAGS.split():
                raise TemplateError(f"line {token.lineno}: chat templates have no '{token.value}'")
            before = token.type
            yield token

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between `generation` and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountingTransformer(NodeTransformer):
    """Adds calls that count the operations that Jinja runs without its environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count each round, and each item that the loop's condition tests."""
        test = node.test and nodes.And(_spend(node.test), node.test, lineno=node.lineno)
        self._visit_body(node)
        node.test = test
        return node

    def _visit_body(self, node: Any) -> Any:
        rounds = [nodes.ExprStmt(_spend(*node.body), lineno=node.lineno)]
        self.generic_visit(node)
        node.body = [*rounds, *node.body]
        return node

    visit_Macro = visit_CallBlock = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Count both values of `a ~ b`."""
        self.generic_visit(node)
        node.nodes = [_read(part) for part in node.nodes]
        return node

    def _visit_operand(self, node: Any) -> Any:
        self.generic_visit(node)
        node.expr = _read(node.expr)
        return node

    visit_Compare = visit_Operand = _visit_operand

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Count a slice, which is a copy."""
        self.generic_visit(node)
        return _read(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Count a key, whose hash takes as long as the key has parts."""
        self.generic_visit(node)
        node.key = _read(node.key)
        return node


def _read(node: Any) -> nodes.Filter:
    return nodes.Filter(node, _READ, [], [], None, None, lineno=node.lineno)


def _spend(*body: nodes.Node) -> nodes.Filter:
    """Return a call that counts one run of `body`, by its size."""
    units = nodes.Const(8 + sum(_size(node, 0) for node in body), lineno=body[0].lineno if body else 1)
    return nodes.Filter(units, _SPEND, [], [], None, None, lineno=units.lineno)


def _size(node: nodes.Node, depth: int) -> int:
    if depth > _DEPTH:
        raise TemplateError(f"it nests more than {_DEPTH} deep")
    text = node.data if isinstance(node, nodes.TemplateData) else ""
    return 4 + len(text) + sum(_size(child, depth + 1) for child in node.iter_child_nodes())
