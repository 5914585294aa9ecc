"""Check the built site: links and anchors lead somewhere, nothing is loaded from outside, the start page is light."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parent.parent / "build" / "docs"
MOST = 500_000  # bytes of the start page with all that it loads


class Page(HTMLParser):
    """The anchors, links and assets of a page."""

    def __init__(self, file: Path):
        super().__init__()
        self.file, self.anchors, self.links, self.assets = file, {"", "top"}, list[str](), list[str]()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.assets.append(found["href"])
        elif tag in ("img", "script", "iframe", "source", "video") and "src" in found:
            self.assets.append(found["src"])

    def resolve(self, address: str) -> Path:
        """Return the file that an address of this page means."""
        path = unquote(urlsplit(address).path)
        return (self.file.parent / path).resolve() if path else self.file


def is_outside(address: str) -> bool:
    return bool(urlsplit(address).scheme or urlsplit(address).netloc) and not address.startswith("data:")


def main() -> None:
    pages = {file.resolve(): Page(file.resolve()) for file in sorted(SITE.rglob("*.html"))}
    wrong = []
    for file, page in pages.items():
        name = file.relative_to(SITE)
        wrong += [f"{name} loads {address} from outside" for address in page.assets if is_outside(address)]
        inside = [address for address in (*page.links, *page.assets) if not is_outside(address)]
        for address in inside:
            if address.startswith("data:"):
                continue
            target, anchor = page.resolve(address), unquote(urlsplit(address).fragment)
            if not target.exists():
                wrong.append(f"{name}: {address} is not there")
            elif target in pages and anchor not in pages[target].anchors:
                wrong.append(f"{name}: {address} has no such anchor")
    start = pages[SITE / "index.html"]
    weight = sum(file.stat().st_size for file in {start.file, *map(start.resolve, start.assets)})
    if weight > MOST:
        wrong.append(f"the start page weighs {weight / 1000:.0f} kB, more than {MOST / 1000:.0f}")
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {links} links; start page {weight / 1000:.0f} kB")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
