"""`fabric_core.extension`: a package of somebody else's gets its C compiled as ours do."""

from __future__ import annotations

import importlib.util
import os
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


def test_a_package_gets_its_extension_and_only_when_something_changed(theirs: Path) -> None:
    extension = Extension(theirs, "theirs", cdef="cdef_theirs.h", needs="stdint.h")
    built = extension.compile()
    assert built is not None
    made = built.stat().st_mtime_ns
    assert extension.compile() == built
    assert built.stat().st_mtime_ns == made, "nothing had changed"
    spec = importlib.util.spec_from_file_location("theirs._native", extension.install_in_tree(built))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.lib.theirs_abi() > 0
    (theirs / "src" / "theirs" / "native" / "theirs.c").write_text(SOURCE + "/* another */\n")
    assert extension.compile() not in {None, built}


def test_a_wheel_gets_the_extension_and_its_tag(theirs: Path) -> None:
    extension = Extension(theirs, "theirs", cdef="cdef_theirs.h")
    data: dict[str, object] = {"force_include": {}}
    extension.build_into("standard", data)
    ((source, target),) = data["force_include"].items()  # type: ignore[attr-defined]
    assert os.path.exists(source)
    assert target.startswith("theirs/_native.")
    assert data["pure_python"] is False
    assert "tag" in data or data["infer_tag"] is True
    assert not list((theirs / "src" / "theirs").glob("_native*")), "only an editable one is put beside the sources"


def test_without_what_it_needs_nothing_is_built_and_it_says_so(theirs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extension = Extension(theirs, "theirs", cdef="cdef_theirs.h", needs="no/such.h", without="built without its C")
    data: dict[str, object] = {"force_include": {}}
    extension.build_into("standard", data)
    assert data == {"force_include": {}}
    assert capfd.readouterr().err == "theirs: built without its C\n"
