"""Puts recipes and examples into a wheel, as hone/shipped; the rest of the build is in pyproject.toml."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class WithRecipes(build_py):
    """The package, and what `hone recipes` copies; a clone has these beside the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ("recipes", "examples"):
            target = Path(self.build_lib) / "hone" / "shipped" / name
            copytree(ROOT / name, target, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithRecipes})
