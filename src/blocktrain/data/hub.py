"""Placeholder while the rest takes shape."""
from pathlib import Path
WIKITEXT: dict[str, object] = {}
def fetch_wikitext(spec: str, cache: Path) -> dict[str, list[Path]]: raise SystemExit
def fetch_dataset(name: str, cache: Path) -> dict[str, list[Path]]: raise SystemExit
