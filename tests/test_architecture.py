"""The floors of the house: segrew ← reward_models ← policy, with `segrew/cli.py` the one file that knows all three."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["segrew", "reward_models", "policy"]
MATHS = [
    *(f"segrew/{name}.py" for name in ("masking", "cpu", "units", "unit_rules", "response_text")),
    *(f"segrew/{name}.py" for name in ("segmentation", "macro_actions", "aggregation")),
    *("segrew/advantages.py", "segrew/token_statistics.py", "policy/losses.py", "reward_models/losses.py"),
]
SOURCES = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    """Modules that the code imports, in full."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.add(node.module)
    return names


def imported_at_import(tree: ast.Module) -> set[str]:
    """The same, without what only runs inside a function."""
    pruned = ast.parse(ast.unparse(tree))
    for node in ast.walk(pruned):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return imported(pruned)


def floors_of(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} & set(FLOORS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_a_floor_above_its_own(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = str(path.relative_to(ROOT))
    allowed = set(FLOORS[: FLOORS.index(path.relative_to(ROOT).parts[0]) + 1])
    modules = imported_at_import(tree) if name == "segrew/cli.py" else imported(tree)
    assert floors_of(modules) <= allowed


@pytest.mark.parametrize("name", MATHS)
def test_the_maths_imports_torch_and_jaxtyping_only(name: str):
    path = ROOT / name
    maths = {other.removesuffix(".py").replace("/", ".") for other in MATHS}
    for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
        top = module.split(".")[0]
        assert top in {"torch", "jaxtyping"} | sys.stdlib_module_names or module in maths, module


def test_the_checks_see_an_import_that_breaks_the_rules():
    tree = ast.parse("import policy.ppo\ndef f():\n    from reward_models import x\n")
    assert floors_of(imported(tree)) == {"policy", "reward_models"}
    assert floors_of(imported_at_import(tree)) == {"policy"}


def test_import_segrew_is_light():
    code = "import segrew, sys; print(sorted({'transformers', 'torch', 'datasets', 'peft'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
