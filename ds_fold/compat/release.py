"""Which releases of DeepSpeed are supported. Importing this module refuses the others, before what they lack is imported."""

from deepspeed import __version__
from packaging.version import Version

#: releases of DeepSpeed that this folder was written for. 0.19.8 is the first whose pipeline engine asks a method for its schedule;
#: before 0.19.3 pipelines scaled gradients wrongly, too
SUPPORTED_DEEPSPEED = ("0.19.8", "0.20")


def check_deepspeed_version(version: str = __version__) -> None:
    """Raises RuntimeError unless ``version`` is a supported release of DeepSpeed."""
    low, high = SUPPORTED_DEEPSPEED
    release = Version(Version(version).base_version)
    if not Version(low) <= release < Version(high):
        raise RuntimeError(f"ds_fold supports DeepSpeed >= {low}, < {high}, but {version} is installed: "
                           f"pip install 'deepspeed>={low},<{high}'")


check_deepspeed_version()
