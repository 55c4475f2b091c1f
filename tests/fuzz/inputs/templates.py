"""Chat templates of a grammar: mostly well-formed, with constructs that no chat template needs."""

from __future__ import annotations

from random import Random

_VALUES = (
    *("messages", "messages[0]", "messages[0]['content']", "message", "bos_token", "eos_token", "undefined_name"),
    *("none", "true", "0", "-1", "10**9", "2**64", "1e308", "''", "'x'", "'<image>'", "'%s'", "[]", "{}", "self"),
    *("range(3)", "range(99999)", "range(10**9)", "namespace(a=1)", "lipsum()", "lipsum(n=10**5)", "cycler(1, 2)"),
    *("joiner()", "dict(a=1)", "loop", "caller", "varargs", "raise_exception('x')", "strftime_now('%Y')"),
    *("messages.__class__", "''.__class__.__mro__", "().__class__.__base__.__subclasses__()", "self.__init__"),
    *("'x'.ljust(10**9)", "'x' * 10**9", "'%1000000000d' % 1", "'{:>1000000000}'.format(1)", "'x'.encode()"),
    *("[0] * 10**9", "'a'.join(range(10**7)|map('string'))", "10**10**7", "'x'.replace('', 'x' * 10**4)"),
)
_FILTERS = (
    *("upper", "trim", "length", "list", "string", "tojson", "join(',')", "first", "last", "default('x')", "sort"),
    *("batch(10**8)", "slice(10**8)", "center(10**9)", "indent(10**8)", "wordwrap(1)", "replace('x','y'*10**8)"),
    *("map('upper')", "select('string')", "selectattr('role')", "groupby('role')", "unique", "reverse", "sum"),
    *("truncate(3)", "urlize", "xmlattr", "pprint", "filesizeformat", "attr('__class__')", "int(base=99)"),
)
_TESTS = ("defined", "string", "mapping", "iterable", "none", "divisibleby(0)", "sameas(1)", "in [1]", "no_such")
_OPERATORS = ("+", "-", "*", "/", "%", "//", "**", "~", "==", "<", "in", "and", "or")
_NESTED = (("{% if true %}", "{% endif %}"), ("{% for a in [1,2] %}", "{% endfor %}"))
_TAGS = (
    "{%% for m in %s %%}%s{%% endfor %%}",
    "{%% for m in %s recursive %%}%s{{ loop(%s) }}{%% endfor %%}",
    "{%% if %s is %s %%}%s{%% endif %%}",
    "{%% set x = %s %%}%s",
    "{%% macro f(a) %%}%s{{ f(a) }}{%% endmacro %%}{{ f(%s) }}",
    "{%% filter %s %%}%s{%% endfilter %%}",
    "{%% call %s %%}%s{%% endcall %%}",
    "{%% generation %%}%s{%% endgeneration %%}",
    "{%% include %s %%}%s",
    "{%% extends %s %%}%s",
    "{%% import %s as y %%}%s",
    "{%% block b %%}%s{%% endblock %%}",
    "{%% with z = %s %%}%s{%% endwith %%}",
    "{%% set ns.a = %s %%}%s",
    "{%% autoescape %s %%}%s{%% endautoescape %%}",
    "{%% do %s %%}%s{%% break %%}",
    "{# %s #}%s",
    "{%% raw %%}%s{%% endraw %%}",
)


def template(random: Random, honest: str) -> str:
    """Return a template, often around or within `honest`, so that it writes the images."""
    part = _part(random, random.choice((1, 2, 3, 5)))
    match random.randrange(6):
        case 0:
            return part
        case 1:
            return honest + part
        case 2:
            at = random.randrange(len(honest))
            return honest[:at] + part + honest[at:]
        case 3:
            depth = random.choice((50, 200, 500, 5000))
            opened, closed = random.choice(_NESTED)
            return opened * depth + honest + closed * depth
        case 4:
            signs = random.choice(("()", "[]", "{}"))
            depth = random.choice((50, 500, 5000, 50_000))
            return "{{ " + signs[0] * depth + "1" + signs[1] * depth + " }}" + honest
        case _:
            return part + honest


def _part(random: Random, depth: int) -> str:
    if depth == 0:
        return f"{{{{ {_expression(random)} }}}}"
    tag = random.choice(_TAGS)
    count = tag.count("%s")
    if "is %s" in tag:
        return tag % (_expression(random), random.choice(_TESTS), _part(random, depth - 1))
    if tag.startswith("{%% filter"):
        return tag % (random.choice(_FILTERS), _part(random, depth - 1))
    inner = [_expression(random) for _ in range(count)]
    # The body is the argument after the first `%}`.
    body = 0 if tag.split("%%}")[0].count("%s") == 0 else 1
    inner[min(body, count - 1)] = _part(random, depth - 1)
    return tag % tuple(inner)


def _expression(random: Random) -> str:
    value = random.choice(_VALUES)
    match random.randrange(6):
        case 0:
            return value
        case 1:
            return f"({value}) {random.choice(_OPERATORS)} ({random.choice(_VALUES)})"
        case 2:
            return f"({value})[{random.choice(_VALUES)}]"
        case 3:
            return f"({value}).{random.choice(('a', 'role', '__class__', 'append(1)', 'format', 'items()'))}"
        case 4:
            return f"({value})|{random.choice(_FILTERS)}|{random.choice(_FILTERS)}"
        case _:
            return f"({value})|{random.choice(_FILTERS)}"
