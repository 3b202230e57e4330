"""The engines are what is tested here, so an engine that is missing is a failure and never a skip."""

import pytest


def _fail_if_skipped(report):
    # An expected failure is a report of its own kind, and says what an engine is known not to do.
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as a failure here: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _fail_if_skipped(report)
    return report
