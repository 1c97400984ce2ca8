"""The page of `jobkit report` in a real browser: it draws, it shows values, and nothing of a run is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.made_run import hostile, made_run

from jobkit.report.page import collect, page
from jobkit.run.rundir import RunDir

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")

POINT = """
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const box = svg.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.6, clientY: box.top + 20 };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
}
"""
"""A pointer over each chart."""


def opened(file: Path) -> str:
    """What the page's elements are once a browser has run its script."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={file.parent / 'browser'}"]
    command = [browser, *options, "--dump-dom", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_browser_draws_the_page_and_runs_nothing_of_a_run(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"{number}" / "made<img src=x onerror=1>", hostile("page")) for number in range(2)]
    html = page([collect(run, run.status()) for run in runs])
    file = tmp_path / "page.html"
    file.write_text(html)
    dom = opened(file)
    assert 'data-charts="3"' in dom  # its own script has run to the end
    assert "data-broken" not in re.findall("<html[^>]*>", dom)[0]
    # The policy holds where the escaping would not.
    file.write_text(html.replace("<main>", "<main><script>document.documentElement.dataset.broken = 1</script>"))
    assert "data-broken" not in re.findall("<html[^>]*>", opened(file))[0]


def test_values_below_the_pointer_are_shown_as_text(tmp_path: Path) -> None:
    run: RunDir = made_run(tmp_path / "made-00000000", hostile("tip"))
    other = made_run(tmp_path / "made-00000001", hostile("tip"), lr=0.3)
    html = page([collect(one, one.status()) for one in (run, other)])
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", html)
    file = tmp_path / "page.html"
    file.write_text(without_policy.replace("</body>", f"<script>{POINT}</script></body>"))
    dom = opened(file)
    (shown,) = re.findall(r'<div class="tip".*?</div></div>', dom, re.DOTALL)
    assert "step 56" in shown  # of 0 to 99, whose axis begins and ends within the picture
    assert shown.count("lr=") == 2
    assert dom.count('class="pointer"') == 3
    assert "data-broken" not in re.findall("<html[^>]*>", dom)[0]
