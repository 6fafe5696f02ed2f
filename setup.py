"""What pyproject.toml cannot declare: the extension module, and an example that the package contains."""

import pathlib
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Adds the example that `meshfeed demo` runs, for installs without a checkout."""

    def run(self) -> None:  # noqa: D102 (setuptools calls it)
        super().run()
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib) / "meshfeed" / "_examples"
            self.mkpath(str(target))
            self.copy_file("examples/train_lm.py", str(target / "train_lm.py"))


extension = Extension(
    "meshfeed._src.sources.array_record._riegeli",
    ["src/meshfeed/_src/sources/array_record/_riegeli.c"],
    extra_compile_args=["-std=c11", "-O3"],
    libraries=["dl", "pthread"],
    optional=True,  # without a C compiler the install succeeds, and the array_record library reads instead
    py_limited_api=True,
)
# The limited API of Python 3.11: one wheel serves that version and every later one.
options: dict[str, Any] = {"bdist_wheel": {"py_limited_api": "cp311"}}

setup(cmdclass={"build_py": BuildPy}, ext_modules=[extension], options=options)
