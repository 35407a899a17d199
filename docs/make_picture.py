"""Draw the picture of a report for README.md, from a run directory.

finetune train recipes/quickstart.yaml
python docs/make_picture.py runs/quickstart docs/report.png

Needs Playwright (in `pip install ".[test]"`) and Chromium (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

# Keep the header and three sections of the page, in two columns.
STYLE = """
  .page { display: block; max-width: none; padding: 2rem 2.5rem 1.5rem; }
  .contents, footer, .pairs, section:not(#curves, #confusion, #mistakes) { display: none; }
  main { display: grid; grid-template-columns: 47rem 30rem; gap: 0 3rem; }
  .tiles { grid-template-columns: minmax(max-content, 1.5fr) repeat(4, 1fr); }
  header, #mistakes { grid-column: 1 / -1; }
  section { margin-top: 2.25rem; }
"""
WIDTH = 1400  # pixels


def draw(run: Path, picture: Path) -> None:
    """Draw part of a run's report.html as a PNG file.

    Args:
        run: a run directory that is done.
        picture: the PNG file to write.

    Raises:
        SystemExit: if the report or Chromium is missing.
    """
    page_file = run / "report.html"
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    if not page_file.is_file():
        raise SystemExit(f"{page_file}: no such file; run: finetune report {run}")
    if browser_path is None:
        raise SystemExit("chromium: not found on the path; install it (apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 200}, color_scheme="light", device_scale_factor=1
        )
        page.goto(page_file.resolve().as_uri())
        page.add_style_tag(content=STYLE)
        page.screenshot(path=picture, full_page=True)
        browser.close()
    with Image.open(picture) as drawn:
        small = drawn.convert("RGB").quantize(256)  # a third of the size
    small.save(picture, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(f"usage: python {sys.argv[0]} RUN PICTURE.png")
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
