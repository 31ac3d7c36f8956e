"""Runs a command that `hone launch kubernetes` encoded (see `entrypoint_without_quotes` in scripts.py)."""

from __future__ import annotations

import base64
import json
import os
import sys

if __name__ == "__main__":
    command = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    os.execvp(command[0], command)
