"""Chat templates: what transformers renders, and what is refused."""

import datetime

import jinja2
import pytest

from oxidize_jax.text.chat import render_chat

HI = [{"role": "user", "content": "Hi"}]


def render(template, messages=HI, **extra):
    return render_chat(template, messages, **{"bos_token": "<s>", "eos_token": "</s>", **extra})


def test_texts_agree_with_transformers(golden):
    cases = golden("chat")
    assert len(cases) == 16
    for case in cases:
        text = render(
            case["template"],
            case["messages"],
            add_generation_prompt=case["add_generation_prompt"],
            **case["extra"],
        )
        assert text == case["text"]


def test_a_token_that_is_not_there_prints_nothing():
    template = "{{ bos_token }}|{% if eos_token is defined %}eos{% endif %}"
    assert render(template, bos_token=None, eos_token=None) == "|"
    assert render(template) == "<s>|eos"


def test_extra_names_reach_the_template():
    template = "{{ tools }} {{ thinking }} {{ options.level }}"
    assert render(template, thinking=True, options={"level": (1, 2)}) == "None True [1, 2]"


def test_other_keys_of_a_message_reach_the_template():
    messages = [{"role": "user", "content": "Hi", "name": "zoé"}]
    assert render("{{ messages[0].name }}", messages) == "zoé"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a b"


def test_tojson_keeps_text_as_it_is():
    assert render("{{ x | tojson }}", x={"é": "<'&'>"}) == '{"é": "<\'&\'>"}'


def test_loop_controls_and_generation_blocks():
    template = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}"
        "{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    )
    assert render(template) == "02"


def test_strftime_now():
    before = datetime.datetime.now().replace(microsecond=0)
    text = render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    stamp = datetime.datetime.strptime(text, "%Y-%m-%d %H:%M:%S")
    assert before <= stamp <= datetime.datetime.now()


def test_raise_exception_is_a_value_error_with_its_words():
    with pytest.raises(ValueError, match="template refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('a\\nb ' * 999) }}",
        "{{ raise_exception(['a\\nb '] * 999) }}",
        "{{ [1].index('a\\nb ' * 999) }}",
    ],
)
def test_what_a_template_says_is_cut_and_in_one_line(template):
    with pytest.raises(ValueError, match="chat") as caught:
        render(template)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages[0]['content'].__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages | attr('__class__') | attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{% set x = messages.append(1) %}{{ messages }}",
        "{% set x = messages[0].update(role='system') %}{{ messages }}",
    ],
)
def test_malicious_templates_are_refused(template):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="refused, it is not safe to run"):
        render(template, messages)
    assert messages == HI


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template line 1"),
        ("a\n{% endfor %}", "chat template line 2"),
        ("{{ messages[5].content.x }}", "chat template failed: UndefinedError"),
        ("{{ 1 / 0 }}", "chat template failed: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "chat template failed: TypeError"),
        ("{% for i in range(999999999) %}{% endfor %}", "chat template failed: OverflowError"),
        ("{% include 'x' %}", "chat template failed: TypeError"),
    ],
)
def test_templates_that_fail(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


_NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
_MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
_DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 10000000000 }}", "text or list of more than 10000000"),
        ("{{ 10000000000 * [1] }}", "text or list of more than 10000000"),
        (_DOUBLED + "ns.x + ns.x %}{% endfor %}", "text or list of more than 10000000"),
        (_DOUBLED + "ns.x ~ ns.x %}{% endfor %}", "text or list of more than 10000000"),
        (_DOUBLED + "'x' * 9999999 %}{% endfor %}", "500000000 in all"),
        ("{{ 9 ** 9999999 }}", "number of more than 4096 bits"),
        ("{{ 2 ** 4000 * 2 ** 4000 }}", "number of more than 4096 bits"),
        (
            "{% set x = 'x' * 999999 %}{% for i in range(11) %}{{ x }}{% endfor %}",
            "renders more than 10000000 characters",
        ),
    ],
)
def test_templates_without_end_are_stopped(template, message):
    with pytest.raises(ValueError, match=f"chat template stopped: .*{message}"):
        render(template)


