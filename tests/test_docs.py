"""The documentation: a reference of every key, pages that are in the site, links that lead somewhere."""

import re
from pathlib import Path

import pytest

from ds_fold import config_blocks
from ds_fold.config import FoldConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "configs/README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: made when the site is built
GENERATED = {ROOT / "docs/configuration.md"}


@pytest.fixture(scope="module")
def reference():
    import importlib.util
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_key_with_its_description(reference):
    page = reference.markdown()
    models = [FoldConfig, *(value for value in vars(config_blocks).values()
                            if getattr(value, "__module__", None) == config_blocks.__name__ and hasattr(value, "model_fields"))]
    assert len(models) >= 5
    for model in models:
        described = reference.descriptions(model)
        assert set(described) == set(model.model_fields)
        for name, text in described.items():
            assert text, f"{model.__name__}.{name} has no docstring below it"
            anchor = name if model is FoldConfig else f"{model.__name__.lower()}-{name}"
            assert re.search(rf"^### `{name}` \{{: #{anchor} \}}\n\n\*.+\*\n\n{re.escape(text)}$", page, re.MULTILINE), name
    assert page.count("### ") == sum(len(model.model_fields) for model in models)


def test_the_reference_tells_types_bounds_and_defaults(reference):
    page = reference.markdown()
    for facts in ('`segments` {: #segments }\n\n*integer, at least 1, default `1`*',
                  '`comm_chunk_bytes` {: #comm_chunk_bytes }\n\n*integer, at least 1024, default `1048576`*',
                  '`partition` {: #partition }\n\n*string or list of integers or [object](#objectivepartition)*',
                  '`method` {: #objectivepartition-method }\n\n*`"memory_efficiency"` or `"throughput"` or `"memory"`, required*'):
        assert f"### {facts}\n" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem if path.parent.name == "docs" else path.parent.name)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if ":" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target in GENERATED, f"{page.name}: {link}"
        if anchor and target.suffix == ".md" and target not in GENERATED:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], link


def test_every_page_is_in_the_sites_navigation():
    navigation = set(re.findall(r": ([\w\-/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {path.name for path in PAGES[2:]} | {"index.md", "configuration.md", "configs/README.md"} == navigation
