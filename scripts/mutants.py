"""Measure the power of the tests with mutants: small faults, planted one at a time.

    python -m scripts.mutants plan plan.json --seed 1 --number 300
    python -m scripts.mutants reach plan.json reached.jsonl -- -n 2
    python -m scripts.mutants run plan.json reached.jsonl result.json -- -m "not nightly"

``plan`` draws places in the package: operators, comparisons, numbers, truth values, statements.
``reach`` runs the tests once and notes which test executes which place. ``run`` plants the mutants
one after another, each in a forked process, and runs the tests that reach it, the fastest first,
until one fails. A mutant survives if no test fails within ``--seconds``. A process that does not
end counts as a failure, and a test that also fails without the mutant does not count. Arguments
after ``--`` are those of pytest.

A plan names each place by its function and its text, so that it holds for later versions of the
package. A place that a version has lost is reported as gone. Python processes that a test starts
are mutated, too.
"""

import argparse
import ast
import builtins
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AREAS = (
    "curvature",
    "engine",
    "backend/cpu",
    "layers",
    "autodiff",
    "graph",
    "losses",
    "training",
    "distributed",
)
# Environment variables of the processes under test.
PLAN, ACTIVE, REACHED = "MUTANTS_PLAN", "MUTANTS_ACTIVE", "MUTANTS_REACHED"
NO_MUTANT = -1
# Of address space; a mutant may allocate without end.
_MOST_BYTES = 16 << 30

_PAIRS = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
)
SWAPPED = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
SWAPPED |= {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult}