@pytest.mark.parametrize(
    "expression",
    [
        "'x' | center(10000000000)",
        "'x'.center(10000000000)",
        "'x'.ljust(width)",
        "messages | tojson(indent=10000000000)",
        "('x' * 99999) | replace(new='x' * 99999, old='x')",
        "'x' | indent(10000000000, true)",
        "[1] | batch(10000000000, 0) | list",
        "('x' * 99999) | replace('x', 'x' * 99999)",
        "('x' * 99999).replace('x', 'x' * 99999)",
        "(['x' * 99999] * 99999) | join",
        "[1, 2] | join('x' * 9999999)",
        "'x'.join(['x' * 99999] * 99999)",
        "'%10000000000d' % 1",
        "'%*d' % (width, 1)",
        "'%10000000000d' | format(1)",
        "'{:>10000000000}'.format(1)",
        "'{:{}}'.format(1, width)",
    ],
)
def test_methods_and_filters_that_make_long_texts_are_stopped(expression):
    with pytest.raises(ValueError, match=r"chat template stopped: it (makes|formats|indents)"):
        render("{{ " + expression + " }}", width=10**10)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'x' | center(5)", "  x  "),
        ("'x'.ljust(3) ~ 'x'.zfill(2)", "x  0x"),
        ("'a\\nb' | indent(2, true)", "  a\n  b"),
        ("'a\\nb' | indent('> ')", "a\n> b"),
        ("[1, 2, 3] | batch(2, 0) | list", "[[1, 2], [3, 0]]"),
        ("'axa' | replace('a', 'bb') ~ 'axa'.replace('a', 'c', 1)", "bbxbbcxa"),
        ("messages | map(attribute='role') | join(', ')", "user"),
        ("messages | join('-', attribute='content') ~ '-'.join(['a', 'b'])", "Hia-b"),
        ("'%s in 2024123 at 100%%' % 5", "5 in 2024123 at 100%"),
        ("'%3d' | format(5) ~ '{:>3} 2024123'.format(7)", "  5  7 2024123"),
    ],
)
def test_methods_and_filters_make_what_they_always_did(expression, text):
    assert render("{{ " + expression + " }}") == text


@pytest.mark.parametrize("template", [_NESTED, _MACRO + "{{ f(40) }}"])
def test_loops_and_macros_without_end_are_stopped(monkeypatch, template):
    monkeypatch.setattr("oxidize_jax.text.template_budget.MAX_STEPS", 9999)
    with pytest.raises(ValueError, match="chat template stopped: its loops and macros take more"):
        render(template)


