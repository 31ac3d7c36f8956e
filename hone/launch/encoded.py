"""Runs a command that `hone launch kubernetes` encoded (see `entrypoint_without_quotes`)."""

from __future__ import annotations

import base64
import json
import os
import sys

if __name__ == "__main__":
    words = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    os.execvp(words[0], words)
