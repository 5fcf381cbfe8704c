"""What the oldest Triton that PyTorch may bring (3.2, with PyTorch 2.6) cannot compile and no interpreter notices."""

import ast
from pathlib import Path

import pytest

import scanvas.kernels.dispatch as dispatch

FILES = [path for path in Path(dispatch.__file__).parent.rglob("*.py") if "@triton.jit" in path.read_text()]
NEWER = {"kernels/glu/triton_swiglu.py"}  # looks at what tl.range takes, and does without the kernel


def name(path):
    return "/".join(("kernels", *path.relative_to(Path(dispatch.__file__).parent).parts))


def complaints(source):
    """Line and reason of everything inside a compiled function that Triton 3.2 refuses."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if not any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.BoolOp) and len(node.values) > 2:
                yield node.lineno, "a chain of and, or"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.range":
                for keyword in node.keywords:
                    if keyword.arg not in ("num_stages", "loop_unroll_factor"):
                        yield node.lineno, f"tl.range({keyword.arg}=…)"


def test_the_check_finds_what_it_looks_for():
    head = "@triton.jit(do_not_specialize=['n'])\ndef f(a, b, c):\n"
    assert [line for line, _ in complaints(head + "    if a and (b or c):\n        pass")] == []
    assert [line for line, _ in complaints(head + "    if a and b and c:\n        pass")] == [3]
    assert [line for line, _ in complaints(head + "    for i in tl.range(3, flatten=True):\n        pass")] == [3]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_kernels_keep_to_the_oldest_language(path):
    if name(path) in NEWER:
        assert list(complaints(path.read_text())), "this file needs no exception any more"
    else:
        assert list(complaints(path.read_text())) == []
