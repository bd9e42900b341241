"""These tests run in a process of their own, whose torch has the test device.

torch learns of a device when it is imported, of this one as of torch_npu's. So the first of these
tests starts pytest anew for all of them, and what that says of each is reported here. Where torch
has an npu, as in that process, they just run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import npu_device
import pytest
import torch

HERE = Path(__file__).resolve().parent
REPORTS = "RLKIT_NPU_REPORTS"  # the file that the process of their own reports to
HAS_NPU = hasattr(torch, "npu")
_reports: dict[bool, dict[str, list]] = {}


def pytest_collection_modifyitems(items):
    """Skip, or with RLKIT_REQUIRE_COMPILER (CI) fail, where the device can't be compiled."""
    lacking = "" if HAS_NPU or os.environ.get("RLKIT_REQUIRE_COMPILER") else npu_device.missing()
    if lacking:
        for item in filter(_is_ours, items):
            item.add_marker(pytest.mark.skip(reason=f"no test device npu: {lacking}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Report what the process of their own said of a test."""
    if HAS_NPU or not _is_ours(item) or item.get_closest_marker("skip"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_all(item)[item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report):
    """In the process of their own: tell the one that started it."""
    if HAS_NPU and REPORTS in os.environ:
        data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config):
    global _config
    _config = config


def _is_ours(item) -> bool:
    return HERE in item.path.parents


def _run_all(item) -> dict[str, list]:
    """Reports by test of all selected tests here, or of all that start Ray clusters."""
    starts_ray = item.get_closest_marker("ray") is not None
    if starts_ray not in _reports:
        ours = filter(_is_ours, item.session.items)
        same = [i for i in ours if (i.get_closest_marker("ray") is not None) == starts_ray]
        with tempfile.NamedTemporaryFile("r") as file:
            said = _run([i.nodeid for i in same], item.config.rootpath, file.name)
            found = [_read(line, item.config) for line in file]
        _reports[starts_ray] = {i.nodeid: _of(i, found, said) for i in same}
    return _reports[starts_ray]


def _read(line: str, config) -> pytest.TestReport:
    data = json.loads(line)
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    if isinstance(report.longrepr, list):  # a skip's place and reason, which JSON has no tuple for
        report.longrepr = tuple(report.longrepr)
    return report


def _run(nodeids: list[str], rootpath: Path, reports: str) -> str:
    """Run tests in a process that has the device; what it printed."""
    try:
        npu_device.build()
    except RuntimeError as error:
        return str(error)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *nodeids]
    env = npu_device.environment(**{REPORTS: reports})
    done = subprocess.run(command, cwd=rootpath, env=env, capture_output=True, text=True)
    return done.stdout + done.stderr


def _of(item, found: list, said: str) -> list:
    """Reports of one test; a failure if its process ended without one."""
    reports = [report for report in found if report.nodeid == item.nodeid]
    if not any(report.when == "teardown" for report in reports):
        text = f"its process did not end this test. What it said:\n{said[-4000:]}"
        reports.append(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call"))
    return reports
