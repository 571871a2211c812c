"""The Chromium of this machine, for the tests of the page and for its screenshots."""

import os
import shutil

WANTED = "no browser to look at the page with: run scripts/browser"
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def chromium() -> str | None:
    """The path of the one that `CHROMIUM` names, or else of an installed one; None where there is none."""
    for name in (os.environ.get("CHROMIUM", ""), *_NAMES):
        if name and (path := shutil.which(name)):
            return path
    return None
