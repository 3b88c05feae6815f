"""The Jinja environment in which a model's chat template runs (step 1).

Templates come from whoever made the model. They see immutable values and no Python internals,
and what they may cost is limited: loop steps, size of the text, size of what operators make.
The dialect (blocks trimmed, `tojson`, `raise_exception`, `strftime_now`, `{% generation %}`,
loop controls) is the one for which Hugging Face's templates are written.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000
MAX_CHARACTERS = 20_000_000
_MAX_BITS = 4096
#: Under this name a render's `Budget` travels in its context; no template can spell it.
BUDGET = "the budget of this render"
_LOOP_STEP, _MACRO_STEP = "loop step", "macro step"
#: A call of a macro takes about as long as ten turns of a loop.
_COSTS = {_LOOP_STEP: 1, _MACRO_STEP: 10}
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")


class TemplateRefusalError(TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


class Budget:
    """Loop steps and macro calls that one render may still make."""

    def __init__(self) -> None:
        self.steps_left = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Raises SecurityError when nothing is left."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise SecurityError(f"the chat template makes more than {MAX_STEPS} loop steps")


class _GenerationTag(Extension):
    """`{% generation %}` marks what training learns from; for serving it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Compiles `~` to a call that checks sizes, and the steps that `_parse` puts in."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat_checked((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:  # noqa: N802
        if node.name in _COSTS:
            self.write(f"context.get({BUDGET!r}).spend({_COSTS[node.name]})")
        else:
            super().visit_EnvironmentAttribute(node, frame)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """See the module's docstring. One instance serves any number of templates and threads."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        del self.globals["lipsum"], self.filters["center"]
        self.filters["tojson"] = _to_json
        self.filters["format"] = _format_filter
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Puts a step at the head of each loop's and each macro's body."""
        tree = super()._parse(source, name, filename)
        bodies = [(_LOOP_STEP, loop.body) for loop in tree.find_all(nodes.For)]
        bodies += [(_MACRO_STEP, macro.body) for macro in tree.find_all(nodes.Macro)]
        for step, body in bodies:
            body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute(step), lineno=1))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                _check_size(_size(left) + _size(right))
            case "*":
                _check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * right)
            case "%" if isinstance(left, str):
                _check_format(left)
        return super().call_binop(context, operator, left, right)

    def concat_checked(self, parts: Iterable[Any]) -> str:
        """What `~` does, up to the size limit."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(f"the chat template makes a value of {size} characters or items")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError(f"the chat template makes a number of {bits} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int):
            _check_size(_size(sequence) * times)


def _check_format(template: str) -> None:
    if _WIDE_FORMAT.search(template):
        raise SecurityError("the chat template formats with a huge width")


def _format_filter(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return value % (kwargs or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which would spoil prompts."""
    if isinstance(indent, int) and indent > 100:
        raise SecurityError(f"the chat template indents JSON by {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def with_budget(variables: Mapping[str, Any]) -> dict[str, Any]:
    """`variables` and a fresh budget, to render with."""
    return {**variables, BUDGET: Budget()}