def faulty_form(node: ast.AST) -> ast.expr | None:
    """Return the faulty form of an expression, or None if it has none."""
    faulty = copy.deepcopy(node)
    match faulty:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            faulty.ops = [SWAPPED[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            faulty.op = SWAPPED[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            faulty = faulty.operand
        case ast.Constant(value=bool()):
            faulty.value = not faulty.value
        case ast.Constant(value=int() | float()):
            faulty.value += 1
        case _:
            return None
    return faulty


class Places(ast.NodeTransformer):
    """Collects the places of a module, and adds a switch at each chosen one."""

    def __init__(self, path: str, chosen: dict[str, int]) -> None:
        self.keys: list[str] = []
        self._path, self._chosen = path, chosen
        self._scope: list[str] = []
        self._in_function = False
        self._seen: Counter[str] = Counter()

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return self._visit_body(node)
        if not self._in_function:
            return self.generic_visit(node)
        if isinstance(node, ast.JoinedStr | ast.match_case | ast.Raise):
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
            return node
        return self._visit_place(node)

    def _visit_body(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        before, self._in_function = self._in_function, isinstance(node, ast.FunctionDef)
        self._scope.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._scope.pop()
        self._in_function = before
        return node

    def _visit_place(self, node: ast.AST) -> ast.AST:
        drops = isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        )
        faulty = faulty_form(node)
        number = self._number("drop" if drops else "swap", node) if drops or faulty else None
        node = self.generic_visit(node)
        if number is None:
            return node
        switch = ast.parse(f"__mutant__({number})", mode="eval").body
        if drops:
            switched: ast.AST = ast.If(ast.UnaryOp(ast.Not(), switch), [node], [])
        else:
            switched = ast.IfExp(switch, faulty, node)
        return ast.fix_missing_locations(ast.copy_location(switched, node))

    def _number(self, kind: str, node: ast.AST) -> int | None:
        text = f"{self._path}:{'.'.join(self._scope)}:{kind}:{ast.unparse(node)}"
        self._seen[text] += 1
        self.keys.append(f"{text}#{self._seen[text]}")
        return self._chosen.get(self.keys[-1])


def list_places(path: str) -> list[str]:
    """Return the keys of all places of a file."""
    places = Places(path, {})
    places.visit(ast.parse((ROOT / path).read_text()))
    return places.keys


def draw_plan(seed: int, number: int) -> list[str]:
    """Draw places, the same number in each area."""
    draw = random.Random(seed)
    plan = []
    for position, area in enumerate(AREAS):
        files = sorted((ROOT / "kfac_engine" / area).rglob("*.py"))
        keys = [key for file in files for key in list_places(file.relative_to(ROOT).as_posix())]
        plan += draw.sample(keys, number // len(AREAS) + (position < number % len(AREAS)))
    return plan


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with switches at its chosen places."""

    def __init__(self, fullname: str, path: str, chosen: dict[str, int]) -> None:
        super().__init__(fullname, path)
        self._chosen = chosen

    def get_code(self, fullname: str):
        path = Path(self.path)
        places = Places(path.relative_to(ROOT).as_posix(), self._chosen)
        tree = places.visit(ast.parse(path.read_text()))
        return compile(tree, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that a plan names."""

    def __init__(self, plan: list[str]) -> None:
        self._chosen = {key: number for number, key in enumerate(plan)}
        self._files = {key.split(":")[0] for key in plan}

    def find_spec(self, fullname, path=None, target=None):
        module = fullname.replace(".", "/")
        for name, folders in ((f"{module}.py", None), (f"{module}/__init__.py", [module])):
            if name in self._files:
                location = str(ROOT / name)
                return importlib.util.spec_from_file_location(
                    fullname,
                    location,
                    loader=Loader(fullname, location, self._chosen),
                    submodule_search_locations=folders and [str(ROOT / module)],
                )
        return None


class Switch:
    """Tells whether a mutant is planted, and notes which test asks."""

    def __init__(self) -> None:
        self.active = int(os.environ.get(ACTIVE, NO_MUTANT))
        self._file = os.environ.get(REACHED)
        self._noted: set[tuple[str, int]] = set()

    def __call__(self, number: int) -> bool:
        if self._file:
            test = os.environ.get("PYTEST_CURRENT_TEST", " ").rpartition(" ")[0]
            if test and (test, number) not in self._noted:
                self._noted.add((test, number))
                with Path(self._file).open("a") as file:
                    file.write(json.dumps([test, number]) + "\n")
        return number == self.active


def install() -> None:
    """Mutate the package in this process. Each process under test calls this at its start."""
    builtins.__mutant__ = Switch()
    sys.meta_path.insert(0, Finder(json.loads(Path(os.environ[PLAN]).read_text())))


def mutated_environment(plan: str, folder: str) -> dict[str, str]:
    """Return environment variables under which each Python process calls ``install``."""
    start = f"import sys; sys.path.append({str(ROOT)!r}); from scripts import mutants"
    (Path(folder) / "sitecustomize.py").write_text(f"{start}; mutants.install()\n")
    python_path = os.pathsep.join([folder, str(ROOT)])
    return {**os.environ, PLAN: str(Path(plan).resolve()), "PYTHONPATH": python_path}


class Durations:
    """A plugin of pytest that writes the outcome and the seconds of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        outcome = {"seconds": self._seconds, "failed": sorted(self._failed)}
        self._path.write_text(json.dumps(outcome))


class Forks:
    """A plugin of pytest that runs the tests of each mutant in a process of its own."""

    def __init__(self, reached: dict[int, set[str]], outcome: dict, budget: float) -> None:
        self._reached, self._seconds, self._budget = reached, outcome["seconds"], budget
        self._unusable = set(outcome["failed"])
        self.result: dict[int, dict] = {}

    def pytest_runtestloop(self, session) -> bool:
        for path in sorted((ROOT / "kfac_engine").rglob("*.py")):  # once for all forks
            if path.stem not in ("__init__", "__main__"):
                with contextlib.suppress(Exception):  # an optional package is absent
                    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        items = {item.nodeid: item for item in session.items}
        for number in self._reached:
            self.result[number] = self._outcome(number, items)
            print(number, self.result[number], file=sys.__stderr__, flush=True)
        return True

    def _outcome(self, number: int, items: dict) -> dict:
        while True:
            names = self._reached[number] & items.keys() - self._unusable
            names = sorted(names, key=lambda name: (self._seconds.get(name, 1.0), name))
            killer = self._fork(number, [items[name] for name in names], self._budget)
            if killer is None or self._fork(NO_MUTANT, [items[killer]], self._budget) is None:
                status = "killed" if killer else "survived"
                return {"status": status, "killer": killer, "tests": len(names)}
            self._unusable.add(killer)

    def _fork(self, number: int, tests: list, budget: float) -> str | None:
        """Return the name of the test that fails, or None."""
        with tempfile.TemporaryFile("w+") as notes:
            child = os.fork()
            if not child:
                os._exit(self._run(number, tests, budget, notes))
            deadline = time.monotonic() + 10 * budget + 60  # beside other programs
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            if not ended[0]:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            notes.seek(0)
            started = notes.read().splitlines()
        return started[-1] if started and ended != (child, 0) else None

    @staticmethod
    def _run(number: int, tests: list, budget: float, notes) -> int:
        from _pytest.runner import runtestprotocol

        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        builtins.__mutant__.active = number
        os.environ[ACTIVE] = str(number)
        end = time.process_time() + budget
        try:
            for test, following in zip(tests, [*tests[1:], None], strict=True):
                if time.process_time() > end:
                    break
                print(test.nodeid, file=notes, flush=True)
                reports = runtestprotocol(test, log=False, nextitem=following)
                if any(report.failed for report in reports):
                    return 1
        except BaseException:  # whatever ends the test kills the mutant
            return 1
        return 0


def read_reached(path: str) -> dict[int, set[str]]:
    """Return the tests that reach each mutant."""
    reached = defaultdict(set)
    for line in Path(path).read_text().splitlines():
        test, number = json.loads(line)
        reached[number].add(test)
    return dict(sorted(reached.items()))


def under_test(arguments: argparse.Namespace) -> int:
    """Run pytest in this process, whose package is mutated."""
    import pytest

    times = Path(arguments.reached).with_suffix(".times.json")
    if arguments.command == "reach":
        return pytest.main([*arguments.pytest, "-q"], plugins=[Durations(times)])
    reached = read_reached(arguments.reached)
    mine = list(reached)[arguments.worker :: arguments.workers]
    outcome = json.loads(times.read_text())
    forks = Forks({number: reached[number] for number in mine}, outcome, arguments.seconds)
    pytest.main([*arguments.pytest, "-q", "-p", "no:xdist", "-p", "no:cacheprovider"], [forks])
    Path(f"{arguments.result}.{arguments.worker}").write_text(json.dumps(forks.result))
    return 0


def reach(arguments: argparse.Namespace) -> int:
    """Run the tests once in a process of their own."""
    Path(arguments.reached).write_text("")
    with tempfile.TemporaryDirectory() as folder:
        variables = mutated_environment(arguments.plan, folder)
        variables[REACHED] = str(Path(arguments.reached).resolve())
        process = [sys.executable, "-m", "scripts.mutants", *sys.argv[1:]]
        return subprocess.run(process, env=variables).returncode


def run(arguments: argparse.Namespace) -> int:
    """Run the mutants in several processes, and write the outcome of each."""
    with tempfile.TemporaryDirectory() as folder:
        variables = mutated_environment(arguments.plan, folder)
        command = [sys.executable, "-m", "scripts.mutants", "--worker"]
        workers = [
            subprocess.Popen([*command, str(worker), *sys.argv[1:]], env=variables)
            for worker in range(arguments.workers)
        ]
        for worker in workers:
            worker.wait()
    plan = json.loads(Path(arguments.plan).read_text())
    files = {key.split(":")[0] for key in plan}
    present = {key for file in files if (ROOT / file).exists() for key in list_places(file)}
    result = {key: {"status": "not reached" if key in present else "gone"} for key in plan}
    for worker in range(arguments.workers):
        part = Path(f"{arguments.result}.{worker}")
        for number, outcome in json.loads(part.read_text()).items():
            result[plan[int(number)]] = outcome
        part.unlink()
    Path(arguments.result).write_text(json.dumps(result, indent=1))
    print(*(f"{n} {status}" for status, n in Counter(r["status"] for r in result.values()).items()))
    return 0


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("plan", "reach", "run"))
    parser.add_argument("plan")
    parser.add_argument("reached", nargs="?")
    parser.add_argument("result", nargs="?")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a processor for each mutant"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:end])
    arguments.pytest = sys.argv[end + 1 :]
    if arguments.command == "plan":
        plan = draw_plan(arguments.seed, arguments.number)
        Path(arguments.plan).write_text(json.dumps(plan, indent=1))
        return 0
    if PLAN in os.environ:
        return under_test(arguments)
    return (reach if arguments.command == "reach" else run)(arguments)


if __name__ == "__main__":
    sys.exit(main())
