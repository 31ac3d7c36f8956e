"""`python -m recipe.dapo.main_dapo`, as verl's commands name it: hone.verl.finder says what runs."""

import hone  # noqa: F401 -- it installs the finder that answers for the programs below here
