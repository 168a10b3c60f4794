"""Hooks of mkdocs: README as front page, the generated reference, and the files outside of docs/ that pages link to.

Pages link to files as they lie in the repository, so that they can be read there, too; here links are turned to places in the site.
"""

import posixpath
import re
from pathlib import Path

import reference
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
#: files outside of docs/, by their place in the site
OUTSIDE = {"index.md": "README.md",
           **{path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix()
              for folder, pattern in (("configs", "*"), ("examples", "*.py")) for path in sorted((ROOT / folder).glob(pattern))}}
LINK = re.compile(r"\]\(([^)#\s]+)([^)]*)\)")


def on_files(files, config):
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "configuration.md", content=reference.markdown()))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    folder = (ROOT / OUTSIDE[here] if here in OUTSIDE else DOCS / here).parent
    places = {(ROOT / path).resolve(): uri for uri, path in OUTSIDE.items()}

    def moved(match):
        link, rest = match.groups()
        if ":" in link:
            return match[0]
        target = (folder / link).resolve()
        if target in places:
            uri = places[target]
        elif DOCS in target.parents:
            uri = target.relative_to(DOCS).as_posix()
        else:
            return match[0]  # left for mkdocs to complain about
        return f"]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{rest})"

    return LINK.sub(moved, markdown)