def test_a_template_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr("oxidize_jax.text.template_budget.MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"chat template stopped: it takes more than 0\.05 sec"):
        render("{% for i in range(99999) %}{% set x = range(9999) | list %}{% endfor %}")


def test_limits_are_for_each_rendering_and_leave_the_operators_as_they_are(monkeypatch):
    monkeypatch.setattr("oxidize_jax.text.template_budget.MAX_STEPS", 1000)
    template = (
        "{% macro twice(x) %}{{ x ~ x }}{% endmacro %}{% set x = 'ab' * 3 + 'c' %}"
        "{% for i in range(999) %}{% if loop.last %}{{ loop.index ~ x ~ none }}{% endif %}"
        "{% endfor %}{{ twice(2 ** 3 + 1.5) }}{{ [1] + [2] * 2 }}{{ 2 * 3 }}"
    )
    for _ in range(3):
        assert render(template) == "999abababcNone9.59.5[1, 2, 2]6"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ((), "messages is empty"),
        (None, "messages=NoneType: must be a list"),
        ("Hi", "messages=str: must be a list"),
        ({"role": "user", "content": "Hi"}, "messages=dict: must be a list"),
        (["Hi"], r"messages\[0\]=str: must be an object"),
        ([*HI, {"role": "user"}], r"messages\[1\] has no 'content'"),
        ([{"content": "Hi"}], r"messages\[0\] has no 'role'"),
        ([{"role": "", "content": "Hi"}], r"messages\[0\].role=''"),
        ([{"role": 3, "content": "Hi"}], r"messages\[0\].role=3"),
        ([{"role": "user", "content": None}], r"messages\[0\].content=NoneType: must be text"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content=int: must be text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": ["Hi"]}], r"content\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is of type 'text'"),
        ([{"role": "user", "content": "", "x": object()}], r"messages\[0\].x=object"),
        ([{"role": "user", "content": "", "x": [{1: 2}]}], r"messages\[0\].x\[0\]: keys must be"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render("{{ messages }}", messages)


def test_arguments_must_be_plain_data():
    with pytest.raises(ValueError, match=r"template argument.tools\[0\]=function"):
        render("{{ tools }}", tools=[render])


_MORE = "it makes a text or list of more than 10000000 items"


def _in_each_other(expression, turns=60, first="['x']"):
    return (
        f"{{% set ns = namespace(a={first}) %}}{{% for i in range({turns}) %}}"
        f"{{% set ns.a = {expression} %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    "template",
    [
        *(
            _in_each_other(expression)
            for expression in (
                "[ns.a, ns.a]",
                "(ns.a, ns.a)",
                "{1: ns.a, 2: ns.a}",
                "dict(a=ns.a, b=ns.a)",
                "[ns.a] + [ns.a]",
                "[ns.a] * 2",
                "[[ns.a]] | batch(2, ns.a) | first",
                "[[ns.a, 1] | list] | map('batch', 4, ns.a) | first | list",
                "[(ns.a, 1)] | groupby(0) | list",
                "cycler(ns.a, ns.a).items",
                "{1: ns.a, 2: ns.a}.values() | list",
            )
        ),
        "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}"
        "{{ f(60, 1) }}",
    ],
)
def test_lists_that_are_many_times_in_each_other_are_stopped(template):
    for use in ("{{ ns.a }}", "{{ ns.a | tojson }}", "{{ ns.a == [ns.a] }}", "{{ {}[ns.a] }}"):
        with pytest.raises(ValueError, match=f"chat template stopped: {_MORE}"):
            render(template + use)


@pytest.mark.parametrize("expression", ["[ns.a]", "(ns.a,)"])
def test_lists_too_deep_in_each_other_are_stopped(expression):
    with pytest.raises(ValueError, match="stopped: it makes lists in lists more than 200 deep"):
        render(_in_each_other(expression, turns=99999) + "{{ {}[ns.a] }}")


def test_a_namespace_that_holds_itself_is_printed_without_what_it_holds():
    many = _in_each_other("namespace(x=ns.a, y=ns.a)")
    assert render(many + "{{ ns.a }}{% set ns.a = ns %}{{ [ns] }}") == "<Namespace>[<Namespace>]"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("('{0}' * 9999).format('x' * 9999)", "makes a text"),
        ("('{0}' * 1000000).format('x' * 9999999)", "formats a text of more"),
        ("('%(a)s' * 999) % {'a': 'x' * 99999}", "makes a text"),
        ("('%(a)s' * 999) | format(a='x' * 99999)", "makes a text"),
        ("('%s' * 9999) % ('x',)", "makes a text"),
        ("'%(a)99999d' % {'a': 1}", "formats a field"),
        ("'%(a(b)c)99999d' % {'a(b)c': 1}", "formats a field"),
        ("messages | tojson(separators=('x' * 999, ':'))", "indents or separates"),
        ("messages | tojson(indent='x' * 999)", "indents or separates"),
        ("(range(99999) | list) | tojson(separators=('x' * 99, ':'))", "JSON of more than"),
        ("('x\\n' * 99999) | indent('x' * 999)", "makes a text"),
        ("('x' * 9999999).join('a' * 9999)", "makes a text"),
        ("('x' * 9999999).join({'a': 1, 'b': 2})", "makes a text"),
        ("('a' * 5000000).rfind('b' ~ 'a' * 2500000)", "searches a long text"),
        ("('a' * 5000000) | trim('b' * 2500000 ~ 'a')", "searches a long text"),
        ("1 | round(1000000000, 'ceil')", "digits"),
        ("[[1]] | sum(start=[])", "sum of what is no number"),
        ("strftime_now('%Y' * 9999)", "layout of more than"),
        ("([missing] * 99999) | map('default', ['x' * 999999]) | join", "makes a text"),
    ],
)
def test_more_that_makes_long_texts_or_takes_long_is_stopped(expression, message):
    with pytest.raises(ValueError, match=f"chat template stopped: it .*{message}"):
        render("{{ " + expression + " }}")


@pytest.mark.parametrize(
    "expression",
    [
        "'{a}'.format_map({'a': 1})",
        "('{a}' | attr('format_map'))({'a': 1})",
        "'x'.translate({120: 'y'})",
        "'x'.encode()",
        "'x'.expandtabs(99)",
        "(1).to_bytes(9999999999, 'big')",
        "dict.fromkeys([1])",
    ],
)
def test_methods_that_no_chat_needs_are_refused(expression):
    with pytest.raises(ValueError, match="refused, it is not safe to run: it asks for"):
        render("{{ " + expression + " }}")


@pytest.mark.parametrize("name", ["urlize", "wordwrap", "xmlattr", "pprint", "striptags"])
def test_filters_that_no_chat_needs_are_not_there(name):
    with pytest.raises(ValueError, match=f"chat template line 1: No filter named '{name}'"):
        render("{{ 'x' | " + name + " }}")


def test_what_is_printed_in_a_macro_or_a_block_counts_too():
    printed = "{% set x = 'x' * 999999 %}{% set y %}{% for i in range(999) %}{{ x }}{% endfor %}"
    literal = "{% set y %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}"
    for template in (printed, literal):
        with pytest.raises(ValueError, match="stopped: it prints more than 40000000 characters"):
            render(template + "{% endset %}")
    with pytest.raises(ValueError, match="stopped: it has more than 1000000 characters itself"):
        render("x" * 1000001)


@pytest.mark.parametrize("use", ["a == b", "a is eq(b)", "a | string", "[1][a]", "a ~ b", "(1).x"])
def test_the_clock_is_looked_at_without_a_loop_too(monkeypatch, use):
    monkeypatch.setattr("oxidize_jax.text.template_budget.MAX_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"chat template stopped: it takes more than -1 sec"):
        render("{% set c = " + use + " %}{{ c }}", a="a", b="b")


def test_a_long_conversation_is_rendered():
    messages = [{"role": "user", "content": "word " * 100}] * 2000
    template = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m] %}"
        "{{ m.content | trim }}{{ m | tojson }}{% endfor %}{{ ns.seen | length }}"
    )
    assert render(template, messages).endswith("2000")


