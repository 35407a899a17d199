"""Render the HTML templates of pages: one self-contained file with a content security policy."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import sys
from typing import Any

import jinja2

from finetune.report.run_data import format_count, format_decimal, format_percent

__all__ = ["render_html"]

_VERSION = sys.modules["finetune"].__version__  # avoids a circular import
# XML and HTML forbid these, but file names may contain them
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{12,}")


def render_html(
    template: str,
    *,
    script: str,
    package: str = "finetune.report",
    sources: str = "img-src data:",
    **content: Any,
) -> str:
    """Render a template that extends `base.html`.

    Args:
        template: file of the template, in the folder `templates` of `package`.
        script: file of the page's script in the same folder; the page runs no other.
        package: the package of the template; it may also use the templates of `finetune.report`.
        sources: directives of the content security policy for what the page may load.
        content: the variables of the template.
    Returns: the page, in valid Unicode; control characters are replaced, access tokens redacted.
    """
    environment = _jinja_environment(package)
    loader = environment.loader
    assert loader is not None
    code = loader.get_source(environment, script)[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    html = environment.get_template(template).render(
        script=code, script_hash=f"sha256-{digest}", sources=sources, version=_VERSION, **content
    )
    html = _HUB_TOKEN.sub("hf_…", _CONTROL_CHARACTERS.sub("\ufffd", html))
    # escape names that are not valid Unicode
    return html.encode("utf-8", "backslashreplace").decode()


@functools.cache
def _jinja_environment(package: str) -> jinja2.Environment:
    packages = dict.fromkeys([package, "finetune.report"])
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": format_percent,
        "plain": format_decimal,
        "whole": format_count,
    }
    environment.filters["raw"] = lambda value: "" if value is None else value
    return environment
