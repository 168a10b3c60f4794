"""Which releases of DeepSpeed are supported, and that its private names stay in one file."""

import re
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest

from ds_fold.compat import check_deepspeed_version

PACKAGE = Path(__file__).parent.parent / "ds_fold"


def test_the_installed_release_is_supported():
    check_deepspeed_version(deepspeed.__version__)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.99", "0.19.8+abcdef"])
def test_supported_releases(version):
    check_deepspeed_version(version)


@pytest.mark.parametrize("version", ["0.15.4", "0.18.9", "0.19.7", "0.20.0", "1.0.0"])
def test_other_releases_are_refused_with_the_remedy(version):
    with pytest.raises(RuntimeError, match=rf"0\.19\.8, < 0\.20, but {re.escape(version)} is installed: pip install"):
        check_deepspeed_version(version)


def test_another_release_is_refused_before_what_it_lacks_is_imported():
    program = ("import deepspeed, sys; deepspeed.__version__ = '0.16.9'; sys.modules['deepspeed.runtime.torch_autocast'] = None; "
               "import ds_fold; ds_fold.PipelineModule")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: ds_fold supports DeepSpeed >= 0.19.8, < 0.20, but 0.16.9" in done.stderr


def test_private_names_of_deepspeed_are_touched_in_compat_only():
    """Private attributes that the DeepSpeed base classes define may be read and overridden in compat/, nowhere else; the
    instruction map is DeepSpeed's extension point and the one exception."""
    from ds_fold.compat import _StockEngine, _StockModule
    source = "".join((Path(deepspeed.__file__).parent / "runtime" / name).read_text()
                     for name in ("engine.py", "pipe/engine.py", "pipe/module.py"))
    private = set(re.findall(r"self\.(_[a-z]\w+)", source))
    private |= {name for base in (_StockEngine, _StockModule) for name in vars(base) if name.startswith("_") and name[1] != "_"}
    private -= {"_INSTRUCTION_MAP", "_parameters", "_modules", "_buffers"}
    assert len(private) > 100
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "compat":
            used = set(re.findall(r"\.(_[a-z]\w+)", path.read_text())) | set(re.findall(r"def (_[a-z]\w+)", path.read_text()))
            assert not used & private, f"{path.name} touches {sorted(used & private)}"
