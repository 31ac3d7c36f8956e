"""`hone recipes` lists and copies the recipes and examples of the package.

In a clone they are next to the package; in a wheel they are inside it (see setup.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import hone
from hone.config.errors import ConfigError, did_you_mean, nearest

SHIPPED_FOLDER = "shipped"
EXAMPLES = "examples"
_EXAMPLES_TITLE = "Plug-ins of your own: a reward manager, an agent loop, data preparation"


def shipped_folder() -> Path:
    """Returns the folder that contains `recipes` and `examples`."""
    package = Path(hone.__file__).resolve().parent
    if (package / SHIPPED_FOLDER).is_dir():
        return package / SHIPPED_FOLDER
    if (package.parent / "pyproject.toml").is_file():
        return package.parent
    raise ConfigError(
        f"{package} came without recipes; install the wheel, or run from a clone of the repository"
    )


def recipes() -> dict[str, Path]:
    """Returns the recipe folders by name."""
    root = shipped_folder()
    folders = {p.parent.name: p.parent for p in sorted((root / "recipes").glob("*/README.md"))}
    return folders | {EXAMPLES: root / EXAMPLES}


def listing() -> list[str]:
    """Returns one line per recipe: its name and the title of its README."""
    titles = {}
    for name, folder in recipes().items():
        readme = folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else _EXAMPLES_TITLE
        titles[name] = text.partition("\n")[0].lstrip("# ")
    name_width = max(map(len, titles))
    return [f"{name:<{name_width}}  {title}" for name, title in titles.items()]


def copy_recipe(name: str, out: str | None = None) -> Path:
    """Copies a recipe to `out`, by default `recipes/NAME` as its commands expect, and returns the folder."""
    folders = recipes()
    if name not in folders:
        hint = did_you_mean(nearest(name, folders))
        raise ConfigError(f"there is no recipe {name!r}.{hint} Use {', '.join(folders)}")
    default_target = Path(EXAMPLES) if name == EXAMPLES else Path("recipes") / name
    target = Path(out).expanduser() if out else default_target
    if target.exists():
        raise ConfigError(f"{target} already exists; name another folder: hone recipes {name} OUT")
    shutil.copytree(folders[name], target, ignore=shutil.ignore_patterns("__pycache__"))
    return target