def test_lists_are_made_as_they_always_were():
    template = (
        "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}{{ [] }}{{ () }}{{ {} }}"
        "{{ [1, 2, 3][1:] }}{{ (1,) + (2,) }}{{ [[1, 2] | map('string') | list] }}"
        "{{ {'a': [1]}['a'] }}{% set x, y = 1, 2 %}{{ x < y }}{{ [1] | tojson(indent=1) }}"
    )
    expected = "1234[]()" + "{}" + "[2, 3](1, 2)[['1', '2']][1]True[\n 1\n]"
    assert render(template) == expected


_WITH_TOOLS = """
{%- macro kind(type) -%}
{%- if type is string -%}{{ type }}{%- else -%}{{ type | map('string') | join(' | ') }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=0, seen=[]) -%}
{%- for message in messages[::-1] -%}
{%- if message.role == 'user' and not message.content.startswith('<') -%}
{%- set ns.last = messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for tool in tools -%}
{%- for name, spec in tool.properties | items -%}
{{ name }}: {{ kind(spec.type) }}{{ ', ' if not loop.last }}
{%- endfor -%}
{{ tool.properties.keys() | list | join(',') }}{% for k, v in tool | dictsort %}{{ k }}{% endfor %}
{%- endfor -%}
{{ ([tools[0].name] + [none, 'g'] | select('string') | list) | reject('equalto', 'g') | list }}
{%- for message in messages -%}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') -%}
{{ '<' ~ message['role'] + '>' + content | trim }}{{ message.get('name', '-') }}
{%- set ns.seen = ns.seen + [{'role': message.role}] -%}
{%- endfor -%}
{{ ns.seen | selectattr('role', 'equalto', 'user') | list | length }}{{ ns.last }}
{{ ns.seen | map(attribute='role') | unique | sort | join(',') }}{{ '%s-%d' | format('a', 3) }}
"""


def test_a_template_with_tools_renders_as_it_does_without_a_sandbox():
    tools = [{"name": "f", "properties": {"a": {"type": "int"}, "b": {"type": ["x", "null"]}}}]
    messages = [*HI, {"role": "assistant", "content": "<think>a</think>\nyo"}, *HI]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(_WITH_TOOLS)
    expected = plain.render(messages=messages, tools=tools)
    assert "a: int, b: x | nulla,b" in expected
    assert render(_WITH_TOOLS, messages, tools=tools) == expected
