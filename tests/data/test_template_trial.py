"""The script that renders a template in a subprocess."""

from __future__ import annotations

from hone.data.template_trial import render


def test_it_renders_what_transformers_would() -> None:
    template = (
        "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
        "{{ tools | tojson(indent=None, ensure_ascii=False) }}{{ strftime_now('%%') }}"
    )
    assert render(template, {"messages": [{"content": "a"}, {}], "tools": [1]}) == "a[1]%"
