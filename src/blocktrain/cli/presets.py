"""Presets by name: `--config demo` finds the demo.toml that ships with the package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# Inside an installed package, or beside src/ in a checkout.
FOLDERS = (PACKAGE / "presets", PACKAGE.parent.parent / "configs")


def resolve_config(path: Path) -> Path:
    """The path itself, or the preset of that name where no such file exists."""
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    for folder in FOLDERS:
        preset = folder / f"{path.name}.toml"
        if preset.exists():
            return preset
    return path
