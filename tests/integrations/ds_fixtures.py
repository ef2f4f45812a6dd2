# SPDX-License-Identifier: Apache-2.0
"""The server that tests with a real DeepSpeed share, and the summary of what they measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
from ds_runner import Runner

_measured: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    for package in ("deepspeed", "transformers", "peft", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    runner = Runner(tmp_path_factory.mktemp("runs"))
    yield runner
    runner.close()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep differences from stock for the summary, which ``-v`` shows."""
    return lambda **values: _measured.setdefault(request.node.nodeid, {}).update(values)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _measured or config.get_verbosity() <= 0:
        return
    terminalreporter.section("largest differences from the reference")
    for name, values in sorted(_measured.items()):
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{k} {v:.1e}" for k, v in values.items()))
    _measured.clear()  # two folders of tests have this hook
