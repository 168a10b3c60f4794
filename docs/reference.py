"""The configuration reference as Markdown, generated from the typed model of the ``ds_fold`` block; also by itself:

    python docs/reference.py
"""

import ast
import inspect
import json
import textwrap
from typing import Any, Dict, List, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from ds_fold.config import FoldConfig

NAMES = {int: "integer", str: "string", bool: "true or false", float: "number", dict: "object"}

HEAD = """# Configuration reference

Generated from the typed model of the `ds_fold` block, `ds_fold/config.py` and `ds_fold/config_blocks.py`. The block stands in the
ds_config beside DeepSpeed's own keys, which keep their meaning. An unknown key, a wrong type or an impossible combination is one
message on every rank before the model is built.
"""


def descriptions(model: type) -> Dict[str, str]:
    """Field -> the docstring below it, as Markdown; empty where there is none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0].body
    below = {}
    for statement, following in zip(body, [*body[1:], None]):
        if isinstance(statement, ast.AnnAssign):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = inspect.cleandoc(following.value.value) if documented else ""
            below[statement.target.id] = text.replace("``", "`").replace("*", "\\*")
    return {name: below[name] for name in model.model_fields}


def type_name(annotation: Any) -> str:
    """An annotation in JSON's words."""
    if get_origin(annotation) is Union:
        return " or ".join(type_name(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {type_name(get_args(annotation)[0])}s"
    if is_block(annotation):
        return f"[object](#{annotation.__name__.lower()})"
    return NAMES.get(annotation, str(annotation))


def is_block(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def blocks_in(annotation: Any) -> List[type]:
    """The models of nested objects that an annotation allows."""
    return [annotation] if is_block(annotation) else [block for part in get_args(annotation) for block in blocks_in(part)]


def section(model: type) -> str:
    """A model's keys, each with type, bounds, default and description."""
    parts, described = [], descriptions(model)
    for name, field in model.model_fields.items():
        facts = [type_name(field.annotation)]
        facts += [f"{sign} {getattr(bound, attribute)}" for bound in field.metadata
                  for attribute, sign in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
                  if hasattr(bound, attribute)]
        if field.is_required():
            facts.append("required")
        elif isinstance(field.default, BaseModel):
            facts.append(f"default `{field.default.model_dump_json()}`")
        elif field.default is not None:
            facts.append(f"default `{json.dumps(field.default)}`")
        parts.append(f"### `{name}` {{: #{anchor(model, name)} }}\n\n*{', '.join(facts)}*\n\n{described[name]}\n")
    return "\n".join(parts)


def anchor(model: type, name: str) -> str:
    return name if model is FoldConfig else f"{model.__name__.lower()}-{name}"


def markdown() -> str:
    """The whole page."""
    nested = list(dict.fromkeys(block for field in FoldConfig.model_fields.values() for block in blocks_in(field.annotation)))
    page = [HEAD, f"## The block\n\n{section(FoldConfig)}"]
    for block in nested:
        keys = [name for name, field in FoldConfig.model_fields.items() if block in blocks_in(field.annotation)]
        where = " and ".join(f"[`{name}`](#{name})" for name in keys)
        page.append(f"## {block.__name__}\n\nAn object as value of {where}. {inspect.cleandoc(block.__doc__)}\n\n{section(block)}")
    return "\n".join(page)


if __name__ == "__main__":
    print(markdown())
