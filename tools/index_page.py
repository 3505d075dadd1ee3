"""The README as the package index shows it: its links to pages of the checkout lead nowhere there, and become paths."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"


def get_metadata_hook() -> Any:
    """Return the hook's class; hatchling finds this function by its name."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class IndexPage(MetadataHookInterface):
        """Sets the long description of the package."""

        def update(self, metadata: dict[str, Any]) -> None:
            metadata["readme"] = {"content-type": "text/markdown", "text": index_page(README.read_text())}

    return IndexPage


def index_page(text: str) -> str:
    """Return a page in Markdown without its pictures, and with paths in place of links that are not of the web.

    >>> index_page("![a picture](status.svg) [Tests](tests/README.md#screens), [Slurm](https://slurm.schedmd.com)")
    ' Tests (`tests/README.md`), [Slurm](https://slurm.schedmd.com)'
    """
    text = re.sub(r"!\[[^]]*\]\((?!https:)[^)]*\)", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https:)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)
