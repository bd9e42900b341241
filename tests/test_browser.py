"""The quickstart as a person runs it: JupyterLab in Chromium, Run All Cells, a moving dashboard.

    RLKIT_SCREENSHOT=notebooks/img/01_quickstart_grpo.png make test ARGS="-k dashboard_moves"

writes the picture of the README again.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "quickstart"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NO_NEWS = '{"fetchNews": "false", "checkForUpdates": false}'


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def jupyterlab(folder, state):
    """A JupyterLab over ``folder`` with settings of its own; yields its address."""
    port = free_port()
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR")
    names += ("JUPYTERLAB_WORKSPACES_DIR", "JUPYTER_RUNTIME_DIR")
    env = dict(os.environ, RLKIT_FAST="0") | {name: str(state / name) for name in names}
    settings = state / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(NO_NEWS)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"]
    with open(state / "lab.log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5)
                break
            except OSError:
                assert server.poll() is None, (state / "lab.log").read_text()[-2000:]
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def run_all(page, address):
    """Open the quickstart and run all its cells."""
    page.goto(f"{address}/lab/tree/01_quickstart_grpo.ipynb?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    idle = "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'"
    page.wait_for_function(idle, timeout=120_000)
    started = page.locator(".jp-InputPrompt", has_text="[")
    for _ in range(5):  # a click that comes before the kernel is ready does nothing
        page.locator(".jp-Notebook").first.click()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_timeout(5_000)
        if any(text.strip("[]: ") for text in started.all_inner_texts()):
            return
    raise AssertionError("no cell started after five clicks on Run All Cells")


@pytest.mark.usefixtures("nothing_left_running")
def test_the_dashboard_moves_while_all_cells_run(tmp_path, chromium_path):
    from playwright.sync_api import sync_playwright

    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(ROOT / "notebooks" / "01_quickstart_grpo.ipynb", folder)
    with jupyterlab(folder, tmp_path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        run_all(page, address)
        board = page.locator(".jp-OutputArea-output .rlkit-dashboard").first
        board.wait_for(timeout=300_000)
        board.scroll_into_view_if_needed()
        seen = set()
        deadline = time.monotonic() + 300
        while len(seen) < 4 and time.monotonic() < deadline:
            seen.add(board.inner_text())
            time.sleep(0.5)
        if os.environ.get("RLKIT_SCREENSHOT"):
            time.sleep(15)
            page.screenshot(path=ROOT / os.environ["RLKIT_SCREENSHOT"])
        last = page.locator(".jp-OutputArea-output", has_text="'after'")
        last.wait_for(timeout=600_000, state="attached")
        failed = page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
        failed = [text for text in failed if "Traceback" in text or "Error" in text]
        browser.close()
    assert len(seen) >= 4, f"the dashboard showed only {seen}"
    assert not errors
    assert not failed
