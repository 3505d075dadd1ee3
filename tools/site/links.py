"""Checks a built site: each link and picture of its pages that is not of the web leads to a file and to an anchor."""

import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

site = Path(sys.argv[1]).resolve()
pages = {file: BeautifulSoup(file.read_bytes(), "html.parser") for file in site.rglob("*.html")}
anchors = {file: {"", *(tag["id"] for tag in page.select("[id]"))} for file, page in pages.items()}
checked, broken = 0, []
for file, page in pages.items():
    for tag in page.select("[href], [src]"):
        url = urlsplit(target := tag.get("href") or tag["src"])
        to = (file.parent / unquote(url.path)).resolve() if url.path else file
        if not (url.scheme or url.netloc):
            checked += 1
            if not to.is_file() or site not in to.parents or unquote(url.fragment) not in anchors.get(to, {""}):
                broken.append(f"{file.relative_to(site)}: {target}")
print(f"{len(pages)} pages with {checked} links, {len(broken)} of which lead nowhere", *broken, sep="\n")
sys.exit(bool(broken))
