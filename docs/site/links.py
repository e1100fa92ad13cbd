"""Links as the site needs them: pages are written to be read in the repository, where README.md lies above docs/."""

from __future__ import annotations

import os
import os.path
import re
from pathlib import Path
from typing import Any

from mpu_cli.version import __version__

ROOT = Path(__file__).resolve().parents[2]
AT_ROOT = {"README.md": "index.md", **{f"{name}.md": f"{name.lower()}.md" for name in
           ("CONTRIBUTING", "SECURITY", "CHANGELOG")}}  # fmt: skip
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """The version on each page and, where a workflow of GitHub builds the site, links to its repository."""
    config["copyright"] = f"mpu {__version__}"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        config["repo_url"] = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        config["repo_name"], config["edit_uri"] = repository, "edit/main/"
    return config


def on_pre_page(page: Any, config: Any, **_: object) -> Any:
    """The edit link of each page: of what lies elsewhere in the repository its place there, of what is made none."""
    source = source_of(page.file.src_uri)
    is_written = config["repo_url"] and (ROOT / source).is_file()
    page.edit_url = f"{config['repo_url']}/{config['edit_uri']}{source}" if is_written else None
    return page


def source_of(page: str) -> str:
    """Where a page of the site lies in the repository."""
    by_page = {name: path for path, name in AT_ROOT.items()}
    return by_page.get(page) or (page if page.startswith("examples/") else f"docs/{page}")


def page_of(path: str) -> str | None:
    """The file of the site that a file of the repository becomes; None if it is not on the site."""
    if path in AT_ROOT:
        return AT_ROOT[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    on_site = path.startswith("examples/") and Path(path).suffix in (".md", ".png", ".svg")
    return path if on_site and (ROOT / path).is_file() else None


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Rewrite the links of a page; what is not on the site is named by its path in the repository."""
    here = page.file.src_uri
    folder = os.path.dirname(source_of(here))

    def replace(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if not target or ":" in target:
            return match[0]
        path = os.path.normpath(os.path.join(folder, target))
        on_site = page_of(path)
        if on_site is None:
            return f"{text} (`{path}` in the repository)" if text.strip("`") not in path else f"`{path}`"
        return f"{image}[{text}]({os.path.relpath(on_site, os.path.dirname(here))}{anchor or ''})"

    return _LINK.sub(replace, markdown)
