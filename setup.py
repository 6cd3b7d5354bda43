"""Builds the native kernels with cmake when the package is installed; everything else is in pyproject.toml."""

import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildNative(build_py):
    """Builds csrc/ into the package folder. Without cmake and a C++ compiler the package still works, slower, and says so."""

    def run(self) -> None:
        if shutil.which("cmake"):
            build = ROOT / "build"
            try:
                subprocess.check_call(["cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"])
                subprocess.check_call(["cmake", "--build", str(build), "--parallel"])
            except subprocess.CalledProcessError as error:
                print(f"unequal: the native kernels could not be built ({error}); the reference kernels will be used")
        super().run()


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:  # the wheel holds a shared library, so it is not pure Python
        return True


setup(cmdclass={"build_py": BuildNative}, distclass=PlatformDistribution)
