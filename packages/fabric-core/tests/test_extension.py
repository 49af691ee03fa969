"""`fabric_core.extension`: a package of somebody else's gets its C compiled as ours do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fabric_core.extension import Extension

HEADER = """
#include <stdint.h>
#include <fabric/domain.h>
/* cdef-begin */
uint32_t theirs_abi(void); /* of the engine that it was compiled for */
/* cdef-end */
"""
SOURCE = '#include "cdef_theirs.h"\nuint32_t theirs_abi(void) { return FAB_ABI_VERSION; }\n'


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    native = tmp_path / "src" / "theirs" / "native"
    native.mkdir(parents=True)
    (tmp_path / "hatch_build.py").touch()
    (native / "cdef_theirs.h").write_text(HEADER)
    (native / "theirs.c").write_text(SOURCE)
    return tmp_path


BUILDS = """
from fabric_core.extension import Extension
import importlib.util, pathlib, sys
theirs = pathlib.Path(sys.argv[1])
extension = Extension(theirs, "theirs", cdef="cdef_theirs.h", needs="stdint.h")
built = extension.compile()
made = built.stat().st_mtime_ns
assert extension.compile() == built and built.stat().st_mtime_ns == made, "nothing had changed"
spec = importlib.util.spec_from_file_location("theirs._native", extension.install_in_tree(built))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.lib.theirs_abi() > 0
with open(theirs / "src" / "theirs" / "native" / "theirs.c", "a") as source:
    source.write("/* another */")
assert extension.compile() not in {None, built}
"""

WHEEL = """
from fabric_core.extension import Extension
import os, pathlib, sys
theirs = pathlib.Path(sys.argv[1])
data = {"force_include": {}}
Extension(theirs, "theirs", cdef="cdef_theirs.h").build_into("standard", data)
((source, target),) = data["force_include"].items()
assert os.path.exists(source) and target.startswith("theirs/_native."), data
assert data["pure_python"] is False and ("tag" in data or data["infer_tag"] is True), data
assert not list((theirs / "src" / "theirs").glob("_native*")), "only an editable one is put beside the sources"
"""


@pytest.mark.parametrize("what", [BUILDS, WHEEL], ids=["compiled once", "into a wheel"])
def test_a_package_gets_its_extension_and_only_when_something_changed(theirs: Path, what: str) -> None:
    # a process of its own, as hatchling's: which distutils there is depends on what was imported before
    ended = subprocess.run([sys.executable, "-c", what, str(theirs)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_without_what_it_needs_nothing_is_built_and_it_says_so(theirs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extension = Extension(theirs, "theirs", cdef="cdef_theirs.h", needs="no/such.h", without="built without its C")
    data: dict[str, object] = {"force_include": {}}
    extension.build_into("standard", data)
    assert data == {"force_include": {}}
    assert capfd.readouterr().err == "theirs: built without its C\n"
