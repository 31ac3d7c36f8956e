"""In a checkout, `python -m recipe.dapo.main_dapo` runs `hone.recipe.dapo.main_dapo`.

This package is not installed, because it would hide a user's own package `recipe`.
"""

from hone.verl.finder import install_recipe_finder

install_recipe_finder()
