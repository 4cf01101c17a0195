"""What `typings/` says of a library is so in the library that is installed."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

TYPINGS = Path(__file__).parents[2] / "typings"


def _functions() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    for path in sorted(TYPINGS.rglob("*.pyi")):
        module = ".".join(path.relative_to(TYPINGS).with_suffix("").parts).removesuffix(".__init__")
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.FunctionDef):
                yield module, "", statement
            elif isinstance(statement, ast.ClassDef):
                for member in statement.body:
                    if isinstance(member, ast.FunctionDef):
                        yield module, statement.name, member


@pytest.mark.parametrize(
    ("module", "owner", "said"),
    [pytest.param(*each, id=".".join([*each[:2], each[2].name])) for each in _functions()],
)
def test_a_stub_says_what_the_library_has(module: str, owner: str, said: ast.FunctionDef) -> None:
    library = pytest.importorskip(module.partition(".")[0])
    found = importlib.import_module(module) if module != library.__name__ else library
    place = getattr(found, owner) if owner else found
    if said.name == "__getattr__":
        return  # what is known only of an instance, or only by its model
    real = getattr(place, said.name)
    if isinstance(real, property):
        return
    parameters = inspect.signature(real).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    arguments = [*said.args.args, *said.args.kwonlyargs]
    for name in {each.arg for each in arguments} - {"self", "cls"}:
        assert name in parameters or takes_any, name


def test_the_stubs_of_transformers_are_of_classes_that_it_has() -> None:
    transformers = pytest.importorskip("transformers")
    stub = ast.parse((TYPINGS / "transformers" / "__init__.pyi").read_text())
    classes = [each for each in stub.body if isinstance(each, ast.ClassDef)]
    for each in classes:
        real = getattr(transformers, each.name)
        for base in each.bases:
            name = ast.unparse(base).rpartition(".")[2]
            assert name in {parent.__name__ for parent in real.__mro__}, (each.name, name)
