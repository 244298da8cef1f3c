"""The engine imports nothing but the standard library, numpy and diptest."""

import ast
import sys
from pathlib import Path

import trimtab.controller.engine

ALLOWED = {"numpy", "diptest"}


def test_the_engine_needs_nothing_but_the_standard_library_numpy_and_diptest() -> None:
    files = list(Path(trimtab.controller.engine.__path__[0]).glob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                top = module.split(".")[0]
                own = module.startswith("trimtab.controller.engine")
                assert own or top in ALLOWED or top in sys.stdlib_module_names, (file, module)
