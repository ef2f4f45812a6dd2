# SPDX-License-Identifier: Apache-2.0
"""The guard accepts the installed DeepSpeed and notices every way in which one can differ."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftds_ext.errors import MissingDependencyError, UnsupportedVersionError
from peftds_ext.integrations.deepspeed import versions
from peftds_ext.integrations.deepspeed.versions import Expected, check_deepspeed, describe, parameter_names

deepspeed = pytest.importorskip("deepspeed")

from deepspeed.ops.adam import cpu_adam  # noqa: E402
from deepspeed.runtime import engine  # noqa: E402
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3  # noqa: E402
from deepspeed.utils import instrument_w_nvtx  # noqa: E402


def test_installed_deepspeed_is_supported() -> None:
    check_deepspeed()
    assert describe()[:2] == (deepspeed.__version__, True)


@pytest.mark.parametrize("version", ["0.19.7", "0.18.9", "0.20.0", "0.20.0.dev1", "1.0", "unknown"])
def test_version_outside_the_range_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(UnsupportedVersionError) as caught:
        check_deepspeed()
    assert version in str(caught.value)
    assert ">=0.19.8,<0.20" in str(caught.value)
    assert describe()[1] is False


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+abc123", "0.19.99"])
def test_version_inside_the_range_goes_by_its_signatures(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    check_deepspeed()


def test_range_is_the_one_that_the_package_requires() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert f'"deepspeed{versions.SUPPORTED}"' in pyproject.read_text()


def _changed(self: Any, params_to_release: Any, partitions: Any) -> None: ...


@pytest.mark.parametrize("decorate", [lambda function: function, instrument_w_nvtx], ids=["plain", "nvtx"])
def test_changed_parameter_is_refused_with_both_signatures(
    decorate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage3, "partition_grads", decorate(_changed))
    with pytest.raises(UnsupportedVersionError) as caught:
        check_deepspeed()
    message = str(caught.value)
    assert deepspeed.__version__ in message
    assert "DeepSpeedZeroOptimizer_Stage3.partition_grads" in message
    assert "(self, params_to_release, grad_partitions)" in message
    assert "(self, params_to_release, partitions)" in message
    assert "_optimizer_step" not in message
    version, supported, reason = describe()
    assert (version, supported) == (deepspeed.__version__, False)
    assert "partition_grads" in reason


def test_every_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Stage3, "_offload_grad_partition_at_boundary")
    monkeypatch.setattr(Stage3, "step", lambda self, closure=None, scaler=None: None)
    with pytest.raises(UnsupportedVersionError) as caught:
        check_deepspeed()
    assert "Stage3._offload_grad_partition_at_boundary is missing" in str(caught.value)
    assert "Stage3.step should accept (self, closure)" in str(caught.value)


@pytest.mark.parametrize("owner", [Stage3, cpu_adam.DeepSpeedCPUAdam])
def test_each_method_in_the_table_is_compared(owner: type, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"{owner.__module__}:{owner.__qualname__}."
    names = [name.removeprefix(prefix) for name in versions.SIGNATURES[(0, 19)] if name.startswith(prefix)]
    assert names
    for name in names:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda unexpected: None)
            with pytest.raises(UnsupportedVersionError, match=rf"{owner.__name__}\.{name} should accept"):
                check_deepspeed()


def test_each_method_that_the_engine_overrides_is_in_the_table() -> None:
    from peftds_ext.integrations.deepspeed.stage3 import engine_class

    ours = [cls for cls in engine_class(Stage3).__mro__ if cls.__module__.startswith("peftds_ext.")]
    defined = {name for cls in ours for name, value in vars(cls).items() if inspect.isfunction(value)}
    overridden = {name for name in defined if inspect.isfunction(getattr(Stage3, name, None))}
    table = {name.rpartition(".")[2] for name in versions.SIGNATURES[(0, 19)] if "Stage3" in name}
    assert "_optimizer_step" in overridden
    assert overridden <= table


def test_initialize_with_another_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "initialize", lambda args=None, model=None: None)
    with pytest.raises(UnsupportedVersionError, match=r"deepspeed\.initialize should accept"):
        check_deepspeed()


def test_initialize_that_was_wrapped_properly_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = deepspeed.initialize

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(deepspeed, "initialize", wrapper)
    check_deepspeed()


def test_missing_builder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_adam, "CPUAdamBuilder")
    with pytest.raises(UnsupportedVersionError, match=r"cpu_adam\.CPUAdamBuilder is missing"):
        check_deepspeed()


def test_engine_that_keeps_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DeepSpeedZeroOptimizer_Stage3", Stage3, raising=False)
    with pytest.raises(UnsupportedVersionError, match="can no longer be replaced"):
        check_deepspeed()


def test_absent_deepspeed_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependencyError, match="pip install 'deepspeed"):
        check_deepspeed()
    assert "not installed" in describe()[2]


def test_describe_survives_an_import_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise RuntimeError('no driver here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed")
    assert describe()[1:] == (False, "no driver here")


def test_decorators_are_undone() -> None:
    assert Stage3.step.__name__ == "wrapped_fn", "instrument_w_nvtx now sets __wrapped__: simplify"
    assert parameter_names(Stage3.step) == ("self", "closure")
    assert parameter_names(cpu_adam.DeepSpeedCPUAdam.step) == ("self", "closure")


def test_function_that_really_collects_everything_is_left_as_it_is() -> None:
    def plain(*args: Any, **kwargs: Any) -> None: ...

    assert parameter_names(plain) == ("*args", "**kwargs")


@pytest.mark.parametrize(
    ("names", "fits"),
    [
        (("self", "a", "x", "k"), True),
        (("self", "a", "k"), True),
        (("self", "b", "k"), False),
        (("self", "a", "x"), False),
        (("self", "k"), False),
    ],
)
def test_open_ended_expectation(names: tuple[str, ...], fits: bool) -> None:
    assert Expected(("self", "a"), keywords=("k",)).fits(names) is fits
