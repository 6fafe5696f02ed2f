"""What pyproject.toml cannot declare: the extension modules, and an example that the package contains."""

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


def extension(name: str, *libraries: str) -> Extension:
    """Without a C compiler the install succeeds, and Python code does the same work more slowly."""
    return Extension(
        f"meshfeed._src.{name}",
        [f"src/meshfeed/_src/{name.replace('.', '/')}.c"],
        extra_compile_args=["-std=c11", "-O3"],
        libraries=list(libraries),
        optional=True,
        py_limited_api=True,
    )


extensions = [
    extension("order._best_fit"),
    extension("order._limits"),
    extension("order._permutation"),
    extension("sources.array_record._riegeli", "dl", "pthread"),
    extension("sources.tokens._reads"),
]
# The limited API of Python 3.11: one wheel serves that version and every later one.
options: dict[str, Any] = {"bdist_wheel": {"py_limited_api": "cp311"}}

setup(cmdclass={"build_py": BuildPy}, ext_modules=extensions, options=options)
